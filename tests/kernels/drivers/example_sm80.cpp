// usage: test_sm80                      all shapes and seeds
//        test_sm80 FAULT SEED           one planted fault, exit 0 if it goes unnoticed
//        test_sm80 time THREADS         the time of one 64 x 256 x 512 problem
#include <chrono>
#include <string>

#include "examples/w4_problem.h"
#include "examples/w4_sm80.cuh"

template <class C, int FAULT = NONE> double solve(int M, int N, int K, int split, unsigned seed) {
  Problem p(M, N, K, C::WARPS, 7 * M + N + K);
  emu::options.seed = seed;
  launch(w4_sm80<C, FAULT>, dim3(N / C::BLOCK_N, (M + C::BLOCK_M - 1) / C::BLOCK_M, split), dim3(C::THREADS), Sm80Layout<C, FAULT>::bytes, nullptr, p.args());
  for (int t : p.tickets) if (t) return INFINITY;
  return p.error();
}
template <int FAULT> int fault(unsigned seed) {
  const double e = solve<Sm80Config<4, 16, 4>, FAULT>(13, 128, 768, 2, seed);
  std::printf("fault %d seed %u: error %.2f\n", FAULT, seed, e);
  return e <= 1.0 ? 0 : 1;
}
template <class C> void timing() {
  Problem p(64, 256, 512, C::WARPS, 1);
  for (int split : {1, 2}) {
    double best = 1e30;
    for (int r = 0; r < 5; ++r) {
      emu::stats = {};
      auto t0 = std::chrono::steady_clock::now();
      launch(w4_sm80<C>, dim3(256 / C::BLOCK_N, 64 / C::BLOCK_M, split), dim3(C::THREADS), Sm80Layout<C, NONE>::bytes, nullptr, p.args());
      best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count());
    }
    std::printf("64x256x512, %d threads, split %d: %.1f ms, %llu switches, error %.2f\n", C::THREADS, split, best * 1e3, (unsigned long long)emu::stats.switches, p.error());
  }
}

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "time") {
    emu::options.seed = 2;
    if (std::atoi(argv[2]) == 256) timing<Sm80Config<8, 64, 4>>(); else timing<Sm80Config<4, 64, 4>>();
    return 0;
  }
  if (argc == 3) {
    const unsigned seed = std::atoi(argv[2]);
    switch (std::atoi(argv[1])) {
      case NONE: return fault<NONE>(seed);
      case NO_WAIT: return fault<NO_WAIT>(seed);
      case WAIT_ONE_SHORT: return fault<WAIT_ONE_SHORT>(seed);
      case SCALE_SLOT: return fault<SCALE_SLOT>(seed);
      case NO_SYNC: return fault<NO_SYNC>(seed);
      case SHARED_OOB: return fault<SHARED_OOB>(seed);
      case GLOBAL_OOB: return fault<GLOBAL_OOB>(seed);
      case SELECTOR: return fault<SELECTOR>(seed);
      case REFILL_EARLY: return fault<REFILL_EARLY>(seed);
      case STATIC_OOB: return fault<STATIC_OOB>(seed);
      case SCALE_RACE: return fault<SCALE_RACE>(seed);
      case SKIP_TICKET: return fault<SKIP_TICKET>(seed);
    }
    return 9;
  }
  int bad = 0, runs = 0;
  auto check = [&](auto config, int M, int N, int K, int split) {
    for (unsigned seed = 0; seed < 6; ++seed, ++runs) {
      const double e = solve<decltype(config)>(M, N, K, split, seed);
      if (!(e <= 1.0)) { ++bad; std::printf("M %d N %d K %d split %d seed %u: error %.3g\n", M, N, K, split, seed, e); }
    }
  };
  check(Sm80Config<4, 16, 4>(), 1, 64, 128, 1);
  check(Sm80Config<4, 16, 4>(), 13, 128, 768, 5);
  check(Sm80Config<4, 8, 3>(), 5, 64, 1280, 3);
  check(Sm80Config<4, 32, 2>(), 70, 64, 384, 2);
  check(Sm80Config<8, 64, 4>(), 64, 256, 512, 2);
  check(Sm80Config<2, 16, 5>(), 33, 96, 640, 7);
  std::printf("%d runs, %d wrong\n", runs, bad);
  return bad != 0;
}
