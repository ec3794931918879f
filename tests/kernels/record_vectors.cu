// Runs every instruction that the emulator models on fixed inputs and writes what comes out. Built by nvcc and run on a
// GPU it records the fixture; built by g++ it runs in the emulator; test_vectors.py compares the two.
//
//   nvcc -std=c++20 -O2 -Icsrc -gencode arch=compute_90a,code=sm_90a -o record_vectors tests/kernels/record_vectors.cu
//   ./record_vectors tests/kernels/data/h200_vectors.bin
//
// With a second argument, `inputs`, the inputs are written too. A file is a row of sections, each a line
// "name hash words\n" and that many 32-bit words; the hash is that of the inputs.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/ptx.cuh"

// ---------------------------------------------------------------- inputs, the same from every compiler
struct Random {
  uint64_t state;
  uint32_t bits() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 32);
  }
  int below(int n) { return int(uint64_t(bits()) * uint32_t(n) >> 32); }
};
// INTEGER sums are exact; NARROW floats have one magnitude; WIDE ones have exponents from -9 to 4.
enum Kind { INTEGER, NARROW, WIDE };
static const char* const KIND_NAMES[] = {"integer", "narrow", "wide"};

static uint32_t float_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
static float random_float(Random& r, Kind kind) {
  const float sign = r.bits() & 1 ? -1.f : 1.f;
  if (kind == INTEGER) return sign * float(r.below(9));
  const float fraction = 1.f + float(r.below(1 << 20)) / float(1 << 20);
  float scale = 0.5f;
  if (kind == WIDE) scale = float(1 << r.below(14)) / 512.f;
  return sign * fraction * scale;
}
// The nearest 16-bit number of a value that is normal in either format; ties go away from zero, which is as good here.
static uint16_t to_float16(float f, bool bf16) {
  const uint32_t u = float_bits(f);
  if (bf16 || f == 0) return uint16_t((u + (f == 0 ? 0 : 0x8000)) >> 16);
  return uint16_t((u >> 16 & 0x8000) | (((u & 0x7fffffff) - (112u << 23) + 0x1000) >> 13));
}
static uint32_t random_pair(Random& r, Kind kind, bool bf16) {
  const uint32_t low = to_float16(random_float(r, kind), bf16), high = to_float16(random_float(r, kind), bf16);
  return low | high << 16;
}
static uint32_t random_metadata(Random& r) {
  static const uint32_t pairs[6] = {0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
  uint32_t meta = 0;
  for (int i = 0; i < 8; ++i) meta |= pairs[r.below(6)] << 4 * i;
  return meta;
}

// ---------------------------------------------------------------- files and device memory
static FILE* file;
static bool with_inputs;

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}
static void write_section(const std::string& name, uint64_t hash, const std::vector<uint32_t>& words) {
  std::fprintf(file, "%s %016llx %zu\n", name.c_str(), static_cast<unsigned long long>(hash), words.size());
  std::fwrite(words.data(), 4, words.size(), file);
}
using Kernel = void(const uint32_t* in, uint32_t* out);
// Runs a kernel on a grid and writes a section.
static void record(const std::string& name, Kernel* kernel, unsigned blocks, unsigned threads,
                   const std::vector<uint32_t>& in, size_t out_words) {
  constexpr size_t SHARED = 4096;
  uint64_t hash = 0xcbf29ce484222325ull;
  for (uint32_t word : in) hash = (hash ^ word) * 0x100000001b3ull;
  uint32_t *device_in, *device_out;
  check(cudaMalloc(&device_in, in.size() * 4));
  check(cudaMalloc(&device_out, out_words * 4));
  check(cudaMemcpy(device_in, in.data(), in.size() * 4, cudaMemcpyHostToDevice));
  check(cudaMemset(device_out, 0xff, out_words * 4));
  check(launch(kernel, dim3(blocks), dim3(threads), SHARED, nullptr, device_in, device_out));
  check(cudaDeviceSynchronize());
  std::vector<uint32_t> out(out_words);
  check(cudaMemcpy(out.data(), device_out, out_words * 4, cudaMemcpyDeviceToHost));
  check(cudaFree(device_in));
  check(cudaFree(device_out));
  if (with_inputs) write_section(name + ".in", hash, in);
  write_section(name, hash, out);
}

