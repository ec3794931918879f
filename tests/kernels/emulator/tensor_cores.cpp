// ldmatrix, mma and wgmma. Products are summed in double and rounded once, where tensor cores truncate: results agree
// bit for bit where a sum fits a float, and closely elsewhere (see test_vectors.py).
#include "state.h"

namespace emu {

// ---------------------------------------------------------------- ldmatrix
void ldmatrix(LdMatrix& mine) {
  collective(mine.trans ? "ldmatrix.trans" : "ldmatrix", ~0u, &mine, [](void* const* args, uint32_t, Warp& w) {
    auto lane = [&](unsigned i) -> LdMatrix& { return *static_cast<LdMatrix*>(args[i]); };
    for (unsigned m = 0; m < lane(0).count; ++m) {
      uint16_t v[8][8];
      for (unsigned r = 0; r < 8; ++r) {
        const uint32_t at = lane(m * 8 + r).row_address;
        if (at % 16) fail("ldmatrix: row address 0x%x of lane %u is not a multiple of 16", at, m * 8 + r);
        w.block->access(at, 16, Use::READ, w, w.time, ALL_LANES);
        std::memcpy(v[r], w.block->arena + at, 16);
      }
      for (unsigned l = 0; l < 32; ++l) {
        const unsigned g = l / 4, t = l % 4 * 2;
        const uint16_t low = lane(l).trans ? v[t][g] : v[g][t], high = lane(l).trans ? v[t + 1][g] : v[g][t + 1];
        lane(l).r[m] = low | uint32_t(high) << 16;
      }
    }
  });
}

// ---------------------------------------------------------------- operands
namespace {

constexpr unsigned ROWS = 16, MAX_K = 32;
using Weights = float[ROWS][MAX_K];

float to_float(uint16_t bits, Float16 type) {
  return type == Float16::BFLOAT16 ? bf16_to_float(bits) : half_to_float(bits);
}

// The 16 x k weights of a warp from its registers (PTX ISA, "Matrix Fragments for mma.m16n8k16" and "… sparse mma").
// W: lane -> four registers; S: lane -> its metadata.
template <class W, class S> void expand(Weights& out, Float16 type, W registers, S sparsity) {
  const bool sparse = sparsity(0).sparse;
  const unsigned selector = sparsity(0).selector;
  if (sparse) std::memset(out, 0, sizeof out);
  for (unsigned l = 0; l < 32; ++l)
    for (unsigned r = 0; r < 4; ++r)
      for (unsigned half = 0; half < 2; ++half) {
        const unsigned row = l / 4 + 8 * (r & 1), stored = l % 4 * 2 + 8 * (r >> 1) + half;
        unsigned k = stored;
        if (sparse) {
          const unsigned group = stored / 2, holder = (row & 7) * 4 + 2 * selector + (group >> 2);
          const uint32_t nibble = sparsity(holder).meta >> (16 * (row >> 3) + 4 * (group & 3)) & 15;
          const unsigned first = nibble & 3, second = nibble >> 2;
          if (first >= second)
            fail("2:4 metadata of row %u, group %u: indices %u and %u do not increase (lane %u, selector %u)", row,
                 group, first, second, holder, selector);
          k = 4 * group + (half ? second : first);
        }
        out[row][k] = to_float(uint16_t(registers(l)[r] >> 16 * half), type);
      }
}

}  // namespace

// ---------------------------------------------------------------- mma
void mma(Mma& mine) {
  collective(mine.sparsity.sparse ? "mma.sp" : "mma", ~0u, &mine, [](void* const* args, uint32_t, Warp&) {
    auto lane = [&](unsigned i) -> Mma& { return *static_cast<Mma*>(args[i]); };
    const Float16 type = lane(0).type;
    const unsigned k = lane(0).sparsity.sparse ? 32 : 16;
    Weights w;
    expand(w, type, [&](unsigned l) { return lane(l).w; }, [&](unsigned l) { return lane(l).sparsity; });
    float x[MAX_K][8];
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned j = 0; j < k / 8; ++j)
        for (unsigned half = 0; half < 2; ++half)
          x[8 * j + l % 4 * 2 + half][l / 4] = to_float(uint16_t(lane(l).x[j] >> 16 * half), type);
    double sum[ROWS][8] = {};
    for (unsigned r = 0; r < ROWS; ++r)
      for (unsigned i = 0; i < k; ++i)
        for (unsigned n = 0; n < 8; ++n) sum[r][n] += double(w[r][i]) * x[i][n];
    for (unsigned l = 0; l < 32; ++l)
      for (unsigned i = 0; i < 4; ++i) {
        float& d = lane(l).d[i];
        d = float(d + sum[l / 4 + 8 * (i >> 1)][l % 4 * 2 + (i & 1)]);
      }
  });
}

