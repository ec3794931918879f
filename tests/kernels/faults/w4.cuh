// Pieces shared by the kernels into which faults are planted: y[M,N] = x[M,K] * w[N,K]^T, w 2:4-sparse int4 with
// one scale per group of 128. They exercise the emulator; the library's kernels are in csrc/.
#pragma once
#include "common/ptx.cuh"

struct W4Args {
  const uint8_t* codes;  // in fragment order, see below
  const uint8_t* meta;
  const half* scales;  // [K / GROUP][N]
  const half* x;       // [M][K]
  half* y;             // [M][N]
  float* partial;      // [M][N], for split K
  int* tickets;        // one per output tile, zero
  int M, N, K;
};
constexpr int GROUP = 128;  // logical k per scale

// A fragment is 16 weight rows x 64 logical k (32 stored values per row), two k32 steps:
//   codes: lane l holds 2 words, one per step; nibble j of a word is the low half of register j, nibble j + 4 its high
//          half; register j covers row l/4 + 8 (j & 1), stored columns 2 (l % 4) + 8 (j >> 1) + {0, 1}.
//   meta:  lane l holds 1 word; lanes with l % 4 in {2s, 2s + 1} serve step s (see mma.sp in the PTX ISA).
constexpr int FRAGMENT_K = 64, FRAGMENT_CODES = 256, FRAGMENT_META = 128;  // the last two in bytes

// Eight codes (value + 8) to four half2 times their row's scale, one rounding per product.
PTX_INLINE void dequantize(uint32_t (&w)[4], uint32_t codes, uint32_t scale_low, uint32_t scale_high) {
  const uint32_t shifted = codes >> 8;
  w[0] = ptx::sub2<half>(ptx::and_or<0x000f000f, 0x64006400>(codes), 0x64086408u);
  w[1] = ptx::fma2<half>(ptx::and_or<0x00f000f0, 0x64006400>(codes), 0x2c002c00u, 0xd480d480u);
  w[2] = ptx::sub2<half>(ptx::and_or<0x000f000f, 0x64006400>(shifted), 0x64086408u);
  w[3] = ptx::fma2<half>(ptx::and_or<0x00f000f0, 0x64006400>(shifted), 0x2c002c00u, 0xd480d480u);
  w[0] = ptx::mul2<half>(w[0], scale_low);
  w[1] = ptx::mul2<half>(w[1], scale_high);
  w[2] = ptx::mul2<half>(w[2], scale_low);
  w[3] = ptx::mul2<half>(w[3], scale_high);
}
PTX_INLINE uint32_t twice(half h) {
  const uint32_t bits = __half_as_ushort(h);
  return bits | bits << 16;
}
// Descriptor of a K-major tile with 128-byte rows in the 128-byte swizzle.
PTX_INLINE uint64_t swizzled_tile(uint32_t addr) {
  return uint64_t((addr & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
