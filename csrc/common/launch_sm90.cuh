// From a Problem to a launch of gemm_sm90. Host code.
#pragma once
#include <algorithm>
#include <bit>
#include <climits>

#include "common/gemm_sm90.cuh"
#include "common/instances.h"

namespace sparse_marlin {

static_assert(ROW_PANEL == layout::PANEL_ROWS && K_PANEL % layout::fragment_k(4, true) == 0);

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
  static_assert(K_PANEL % C::K_TILE == 0);
  using T = typename C::T;
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t padded_k = ceil_div(p.K, K_PANEL) * K_PANEL;
  const int64_t m_tiles = ceil_div(p.M, C::TOKENS), n_tiles = ceil_div(p.N, C::ROWS),
                k_tiles = ceil_div(p.K, C::K_TILE);
  if (n_tiles * m_tiles * k_tiles > INT_MAX) return "the problem is too large: more than 2^31 work units";
  const int group_bytes = C::SCALE_BYTES;
  const int group = p.scheme.group_size;  // columns, or -1

  Sm90Args<T> a;
  a.weights = static_cast<const uint8_t*>(p.weights);
  a.meta = static_cast<const uint8_t*>(p.meta);
  a.scales = static_cast<const uint8_t*>(p.scales);
  a.row_scales = p.row_scales;
  a.bias = static_cast<const T*>(p.bias);
  a.y = static_cast<T*>(p.y);
  a.workspace = static_cast<uint4*>(p.workspace);
  a.panel_codes = layout::panel_code_bytes(padded_k, C::Weights::BITS, C::Weights::SPARSE);
  a.panel_meta = layout::panel_meta_bytes(padded_k);
  a.panel_scales = (group == -1 ? 1 : padded_k / group) * group_bytes;
  a.stage_scales = (group == -1 ? 1 : C::K_TILE / group) * group_bytes;
  a.scale_step = group == -1 ? 0 : a.stage_scales;
  a.runs_log2 = group == -1 ? 31 : std::countr_zero(unsigned(group / C::GROUP));
  a.M = p.M, a.N = p.N;
  a.bulk_stores =
      C::STAGED && schedule.split <= Schedule::WHOLE && p.N % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  // Token tiles that are taken together: their activations stay in the L2 while the weights pass.
  constexpr int64_t L2_SHARE = 9'000'000;
  const int64_t raster = std::clamp<int64_t>(L2_SHARE / (int64_t(C::TOKENS) * p.K * 2), 1, 4);
  a.partition = Partition::make(int(n_tiles), int(m_tiles), int(raster), int(k_tiles), schedule);

  ptx::TensorMap x_map = {}, y_map = {};
  cudaError_t error = tensor_map_2d(&x_map, p.x, p.K, p.M, p.x_stride * 2, C::TOKENS);
  if (error == cudaSuccess && a.bulk_stores) error = tensor_map_2d(&y_map, p.y, p.N, p.M, int64_t(p.N) * 2, C::TOKENS);
  if (error != cudaSuccess)
    return std::string("x or y cannot be described to bulk copies, or the driver is too old for them: ") +
           cudaGetErrorString(error);
  error = launch_early(a.partition.split, gemm_sm90<C>, a.partition.blocks, C::THREADS, Sm90Shared<C>::bytes, stream, a,
                       x_map, y_map);
  return error == cudaSuccess ? "" : std::string("launch failed: ") + cudaGetErrorString(error);
}

template <class C> Instance instance_sm90(const char* config) {
  using W = typename C::Weights;
  const Float16 dtype = ptx::is_bf16<typename C::T> ? Float16::BFLOAT16 : Float16::HALF;
  return {config, {dtype, W::BITS, W::GROUP, W::SPARSE, W::ZERO_POINTS}, shape_sm90<C>(), start_sm90<C>};
}

}  // namespace sparse_marlin
