// A random 2:4 int4 problem, its packed form and the expected result.
#pragma once
#include <cstdio>
#include <random>
#include <vector>

#include "examples/w4_common.cuh"

struct Problem {
  int M, N, K, warps;
  std::vector<uint8_t> codes, meta;
  std::vector<half> scales, x, y;
  std::vector<float> partial;
  std::vector<int> tickets;
  std::vector<double> expected, magnitude;

  // Fragments lie as [N / (16 warps)][K / 64][warps], so that a block's stage is contiguous.
  Problem(int M_, int N_, int K_, int warps_, unsigned seed) : M(M_), N(N_), K(K_), warps(warps_) {
    std::mt19937 rng(seed);
    std::vector<double> dense(size_t(N) * K, 0.0);
    codes.assign(size_t(N) * K / 4, 0);
    meta.assign(size_t(N) * K / 8, 0);
    scales.resize(size_t(K / GROUP) * N);
    x.resize(size_t(M) * K);
    y.assign(size_t(M) * N, __ushort_as_half(0x7fff));
    partial.assign(size_t(M) * N, NAN);
    tickets.assign(4096, 0);
    for (half& s : scales) s = half(0.005f + 0.01f * float(rng() % 1000) / 1000.f);
    for (half& v : x) v = half(float(int(rng() % 2001) - 1000) / 500.f);
    static const uint8_t pairs[6] = {0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
    for (int n = 0; n < N; ++n)
      for (int q = 0; q < K / 4; ++q) {
        const int k = q * 4, row = n % 16, step = k / 32 % 2, group = k % 32 / 4;
        const size_t frag = (size_t(n / 16 / warps) * (K / 64) + k / 64) * warps + n / 16 % warps;
        const uint8_t pair = pairs[rng() % 6];
        const int meta_lane = row % 8 * 4 + 2 * step + group / 4, nibble = 4 * (row / 8) + group % 4;
        meta[frag * FRAG_META + meta_lane * 4 + nibble / 2] |= uint8_t(pair << 4 * (nibble & 1));
        for (int h = 0; h < 2; ++h) {
          const int code = int(rng() % 16), col = 2 * group + h;  // col: stored column within the k32 step
          const int lane = row % 8 * 4 + col % 8 / 2, reg = row / 8 + 2 * (col / 8), nib = reg + 4 * (col & 1);
          codes[frag * FRAG_CODES + lane * 8 + step * 4 + nib / 2] |= uint8_t(code << 4 * (nib & 1));
          const half s = scales[size_t(k / GROUP) * N + n];
          dense[size_t(n) * K + k + (pair >> 2 * h & 3)] = float(__hmul(half(float(code - 8)), s));
        }
      }
    expected.assign(size_t(M) * N, 0.0);
    magnitude = expected;
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < N; ++n)
        for (int k = 0; k < K; ++k) {
          const double v = dense[size_t(n) * K + k] * double(float(x[size_t(m) * K + k]));
          expected[size_t(m) * N + n] += v;
          magnitude[size_t(m) * N + n] += std::fabs(v);
        }
  }
  W4Args args() { return {codes.data(), meta.data(), scales.data(), x.data(), y.data(), partial.data(), tickets.data(), M, N, K}; }
  // Largest error, in units of what f16 output and f32 accumulation allow.
  double error() const {
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const double e = std::fabs(double(float(y[i])) - expected[i]) / (std::fabs(expected[i]) * 0x1p-11 + magnitude[i] * 0x1p-22 + 1e-7);
      if (!(e <= worst)) worst = e == e ? e : INFINITY;
    }
    return worst;
  }
};
