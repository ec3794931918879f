// Measures variants of the kernels on a GPU, beside cuBLAS on the 16-bit weight: checks sampled entries against float64
// and the bits of repeated runs, then times launches inside a CUDA graph with the weights rotated through more memory
// than the L2 holds.
//
//     nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icsrc -Itests/kernels bench/kernels/tune.cu \
//         -o build/tune
//     build/tune [name=TEXT] [M=1,8,...] [NxK ...]         variants whose name contains TEXT
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/launch_sm80.cuh"
#include "common/launch_sm90.cuh"
#include "dense/weights.cuh"
#include "on_device.h"
#include "sparse24/weights.cuh"

using namespace gemm_test;

struct Variant {
  std::string name;
  Scheme scheme;
  BlockShape shape;
  std::string (*start)(const Problem&, const Schedule&, cudaStream_t);
  int occupancy;
};
template <class W> std::string scheme_name() {
  char text[64];
  std::snprintf(text, sizeof text, "%s-%s-w%d-g%d%s", W::SPARSE ? "2:4" : "dense",
                ptx::is_bf16<typename W::T> ? "bf16" : "f16", W::BITS, W::GROUP, W::ZERO_POINTS ? "-zp" : "");
  return text;
}
template <class C, class Kernel> int occupancy(Kernel kernel, int shared) {
  int n = 0;
  CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, kernel, C::THREADS, shared));
  return n;
}
template <class W> Scheme scheme_of() {
  return {ptx::is_bf16<typename W::T> ? Float16::BFLOAT16 : Float16::HALF, W::BITS, W::GROUP, W::SPARSE,
          W::ZERO_POINTS};
}
template <class C> Variant sm80() {
  char text[96];
  std::snprintf(text, sizeof text, "sm80 t%d n%d k%d kt%d st%d b%d", C::TOKENS, C::WARPS_N, C::WARPS_K, C::K_TILE,
                C::STAGES, C::BLOCKS_PER_SM);
  return {text, scheme_of<typename C::Weights>(), shape_sm80<C>(), start_sm80<C>,
          occupancy<C>(gemm_sm80<C>, Sm80Shared<C>::bytes)};
}
template <class C> Variant sm90() {
  char text[96];
  std::snprintf(text, sizeof text, "sm90 %dx%d kt%d g%d b%d", C::ROWS, C::TOKENS, C::K_TILE, C::STEPS,
                C::BLOCKS_PER_SM);
  return {text, scheme_of<typename C::Weights>(), shape_sm90<C>(), start_sm90<C>,
          occupancy<C>(gemm_sm90<C>, Sm90Shared<C>::bytes)};
}

// cuBLAS, from wherever the loader or $CUBLAS finds it.
struct Cublas {
  using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int, int,
                       const void*, void*, int, int, int, int);
  void* handle = nullptr;
  Gemm gemm = nullptr;
  int (*set_stream)(void*, cudaStream_t) = nullptr;
  Cublas() {
    void* library = nullptr;
    for (const char* name : {std::getenv("CUBLAS"), (char*)"libcublas.so.13", (char*)"libcublas.so.12"})
      if (!library && name) library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!library) return;
    reinterpret_cast<int (*)(void**)>(dlsym(library, "cublasCreate_v2"))(&handle);
    set_stream = reinterpret_cast<int (*)(void*, cudaStream_t)>(dlsym(library, "cublasSetStream_v2"));
    void* workspace;
    CUDA(cudaMalloc(&workspace, 64 << 20));
    reinterpret_cast<int (*)(void*, void*, size_t)>(dlsym(library, "cublasSetWorkspace_v2"))(handle, workspace,
                                                                                             64 << 20);
    gemm = reinterpret_cast<Gemm>(dlsym(library, "cublasGemmEx"));
  }
  // y[M, N] = x[M, K] * w[N, K]^T in half
  void run(const void* w, const OnDevice& d, int M, cudaStream_t stream) const {
    const float one = 1, zero = 0;
    constexpr int HALF = 2, COMPUTE_FLOAT = 68;
    set_stream(handle, stream);
    if (gemm(handle, 1, 0, d.p.N, M, d.p.K, &one, w, HALF, d.p.K, d.x, HALF, d.x_stride(), &zero, d.y, HALF, d.p.N,
             COMPUTE_FLOAT, -1))
      std::printf("cuBLAS failed\n"), std::exit(1);
  }
};

