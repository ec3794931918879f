// The kernel for sm_80 and later: warp-level mma with the weights as operand A, a ring of cp.async stages, stream-K.
//
//     y tile = ROWS output features x TOKENS.  A stage = K_TILE columns of it: codes, metadata, scales and x, each in a
//     slot of its own (a group's scales are copied again for every stage that needs them: never shared between stages
//     in flight).
//
//     warps       WARPS_N next to each other, 16 * FRAGMENTS rows each, times WARPS_K that split a stage's columns
//                 and add up at the end of a piece
//
// Weights::mma is the one step in which dense (csrc/dense) and 2:4 (csrc/sparse24) differ, next to the metadata.
#pragma once
#include "common/dequant.cuh"
#include "common/epilogue.cuh"
#include "common/layout.h"
#include "common/partition.cuh"
#include "common/ptx.cuh"

namespace sparse_marlin {

// Weights: what is stored and how it is multiplied, see dense/weights.cuh and sparse24/weights.cuh.
template <class Weights_, int TOKENS_, int WARPS_N_, int WARPS_K_, int K_TILE_, int STAGES_, int BLOCKS_PER_SM_>
struct Sm80Config {
  using Weights = Weights_;
  using T = typename Weights::T;
  static constexpr int TOKENS = TOKENS_, WARPS_N = WARPS_N_, WARPS_K = WARPS_K_, K_TILE = K_TILE_, STAGES = STAGES_;
  static constexpr int BLOCKS_PER_SM = BLOCKS_PER_SM_;
  // Per warp: each x fragment is used twice. Four would halve the loads of x, which bind at 64 tokens, but take all
  // registers, and were slower.
  static constexpr int FRAGMENTS = 2;
  static constexpr int ROWS = WARPS_N * FRAGMENTS * layout::FRAGMENT_ROWS;
  static constexpr int PANELS = ROWS / layout::PANEL_ROWS;
  static constexpr int THREADS = WARPS_N * WARPS_K * 32, EPILOGUE_THREADS = WARPS_N * 32;
  static constexpr int N8 = TOKENS / 8;
  // Columns of x that a warp loads at a time: one instruction's, where that is four matrices.
  static constexpr int X_K = Weights::SPARSE || N8 == 1 ? 32 : 16;
  static constexpr int X_ROWS_PER_ROUND = THREADS / (K_TILE / 8);  // rows of x that all threads copy at once
  static constexpr int ACCUMULATORS = FRAGMENTS * N8;              // groups of four per lane

  static constexpr int FRAGMENT_K = layout::fragment_k(Weights::BITS, Weights::SPARSE);
  static constexpr int MMA_K = layout::mma_k(Weights::SPARSE);
  static constexpr int WARP_K = K_TILE / WARPS_K;  // columns of a stage that one warp multiplies
  static constexpr int GROUP = Weights::GROUP;     // columns that take one scale: a group, or a part of one
  static constexpr int STAGE_GROUPS = K_TILE / GROUP;
  static constexpr int SCALE_BYTES = layout::panel_scale_bytes(Weights::ZERO_POINTS);  // of one panel and group

