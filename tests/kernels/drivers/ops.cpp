// Single instructions against plain C++, and small programs that the emulator must stop.
// usage: ops             every check, over seeds
//        ops NAME SEED   one small program
#include <cmath>
#include <numeric>
#include <random>

#include "common/ptx.cuh"
#include "drivers/check.h"

static std::mt19937 rng(1);
static float small_integer() { return float(int(rng() % 17) - 8); }

// ---------------------------------------------------------------- mma
template <class T> void k_mma(const float* w, const float* x, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t w_frag[4], x_frag[2];
  for (int j = 0; j < 4; ++j) {
    const float* p = w + (g + 8 * (j & 1)) * 16 + 2 * t + 8 * (j >> 1);
    w_frag[j] = ptx::pack2<T>(p[0], p[1]);
  }
  for (int j = 0; j < 2; ++j) {
    const int k = 2 * t + 8 * j;
    x_frag[j] = ptx::pack2<T>(x[k * 8 + g], x[(k + 1) * 8 + g]);
  }
  float acc[4] = {1, 1, 1, 1};
  ptx::mma_m16n8k16<T>(acc, w_frag, x_frag);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = acc[i];
}
template <class T> void check_mma() {
  std::vector<float> w(16 * 16), x(16 * 8), d(16 * 8);
  std::generate(w.begin(), w.end(), small_integer);
  std::generate(x.begin(), x.end(), small_integer);
  launch(k_mma<T>, 1, 32, 0, nullptr, w.data(), x.data(), d.data());
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      float want = 1;
      for (int k = 0; k < 16; ++k) want += w[m * 16 + k] * x[k * 8 + n];
      EXPECT(d[m * 8 + n] == want);
    }
}

// `kept` holds, for each row and group of four columns, the two columns whose weights are kept, as metadata does.
template <class T, int SELECTOR>
void k_mma_sp(const float* w, const uint8_t* kept, const float* x, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t w_frag[4], x_frag[4], meta = 0x44444444;  // valid, but not what the selected lanes hold
  for (int j = 0; j < 4; ++j) {
    const int row = g + 8 * (j & 1), group = t + 4 * (j >> 1), pair = kept[row * 8 + group];
    const float* p = w + row * 32 + group * 4;
    w_frag[j] = ptx::pack2<T>(p[pair & 3], p[pair >> 2]);
  }
  for (int j = 0; j < 4; ++j) {
    const int k = 2 * t + 8 * j;
    x_frag[j] = ptx::pack2<T>(x[k * 8 + g], x[(k + 1) * 8 + g]);
  }
  if (t / 2 == SELECTOR) {
    meta = 0;
    for (int nibble = 0; nibble < 8; ++nibble)
      meta |= uint32_t(kept[(g + 8 * (nibble / 4)) * 8 + nibble % 4 + 4 * (t & 1)]) << 4 * nibble;
  }
  float acc[4] = {1, 1, 1, 1};
  ptx::mma_sp_m16n8k32<T, SELECTOR>(acc, w_frag, x_frag, meta);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = acc[i];
}
template <class T, int SELECTOR> void check_mma_sp() {
  static constexpr uint8_t PAIRS[6] = {0x4, 0x8, 0x9, 0xc, 0xd, 0xe};
  std::vector<float> w(16 * 32), x(32 * 8), d(16 * 8);
  std::vector<uint8_t> kept(16 * 8);
  std::generate(w.begin(), w.end(), small_integer);
  std::generate(x.begin(), x.end(), small_integer);
  for (uint8_t& pair : kept) pair = PAIRS[rng() % 6];
  launch(k_mma_sp<T, SELECTOR>, 1, 32, 0, nullptr, w.data(), kept.data(), x.data(), d.data());
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      float want = 1;
      for (int group = 0; group < 8; ++group)
        for (int k : {kept[m * 8 + group] & 3, kept[m * 8 + group] >> 2})
          want += w[m * 32 + group * 4 + k] * x[(group * 4 + k) * 8 + n];
      EXPECT(d[m * 8 + n] == want);
    }
}

