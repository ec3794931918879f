#include "dense/instances_sm90.cuh"

namespace sparse_marlin {
template std::vector<Instance> dense_sm90<Float16::HALF, 4, false>();
}  // namespace sparse_marlin
