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

// ---------------------------------------------------------------- y
PTX_INLINE float to_float(half v) { return __half2float(v); }
PTX_INLINE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

// What a lane's row pair n, n + 1 is multiplied with and what is added to it. n is even; row_scales are padded.
struct RowPair {
  float2 scale;
  float bias[2];
};
template <class T> PTX_INLINE RowPair load_row_pair(const float* row_scales, const T* bias, int n, int N) {
  RowPair r = {make_float2(1.f, 1.f), {0.f, 0.f}};
  if (n >= N) return r;
  r.scale = *reinterpret_cast<const float2*>(row_scales + n);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (bias && n + i < N) r.bias[i] = to_float(bias[n + i]);
  return r;
}

// An accumulator of mma holds rows n, n + 1 (hardware rows g, g + 8) at tokens m, m + 1:
// v = {(n, m), (n, m + 1), (n + 1, m), (n + 1, m + 1)}.
template <class T>
PTX_INLINE void store_tokens(T* y, const float (&v)[4], const RowPair& r, int m, int n, int M, int N) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (m + i >= M || n >= N) continue;
    const uint32_t pair = ptx::pack2<T>(fmaf(v[i], r.scale.x, r.bias[0]), fmaf(v[2 + i], r.scale.y, r.bias[1]));
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

// ---------------------------------------------------------------- a piece of a tile
// What a thread's accumulators are: CELLS of four, fragment by fragment N8 each. Cell (f, j) is rows n + 16 f and
// n + 16 f + 1 at tokens m + 8 j and m + 8 j + 1. In the workspace a block has CELLS x THREADS of uint4.
template <class T> struct Piece {
  T* y;
  int M, N, m, n;
  uint4* slots;      // this thread's first cell, in block 0's slot
  int block, first;  // this block, and the first that holds a part of the tile
  bool last;         // this block finishes the tile
};

template <int N8, int THREADS, int CELLS, class T>
PTX_INLINE void push_partials(const Piece<T>& p, const float (&acc)[CELLS][4]) {
  uint4* const slot = p.slots + size_t(p.block) * (CELLS * THREADS);
#pragma unroll
  for (int c = 0; c < CELLS; ++c)
    if (p.m + c % N8 * 8 < p.M) push_partial(slot + c * THREADS, acc[c]);  // padding tokens are never handed over
}

// Adds what the blocks before this one have of its cells, in their order. Enough loads are in flight to hide their
// latency: of several cells, and of several blocks where the cells are few.
template <int N8, int THREADS, int CELLS, class T>
PTX_INLINE void pull_partials(const Piece<T>& p, float (&acc)[CELLS][4]) {
  // Of 8 to 10 cells: a tile seldom has more than five blocks before its last, and more cells would not fit registers.
  constexpr int BATCH = CELLS < 8 ? CELLS : 8, BLOCKS = CELLS == 1 ? 8 : CELLS < 8 ? 10 / CELLS : 1;
  static_assert(CELLS % BATCH == 0);
  constexpr size_t SLOT = CELLS * THREADS;
#pragma unroll
  for (int first_cell = 0; first_cell < CELLS; first_cell += BATCH)
#pragma unroll 1
    for (int first = p.first; first < p.block; first += BLOCKS) {
      uint4* const slot = p.slots + first * SLOT + first_cell * THREADS;
      auto is_there = [&](int b, int c) { return first + b < p.block && p.m + (first_cell + c) % N8 * 8 < p.M; };
      uint4 v[BLOCKS][BATCH];
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int c = 0; c < BATCH; ++c) v[b][c] = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
      for (bool waiting = true; waiting;) {  // all that is missing is asked for at once
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
          for (int c = 0; c < BATCH; ++c)
            if (is_there(b, c) && is_missing(v[b][c])) v[b][c] = ptx::load_relaxed(slot + b * SLOT + c * THREADS);
        waiting = false;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
          for (int c = 0; c < BATCH; ++c) waiting |= is_there(b, c) && is_missing(v[b][c]);
        if (waiting) ptx::relax();
      }
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int c = 0; c < BATCH; ++c) {
          if (!is_there(b, c)) continue;
          ptx::store_relaxed(slot + b * SLOT + c * THREADS, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
          float (&sum)[4] = acc[first_cell + c];
          sum[0] += __uint_as_float(v[b][c].x), sum[1] += __uint_as_float(v[b][c].y);
          sum[2] += __uint_as_float(v[b][c].z), sum[3] += __uint_as_float(v[b][c].w);
        }
    }
}

template <int N8, int CELLS, class T>
PTX_INLINE void store_cells(const Piece<T>& p, const RowPair (&rows)[CELLS / N8], const float (&acc)[CELLS][4]) {
#pragma unroll
  for (int f = 0; f < CELLS / N8; ++f)
#pragma unroll
    for (int j = 0; j < N8; ++j) store_tokens(p.y, acc[f * N8 + j], rows[f], p.m + j * 8, p.n + f * 16, p.M, p.N);
}

}  // namespace sparse_marlin
