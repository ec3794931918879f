// What C++ says about the kernel form, as bytes for test_layouts.py to compare with.
//
//   dump map                                        the coordinates of csrc/common/layout.h, as int32
//   dump weight BITS GROUP SPARSE ZERO BF16 N K     a weight's numbers one by one, and then its kernel form as
//                                                   tests/kernels/gemm_problem.h prepares it
#include <cstdio>
#include <cstdlib>
#include <string>

#include "gemm_problem.h"

using namespace gemm_test;

template <class T> void write(const T* data, size_t count) { std::fwrite(data, sizeof(T), count, stdout); }
template <class T> void write(const std::vector<T>& v) { write(v.data(), v.size()); }

void write(const layout::Coordinate& c) {
  const int32_t pair[2] = {c.row, c.column};
  write(pair, 2);
}

void dump_map() {
  for (int num_bits : {4, 8})
    for (int lane = 0; lane < 32; ++lane)
      for (int word = 0; word < 4; ++word)
        for (int i = 0; i < 32 / num_bits; ++i) write(layout::code_coordinate(num_bits, lane, word, i));
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 8; ++i) write(layout::meta_coordinate(lane, i));
}

void dump_weight(const GemmProblem& p) {
  std::vector<uint8_t> codes, meta, zero_points;
  std::vector<uint16_t> scales;
  for (int n = 0; n < p.N; ++n) {
    for (int c = 0; c < p.K / (p.scheme.sparse ? 2 : 1); ++c) codes.push_back(uint8_t(p.code(n, c)));
    for (int quad = 0; p.scheme.sparse && quad < p.K / 4; ++quad) meta.push_back(uint8_t(p.meta(n, quad)));
    for (int g = 0; g < p.groups(); ++g) {
      scales.push_back(round_16(p.scale(n, g), p.scheme.dtype));
      if (p.scheme.zero_points) zero_points.push_back(uint8_t(p.zero_point(n, g)));
    }
  }
  const Prepared prepared = prepare(p);
  write(codes), write(meta), write(scales), write(zero_points);
  write(prepared.weights), write(prepared.meta), write(prepared.scales), write(prepared.row_scales);
}

int main(int argc, char** argv) {
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  if (argc == 2 && std::string(argv[1]) == "map") {
    dump_map();
  } else if (argc == 9 && std::string(argv[1]) == "weight") {
    const Scheme scheme{number(6) ? Float16::BFLOAT16 : Float16::HALF, number(2), number(3), number(4) != 0,
                        number(5) != 0};
    dump_weight({scheme, 0, number(7), number(8), false, false, 7});
  } else {
    return 2;
  }
  return 0;
}
