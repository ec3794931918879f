// For sm_90a: y[M, N] = x[M, 128] * w[128, 128]^T by blocks that take tile after tile of tokens. Tensor copies fill a
// stage with tokens, the results overwrite them there and leave by tensor stores, and the stage is filled again.
// Launched early: only weights are read before pdl_wait.
#pragma once
#include "faults/w4.cuh"

enum class StoreFault {
  NONE,
  NO_PROXY_FENCE,
  ONE_LANE_FENCES,  // for a whole warp
  NO_SYNCWARP,      // the lane that arrives does not wait for the others' results
  STAGE_EARLY,      // writes results where the other warpgroup's wgmma still reads tokens
  ONE_STAGED_BAR,   // for all stages: two arrive at it before the first is stored
  NO_STAGED_WAIT,   // stores what has not been written yet
  RELEASE_EARLY,    // gives a stage back while the store still reads it
  WAIT_ONE_SHORT,   // waits for the store before this one
  NO_EMPTY_WAIT,
  NO_COMMIT,
  NO_FINAL_WAIT,      // ends while stores still write y
  BOX_OVERRUN,        // the map has more rows than y
  X_BEFORE_PDL_WAIT,  // reads what the earlier grid writes
  NO_PDL_WAIT,
  SUMS_BEFORE_PDL_WAIT,  // writes global memory that an earlier grid may still use
};

template <int TOKENS_, int STAGES_> struct StoreConfig {
  static constexpr int TOKENS = TOKENS_, STAGES = STAGES_;
  static constexpr int K = 128, N = 128, CONSUMERS = 8, THREADS = (CONSUMERS + 2) * 32;
  static constexpr int BOX = TOKENS * 128, STAGE = 2 * BOX, SHARED = STAGES * STAGE + SHARED_GUARD;  // bytes
  static_assert(TOKENS % 8 == 0);
};
struct StoreArgs {
  const half* w;  // [C::N][C::K]
  float* sums;    // of each block's results
  int M;
};

