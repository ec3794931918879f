// Checks every kernel that the GPU can run, through gemm.h: all schemes at odd shapes against float64, layers of real
// models, the bits of 500 runs, and two streams at once. With "brief" the schemes alone, a launch of each kernel and
// schedule: for compute-sanitizer. Its racecheck knows no mbarriers: it is for the kernels of sm80.
//
//     nvcc -std=c++20 -O3 -arch=native -Icsrc -Itests/kernels -Ibench/kernels bench/kernels/check.cu csrc/gemm.cu \
//         csrc/dense/*.cu csrc/sparse24/*.cu -o build/check         (on Hopper: -gencode arch=compute_90a,code=sm_90a)
//     build/check [brief] [CONFIG]          kernels whose names begin with CONFIG
#include <algorithm>
#include <string>

#include "gemm.h"
#include "on_device.h"

constexpr int REPEATS = 500;
int sms = 0, capability = 0;
std::string wanted;  // names of kernels begin so

void start(const Problem& p, const char* config, const Schedule& schedule, cudaStream_t stream) {
  if (const std::string error = gemm(p, config, schedule, stream); !error.empty()) {
    std::printf("%s: %s\n", config, error.c_str());
    std::exit(1);
  }
}

// Counts the words in which two results differ.
__global__ void count_differences(const uint16_t* a, const uint16_t* b, size_t n, unsigned* count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x)
    if (a[i] != b[i]) atomicAdd(count, 1u);
}

bool workspace_restored(const OnDevice& d) {
  std::vector<uint32_t> words(OnDevice::WORKSPACE / 4);
  CUDA(cudaMemcpy(words.data(), d.workspace, OnDevice::WORKSPACE, cudaMemcpyDeviceToHost));
  return std::all_of(words.begin(), words.end(), [](uint32_t w) { return w == 0xffffffffu; });
}

// What every step-th row of the answer must be.
struct Expected {
  int step;
  std::vector<std::vector<Answer>> rows;  // of every step-th row, by token

  Expected(const GemmProblem& p, int step_) : step(step_), rows((p.N + step_ - 1) / step_) {
    std::vector<std::vector<double>> x;
    for (int m = 0; m < p.M; ++m) x.push_back(p.token(m));
    parallel(int(rows.size()), 16, [&](int i) {
      const auto row = p.row(i * step);
      for (int m = 0; m < p.M; ++m) rows[i].push_back(answer(p, row, x[m], i * step));
    });
  }
};

bool right(const OnDevice& d, const Expected& expected, const char* config, int M, const Schedule& schedule) {
  CUDA(cudaMemset(d.y, 0xff, size_t(M) * d.p.N * 2));
  start(d.problem(M), config, schedule, nullptr);
  std::vector<uint16_t> y(size_t(M) * d.p.N);
  CUDA(cudaMemcpy(y.data(), d.y, y.size() * 2, cudaMemcpyDeviceToHost));
  for (int i = 0; i < int(expected.rows.size()); ++i)
    for (int m = 0; m < M; ++m) {
      const Answer a = expected.rows[i][m];
      const double got = value_16(y[size_t(m) * d.p.N + i * expected.step], d.p.scheme.dtype);
      if (!(std::fabs(got - a.value) <= a.allowed)) {
        std::printf("%s, M %d, %d blocks, split %d, %s: y[%d, %d] = %g, expected %g +- %g\n", config, M,
                    schedule.blocks, schedule.split, name(d.p).c_str(), m, i * expected.step, got, a.value, a.allowed);
        return false;
      }
    }
  return true;
}

struct Kernel {
  const char* config;
  BlockShape shape;
  bool clusters;

  Schedule full() const { return {sms * shape.blocks_per_sm}; }
  std::vector<Schedule> schedules() const {
    std::vector<Schedule> all = {{1}, {7}, {sms}, full(), {sms, Schedule::WHOLE}};
    for (int split = 2; clusters && split <= 8; ++split) all.push_back({1, split});
    return all;
  }
};
std::vector<Kernel> kernels(const Scheme& s) {
  std::vector<Kernel> found;
  for (const Config& c : configs()) {
    BlockShape shape;
    if (!std::string(c.name).starts_with(wanted)) continue;
    if (c.min_capability > capability || (c.max_capability && c.max_capability < capability)) continue;
    if (block_shape(s, c.name, &shape).empty()) found.push_back({c.name, shape, c.min_capability == 90});
  }
  return found;
}

