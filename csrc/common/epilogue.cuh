// From accumulators to y: partial sums of other blocks, the rows' normalisation, bias, rounding.
#pragma once
#include "common/ptx.cuh"

namespace sparse_marlin {

// ---------------------------------------------------------------- partial sums in the workspace
// A slot that holds no data is filled with a NaN pattern that no arithmetic makes (results are the canonical NaN), so
// each word says by itself whether it has arrived: no flags, no fences. The reader restores the filling.
constexpr uint32_t EMPTY = 0xffffffffu;

PTX_INLINE void push_partial(uint4* slot, const float (&v)[4]) {
  ptx::store_relaxed(
      slot, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
}
PTX_INLINE bool is_missing(const uint4& v) { return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY; }

// Adds the partial sums of `count` blocks before `own`, in order; their slots are `stride` apart, the first at `slot`.
PTX_INLINE void pull_partials(float (&own)[4], uint4* slot, size_t stride, int count) {
  constexpr int IN_FLIGHT = 4;
  float sum[4] = {};
  for (int first = 0; first < count; first += IN_FLIGHT) {
    uint4 v[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i)
      if (first + i < count) v[i] = ptx::load_relaxed(slot + (first + i) * stride);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (first + i >= count) break;
      uint4* p = slot + (first + i) * stride;
      while (is_missing(v[i])) {
        ptx::relax();
        v[i] = ptx::load_relaxed(p);
      }
      ptx::store_relaxed(p, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
      sum[0] += __uint_as_float(v[i].x), sum[1] += __uint_as_float(v[i].y);
      sum[2] += __uint_as_float(v[i].z), sum[3] += __uint_as_float(v[i].w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) own[i] = sum[i] + own[i];
}

// ---------------------------------------------------------------- y
PTX_INLINE float to_float(half v) { return __half2float(v); }
PTX_INLINE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// What a lane's row pair n, n + 1 is multiplied with and what is added to it.
struct RowPair {
  float scale[2], bias[2];
};
template <class T> PTX_INLINE RowPair load_row_pair(const float* row_scales, const T* bias, int n, int N) {
  RowPair r;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    r.scale[i] = row_scales[n + i];
    r.bias[i] = bias && n + i < N ? to_float(bias[n + i]) : 0.f;
  }
  return r;
}

// An accumulator of mma holds rows n, n + 1 (hardware rows g, g + 8) at tokens m, m + 1:
// v = {(n, m), (n, m + 1), (n + 1, m), (n + 1, m + 1)}.
template <class T>
PTX_INLINE void store_tokens(T* y, const float (&v)[4], const RowPair& r, int m, int n, int M, int N) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (m + i >= M || n >= N) continue;
    const uint32_t pair = ptx::pack2<T>(fmaf(v[i], r.scale[0], r.bias[0]), fmaf(v[2 + i], r.scale[1], r.bias[1]));
    T* at = y + size_t(m + i) * N + n;
    if (N % 2 == 0) {
      *reinterpret_cast<uint32_t*>(at) = pair;
    } else {  // rows of y begin at any multiple of 2 bytes
      auto* halves = reinterpret_cast<uint16_t*>(at);
      halves[0] = uint16_t(pair);
      if (n + 1 < N) halves[1] = uint16_t(pair >> 16);
    }
  }
}

}  // namespace sparse_marlin
