// The kernel for sm_90a: bulk copies into a ring that mbarriers count, weights dequantized in registers, wgmma with
// them as operand A and the tokens as N, stream-K.
//
//     y tile = ROWS output features x TOKENS.  A stage = K_TILE columns of it: codes, metadata, scales and x, each in a
//     slot of its own.
//
//     warps       4 * WARPGROUPS consumers, each with 16 rows
//                 producer of weights     starts before the launch before this one has ended
//                 producer of tokens      when it has
//                 writer                  stores finished tiles, where they are staged (see STAGED)
//
// The two producers are apart because one thread takes longer for the waits and copies of a stage than a small stage
// lasts. Weights::wgmma is the one step in which dense (csrc/dense) and 2:4 (csrc/sparse24) differ, next to the
// metadata.
#pragma once
#include "common/dequant.cuh"
#include "common/epilogue.cuh"
#include "common/layout.h"
#include "common/partition.cuh"
#include "common/ptx.cuh"

namespace sparse_marlin {

// Weights: what is stored and how it is multiplied, see dense/weights.cuh and sparse24/weights.cuh.
// STEPS: instructions of a commit group; the registers of the next group are made while one is multiplied.
template <class Weights_, int WARPGROUPS_, int TOKENS_, int K_TILE_, int STEPS_, int BLOCKS_PER_SM_>
struct Sm90Config {
  using Weights = Weights_;
  using T = typename Weights::T;
  static constexpr int WARPGROUPS = WARPGROUPS_, TOKENS = TOKENS_, K_TILE = K_TILE_, STEPS = STEPS_;
  static constexpr int BLOCKS_PER_SM = BLOCKS_PER_SM_;
  static constexpr int ROWS = WARPGROUPS * 64, PANELS = ROWS / layout::PANEL_ROWS;
  static constexpr int CONSUMERS = WARPGROUPS * 128, CONSUMER_WARPS = WARPGROUPS * 4;
  // Finished tiles go through the ring to bulk stores. Stores from the registers take longer than a tile's last stages.
  static constexpr bool STAGED = TOKENS >= 128;
  // The producers' registers go to the consumers. That needs a whole warpgroup of producers.
  static constexpr bool MOVE_REGISTERS = STAGED;
  static constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
  static constexpr int THREADS = CONSUMERS + (MOVE_REGISTERS ? 128 : 64);

  static constexpr int FRAGMENT_K = layout::fragment_k(Weights::BITS, Weights::SPARSE);
  static constexpr int MMA_K = layout::mma_k(Weights::SPARSE);
  static constexpr int GROUP = Weights::GROUP;               // columns that take one scale: a group, or a part of one
  static constexpr int COMMIT_K = STEPS * MMA_K;             // columns of a commit group
  static constexpr int COMMITS = K_TILE / COMMIT_K;          // of a stage
  static constexpr int STEPS_PER_LOAD = FRAGMENT_K / MMA_K;  // steps that a lane's 16 bytes of codes serve
  static constexpr int SCALE_BYTES = layout::panel_scale_bytes(Weights::ZERO_POINTS);  // of one panel and group

  // A stage's bytes, and as many stages as fit.
  static constexpr int PANEL_CODES = int(layout::panel_code_bytes(K_TILE, Weights::BITS, Weights::SPARSE));
  static constexpr int PANEL_META = Weights::SPARSE ? int(layout::panel_meta_bytes(K_TILE)) : 0;
  static constexpr int PANEL_SCALES = K_TILE / GROUP * SCALE_BYTES;
  static constexpr int X_BYTES = TOKENS * K_TILE * 2;
  static constexpr int SHARED_PER_SM = 228 * 1024, RESERVED = 2 * 1024;  // by the system, and barriers with alignment
  static constexpr int STAGES =
      (SHARED_PER_SM / BLOCKS_PER_SM - RESERVED) / (PANELS * (PANEL_CODES + PANEL_META + PANEL_SCALES) + X_BYTES);