// Random halves in [1/16, 1/8) of either sign: with constant ones cuBLAS would take less power, and run faster.
__global__ void fill(uint32_t* words, size_t n) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    uint32_t h = uint32_t(i) * 0x9e3779b9u + uint32_t(i >> 32);
    h = (h ^ h >> 15) * 0x85ebca6bu, h ^= h >> 13;
    words[i] = (h & 0x83ff83ffu) | 0x2c002c00u;
  }
}

bool right(const OnDevice& d, const Variant& v, int M, const Schedule& schedule) {
  const size_t count = size_t(M) * d.p.N;
  std::vector<uint16_t> first(count), again(count);
  for (int i = 0; i < (count > 1 << 22 ? 3 : 10); ++i) {
    CUDA(cudaMemset(d.y, 0xff, count * 2));
    if (const std::string e = v.start(d.problem(M, i % d.copies), schedule, nullptr); !e.empty())
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

// Of one of `launches` launches; start(i, stream) makes the i-th.
template <class Start> double microseconds(int launches, Start start) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&begin));
  CUDA(cudaEventCreate(&end));
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < launches; ++i) start(i, stream);
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

template <class W> std::vector<Variant> variants() {
  // sm80: tokens, warps along N, warps along K, columns, stages, blocks per multiprocessor
  // sm90: warpgroups, tokens, columns, steps of a commit group, blocks per multiprocessor
  return {
#ifdef TUNE_SM80
      sm80<Sm80Config<W, 8, 4, 2, 256, W::SPARSE ? 4 : 3, 2>>(),
      sm80<Sm80Config<W, 16, 4, 1, 128, W::SPARSE ? 6 : 5, 4>>(),
      sm80<Sm80Config<W, 16, 4, 2, 256, W::SPARSE ? 4 : 3, 2>>(),
      sm80<Sm80Config<W, 32, 4, 1, 128, W::SPARSE ? 5 : 4, 3>>(),
      sm80<Sm80Config<W, 64, 4, 1, 128, 3, 2>>(),
#endif
      sm90<Sm90Config<W, 2, 8, 256, 4, 2>>(),
      sm90<Sm90Config<W, 4, 8, 256, 4, 1>>(),
      sm90<Sm90Config<W, 2, 16, 256, 4, 2>>(),
      sm90<Sm90Config<W, 4, 16, 256, 4, 1>>(),
      sm90<Sm90Config<W, 2, 32, 256, 2, 2>>(),
      sm90<Sm90Config<W, 2, 32, 256, 4, 1>>(),
      sm90<Sm90Config<W, 4, 32, 256, 2, 1>>(),
      sm90<Sm90Config<W, 4, 32, 256, 4, 1>>(),
      sm90<Sm90Config<W, 2, 64, 128, 2, 2>>(),
      sm90<Sm90Config<W, 2, 64, 256, 2, 1>>(),
      sm90<Sm90Config<W, 4, 64, 256, 2, 1>>(),
      sm90<Sm90Config<W, 2, 128, 128, 2, 1>>(),
      sm90<Sm90Config<W, 2, 256, 128, 2, 1>>(),
  };
}

