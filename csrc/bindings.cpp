// The CUDA implementation of the operators that sparse_marlin/ops.py defines, through LibTorch's stable ABI.
//
// Everything is checked here again, whatever Python checked: past this file there are only pointers.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <charconv>
#include <climits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gemm.h"
#include "workspace.h"

// Defined by the CUDA half of libtorch. Weak, so that the extension loads in a torch without CUDA too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace sparse_marlin {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int ALIGNMENT = 16;       // bytes, of every tensor that a kernel reads
constexpr int STRIDE_MULTIPLE = 8;  // elements, of the rows of x

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "sparse_marlin: ", what, ": ", cudaGetErrorString(error));
}

// Makes the device of the tensors the current one; asks the runtime alone, which takes nanoseconds if it is already.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "asking for the current device");
    if (previous_ != device) check_cuda(cudaSetDevice(device), "changing the device");
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

Tensor empty_like_rows(const Tensor& x, const int64_t* sizes, int64_t dims) {
  int64_t strides[8];
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cuda(),
                                                  x.get_device_index(), &handle));
  return Tensor(handle);
}

// The pointer of a tensor that must be contiguous, on x's device, aligned and of that many bytes.
const void* data_of(const Tensor& t, const char* name, const Tensor& x, int64_t bytes) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == x.get_device_index(), name, " must be on the device of x");
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
  const int64_t found = t.numel() * int64_t(t.element_size());
  STD_TORCH_CHECK(found == bytes, name, " must have ", bytes, " bytes for this weight, got ", found);
  const void* data = t.data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % ALIGNMENT == 0, name, " must be aligned to 16 bytes");
  return data;
}

const void* data_of(const std::optional<Tensor>& t, const char* name, const Tensor& x, int64_t bytes, bool wanted) {
  STD_TORCH_CHECK(t.has_value() == wanted, name, wanted ? " is missing from" : " does not belong to", " this weight");
  return wanted ? data_of(*t, name, x, bytes) : nullptr;
}

// One entry of a plan: which config multiplies up to `max_tokens` tokens, and how.
struct Step {
  int max_tokens;
  std::string config;
  Schedule schedule;
};
using Plan = std::vector<Step>;

// Reads "16:name@264 128:other@128/4 *:third@132"; sparse_marlin/dispatch.py writes it.
Plan parse_plan(std::string_view text) {
  Plan plan;
  while (!text.empty()) {
    const std::string_view entry = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(entry.size() + 1, text.size()));
    const size_t colon = entry.find(':'), at = entry.find('@');
    STD_TORCH_CHECK(colon != entry.npos && at != entry.npos && colon < at, "no entry of a plan: ", std::string(entry));
    const auto number = [&](std::string_view digits) {
      int value = 0;
      const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
      STD_TORCH_CHECK(error == std::errc() && end == digits.data() + digits.size() && value > 0,
                      "no number in the plan: ", std::string(entry));
      return value;
    };
    const std::string_view tokens = entry.substr(0, colon), blocks = entry.substr(at + 1);
    const size_t slash = blocks.find('/');
    Schedule schedule{number(blocks.substr(0, slash))};
    if (slash != blocks.npos) schedule.split = number(blocks.substr(slash + 1));
    plan.push_back(
        {tokens == "*" ? INT_MAX : number(tokens), std::string(entry.substr(colon + 1, at - colon - 1)), schedule});
  }
  return plan;
}

const Step& step_for(const std::string& text, int64_t tokens) {
  thread_local std::unordered_map<std::string, Plan> plans;
  auto found = plans.find(text);
  if (found == plans.end()) found = plans.emplace(text, parse_plan(text)).first;
  for (const Step& step : found->second) {
    if (tokens <= step.max_tokens) return step;
  }
  STD_TORCH_CHECK(false, "the plan \"", text, "\" says nothing about ", tokens, " tokens");
}

// x as rows [M, K] that a kernel can read: x itself, or a copy that is gathered by perm, padded or made contiguous.
struct Rows {
  Tensor owner;
  const void* data;
  int64_t stride;
};

Rows rows_of(const Tensor& x, const int32_t* perm, int64_t m, int64_t k, cudaStream_t stream) {
  const bool is_matrix = x.dim() == 2 && (x.stride(1) == 1 || k == 1);
  Tensor rows = is_matrix || x.is_contiguous() ? x : torch::stable::contiguous(x);
  const int64_t stride = is_matrix && m > 1 ? x.stride(0) : k;
  const bool readable = stride >= k && stride % STRIDE_MULTIPLE == 0 && k % STRIDE_MULTIPLE == 0 &&
                        reinterpret_cast<uintptr_t>(rows.data_ptr()) % ALIGNMENT == 0;
  if (readable && perm == nullptr) return {rows, rows.data_ptr(), stride};
  const int64_t sizes[2] = {m, round_up(k, STRIDE_MULTIPLE)};
  Tensor out = empty_like_rows(x, sizes, 2);
  const std::string error =
      gather_columns(rows.data_ptr(), stride, perm, out.data_ptr(), sizes[1], int(m), int(k), stream);
  STD_TORCH_CHECK(error.empty(), "sparse_marlin: ", error);
  return {out, out.data_ptr(), sizes[1]};
}