  static_assert(TOKENS % 8 == 0 && ROWS % layout::PANEL_ROWS == 0 && STAGES >= 3);
  static_assert(K_TILE % GROUP == 0 && K_TILE % layout::META_K == 0 && K_TILE % COMMIT_K == 0);
  static_assert(COMMITS % 2 == 0, "registers alternate between two commit groups");
  static_assert(STEPS_PER_LOAD % STEPS == 0, "a commit group's codes are loaded at once");
  static_assert(COMMIT_K % GROUP == 0 || GROUP % COMMIT_K == 0);
  static_assert(!Weights::SPARSE || COMMIT_K % layout::META_K == 0);
  static_assert(!STAGED || (WARPGROUPS == 2 && K_TILE == ROWS), "a slot of x holds a tile of y");
  static_assert(!MOVE_REGISTERS || BLOCKS_PER_SM == 1);
};

// Dynamic shared memory, the same for host and kernel.
template <class C> struct Sm90Shared {
  static constexpr int CODES = C::PANELS * C::PANEL_CODES, META = C::PANELS * C::PANEL_META;
  static constexpr int SCALES = C::PANELS * C::PANEL_SCALES, X = C::X_BYTES;

  static constexpr int x = 0;  // first, because the swizzle is one of 1024-byte aligned blocks
  static constexpr int codes = x + C::STAGES * X + SHARED_GUARD;
  static constexpr int meta = codes + C::STAGES * CODES + SHARED_GUARD;
  static constexpr int scales = meta + C::STAGES * META + SHARED_GUARD;
  static constexpr int bytes = scales + C::STAGES * SCALES + SHARED_GUARD;
  PTX_INLINE static void place_guards(uint8_t* smem) {
    for (int end : {codes, meta, scales, bytes}) shared_guard(smem + end - SHARED_GUARD);
  }
};

template <class T> struct Sm90Args {
  const uint8_t *weights, *meta, *scales;
  const float* row_scales;
  const T* bias;
  T* y;
  uint4* workspace;
  int64_t panel_codes, panel_meta, panel_scales;  // bytes
  int stage_scales;                               // bytes of one panel's scales that a stage reads
  int scale_step;  // bytes from one stage's scales to the next; 0 where a row has one scale
  int runs_log2;   // a group has 2 ** runs_log2 runs of C::GROUP columns
  int M, N;
  bool bulk_stores;  // rows of y are aligned for them
  Partition partition;
};

// A position in the ring: slot, and the parity of the phase in which it is filled.
template <int STAGES> struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  PTX_INLINE void advance() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// Descriptor of a K-major tile with 128-byte rows in the 128-byte swizzle; plus 1 is 16 bytes further. As one 64-bit
// number it is moved by one instruction, two words would take three.
PTX_INLINE uint64_t swizzled_tile(uint32_t addr) {
  return uint64_t(1u << 30 | 1024 >> 4) << 32 | 1u << 16 | (addr & 0x3ffff) >> 4;
}

// The end of a piece where the blocks of a cluster hold a tile's pieces. Every block leaves its sums in its own ring,
// which nothing fills any more, and finishes a share of the cells: it adds them in the order of the blocks.
template <class C, class T>
PTX_INLINE void add_up_in_cluster(const Piece<T>& p, const RowPair& rows, const float (&acc)[C::TOKENS / 2],
                                  uint32_t base, int split) {
  constexpr int CELLS = C::TOKENS / 8;
  static_assert(CELLS * C::CONSUMERS * 16 <= C::STAGES * Sm90Shared<C>::X);
  const uint32_t cell = base + Sm90Shared<C>::x + threadIdx.x * 16;
  ptx::bar_sync(1, C::CONSUMERS);  // all have finished reading the ring
#pragma unroll
  for (int c = 0; c < CELLS; ++c)
    if (p.m + c * 8 < p.M)
      ptx::store_shared(cell + c * (C::CONSUMERS * 16),
                        make_float4(acc[4 * c], acc[4 * c + 1], acc[4 * c + 2], acc[4 * c + 3]));
  ptx::cluster_sync();
#pragma unroll 1
  for (int c = p.block % split; c < CELLS && p.m + c * 8 < p.M; c += split) {
    float4 v[Schedule::MAX_CLUSTER];  // loaded at once, added in the order of the blocks
#pragma unroll
    for (int rank = 0; rank < Schedule::MAX_CLUSTER; ++rank)
      if (rank < split) v[rank] = ptx::load_cluster(cell + c * (C::CONSUMERS * 16), rank);
    float sum[4] = {};
#pragma unroll
    for (int rank = 0; rank < Schedule::MAX_CLUSTER; ++rank)
      if (rank < split) sum[0] += v[rank].x, sum[1] += v[rank].y, sum[2] += v[rank].z, sum[3] += v[rank].w;
    store_tokens(p.y, sum, rows, p.m + c * 8, p.n, p.M, p.N);
  }
  ptx::cluster_sync();  // before a block ends, the others have read its shared memory
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS_PER_SM)
    gemm_sm90(const __grid_constant__ Sm90Args<typename C::T> p, const __grid_constant__ ptx::TensorMap x_map,
              const __grid_constant__ ptx::TensorMap y_map) {
#if PTX_SM90A
  using S = Sm90Shared<C>;
  using W = typename C::Weights;
  using T = typename C::T;
  using namespace layout;
  using Ring = RingPosition<C::STAGES>;
  DYNAMIC_SHARED(smem);
  constexpr int WRITTEN = C::STAGED ? C::WARPGROUPS : 0;  // parts of a tile that are handed to the writer
  STATIC_SHARED(uint64_t, bars, (2 + WRITTEN) * C::STAGES);
  const uint32_t base = ptx::uniform(ptx::smem_addr(smem)), full = ptx::uniform(ptx::smem_addr(bars));
  const uint32_t empty = full + 8 * C::STAGES;
  // For each slot, since the consumers may end another tile before the writer has taken one.
  const auto staged = [&](int slot, int warpgroup) { return empty + 8 * (C::STAGES * (1 + warpgroup) + slot); };
  if (threadIdx.x == 0) {
    S::place_guards(smem);
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbar_init(full + 8 * s, 2);  // the two producers
      ptx::mbar_init(empty + 8 * s, C::CONSUMER_WARPS);
      for (int w = 0; w < WRITTEN; ++w) ptx::mbar_init(staged(s, w), 4);
    }
    ptx::mbar_init_fence();
  }
  ptx::pdl_launch();  // the next launch may request its weights; it waits for this one's end before it does more
  __syncthreads();

