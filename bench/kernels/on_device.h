// A problem of gemm_problem.h in the memory of a GPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "gemm_problem.h"

using namespace gemm_test;

#define CUDA(call)                                                                      \
  do {                                                                                  \
    if (cudaError_t e = (call); e != cudaSuccess) {                                     \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e)); \
      std::exit(1);                                                                     \
    }                                                                                   \
  } while (0)

constexpr int COPIES_BEYOND_L2 = 0;  // of the weights: so many that going through them finds none in the L2

template <class V> V* upload(const std::vector<V>& v, int copies = 1) {
  V* d = nullptr;
  const size_t bytes = v.size() * sizeof(V);
  if (!bytes) return nullptr;
  CUDA(cudaMalloc(&d, bytes * copies));
  CUDA(cudaMemcpy(d, v.data(), bytes, cudaMemcpyHostToDevice));
  for (int i = 1; i < copies; ++i)
    CUDA(cudaMemcpy(reinterpret_cast<uint8_t*>(d) + i * bytes, d, bytes, cudaMemcpyDeviceToDevice));
  return d;
}

struct OnDevice {
  GemmProblem p;
  Prepared w;
  int copies;
  uint32_t *weights, *meta;
  uint16_t *scales, *x, *bias, *y;
  float* row_scales;
  uint32_t* workspace;
  static constexpr size_t WORKSPACE = size_t(256) << 20;

  explicit OnDevice(const GemmProblem& problem, int weight_copies = 1) : p(problem), w(prepare(p, 16)) {
    copies = weight_copies == COPIES_BEYOND_L2 ? int((size_t(300) << 20) / bytes()) + 2 : weight_copies;
    weights = upload(w.weights, copies), meta = upload(w.meta, copies), scales = upload(w.scales, copies);
    row_scales = upload(w.row_scales);
    std::vector<uint16_t> hx(size_t(p.M) * x_stride()), hb(p.N);
    parallel(p.M, 16, [&](int m) {
      for (int k = 0; k < p.K; ++k) hx[size_t(m) * x_stride() + k] = p.x_bits(m, k);
    });
    for (int n = 0; n < p.N; ++n) hb[n] = p.bias_bits(n);
    x = upload(hx), bias = upload(hb);
    CUDA(cudaMalloc(&y, size_t(p.M) * p.N * 2));
    CUDA(cudaMalloc(&workspace, WORKSPACE));
    CUDA(cudaMemset(workspace, 0xff, WORKSPACE));
  }
  ~OnDevice() {
    for (void* d : {(void*)weights, (void*)meta, (void*)scales, (void*)row_scales, (void*)x, (void*)bias, (void*)y,
                    (void*)workspace})
      cudaFree(d);
  }
  OnDevice(const OnDevice&) = delete;
  int x_stride() const { return (p.K + 7) / 8 * 8; }
  size_t bytes() const { return w.weights.size() * 4 + w.meta.size() * 4 + w.scales.size() * 2; }
  Problem problem(int M, int copy = 0) const {  // the first M tokens
    return {p.scheme,
            M,
            p.N,
            p.K,
            x,
            x_stride(),
            weights + copy * w.weights.size(),
            meta + copy * w.meta.size(),
            scales + copy * w.scales.size(),
            row_scales,
            p.with_bias ? bias : nullptr,
            y,
            workspace};
  }
};