  static_assert(TOKENS % 8 == 0 && ROWS % layout::PANEL_ROWS == 0);
  static_assert(K_TILE % GROUP == 0 && K_TILE % layout::META_K == 0 && WARP_K % FRAGMENT_K == 0);
  static_assert(WARP_K % GROUP == 0 || GROUP % WARP_K == 0);
  static_assert(THREADS % (K_TILE / 8) == 0 && X_ROWS_PER_ROUND % 8 == 0, "a thread copies one column chunk of x");
};

// Dynamic shared memory, the same for host and kernel.
template <class C> struct Sm80Shared {
  static constexpr int CODES =
      C::PANELS * int(layout::panel_code_bytes(C::K_TILE, C::Weights::BITS, C::Weights::SPARSE));
  static constexpr int META = C::Weights::SPARSE ? C::PANELS * int(layout::panel_meta_bytes(C::K_TILE)) : 0;
  static constexpr int SCALES = C::PANELS * C::STAGE_GROUPS * C::SCALE_BYTES;
  static constexpr int X = C::TOKENS * C::K_TILE * 2;
  static constexpr int PARTIAL = (C::WARPS_K - 1) * C::ACCUMULATORS * C::EPILOGUE_THREADS * 16;

  static constexpr int x = 0;  // first, because ldmatrix rows are swizzled within 128 bytes
  static constexpr int codes = x + C::STAGES * X + SHARED_GUARD;
  static constexpr int meta = codes + C::STAGES * CODES + SHARED_GUARD;
  static constexpr int scales = meta + C::STAGES * META + SHARED_GUARD;
  static constexpr int partial = scales + C::STAGES * SCALES + SHARED_GUARD;
  static constexpr int bytes = partial + PARTIAL + SHARED_GUARD;
  PTX_INLINE static void place_guards(uint8_t* smem) {
    for (int end : {codes, meta, scales, partial, bytes}) shared_guard(smem + end - SHARED_GUARD);
  }
};

template <class T> struct Sm80Args {
  const uint8_t *weights, *meta, *scales;
  const float* row_scales;
  const T *x, *bias;
  T* y;
  uint4* workspace;
  int64_t x_stride;
  uint32_t x_round;  // bytes between the rows of x that a thread copies one after the other
  int64_t panel_codes, panel_meta, panel_scales;  // bytes
  int group_step;  // bytes from one group's scales to the next; 0 where a row has one scale
  int runs_log2;   // a group has 2 ** runs_log2 runs of C::GROUP columns
  int M, N, K;
  Partition partition;
};

// Copies BYTES contiguous bytes with all threads of the block. Both addresses are those of the thread's first 16 bytes.
template <class C, int BYTES> PTX_INLINE void copy_run(uint32_t dst, const uint8_t* src) {
  constexpr int PER_ROUND = C::THREADS * 16;
#pragma unroll
  for (int i = 0; i < BYTES; i += PER_ROUND)
    if (BYTES - i >= PER_ROUND || int(threadIdx.x) * 16 < BYTES - i) ptx::cp_async<16>(dst + i, src + i);
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS_PER_SM) gemm_sm80(const Sm80Args<typename C::T> p) {
  using S = Sm80Shared<C>;
  using W = typename C::Weights;
  using T = typename C::T;
  using namespace layout;
  DYNAMIC_SHARED(smem);
  const uint32_t base = ptx::smem_addr(smem);
  if (threadIdx.x == 0) S::place_guards(smem);
  // The rows of x that the last token tile does not fill are zero from here on, and never copied.
  const int tail = p.M - (p.partition.m_tiles - 1) * C::TOKENS;
  for (int i = threadIdx.x; i < C::STAGES * S::X / 16; i += C::THREADS)
    if (i / 8 % C::TOKENS >= tail) ptx::store_shared(base + S::x + i * 16, make_uint4(0, 0, 0, 0));
  __syncthreads();

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int warp_n = warp % C::WARPS_N, warp_k = warp / C::WARPS_N;

  // ---- fetch: one stage, by all threads. The sources are found once for a piece, and move on from stage to stage.
  constexpr int PANEL_CODES = S::CODES / C::PANELS, PANEL_META = S::META / C::PANELS;
  constexpr int PANEL_SCALES = S::SCALES / C::PANELS;
  static_assert(PANEL_SCALES <= C::THREADS * 16, "a thread copies 16 bytes of one group's scales");
  constexpr int X_CHUNKS = C::K_TILE / 8, X_ROWS_PER_ROUND = C::X_ROWS_PER_ROUND;
  const int x_chunk = threadIdx.x % X_CHUNKS, x_row = threadIdx.x / X_CHUNKS;
  const uint32_t x_dst = base + S::x + x_chunk / 8 * (C::TOKENS * 128) + x_row * 128 + ((x_chunk % 8 ^ x_row % 8) << 4);
  const uint32_t thread_dst = base + threadIdx.x * 16;
  const int scale_group = threadIdx.x * 16 / C::SCALE_BYTES, scale_at = threadIdx.x * 16 % C::SCALE_BYTES;
  const uint8_t *codes_src[C::PANELS], *meta_src[C::PANELS], *scales_src[C::PANELS];
  const uint8_t* x_src;
  int x_rows;  // from x_row to the last token
  auto find_sources = [&](const Walk& walk) {
    int n_tile, m_tile;
    p.partition.coordinates(walk.tile, n_tile, m_tile);
    const int m0 = m_tile * C::TOKENS;
    const int last_panel = (p.N - 1) / PANEL_ROWS;
#pragma unroll
    for (int i = 0; i < C::PANELS; ++i) {
      const int panel = min(n_tile * C::PANELS + i, last_panel);  // rows past N are computed and not stored
      codes_src[i] = p.weights + panel * p.panel_codes + int64_t(walk.k) * PANEL_CODES + threadIdx.x * 16;
      meta_src[i] =
          W::SPARSE ? p.meta + panel * p.panel_meta + int64_t(walk.k) * PANEL_META + threadIdx.x * 16 : nullptr;
      scales_src[i] = p.scales + panel * p.panel_scales + scale_at;
    }
    x_src = reinterpret_cast<const uint8_t*>(p.x + (m0 + x_row) * p.x_stride + walk.k * C::K_TILE + x_chunk * 8);
    x_rows = p.M - m0 - x_row;
  };
  auto fetch = [&](int k, int slot) {
#pragma unroll
    for (int i = 0; i < C::PANELS; ++i) {
      copy_run<C, PANEL_CODES>(thread_dst + S::codes + slot * S::CODES + i * PANEL_CODES, codes_src[i]);
      codes_src[i] += PANEL_CODES;
      if constexpr (W::SPARSE) {
        copy_run<C, PANEL_META>(thread_dst + S::meta + slot * S::META + i * PANEL_META, meta_src[i]);
        meta_src[i] += PANEL_META;
      }
      copy_run<C, PANEL_SCALES>(
          thread_dst + S::scales + slot * S::SCALES + i * PANEL_SCALES,
          scales_src[i] + int64_t((k * C::STAGE_GROUPS + scale_group) >> p.runs_log2) * p.group_step);
    }
    const uint32_t x_bytes = k * C::K_TILE + x_chunk * 8 < p.K ? 16 : 0;  // zeros past K, from where nothing is read
#pragma unroll
    for (int i = 0; i < C::TOKENS; i += X_ROWS_PER_ROUND)
      // Tokens past M keep what the slot holds: a token only reaches its own column of y, which is not stored.
      if ((X_ROWS_PER_ROUND <= C::TOKENS || x_row < C::TOKENS) && i < x_rows)
        ptx::cp_async<16>(x_dst + slot * S::X + i * 128, x_src + uint64_t(p.x_round) * (i / X_ROWS_PER_ROUND), x_bytes);
    x_src += C::K_TILE * 2;
  };

  // ---- multiply: one stage, each warp its rows and its share of the columns
  float acc[C::FRAGMENTS][C::N8][4];
  const int first_fragment = warp_n * C::FRAGMENTS, panel = first_fragment / FRAGMENTS_PER_PANEL,
            in_panel = first_fragment % FRAGMENTS_PER_PANEL;
  const int first_k = warp_k * C::WARP_K;
  const uint32_t codes_at = base + S::codes + panel * (S::CODES / C::PANELS) +
                            (first_k / C::FRAGMENT_K * FRAGMENTS_PER_PANEL + in_panel) * FRAGMENT_BYTES +
                            lane * LANE_BYTES;
  const uint32_t meta_at = base + S::meta + panel * (S::META / C::PANELS) +
                           (first_k / META_K * FRAGMENTS_PER_PANEL + in_panel) * META_FRAGMENT_BYTES + lane * 4;
  constexpr int PAIR_BYTES = C::SCALE_BYTES / (PANEL_ROWS / 2);
  const uint32_t scales_at = base + S::scales + (panel * C::STAGE_GROUPS + first_k / C::GROUP) * C::SCALE_BYTES +
                             (in_panel * 8 + g) * PAIR_BYTES;
  // A lane addresses a row of one of the four matrices that ldmatrix loads: of X_K columns by 8 or 16 tokens.
  constexpr int X_K = C::X_K, X_MATRICES = X_K / 8, X_N8 = 4 / X_MATRICES;
  const int x_matrix = lane / 8 % X_MATRICES, x_token = lane / 8 / X_MATRICES * 8 + lane % 8;
  const uint32_t x_at = base + S::x + first_k / 64 * (C::TOKENS * 128) + x_token * 128;
  const uint32_t x_swizzled = uint32_t((first_k % 64 / 8 + x_matrix) ^ (lane % 8)) << 4;
  auto multiply = [&](int slot) {
    constexpr int STEPS = C::WARP_K / C::MMA_K, PER_CHUNK = C::FRAGMENT_K / C::MMA_K;
    const uint32_t codes_slot = codes_at + slot * S::CODES, meta_slot = meta_at + slot * S::META;
    const uint32_t scales_slot = scales_at + slot * S::SCALES, x_slot = x_at + slot * S::X;
    uint32_t codes[2][C::FRAGMENTS][4], w[2][C::FRAGMENTS][4], meta[2][C::FRAGMENTS] = {}, x[2][C::N8 / X_N8][4];
    PairScales scales[C::FRAGMENTS];
    auto load_codes = [&](int chunk, int f) {
      const uint4 v = ptx::load_shared<uint4>(codes_slot + (chunk * FRAGMENTS_PER_PANEL + f) * FRAGMENT_BYTES);
      uint32_t(&words)[4] = codes[chunk % 2][f];
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    };
    // Registers are double buffered: a step's tokens and metadata are loaded, and its weights made, one step ahead.
    auto load_x = [&](int step) {
      const int k = step * C::MMA_K;  // in the warp's share of the stage
      if (k % X_K != 0) return;
#pragma unroll
      for (int j = 0; j < C::N8; j += X_N8)
        ptx::ldmatrix(x[k / X_K % 2][j / X_N8],
                      x_slot + k / 64 * (C::TOKENS * 128) + j * (8 * 128) + (x_swizzled ^ k % 64 * 2));
    };
    auto load_w = [&](int step, int f) {
      const int k = step * C::MMA_K, chunk = step / PER_CHUNK;
      if (k % C::GROUP == 0)
        scales[f] = expand_scales<T, W::BITS>(ptx::load_shared<StoredScales<W::ZERO_POINTS>>(
            scales_slot + k / C::GROUP * C::SCALE_BYTES + f * 8 * PAIR_BYTES));
      if (W::SPARSE && k % META_K == 0)
        meta[k / META_K % 2][f] =
            ptx::load_shared<uint32_t>(meta_slot + (k / META_K * FRAGMENTS_PER_PANEL + f) * META_FRAGMENT_BYTES);
      if (step % PER_CHUNK == 0 && (chunk + 1) * PER_CHUNK < STEPS) load_codes(chunk + 1, f);
      dequantize<T, W::BITS, W::ZERO_POINTS>(w[step % 2][f], codes[chunk % 2][f], step % PER_CHUNK, scales[f]);
    };
#pragma unroll
    for (int f = 0; f < C::FRAGMENTS; ++f) load_codes(0, f);
    load_x(0);
#pragma unroll
    for (int f = 0; f < C::FRAGMENTS; ++f) load_w(0, f);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int k = step * C::MMA_K;
      if (step + 1 < STEPS) load_x(step + 1);
#pragma unroll
      for (int f = 0; f < C::FRAGMENTS; ++f) {
        if (step + 1 < STEPS) load_w(step + 1, f);
#pragma unroll
        for (int j = 0; j < C::N8; ++j)
          W::mma(acc[f][j], w[step % 2][f],
                      x[k / X_K % 2][j / X_N8] + (j % X_N8 * X_MATRICES + k % X_K / C::MMA_K * 2),
                      meta[k / META_K % 2][f], k);
      }
    }
  };

