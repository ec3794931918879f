// Single instructions against plain C++. With an argument: one fault that the emulator must stop.
#include <cstdio>
#include <random>
#include <vector>

#include "common/ptx.cuh"

static int bad = 0;
#define EXPECT(c) do { if (!(c)) { ++bad; std::printf("line %d: %s\n", __LINE__, #c); } } while (0)

static uint32_t pack(float lo, float hi, bool bf16) {
  return bf16 ? emu::float_to_bf16(lo) | uint32_t(emu::float_to_bf16(hi)) << 16 : emu::float_to_half(lo) | uint32_t(emu::float_to_half(hi)) << 16;
}
void k_mma(const float* a, const float* b, float* d, bool bf16) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t ra[4], rb[2];
  for (int j = 0; j < 4; ++j) { const float* p = a + (g + 8 * (j & 1)) * 16 + 2 * t + 8 * (j >> 1); ra[j] = pack(p[0], p[1], bf16); }
  for (int j = 0; j < 2; ++j) rb[j] = pack(b[(2 * t + 8 * j) * 8 + g], b[(2 * t + 8 * j + 1) * 8 + g], bf16);
  float c[4] = {1, 1, 1, 1};
  if (bf16) ptx::mma_m16n8k16_bf16(c, ra, rb); else ptx::mma_m16n8k16_f16(c, ra, rb);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = c[i];
}
void k_matrices(int* errors) {
  DYNAMIC_SHARED(smem);
  auto* h = reinterpret_cast<uint16_t*>(smem);  // four 8 x 8 matrices
  for (int i = threadIdx.x; i < 256; i += 32) h[i] = uint16_t(i * 7 + 1);
  __syncwarp();
  uint32_t r[4], q[4], addr = ptx::smem_addr(smem) + threadIdx.x * 16;
  ptx::ldmatrix_x4(r, addr);
  ptx::ldmatrix_x4_trans(q, addr);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int m = 0; m < 4; ++m) {
    if (r[m] != (h[m * 64 + g * 8 + 2 * t] | uint32_t(h[m * 64 + g * 8 + 2 * t + 1]) << 16)) atomicAdd(errors, 1);
    if (q[m] != (h[m * 64 + 2 * t * 8 + g] | uint32_t(h[m * 64 + (2 * t + 1) * 8 + g]) << 16)) atomicAdd(errors, 1);
    if (ptx::movmatrix(r[m]) != q[m]) atomicAdd(errors, 1);
  }
  int sum = threadIdx.x;
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  if (sum != 496 || __ballot_sync(~0u, threadIdx.x & 1) != 0xaaaaaaaau) atomicAdd(errors, 1);
  if (threadIdx.x < 8 && __shfl_sync(0xffu, int(threadIdx.x), 3, 8) != 3) atomicAdd(errors, 1);
}
void k_named(int* out) {  // warps 1 and 2 produce, warp 0 consumes
  STATIC_SHARED(int, box, 64);
  if (threadIdx.x < 32) {
    ptx::bar_sync(1, 96);
    int sum = 0;
    for (int v : box) sum += v;
    if (threadIdx.x == 0) *out = sum;
  } else {
    box[threadIdx.x - 32] = threadIdx.x;
    ptx::bar_arrive(1, 96);
  }
}
template <bool FENCE> void k_wgmma(const half* a, const half* b, float* d) {  // 64 x 16 by 16 x 24
  constexpr int N = 24;
  DYNAMIC_SHARED(smem);
  for (int i = threadIdx.x; i < N * 16; i += 128) {
    const int n = i / 16, byte = i % 16 * 2;
    const uint32_t at = n * 128 + (((byte >> 4) ^ (n & 7)) << 4 | (byte & 15));
    ptx::store_shared(ptx::smem_addr(smem) + at, b[n * 16 + i % 16]);
  }
  if (FENCE) ptx::fence_proxy_async();
  __syncthreads();
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t r[4];
  for (int j = 0; j < 4; ++j) std::memcpy(&r[j], a + (warp * 16 + g + 8 * (j & 1)) * 16 + 2 * t + 8 * (j >> 1), 4);
  float acc[N / 2] = {};
  ptx::wgmma_fence();
  const uint32_t s = ptx::smem_addr(smem);
  ptx::Wgmma<N>::rs(acc, r, uint64_t(s >> 4) | uint64_t(64) << 32 | uint64_t(1) << 62);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < N / 2; ++i) d[(warp * 16 + g + 8 * (i >> 1 & 1)) * N + i / 4 * 8 + 2 * t + (i & 1)] = acc[i];
}
template <bool SYNC> void k_lanes(int* out) {  // lanes exchange through shared memory
  STATIC_SHARED(int, box, 32);
  box[threadIdx.x] = threadIdx.x;
  if (SYNC) __syncwarp();
  out[threadIdx.x] = box[threadIdx.x ^ 1];
}
void k_deadlock() { if (threadIdx.x < 32) ptx::bar_sync(1, 64); }
void k_diverge() { uint32_t r[4]; if (threadIdx.x < 16) __syncwarp(); else ptx::ldmatrix_x4(r, 1024); }
void k_spin(int* flag) { while (ptx::load_acquire(flag) == 0) ptx::relax(); }