  const int warp = ptx::uniform(int(threadIdx.x / 32)), lane = threadIdx.x % 32;
  if (warp >= C::CONSUMER_WARPS) {
    if constexpr (C::MOVE_REGISTERS) ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    // Goes through the ring: load(n_tile, m_tile, k, slot, bar) brings `bytes` bytes of a stage.
    const auto produce = [&](uint32_t bytes, auto load) {
      Ring ring;
      for (Walk walk(p.partition, blockIdx.x); !walk.done(); walk.next_piece(p.partition)) {
        int n_tile, m_tile;
        p.partition.coordinates(walk.tile, n_tile, m_tile);
#pragma unroll 1
        for (; walk.k < walk.k_end; ++walk.k, ring.advance()) {
          const uint32_t bar = full + 8 * ring.slot;
          ptx::mbar_wait(empty + 8 * ring.slot, ring.parity ^ 1);
          ptx::mbar_arrive_expect(bar, bytes);
          load(n_tile, m_tile, walk.k, ring.slot, bar);
        }
      }
    };
    if (warp == C::CONSUMER_WARPS && lane == 0) {
      // ---- producer of weights
      const uint64_t policy = p.partition.m_tiles == 1 ? ptx::l2_evict_first() : ptx::l2_evict_normal();
      const int last_panel = (p.N - 1) / PANEL_ROWS;
      const uint32_t stage_bytes = S::CODES + S::META + C::PANELS * p.stage_scales;
      produce(stage_bytes, [&](int n_tile, int, int k, int slot, uint32_t bar) {
#pragma unroll
        for (int i = 0; i < C::PANELS; ++i) {
          const int panel = min(n_tile * C::PANELS + i, last_panel);  // rows past N are computed and not stored
          ptx::bulk_load(base + S::codes + slot * S::CODES + i * C::PANEL_CODES,
                         p.weights + panel * p.panel_codes + int64_t(k) * C::PANEL_CODES, C::PANEL_CODES, bar, policy);
          if constexpr (W::SPARSE)
            ptx::bulk_load(base + S::meta + slot * S::META + i * C::PANEL_META,
                           p.meta + panel * p.panel_meta + int64_t(k) * C::PANEL_META, C::PANEL_META, bar, policy);
          ptx::bulk_load(base + S::scales + slot * S::SCALES + i * C::PANEL_SCALES,
                         p.scales + panel * p.panel_scales + int64_t(k) * p.scale_step, p.stage_scales, bar, policy);
        }
      });
    } else if (warp == C::CONSUMER_WARPS + 1 && lane == 0) {
      // ---- producer of tokens
      ptx::prefetch_tensor_map(&x_map);
      ptx::pdl_wait();
      produce(S::X, [&](int, int m_tile, int k, int slot, uint32_t bar) {
#pragma unroll
        for (int i = 0; i < C::K_TILE / 64; ++i)  // zeros past K and past M
          ptx::tensor_load_2d(base + S::x + slot * S::X + i * (C::TOKENS * 128), &x_map, k * C::K_TILE + i * 64,
                              m_tile * C::TOKENS, bar);
      });
    } else if (C::STAGED && warp == C::CONSUMER_WARPS + 2 && p.bulk_stores) {
      // ---- writer: the consumers leave a finished tile in the x slot of its last stage, a half per warpgroup
      Ring ring;
      uint32_t parities = 0;  // a bit for each slot
      for (Walk walk(p.partition, blockIdx.x); !walk.done(); walk.next_piece(p.partition)) {
        int n_tile, m_tile, slot = 0;
        p.partition.coordinates(walk.tile, n_tile, m_tile);
        const bool last = walk.k_end == p.partition.k_tiles;
#pragma unroll 1
        for (; walk.k < walk.k_end; ++walk.k, ring.advance()) slot = ring.slot;
        if (!last) continue;
        if (lane == 0) {
#pragma unroll
          for (int i = 0; i < C::WARPGROUPS; ++i) {
            ptx::mbar_wait(staged(slot, i), parities >> slot & 1);
            if (n_tile * C::ROWS + i * 64 < p.N)
              ptx::tensor_store_2d(&y_map, n_tile * C::ROWS + i * 64, m_tile * C::TOKENS,
                                   base + S::x + slot * S::X + i * (C::TOKENS * 128));
          }
          ptx::bulk_commit();
          ptx::bulk_wait_read<0>();
        }
        parities ^= 1u << slot;
        __syncwarp();
        if (lane < C::CONSUMER_WARPS) ptx::mbar_arrive(empty + 8 * slot);
      }
      if (lane == 0) ptx::bulk_wait<0>();
    }
    return;
  }