// ---------------------------------------------------------------- ldmatrix
template <int COUNT> void k_ldmatrix(int* errors) {
  DYNAMIC_SHARED(smem);
  auto* v = reinterpret_cast<uint16_t*>(smem);  // four 8 x 8 matrices
  for (int i = threadIdx.x; i < 256; i += 32) v[i] = uint16_t(i * 7 + 1);
  __syncwarp();
  const uint32_t row = ptx::smem_addr(smem) + threadIdx.x % (COUNT * 8) * 16;
  uint32_t plain[COUNT], transposed[COUNT];
  ptx::ldmatrix(plain, row);
  ptx::ldmatrix_trans(transposed, row);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
  for (int m = 0; m < COUNT; ++m) {
    const uint16_t* a = v + m * 64;
    if (plain[m] != (a[g * 8 + t] | uint32_t(a[g * 8 + t + 1]) << 16)) atomicAdd(errors, 1);
    if (transposed[m] != (a[t * 8 + g] | uint32_t(a[(t + 1) * 8 + g]) << 16)) atomicAdd(errors, 1);
  }
}
template <int COUNT> void check_ldmatrix() {
  int errors = 0;
  launch(k_ldmatrix<COUNT>, 1, 32, 512, nullptr, &errors);
  EXPECT(errors == 0);
}

// ---------------------------------------------------------------- cp.async with zero fill
template <int BYTES> void k_cp_async(const uint8_t* src, uint8_t* out, int src_bytes) {
  DYNAMIC_SHARED(smem);
  ptx::cp_async<BYTES>(ptx::smem_addr(smem) + threadIdx.x * BYTES, src + threadIdx.x * BYTES, uint32_t(src_bytes));
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncwarp();
  for (int i = 0; i < BYTES; ++i) out[threadIdx.x * BYTES + i] = smem[threadIdx.x * BYTES + i];
}
template <int BYTES> void check_cp_async() {
  std::vector<uint8_t> src(32 * BYTES), out(32 * BYTES);
  for (uint8_t& b : src) b = uint8_t(rng() | 1);
  for (int src_bytes = 0; src_bytes <= BYTES; ++src_bytes) {
    launch(k_cp_async<BYTES>, 1, 32, 32 * BYTES, nullptr, src.data(), out.data(), src_bytes);
    for (int i = 0; i < 32 * BYTES; ++i) EXPECT(out[i] == (i % BYTES < src_bytes ? src[i] : 0));
  }
}

// ---------------------------------------------------------------- shuffles, votes, named barriers
void k_warp(int* errors) {
  const int lane = int(threadIdx.x);
  auto expect = [&](bool right) { if (!right) atomicAdd(errors, 1); };
  int sum = lane;
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  expect(sum == 496);
  expect(__shfl_sync(~0u, lane, 3, 8) == lane / 8 * 8 + 3);
  expect(__shfl_up_sync(~0u, lane, 1, 4) == (lane % 4 ? lane - 1 : lane));
  expect(__shfl_down_sync(~0u, lane, 2, 4) == (lane % 4 < 2 ? lane + 2 : lane));
  expect(__shfl_xor_sync(~0u, lane, 4, 4) == (lane & 4 ? lane ^ 4 : lane));
  expect(__ballot_sync(~0u, lane & 1) == 0xaaaaaaaau);
  expect(__any_sync(~0u, lane == 31) && !__all_sync(~0u, lane != 31) && __all_sync(~0u, 1));
  if (lane < 8) expect(__shfl_sync(0xffu, lane, 3, 8) == 3);
}
void k_named_barrier(int* out) {  // warps 1 and 2 produce, warp 0 consumes
  STATIC_SHARED(int, box, 64);
  if (threadIdx.x < 32) {
    ptx::bar_sync(1, 96);
    if (threadIdx.x == 0) *out = std::accumulate(box, box + 64, 0);
  } else {
    box[threadIdx.x - 32] = int(threadIdx.x);
    ptx::bar_arrive(1, 96);
  }
}

