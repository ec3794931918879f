// Measures variants of the sm_80 kernel on a GPU: checks sampled entries against float64 and the bits of repeated runs,
// then times launches inside a CUDA graph with the weights rotated through more memory than the L2 holds.
//
//     nvcc -std=c++20 -O3 -arch=sm_90 -Icsrc -Itests/kernels bench/kernels/tune_sm80.cu -o build/tune_sm80
//     build/tune_sm80 [substring of the variants' names]
#include <cstdio>
#include <cstdlib>
#include <string>

#include "common/launch_sm80.cuh"
#include "dense/sm80.cuh"
#include "on_device.h"
#include "sparse24/sm80.cuh"

using namespace gemm_test;

struct Variant {
  std::string name;
  Scheme scheme;
  BlockShape shape;
  std::string (*start)(const Problem&, int, cudaStream_t);
  int (*occupancy)();
};
template <class C> int occupancy() {
  int n = 0;
  CUDA(cudaFuncSetAttribute(gemm_sm80<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, Sm80Shared<C>::bytes));
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, gemm_sm80<C>, C::THREADS, Sm80Shared<C>::bytes));
  return n;
}
template <class C> Variant variant() {
  using W = typename C::Weights;
  char text[128];
  const bool bf16 = ptx::is_bf16<typename C::T>;
  std::snprintf(text, sizeof text, "%s-%s-w%d-g%d%s t%d n%d k%d kt%d st%d b%d", W::SPARSE ? "sparse" : "dense",
                bf16 ? "bf16" : "f16", W::BITS, W::GROUP, W::ZERO_POINTS ? "-zp" : "", C::TOKENS, C::WARPS_N,
                C::WARPS_K, C::K_TILE, C::STAGES, C::BLOCKS_PER_SM);
  return {text,
          {bf16 ? Float16::BFLOAT16 : Float16::HALF, W::BITS, W::GROUP, W::SPARSE, W::ZERO_POINTS},
          shape_sm80<C>(),
          start_sm80<C>,
          occupancy<C>};
}

constexpr int MAX_M = 256;

bool right(const OnDevice& d, const Variant& v, int M, int blocks) {
  const size_t count = size_t(M) * d.p.N;
  std::vector<uint16_t> first(count), again(count);
  for (int i = 0; i < 10; ++i) {
    CUDA(cudaMemset(d.y, 0xff, count * 2));
    if (const std::string e = v.start(d.problem(M, i % d.copies), blocks, nullptr); !e.empty())
      return std::printf("%s\n", e.c_str()), false;
    CUDA(cudaMemcpy((i ? again : first).data(), d.y, count * 2, cudaMemcpyDeviceToHost));
    if (i && again != first) return std::printf("  %s M %d: the bits of run %d differ\n", v.name.c_str(), M, i), false;
  }
  for (int i = 0; i < 48; ++i) {
    const int n = i < 8 ? d.p.N - 1 - i : int(hash(i, 1, 99) % d.p.N);
    const auto row = d.p.row(n);
    for (int m : {0, M / 2, M - 1}) {
      const Answer a = answer(d.p, row, d.p.token(m), n);
      const double got = value_16(first[size_t(m) * d.p.N + n], d.p.scheme.dtype);
      if (!(std::fabs(got - a.value) <= a.allowed))
        return std::printf("  %s M %d: y[%d, %d] = %g, expected %g +- %g\n", v.name.c_str(), M, m, n, got, a.value,
                           a.allowed),
               false;
    }
  }
  return true;
}

double microseconds(const OnDevice& d, const Variant& v, int M, int blocks) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  const int launches = std::max(d.copies, 20);
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < launches; ++i) v.start(d.problem(M, i % d.copies), blocks, stream);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<double> us;
  for (int i = 0; i < 9; ++i) {
    CUDA(cudaEventRecord(begin, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaEventRecord(end, stream));
    CUDA(cudaEventSynchronize(end));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    us.push_back(ms * 1000 / launches);
  }
  std::sort(us.begin(), us.end());
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  return us[us.size() / 2];
}

