// A problem whose numbers are functions of their coordinates, its prepared weight, and what the answer must be.
//
// The prepared weight is made from the coordinate map of csrc/common/layout.h, number by number. EXACT problems have
// integers and powers of two, so that every sum is exact in float and every right kernel gives the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "common/layout.h"
#include "gemm.h"

namespace gemm_test {
using namespace sparse_marlin;

inline uint32_t hash(uint32_t a, uint32_t b, uint32_t salt) {
  uint32_t x = a * 0x9e3779b1u ^ (b + 0x7f4a7c15u) * 0x85ebca77u ^ salt * 0xc2b2ae3du;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// 16-bit floats as patterns, so that this header needs no CUDA.
inline uint16_t round_16(double v, Float16 type) {
  const int mantissa = type == Float16::HALF ? 10 : 7, min_exponent = type == Float16::HALF ? -14 : -126;
  const int bias = -min_exponent + 1;
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  v = std::fabs(v);
  if (v == 0) return sign;
  int exponent = std::max(std::ilogb(v), min_exponent);
  const double ulps = std::nearbyint(std::ldexp(v, mantissa - exponent));        // ties to even
  return uint16_t(sign + ((exponent + bias - 1) << mantissa) + uint16_t(ulps));  // a carry runs into the exponent
}
inline double value_16(uint16_t u, Float16 type) {
  const int mantissa = type == Float16::HALF ? 10 : 7, min_exponent = type == Float16::HALF ? -14 : -126;
  const int e = (u & 0x7fff) >> mantissa, m = u & ((1 << mantissa) - 1);
  const double v =
      e ? std::ldexp((1 << mantissa) + m, e + min_exponent - 1 - mantissa) : std::ldexp(m, min_exponent - mantissa);
  return u & 0x8000 ? -v : v;
}

struct GemmProblem {
  Scheme scheme;
  int M, N, K;
  bool exact, with_bias;
  uint32_t salt;

  int groups() const { return scheme.group_size == -1 ? 1 : K / scheme.group_size; }
  int group_of(int k) const { return scheme.group_size == -1 ? 0 : k / scheme.group_size; }
  int zero_code() const { return 1 << (scheme.num_bits - 1); }
  double rounded(double v) const { return value_16(round_16(v, scheme.dtype), scheme.dtype); }

  // Column: of the stored values where the matrix is sparse.
  int code(int n, int column) const {
    const uint32_t h = hash(n, column, salt + 1);
    if (exact) return zero_code() + int(h % 5) - 2;
    return int(h >> 8 & ((1u << scheme.num_bits) - 1));
  }
  int meta(int n, int quad) const {  // two increasing positions
    static constexpr uint8_t PAIRS[6] = {0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
    return PAIRS[hash(n, quad, salt + 2) % 6];
  }
  double scale(int n, int group) const {
    const uint32_t h = hash(n, group, salt + 3);
    if (exact) return std::ldexp(1.0, -int(h % 3) - (scheme.num_bits == 8 ? 6 : 3));
    return rounded((0.005 + 0.01 * (h % 1024) / 1024) * (scheme.num_bits == 8 ? 1.0 / 16 : 1.0));
  }
  int zero_point(int n, int group) const {
    if (!scheme.zero_points) return zero_code();
    const uint32_t h = hash(n, group, salt + 4);
    return exact ? zero_code() + int(h % 3) - 1 : int(h % (1u << scheme.num_bits));
  }
  uint16_t x_bits(int m, int k) const {
    const uint32_t h = hash(m, k, salt + 5);
    return round_16(exact ? double(int(h % 5) - 2) : (int(h % 4001) - 2000) / 1000.0, scheme.dtype);
  }
  uint16_t bias_bits(int n) const {
    const uint32_t h = hash(n, 0, salt + 6);
    return round_16(exact ? double(int(h % 9) - 4) : (int(h % 2001) - 1000) / 100.0, scheme.dtype);
  }
  std::vector<double> token(int m) const {  // x[m, :]
    std::vector<double> x(K);
    for (int k = 0; k < K; ++k) x[k] = value_16(x_bits(m, k), scheme.dtype);
    return x;
  }
  // The weight's row as the library defines it: the product rounded once to 16 bits.
  std::vector<double> row(int n) const {
    std::vector<double> w(K, 0.0);
    if (!scheme.sparse)
      for (int k = 0; k < K; ++k) w[k] = rounded((code(n, k) - zero_point(n, group_of(k))) * scale(n, group_of(k)));
    else
      for (int quad = 0; quad < K / 4; ++quad)
        for (int i = 0; i < 2; ++i)
          w[4 * quad + (meta(n, quad) >> 2 * i & 3)] =
              rounded((code(n, 2 * quad + i) - zero_code()) * scale(n, group_of(4 * quad)));
    return w;
  }
};

struct Answer {
  double value, allowed;  // allowed: error from rounding y and from adding in float
};
// y[m, n] from p.row(n) and p.token(m).
inline Answer answer(const GemmProblem& p, const std::vector<double>& row, const std::vector<double>& x, int n) {
  double sum = p.with_bias ? value_16(p.bias_bits(n), p.scheme.dtype) : 0, magnitude = std::fabs(sum);
  for (int k = 0; k < p.K; ++k) {
    const double product = row[k] * x[k];
    sum += product, magnitude += std::fabs(product);
  }
  if (p.exact) return {p.rounded(sum), 0.0};
  return {sum, std::fabs(sum) * (p.scheme.dtype == Float16::HALF ? 0x1p-11 : 0x1p-8) + magnitude * 0x1p-20 + 1e-7};
}

struct Prepared {
  std::vector<uint32_t> weights, meta;
  std::vector<uint16_t> scales;
  std::vector<float> row_scales;
};

inline void parallel(int n, int threads, const std::function<void(int)>& body) {
  if (threads <= 1) {
    for (int i = 0; i < n; ++i) body(i);
    return;
  }
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([=, &body] {
      for (int i = t; i < n; i += threads) body(i);
    });
  for (auto& t : pool) t.join();
}

inline Prepared prepare(const GemmProblem& p, int threads = 1) {
  using namespace layout;
  const Scheme& s = p.scheme;
  const int padded_k = (p.K + K_PANEL - 1) / K_PANEL * K_PANEL, panels = (p.N + PANEL_ROWS - 1) / PANEL_ROWS;
  const int fk = fragment_k(s.num_bits, s.sparse), per_word = 32 / s.num_bits, stored = s.sparse ? 2 : 1;
  const int groups = s.group_size == -1 ? 1 : padded_k / s.group_size, record = s.zero_points ? 4 : 2;
  const int unit = s.dtype == Float16::HALF ? SUBNORMAL_UNIT_F16 : SUBNORMAL_UNIT_BF16;
  const double largest = s.dtype == Float16::HALF ? 65504.0 : 0x1.fep127;
  Prepared out;
  out.weights.resize(panels * panel_code_bytes(padded_k, s.num_bits, s.sparse) / 4);
  if (s.sparse) out.meta.resize(panels * panel_meta_bytes(padded_k) / 4);
  out.scales.assign(size_t(panels) * groups * PANEL_ROWS / 2 * record, 0);
  out.row_scales.assign(size_t(panels) * PANEL_ROWS, 1.f);
  parallel(panels, threads, [&](int panel) {
    for (int fragment = 0; fragment < padded_k / fk * FRAGMENTS_PER_PANEL; ++fragment) {
      const int n0 = panel * PANEL_ROWS + fragment % FRAGMENTS_PER_PANEL * FRAGMENT_ROWS,
                k0 = fragment / FRAGMENTS_PER_PANEL * fk;
      uint32_t* words =
          out.weights.data() + (size_t(panel) * (padded_k / fk * FRAGMENTS_PER_PANEL) + fragment) * 32 * 4;
      for (int lane = 0; lane < 32; ++lane)
        for (int word = 0; word < 4; ++word) {
          uint32_t v = 0;
          for (int i = 0; i < per_word; ++i) {
            const Coordinate c = code_coordinate(s.num_bits, lane, word, i);
            const int n = n0 + c.row, column = k0 / stored + c.column;
            const int code = n < p.N && column < p.K / stored ? p.code(n, column) : p.zero_code();
            v |= uint32_t(code) << (i * s.num_bits);
          }
          words[lane * 4 + word] = v;
        }
    }
    for (int fragment = 0; s.sparse && fragment < padded_k / META_K * FRAGMENTS_PER_PANEL; ++fragment) {
      const int n0 = panel * PANEL_ROWS + fragment % FRAGMENTS_PER_PANEL * FRAGMENT_ROWS,
                k0 = fragment / FRAGMENTS_PER_PANEL * META_K;
      uint32_t* words = out.meta.data() + (size_t(panel) * (padded_k / META_K * FRAGMENTS_PER_PANEL) + fragment) * 32;
      for (int lane = 0; lane < 32; ++lane) {
        uint32_t v = 0;
        for (int i = 0; i < 8; ++i) {
          const Coordinate c = meta_coordinate(lane, i);
          const int n = n0 + c.row, quad = k0 / 4 + c.column;
          v |= uint32_t(n < p.N && quad < p.K / 4 ? p.meta(n, quad) : 0x4) << (4 * i);
        }
        words[lane] = v;
      }
    }
    for (int r = 0; r < PANEL_ROWS; ++r) {
      const int n = panel * PANEL_ROWS + r;
      if (n >= p.N) continue;
      double max = 0;
      for (int g = 0; g < p.groups(); ++g) max = std::fmax(max, std::fabs(p.scale(n, g)));
      int e = max > 0 ? std::ilogb(largest / max) + unit : 0;
      while (max > 0 && std::ldexp(max, e - unit) > largest) --e;
      out.row_scales[n] = std::ldexp(1.f, -e);
      for (int g = 0; g < p.groups(); ++g) {
        uint16_t* pair = out.scales.data() + ((size_t(panel) * groups + g) * (PANEL_ROWS / 2) + r / 2) * record;
        const int shift = row_shift(s.num_bits, r);
        pair[r % 2] = round_16(std::ldexp(p.scale(n, g), e - unit - shift), s.dtype);
        if (s.zero_points) pair[2 + r % 2] = uint16_t(p.zero_point(n, g) << shift);
      }
    }
  });
  return out;
}

inline std::vector<Scheme> schemes(bool sparse) {
  std::vector<Scheme> all;
  for (Float16 dtype : {Float16::HALF, Float16::BFLOAT16})
    for (int num_bits : {4, 8})
      for (int group_size : {-1, 32, 64, 128})
        for (bool zero_points : {false, true})
          if (!(sparse && zero_points)) all.push_back({dtype, num_bits, group_size, sparse, zero_points});
  return all;
}

inline std::string name(const GemmProblem& p) {
  const Scheme& s = p.scheme;
  char text[160];
  std::snprintf(text, sizeof text, "%s %s int%d group %d%s, %d x %d x %d%s%s, salt %u", s.sparse ? "2:4" : "dense",
                s.dtype == Float16::HALF ? "f16" : "bf16", s.num_bits, s.group_size,
                s.zero_points ? " zero points" : "", p.M, p.N, p.K, p.exact ? " exact" : "", p.with_bias ? " bias" : "",
                p.salt);
  return text;
}

}  // namespace gemm_test