// ---------------------------------------------------------------- wgmma
template <bool FENCE> void k_wgmma(const half* w, const half* x, float* d) {  // 64 x 16 by 16 x 32
  constexpr int N = 32;
  DYNAMIC_SHARED(smem);
  const uint32_t tile = ptx::smem_addr(smem);
  for (int i = threadIdx.x; i < N * 8; i += 128) {  // pairs of k
    const int n = i / 8, byte = i % 8 * 4;
    const uint32_t at = n * 128 + (((byte >> 4) ^ (n & 7)) << 4 | (byte & 15));
    ptx::store_shared(tile + at, *reinterpret_cast<const half2*>(x + n * 16 + i % 8 * 2));
  }
  if (FENCE) ptx::fence_proxy_async();
  __syncthreads();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t w_frag[4];
  for (int j = 0; j < 4; ++j)
    std::memcpy(&w_frag[j], w + (warp * 16 + g + 8 * (j & 1)) * 16 + 2 * t + 8 * (j >> 1), 4);
  float acc[N / 2] = {};
  ptx::wgmma_fence();
  ptx::wgmma<half>(acc, w_frag, uint64_t(tile >> 4) | uint64_t(64) << 32 | uint64_t(1) << 62);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i)
    d[(warp * 16 + g + 8 * (i >> 1 & 1)) * N + i / 4 * 8 + 2 * t + (i & 1)] = acc[i];
}
template <bool FENCE> bool wgmma_right() {
  std::vector<half> w(64 * 16), x(32 * 16);
  std::vector<float> d(64 * 32);
  for (half& h : w) h = half(small_integer());
  for (half& h : x) h = half(small_integer());
  launch(k_wgmma<FENCE>, 1, 128, 4096, nullptr, w.data(), x.data(), d.data());
  for (int m = 0; m < 64; ++m)
    for (int n = 0; n < 32; ++n) {
      float want = 0;
      for (int k = 0; k < 16; ++k) want += float(w[m * 16 + k]) * float(x[n * 16 + k]);
      if (d[m * 32 + n] != want) return false;
    }
  return true;
}

// ---------------------------------------------------------------- tensor copies
// Copies one box and changes its first two elements.
constexpr int ROWS = 12;
template <bool FENCE> void k_tensor_copy(const __grid_constant__ ptx::TensorMap from,
                                         const __grid_constant__ ptx::TensorMap to, int inner, int outer) {
  DYNAMIC_SHARED(smem);
  STATIC_SHARED(uint64_t, full, 1);
  const uint32_t box = ptx::smem_addr(smem), bar = ptx::smem_addr(full);
  ptx::mbar_init(bar, 1);
  ptx::mbar_init_fence();
  ptx::mbar_arrive_expect(bar, ROWS * 128);
  ptx::tensor_load_2d(box, &from, inner, outer, bar);
  ptx::mbar_wait(bar, 0);
  ptx::store_shared(box, ptx::load_shared<uint32_t>(box) ^ 0x10001u);
  if (FENCE) ptx::fence_proxy_async();
  ptx::tensor_store_2d(&to, inner, outer, box);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}
template <bool FENCE> bool tensor_copy(int inner, int outer) {
  constexpr int COLUMNS = 77, STRIDE = 88, MATRIX_ROWS = 21;
  std::vector<uint16_t> from(STRIDE * MATRIX_ROWS), to(from.size(), 0xffff);
  for (uint16_t& v : from) v = uint16_t(rng() | 1);
  ptx::TensorMap maps[2];
  EXPECT(tensor_map_2d(&maps[0], from.data(), COLUMNS, MATRIX_ROWS, STRIDE * 2, ROWS) == cudaSuccess);
  EXPECT(tensor_map_2d(&maps[1], to.data(), COLUMNS, MATRIX_ROWS, STRIDE * 2, ROWS) == cudaSuccess);
  launch(k_tensor_copy<FENCE>, 1, 1, ROWS * 128, nullptr, maps[0], maps[1], inner, outer);
  for (int r = 0; r < MATRIX_ROWS; ++r)
    for (int c = 0; c < STRIDE; ++c) {
      const bool copied = c < COLUMNS && c >= inner && c < inner + 64 && r >= outer && r < outer + ROWS;
      const int change = r == outer && (c == inner || c == inner + 1);
      if (to[r * STRIDE + c] != (copied ? from[r * STRIDE + c] ^ change : 0xffff)) return false;
    }
  return true;
}
static void check_tensor_maps() {
  alignas(16) uint16_t memory[64];
  ptx::TensorMap map;
  const auto accepts = [&](const void* base, uint64_t inner, uint64_t outer, uint64_t stride, uint32_t box_rows) {
    return tensor_map_2d(&map, base, inner, outer, stride, box_rows) == cudaSuccess;
  };
  EXPECT(accepts(memory, 7, 4, 16, 256));
  EXPECT(!accepts(memory + 1, 7, 4, 16, 8) && !accepts(memory, 7, 4, 18, 8));
  EXPECT(!accepts(memory, 7, 4, 16, 257) && !accepts(memory, 7, 4, 16, 0) && !accepts(memory, 7, 0, 16, 8));
}

