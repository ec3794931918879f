// From a Problem to a launch of gemm_sm80. Host code.
#pragma once
#include <algorithm>
#include <bit>
#include <climits>

#include "common/gemm_sm80.cuh"
#include "common/instances.h"

namespace sparse_marlin {

static_assert(ROW_PANEL == layout::PANEL_ROWS && K_PANEL % layout::fragment_k(4, true) == 0);

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
  static_assert(K_PANEL % C::K_TILE == 0);
  using T = typename C::T;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t padded_k = ceil_div(p.K, K_PANEL) * K_PANEL;
  const int64_t m_tiles = ceil_div(p.M, C::TOKENS), n_tiles = ceil_div(p.N, C::ROWS),
                k_tiles = ceil_div(p.K, C::K_TILE);
  if (schedule.split > Schedule::WHOLE) return "clusters of blocks need a kernel for compute capability 9.0";
  if (n_tiles * m_tiles * k_tiles > INT_MAX) return "the problem is too large: more than 2^31 work units";
  if (p.x_stride > UINT32_MAX / (C::X_ROWS_PER_ROUND * 2)) return "the rows of x are too far apart: copy x";
  const int group_bytes = layout::panel_scale_bytes(C::Weights::ZERO_POINTS);
  const int group = p.scheme.group_size;  // columns, or -1

  Sm80Args<T> a;
  a.weights = static_cast<const uint8_t*>(p.weights);
  a.meta = static_cast<const uint8_t*>(p.meta);
  a.scales = static_cast<const uint8_t*>(p.scales);
  a.row_scales = p.row_scales;
  a.x = static_cast<const T*>(p.x);
  a.bias = static_cast<const T*>(p.bias);
  a.y = static_cast<T*>(p.y);
  a.workspace = static_cast<uint4*>(p.workspace);
  a.x_stride = p.x_stride;
  a.x_round = uint32_t(p.x_stride * C::X_ROWS_PER_ROUND * 2);
  a.panel_codes = layout::panel_code_bytes(padded_k, C::Weights::BITS, C::Weights::SPARSE);
  a.panel_meta = layout::panel_meta_bytes(padded_k);
  a.panel_scales = (group == -1 ? 1 : padded_k / group) * group_bytes;
  a.group_step = group == -1 ? 0 : group_bytes;
  a.runs_log2 = group == -1 ? 0 : std::countr_zero(unsigned(group / C::GROUP));
  a.M = p.M, a.N = p.N, a.K = p.K;
  a.partition = Partition::make(int(n_tiles), int(m_tiles), int(m_tiles), int(k_tiles), schedule);
  const cudaError_t error = launch(gemm_sm80<C>, a.partition.blocks, C::THREADS, Sm80Shared<C>::bytes, stream, a);
  return error == cudaSuccess ? "" : std::string("launch failed: ") + cudaGetErrorString(error);
}

template <class C> Instance instance_sm80(const char* config) {
  using W = typename C::Weights;
  const Float16 dtype = ptx::is_bf16<typename C::T> ? Float16::BFLOAT16 : Float16::HALF;
  return {config, {dtype, W::BITS, W::GROUP, W::SPARSE, W::ZERO_POINTS}, shape_sm80<C>(), start_sm80<C>};
}

}  // namespace sparse_marlin
