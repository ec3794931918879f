// The host side that launchers and test drivers call. Device memory is the heap, and every call is synchronous.
#pragma once
#include <cstdlib>
#include <cstring>

namespace emu {
// What the device says of itself. A test may set another number of multiprocessors to reach another partition of work.
struct Device {
  int multiprocessors = 4, major = 9, minor = 0;
  int shared_per_block = 227 * 1024, shared_per_multiprocessor = 228 * 1024, l2_bytes = 50 << 20;
  int threads_per_multiprocessor = 2048;
};
inline Device device;
void synchronize();  // no earlier launch still runs
}  // namespace emu

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotSupported = 801,
};
using cudaStream_t = struct CUstream_st*;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxThreadsPerMultiProcessor,
  cudaDevAttrL2CacheSize,
};

inline const char* cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "emulated error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() {
  emu::synchronize();
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return cudaErrorInvalidValue;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = emu::device.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emu::device.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = emu::device.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emu::device.shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = emu::device.shared_per_multiprocessor; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = emu::device.threads_per_multiprocessor; break;
    case cudaDevAttrL2CacheSize: *value = emu::device.l2_bytes; break;
  }
  return cudaSuccess;
}
template <class F> cudaError_t cudaFuncSetAttribute(F, cudaFuncAttribute attribute, int value) {
  const bool fits = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value <= emu::device.shared_per_block;
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}
// Registers are not modelled, so this is an upper bound.
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int threads, size_t dynamic_shared) {
  const int by_threads = emu::device.threads_per_multiprocessor / threads;
  const int by_shared = emu::device.shared_per_multiprocessor / (int(dynamic_shared) + 1024);
  *blocks = by_threads < by_shared ? by_threads : by_shared;
  return cudaSuccess;
}

template <class T> cudaError_t cudaMalloc(T** p, size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, bytes)) return cudaErrorMemoryAllocation;
  *p = static_cast<T*>(memory);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind) {
  std::memcpy(dst, src, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind, cudaStream_t = {}) {
  return cudaMemcpy(dst, src, bytes, kind);
}
inline cudaError_t cudaMemset(void* dst, int value, size_t bytes) {
  std::memset(dst, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t = {}) {
  return cudaMemset(dst, value, bytes);
}
