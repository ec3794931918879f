// Dense weights: mma.sync m16n8k16, and wgmma m64nNk16.
#pragma once
#include "common/ptx.cuh"

namespace sparse_marlin {

// GROUP: columns that a kernel multiplies with one scale.
template <class T_, int BITS_, int GROUP_, bool ZERO_POINTS_> struct DenseWeights {
  using T = T_;
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static constexpr bool ZERO_POINTS = ZERO_POINTS_, SPARSE = false;

  PTX_INLINE static void mma(float (&acc)[4], const uint32_t (&w)[4], const uint32_t* x, uint32_t, int) {
    const uint32_t columns[2] = {x[0], x[1]};
    ptx::mma_m16n8k16<T>(acc, w, columns);
  }
  template <int R>
  PTX_INLINE static void wgmma(float (&acc)[R], const uint32_t (&w)[4], uint64_t x, const uint32_t&, int) {
    ptx::wgmma<T>(acc, w, x);
  }
};

}  // namespace sparse_marlin
