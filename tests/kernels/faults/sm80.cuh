// For sm_80: cp.async ring, ldmatrix, dequantization in registers, mma.sp, split K in a fixed order.
#pragma once
#include "faults/w4.cuh"

enum class Sm80Fault {
  NONE,
  NO_WAIT,         // reads a stage whose copies are in flight
  WAIT_ONE_SHORT,  // waits for one group too few
  SCALE_SLOT,      // two K tiles share a scale slot while both are in flight
  SCALE_RACE,      // the slot is refilled while other warps still read it
  NO_SYNC,         // no barrier between the wait and the reads
  REFILL_EARLY,    // a stage is refilled while other warps still read it
  SHARED_OVERRUN,
  STATIC_OVERRUN,
  GLOBAL_OVERRUN,  // reads token rows beyond M
  SELECTOR,        // both k32 steps use the first step's metadata
  SKIP_TICKET,     // a block adds to partial sums that are not there yet
};

template <int WARPS_, int BLOCK_M_, int STAGES_> struct Sm80Config {
  static constexpr int WARPS = WARPS_, BLOCK_M = BLOCK_M_, STAGES = STAGES_;
  static constexpr int THREADS = WARPS * 32, BLOCK_N = WARPS * 16, BLOCK_K = FRAGMENT_K;
  static_assert(BLOCK_M % 8 == 0);
};

// Dynamic shared memory, the same for host and device. Guards are empty on the device.
template <class C, Sm80Fault FAULT> struct Sm80Layout {
  static constexpr bool FEW_SLOTS = FAULT == Sm80Fault::SCALE_SLOT || FAULT == Sm80Fault::SCALE_RACE;
  static constexpr int CODES = C::WARPS * FRAGMENT_CODES, META = C::WARPS * FRAGMENT_META;
  static constexpr int X = C::BLOCK_M * C::BLOCK_K * 2, SCALES = C::BLOCK_N * 2;
  // The tile in use, the STAGES - 1 ahead of it, and one more group because a group may straddle both ends.
  static constexpr int SCALE_SLOTS = C::STAGES / 2 + (FEW_SLOTS ? 0 : 1);
  static constexpr int codes = 0;
  static constexpr int meta = codes + C::STAGES * CODES + SHARED_GUARD;
  static constexpr int x = meta + C::STAGES * META + SHARED_GUARD;
  static constexpr int scales = x + C::STAGES * X + SHARED_GUARD;
  static constexpr int bytes = scales + SCALE_SLOTS * SCALES + SHARED_GUARD;
  static __device__ void place_guards(uint8_t* smem) {
    for (int end : {meta, x, scales, bytes}) shared_guard(smem + end - SHARED_GUARD);
  }
};

