// Pieces shared by the prototype kernels: y[M,N] = x[M,K] * w[N,K]^T, w 2:4 sparse int4 with a scale per group.
#pragma once
#include "common/ptx.cuh"

#define CHECK_DIV(a, b) static_assert((a) % (b) == 0)

struct W4Args {
  const uint8_t* weights;  // fragment order, see below
  const uint8_t* meta;
  const half* scales;  // [K / GROUP][N]
  const half* x;       // [M][K]
  half* y;             // [M][N]
  float* partial;      // [M][N], for split K
  int* tickets;        // one per output tile, zero
  int M, N, K;
};
constexpr int GROUP = 128;  // logical k per scale

// Fragment order. A fragment is 16 weight rows x 64 logical k (32 stored values per row), two k32 steps:
//   codes: lane l holds 2 words, one per step; nibble j of a word is the low half of register j, nibble j + 4 its
//          high half; register j covers row l/4 + 8 (j & 1), stored columns 2 (l % 4) + 8 (j >> 1) + {0, 1}.
//   meta:  lane l holds 1 word; lanes with l % 4 in {2s, 2s + 1} serve step s (see mma.sp in the PTX ISA).
constexpr int FRAG_CODES = 256, FRAG_META = 128;  // bytes

// 8 codes (value + 8) to four f16 pairs times their row's scale, one rounding per product.
PTX_INLINE void dequantize(uint32_t (&d)[4], uint32_t codes, uint32_t scale_lo, uint32_t scale_hi) {
  const uint32_t high = codes >> 8;
  d[0] = ptx::hsub2(ptx::and_or<0x000f000f, 0x64006400>(codes), 0x64086408u);
  d[1] = ptx::hfma2(ptx::and_or<0x00f000f0, 0x64006400>(codes), 0x2c002c00u, 0xd480d480u);
  d[2] = ptx::hsub2(ptx::and_or<0x000f000f, 0x64006400>(high), 0x64086408u);
  d[3] = ptx::hfma2(ptx::and_or<0x00f000f0, 0x64006400>(high), 0x2c002c00u, 0xd480d480u);
  d[0] = ptx::hmul2(d[0], scale_lo);
  d[1] = ptx::hmul2(d[1], scale_hi);
  d[2] = ptx::hmul2(d[2], scale_lo);
  d[3] = ptx::hmul2(d[3], scale_hi);
}
PTX_INLINE uint32_t both(half h) { const uint32_t u = __half_as_ushort(h); return u | u << 16; }