  // ---------------------------------------------------------------- consumers
  if constexpr (C::MOVE_REGISTERS) ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
  const int warpgroup = warp / 4, g = lane / 4, t = lane % 4;
  const int panel = warpgroup / 2, in_panel = warp % FRAGMENTS_PER_PANEL;  // of the warp's fragment of 16 rows
  constexpr int PAIR_BYTES = C::SCALE_BYTES / (PANEL_ROWS / 2);
  const uint32_t codes_at = base + S::codes + panel * C::PANEL_CODES + in_panel * FRAGMENT_BYTES + lane * LANE_BYTES;
  const uint32_t meta_at = base + S::meta + panel * C::PANEL_META + in_panel * META_FRAGMENT_BYTES + lane * 4;
  const uint32_t scales_at = base + S::scales + panel * C::PANEL_SCALES + (in_panel * 8 + g) * PAIR_BYTES;

  constexpr int RUNS = C::COMMIT_K > C::GROUP ? C::COMMIT_K / C::GROUP : 1;  // of a commit group, one scale each
  constexpr int META_WORDS = W::SPARSE ? C::COMMIT_K / META_K : 1;
  float acc[C::TOKENS / 2];
  uint32_t w[2][C::STEPS][4], codes[4], meta[2][META_WORDS] = {};
  StoredScales<W::ZERO_POINTS> stored[RUNS];
  PairScales scales;

