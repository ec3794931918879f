#include "dense/instances_sm80.cuh"

namespace sparse_marlin {
template std::vector<Instance> dense_sm80<Float16::HALF, 4, true>();
}  // namespace sparse_marlin
