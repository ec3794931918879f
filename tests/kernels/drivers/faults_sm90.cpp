// usage: as faults_sm80.cpp
#include "drivers/check.h"
#include "faults/problem.h"
#include "faults/sm90.cuh"

using F = Sm90Fault;

template <class C, F FAULT = F::NONE> bool solve(int M, int N, int K) {
  Problem p(M, N, K, C::WARPS);
  const dim3 grid(N / C::BLOCK_N, (M + C::BLOCK_M - 1) / C::BLOCK_M);
  ptx::TensorMap x_map;
  if (tensor_map_2d(&x_map, p.x.data(), K, M, K * 2, C::BLOCK_M) != cudaSuccess) return false;
  launch(w4_sm90<C, FAULT>, grid, C::THREADS, Sm90Layout<C>::bytes, nullptr, p.args(), x_map);
  return p.right();
}
template <F FAULT> bool fault() { return solve<Sm90Config<2, 16, 3>, FAULT>(13, 128, 768); }

template <class C> void check(int M, int N, int K) {
  for (emu::options.seed = 0; emu::options.seed < 6; ++emu::options.seed) EXPECT((solve<C>(M, N, K)));
}

int main(int argc, char** argv) {
  if (argc == 3) {
    emu::options.seed = uint32_t(std::atoi(argv[2]));
    return run_by_name({{"none", fault<F::NONE>},
                        {"no_final_wait", fault<F::NO_FINAL_WAIT>},
                        {"release_early", fault<F::RELEASE_EARLY>},
                        {"weights_reused", fault<F::WEIGHTS_REUSED>},
                        {"expect_too_much", fault<F::EXPECT_TOO_MUCH>},
                        {"expect_too_little", fault<F::EXPECT_TOO_LITTLE>},
                        {"no_full_wait", fault<F::NO_FULL_WAIT>},
                        {"no_empty_wait", fault<F::NO_EMPTY_WAIT>},
                        {"bulk_too_long", fault<F::BULK_TOO_LONG>},
                        {"selector", fault<F::SELECTOR>},
                        {"no_wgmma_fence", fault<F::NO_WGMMA_FENCE>},
                        {"no_init_sync", fault<F::NO_INIT_SYNC>}},
                       argv[1]);
  }
  check<Sm90Config<1, 8, 2>>(1, 64, 128);
  check<Sm90Config<2, 16, 3>>(13, 128, 768);
  check<Sm90Config<1, 64, 4>>(70, 128, 640);
  check<Sm90Config<3, 32, 5>>(33, 192, 1280);
  return failures != 0;
}
