// The variants for sm_90a that are compiled for dense weights.
#pragma once
#include "common/instances_sm90.cuh"
#include "dense/weights.cuh"

namespace sparse_marlin {

template <Float16 DTYPE, int BITS, bool ZERO_POINTS> std::vector<Instance> dense_sm90() {
  using T = Scalar<DTYPE>;
  std::vector<Instance> list;
  add_sm90<DenseWeights<T, BITS, 32, ZERO_POINTS>>(list);
  if constexpr (BITS == 4 && !ZERO_POINTS) add_sm90<DenseWeights<T, BITS, 128, ZERO_POINTS>>(list);
  return list;
}

}  // namespace sparse_marlin
