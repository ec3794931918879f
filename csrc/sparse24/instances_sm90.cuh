// The variants for sm_90a that are compiled for 2:4 weights.
#pragma once
#include "common/instances_sm90.cuh"
#include "sparse24/weights.cuh"

namespace sparse_marlin {

template <Float16 DTYPE, int BITS> std::vector<Instance> sparse_sm90() {
  using T = Scalar<DTYPE>;
  std::vector<Instance> list;
  add_sm90<SparseWeights<T, BITS, 32>>(list);
  if constexpr (BITS == 4) add_sm90<SparseWeights<T, BITS, 128>>(list);
  return list;
}

}  // namespace sparse_marlin