bool check_schemes(bool brief) {
  bool good = true;
  int runs = 0;
  uint32_t salt = 0;
  std::vector<Scheme> all = schemes(false), sparse = schemes(true);
  all.insert(all.end(), sparse.begin(), sparse.end());
  for (const Scheme& s : all)
    for (bool exact : {true, false}) {
      if (brief && exact) continue;
      const int K = s.group_size == -1 ? (s.sparse ? 1812 : 1811) : 1920;
      const OnDevice d({s, 77, exact ? 521 : 392, K, exact, salt % 3 != 0, ++salt});
      const Expected expected(d.p, 1);
      for (const Kernel& k : kernels(s))
        for (int M : {1, 8, 15, 33, 77}) {
          if (brief && M != 33) continue;
          for (const Schedule& schedule : k.schedules()) good &= right(d, expected, k.config, M, schedule), ++runs;
        }
      if (!workspace_restored(d)) good = false, std::printf("%s: the workspace is not as it was\n", name(d.p).c_str());
    }
  std::printf("every scheme against float64: %d launches, %s\n", runs, good ? "right" : "WRONG");
  return good;
}

bool check_layers() {
  bool good = true;
  for (const auto& [N, K] :
       {std::pair{11008, 4096}, {4096, 11008}, {576, 1536}, {8256, 7424}, {151936, 896}, {28672, 8192}})
    for (bool sparse : {false, true})
      for (Float16 dtype : {Float16::HALF, Float16::BFLOAT16}) {
        const OnDevice d({{dtype, 4, 128, sparse, false}, 300, N, K, false, true, 3});
        const Expected expected(d.p, N / 40 | 1);
        for (const Kernel& k : kernels(d.p.scheme))
          for (int M : {1, 17, 300}) good &= right(d, expected, k.config, M, k.full());
      }
  std::printf("layers of models: %s\n", good ? "right" : "WRONG");
  return good;
}

// Launches of one stream; each result is compared with the first on the GPU.
struct Repeated {
  OnDevice d;
  cudaStream_t stream;
  uint16_t* first;
  unsigned* differences;
  size_t count = 0;

  Repeated(const Scheme& s, int M, int N, int K) : d({s, M, N, K, false, true, 5}) {
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&first, size_t(M) * N * 2));
    CUDA(cudaMalloc(&differences, 4));
    CUDA(cudaMemset(differences, 0, 4));
  }
  ~Repeated() { cudaFree(first), cudaFree(differences), cudaStreamDestroy(stream); }
  void begin(const char* config, int M, const Schedule& schedule) {
    count = size_t(M) * d.p.N;
    start(d.problem(M), config, schedule, stream);
    CUDA(cudaMemcpyAsync(first, d.y, count * 2, cudaMemcpyDeviceToDevice, stream));
  }
  void again(const char* config, int M, const Schedule& schedule) {
    CUDA(cudaMemsetAsync(d.y, 0xff, count * 2, stream));
    start(d.problem(M), config, schedule, stream);
    count_differences<<<264, 256, 0, stream>>>(d.y, first, count, differences);
  }
  unsigned found() {
    unsigned n = 0;
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(&n, differences, 4, cudaMemcpyDeviceToHost));
    return n;
  }
};

bool check_repeats() {
  bool good = true;
  for (bool sparse : {false, true})
    for (Float16 dtype : {Float16::HALF, Float16::BFLOAT16}) {
      Repeated r({dtype, 4, 128, sparse, false}, 300, 4096, 11008);
      for (const Kernel& k : kernels(r.d.p.scheme))
        for (int M : {64, 300}) {
          r.begin(k.config, M, k.full());
          for (int i = 0; i < REPEATS; ++i) r.again(k.config, M, k.full());
          if (const unsigned n = r.found())
            good = false, std::printf("%s, M %d, %s: %u words differ\n", k.config, M, name(r.d.p).c_str(), n);
        }
    }
  std::printf("bits of %d runs, M 64 and 300: %s\n", REPEATS, good ? "equal" : "DIFFER");
  return good;
}

bool check_streams() {
  Repeated a({Float16::HALF, 4, 128, false, false}, 64, 4096, 4096);
  Repeated b({Float16::BFLOAT16, 4, 128, true, false}, 16, 8192, 2048);
  bool good = true;
  for (const auto& [first, second] : {std::pair{"sm80_128x64", "sm80_128x16"}, {"sm90_128x64", "sm90_128x16"}}) {
    if (capability != 90 && first[2] == '9') continue;
    a.begin(first, 64, {sms}), b.begin(second, 16, {sms});
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < REPEATS; ++i) a.again(first, 64, {sms}), b.again(second, 16, {sms});
    good &= a.found() == 0 && b.found() == 0;
  }
  std::printf("two streams: %s\n", good ? "equal" : "DIFFER");
  return good;
}

