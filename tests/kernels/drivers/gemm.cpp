// usage: gemm PART       one of: sm80 dense, sm80 sparse, sm90 dense, sm90 sparse, gather, refusals
//
// Every instance, through gemm.h, at small and odd shapes.
#include "gemm.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/epilogue.cuh"
#include "drivers/check.h"
#include "gemm_problem.h"

using namespace gemm_test;

constexpr uint16_t POISON = 0x7fff;  // a NaN of both types

// All launches that share it follow each other, as on a stream: each must leave it as it found it.
std::vector<uint32_t> shared_workspace(size_t(1) << 20, EMPTY);

struct Launch {
  std::string config;
  Schedule schedule;
  int x_stride;
};
std::string text(const GemmProblem& p, const Launch& l) {
  return l.config + ", " + std::to_string(l.schedule.blocks) + " blocks, split " + std::to_string(l.schedule.split) +
         ", " + name(p) + ", seed " + std::to_string(emu::options.seed);
}

// Runs it and returns y, or nothing after a message.
std::vector<uint16_t> run(const GemmProblem& p, const Prepared& w, const Launch& l, std::vector<uint32_t>& workspace) {
  const int readable = (p.K + 7) / 8 * 8;
  std::vector<uint16_t> x(size_t(p.M) * l.x_stride, POISON), y(size_t(p.M) * p.N, POISON), bias(p.N);
  for (int m = 0; m < p.M; ++m)
    for (int k = 0; k < readable; ++k) x[size_t(m) * l.x_stride + k] = k < p.K ? p.x_bits(m, k) : 0;
  for (int n = 0; n < p.N; ++n) bias[n] = p.bias_bits(n);
  const Problem problem{p.scheme,
                        p.M,
                        p.N,
                        p.K,
                        x.data(),
                        l.x_stride,
                        w.weights.data(),
                        w.meta.data(),
                        w.scales.data(),
                        w.row_scales.data(),
                        p.with_bias ? bias.data() : nullptr,
                        y.data(),
                        workspace.data()};
  emu::earlier_grid_writes(x.data(), x.size() * 2);  // as whatever has made them, or used the memory before
  emu::earlier_grid_writes(y.data(), y.size() * 2);
  const std::string error = gemm(problem, l.config, l.schedule, nullptr);
  cudaDeviceSynchronize();
  if (!error.empty()) {
    std::printf("%s: %s\n", text(p, l).c_str(), error.c_str());
    return {};
  }
  for (uint32_t word : workspace)
    if (word != EMPTY) {
      std::printf("%s: the workspace is not as it was\n", text(p, l).c_str());
      return {};
    }
  return y;
}

bool right(const GemmProblem& p, const Launch& l, const std::vector<uint16_t>& y) {
  std::vector<std::vector<double>> x;
  for (int m = 0; m < p.M; ++m) x.push_back(p.token(m));
  for (int n = 0; n < p.N; ++n) {
    const auto row = p.row(n);
    for (int m = 0; m < p.M; ++m) {
      const Answer a = answer(p, row, x[m], n);
      const double got = value_16(y[size_t(m) * p.N + n], p.scheme.dtype);
      if (!(std::fabs(got - a.value) <= a.allowed)) {
        std::printf("%s: y[%d, %d] = %g, expected %g +- %g\n", text(p, l).c_str(), m, n, got, a.value, a.allowed);
        return false;
      }
    }
  }
  return true;
}

// A random problem for the config: exact sums, or any numbers, twice under different schedules.
bool random_problem(const Scheme& s, const std::string& config, int token_tile, uint32_t salt) {
  uint32_t choice = 0;
  const auto pick = [&](auto... values) {
    const int all[] = {values...};
    return all[hash(salt, ++choice, 71) % sizeof...(values)];
  };
  GemmProblem p{s, 0, 0, 0, salt % 2 == 0, false, salt};
  p.M = pick(1, 2, 7, token_tile - 1, token_tile, token_tile + 1, token_tile + 9);
  p.N = pick(1, 6, 77, 128, 136, 255);
  p.K = s.group_size == -1 ? pick(4, 60, 252, 264, 516) : s.group_size * pick(1, 2, 3, 4) + pick(0, 0, 128, 384);
  if (s.group_size == -1 && !s.sparse) p.K -= pick(0, 1, 2);
  p.with_bias = pick(0, 1);
  const bool clusters = config.starts_with("sm90");
  const Launch l{config,
                 {pick(1, 2, 3, 4, 5, 7, 50), clusters ? pick(0, 0, 0, 1, 2, 3, 4) : pick(0, 0, 0, 1)},
                 (p.K + 7) / 8 * 8 + pick(0, 8, 40)};
  std::vector<uint32_t> own(workspace_bytes(s, config, l.schedule) / 4 + 4, EMPTY);
  const Prepared w = prepare(p);
  emu::options.seed = salt % 12;
  const auto y = run(p, w, l, pick(0, 1) ? own : shared_workspace);
  if (y.empty() || !right(p, l, y)) return false;
  if (p.exact) return true;
  emu::options.seed += 5;
  if (run(p, w, l, shared_workspace) == y) return true;
  std::printf("%s: other bits than under another schedule\n", text(p, l).c_str());
  return false;
}

