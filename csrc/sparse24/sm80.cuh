// 2:4 sparse weights on mma.sp m16n8k32: two stored values per quad of columns, and a nibble of metadata that places
// them.
#pragma once
#include "common/gemm_sm80.cuh"

namespace sparse_marlin {

template <class T_, int BITS_, int GROUP_> struct SparseWeights {
  using T = T_;
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static constexpr bool ZERO_POINTS = false, SPARSE = true;

  // A metadata word serves the two instructions of 64 columns; the selector names the lanes that hold this one's.
  PTX_INLINE static void multiply(float (&acc)[4], const uint32_t (&w)[4], const uint32_t (&x)[4], uint32_t meta,
                                  int k) {
    if (k % 64 == 0)
      ptx::mma_sp_m16n8k32<T, 0>(acc, w, x, meta);
    else
      ptx::mma_sp_m16n8k32<T, 1>(acc, w, x, meta);
  }
};

}  // namespace sparse_marlin
