// Where a prepared weight keeps each of its numbers, as a coordinate map: the twin of
// sparse_marlin/layouts/coordinates.py.
//
// A FRAGMENT is 16 rows x FRAGMENT_K columns: 32 lanes x 16 bytes of codes, in the registers that a lane hands to mma
// as operand A (row-major, 16 rows). With lane = 4 g + t, the instruction's rows g and g + 8 are the logical rows 2 g
// and 2 g + 1: a lane then owns two neighbouring output features, and stores them together.
//
//   codes       [N / 128][K / FRAGMENT_K][8 fragments of 16 rows][32 lanes][4 words]
//   metadata    [N / 128][K / 64][8 fragments of 16 rows][32 lanes][1 word]                        2:4 only
//   scales      [N / 128][groups][64 row pairs][2 rows] of 16 bits                                 symmetric
//               [N / 128][groups][64 row pairs][2 rows of scales, 2 rows of zero points] of 16 bits   with zero points
//
// A panel of 128 rows is contiguous along K, so any run of columns of a panel is one run of memory; how many columns a
// thread block takes at a time, and how its warps share them, is not part of the layout. wgmma's warps hold the same
// fragments (warp w of a warpgroup: rows 16 w ... of its 64).
#pragma once
#include <cstdint>

namespace sparse_marlin::layout {

constexpr int PANEL_ROWS = 128;
constexpr int FRAGMENT_ROWS = 16, FRAGMENTS_PER_PANEL = PANEL_ROWS / FRAGMENT_ROWS;
constexpr int LANE_BYTES = 16, FRAGMENT_BYTES = 32 * LANE_BYTES;  // one conflict-free 16-byte load per lane
constexpr int META_K = 64, META_FRAGMENT_BYTES = 32 * 4;          // a word serves two m16n8k32

// Columns of a fragment: 64 dense INT4, 32 dense INT8, 128 sparse INT4, 64 sparse INT8.
constexpr int fragment_k(int num_bits, bool sparse) { return LANE_BYTES * 8 / num_bits * 2 * (sparse ? 2 : 1); }
// Columns that one instruction multiplies.
constexpr int mma_k(bool sparse) { return sparse ? 32 : 16; }

constexpr int64_t panel_code_bytes(int64_t padded_k, int num_bits, bool sparse) {
  return PANEL_ROWS * padded_k * num_bits / 8 / (sparse ? 2 : 1);
}
constexpr int64_t panel_meta_bytes(int64_t padded_k) { return PANEL_ROWS * padded_k / 8; }
constexpr int panel_scale_bytes(bool zero_points) { return PANEL_ROWS * (zero_points ? 4 : 2); }  // of one group

struct Coordinate {
  int row, column;  // in the fragment; a column of a sparse matrix counts stored values
};

// Code number `index` of word `word` in lane `lane`: bits 4 index ... (8 index ... for INT8) of the word.
// The numbers of a 16-bit pair are half a word apart, so that masks pick both at once.
constexpr Coordinate code_coordinate(int num_bits, int lane, int word, int index) {
  const int g = lane / 4, t = lane % 4;
  const int step = num_bits == 4 ? word : word / 2;                        // instruction
  const int reg = num_bits == 4 ? index % 4 : 2 * (word % 2) + index % 2;  // of the four that it takes
  const int half = num_bits == 4 ? index / 4 : index / 2;                  // low or high half of that register
  return {2 * g + reg % 2, 16 * step + 8 * (reg / 2) + 2 * t + half};
}

// Nibble `index` of a lane's metadata word: which row, and which quad of the 64 columns, it describes.
// Lanes with t = 0, 1 serve the first k32 of the 64, lanes with t = 2, 3 the second (PTX ISA, sparsity selector).
constexpr Coordinate meta_coordinate(int lane, int index) {
  const int g = lane / 4, t = lane % 4;
  return {2 * g + index / 4, 8 * (t / 2) + 4 * (t % 2) + index % 4};
}

// The kernels read codes as 16-bit subnormals: an integer v in the low bits is v * 2 ** UNIT, and one fma with
// scale * 2 ** -UNIT gives the weight. Registers of odd instruction rows hold INT4 codes 4 bits higher, which is 16 v.
// So a stored scale is scale * 2 ** (normalisation - UNIT), over 16 for those rows, where normalisation is the largest
// power of two that keeps the scales of a row finite; row_scales undoes it.
constexpr int SUBNORMAL_UNIT_F16 = -24, SUBNORMAL_UNIT_BF16 = -133;
constexpr int row_shift(int num_bits, int row) { return num_bits == 4 ? 4 * (row % 2) : 0; }

}  // namespace sparse_marlin::layout