// ---------------------------------------------------------------- wgmma: runs as late as allowed, in wait_group
void wgmma(const Wgmma& arguments) {
  Wgmma mine = arguments;
  collective(mine.sparsity.sparse ? "wgmma.sp" : "wgmma", ~0u, &mine, [](void* const* args, uint32_t, Warp& w) {
    if (!w.wgmma_fenced) fail("wgmma without wgmma.fence since the last commit_group");
    WgmmaInFlight& op = w.wgmma_open.emplace_back();
    op.time = w.time;
    for (unsigned l = 0; l < 32; ++l) {
      op.lane[l] = *static_cast<Wgmma*>(args[l]);
      if (op.lane[l].x != op.lane[0].x) fail("wgmma: the descriptor differs between lanes");
      std::memcpy(op.w[l], op.lane[l].w, sizeof op.w[l]);
      float* d = op.lane[l].d;
      const unsigned count = op.lane[l].n / 2;
      Accumulator& accumulator = w.accumulators[d];
      if (accumulator.uses++ == 0) {
        accumulator.value.assign(d, d + count);
        std::memset(d, 0xff, count * sizeof *d);
        poison(d, count * sizeof *d);
      }
    }
  });
}

// Column n of the k x n tokens, through the descriptor (PTX ISA, "Matrix Descriptor Format").
static void read_column(const WgmmaInFlight& op, Warp& w, unsigned n, unsigned k, double (&out)[MAX_K]) {
  const uint64_t descriptor = op.lane[0].x;
  const unsigned start = unsigned(descriptor & 0x3fff) << 4, stride = unsigned(descriptor >> 32 & 0x3fff) << 4;
  for (unsigned c = 0; c < k / 8; ++c) {
    const uint32_t at = swizzle128(start + (n >> 3) * stride + (n & 7) * 128 + c * 16);
    uint16_t v[8];
    w.block->access(at, sizeof v, Use::WGMMA, w, op.time, ALL_LANES);
    std::memcpy(v, w.block->arena + at, sizeof v);
    for (unsigned i = 0; i < 8; ++i) out[c * 8 + i] = to_float(v[i], op.lane[0].type);
  }
}

static void finish_wgmma(Warp& w, const WgmmaInFlight& op) {
  const Wgmma& common = op.lane[0];
  const unsigned k = common.sparsity.sparse ? 32 : 16;
  if (common.x >> 62 != 1) fail("wgmma: only the 128-byte swizzle is modelled");
  for (unsigned l = 0; l < 32; ++l)
    if (std::memcmp(op.w[l], op.lane[l].w, sizeof op.w[l]))
      fail("the weight registers of a wgmma in flight were changed (lane %u)", l);
  Weights weights;
  expand(weights, common.type, [&](unsigned l) { return op.w[l]; }, [&](unsigned l) { return op.lane[l].sparsity; });
  for (unsigned n = 0; n < common.n; ++n) {
    double column[MAX_K];
    read_column(op, w, n, k, column);
    for (unsigned r = 0; r < ROWS; ++r) {
      double sum = 0;
      for (unsigned i = 0; i < k; ++i) sum += weights[r][i] * column[i];
      const unsigned l = (r & 7) * 4 + (n & 7) / 2, i = n / 8 * 4 + (r >> 3) * 2 + (n & 1);
      float& d = w.accumulators.at(op.lane[l].d).value[i];
      d = float(d + sum);
    }
  }
  for (unsigned l = 0; l < 32; ++l) {
    const auto accumulator = w.accumulators.find(op.lane[l].d);
    if (--accumulator->second.uses) continue;
    const size_t bytes = common.n / 2 * sizeof(float);
    unpoison(op.lane[l].d, bytes);
    std::memcpy(op.lane[l].d, accumulator->second.value.data(), bytes);
    w.accumulators.erase(accumulator);
  }
}

void wgmma_fence() {
  collective("wgmma.fence", ~0u, nullptr, [](void* const*, uint32_t, Warp& w) { w.wgmma_fenced = true; });
}
void wgmma_commit() {
  collective("wgmma.commit_group", ~0u, nullptr, [](void* const*, uint32_t, Warp& w) {
    w.wgmma_groups.push_back(std::move(w.wgmma_open));
    w.wgmma_open.clear();
    w.wgmma_fenced = false;
  });
}
void wgmma_wait(unsigned pending) {
  collective("wgmma.wait_group", ~0u, &pending, [](void* const* args, uint32_t, Warp& w) {
    const unsigned keep = *static_cast<unsigned*>(args[0]);
    for (; w.wgmma_groups.size() > keep; w.wgmma_groups.pop_front())
      for (const WgmmaInFlight& op : w.wgmma_groups.front()) finish_wgmma(w, op);
  });
}

}  // namespace emu
