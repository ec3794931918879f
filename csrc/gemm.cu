#include <algorithm>

#include "common/gather.cuh"
#include "common/instances.h"
#include "gemm.h"

namespace sparse_marlin {
namespace {

const std::vector<Instance>& instances() {
  static const std::vector<Instance> all = [] {
    std::vector<Instance> list;
    for (const auto& part : {
             dense_sm80<Float16::HALF, 4, false>(),     dense_sm90<Float16::HALF, 4, false>(),
             dense_sm80<Float16::HALF, 4, true>(),      dense_sm90<Float16::HALF, 4, true>(),
             sparse_sm80<Float16::HALF, 4>(),           sparse_sm90<Float16::HALF, 4>(),
             dense_sm80<Float16::HALF, 8, false>(),     dense_sm90<Float16::HALF, 8, false>(),
             dense_sm80<Float16::HALF, 8, true>(),      dense_sm90<Float16::HALF, 8, true>(),
             sparse_sm80<Float16::HALF, 8>(),           sparse_sm90<Float16::HALF, 8>(),
             dense_sm80<Float16::BFLOAT16, 4, false>(), dense_sm90<Float16::BFLOAT16, 4, false>(),
             dense_sm80<Float16::BFLOAT16, 4, true>(),  dense_sm90<Float16::BFLOAT16, 4, true>(),
             sparse_sm80<Float16::BFLOAT16, 4>(),       sparse_sm90<Float16::BFLOAT16, 4>(),
             dense_sm80<Float16::BFLOAT16, 8, false>(), dense_sm90<Float16::BFLOAT16, 8, false>(),
             dense_sm80<Float16::BFLOAT16, 8, true>(),  dense_sm90<Float16::BFLOAT16, 8, true>(),
             sparse_sm80<Float16::BFLOAT16, 8>(),       sparse_sm90<Float16::BFLOAT16, 8>(),
         })
      list.insert(list.end(), part.begin(), part.end());
    return list;
  }();
  return all;
}

// Of those that serve the scheme, the one with the longest runs of columns.
const Instance* search(const Scheme& scheme, const std::string& config) {
  const Instance* best = nullptr;
  for (const Instance& i : instances())
    if (i.serves(scheme) && config == i.config && (!best || i.scheme.group_size > best->scheme.group_size)) best = &i;
  return best;
}
const Instance* find(const Scheme& s, const std::string& config) {
  struct Found {
    Scheme scheme;
    std::string config;
    const Instance* instance;
  };
  thread_local std::vector<Found> found;  // a search takes as long as a launch, and a model has few schemes
  for (const Found& f : found)
    if (f.scheme == s && f.config == config) return f.instance;
  found.push_back({s, config, search(s, config)});
  return found.back().instance;
}

std::string refusal(const Scheme& scheme, const std::string& config) {
  const auto is_it = [&](const Config& c) { return config == c.name; };
  if (std::none_of(configs().begin(), configs().end(), is_it)) return "there is no kernel named " + config;
  const Scheme& s = scheme;
  return config + " was not compiled for " + (s.sparse ? "2:4 " : "dense ") + "INT" + std::to_string(s.num_bits) +
         " weights with group size " + std::to_string(s.group_size) + (s.zero_points ? " and zero points" : "");
}

bool is_aligned(const void* p, size_t bytes = 16) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

std::string check(const Problem& p, const Schedule& s) {
  if (p.M < 1 || p.N < 1 || p.K < 1)
    return "M, N and K must be positive, got " + std::to_string(p.M) + ", " + std::to_string(p.N) + ", " +
           std::to_string(p.K);
  if (s.blocks < 1) return "blocks must be positive, got " + std::to_string(s.blocks);
  if (s.split < 0 || s.split > Schedule::MAX_CLUSTER)
    return "split must be 0 to " + std::to_string(Schedule::MAX_CLUSTER) + ", got " + std::to_string(s.split);
  if (p.x_stride % 8 || p.x_stride < (int64_t(p.K) + 7) / 8 * 8)
    return "x_stride must be a multiple of 8 and at least K = " + std::to_string(p.K) + ", got " +
           std::to_string(p.x_stride) + ": copy x with gather_columns";
  if (!p.x || !p.weights || !p.scales || !p.row_scales || !p.y || (p.scheme.sparse && !p.meta))
    return "x, weights, scales, row_scales and y must not be null, nor meta of 2:4 weights";
  if (!p.workspace && s.split == Schedule::STREAM_K) return "workspace must not be null where blocks share tiles";
  for (const void* address : {p.x, p.weights, p.meta, p.scales, static_cast<const void*>(p.workspace)})
    if (!is_aligned(address)) return "x, weights, meta, scales and workspace must be aligned to 16 bytes";
  if (!is_aligned(p.row_scales, 8)) return "row_scales must be aligned to 8 bytes";
  if (!is_aligned(p.y, p.N % 2 ? 2 : 4)) return "y must be aligned to 4 bytes";
  return "";
}

}  // namespace

const std::vector<Config>& configs() {
  static const std::vector<Config> all = {
      {"sm80_128x8", 80, 0, 8, 128},      {"sm80_128x16", 80, 0, 16, 128},  {"sm80_128x32", 80, 0, 32, 128},
      {"sm80_128x64", 80, 0, 64, 128},    {"sm90_128x8", 90, 90, 8, 128},   {"sm90_256x8", 90, 90, 8, 256},
      {"sm90_128x16", 90, 90, 16, 128},   {"sm90_128x32", 90, 90, 32, 128}, {"sm90_256x32", 90, 90, 32, 256},
      {"sm90_128x64", 90, 90, 64, 128},   {"sm90_256x64", 90, 90, 64, 256}, {"sm90_128x128", 90, 90, 128, 128},
      {"sm90_128x256", 90, 90, 256, 128},
  };
  return all;
}

std::string block_shape(const Scheme& scheme, const std::string& config, BlockShape* shape) {
  const Instance* instance = find(scheme, config);
  if (!instance) return refusal(scheme, config);
  *shape = instance->shape;
  return "";
}

int64_t workspace_bytes(const Scheme& scheme, const std::string& config, const Schedule& schedule) {
  const Instance* instance = find(scheme, config);
  if (!instance || schedule.blocks < 1) return -1;
  return schedule.split == Schedule::STREAM_K ? schedule.blocks * instance->shape.workspace_per_block : 0;
}

std::string gemm(const Problem& problem, const std::string& config, const Schedule& schedule, CUstream_st* stream) {
  const Instance* instance = find(problem.scheme, config);
  if (!instance) return refusal(problem.scheme, config);
  if (std::string error = check(problem, schedule); !error.empty()) return error;
  return instance->start(problem, schedule, stream);
}

int clusters_at_once(int blocks) {
  constexpr size_t MOST_OF_A_MULTIPROCESSOR = 200 * 1024;
  return ::clusters_at_once(gather, GATHER_THREADS, MOST_OF_A_MULTIPROCESSOR, blocks);
}

std::string gather_columns(const void* x, int64_t x_stride, const int32_t* perm, void* out, int64_t out_stride, int M,
                           int K, CUstream_st* stream) {
  if (M < 1 || K < 1 || out_stride < K || out_stride % GATHER_COLUMNS || !is_aligned(out))
    return "the rows of a gathered x must be aligned to 16 bytes and hold its " + std::to_string(K) +
           " columns, got a stride of " + std::to_string(out_stride) + " elements";
  constexpr int64_t PER_BLOCK = int64_t(GATHER_THREADS) * GATHER_COLUMNS;
  const dim3 grid(M, unsigned((out_stride + PER_BLOCK - 1) / PER_BLOCK));
  const cudaError_t error = launch(gather, grid, GATHER_THREADS, 0, stream, static_cast<const uint16_t*>(x), x_stride,
                                   perm, static_cast<uint16_t*>(out), out_stride, K);
  return error == cudaSuccess ? "" : std::string("gather_columns failed: ") + cudaGetErrorString(error);
}

}  // namespace sparse_marlin