// ---------------------------------------------------------------- arithmetic
static void check_half_arithmetic() {
  for (int i = 0; i < 100000; ++i) {  // one rounding, against an exact sum
    const uint32_t r = rng();
    const auto a = uint16_t(r), b = uint16_t(r >> 16), c = uint16_t(rng());
    const float fa = emu::half_to_float(a), fb = emu::half_to_float(b), fc = emu::half_to_float(c);
    const _Float16 fma = _Float16(__float128(fa) * fb + fc), sum = _Float16(__float128(fa) + fb);
    const _Float16 product = _Float16(__float128(fa) * fb);
    const half ha = half::raw(a), hb = half::raw(b);
    EXPECT(fma != fma || emu::half_fma(a, b, c) == emu_bits<uint16_t>(fma));
    EXPECT(sum != sum || __hadd(ha, hb).bits == emu_bits<uint16_t>(sum));
    EXPECT(product != product || __hmul(ha, hb).bits == emu_bits<uint16_t>(product));
  }
}
static void check_bf16_arithmetic() {
  // The nearest bfloat16 to an exact value, found among the neighbours of its truncation.
  auto nearest = [](__float128 exact) {
    const uint16_t near = uint16_t(emu_bits<uint32_t>(float(exact)) >> 16);
    uint16_t best = near;
    for (uint16_t candidate : {uint16_t(near - 1), uint16_t(near + 1)}) {
      auto distance = [&](uint16_t bits) {
        const __float128 d = __float128(emu::bf16_to_float(bits)) - exact;
        return d < 0 ? -d : d;
      };
      const __float128 mine = distance(candidate), others = distance(best);
      if (mine < others || (mine == others && candidate % 2 == 0)) best = candidate;
    }
    return best;
  };
  for (int i = 0; i < 100000; ++i) {
    auto moderate = [] { return uint16_t((rng() & 0x80ff) | (100 + rng() % 50) << 7); };  // far from overflow
    const uint16_t a = moderate(), b = moderate(), c = moderate();
    const float fa = emu::bf16_to_float(a), fb = emu::bf16_to_float(b), fc = emu::bf16_to_float(c);
    const __float128 fma = __float128(fa) * fb + fc, sum = __float128(fa) + fb;
    if (fma != 0) EXPECT(emu::bf16_fma(a, b, c) == nearest(fma));
    if (sum != 0) EXPECT(__hadd(__nv_bfloat16::raw(a), __nv_bfloat16::raw(b)).bits == nearest(sum));
  }
}
static void check_bits() {
  EXPECT(ptx::lop3<0xea>(0xf0f0, 0xff00, 0x1) == ((0xf0f0u & 0xff00u) | 1u));
  EXPECT((ptx::and_or<0x000f000f, 0x64006400>(0x12345678u)) == 0x64046408u);
  EXPECT(ptx::prmt<0x3276>(0x33221100, 0x77665544) == 0x33227766u);
  EXPECT(ptx::prmt<0xb8a9>(0x80007f00, 0) == 0xff000000u);
}

// ---------------------------------------------------------------- small programs that are right or wrong by one step
template <bool SYNC> void k_lanes(int* out) {  // lanes exchange through shared memory
  STATIC_SHARED(int, box, 32);
  box[threadIdx.x] = int(threadIdx.x);
  if (SYNC) __syncwarp();
  out[threadIdx.x] = box[threadIdx.x ^ 1];
}
template <bool SYNC> bool lanes() {
  std::vector<int> out(32);
  launch(k_lanes<SYNC>, 1, 32, 0, nullptr, out.data());
  for (int i = 0; i < 32; ++i)
    if (out[i] != (i ^ 1)) return false;
  return true;
}

