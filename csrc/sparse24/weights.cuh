// 2:4 sparse weights: two stored values per quad of columns, and a nibble of metadata that places them. mma.sp
// m16n8k32, and wgmma.sp m64nNk32.
#pragma once
#include "common/ptx.cuh"

namespace sparse_marlin {

// GROUP: columns that a kernel multiplies with one scale.
template <class T_, int BITS_, int GROUP_> struct SparseWeights {
  using T = T_;
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static constexpr bool ZERO_POINTS = false, SPARSE = true;

  // A metadata word serves the two instructions of 64 columns; the selector names the lanes that hold this one's.
  PTX_INLINE static void mma(float (&acc)[4], const uint32_t (&w)[4], const uint32_t* x, uint32_t meta, int k) {
    const uint32_t columns[4] = {x[0], x[1], x[2], x[3]};
    if (k % 64 == 0)
      ptx::mma_sp_m16n8k32<T, 0>(acc, w, columns, meta);
    else
      ptx::mma_sp_m16n8k32<T, 1>(acc, w, columns, meta);
  }
  template <int R>
  PTX_INLINE static void wgmma(float (&acc)[R], const uint32_t (&w)[4], uint64_t x, const uint32_t& meta, int k) {
    if (k % 64 == 0)
      ptx::wgmma_sp<T, 0>(acc, w, x, meta);
    else
      ptx::wgmma_sp<T, 1>(acc, w, x, meta);
  }
};

}  // namespace sparse_marlin
