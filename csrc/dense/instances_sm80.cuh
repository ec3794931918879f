// Which variants of the kernel are compiled for dense weights: the fastest that bench/kernels/tune.cu found.
#pragma once
#include "common/launch_sm80.cuh"
#include "dense/weights.cuh"

namespace sparse_marlin {

template <class W> void add_dense_int4(std::vector<Instance>& list) {
  list.push_back(instance_sm80<Sm80Config<W, 8, 4, 2, 256, 3, 2>>("sm80_128x8"));
  list.push_back(instance_sm80<Sm80Config<W, 16, 4, 2, 256, 3, 2>>("sm80_128x16"));
  list.push_back(instance_sm80<Sm80Config<W, 32, 4, 1, 128, 4, 3>>("sm80_128x32"));
  list.push_back(instance_sm80<Sm80Config<W, 64, 4, 1, 128, 3, 2>>("sm80_128x64"));
}
// The memory is the limit for longer: fewer tiles of tokens, and one length of group, lose little.
template <class W> void add_dense_int8(std::vector<Instance>& list) {
  list.push_back(instance_sm80<Sm80Config<W, 16, 4, 2, 128, 3, 2>>("sm80_128x16"));
  list.push_back(instance_sm80<Sm80Config<W, 64, 4, 1, 64, 4, 3>>("sm80_128x64"));
}

template <Float16 DTYPE, int BITS, bool ZERO_POINTS> std::vector<Instance> dense_sm80() {
  using T = Scalar<DTYPE>;
  std::vector<Instance> list;
  if constexpr (BITS == 4) {
    add_dense_int4<DenseWeights<T, 4, 128, ZERO_POINTS>>(list);
    add_dense_int4<DenseWeights<T, 4, 32, ZERO_POINTS>>(list);
  } else {
    add_dense_int8<DenseWeights<T, 8, 32, ZERO_POINTS>>(list);
  }
  return list;
}

}  // namespace sparse_marlin
