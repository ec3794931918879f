#include "dense/instances_sm90.cuh"

namespace sparse_marlin {
template std::vector<Instance> dense_sm90<Float16::BFLOAT16, 4, true>();
template std::vector<Instance> dense_sm90<Float16::BFLOAT16, 8, false>();
template std::vector<Instance> dense_sm90<Float16::BFLOAT16, 8, true>();
}  // namespace sparse_marlin