int check_gemm(const std::string& arch, bool sparse) {
  uint32_t salt = 0;
  for (const Scheme& s : schemes(sparse)) {
    int found = 0;
    for (const Config& c : configs()) {
      BlockShape shape;
      if (!std::string(c.name).starts_with(arch) || !block_shape(s, c.name, &shape).empty()) continue;
      ++found;
      EXPECT(shape.token_tile == c.token_tile && shape.row_tile == c.row_tile);
      for (int i = 0; i < 3; ++i) EXPECT(random_problem(s, c.name, c.token_tile, salt++));
    }
    EXPECT(found >= 2);  // every scheme has kernels for few and for many tokens
  }
  return failures;
}

void check_gathered(int M, int K, int x_stride, int out_stride, bool permuted) {
  std::vector<uint16_t> x(size_t(M) * x_stride), out(size_t(M) * out_stride, POISON);
  std::vector<int32_t> perm(K);
  for (size_t i = 0; i < x.size(); ++i) x[i] = uint16_t(hash(uint32_t(i), K, 1));
  for (int i = 0; i < K; ++i) perm[i] = permuted ? int(hash(i, K, 2) % K) : i;
  EXPECT(gather_columns(x.data(), x_stride, permuted ? perm.data() : nullptr, out.data(), out_stride, M, K, nullptr)
             .empty());
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < out_stride; ++i)
      EXPECT(out[size_t(m) * out_stride + i] == (i < K ? x[size_t(m) * x_stride + perm[i]] : 0));
}

int check_gather() {
  for (bool permuted : {false, true}) {
    check_gathered(1, 1, 1, 8, permuted);
    check_gathered(3, 99, 101, 104, permuted);
    check_gathered(2, 4099, 4100, 4104, permuted);  // more than a block's columns
    check_gathered(17, 64, 64, 64, permuted);
  }
  alignas(16) uint16_t memory[32] = {};
  EXPECT(!gather_columns(memory, 8, nullptr, memory + 16, 12, 1, 8, nullptr).empty());  // rows would not be aligned
  EXPECT(!gather_columns(memory, 8, nullptr, memory + 17, 8, 1, 8, nullptr).empty());
  EXPECT(!gather_columns(memory, 9, nullptr, memory + 16, 8, 1, 9, nullptr).empty());  // K does not fit
  return failures;
}

int check_refusals() {
  const GemmProblem p{{}, 2, 16, 128, true, false, 1};
  const Prepared w = prepare(p);
  alignas(16) static uint16_t x[2 * 136], y[2 * 16];
  std::vector<uint32_t> workspace(workspace_bytes(p.scheme, "sm80_128x8", {1}) / 4, EMPTY);
  const Problem good{p.scheme,
                     p.M,
                     p.N,
                     p.K,
                     x,
                     128,
                     w.weights.data(),
                     nullptr,
                     w.scales.data(),
                     w.row_scales.data(),
                     nullptr,
                     y,
                     workspace.data()};
  const auto refuses = [&](const char* word, auto change, const char* config = "sm80_128x8", Schedule schedule = {}) {
    Problem bad = good;
    change(bad);
    const std::string error = gemm(bad, config, schedule, nullptr);
    const bool found = error.find(word) != error.npos;
    if (!found) std::printf("expected a text with \"%s\", got \"%s\"\n", word, error.c_str());
    return found;
  };
  EXPECT(gemm(good, "sm80_128x8", {1}, nullptr).empty());
  EXPECT(refuses("no kernel named nothing", [](Problem&) {}, "nothing"));
  EXPECT(refuses("was not compiled for dense INT8", [](Problem& q) { q.scheme.num_bits = 8; }));
  EXPECT(refuses("group size 16", [](Problem& q) { q.scheme.group_size = 16; }));
  EXPECT(refuses("2:4 INT4 weights with group size 128 and zero points",
                 [](Problem& q) { q.scheme.sparse = q.scheme.zero_points = true; }));
  EXPECT(refuses("meta", [](Problem& q) { q.scheme.sparse = true; }));
  EXPECT(refuses("null", [](Problem& q) { q.workspace = nullptr; }));
  EXPECT(refuses("positive", [](Problem& q) { q.M = 0; }));
  EXPECT(refuses("blocks", [](Problem&) {}, "sm80_128x8", {0}));
  EXPECT(refuses("split", [](Problem&) {}, "sm80_128x8", {1, 9}));
  EXPECT(refuses("split", [](Problem&) {}, "sm80_128x8", {1, -1}));
  EXPECT(refuses("clusters", [](Problem&) {}, "sm80_128x8", {1, 2}));
  EXPECT(refuses("x_stride", [](Problem& q) { q.x_stride = 132; }));
  EXPECT(refuses("x_stride", [](Problem& q) { q.x_stride = 120; }));
  EXPECT(refuses("aligned", [](Problem& q) { q.x = x + 1; }));
  EXPECT(workspace_bytes(p.scheme, "nothing", {1}) == -1 && workspace_bytes(p.scheme, "sm80_128x8", {0}) == -1);
  EXPECT(workspace_bytes(p.scheme, "sm80_128x8", {6}) == 3 * workspace_bytes(p.scheme, "sm80_128x8", {2}));
  BlockShape shape;
  EXPECT(!block_shape({.num_bits = 5}, "sm80_128x8", &shape).empty());
  return failures;
}

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "", weights = argc > 2 ? argv[2] : "";
  if ((part == "sm80" || part == "sm90") && (weights == "dense" || weights == "sparse"))
    return check_gemm(part, weights == "sparse") != 0;
  if (part == "gather") return check_gather() != 0;
  if (part == "refusals") return check_refusals() != 0;
  std::printf("usage: gemm sm80 | sm90 dense | sparse, or gather, or refusals\n");
  return 2;
}