// ---------------------------------------------------------------- mma: per lane w, x, accumulators (, metadata)
template <class T> __global__ void k_mma(const uint32_t* in, uint32_t* out) {
  constexpr int WORDS = 4 + 2 + 4;
  const int thread = blockIdx.x * 32 + threadIdx.x;
  in += thread * WORDS;
  const uint32_t w[4] = {in[0], in[1], in[2], in[3]}, x[2] = {in[4], in[5]};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(in[6 + i]);
  ptx::mma_m16n8k16<T>(d, w, x);
  for (int i = 0; i < 4; ++i) out[thread * 4 + i] = __float_as_uint(d[i]);
}
template <class T, int SELECTOR> __global__ void k_mma_sp(const uint32_t* in, uint32_t* out) {
  constexpr int WORDS = 4 + 4 + 4 + 1;
  const int thread = blockIdx.x * 32 + threadIdx.x;
  in += thread * WORDS;
  const uint32_t w[4] = {in[0], in[1], in[2], in[3]}, x[4] = {in[4], in[5], in[6], in[7]};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(in[8 + i]);
  ptx::mma_sp_m16n8k32<T, SELECTOR>(d, w, x, in[12]);
  for (int i = 0; i < 4; ++i) out[thread * 4 + i] = __float_as_uint(d[i]);
}
static std::vector<uint32_t> mma_inputs(Random r, Kind kind, bool bf16, bool sparse, int threads) {
  std::vector<uint32_t> in;
  for (int i = 0; i < threads; ++i) {
    for (int j = 0; j < (sparse ? 8 : 6); ++j) in.push_back(random_pair(r, kind, bf16));
    for (int j = 0; j < 4; ++j) in.push_back(float_bits(random_float(r, kind)));
    if (sparse) in.push_back(random_metadata(r));
  }
  return in;
}
template <class T> static void record_mma(const std::string& type) {
  constexpr int CASES = 6;
  for (Kind kind : {INTEGER, NARROW, WIDE}) {
    const std::string suffix = type + "." + KIND_NAMES[kind];
    const auto dense = mma_inputs({uint64_t(100 + kind)}, kind, ptx::is_bf16<T>, false, CASES * 32);
    const auto sparse = mma_inputs({uint64_t(200 + kind)}, kind, ptx::is_bf16<T>, true, CASES * 32);
    record("mma." + suffix, k_mma<T>, CASES, 32, dense, CASES * 32 * 4);
    record("mma_sp0." + suffix, k_mma_sp<T, 0>, CASES, 32, sparse, CASES * 32 * 4);
    record("mma_sp1." + suffix, k_mma_sp<T, 1>, CASES, 32, sparse, CASES * 32 * 4);
  }
}

// ---------------------------------------------------------------- wgmma n8
// A tile of tokens, then per thread w, accumulators, metadata.
constexpr int TILE_WORDS = 8 * 64 / 2;  // 8 tokens x k64, the whole swizzle atom
enum class Step { DENSE, SPARSE0, SPARSE1 };
template <class T, Step STEP> __global__ void k_wgmma(const uint32_t* in, uint32_t* out) {
#if PTX_SM90A
  constexpr int WORDS = 4 + 4 + 1;
  DYNAMIC_SHARED(smem);
  const uint32_t tile = ptx::smem_addr(smem);
  for (int i = threadIdx.x; i < TILE_WORDS; i += 128) ptx::store_shared(tile + i * 4, in[i]);
  ptx::fence_proxy_async();
  __syncthreads();
  in += TILE_WORDS + threadIdx.x * WORDS;
  const uint32_t w[4] = {in[0], in[1], in[2], in[3]}, meta = in[8];
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(in[4 + i]);
  constexpr uint64_t SWIZZLE128 = uint64_t(1) << 62, STRIDE = uint64_t(1024 >> 4) << 32, LEADING = uint64_t(1) << 16;
  const uint64_t x = SWIZZLE128 | STRIDE | LEADING | (tile & 0x3ffff) >> 4;
  ptx::wgmma_fence();
  if constexpr (STEP == Step::DENSE) ptx::wgmma<T>(d, w, x);
  else ptx::wgmma_sp<T, STEP == Step::SPARSE0 ? 0 : 1>(d, w, x, meta);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
#endif
}
template <class T> static void record_wgmma(const std::string& type) {
  for (Kind kind : {INTEGER, NARROW, WIDE}) {
    const std::string suffix = type + "." + KIND_NAMES[kind];
    Random r{uint64_t(300 + kind)};
    std::vector<uint32_t> in;
    for (int i = 0; i < TILE_WORDS; ++i) in.push_back(random_pair(r, kind, ptx::is_bf16<T>));
    for (int i = 0; i < 128; ++i) {
      for (int j = 0; j < 4; ++j) in.push_back(random_pair(r, kind, ptx::is_bf16<T>));
      for (int j = 0; j < 4; ++j) in.push_back(float_bits(random_float(r, kind)));
      in.push_back(random_metadata(r));
    }
    record("wgmma." + suffix, k_wgmma<T, Step::DENSE>, 1, 128, in, 128 * 4);
    record("wgmma_sp0." + suffix, k_wgmma<T, Step::SPARSE0>, 1, 128, in, 128 * 4);
    record("wgmma_sp1." + suffix, k_wgmma<T, Step::SPARSE1>, 1, 128, in, 128 * 4);
  }
}

