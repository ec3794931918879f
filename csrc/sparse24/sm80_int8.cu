#include "sparse24/instances_sm80.cuh"

namespace sparse_marlin {
template std::vector<Instance> sparse_sm80<Float16::HALF, 8>();
template std::vector<Instance> sparse_sm80<Float16::BFLOAT16, 8>();
}  // namespace sparse_marlin
