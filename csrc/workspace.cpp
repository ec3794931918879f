#include "workspace.h"

#include <algorithm>
#include <bit>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace sparse_marlin {
namespace {

constexpr size_t MIN_BYTES = size_t(4) << 20;
constexpr int FILL = 0xff;

struct Buffer {
  int device = 0;
  void* data = nullptr;
  size_t bytes = 0;
};

using Key = std::tuple<int, cudaStream_t, unsigned long long>;  // device, stream, id of its capture or 0

struct State {
  std::mutex mutex;
  std::map<Key, Buffer> in_use;
  std::vector<Buffer> free;  // returned by graphs that are gone, and clean
};

// Never destroyed: graphs may be destroyed, and the CUDA driver shut down, after static objects are gone.
State& state() {
  static State* s = new State;
  return *s;
}

// While another thread captures, and where this thread does, allocating is an error unless the mode is relaxed.
struct RelaxedCapture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

cudaError_t allocate(int device, size_t bytes, Buffer* buffer) {
  const RelaxedCapture relaxed;
  void* data = nullptr;
  if (cudaError_t error = cudaMalloc(&data, bytes); error != cudaSuccess) return error;
  // On a stream of its own: the caller's may be in a capture, and the fill would become a part of the graph.
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error = cudaMemsetAsync(data, FILL, bytes, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  if (error != cudaSuccess) {
    cudaFree(data);
    return error;
  }
  *buffer = {device, data, bytes};
  return cudaSuccess;
}

struct Lease {
  Key key;
  Buffer buffer;
};

// Called by the driver once a graph and all that was instantiated from it are gone. May not call CUDA.
void CUDART_CB end_lease(void* argument) {
  const Lease* lease = static_cast<Lease*>(argument);
  State& s = state();
  {
    const std::lock_guard lock(s.mutex);
    s.free.push_back(lease->buffer);
    const auto found = s.in_use.find(lease->key);
    if (found != s.in_use.end() && found->second.data == lease->buffer.data) s.in_use.erase(found);
  }
  delete lease;
}

// Lets the graph that is being captured own the buffer.
cudaError_t lease_to(cudaGraph_t graph, const Key& key, const Buffer& buffer) {
  Lease* lease = new Lease{key, buffer};
  cudaUserObject_t object = nullptr;
  cudaError_t error = cudaUserObjectCreate(&object, lease, end_lease, 1, cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) {
    delete lease;
    return error;
  }
  return cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
}

}  // namespace

cudaError_t get_workspace(int device, cudaStream_t stream, size_t bytes, void** workspace) {
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  if (cudaError_t error = cudaStreamGetCaptureInfo(stream, &capturing, &id, &graph); error != cudaSuccess) return error;
  if (capturing != cudaStreamCaptureStatusActive) id = 0;

  State& s = state();
  const Key key{device, stream, id};
  Buffer buffer;
  {
    const std::lock_guard lock(s.mutex);
    if (const auto found = s.in_use.find(key); found != s.in_use.end() && found->second.bytes >= bytes) {
      *workspace = found->second.data;
      return cudaSuccess;
    }
    const auto fits = [&](const Buffer& b) { return b.device == device && b.bytes >= bytes; };
    if (const auto found = std::find_if(s.free.begin(), s.free.end(), fits); found != s.free.end()) {
      buffer = *found;
      s.free.erase(found);
    }
  }
  // Not under the lock: the driver may call end_lease, for another graph, from within these calls.
  if (buffer.data == nullptr) {
    const cudaError_t error = allocate(device, std::max(MIN_BYTES, std::bit_ceil(bytes)), &buffer);
    if (error != cudaSuccess) return error;
  }
  if (id) {
    if (cudaError_t error = lease_to(graph, key, buffer); error != cudaSuccess) return error;
  }
  // A buffer that became too small is left alone: launches may still use it. Sizes double, so these are less than the
  // last one in all; those of a graph come back with it.
  const std::lock_guard lock(s.mutex);
  s.in_use[key] = buffer;
  *workspace = buffer.data;
  return cudaSuccess;
}

}  // namespace sparse_marlin