  // The steps of the pipeline, for commit group `q` of the stage in `slot`.
  auto load_codes = [&](int slot, int q) {
    const int k = q * C::COMMIT_K;
    if (k % C::FRAGMENT_K == 0) {
      const uint4 v = ptx::load_shared<uint4>(codes_at + slot * S::CODES +
                                              k / C::FRAGMENT_K * (FRAGMENTS_PER_PANEL * FRAGMENT_BYTES));
      codes[0] = v.x, codes[1] = v.y, codes[2] = v.z, codes[3] = v.w;
    }
    if (k % C::GROUP == 0)
#pragma unroll
      for (int r = 0; r < RUNS; ++r)
        stored[r] = ptx::load_shared<StoredScales<W::ZERO_POINTS>>(
            scales_at + slot * S::SCALES + (uint32_t(k / C::GROUP + r) >> p.runs_log2) * C::SCALE_BYTES);
  };
  auto load_meta = [&](int slot, int q) {
    if constexpr (W::SPARSE)
#pragma unroll
      for (int i = 0; i < META_WORDS; ++i)
        meta[q % 2][i] = ptx::load_shared<uint32_t>(meta_at + slot * S::META +
                                                    (q * META_WORDS + i) * (FRAGMENTS_PER_PANEL * META_FRAGMENT_BYTES));
  };
  auto make_weights = [&](int q) {
#pragma unroll
    for (int i = 0; i < C::STEPS; ++i) {
      const int k = q * C::COMMIT_K + i * C::MMA_K;
      if (k % C::GROUP == 0) scales = expand_scales<T, W::BITS>(stored[k % C::COMMIT_K / C::GROUP]);
      dequantize<T, W::BITS, W::ZERO_POINTS>(w[q % 2][i], codes, k % C::FRAGMENT_K / C::MMA_K, scales);
    }
  };
  auto multiply = [&](uint64_t x_tile, int q) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::STEPS; ++i) {
      const int k = q * C::COMMIT_K + i * C::MMA_K;
      W::wgmma(acc, w[q % 2][i], x_tile + (k / 64 * (C::TOKENS * 128) + k % 64 * 2) / 16,
               meta[q % 2][i * C::MMA_K / META_K % META_WORDS], k);
    }
    ptx::wgmma_commit();
  };
  auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(empty + 8 * slot);
  };

  // Weights alone may be read before: x, the bias, y and the workspace may belong to the launch before this one.
  ptx::pdl_wait();
  Ring ring;
