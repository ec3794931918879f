// How thread blocks share the work: whole tiles of y, as far as they go evenly into the blocks, the rest by stream-K.
//
// A UNIT is one tile of y times one tile of K. The units of the tiles that do not go evenly into the blocks lie on a
// line, tile by tile, and the line is cut into one run per block, equal to within a unit; a run may begin and end
// inside a tile. Four blocks, three tiles of five units:
//
//     tile      |    0    |    1    |    2    |
//     unit      0 . . . . 5 . . . . 10. . . . 15
//     block     |  0  |   1   |   2   |   3   |
//
// The block that holds a tile's last unit FINISHES it: it adds the pieces of the blocks before it, in their order, so
// the result does not depend on timing. A block walks its run from the last tile to the first. The piece that somebody
// else finishes, at the end of its run, thus comes first, and the piece that it must wait for itself comes last. It
// only ever waits for blocks of a lower index. GPUs start these earlier (CUDA does not promise it): then any number of
// blocks gets through, and otherwise as many as run at once.
//
// Then come its WHOLE tiles, which all blocks work through in step: those of the same tokens find each other's
// activations in the L2, those of the same rows the weights.
//
// Where tiles are few, a SPLIT cuts all of them into the same number of pieces instead, and the blocks of a tile form a
// cluster (sm_90): they run at the same time and add up through each other's shared memory.
#pragma once
#include <algorithm>

#include "common/ptx.cuh"
#include "gemm.h"

namespace sparse_marlin {

struct Partition {
  int k_tiles, blocks;
  int n_tiles, m_tiles;  // of y: rows of w, tokens
  int raster;            // token tiles that are taken together, all rows of w for them first
  int whole;             // tiles [0, whole) are not cut, the others are
  int units;             // on the line
  int split;             // blocks of a tile's cluster, or 1
  int run, longer;       // a block's run has `run` units, that of the first `longer` blocks one more

  __host__ static Partition make(int n_tiles, int m_tiles, int raster, int k_tiles, const Schedule& schedule) {
    Partition p = {};
    const int tiles = n_tiles * m_tiles;
    p.k_tiles = k_tiles, p.n_tiles = n_tiles, p.m_tiles = m_tiles, p.raster = std::min(raster, m_tiles);
    p.split = schedule.split > Schedule::WHOLE ? std::min(schedule.split, k_tiles) : 1;
    p.blocks = std::min(schedule.blocks, schedule.split == Schedule::WHOLE ? tiles : tiles * k_tiles);
    if (p.split > 1) p.blocks = tiles * p.split;
    // Cuts as few tiles as it can with runs of at least one tile's length: short pieces cost more than they even out.
    const int waves = tiles / p.blocks;
    p.whole = schedule.split != Schedule::STREAM_K || tiles % p.blocks == 0 ? tiles
              : waves > 1                                                   ? (waves - 1) * p.blocks
                                                                            : 0;
    p.units = (tiles - p.whole) * k_tiles;
    p.run = p.units / p.blocks, p.longer = p.units % p.blocks;
    return p;
  }

  __host__ __device__ int begin(int block) const { return block * run + (block < longer ? block : longer); }
  // The block whose run holds a unit.
  __host__ __device__ int owner(int unit) const {
    const int in_longer = longer * (run + 1);
    return unit < in_longer ? unit / (run + 1) : longer + (unit - in_longer) / run;
  }
  // The first block that holds a part of a tile that is cut.
  __host__ __device__ int first_owner(int tile) const { return owner((tile - whole) * k_tiles); }
  PTX_INLINE void coordinates(int tile, int& n_tile, int& m_tile) const {
    const int per_group = raster * n_tiles, group = tile / per_group, rest = tile - group * per_group;
    const int in_group = min(raster, m_tiles - group * raster);
    n_tile = rest / in_group;
    m_tile = group * raster + rest - n_tile * in_group;
  }
};

// Goes through one block's units: the run on the line with its tiles downwards, the whole tiles upwards, K upwards.
struct Walk {
  int first, end;          // the units of the run that no piece has covered yet
  int next_whole;          // tile
  int tile = 0, k, k_end;  // the piece: the K tiles [k, k_end) of a tile

  PTX_INLINE Walk(const Partition& p, int block) : first(p.begin(block)), end(p.begin(block + 1)), next_whole(block) {
    if (p.split > 1) {
      tile = block / p.split;
      const int rank = block - tile * p.split;
      k = p.k_tiles * rank / p.split;
      k_end = p.k_tiles * (rank + 1) / p.split;
      next_whole = p.whole;
    } else {
      next_piece(p);
    }
  }
  PTX_INLINE bool done() const {
    return k == k_end;
  }  // of the piece, and of the work when it stays so after next_piece
  PTX_INLINE void next_piece(const Partition& p) {
    k = k_end = 0;
    if (end > first) {
      const int cut = (end - 1) / p.k_tiles, start = cut * p.k_tiles;
      tile = p.whole + cut;
      k = max(first - start, 0);
      k_end = end - start;
      end = start + k;
    } else if (next_whole < p.whole) {
      tile = next_whole;
      next_whole += p.blocks;
      k_end = p.k_tiles;
    }
  }
};

}  // namespace sparse_marlin