Tensor gemm_cuda(const Tensor& x, const Tensor& weights, const std::optional<Tensor>& meta, const Tensor& scales,
                 const Tensor& row_scales, const std::optional<Tensor>& perm, const std::optional<Tensor>& bias,
                 int64_t n, int64_t num_bits, int64_t group_size, bool zero_points, std::string plan) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "x must be float16 or bfloat16");
  STD_TORCH_CHECK(x.dim() >= 1 && x.dim() <= 8, "x must have 1 to 8 dimensions, got ", x.dim());
  STD_TORCH_CHECK(num_bits == 4 || num_bits == 8, "num_bits must be 4 or 8, got ", num_bits);
  STD_TORCH_CHECK(group_size == -1 || group_size == 32 || group_size == 64 || group_size == 128,
                  "group_size must be -1, 32, 64 or 128, got ", group_size);
  const int64_t k = x.size(x.dim() - 1);
  STD_TORCH_CHECK(n > 0 && k > 0 && n <= INT_MAX && k <= INT_MAX, "sizes out of range: N = ", n, ", K = ", k);
  int64_t m = 1;
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  for (size_t d = 0; d + 1 < sizes.size(); ++d) m *= sizes[d];
  STD_TORCH_CHECK(m <= INT_MAX, "too many tokens: ", m);
  sizes.back() = n;

  const int64_t padded_n = round_up(n, ROW_PANEL), padded_k = round_up(k, K_PANEL);
  const int64_t groups = group_size == -1 ? 1 : padded_k / group_size;
  const bool sparse = meta.has_value();
  Problem p;
  p.scheme = {dtype == ScalarType::Half ? Float16::HALF : Float16::BFLOAT16, int(num_bits), int(group_size), sparse,
              zero_points};
  p.M = int(m);
  p.N = int(n);
  p.K = int(k);
  p.weights = data_of(weights, "weights", x, padded_n * padded_k * num_bits / 8 / (sparse ? 2 : 1));
  p.meta = data_of(meta, "meta", x, padded_n * padded_k / 8, sparse);
  p.scales = data_of(scales, "scales", x, padded_n * groups * 2 * (zero_points ? 2 : 1));
  STD_TORCH_CHECK(scales.scalar_type() == dtype, "scales must have the dtype of x");
  p.row_scales = static_cast<const float*>(data_of(row_scales, "row_scales", x, padded_n * 4));
  const auto* columns = static_cast<const int32_t*>(data_of(perm, "perm", x, k * 4, perm.has_value()));
  if (bias) {
    STD_TORCH_CHECK(bias->scalar_type() == dtype, "bias must have the dtype of x");
    p.bias = data_of(*bias, "bias", x, n * 2);
  }

  const int device = x.get_device_index();
  Tensor y = empty_like_rows(x, sizes.data(), int64_t(sizes.size()));
  if (m == 0) return y;
  const DeviceGuard guard(device);
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "this torch has no CUDA");
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  const auto stream = static_cast<cudaStream_t>(current);

  const Step& step = step_for(plan, m);
  const int64_t bytes = workspace_bytes(p.scheme, step.config, step.schedule);
  STD_TORCH_CHECK(bytes >= 0, "no kernel ", step.config, " for this scheme");
  if (bytes > 0) check_cuda(get_workspace(device, stream, size_t(bytes), &p.workspace), "allocating the workspace");
  const Rows rows = rows_of(x, columns, m, k, stream);
  p.x = rows.data;
  p.x_stride = rows.stride;
  p.y = y.data_ptr();
  const std::string error = gemm(p, step.config, step.schedule, stream);
  STD_TORCH_CHECK(error.empty(), "sparse_marlin: ", step.config, ": ", error);
  return y;
}

// A line for each config: its name, the numbers that sparse_marlin/dispatch.py asks for, and why it is not there for
// this scheme, if it is not.
std::string kernels(int64_t num_bits, int64_t group_size, bool sparse, bool zero_points, bool bfloat16) {
  const Scheme scheme{bfloat16 ? Float16::BFLOAT16 : Float16::HALF, int(num_bits), int(group_size), sparse,
                      zero_points};
  std::string lines;
  for (const Config& config : configs()) {
    BlockShape shape;
    const std::string refusal = block_shape(scheme, config.name, &shape);
    lines += config.name;
    for (int number : {config.min_capability, config.max_capability, config.token_tile, config.row_tile, shape.k_tile,
                       shape.shared_bytes, shape.blocks_per_sm}) {
      lines += ' ' + std::to_string(number);
    }
    lines += ' ' + refusal + '\n';
  }
  return lines;
}

// Compute capability, multiprocessors, shared memory of a block and of a multiprocessor, clock and memory clock in
// kHz, bits of the memory bus, clusters of 2, 3, ... blocks that run at once. torch does not give all of these, and
// the CUDA runtime's property struct no longer has the clocks.
std::vector<int64_t> device_attributes(int64_t device) {
  const auto get = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, attribute, int(device)), "asking for a device's attributes");
    return int64_t(value);
  };
  const DeviceGuard guard(static_cast<int32_t>(device));
  std::vector<int64_t> attributes = {
      get(cudaDevAttrComputeCapabilityMajor) * 10 + get(cudaDevAttrComputeCapabilityMinor),
      get(cudaDevAttrMultiProcessorCount),
      get(cudaDevAttrMaxSharedMemoryPerBlockOptin),
      get(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
      get(cudaDevAttrClockRate),
      get(cudaDevAttrMemoryClockRate),
      get(cudaDevAttrGlobalMemoryBusWidth)};
  for (int blocks = 2; blocks <= Schedule::MAX_CLUSTER; ++blocks) attributes.push_back(clusters_at_once(blocks));
  return attributes;
}

}  // namespace
}  // namespace sparse_marlin

STABLE_TORCH_LIBRARY_IMPL(sparse_marlin, CUDA, m) { m.impl("gemm", TORCH_BOX(&sparse_marlin::gemm_cuda)); }
STABLE_TORCH_LIBRARY_IMPL(sparse_marlin, CompositeExplicitAutograd, m) {
  m.impl("kernels", TORCH_BOX(&sparse_marlin::kernels));
  m.impl("device_attributes", TORCH_BOX(&sparse_marlin::device_attributes));
}
