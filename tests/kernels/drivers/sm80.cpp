// usage: sm80            every instance at small and odd shapes, several seeds of the scheduler
#include <cstdio>

#include "common/launch_sm80.cuh"
#include "dense/sm80.cuh"
#include "drivers/check.h"
#include "gemm_problem.h"
#include "sparse24/sm80.cuh"

using namespace gemm_test;

template <class C> bool solve(const GemmProblem& p, int blocks) {
  const Prepared w = prepare(p);
  const int stride = (p.K + 7) / 8 * 8;
  std::vector<uint16_t> x(size_t(p.M) * stride, 0), y(size_t(p.M) * p.N, 0x7fff), bias(p.N);
  for (int m = 0; m < p.M; ++m)
    for (int k = 0; k < p.K; ++k) x[size_t(m) * stride + k] = p.x_bits(m, k);
  for (int n = 0; n < p.N; ++n) bias[n] = p.bias_bits(n);
  std::vector<uint32_t> workspace(shape_sm80<C>().workspace_per_block / 4 * blocks, EMPTY);
  Problem problem{p.scheme, p.M, p.N, p.K, x.data(), stride, w.weights.data(), w.meta.data(), w.scales.data(), w.row_scales.data(),
                  p.with_bias ? bias.data() : nullptr, y.data(), workspace.data()};
  if (const std::string error = start_sm80<C>(problem, blocks, nullptr); !error.empty()) {
    std::printf("%s: %s\n", name(p).c_str(), error.c_str());
    return false;
  }
  for (uint32_t word : workspace)
    if (word != EMPTY) {
      std::printf("%s: the workspace is not as it was\n", name(p).c_str());
      return false;
    }
  for (int n = 0; n < p.N; ++n) {
    const auto row = p.row(n);
    for (int m = 0; m < p.M; ++m) {
      const Answer a = answer(p, row, m, n);
      const double got = value_16(y[size_t(m) * p.N + n], p.scheme.dtype);
      if (!(std::fabs(got - a.value) <= a.allowed)) {
        std::printf("%s, %d blocks: y[%d, %d] = %g, expected %g +- %g\n", name(p).c_str(), blocks, m, n, got, a.value, a.allowed);
        return false;
      }
    }
  }
  return true;
}

template <class C> void check(Scheme s, int M, int N, int K, int blocks) {
  s.num_bits = C::Weights::BITS, s.sparse = C::Weights::SPARSE, s.zero_points = C::Weights::ZERO_POINTS;
  for (uint32_t seed = 0; seed < 6; ++seed) {
    emu::options.seed = seed;
    EXPECT((solve<C>({s, M, N, K, seed % 2 == 0, seed % 3 != 0, seed}, blocks)));
  }
}

int main() {
  check<Sm80Config<DenseWeights<half, 4, 128, false>, 16, 4, 2, 128, 4, 2>>({}, 13, 200, 640, 3);
  check<Sm80Config<DenseWeights<half, 4, 128, false>, 16, 4, 1, 128, 4, 2>>({}, 17, 256, 640, 7);
  check<Sm80Config<SparseWeights<half, 4, 128>, 16, 4, 2, 256, 4, 2>>({}, 13, 200, 640, 3);
  check<Sm80Config<DenseWeights<half, 4, 128, false>, 64, 8, 1, 128, 3, 2>>({}, 70, 300, 512, 5);
  return failures != 0;
}