// Every block leaves a number; the last one to come adds them up. FENCES: 1 before the counter, 2 after it.
template <int FENCES> void k_last_block(int* numbers, int* counter, int* sum) {
  numbers[blockIdx.x] = int(blockIdx.x) + 1;
  if (FENCES & 1) __threadfence();
  const bool last = atomicAdd(counter, 1) == int(gridDim.x) - 1;
  if (FENCES & 2) __threadfence();
  if (last) *sum = std::accumulate(numbers, numbers + gridDim.x, 0);
}
template <int FENCES> bool last_block() {
  std::vector<int> numbers(8);
  int counter = 0, sum = 0;
  launch(k_last_block<FENCES>, 8, 1, 0, nullptr, numbers.data(), &counter, &sum);
  return sum == 36;
}

// Data that is its own flag: the reader polls until the fill is gone, the words order nothing else.
template <bool WAIT> void k_mailbox(uint4* box, uint4* out) {
  if (blockIdx.x == 1) return ptx::store_relaxed(box, {1, 2, 3, 4});
  uint4 v = ptx::load_relaxed(box);
  while (WAIT && v.x == ~0u) {
    ptx::relax();
    v = ptx::load_relaxed(box);
  }
  *out = v;
}
template <bool WAIT> bool mailbox() {
  uint4 box{~0u, ~0u, ~0u, ~0u}, out{};
  launch(k_mailbox<WAIT>, 2, 1, 0, nullptr, &box, &out);
  return out.x == 1 && out.w == 4;
}

// May begin while the grid that writes `in` still runs. WAIT: 0 never, 1 where it should, 2 after the read, 3 by a
// thread that the reader does not wait for.
template <int WAIT> void k_early(const uint4* in, uint4* out) {
  if (threadIdx.x == 0 && WAIT % 2) ptx::pdl_wait();
  if (WAIT == 1) __syncthreads();
  if (threadIdx.x != 32) return;
  const uint4 v = ptx::load_relaxed(in);
  if (WAIT == 2) ptx::pdl_wait();
  if (WAIT) *out = v;
}
template <int WAIT> bool early() {
  const uint4 in{1, 2, 3, 4};
  uint4 out{};
  emu::earlier_grid_writes(&in, WAIT ? sizeof in : 0);
  launch_early(1, k_early<WAIT>, 1, 64, 0, nullptr, &in, &out);
  cudaDeviceSynchronize();
  return out.w == 4;
}

// Blocks read each other's shared memory. FAULT: 1 before it is written, 2 until it is gone, 3 until it is overwritten.
template <int FAULT> void k_cluster(float* out) {
  DYNAMIC_SHARED(smem);
  const uint32_t mine = ptx::smem_addr(smem) + threadIdx.x * 16;
  const float v = float(blockIdx.x * 64 + threadIdx.x);
  ptx::store_shared(mine, make_float4(v, v, v, v));
  ptx::pdl_wait();
  if (FAULT != 1) ptx::cluster_sync();
  float sum = 0;
  for (int rank = 0; rank < 4; ++rank) sum += ptx::load_cluster(mine, rank).w;
  if (FAULT == 3) ptx::store_shared(mine, make_float4(0, 0, 0, 0));
  if (FAULT != 2) ptx::cluster_sync();
  out[blockIdx.x * 64 + threadIdx.x] = sum;
}
template <int FAULT> bool cluster() {
  std::vector<float> out(8 * 64);
  launch_early(4, k_cluster<FAULT>, 8, 64, 1024, nullptr, out.data());
  cudaDeviceSynchronize();
  for (int i = 0; i < 8 * 64; ++i)
    if (out[i] != float(4 * (i / 256 * 256 + i % 64) + 6 * 64)) return false;
  return true;
}

