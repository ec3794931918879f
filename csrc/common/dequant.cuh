// Codes to 16-bit weights in the registers of mma's operand A: (code - zero) * scale, rounded once.
//
// A code masked in place is a subnormal number of either 16-bit type: bits 0 ... 7 of the pattern count units of
// 2 ** -24 (half) or 2 ** -133 (bfloat16; its bit 7 is the lowest bit of the exponent, and 2 ** -126 is 128 units, so
// the count goes on). Multiplying by the prepared scale, which holds the inverse of the unit, makes it a weight.
//   symmetric     fma(code, scale, -zero * scale): the product with a power of two is exact, one rounding   (1)
//   zero points   (code - zero) is exact, one rounding in the product   (2 instructions)
#pragma once
#include "common/ptx.cuh"
#include "gemm.h"

namespace sparse_marlin {

template <Float16 DTYPE> using Scalar = std::conditional_t<DTYPE == Float16::HALF, half, __nv_bfloat16>;

// What the lanes of a row pair need for one group.
struct PairScales {
  uint32_t scale[2];  // of rows 2 g and 2 g + 1, in both halves
  uint32_t zero[2];   // -zero * scale, or with zero points the zero point in the code's place
};

// As they are stored: the scales of a row pair, and after them its zero points.
template <bool ZERO_POINTS> using StoredScales = std::conditional_t<ZERO_POINTS, uint2, uint32_t>;

template <class T, int BITS> PTX_INLINE PairScales expand_scales(uint2 words) {
  PairScales s;
  s.scale[0] = ptx::prmt<0x1010>(words.x, 0), s.scale[1] = ptx::prmt<0x3232>(words.x, 0);
  s.zero[0] = ptx::prmt<0x1010>(words.y, 0), s.zero[1] = ptx::prmt<0x3232>(words.y, 0);
  return s;
}
template <class T, int BITS> PTX_INLINE PairScales expand_scales(uint32_t word) {
  PairScales s;
  s.scale[0] = ptx::prmt<0x1010>(word, 0), s.scale[1] = ptx::prmt<0x3232>(word, 0);
  // Minus the middle code, as a subnormal. As patterns: the sign and 8, 8 << 4 or 128.
  constexpr uint32_t LOW = BITS == 4 ? 0x80088008u : 0x80808080u, HIGH = 0x80808080u;
  s.zero[0] = ptx::mul2<T>(s.scale[0], LOW), s.zero[1] = ptx::mul2<T>(s.scale[1], HIGH);
  return s;
}

template <class T, bool ZERO_POINTS> PTX_INLINE uint32_t scale_pair(uint32_t codes, const PairScales& s, int row) {
  if constexpr (ZERO_POINTS)
    return ptx::mul2<T>(ptx::sub2<T>(codes, s.zero[row]), s.scale[row]);
  else
    return ptx::fma2<T>(codes, s.scale[row], s.zero[row]);
}

// The four registers of instruction `step` of a fragment.
template <class T, int BITS, bool ZERO_POINTS>
PTX_INLINE void dequantize(uint32_t (&w)[4], const uint32_t (&words)[4], int step, const PairScales& s) {
  if constexpr (BITS == 4) {
    const uint32_t low = words[step], high = low >> 8;
    w[0] = scale_pair<T, ZERO_POINTS>(low & 0x000f000fu, s, 0);
    w[1] = scale_pair<T, ZERO_POINTS>(low & 0x00f000f0u, s, 1);
    w[2] = scale_pair<T, ZERO_POINTS>(high & 0x000f000fu, s, 0);
    w[3] = scale_pair<T, ZERO_POINTS>(high & 0x00f000f0u, s, 1);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = words[2 * step + i];
      w[2 * i] = scale_pair<T, ZERO_POINTS>(ptx::prmt<0x4240>(word, 0), s, 0);
      w[2 * i + 1] = scale_pair<T, ZERO_POINTS>(ptx::prmt<0x4341>(word, 0), s, 1);
    }
  }
}

}  // namespace sparse_marlin