// ---------------------------------------------------------------- ldmatrix: 32 rows of 16 bytes, each lane's row
constexpr int ROW_WORDS = 4, ROWS = 32;
template <int COUNT, bool TRANS> __global__ void k_ldmatrix(const uint32_t* in, uint32_t* out) {
  DYNAMIC_SHARED(smem);
  const uint32_t base = ptx::smem_addr(smem);
  for (int i = threadIdx.x; i < ROWS * ROW_WORDS; i += 32) ptx::store_shared(base + i * 4, in[i]);
  __syncthreads();
  uint32_t r[COUNT];
  const uint32_t row = base + in[ROWS * ROW_WORDS + threadIdx.x] * 16;
  if constexpr (TRANS) ptx::ldmatrix_trans(r, row);
  else ptx::ldmatrix(r, row);
  for (int i = 0; i < COUNT; ++i) out[threadIdx.x * COUNT + i] = r[i];
}
template <int COUNT> static void record_ldmatrix() {
  Random r{400 + COUNT};
  std::vector<uint32_t> in;
  for (int i = 0; i < ROWS * ROW_WORDS; ++i) in.push_back(r.bits());
  for (int i = 0; i < 32; ++i) in.push_back(uint32_t(r.below(ROWS)));
  record("ldmatrix_x" + std::to_string(COUNT), k_ldmatrix<COUNT, false>, 1, 32, in, 32 * COUNT);
  record("ldmatrix_trans_x" + std::to_string(COUNT), k_ldmatrix<COUNT, true>, 1, 32, in, 32 * COUNT);
}

// ---------------------------------------------------------------- cp.async: source sizes from nothing to everything
template <int BYTES> __global__ void k_cp_async(const uint32_t* in, uint32_t* out) {
  constexpr int WORDS = BYTES / 4;
  DYNAMIC_SHARED(smem);
  const uint32_t dst = ptx::smem_addr(smem) + threadIdx.x * BYTES;
  ptx::cp_async<BYTES>(dst, in + threadIdx.x * WORDS, threadIdx.x % (BYTES + 1));
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  for (int i = 0; i < WORDS; ++i) out[threadIdx.x * WORDS + i] = ptx::load_shared<uint32_t>(dst + i * 4);
}
template <int BYTES> static void record_cp_async() {
  Random r{500 + BYTES};
  std::vector<uint32_t> in(32 * BYTES / 4);
  for (uint32_t& word : in) word = r.bits();
  record("cp_async_" + std::to_string(BYTES), k_cp_async<BYTES>, 1, 32, in, in.size());
}

