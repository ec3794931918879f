// 16-bit floating-point numbers and their pairs. Every operation rounds once, to nearest even, as on the device.
#pragma once
#include "cuda_runtime.h"

namespace emu {

struct HalfFormat {
  static float to_float(uint16_t b) { return half_to_float(b); }
  static uint16_t from_float(float f) { return float_to_half(f); }
  static uint16_t fma(uint16_t a, uint16_t b, uint16_t c) { return half_fma(a, b, c); }
};
struct Bfloat16Format {
  static float to_float(uint16_t b) { return bf16_to_float(b); }
  static uint16_t from_float(float f) { return float_to_bf16(f); }
  static uint16_t fma(uint16_t a, uint16_t b, uint16_t c) { return bf16_fma(a, b, c); }
};

template <class F> struct __attribute__((may_alias)) Scalar16 {
  uint16_t bits;

  Scalar16() = default;
  Scalar16(float f) : bits(F::from_float(f)) {}
  operator float() const { return F::to_float(bits); }
  static Scalar16 raw(uint16_t b) {
    Scalar16 s;
    s.bits = b;
    return s;
  }
};
template <class F> struct __attribute__((may_alias, aligned(4))) Pair16 {
  Scalar16<F> x, y;
};

// Through the conversion to float these would round later than on the device.
template <class F> void operator+(Scalar16<F>, Scalar16<F>) = delete;
template <class F> void operator-(Scalar16<F>, Scalar16<F>) = delete;
template <class F> void operator*(Scalar16<F>, Scalar16<F>) = delete;
template <class F> void operator/(Scalar16<F>, Scalar16<F>) = delete;

}  // namespace emu

// Float has more than twice the bits of either format: rounding its sum or product again gives the nearest number.
template <class F> emu::Scalar16<F> __hadd(emu::Scalar16<F> a, emu::Scalar16<F> b) { return float(a) + float(b); }
template <class F> emu::Scalar16<F> __hsub(emu::Scalar16<F> a, emu::Scalar16<F> b) { return float(a) - float(b); }
template <class F> emu::Scalar16<F> __hmul(emu::Scalar16<F> a, emu::Scalar16<F> b) { return float(a) * float(b); }
template <class F> emu::Scalar16<F> __hneg(emu::Scalar16<F> a) { return emu::Scalar16<F>::raw(a.bits ^ 0x8000); }
template <class F> emu::Scalar16<F> __hfma(emu::Scalar16<F> a, emu::Scalar16<F> b, emu::Scalar16<F> c) {
  return emu::Scalar16<F>::raw(F::fma(a.bits, b.bits, c.bits));
}
template <class F> emu::Pair16<F> __hadd2(emu::Pair16<F> a, emu::Pair16<F> b) {
  return {__hadd(a.x, b.x), __hadd(a.y, b.y)};
}
template <class F> emu::Pair16<F> __hsub2(emu::Pair16<F> a, emu::Pair16<F> b) {
  return {__hsub(a.x, b.x), __hsub(a.y, b.y)};
}
template <class F> emu::Pair16<F> __hmul2(emu::Pair16<F> a, emu::Pair16<F> b) {
  return {__hmul(a.x, b.x), __hmul(a.y, b.y)};
}
template <class F> emu::Pair16<F> __hneg2(emu::Pair16<F> a) { return {__hneg(a.x), __hneg(a.y)}; }
template <class F> emu::Pair16<F> __hfma2(emu::Pair16<F> a, emu::Pair16<F> b, emu::Pair16<F> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class F> float __low2float(emu::Pair16<F> a) { return a.x; }
template <class F> float __high2float(emu::Pair16<F> a) { return a.y; }
