// W4A16 2:4 kernel for sm_80: cp.async ring, ldmatrix, dequantization in registers, mma.sp, deterministic split K.
#pragma once
#include "examples/w4_common.cuh"

// Faults for the tests of the emulator. 0 in real use.
enum Fault { NONE, NO_WAIT, WAIT_ONE_SHORT, SCALE_SLOT, NO_SYNC, SHARED_OOB, GLOBAL_OOB, SELECTOR, SKIP_TICKET, REFILL_EARLY, SCALE_RACE, STATIC_OOB };

template <int WARPS_, int BLOCK_M_, int STAGES_> struct Sm80Config {
  static constexpr int WARPS = WARPS_, BLOCK_M = BLOCK_M_, STAGES = STAGES_;
  static constexpr int THREADS = WARPS * 32, BLOCK_N = WARPS * 16, BLOCK_K = 64;
  CHECK_DIV(BLOCK_M, 8);
};

// Dynamic shared memory, the same for host and device. Guards are empty on the device.
template <class C, int FAULT> struct Sm80Layout {
  static constexpr int CODES = C::WARPS * FRAG_CODES, META = C::WARPS * FRAG_META, X = C::BLOCK_M * C::BLOCK_K * 2;
  // The tile in use, the STAGES - 1 ahead of it, and one more group because a group may straddle both ends.
  static constexpr int SCALE_SLOTS = FAULT == SCALE_SLOT || FAULT == SCALE_RACE ? C::STAGES / 2 : C::STAGES / 2 + 1, SCALES = C::BLOCK_N * 2;
  static constexpr int codes = 0;
  static constexpr int meta = codes + C::STAGES * CODES + SHARED_GUARD;
  static constexpr int x = meta + C::STAGES * META + SHARED_GUARD;
  static constexpr int scales = x + C::STAGES * X + SHARED_GUARD;
  static constexpr int bytes = scales + SCALE_SLOTS * SCALES + SHARED_GUARD;
  static __device__ void place_guards(uint8_t* smem) {
    for (int end : {meta, x, scales, bytes}) shared_guard(smem + end - SHARED_GUARD);
  }
};