// Launches that follow each other with nothing between: kernels for 9.0 begin before the one before has ended. Some
// read what it writes, and all share a workspace; each must give what it gives alone.
bool check_chains() {
  constexpr int SIZE = 4096, LENGTH = 6, M = 16;
  const OnDevice d({{Float16::HALF, 4, 128, true, false}, M, SIZE, SIZE, false, false, 9});
  std::vector<std::pair<const char*, Schedule>> links = {{"sm80_128x16", {sms}}, {"sm80_128x8", {2 * sms}}};
  if (capability == 90)
    links = {{"sm90_128x16", {sms}}, {"sm90_128x8", {2 * sms}}, {"sm90_128x64", {64, 2}},
             {"sm80_128x16", {sms}}, {"sm90_128x64", {96, 3}},  {"sm90_256x8", {sms, Schedule::WHOLE}},
             {"sm90_128x128", {sms}}};
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  constexpr size_t COUNT = size_t(M) * SIZE;
  uint16_t *y, *alone;
  unsigned* differences;
  CUDA(cudaMalloc(&y, COUNT * 2 * LENGTH));
  CUDA(cudaMalloc(&alone, COUNT * 2 * LENGTH));
  CUDA(cudaMalloc(&differences, 4));
  CUDA(cudaMemset(differences, 0, 4));
  // Every other product is of the one before it.
  const auto run = [&](uint16_t* out, int first, bool together) {
    for (int i = 0; i < LENGTH; ++i) {
      Problem p = d.problem(M);
      if (i % 2) p.x = out + (i - 1) * COUNT;
      p.y = out + i * COUNT;
      const auto& [config, schedule] = links[(first + i) % links.size()];
      start(p, config, schedule, stream);
      if (!together) CUDA(cudaStreamSynchronize(stream));
    }
  };
  for (int first = 0; first < int(links.size()); ++first) {
    run(alone, first, false);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    run(y, first, true);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < REPEATS / 5; ++i) {
      CUDA(cudaMemsetAsync(y, 0xff, COUNT * 2 * LENGTH, stream));
      if (i % 2) run(y, first, true);
      else CUDA(cudaGraphLaunch(exec, stream));
      count_differences<<<264, 256, 0, stream>>>(y, alone, COUNT * LENGTH, differences);
    }
    CUDA(cudaStreamSynchronize(stream));
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
  }
  unsigned found = 0;
  CUDA(cudaMemcpy(&found, differences, 4, cudaMemcpyDeviceToHost));
  const bool good = found == 0 && workspace_restored(d);
  cudaFree(y), cudaFree(alone), cudaFree(differences), cudaStreamDestroy(stream);
  std::printf("chains of launches: %s\n", good ? "equal" : "DIFFER");
  return good;
}

bool check_gather() {
  constexpr int M = 37, K = 5003, STRIDE = 5011, OUT = 5008;
  std::vector<uint16_t> x(size_t(M) * STRIDE), out(size_t(M) * OUT);
  std::vector<int32_t> perm(K);
  for (size_t i = 0; i < x.size(); ++i) x[i] = uint16_t(hash(uint32_t(i), 1, 1));
  for (int i = 0; i < K; ++i) perm[i] = int(hash(i, 2, 2) % K);
  uint16_t *x_device = upload(x), *out_device = upload(std::vector<uint16_t>(out.size(), 0xffff));
  int32_t* perm_device = upload(perm);
  bool good = gather_columns(x_device, STRIDE, perm_device, out_device, OUT, M, K, nullptr).empty();
  CUDA(cudaMemcpy(out.data(), out_device, out.size() * 2, cudaMemcpyDeviceToHost));
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < OUT; ++i) good &= out[size_t(m) * OUT + i] == (i < K ? x[size_t(m) * STRIDE + perm[i]] : 0);
  cudaFree(x_device), cudaFree(out_device), cudaFree(perm_device);
  std::printf("gathered columns: %s\n", good ? "right" : "WRONG");
  return good;
}

int main(int argc, char** argv) {
  const bool brief = argc > 1 && argv[1] == std::string("brief");
  if (argc > 1 + brief) wanted = argv[1 + brief];
  cudaDeviceProp device;
  CUDA(cudaGetDeviceProperties(&device, 0));
  sms = device.multiProcessorCount, capability = device.major * 10 + device.minor;
  std::printf("%s, %d SMs\n", device.name, sms);
  bool good = check_gather();
  good &= check_schemes(brief);
  if (!brief) {
    good &= check_layers();
    good &= check_repeats();
    good &= check_streams();
    good &= check_chains();
  }
  std::printf(good ? "all right\n" : "WRONG\n");
  return !good;
}
