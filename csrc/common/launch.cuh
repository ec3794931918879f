// What the launches of both kernels begin with: from a Problem to the arguments that they share. Host code.
#pragma once
#include <algorithm>
#include <bit>
#include <climits>

#include "common/instances.h"
#include "common/layout.h"
#include "common/partition.cuh"

namespace sparse_marlin {

static_assert(ROW_PANEL == layout::PANEL_ROWS && K_PANEL % layout::fragment_k(4, true) == 0);

// How many tiles of config C a problem has.
struct Tiles {
  int64_t n, m, k;

  template <class C> static Tiles of(const Problem& p) {
    static_assert(K_PANEL % C::K_TILE == 0);
    return {ceil_div(p.N, C::ROWS), ceil_div(p.M, C::TOKENS), ceil_div(p.K, C::K_TILE)};
  }
  bool too_many() const { return n * m * k > INT_MAX; }
  Partition partition(int64_t raster, const Schedule& schedule) const {
    return Partition::make(int(n), int(m), int(raster), int(k), schedule);
  }
  static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
};
constexpr const char* TOO_MANY_TILES = "the problem is too large: more than 2^31 work units";

// Fills in what Sm80Args and Sm90Args have in common.
template <class C, class Args> void set_arguments(Args& a, const Problem& p) {
  using T = typename C::T;
  using W = typename C::Weights;
  const int64_t padded_k = Tiles::ceil_div(p.K, K_PANEL) * K_PANEL;
  const int group = p.scheme.group_size;  // columns, or -1
  a.weights = static_cast<const uint8_t*>(p.weights);
  a.meta = static_cast<const uint8_t*>(p.meta);
  a.scales = static_cast<const uint8_t*>(p.scales);
  a.row_scales = p.row_scales;
  a.bias = static_cast<const T*>(p.bias);
  a.y = static_cast<T*>(p.y);
  a.workspace = static_cast<uint4*>(p.workspace);
  a.panel_codes = layout::panel_code_bytes(padded_k, W::BITS, W::SPARSE);
  a.panel_meta = layout::panel_meta_bytes(padded_k);
  a.panel_scales = (group == -1 ? 1 : padded_k / group) * C::SCALE_BYTES;
  a.runs_log2 = group == -1 ? 31 : std::countr_zero(unsigned(group / C::GROUP));  // 31: every run is of group 0
  a.M = p.M, a.N = p.N;
}

inline std::string outcome(cudaError_t error) {
  return error == cudaSuccess ? "" : std::string("launch failed: ") + cudaGetErrorString(error);
}

template <class C>
Instance instance(const char* config, const BlockShape& shape,
                  std::string (*start)(const Problem&, const Schedule&, CUstream_st*)) {
  using W = typename C::Weights;
  const Float16 dtype = ptx::is_bf16<typename C::T> ? Float16::BFLOAT16 : Float16::HALF;
  return {config, {dtype, W::BITS, W::GROUP, W::SPARSE, W::ZERO_POINTS}, shape, start};
}

}  // namespace sparse_marlin
