// How thread blocks share the work (stream-K).
//
// A UNIT is one tile of y times one tile of K. The units of the whole problem lie on a line, tile by tile, and the line
// is cut into one run per block, equal to within a unit; a run may begin and end inside a tile. Four blocks, three
// tiles of five units:
//
//     tile      |    0    |    1    |    2    |
//     unit      0 . . . . 5 . . . . 10. . . . 15
//     block     |  0  |   1   |   2   |   3   |
//
// The block that holds a tile's last unit FINISHES it: it adds the pieces of the blocks before it, in their order, so
// the result does not depend on timing. A block walks its tiles from the last to the first. The piece that somebody
// else finishes, at the end of its run, thus comes first, and the piece that it must wait for itself comes last. It
// only ever waits for blocks of a lower index, which the GPU starts earlier: any number of blocks gets through.
#pragma once
#include "common/ptx.cuh"

namespace sparse_marlin {

struct Partition {
  int k_tiles, units, blocks;

  __host__ __device__ int begin(int block) const { return int(int64_t(block) * units / blocks); }
  // The block whose run holds a unit.
  __host__ __device__ int owner(int unit) const { return int(((int64_t(unit) + 1) * blocks - 1) / units); }
};

// Goes through one block's units: tiles downwards, K upwards within a tile.
struct Walk {
  int first, end;          // the units of the run that no piece has covered yet
  int tile = 0, k, k_end;  // the piece: the K tiles [k, k_end) of a tile
  int k_tiles;

  PTX_INLINE Walk(const Partition& p, int block) : first(p.begin(block)), end(p.begin(block + 1)), k_tiles(p.k_tiles) {
    next_piece();
  }
  PTX_INLINE bool done() const { return k == k_end; }  // of the piece, and of the run when it stays so after next_piece
  PTX_INLINE void next_piece() {
    k = k_end = 0;
    if (end == first) return;
    tile = (end - 1) / k_tiles;
    const int start = tile * k_tiles;
    k = max(first - start, 0);
    k_end = end - start;
    end = start + k;
  }
};

}  // namespace sparse_marlin
