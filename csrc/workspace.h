// Device memory in which the blocks of one launch exchange partial sums.
//
// Kernels find it filled with 0xff bytes and leave it so. Launches that may touch it at the same time must not share
// one (early launches wait for the launch before them before they do): each stream has its own, and so has each
// stream captured into a CUDA graph, because graphs are replayed on streams that nobody knows at capture. It is
// allocated outside torch's caching allocator, whose graph pools take back what a capture allocates.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

namespace sparse_marlin {

// At least `bytes` of workspace for a launch on `stream` of the current device `device`. The first call for a stream or
// a capture allocates, and waits for the fill; later ones only look it up.
cudaError_t get_workspace(int device, cudaStream_t stream, size_t bytes, void** workspace);

}  // namespace sparse_marlin