  // ---- finish: one piece of a tile, by the first of the warps that share its columns
  auto finish = [&](int tile, int k, int k_end) {
    if constexpr (C::WARPS_K > 1) {
      auto cell = [&](int from, int q) {
        return base + S::partial +
               (((from - 1) * C::ACCUMULATORS + q) * C::EPILOGUE_THREADS + threadIdx.x % C::EPILOGUE_THREADS) * 16;
      };
#pragma unroll
      for (int q = 0; q < C::ACCUMULATORS; ++q) {
        const float (&v)[4] = acc[q / C::N8][q % C::N8];
        if (warp_k > 0) ptx::store_shared(cell(warp_k, q), make_float4(v[0], v[1], v[2], v[3]));
      }
      __syncthreads();  // the next piece writes these cells after another one, in its main loop
      if (warp_k > 0) return;
#pragma unroll
      for (int q = 0; q < C::ACCUMULATORS; ++q)
#pragma unroll
        for (int from = 1; from < C::WARPS_K; ++from) {
          const float4 v = ptx::load_shared<float4>(cell(from, q));
          float (&a)[4] = acc[q / C::N8][q % C::N8];
          a[0] += v.x, a[1] += v.y, a[2] += v.z, a[3] += v.w;
        }
    }
    int n_tile, m_tile;
    p.partition.coordinates(tile, n_tile, m_tile);
    Piece<T> piece = {p.y, p.M, p.N};
    piece.m = m_tile * C::TOKENS + 2 * t;
    piece.n = n_tile * C::ROWS + first_fragment * FRAGMENT_ROWS + 2 * g;
    piece.slots = p.workspace + threadIdx.x;
    piece.block = int(blockIdx.x);
    piece.first = k == 0 ? piece.block : p.partition.first_owner(tile);
    piece.last = k_end == p.partition.k_tiles;
    RowPair rows[C::FRAGMENTS];
#pragma unroll
    for (int f = 0; f < C::FRAGMENTS; ++f)
      rows[f] = load_row_pair(p.row_scales, p.bias, piece.n + f * FRAGMENT_ROWS, p.N);
    auto& cells = reinterpret_cast<float(&)[C::ACCUMULATORS][4]>(acc);
    if (!piece.last) {
      push_partials<C::N8, C::EPILOGUE_THREADS>(piece, cells);
    } else {
      pull_partials<C::N8, C::EPILOGUE_THREADS>(piece, cells);
      store_cells<C::N8>(piece, rows, cells);
    }
  };