template <class C, Sm80Fault FAULT = Sm80Fault::NONE>
__global__ void __launch_bounds__(C::THREADS) w4_sm80(W4Args p) {
  using L = Sm80Layout<C, FAULT>;
  using F = Sm80Fault;
  DYNAMIC_SHARED(smem);
  STATIC_SHARED(int, is_last, 1);
  if (threadIdx.x == 0) L::place_guards(smem);
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n0 = blockIdx.x * C::BLOCK_N, m0 = blockIdx.y * C::BLOCK_M, k_tiles = p.K / C::BLOCK_K;
  const int begin = k_tiles * blockIdx.z / gridDim.z, end = k_tiles * (blockIdx.z + 1) / gridDim.z;
  const uint32_t base = ptx::smem_addr(smem);

  auto fetch = [&](int tile) {
    const int slot = (tile - begin) % C::STAGES;
    const size_t fragment = size_t(n0 / 16) * k_tiles + size_t(tile) * C::WARPS;  // [N / BLOCK_N][K / 64][WARPS]
    for (int i = threadIdx.x; i < L::CODES / 16; i += C::THREADS)
      ptx::cp_async<16>(base + L::codes + slot * L::CODES + i * 16, p.codes + fragment * FRAGMENT_CODES + i * 16);
    for (int i = threadIdx.x; i < L::META / 16; i += C::THREADS)
      ptx::cp_async<16>(base + L::meta + slot * L::META + i * 16, p.meta + fragment * FRAGMENT_META + i * 16);
    for (int i = threadIdx.x; i < L::X / 16; i += C::THREADS) {
      const int row = i / 8, chunk = i % 8;
      const bool inside = FAULT == F::GLOBAL_OVERRUN || m0 + row < p.M;
      const half* src = p.x + (inside ? size_t(m0 + row) * p.K + tile * C::BLOCK_K + chunk * 8 : 0);
      ptx::cp_async<16>(base + L::x + slot * L::X + row * 128 + ((chunk ^ (row & 7)) << 4), src, inside ? 16 : 0);
    }
    constexpr int TILES_PER_GROUP = GROUP / C::BLOCK_K;
    if (tile == begin || tile % TILES_PER_GROUP == 0) {
      const int group = tile / TILES_PER_GROUP;
      const uint32_t scales = base + L::scales + group % L::SCALE_SLOTS * L::SCALES;
      for (int i = threadIdx.x; i < L::SCALES / 4; i += C::THREADS)
        ptx::cp_async<4>(scales + i * 4, p.scales + size_t(group) * p.N + n0 + i * 2);
    }
  };

  float acc[C::BLOCK_M / 8][4] = {};
  auto multiply = [&](int tile) {
    const int slot = (tile - begin) % C::STAGES, scale_slot = tile * C::BLOCK_K / GROUP % L::SCALE_SLOTS;
    const uint32_t my_codes = base + L::codes + slot * L::CODES + warp * FRAGMENT_CODES + lane * 8;
    const uint32_t my_meta = base + L::meta + slot * L::META + warp * FRAGMENT_META + lane * 4;
    const auto codes = ptx::load_shared<uint2>(my_codes);
    const auto meta = ptx::load_shared<uint32_t>(my_meta);
    const half* scales = reinterpret_cast<const half*>(smem + L::scales + scale_slot * L::SCALES) + warp * 16;
    const uint32_t scale_low = twice(scales[g]), scale_high = twice(scales[g + 8]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t w[4];
      dequantize(w, step ? codes.y : codes.x, scale_low, scale_high);
#pragma unroll
      for (int j = 0; j < C::BLOCK_M / 8; ++j) {
        uint32_t x[4];
        const int row = j * 8 + lane % 8, chunk = step * 4 + lane / 8;
        ptx::ldmatrix(x, base + L::x + slot * L::X + row * 128 + ((chunk ^ (row & 7)) << 4));
        if (step == 0 || FAULT == F::SELECTOR) ptx::mma_sp_m16n8k32<half, 0>(acc[j], w, x, meta);
        else ptx::mma_sp_m16n8k32<half, 1>(acc[j], w, x, meta);
      }
    }
  };

  // ---------------------------------------------------------------- main loop
  constexpr int AHEAD = C::STAGES - (FAULT == F::REFILL_EARLY ? 0 : 1);
  constexpr bool MULTIPLY_FIRST = FAULT == F::REFILL_EARLY || FAULT == F::SCALE_RACE;
  for (int i = 0; i < AHEAD; ++i) {
    if (begin + i < end) fetch(begin + i);
    ptx::cp_async_commit();
  }
  for (int tile = begin; tile < end; ++tile) {
    if (FAULT != F::NO_WAIT) ptx::cp_async_wait<AHEAD - (FAULT == F::WAIT_ONE_SHORT ? 0 : 1)>();
    if (FAULT != F::NO_SYNC) __syncthreads();
    if (MULTIPLY_FIRST) multiply(tile);
    if (tile + AHEAD < end) fetch(tile + AHEAD);
    ptx::cp_async_commit();
    if (!MULTIPLY_FIRST) multiply(tile);
  }
  ptx::cp_async_wait<0>();
  if (FAULT == F::SHARED_OVERRUN) smem[L::x + C::STAGES * L::X + threadIdx.x] = 0;

  // ---------------------------------------------------------------- split K
  // The blocks of one tile add in order of blockIdx.z; the last one writes y.
  int* ticket = p.tickets + blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) {
    if (FAULT != F::SKIP_TICKET)
      while (ptx::load_acquire(ticket) != int(blockIdx.z)) ptx::relax();
    is_last[FAULT == F::STATIC_OVERRUN] = blockIdx.z + 1 == gridDim.z;
  }
  __syncthreads();
  for (int j = 0; j < C::BLOCK_M / 8; ++j)
    for (int i = 0; i < 4; ++i) {
      const int m = m0 + j * 8 + 2 * t + (i & 1), n = n0 + warp * 16 + g + 8 * (i >> 1);
      if (m >= p.M) continue;
      float sum = acc[j][i], *cell = p.partial + size_t(m) * p.N + n;
      if (blockIdx.z > 0) sum += *cell;
      if (is_last[0]) p.y[size_t(m) * p.N + n] = __float2half(sum);
      else *cell = sum;
    }
  __syncthreads();
  if (threadIdx.x == 0) ptx::store_release(ticket, is_last[0] ? 0 : int(blockIdx.z) + 1);
}
