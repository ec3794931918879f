#include "sparse24/instances_sm80.cuh"

namespace sparse_marlin {
template std::vector<Instance> sparse_sm80<Float16::BFLOAT16, 4>();
}  // namespace sparse_marlin