int main(int argc, char** argv) {
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  const int sms = device.multiProcessorCount;
  std::printf("%s, %d SMs\n", device.name, sms);
  std::string filter;
  std::vector<int> Ms;
  std::vector<std::pair<int, int>> shapes;
  for (int i = 1; i < argc; ++i) {
    int n, k;
    if (!std::strncmp(argv[i], "name=", 5)) filter = argv[i] + 5;
    else if (!std::strncmp(argv[i], "M=", 2))
      for (char* at = argv[i] + 1; *at; at = std::strchr(at + 1, ',') ? std::strchr(at + 1, ',') : (char*)"")
        Ms.push_back(std::atoi(at + 1));
    else if (std::sscanf(argv[i], "%dx%d", &n, &k) == 2) shapes.push_back({n, k});
  }
  if (Ms.empty()) Ms = {1, 8, 16, 32, 64, 128, 256, 1024, 4096};
  if (shapes.empty()) shapes = {{28672, 8192}, {4096, 4096}};
  const int max_m = *std::max_element(Ms.begin(), Ms.end());
  const Cublas cublas;
  bool good = true;
  for (const auto& [N, K] : shapes)
    for (const auto& list : {variants<DenseWeights<half, 4, 128, false>>(), variants<SparseWeights<half, 4, 128>>()}) {
      const OnDevice d({list[0].scheme, max_m, N, K, false, true, 7}, COPIES_BEYOND_L2);
      std::printf("\n%s %d x %d, %.1f MB, us by blocks per SM\n%-30s", list[0].scheme.sparse ? "2:4" : "dense", N, K,
                  d.bytes() / 1e6, "cuBLAS");
      std::vector<double> base(Ms.size(), 0.0);
      if (cublas.gemm) {
        const size_t bytes = size_t(N) * K * 2;
        const int copies = int((size_t(300) << 20) / bytes) + 2;
        uint8_t* w;
        CUDA(cudaMalloc(&w, bytes * copies));
        fill<<<sms * 4, 256>>>(reinterpret_cast<uint32_t*>(w), bytes * copies / 4);
        for (size_t i = 0; i < Ms.size(); ++i) {
          base[i] = microseconds(std::max(copies, 10), [&](int j, cudaStream_t stream) {
            cublas.run(w + j % copies * bytes, d, Ms[i], stream);
          });
          std::printf(" | %d: %.1f", Ms[i], base[i]);
        }
        cudaFree(w);
      }
      std::printf("\n");
      for (const Variant& v : list) {
        if (v.name.find(filter) == std::string::npos) continue;
        std::printf("%-26s b%d", v.name.c_str(), v.occupancy);
        for (size_t i = 0; i < Ms.size(); ++i) {
          const int M = Ms[i], tile = v.shape.token_tile;
          if (M > (tile < 128 ? tile : 1 << 30) || (M * 2 < tile && tile > 16) || (tile == 128 && M > 1024)) continue;
          std::printf(" | %d:", M);
          double best = 1e9;
          const int tiles = ((N + v.shape.row_tile - 1) / v.shape.row_tile) * ((M + tile - 1) / tile);
          std::vector<Schedule> ways;
          for (int blocks = sms; blocks <= sms * v.occupancy; blocks += sms) ways.push_back({blocks, 0});
          ways.push_back({std::min(tiles, sms * v.occupancy), 1});
          for (int split = 2; v.name[2] == '9' && split <= 8 && tiles * split <= sms * v.occupancy; ++split)
            ways.push_back({tiles * split, split});
          for (const Schedule& schedule : ways) {
            good &= right(d, v, M, schedule);
            const double us = microseconds(std::max(d.copies, 10), [&](int j, cudaStream_t stream) {
              v.start(d.problem(M, j % d.copies), schedule, stream);
            });
            best = std::min(best, us);
            if (schedule.split) std::printf(" /%d %.1f", schedule.split, us);
            else std::printf(" %.1f", us);
          }
          std::printf(" (%.2fx)", base[i] / best);
          std::fflush(stdout);
        }
        std::printf("\n");
      }
    }
  std::printf(good ? "all right\n" : "WRONG\n");
  return !good;
}
