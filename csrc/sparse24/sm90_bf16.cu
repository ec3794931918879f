#include "sparse24/instances_sm90.cuh"

namespace sparse_marlin {
template std::vector<Instance> sparse_sm90<Float16::BFLOAT16, 4>();
template std::vector<Instance> sparse_sm90<Float16::BFLOAT16, 8>();
}  // namespace sparse_marlin
