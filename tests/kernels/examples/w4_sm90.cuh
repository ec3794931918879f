// W4A16 2:4 kernel for sm_90a: a producer thread fills a ring of mbarriers with bulk and tensor copies, consumer
// warpgroups dequantize in registers and issue wgmma.sp with the weights as register operand.
#pragma once
#include "examples/w4_common.cuh"

enum Fault90 { OK90, NO_FINAL_WAIT, RELEASE_EARLY, WEIGHTS_REUSED, EXPECT_TOO_MUCH, EXPECT_TOO_LITTLE, NO_FULL_WAIT, NO_EMPTY_WAIT, BULK_TOO_LONG, SELECTOR90, NO_FENCE, NO_INIT_SYNC };

template <int WARPGROUPS_, int BLOCK_M_, int STAGES_> struct Sm90Config {
  static constexpr int WARPGROUPS = WARPGROUPS_, BLOCK_M = BLOCK_M_, STAGES = STAGES_;
  static constexpr int WARPS = WARPGROUPS * 4, THREADS = (WARPGROUPS + 1) * 128, BLOCK_N = WARPGROUPS * 64, BLOCK_K = 64;
  CHECK_DIV(BLOCK_M, 8);
};
template <class C> struct Sm90Layout {  // x first: the swizzle wants 1024-byte alignment
  static constexpr int X = C::BLOCK_M * 128, CODES = C::WARPS * FRAG_CODES, META = C::WARPS * FRAG_META, SCALES = C::BLOCK_N * 2;
  static constexpr int STAGE_BYTES = X + CODES + META + SCALES;
  static constexpr int x = 0;
  static constexpr int codes = x + C::STAGES * X + SHARED_GUARD;
  static constexpr int meta = codes + C::STAGES * CODES + SHARED_GUARD;
  static constexpr int scales = meta + C::STAGES * META + SHARED_GUARD;
  static constexpr int bytes = scales + C::STAGES * SCALES + SHARED_GUARD;
  static __device__ void place_guards(uint8_t* smem) {
    for (int end : {codes, meta, scales, bytes}) shared_guard(smem + end - SHARED_GUARD);
  }
};

// Descriptor of a K-major tile with 128-byte rows in the 128-byte swizzle.
PTX_INLINE uint64_t swizzled_desc(uint32_t addr) {
  return uint64_t((addr & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

template <class C, int FAULT = OK90>
__global__ void __launch_bounds__(C::THREADS, 1) w4_sm90(W4Args p, const __grid_constant__ ptx::TensorMap x_map) {
  using L = Sm90Layout<C>;
  DYNAMIC_SHARED(smem);
  STATIC_SHARED(uint64_t, full_bars, C::STAGES);
  STATIC_SHARED(uint64_t, empty_bars, C::STAGES);
  const uint32_t base = ptx::smem_addr(smem), full = ptx::smem_addr(full_bars), empty = ptx::smem_addr(empty_bars);
  const int warpgroup = threadIdx.x / 128, k_tiles = p.K / C::BLOCK_K, n0 = blockIdx.x * C::BLOCK_N, m0 = blockIdx.y * C::BLOCK_M;
  if (threadIdx.x == 0) {
    L::place_guards(smem);
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbar_init(full + 8 * s, 1);
      ptx::mbar_init(empty + 8 * s, C::WARPS);
    }
    ptx::mbar_init_fence();
  }
  if (FAULT != NO_INIT_SYNC) __syncthreads();

  if (warpgroup == C::WARPGROUPS) {  // ---- producer: one thread
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x % 128 != 0) return;
    for (int kt = 0; kt < k_tiles; ++kt) {
      const int slot = kt % C::STAGES;
      if (FAULT != NO_EMPTY_WAIT) ptx::mbar_wait(empty + 8 * slot, (kt / C::STAGES + 1) & 1);
      const uint32_t bar = full + 8 * slot;
      const size_t frag = (size_t(n0 / 16) * k_tiles) + size_t(kt) * C::WARPS;
      ptx::mbar_arrive_expect(bar, L::STAGE_BYTES + (FAULT == EXPECT_TOO_MUCH ? 16 : FAULT == EXPECT_TOO_LITTLE ? -L::SCALES : 0));
      ptx::tensor_load_2d(base + L::x + slot * L::X, &x_map, kt * C::BLOCK_K, m0, bar);
      ptx::bulk_load(base + L::codes + slot * L::CODES, p.weights + frag * FRAG_CODES, L::CODES, bar);
      ptx::bulk_load(base + L::meta + slot * L::META, p.meta + frag * FRAG_META, L::META + (FAULT == BULK_TOO_LONG ? 16 : 0), bar);
      ptx::bulk_load(base + L::scales + slot * L::SCALES, p.scales + size_t(kt * C::BLOCK_K / GROUP) * p.N + n0, L::SCALES, bar);
    }
    return;
  }

  // ---- consumers
  ptx::setmaxnreg_inc<232>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float acc[C::BLOCK_M / 2] = {};
  uint32_t w[2][2][4];  // [buffer][step][register]
  auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(empty + 8 * slot);
  };
  auto multiply = [&](int kt, uint32_t (&buffer)[2][4]) {
    const int slot = kt % C::STAGES;
    if (FAULT != NO_FULL_WAIT) ptx::mbar_wait(full + 8 * slot, kt / C::STAGES & 1);
    const uint2 codes = ptx::load_shared<uint2>(base + L::codes + slot * L::CODES + warp * FRAG_CODES + lane * 8);
    const uint32_t meta = ptx::load_shared<uint32_t>(base + L::meta + slot * L::META + warp * FRAG_META + lane * 4);
    const half* scales = reinterpret_cast<const half*>(smem + L::scales + slot * L::SCALES) + warp * 16;
    const uint32_t s_lo = both(scales[g]), s_hi = both(scales[g + 8]);
    dequantize(buffer[0], codes.x, s_lo, s_hi);
    dequantize(buffer[1], codes.y, s_lo, s_hi);
    const uint64_t desc = swizzled_desc(base + L::x + slot * L::X);
    if (FAULT != NO_FENCE) ptx::wgmma_fence();
    ptx::Wgmma<C::BLOCK_M>::template sp_rs<0>(acc, buffer[0], desc, meta);
    ptx::Wgmma<C::BLOCK_M>::template sp_rs<FAULT == SELECTOR90 ? 0 : 1>(acc, buffer[1], desc + (64 >> 4), meta);
    ptx::wgmma_commit();
    if (FAULT == RELEASE_EARLY) release(slot);
    ptx::wgmma_wait<1>();  // the tile before this one is finished
    if (FAULT != RELEASE_EARLY && kt > 0) release((kt - 1) % C::STAGES);
  };
  for (int kt = 0; kt < k_tiles; kt += 2) {
    multiply(kt, w[0]);
    if (kt + 1 < k_tiles) multiply(kt + 1, w[FAULT == WEIGHTS_REUSED ? 0 : 1]);
  }
  if (FAULT != NO_FINAL_WAIT) ptx::wgmma_wait<0>();
  for (int i = 0; i < C::BLOCK_M / 2; ++i) {
    const int m = m0 + i / 4 * 8 + 2 * t + (i & 1), n = n0 + warp * 16 + g + 8 * (i >> 1 & 1);
    if (m < p.M) p.y[size_t(m) * p.N + n] = __float2half(acc[i]);
  }
}
