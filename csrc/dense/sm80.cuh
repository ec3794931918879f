// Dense weights on mma.sync m16n8k16.
#pragma once
#include "common/gemm_sm80.cuh"

namespace sparse_marlin {

template <class T_, int BITS_, int GROUP_, bool ZERO_POINTS_> struct DenseWeights {
  using T = T_;
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static constexpr bool ZERO_POINTS = ZERO_POINTS_, SPARSE = false;

  // Column k is where w begins; x holds the 32 columns around it.
  PTX_INLINE static void multiply(float (&acc)[4], const uint32_t (&w)[4], const uint32_t (&x)[4], uint32_t, int k) {
    const int half = k % 32 / 16;
    const uint32_t columns[2] = {x[2 * half], x[2 * half + 1]};
    ptx::mma_m16n8k16<T>(acc, w, columns);
  }
};

}  // namespace sparse_marlin
