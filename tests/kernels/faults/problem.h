// A random 2:4 int4 problem in the packed form of w4.cuh, and the expected result.
#pragma once
#include <cmath>
#include <random>
#include <vector>

#include "faults/w4.cuh"

struct Problem {
  int M, N, K;
  std::vector<uint8_t> codes, meta;
  std::vector<half> scales, x, y;
  std::vector<float> partial;
  std::vector<int> tickets;
  std::vector<double> expected, magnitude;  // magnitude: the sum of the products' absolute values

  // Fragments lie as [N / (16 warps)][K / 64][warps], so that a block's stage is contiguous.
  Problem(int M_, int N_, int K_, int warps) : M(M_), N(N_), K(K_) {
    std::mt19937 random(7 * M + N + K);
    std::vector<double> dense(size_t(N) * K, 0.0);
    codes.assign(size_t(N) * K / 4, 0);
    meta.assign(size_t(N) * K / 8, 0);
    scales.resize(size_t(K / GROUP) * N);
    x.resize(size_t(M) * K);
    y.assign(size_t(M) * N, __ushort_as_half(0x7fff));
    partial.assign(size_t(M) * N, NAN);
    tickets.assign(4096, 0);
    for (half& s : scales) s = half(0.005f + 0.01f * float(random() % 1000) / 1000.f);
    for (half& v : x) v = half(float(int(random() % 2001) - 1000) / 500.f);
    static constexpr uint8_t PAIRS[6] = {0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
    for (int n = 0; n < N; ++n)
      for (int k = 0; k < K; k += 4) {
        const int row = n % 16, step = k / 32 % 2, group = k % 32 / 4;
        const size_t fragment = (size_t(n / 16 / warps) * (K / 64) + k / 64) * warps + n / 16 % warps;
        const uint8_t pair = PAIRS[random() % 6];
        const int meta_lane = row % 8 * 4 + 2 * step + group / 4, nibble = 4 * (row / 8) + group % 4;
        meta[fragment * FRAGMENT_META + meta_lane * 4 + nibble / 2] |= uint8_t(pair << 4 * (nibble & 1));
        for (int h = 0; h < 2; ++h) {
          const int code = int(random() % 16), stored = 2 * group + h;
          const int lane = row % 8 * 4 + stored % 8 / 2, reg = row / 8 + 2 * (stored / 8), at = reg + 4 * (stored & 1);
          codes[fragment * FRAGMENT_CODES + lane * 8 + step * 4 + at / 2] |= uint8_t(code << 4 * (at & 1));
          const half scale = scales[size_t(k / GROUP) * N + n];
          dense[size_t(n) * K + k + (pair >> 2 * h & 3)] = float(__hmul(half(float(code - 8)), scale));
        }
      }
    expected.assign(size_t(M) * N, 0.0);
    magnitude = expected;
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n)
        for (int k = 0; k < K; ++k) {
          const double product = dense[size_t(n) * K + k] * double(float(x[size_t(m) * K + k]));
          expected[size_t(m) * N + n] += product;
          magnitude[size_t(m) * N + n] += std::fabs(product);
        }
  }
  W4Args args() {
    return {codes.data(), meta.data(), scales.data(), x.data(), y.data(), partial.data(), tickets.data(), M, N, K};
  }
  // Every element within what half output and float accumulation allow, and every ticket given back.
  bool right() const {
    for (int ticket : tickets)
      if (ticket) return false;
    for (size_t i = 0; i < y.size(); ++i) {
      const double allowed = std::fabs(expected[i]) * 0x1p-11 + magnitude[i] * 0x1p-22 + 1e-7;
      if (!(std::fabs(double(float(y[i])) - expected[i]) <= allowed)) return false;
    }
    return true;
  }
};
