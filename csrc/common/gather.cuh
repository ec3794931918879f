// Copies the columns of x that a kernel wants, in its order, into rows that it can read 16 bytes at a time.
#pragma once
#include "common/ptx.cuh"

namespace sparse_marlin {

constexpr int GATHER_THREADS = 256, GATHER_COLUMNS = 8;  // a thread writes 16 bytes

// Grid: (M, blocks for a row). Elements are 16 bits of any type; perm may be null.
__global__ void __launch_bounds__(GATHER_THREADS)
    gather(const uint16_t* x, int64_t x_stride, const int32_t* perm, uint16_t* out, int64_t out_stride, int K) {
  const int64_t first = (int64_t(blockIdx.y) * GATHER_THREADS + threadIdx.x) * GATHER_COLUMNS;
  if (first >= out_stride) return;
  const uint16_t* row = x + blockIdx.x * x_stride;
  uint32_t words[GATHER_COLUMNS / 2] = {};
#pragma unroll
  for (int i = 0; i < GATHER_COLUMNS; ++i)
    if (first + i < K) words[i / 2] |= uint32_t(row[perm ? perm[first + i] : first + i]) << (16 * (i % 2));
  *reinterpret_cast<uint4*>(out + blockIdx.x * out_stride + first) = make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace sparse_marlin
