// usage: faults_sm80             every shape without a fault
//        faults_sm80 NAME SEED   one planted fault; exits with 0 if it goes unnoticed
#include "drivers/check.h"
#include "faults/problem.h"
#include "faults/sm80.cuh"

using F = Sm80Fault;

template <class C, F FAULT = F::NONE> bool solve(int M, int N, int K, int split) {
  Problem p(M, N, K, C::WARPS);
  const dim3 grid(N / C::BLOCK_N, (M + C::BLOCK_M - 1) / C::BLOCK_M, split);
  launch(w4_sm80<C, FAULT>, grid, C::THREADS, Sm80Layout<C, FAULT>::bytes, nullptr, p.args());
  return p.right();
}
template <F FAULT> bool fault() { return solve<Sm80Config<4, 16, 4>, FAULT>(13, 128, 768, 2); }

template <class C> void check(int M, int N, int K, int split) {
  for (emu::options.seed = 0; emu::options.seed < 6; ++emu::options.seed) EXPECT((solve<C>(M, N, K, split)));
}

int main(int argc, char** argv) {
  if (argc == 3) {
    emu::options.seed = uint32_t(std::atoi(argv[2]));
    return run_by_name({{"none", fault<F::NONE>},
                        {"no_wait", fault<F::NO_WAIT>},
                        {"wait_one_short", fault<F::WAIT_ONE_SHORT>},
                        {"scale_slot", fault<F::SCALE_SLOT>},
                        {"scale_race", fault<F::SCALE_RACE>},
                        {"no_sync", fault<F::NO_SYNC>},
                        {"refill_early", fault<F::REFILL_EARLY>},
                        {"shared_overrun", fault<F::SHARED_OVERRUN>},
                        {"static_overrun", fault<F::STATIC_OVERRUN>},
                        {"global_overrun", fault<F::GLOBAL_OVERRUN>},
                        {"selector", fault<F::SELECTOR>},
                        {"skip_ticket", fault<F::SKIP_TICKET>}},
                       argv[1]);
  }
  check<Sm80Config<4, 16, 4>>(13, 128, 768, 5);
  check<Sm80Config<4, 8, 3>>(5, 64, 1280, 3);
  check<Sm80Config<8, 64, 4>>(64, 256, 512, 2);
  check<Sm80Config<2, 16, 5>>(33, 96, 640, 7);
  return failures != 0;
}
