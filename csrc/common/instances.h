// The compiled kernels, as gemm.cu finds them. Host code without CUDA headers.
#pragma once
#include "gemm.h"

namespace sparse_marlin {

// One kernel that was compiled for a scheme. It works through K in runs of scheme.group_size columns, so it also serves
// groups of several such runs, and one scale per row.
struct Instance {
  const char* config;
  Scheme scheme;
  BlockShape shape;
  std::string (*start)(const Problem&, const Schedule&, CUstream_st* stream);

  bool serves(const Scheme& s) const {
    return s.dtype == scheme.dtype && s.num_bits == scheme.num_bits && s.sparse == scheme.sparse &&
           s.zero_points == scheme.zero_points && (s.group_size == -1 || s.group_size % scheme.group_size == 0);
  }
};

// Defined in dense/ and sparse24/instances_*.cuh; the .cu files beside them instantiate a few each, to compile at once.
template <Float16 DTYPE, int BITS, bool ZERO_POINTS> std::vector<Instance> dense_sm80();
template <Float16 DTYPE, int BITS> std::vector<Instance> sparse_sm80();
template <Float16 DTYPE, int BITS, bool ZERO_POINTS> std::vector<Instance> dense_sm90();
template <Float16 DTYPE, int BITS> std::vector<Instance> sparse_sm90();

}  // namespace sparse_marlin
