// The launch interface of the kernels: raw pointers and sizes, no torch, no CUDA headers.
//
//   y[M, N] = x[M, K] * w[N, K]^T + bias
//
// Prepared weights come from sparse_marlin/layouts; csrc/README.md draws their order. N is padded to ROW_PANEL and K to
// K_PANEL when a weight is prepared. x and y are never padded, but see x_stride.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

struct CUstream_st;  // cudaStream_t is CUstream_st*

namespace sparse_marlin {

constexpr int ROW_PANEL = 128;  // a prepared weight has ceil(N / 128) panels of rows
constexpr int K_PANEL = 256;    // and K rounded up to 256 columns; padding has scale 0

enum class Float16 { HALF, BFLOAT16 };

// What a kernel is compiled for.
struct Scheme {
  Float16 dtype = Float16::HALF;  // of x, y, bias and the scales
  int num_bits = 4;               // 4 or 8
  int group_size = 128;           // 32, 64, 128, or -1: one scale per row
  bool sparse = false;            // 2:4
  bool zero_points = false;       // dense only; otherwise codes are centred on 2 ** (num_bits - 1)
  bool operator==(const Scheme&) const = default;
};

// A kernel for 9.0 may read weights, meta and scales while the launch before it still runs: what wrote them must have
// ended, not only come before on the stream. Everything else may be that launch's.
struct Problem {
  Scheme scheme;
  int M = 0, N = 0, K = 0;
  const void* x = nullptr;            // [M, K], rows x_stride elements apart, 16-byte aligned
  int64_t x_stride = 0;               // a multiple of 8, at least K rounded up to 8; columns past K must be zero
  const void* weights = nullptr;      // fragments of codes
  const void* meta = nullptr;         // fragments of 2:4 metadata, null for dense
  const void* scales = nullptr;       // scales, with zero points beside them where the scheme has them
  const float* row_scales = nullptr;  // [padded N] power of two that undoes the normalisation of each row's scales
  const void* bias = nullptr;         // [N] or null
  void* y = nullptr;                  // [M, N], rows N elements apart
  void* workspace = nullptr;          // see workspace_bytes
};

// A named variant of the kernel: the tile of y that a block computes. All are right for any M; they differ in speed.
struct Config {
  const char* name;
  int min_capability;  // lowest compute capability that runs it, 80 for 8.0
  int max_capability;  // highest one, 0 for no limit
  int token_tile;
  int row_tile;
};
const std::vector<Config>& configs();

// What one block of a config needs for a scheme: pure numbers, no GPU is asked.
struct BlockShape {
  int threads = 0, shared_bytes = 0, token_tile = 0, row_tile = 0, k_tile = 0;
  int blocks_per_sm = 0;  // that it was compiled for (registers); shared memory may allow fewer
  int64_t workspace_per_block = 0;
};
// All functions that return a string return an empty one, or what is wrong.
std::string block_shape(const Scheme& scheme, const std::string& config, BlockShape* shape);

// How thread blocks share the work. Any schedule gives a right result, and the same one the same bits.
struct Schedule {
  int blocks = 1;  // best is what fits the GPU at once
  // STREAM_K: all blocks get the same share, and tiles of y may be cut between them. WHOLE: a tile is one block's.
  // From 2 on (kernels for 9.0 only): so many blocks form a cluster and share a tile; `blocks` follows from that.
  int split = STREAM_K;
  static constexpr int STREAM_K = 0, WHOLE = 1, MAX_CLUSTER = 8;
};

// Bytes of workspace that a launch needs; -1 for an unknown config or scheme. The workspace must be filled with 0xff
// bytes once, when it is allocated. Every launch leaves it so, whatever the config: one workspace of the largest size
// serves all launches of a stream, one after the other. Streams must not share one.
int64_t workspace_bytes(const Scheme& scheme, const std::string& config, const Schedule& schedule);

std::string gemm(const Problem& problem, const std::string& config, const Schedule& schedule, CUstream_st* stream);

// How many clusters of that many blocks the current device runs at once, with one block per multiprocessor.
int clusters_at_once(int blocks);

// out[m, i] = x[m, perm[i]], i < K, and 0 for K <= i < out_stride. With perm null the columns stay where they are: this
// also pads an x whose rows are not 16-byte aligned. x has rows x_stride elements apart; elements are 16-bit.
std::string gather_columns(const void* x, int64_t x_stride, const int32_t* perm, void* out, int64_t out_stride, int M,
                           int K, CUstream_st* stream);

}  // namespace sparse_marlin
