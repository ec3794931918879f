// 16-bit arithmetic, each result rounded once. A NaN comes out as on the device: all bits set but the sign.
#include <immintrin.h>

#include <bit>
#include <cmath>

#include "emu.h"

namespace emu {

constexpr uint16_t CANONICAL_NAN = 0x7fff;

float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
uint16_t float_to_half(float f) {
  if (f != f) return CANONICAL_NAN;
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
}
float bf16_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }
uint16_t float_to_bf16(float f) {
  if (f != f) return CANONICAL_NAN;
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// a * b + c rounded to odd in float: a second rounding, to 16 bits, then gives the correctly rounded result.
static float fma_to_odd(float a, float b, float c) {
  const double product = double(a) * b, sum = product + c;  // the product is exact
  const double back = sum - product, error = (product - (sum - back)) + (c - back);
  double d = sum;
  const uint64_t d_bits = std::bit_cast<uint64_t>(d);
  if (std::isfinite(sum) && error != 0 && d_bits % 2 == 0)
    d = std::bit_cast<double>((error > 0) == (sum > 0) ? d_bits + 1 : d_bits - 1);
  float f = float(d);
  const uint32_t f_bits = std::bit_cast<uint32_t>(f);
  if (std::isfinite(d) && f != d && f_bits % 2 == 0)
    f = std::bit_cast<float>(std::fabs(d) > std::fabs(double(f)) ? f_bits + 1 : f_bits - 1);
  return f;
}
uint16_t half_fma(uint16_t a, uint16_t b, uint16_t c) {
  return float_to_half(fma_to_odd(half_to_float(a), half_to_float(b), half_to_float(c)));
}
uint16_t bf16_fma(uint16_t a, uint16_t b, uint16_t c) {
  return float_to_bf16(fma_to_odd(bf16_to_float(a), bf16_to_float(b), bf16_to_float(c)));
}

}  // namespace emu