// ---------------------------------------------------------------- arithmetic on pairs, from three words of any bits
constexpr int TRIPLES = 256, ARITHMETIC = 5;
template <class T> __global__ void k_arithmetic(const uint32_t* in, uint32_t* out) {
  const int thread = blockIdx.x * 32 + threadIdx.x;
  const uint32_t a = in[thread * 3], b = in[thread * 3 + 1], c = in[thread * 3 + 2];
  out += thread * ARITHMETIC;
  out[0] = ptx::fma2<T>(a, b, c);
  out[1] = ptx::add2<T>(a, b);
  out[2] = ptx::sub2<T>(a, b);
  out[3] = ptx::mul2<T>(a, b);
  out[4] = ptx::pack2<T>(__uint_as_float(a), __uint_as_float(b));
}
// The same through CUDA's own functions, which the emulator's cuda_fp16.h and cuda_bf16.h stand in for.
template <class T> __global__ void k_intrinsics(const uint32_t* in, uint32_t* out) {
  using Pair = std::conditional_t<ptx::is_bf16<T>, __nv_bfloat162, half2>;
  const int thread = blockIdx.x * 32 + threadIdx.x;
  const Pair* p = reinterpret_cast<const Pair*>(in + thread * 3);
  Pair results[4] = {__hfma2(p[0], p[1], p[2]), __hadd2(p[0], p[1]), __hsub2(p[0], p[1]), __hmul2(p[0], p[1])};
  out += thread * ARITHMETIC;
  memcpy(out, results, sizeof results);
  out[4] = __float_as_uint(__low2float(p[0])) ^ __float_as_uint(__high2float(p[0]));
}
template <class T> static void record_arithmetic(const std::string& type) {
  Random r{600};
  // near: magnitudes that meet, so that sums cancel and round. codes: what dequantization multiplies, that is 8-bit
  // codes as subnormal patterns and large scales.
  std::vector<uint32_t> any, near, codes;
  const bool bf16 = ptx::is_bf16<T>;
  for (int i = 0; i < TRIPLES * 3; ++i) {
    any.push_back(r.bits());
    near.push_back((r.bits() & (bf16 ? 0x83ff83ff : 0x87ff87ff)) | (bf16 ? 0x3f003f00 : 0x38003800));
    const uint32_t scale = (r.bits() & 0x03ff03ff) | (bf16 ? 0x7c007c00 : 0x68006800);
    codes.push_back(i % 3 == 0 ? r.bits() & 0x00ff00ff : i % 3 == 1 ? scale : bf16 ? 0xbf00bf00 : 0xb800b800);
  }
  constexpr int OUT = TRIPLES * ARITHMETIC;
  record("arithmetic.any." + type, k_arithmetic<T>, TRIPLES / 32, 32, any, OUT);
  record("arithmetic.codes." + type, k_arithmetic<T>, TRIPLES / 32, 32, codes, OUT);
  record("arithmetic.near." + type, k_arithmetic<T>, TRIPLES / 32, 32, near, OUT);
  record("intrinsics.codes." + type, k_intrinsics<T>, TRIPLES / 32, 32, codes, OUT);
  record("intrinsics.near." + type, k_intrinsics<T>, TRIPLES / 32, 32, near, OUT);
}

// ---------------------------------------------------------------- bits and shuffles
__global__ void k_bits(const uint32_t* in, uint32_t* out) {
  const uint32_t a = in[threadIdx.x * 3], b = in[threadIdx.x * 3 + 1], c = in[threadIdx.x * 3 + 2];
  const uint32_t results[] = {
      ptx::prmt<0x5140>(a, b), ptx::prmt<0x0123>(a, b), ptx::prmt<0xb8a9>(a, b), __byte_perm(a, b, c & 0x7777),
      ptx::lop3<0xea>(a, b, c), ptx::lop3<0x96>(a, b, c), ptx::lop3<0xca>(a, b, c),
      ptx::and_or<0x000f000f, 0x64006400>(a),
      __shfl_sync(~0u, a, int(c & 31)), __shfl_sync(~0u, a, int(c & 31), 8), __shfl_xor_sync(~0u, a, 5),
      __shfl_xor_sync(~0u, a, 12, 8), __shfl_up_sync(~0u, a, 3), __shfl_up_sync(~0u, a, 3, 16),
      __shfl_down_sync(~0u, a, 9), __shfl_down_sync(~0u, a, 2, 4), __ballot_sync(~0u, int(a & 1)),
      __funnelshift_r(a, b, c), __funnelshift_l(a, b, c)};
  constexpr int COUNT = sizeof results / 4;
  for (int i = 0; i < COUNT; ++i) out[threadIdx.x * COUNT + i] = results[i];
}

int main(int argc, char** argv) {
  with_inputs = argc == 3 && std::strcmp(argv[2], "inputs") == 0;
  if (argc != 2 && !with_inputs) {
    std::fprintf(stderr, "usage: %s FILE [inputs]\n", argv[0]);
    return 2;
  }
  file = std::fopen(argv[1], "wb");
  if (!file) {
    std::perror(argv[1]);
    return 1;
  }
  record_mma<half>("f16");
  record_mma<__nv_bfloat16>("bf16");
  record_wgmma<half>("f16");
  record_wgmma<__nv_bfloat16>("bf16");
  record_ldmatrix<1>();
  record_ldmatrix<2>();
  record_ldmatrix<4>();
  record_cp_async<4>();
  record_cp_async<8>();
  record_cp_async<16>();
  record_arithmetic<half>("f16");
  record_arithmetic<__nv_bfloat16>("bf16");
  Random r{700};
  std::vector<uint32_t> in(32 * 3);
  for (uint32_t& word : in) word = r.bits();
  record("bits", k_bits, 1, 32, in, 32 * 19);
  return std::fclose(file) == 0 ? 0 : 1;
}