void k_barrier_too_large() {
  if (threadIdx.x < 32) ptx::bar_sync(1, 64);
}
void k_diverge() {
  uint32_t r[4];
  if (threadIdx.x < 16) __syncwarp();
  else ptx::ldmatrix(r, 1024);
}
void k_spin(int* flag) {
  while (ptx::load_acquire(flag) == 0) ptx::relax();
}
void k_no_commit(const uint4* src) {
  DYNAMIC_SHARED(smem);
  ptx::cp_async<16>(ptx::smem_addr(smem) + threadIdx.x * 16, src + threadIdx.x);
}
void k_misaligned(const uint4* src) {
  DYNAMIC_SHARED(smem);
  ptx::cp_async<16>(ptx::smem_addr(smem) + threadIdx.x * 16 + 8, src + threadIdx.x);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}
void k_bad_metadata() {
  uint32_t w[4] = {}, x[4] = {};
  float d[4] = {};
  ptx::mma_sp_m16n8k32<half, 0>(d, w, x, threadIdx.x == 5 ? 0x44444441u : 0x44444444u);  // nibble 0: indices 1, 0
}
template <auto KERNEL, class... A> bool run_warps(unsigned threads, size_t shared, A... args) {
  launch(KERNEL, 1, threads, shared, nullptr, args...);
  return true;
}

int main(int argc, char** argv) {
  if (argc == 3) {
    static int flag = 0;
    static uint4 src[32] = {};
    emu::options.seed = uint32_t(std::atoi(argv[2]));
    return run_by_name({{"lanes", lanes<true>},
                        {"lanes_no_sync", lanes<false>},
                        {"last_block", last_block<3>},
                        {"last_block_no_fence_before", last_block<2>},
                        {"last_block_no_fence_after", last_block<1>},
                        {"mailbox", mailbox<true>},
                        {"mailbox_no_wait", mailbox<false>},
                        {"wgmma", wgmma_right<true>},
                        {"wgmma_no_proxy_fence", wgmma_right<false>},
                        {"tensor_copy_no_proxy_fence", [] { return tensor_copy<false>(0, 0); }},
                        {"early_never_waits", early<0>},
                        {"early_waits_late", early<2>},
                        {"early_waits_elsewhere", early<3>},
                        {"cluster_no_sync_before", cluster<1>},
                        {"cluster_no_sync_after", cluster<2>},
                        {"cluster_overwritten", cluster<3>},
                        {"barrier_too_large", [] { return run_warps<k_barrier_too_large>(64, 0); }},
                        {"diverge", [] { return run_warps<k_diverge>(32, 0); }},
                        {"spin", [] { return run_warps<k_spin>(32, 0, &flag); }},
                        {"no_commit", [] { return run_warps<k_no_commit>(32, 1024, src); }},
                        {"misaligned", [] { return run_warps<k_misaligned>(32, 1024, src); }},
                        {"bad_metadata", [] { return run_warps<k_bad_metadata>(32, 0); }}},
                       argv[1]);
  }
  for (emu::options.seed = 0; emu::options.seed < 6; ++emu::options.seed) {
    check_mma<half>();
    check_mma<__nv_bfloat16>();
    check_mma_sp<half, 0>();
    check_mma_sp<half, 1>();
    check_mma_sp<__nv_bfloat16, 0>();
    check_mma_sp<__nv_bfloat16, 1>();
    check_ldmatrix<1>();
    check_ldmatrix<2>();
    check_ldmatrix<4>();
    check_cp_async<4>();
    check_cp_async<8>();
    check_cp_async<16>();
    EXPECT(wgmma_right<true>());
    for (int inner : {0, 8, 64, 77, -64})
      for (int outer : {0, 10, 21, -3}) EXPECT(tensor_copy<true>(inner, outer));
    EXPECT(early<1>() && cluster<0>() && lanes<true>() && last_block<3>() && mailbox<true>());
    int errors = 0, out = 0;
    launch(k_warp, 1, 32, 0, nullptr, &errors);
    launch(k_named_barrier, 1, 96, 0, nullptr, &out);
    EXPECT(errors == 0 && out == (32 + 95) * 32);
  }
  check_half_arithmetic();
  check_bf16_arithmetic();
  check_bits();
  check_tensor_maps();
  return failures != 0;
}
