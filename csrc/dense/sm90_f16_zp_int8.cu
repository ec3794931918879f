#include "dense/instances_sm90.cuh"

namespace sparse_marlin {
template std::vector<Instance> dense_sm90<Float16::HALF, 4, true>();
template std::vector<Instance> dense_sm90<Float16::HALF, 8, false>();
template std::vector<Instance> dense_sm90<Float16::HALF, 8, true>();
}  // namespace sparse_marlin