int main(int argc, char** argv) {
  int errors = 0, out = 0;
  std::vector<half> ha(64 * 16), hb(24 * 16);
  std::vector<float> d(64 * 24);
  std::mt19937 rng(1);
  for (half& h : ha) h = half(float(int(rng() % 17) - 8));
  for (half& h : hb) h = half(float(int(rng() % 17) - 8));
  switch (argc > 1 ? std::atoi(argv[1]) : 0) {
    case 1: launch(k_deadlock, 1, 64, 0, nullptr); return 0;
    case 2: launch(k_diverge, 1, 32, 0, nullptr); return 0;
    case 3: launch(k_spin, 1, 32, 0, nullptr, &out); return 0;
    case 5: launch(k_lanes<false>, 1, 32, 0, nullptr, reinterpret_cast<int*>(d.data())); return 0;
    case 6: launch(k_lanes<true>, 1, 32, 0, nullptr, reinterpret_cast<int*>(d.data())); return 0;
    case 4: launch(k_wgmma<false>, 1, 128, 4096, nullptr, ha.data(), hb.data(), d.data()); return 0;
  }
  for (unsigned seed = 0; seed < 4; ++seed) {
    emu::options.seed = seed;
    for (bool bf16 : {false, true}) {
      std::vector<float> a(256), b(128), c(128);
      for (float& v : a) v = float(int(rng() % 17) - 8);
      for (float& v : b) v = float(int(rng() % 17) - 8);
      launch(k_mma, 1, 32, 0, nullptr, a.data(), b.data(), c.data(), bf16);
      for (int i = 0; i < 128; ++i) {
        float want = 1;
        for (int k = 0; k < 16; ++k) want += a[i / 8 * 16 + k] * b[k * 8 + i % 8];
        EXPECT(c[i] == want);
      }
    }
    launch(k_matrices, 1, 32, 512, nullptr, &errors);
    launch(k_named, 1, 96, 0, nullptr, &out);
    EXPECT(errors == 0 && out == (32 + 95) * 32);
    launch(k_wgmma<true>, 1, 128, 4096, nullptr, ha.data(), hb.data(), d.data());
    for (int m = 0; m < 64; ++m)
      for (int n = 0; n < 24; ++n) {
        float want = 0;
        for (int k = 0; k < 16; ++k) want += float(ha[m * 16 + k]) * float(hb[n * 16 + k]);
        EXPECT(d[m * 24 + n] == want);
      }
  }
  for (int i = 0; i < 2000000; ++i) {  // one rounding, against an exact sum
    const uint32_t r = rng(), s = rng();
    const uint16_t x = uint16_t(r), y = uint16_t(r >> 16), z = uint16_t(s), got = emu::half_fma(x, y, z);
    const __float128 exact = __float128(emu::half_to_float(x)) * emu::half_to_float(y) + emu::half_to_float(z);
    const _Float16 want = _Float16(exact);
    EXPECT(emu_bits<uint16_t>(want) == got || want != want);
  }
  EXPECT(ptx::lop3<0xea>(0xf0f0, 0xff00, 0x1) == ((0xf0f0u & 0xff00u) | 1u));
  EXPECT(ptx::prmt<0x3276>(0x33221100, 0x77665544) == 0x33227766u);
  std::printf("%d wrong\n", bad);
  return bad != 0;
}
