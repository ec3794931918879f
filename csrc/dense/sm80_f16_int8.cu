#include "dense/instances_sm80.cuh"

namespace sparse_marlin {
template std::vector<Instance> dense_sm80<Float16::HALF, 8, false>();
template std::vector<Instance> dense_sm80<Float16::HALF, 8, true>();
}  // namespace sparse_marlin