template <class C, StoreFault FAULT = StoreFault::NONE>
__global__ void __launch_bounds__(C::THREADS, 1) store_sm90(StoreArgs p, const __grid_constant__ ptx::TensorMap x_map,
                                                            const __grid_constant__ ptx::TensorMap y_map) {
#if PTX_SM90A
  using F = StoreFault;
  DYNAMIC_SHARED(smem);
  STATIC_SHARED(uint64_t, full_bars, C::STAGES);    // tokens are there
  STATIC_SHARED(uint64_t, staged_bars, C::STAGES);  // results are there
  STATIC_SHARED(uint64_t, empty_bars, C::STAGES);
  const uint32_t base = ptx::smem_addr(smem), full = ptx::smem_addr(full_bars);
  const uint32_t staged = ptx::smem_addr(staged_bars), empty = ptx::smem_addr(empty_bars);
  // The barrier that results are there, and the parity of its phase.
  auto staged_bar = [&](int i) { return staged + (FAULT == F::ONE_STAGED_BAR ? 0 : 8 * (i % C::STAGES)); };
  auto staged_parity = [&](int i) { return (FAULT == F::ONE_STAGED_BAR ? i : i / C::STAGES) & 1; };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = (p.M + C::TOKENS - 1) / C::TOKENS;
  if (threadIdx.x == 0) {
    shared_guard(smem + C::SHARED - SHARED_GUARD);
    for (int s = 0; s < C::STAGES; ++s) {
      ptx::mbar_init(full + 8 * s, 1);
      ptx::mbar_init(staged + 8 * s, C::CONSUMERS);
      ptx::mbar_init(empty + 8 * s, 1);
    }
    ptx::mbar_init_fence();
  }
  __syncthreads();
  ptx::pdl_launch();

  if (warp == C::CONSUMERS) {  // the producer
    if (lane != 0) return;
    for (int tile = blockIdx.x, i = 0; tile < tiles; tile += gridDim.x, ++i) {
      const int slot = i % C::STAGES;
      if (FAULT != F::NO_EMPTY_WAIT) ptx::mbar_wait(empty + 8 * slot, (i / C::STAGES + 1) & 1);
      ptx::mbar_arrive_expect(full + 8 * slot, C::STAGE);
      if (i == (FAULT == F::X_BEFORE_PDL_WAIT) && FAULT != F::NO_PDL_WAIT) ptx::pdl_wait();
      for (int half_k : {0, 1})
        ptx::tensor_load_2d(base + slot * C::STAGE + half_k * C::BOX, &x_map, half_k * 64, tile * C::TOKENS,
                            full + 8 * slot);
    }
    return;
  }
  if (warp == C::CONSUMERS + 1) {  // the thread that stores
    if (lane != 0) return;
    if (FAULT == F::NO_STAGED_WAIT) ptx::pdl_wait();  // otherwise the barriers lead back to the producer's
    for (int tile = blockIdx.x, i = 0; tile < tiles; tile += gridDim.x, ++i) {
      const int slot = i % C::STAGES;
      if (FAULT != F::NO_STAGED_WAIT) ptx::mbar_wait(staged_bar(i), staged_parity(i));
      for (int half_n : {0, 1})
        ptx::tensor_store_2d(&y_map, half_n * 64, tile * C::TOKENS, base + slot * C::STAGE + half_n * C::BOX);
      if (FAULT != F::NO_COMMIT) ptx::bulk_commit();
      if (FAULT == F::RELEASE_EARLY) ptx::mbar_arrive(empty + 8 * slot);
      ptx::bulk_wait_read<FAULT == F::WAIT_ONE_SHORT ? 1 : 0>();
      if (FAULT != F::RELEASE_EARLY) ptx::mbar_arrive(empty + 8 * slot);
    }
    if (FAULT != F::NO_FINAL_WAIT) ptx::bulk_wait<0>();
    return;
  }

  // ---------------------------------------------------------------- consumers
  const int warpgroup = warp / 4, g = lane / 4, t = lane % 4, odd = g & 1;
  uint32_t w[C::K / 16][4];
  for (int step = 0; step < C::K / 16; ++step)
    for (int j = 0; j < 4; ++j) {
      const half* pair = p.w + (warp * 16 + g + 8 * (j & 1)) * C::K + step * 16 + 2 * t + 8 * (j >> 1);
      w[step][j] = *reinterpret_cast<const uint32_t*>(pair);
    }
  float sum = 0;
  if (FAULT == F::SUMS_BEFORE_PDL_WAIT) p.sums[blockIdx.x * C::CONSUMERS * 32 + threadIdx.x] = 0;
  for (int tile = blockIdx.x, i = 0; tile < tiles; tile += gridDim.x, ++i) {
    const int slot = i % C::STAGES;
    const uint32_t stage = base + slot * C::STAGE;
    ptx::mbar_wait(full + 8 * slot, (i / C::STAGES) & 1);
    float acc[C::TOKENS / 2] = {};
    ptx::wgmma_fence();
    for (int step = 0; step < C::K / 16; ++step)
      ptx::wgmma<half>(acc, w[step], swizzled_tile(stage + step / 4 * C::BOX) + (step % 4 * 32 >> 4));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    if (FAULT == F::STAGE_EARLY) ptx::bar_sync(1 + warpgroup, 128);
    else ptx::bar_sync(1, C::CONSUMERS * 32);
    for (int j = 0; j < C::TOKENS / 2; j += 2) {  // neighbours in g hold neighbours in n: each keeps one of two tokens
      const float got = __shfl_xor_sync(~0u, odd ? acc[j] : acc[j + 1], 4);
      const uint32_t pair = ptx::pack2<half>(odd ? got : acc[j], odd ? acc[j + 1] : got);
      const int m = j / 4 * 8 + 2 * t + odd, n = warp % 4 * 16 + g - odd + 8 * (j >> 1 & 1);
      ptx::store_shared(stage + warpgroup * C::BOX + m * 128 + (((n / 8) ^ (m & 7)) << 4) + n % 8 * 2, pair);
      sum += acc[j] + acc[j + 1];
    }
    if (FAULT != F::NO_PROXY_FENCE && FAULT != F::ONE_LANE_FENCES) ptx::fence_proxy_async();
    if (FAULT != F::NO_SYNCWARP) __syncwarp();
    if (lane == 0 && FAULT == F::ONE_LANE_FENCES) ptx::fence_proxy_async();
    if (lane == 0) ptx::mbar_arrive(staged_bar(i));
  }
  p.sums[blockIdx.x * C::CONSUMERS * 32 + threadIdx.x] = sum;
#endif
}