  // ---- main loop: STAGES - 1 stages ahead, across the borders of tiles
  Walk ahead(p.partition, blockIdx.x), now(p.partition, blockIdx.x);
  int fetch_slot = 0, slot = 0;
  find_sources(ahead);
  auto fetch_next = [&] {
    if (!ahead.done()) {
      fetch(ahead.k, fetch_slot);
      if (++ahead.k == ahead.k_end) {
        ahead.next_piece(p.partition);
        if (!ahead.done()) find_sources(ahead);
      }
      if (++fetch_slot == C::STAGES) fetch_slot = 0;
    }
    ptx::cp_async_commit();  // empty groups keep the count that the wait relies on
  };
#pragma unroll 1
  for (int i = 0; i < C::STAGES - 1; ++i) fetch_next();
#pragma unroll 1
  for (; !now.done(); now.next_piece(p.partition)) {
    const int first_k_tile = now.k;
#pragma unroll
    for (int f = 0; f < C::FRAGMENTS; ++f)
#pragma unroll
      for (int j = 0; j < C::N8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[f][j][i] = 0.f;
#pragma unroll 1
    for (; now.k < now.k_end; ++now.k) {
      ptx::cp_async_wait<C::STAGES - 2>();
      __syncthreads();  // the stage is there for all, and all are done with the one before, whose slot is refilled
      fetch_next();
      multiply(slot);
      if (++slot == C::STAGES) slot = 0;
    }
    finish(now.tile, first_k_tile, now.k_end);
  }
  ptx::cp_async_wait<0>();
}

}  // namespace sparse_marlin
