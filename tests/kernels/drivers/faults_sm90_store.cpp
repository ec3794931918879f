// usage: as faults_sm80.cpp
#include "drivers/check.h"
#include "faults/sm90_store.cuh"

using F = StoreFault;

// What the earlier grid does.
void k_copy(const half* from, half* to, int count) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = from[i];
}

// N <= C::N columns of y. Small integers, so that sums are exact.
template <class C, F FAULT = F::NONE> bool solve(int M, int N, int blocks) {
  std::vector<half> tokens(size_t(M) * C::K), x(tokens.size(), __ushort_as_half(0x7fff)), w(C::N * C::K);
  std::vector<half> y(size_t(M) * N, __ushort_as_half(0x7fff));
  std::vector<float> sums(size_t(blocks) * C::CONSUMERS * 32, NAN);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = half(float(int(i * 7 % 9) - 4));
  for (size_t i = 0; i < w.size(); ++i) w[i] = half(float(int(i * 11 % 5) - 2));
  ptx::TensorMap x_map, y_map;
  const int y_rows = FAULT == F::BOX_OVERRUN ? (M + C::TOKENS - 1) / C::TOKENS * C::TOKENS : M;
  EXPECT(tensor_map_2d(&x_map, x.data(), C::K, M, C::K * 2, C::TOKENS) == cudaSuccess);
  EXPECT(tensor_map_2d(&y_map, y.data(), N, y_rows, N * 2, C::TOKENS) == cudaSuccess);
  launch(k_copy, 2, 64, 0, nullptr, tokens.data(), x.data(), int(x.size()));
  const StoreArgs args{w.data(), sums.data(), M};
  for (int i = 0; i < 2; ++i)
    launch_early(1, store_sm90<C, FAULT>, blocks, C::THREADS, C::SHARED, nullptr, args, x_map, y_map);
  cudaDeviceSynchronize();
  double total = 0, expected_total = 0;
  for (float s : sums) total += s;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < C::N; ++n) {
      float expected = 0;
      for (int k = 0; k < C::K; ++k) expected += float(tokens[size_t(m) * C::K + k]) * float(w[n * C::K + k]);
      if (n < N && float(y[size_t(m) * N + n]) != expected) return false;
      expected_total += expected;
    }
  return total == expected_total;
}
template <F FAULT> bool fault() { return solve<StoreConfig<16, 2>, FAULT>(133, 120, 2); }

template <class C> void check(int M, int N, int blocks) {
  for (emu::options.seed = 0; emu::options.seed < 6; ++emu::options.seed) EXPECT((solve<C>(M, N, blocks)));
}

int main(int argc, char** argv) {
  if (argc == 3) {
    emu::options.seed = uint32_t(std::atoi(argv[2]));
    return run_by_name({{"none", fault<F::NONE>},
                        {"no_proxy_fence", fault<F::NO_PROXY_FENCE>},
                        {"one_lane_fences", fault<F::ONE_LANE_FENCES>},
                        {"no_syncwarp", fault<F::NO_SYNCWARP>},
                        {"stage_early", fault<F::STAGE_EARLY>},
                        {"one_staged_bar", fault<F::ONE_STAGED_BAR>},
                        {"no_staged_wait", fault<F::NO_STAGED_WAIT>},
                        {"release_early", fault<F::RELEASE_EARLY>},
                        {"wait_one_short", fault<F::WAIT_ONE_SHORT>},
                        {"no_empty_wait", fault<F::NO_EMPTY_WAIT>},
                        {"no_commit", fault<F::NO_COMMIT>},
                        {"no_final_wait", fault<F::NO_FINAL_WAIT>},
                        {"box_overrun", fault<F::BOX_OVERRUN>},
                        {"x_before_pdl_wait", fault<F::X_BEFORE_PDL_WAIT>},
                        {"no_pdl_wait", fault<F::NO_PDL_WAIT>},
                        {"sums_before_pdl_wait", fault<F::SUMS_BEFORE_PDL_WAIT>}},
                       argv[1]);
  }
  check<StoreConfig<16, 2>>(133, 120, 2);
  check<StoreConfig<8, 3>>(41, 128, 3);
  check<StoreConfig<64, 1>>(100, 72, 1);
  return failures != 0;
}
