// Which variants of the kernel are compiled for 2:4 weights: the fastest that bench/kernels/tune.cu found.
#pragma once
#include "common/launch_sm80.cuh"
#include "sparse24/weights.cuh"

namespace sparse_marlin {

template <class W> void add_sparse_int4(std::vector<Instance>& list) {
  list.push_back(instance_sm80<Sm80Config<W, 8, 4, 2, 256, 4, 2>>("sm80_128x8"));
  list.push_back(instance_sm80<Sm80Config<W, 16, 4, 2, 256, 4, 2>>("sm80_128x16"));
  list.push_back(instance_sm80<Sm80Config<W, 32, 4, 1, 128, 5, 3>>("sm80_128x32"));
  list.push_back(instance_sm80<Sm80Config<W, 64, 4, 1, 128, 3, 2>>("sm80_128x64"));
}
template <class W> void add_sparse_int8(std::vector<Instance>& list) {  // see add_dense_int8
  list.push_back(instance_sm80<Sm80Config<W, 16, 4, 2, 128, 4, 2>>("sm80_128x16"));
  list.push_back(instance_sm80<Sm80Config<W, 64, 4, 1, 64, 4, 3>>("sm80_128x64"));
}

template <Float16 DTYPE, int BITS> std::vector<Instance> sparse_sm80() {
  using T = Scalar<DTYPE>;
  std::vector<Instance> list;
  if constexpr (BITS == 4) {
    add_sparse_int4<SparseWeights<T, 4, 128>>(list);
    add_sparse_int4<SparseWeights<T, 4, 32>>(list);
  } else {
    add_sparse_int8<SparseWeights<T, 8, 32>>(list);
  }
  return list;
}

}  // namespace sparse_marlin
