// For sm_90a: a producer thread fills a ring with bulk and tensor copies that mbarriers count; consumer warpgroups
// dequantize in registers and issue wgmma with the weights as register operand.
#pragma once
#include "faults/w4.cuh"

enum class Sm90Fault {
  NONE,
  NO_FINAL_WAIT,      // reads accumulators that wgmma still writes
  RELEASE_EARLY,      // gives a stage back while wgmma still reads it
  WEIGHTS_REUSED,     // dequantizes into registers that wgmma still reads
  EXPECT_TOO_MUCH,    // the mbarrier waits for bytes that never come
  EXPECT_TOO_LITTLE,  // the mbarrier completes before the last copy
  NO_FULL_WAIT,
  NO_EMPTY_WAIT,
  BULK_TOO_LONG,
  SELECTOR,
  NO_WGMMA_FENCE,
  NO_INIT_SYNC,       // mbarriers are used while thread 0 may not have made them
};

template <int WARPGROUPS_, int BLOCK_M_, int STAGES_> struct Sm90Config {
  static constexpr int WARPGROUPS = WARPGROUPS_, BLOCK_M = BLOCK_M_, STAGES = STAGES_;
  static constexpr int WARPS = WARPGROUPS * 4, THREADS = (WARPGROUPS + 1) * 128;
  static constexpr int BLOCK_N = WARPGROUPS * 64, BLOCK_K = FRAGMENT_K;
  static_assert(BLOCK_M % 8 == 0);
};
template <class C> struct Sm90Layout {  // x first: the swizzle wants 1024-byte alignment
  static constexpr int X = C::BLOCK_M * 128, SCALES = C::BLOCK_N * 2;
  static constexpr int CODES = C::WARPS * FRAGMENT_CODES, META = C::WARPS * FRAGMENT_META;
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

template <class C, Sm90Fault FAULT = Sm90Fault::NONE>
__global__ void __launch_bounds__(C::THREADS, 1) w4_sm90(W4Args p, const __grid_constant__ ptx::TensorMap x_map) {
#if PTX_SM90A
  using L = Sm90Layout<C>;
  using F = Sm90Fault;
  DYNAMIC_SHARED(smem);
  STATIC_SHARED(uint64_t, full_bars, C::STAGES);
  STATIC_SHARED(uint64_t, empty_bars, C::STAGES);
  const uint32_t base = ptx::smem_addr(smem), full = ptx::smem_addr(full_bars), empty = ptx::smem_addr(empty_bars);
  const int warpgroup = threadIdx.x / 128, k_tiles = p.K / C::BLOCK_K;
  const int n0 = blockIdx.x * C::BLOCK_N, m0 = blockIdx.y * C::BLOCK_M;
  if (threadIdx.x == 0) {
    L::place_guards(smem);
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbar_init(full + 8 * s, 1);
      ptx::mbar_init(empty + 8 * s, C::WARPS);
    }
    ptx::mbar_init_fence();
  }
  if (FAULT != F::NO_INIT_SYNC) __syncthreads();

  if (warpgroup == C::WARPGROUPS) {  // the producer
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x % 128 != 0) return;
    constexpr int WRONG_BYTES = FAULT == F::EXPECT_TOO_MUCH ? 16 : FAULT == F::EXPECT_TOO_LITTLE ? -L::SCALES : 0;
    for (int tile = 0; tile < k_tiles; ++tile) {
      const int slot = tile % C::STAGES;
      if (FAULT != F::NO_EMPTY_WAIT) ptx::mbar_wait(empty + 8 * slot, (tile / C::STAGES + 1) & 1);
      const uint32_t bar = full + 8 * slot;
      const size_t fragment = size_t(n0 / 16) * k_tiles + size_t(tile) * C::WARPS;
      const half* scales = p.scales + size_t(tile * C::BLOCK_K / GROUP) * p.N + n0;
      const int meta_bytes = L::META + (FAULT == F::BULK_TOO_LONG ? 16 : 0);
      ptx::mbar_arrive_expect(bar, L::STAGE_BYTES + WRONG_BYTES);
      ptx::tensor_load_2d(base + L::x + slot * L::X, &x_map, tile * C::BLOCK_K, m0, bar);
      ptx::bulk_load(base + L::codes + slot * L::CODES, p.codes + fragment * FRAGMENT_CODES, L::CODES, bar);
      ptx::bulk_load(base + L::meta + slot * L::META, p.meta + fragment * FRAGMENT_META, meta_bytes, bar);
      ptx::bulk_load(base + L::scales + slot * L::SCALES, scales, L::SCALES, bar);
    }
    return;
  }

  // ---------------------------------------------------------------- consumers
  ptx::setmaxnreg_inc<232>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float acc[C::BLOCK_M / 2] = {};
  uint32_t w[2][2][4];  // [buffer][step][register]
  auto release = [&](int slot) {
    __syncwarp();
    if (lane == 0) ptx::mbar_arrive(empty + 8 * slot);
  };
  auto multiply = [&](int tile, uint32_t (&buffer)[2][4]) {
    const int slot = tile % C::STAGES;
    if (FAULT != F::NO_FULL_WAIT) ptx::mbar_wait(full + 8 * slot, tile / C::STAGES & 1);
    const uint32_t my_codes = base + L::codes + slot * L::CODES + warp * FRAGMENT_CODES + lane * 8;
    const uint32_t my_meta = base + L::meta + slot * L::META + warp * FRAGMENT_META + lane * 4;
    const auto codes = ptx::load_shared<uint2>(my_codes);
    const auto meta = ptx::load_shared<uint32_t>(my_meta);
    const half* scales = reinterpret_cast<const half*>(smem + L::scales + slot * L::SCALES) + warp * 16;
    const uint32_t scale_low = twice(scales[g]), scale_high = twice(scales[g + 8]);
    dequantize(buffer[0], codes.x, scale_low, scale_high);
    dequantize(buffer[1], codes.y, scale_low, scale_high);
    const uint64_t x = swizzled_tile(base + L::x + slot * L::X);
    constexpr int SECOND = FAULT == F::SELECTOR ? 0 : 1;
    if (FAULT != F::NO_WGMMA_FENCE) ptx::wgmma_fence();
    ptx::wgmma_sp<half, 0>(acc, buffer[0], x, meta);
    ptx::wgmma_sp<half, SECOND>(acc, buffer[1], x + (64 >> 4), meta);
    ptx::wgmma_commit();
    if (FAULT == F::RELEASE_EARLY) release(slot);
    ptx::wgmma_wait<1>();  // the tile before this one is finished
    if (FAULT != F::RELEASE_EARLY && tile > 0) release((tile - 1) % C::STAGES);
  };
  for (int tile = 0; tile < k_tiles; tile += 2) {
    multiply(tile, w[0]);
    if (tile + 1 < k_tiles) multiply(tile + 1, w[FAULT == F::WEIGHTS_REUSED ? 0 : 1]);
  }
  if (FAULT != F::NO_FINAL_WAIT) ptx::wgmma_wait<0>();
  for (int i = 0; i < C::BLOCK_M / 2; ++i) {
    const int m = m0 + i / 4 * 8 + 2 * t + (i & 1), n = n0 + warp * 16 + g + 8 * (i >> 1 & 1);
    if (m < p.M) p.y[size_t(m) * p.N + n] = __float2half(acc[i]);
  }
#endif
}