template <class W, int T> void add_small(std::vector<Variant>& v) {
  if constexpr (W::SPARSE) {
    v.push_back(variant<Sm80Config<W, T, 4, 1, 128, 6, 4>>());
    v.push_back(variant<Sm80Config<W, T, 4, 2, 256, 3, 2>>());
    v.push_back(variant<Sm80Config<W, T, 4, 2, 256, 4, 2>>());
    v.push_back(variant<Sm80Config<W, T, 8, 1, 128, 5, 2>>());
  } else {
    v.push_back(variant<Sm80Config<W, T, 4, 1, 128, 4, 4>>());
    v.push_back(variant<Sm80Config<W, T, 4, 2, 128, 4, 2>>());
    v.push_back(variant<Sm80Config<W, T, 4, 2, 128, 6, 2>>());
    v.push_back(variant<Sm80Config<W, T, 4, 2, 256, 3, 2>>());
    v.push_back(variant<Sm80Config<W, T, 8, 1, 128, 4, 2>>());
  }
}
template <class W, int T> void add_large(std::vector<Variant>& v) {
  v.push_back(variant<Sm80Config<W, T, 4, 1, 128, 3, 3>>());
  v.push_back(variant<Sm80Config<W, T, 8, 1, 128, 3, 1>>());
  v.push_back(variant<Sm80Config<W, T, 8, 1, 128, 3, 2>>());
  v.push_back(variant<Sm80Config<W, T, 4, 2, W::SPARSE ? 256 : 128, W::SPARSE ? 2 : 3, W::SPARSE ? 1 : 2>>());
  if constexpr (!W::SPARSE) v.push_back(variant<Sm80Config<W, T, 4, 2, 128, 4, 1>>());
}
template <class W> std::vector<Variant> variants() {
  std::vector<Variant> v;
  add_small<W, 8>(v), add_small<W, 16>(v), add_small<W, 32>(v), add_large<W, 64>(v);
  return v;
}

int main(int argc, char** argv) {
  int sms = 0;
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  sms = device.multiProcessorCount;
  std::printf("%s, %d SMs\n", device.name, sms);
  const std::string filter = argc > 1 ? argv[1] : "";
  bool good = true;
  for (const auto& list : {variants<DenseWeights<half, 4, 128, false>>(), variants<SparseWeights<half, 4, 128>>()})
    for (const auto& [N, K] : {std::pair{28672, 8192}, {4096, 4096}, {8192, 28672}}) {
      const OnDevice d({list[0].scheme, MAX_M, N, K, false, true, 7}, COPIES_BEYOND_L2);
      std::printf("\n%s %d x %d, %.1f MB, us (TB/s of weights)\n", list[0].scheme.sparse ? "2:4" : "dense", N, K,
                  d.bytes() / 1e6);
      for (const Variant& v : list) {
        if (v.name.find(filter) == std::string::npos) continue;
        const int per_sm = v.occupancy();
        std::printf("%-46s occupancy %d |", v.name.c_str(), per_sm);
        std::vector<int> Ms;
        for (int M : {1, 8, 16, 32, 64, 256})
          if (v.shape.token_tile == 8    ? M <= 8
              : v.shape.token_tile == 16 ? M <= 16
              : v.shape.token_tile == 32 ? M == 32
                                         : M >= 64)
            Ms.push_back(M);
        for (int M : Ms) {
          std::printf(" M %d:", M);
          for (int blocks = sms; blocks <= sms * per_sm; blocks += sms) {
            if (per_sm == 4 && blocks == 3 * sms) continue;
            if (M == Ms.back() && blocks == sms * per_sm) good &= right(d, v, M, blocks);
            const double us = microseconds(d, v, M, blocks);
            std::printf(" %6.1f (%.2f)", us, d.bytes() / us / 1e6);
          }
          std::printf(" |");
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  std::printf(good ? "all right\n" : "WRONG\n");
  return !good;
}