#pragma unroll 1
  for (Walk walk(p.partition, blockIdx.x); !walk.done(); walk.next_piece(p.partition)) {
    // What the end of the piece needs is looked up while the first stage is on its way.
    int n_tile, m_tile;
    p.partition.coordinates(walk.tile, n_tile, m_tile);
    Piece<T> piece = {p.y, p.M, p.N};
    piece.m = m_tile * C::TOKENS + 2 * t;
    piece.n = n_tile * C::ROWS + warp * FRAGMENT_ROWS + 2 * g;
    piece.slots = p.workspace + threadIdx.x;
    piece.block = int(blockIdx.x);
    piece.first = walk.k == 0 ? piece.block : p.partition.first_owner(walk.tile);
    piece.last = walk.k_end == p.partition.k_tiles;
    const RowPair rows[1] = {load_row_pair(p.row_scales, p.bias, piece.n, p.N)};
#pragma unroll
    for (int i = 0; i < C::TOKENS / 2; ++i) acc[i] = 0.f;
    // Registers run ahead of the tensor cores by two groups: while group q is multiplied, the weights of q + 1 are made
    // and the codes of q + 2 loaded. wgmma reads metadata from its registers itself, so these are loaded when the group
    // before has retired.
    ptx::mbar_wait(full + 8 * ring.slot, ring.parity);
    load_codes(ring.slot, 0);
    load_meta(ring.slot, 0);
    make_weights(0);
    load_codes(ring.slot, 1);
    int before = -1;  // slot that the tensor cores may still read
    const int stages = ptx::uniform(walk.k_end - walk.k);
    walk.k = walk.k_end;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      const uint64_t x_tile = swizzled_tile(base + S::x + ring.slot * S::X);
      const bool more = stage + 1 < stages;
      Ring next = ring;
      next.advance();
#pragma unroll
      for (int q = 0; q < C::COMMITS; ++q) {
        multiply(x_tile, q);
        ptx::wgmma_wait<1>();
        if (q == 0 && before >= 0) release(before);
        if (q + 1 < C::COMMITS) {
          load_meta(ring.slot, q + 1);
          make_weights(q + 1);
        } else if (more) {
          load_meta(next.slot, 0);
          make_weights(0);
        }
        if (q + 2 < C::COMMITS) {
          load_codes(ring.slot, q + 2);
        } else if (more) {
          if (q + 2 == C::COMMITS) ptx::mbar_wait(full + 8 * next.slot, next.parity);
          load_codes(next.slot, q + 2 - C::COMMITS);
        }
      }
      before = ring.slot;
      ring = next;
    }
    ptx::wgmma_wait<0>();
    ptx::pin(acc);

    if (p.partition.split > 1) {
      add_up_in_cluster<C>(piece, rows[0], acc, base, p.partition.split);
      return;
    }
    auto& cells = reinterpret_cast<float (&)[C::TOKENS / 8][4]>(acc);
    const bool to_writer = C::STAGED && p.bulk_stores && piece.last;
    if (!to_writer) release(before);
    if (!piece.last) {
      push_partials<C::TOKENS / 8, C::CONSUMERS>(piece, cells);
      continue;
    }
    pull_partials<C::TOKENS / 8, C::CONSUMERS>(piece, cells);
    if (!to_writer) {
      store_cells<C::TOKENS / 8>(piece, rows, cells);
    } else {
      ptx::bar_sync(1, C::CONSUMERS);  // all have finished reading the slot
      // A token's 64 features are a row of 128 bytes, in which 16-byte chunks are swizzled. Cells are 8 tokens apart.
      const uint32_t row = base + S::x + before * S::X + warpgroup * (C::TOKENS * 128) + 2 * t * 128 + g % 4 * 4;
      const int chunk = warp % 4 * 2 + g / 4;
      const uint32_t at[2] = {row + ((chunk ^ 2 * t) << 4), row + 128 + ((chunk ^ (2 * t + 1)) << 4)};
#pragma unroll
      for (int j = 0; j < C::TOKENS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          ptx::store_shared(at[i] + j * 1024, ptx::pack2<T>(fmaf(cells[j][i], rows[0].scale.x, rows[0].bias[0]),
                                                            fmaf(cells[j][2 + i], rows[0].scale.y, rows[0].bias[1])));
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) ptx::mbar_arrive(staged(before, warpgroup));
    }
  }
#else
  __trap();  // compiled for another architecture: y must not stay what it was
#endif
}

}  // namespace sparse_marlin
