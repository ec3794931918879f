// From a Problem to a launch of gemm_sm90. Host code.
#pragma once
#include "common/gemm_sm90.cuh"
#include "common/launch.cuh"

namespace sparse_marlin {

template <class C> BlockShape shape_sm90() {
  return {C::THREADS,
          Sm90Shared<C>::bytes,
          C::TOKENS,
          C::ROWS,
          C::K_TILE,
          C::BLOCKS_PER_SM,
          int64_t(C::TOKENS) * C::ROWS * 4};
}

template <class C> std::string start_sm90(const Problem& p, const Schedule& schedule, cudaStream_t stream) {
  const Tiles tiles = Tiles::of<C>(p);
  if (tiles.too_many()) return TOO_MANY_TILES;
  Sm90Args<typename C::T> a;
  set_arguments<C>(a, p);
  const int group = p.scheme.group_size;  // columns, or -1
  a.stage_scales = (group == -1 ? 1 : C::K_TILE / group) * C::SCALE_BYTES;
  a.scale_step = group == -1 ? 0 : a.stage_scales;
  a.bulk_stores =
      C::STAGED && schedule.split <= Schedule::WHOLE && p.N % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  // Token tiles that are taken together: their activations stay in the L2 while the weights pass.
  constexpr int64_t L2_SHARE = 9'000'000;
  a.partition = tiles.partition(std::clamp<int64_t>(L2_SHARE / (int64_t(C::TOKENS) * p.K * 2), 1, 4), schedule);

  ptx::TensorMap x_map = {}, y_map = {};
  cudaError_t error = tensor_map_2d(&x_map, p.x, p.K, p.M, p.x_stride * 2, C::TOKENS);
  if (error == cudaSuccess && a.bulk_stores) error = tensor_map_2d(&y_map, p.y, p.N, p.M, int64_t(p.N) * 2, C::TOKENS);
  if (error != cudaSuccess)
    return std::string("x or y cannot be described to bulk copies, or the driver is too old for them: ") +
           cudaGetErrorString(error);
  return outcome(launch_early(a.partition.split, gemm_sm90<C>, a.partition.blocks, C::THREADS, Sm90Shared<C>::bytes,
                              stream, a, x_map, y_map));
}

template <class C> Instance instance_sm90(const char* config) {
  return instance<C>(config, shape_sm90<C>(), start_sm90<C>);
}

}  // namespace sparse_marlin