template <class C, int FAULT = NONE>
__global__ void __launch_bounds__(C::THREADS) w4_sm80(W4Args p) {
  using L = Sm80Layout<C, FAULT>;
  DYNAMIC_SHARED(smem);
  STATIC_SHARED(int, is_last, 1);
  if (threadIdx.x == 0) L::place_guards(smem);
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n0 = blockIdx.x * C::BLOCK_N, m0 = blockIdx.y * C::BLOCK_M, k_tiles = p.K / C::BLOCK_K;
  const int begin = k_tiles * blockIdx.z / gridDim.z, end = k_tiles * (blockIdx.z + 1) / gridDim.z;
  const uint32_t base = ptx::smem_addr(smem);

  auto fetch = [&](int kt) {
    const int slot = (kt - begin) % C::STAGES;
    const size_t frag = (size_t(n0 / 16) * k_tiles + size_t(kt) * C::WARPS) ;  // fragments are [N / BLOCK_N][K / 64][WARPS]
    for (int i = threadIdx.x; i < L::CODES / 16; i += C::THREADS)
      ptx::cp_async<16>(base + L::codes + slot * L::CODES + i * 16, p.weights + frag * FRAG_CODES + i * 16);
    for (int i = threadIdx.x; i < L::META / 16; i += C::THREADS)
      ptx::cp_async<16>(base + L::meta + slot * L::META + i * 16, p.meta + frag * FRAG_META + i * 16);
    for (int i = threadIdx.x; i < L::X / 16; i += C::THREADS) {
      const int row = i / 8, chunk = i % 8;
      const bool inside = FAULT == GLOBAL_OOB || m0 + row < p.M;
      const half* src = p.x + (inside ? size_t(m0 + row) * p.K + kt * C::BLOCK_K + chunk * 8 : 0);
      ptx::cp_async<16>(base + L::x + slot * L::X + row * 128 + ((chunk ^ (row & 7)) << 4), src, inside ? 16 : 0);
    }
    constexpr int per_group = GROUP / C::BLOCK_K;
    if (kt == begin || kt % per_group == 0) {
      const int group = kt / per_group;
      for (int i = threadIdx.x; i < L::SCALES / 4; i += C::THREADS)
        ptx::cp_async<4>(base + L::scales + group % L::SCALE_SLOTS * L::SCALES + i * 4, p.scales + size_t(group) * p.N + n0 + i * 2);
    }
  };

  float acc[C::BLOCK_M / 8][4] = {};
  auto multiply = [&](int kt) {
    const int slot = (kt - begin) % C::STAGES;
    const uint2 codes = ptx::load_shared<uint2>(base + L::codes + slot * L::CODES + warp * FRAG_CODES + lane * 8);
    const uint32_t meta = ptx::load_shared<uint32_t>(base + L::meta + slot * L::META + warp * FRAG_META + lane * 4);
    const half* scales = reinterpret_cast<const half*>(smem + L::scales + kt * C::BLOCK_K / GROUP % L::SCALE_SLOTS * L::SCALES) + warp * 16;
    const uint32_t s_lo = both(scales[g]), s_hi = both(scales[g + 8]);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t w[4];
      dequantize(w, step ? codes.y : codes.x, s_lo, s_hi);
#pragma unroll
      for (int j = 0; j < C::BLOCK_M / 8; ++j) {
        uint32_t x[4];
        const int row = j * 8 + lane % 8, chunk = step * 4 + lane / 8;
        ptx::ldmatrix_x4(x, base + L::x + slot * L::X + row * 128 + ((chunk ^ (row & 7)) << 4));
        if (step == 0 || FAULT == SELECTOR) ptx::mma_sp_m16n8k32_f16<0>(acc[j], w, x, meta);
        else ptx::mma_sp_m16n8k32_f16<1>(acc[j], w, x, meta);
      }
    }
  };

  // ---- main loop: STAGES - 1 tiles ahead
  constexpr int AHEAD = C::STAGES - (FAULT == REFILL_EARLY ? 0 : 1);
  for (int i = 0; i < AHEAD; ++i) {
    if (begin + i < end) fetch(begin + i);
    ptx::cp_async_commit();
  }
  for (int kt = begin; kt < end; ++kt) {
    if (FAULT != NO_WAIT) ptx::cp_async_wait<AHEAD - (FAULT == WAIT_ONE_SHORT ? 0 : 1)>();
    if (FAULT != NO_SYNC) __syncthreads();
    if (FAULT == REFILL_EARLY || FAULT == SCALE_RACE) multiply(kt);
    if (kt + AHEAD < end) fetch(kt + AHEAD);
    ptx::cp_async_commit();
    if (FAULT != REFILL_EARLY && FAULT != SCALE_RACE) multiply(kt);
  }
  ptx::cp_async_wait<0>();
  if (FAULT == SHARED_OOB) smem[L::x + C::STAGES * L::X + threadIdx.x] = 0;

  // ---- split K: blocks of one tile add in order of blockIdx.z, the last one writes y
  int* ticket = p.tickets + blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) {
    if (FAULT != SKIP_TICKET) while (ptx::load_acquire(ticket) != int(blockIdx.z)) ptx::relax();
    is_last[FAULT == STATIC_OOB] = blockIdx.z + 1 == gridDim.z;
  }
  __syncthreads();
  for (int j = 0; j < C::BLOCK_M / 8; ++j)
    for (int i = 0; i < 4; ++i) {
      const int m = m0 + j * 8 + 2 * t + (i & 1), n = n0 + warp * 16 + g + 8 * (i >> 1);
      if (m >= p.M) continue;
      float v = acc[j][i], *cell = p.partial + size_t(m) * p.N + n;
      if (blockIdx.z > 0) v += *cell;
      if (is_last[0]) p.y[size_t(m) * p.N + n] = __float2half(v);
      else *cell = v;
    }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ptx::store_release(ticket, is_last[0] ? 0 : int(blockIdx.z) + 1);
}
