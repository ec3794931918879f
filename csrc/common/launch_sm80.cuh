// From a Problem to a launch of gemm_sm80. Host code.
#pragma once
#include "common/gemm_sm80.cuh"
#include "common/launch.cuh"

namespace sparse_marlin {

template <class C> BlockShape shape_sm80() {
  return {C::THREADS,
          Sm80Shared<C>::bytes,
          C::TOKENS,
          C::ROWS,
          C::K_TILE,
          C::BLOCKS_PER_SM,
          int64_t(C::ACCUMULATORS) * C::EPILOGUE_THREADS * 16};
}

template <class C> std::string start_sm80(const Problem& p, const Schedule& schedule, cudaStream_t stream) {
  const Tiles tiles = Tiles::of<C>(p);
  if (schedule.split > Schedule::WHOLE) return "clusters of blocks need a kernel for compute capability 9.0";
  if (tiles.too_many()) return TOO_MANY_TILES;
  if (p.x_stride > UINT32_MAX / (C::X_ROWS_PER_ROUND * 2)) return "the rows of x are too far apart: copy x";
  Sm80Args<typename C::T> a;
  set_arguments<C>(a, p);
  a.x = static_cast<const typename C::T*>(p.x);
  a.x_stride = p.x_stride;
  a.x_round = uint32_t(p.x_stride * C::X_ROWS_PER_ROUND * 2);
  a.group_step = p.scheme.group_size == -1 ? 0 : C::SCALE_BYTES;
  a.K = p.K;
  a.partition = tiles.partition(tiles.m, schedule);
  return outcome(launch(gemm_sm80<C>, a.partition.blocks, C::THREADS, Sm80Shared<C>::bytes, stream, a));
}

template <class C> Instance instance_sm80(const char* config) {
  return instance<C>(config, shape_sm80<C>(), start_sm80<C>);
}

}  // namespace sparse_marlin
