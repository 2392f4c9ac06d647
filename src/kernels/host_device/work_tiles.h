// The work of a launch: q tiles that CTAs take from a counter, one after the other. A q tile is a block of rows of one
// head with all of its key tiles, or a split of it, which has consecutive key tiles.
//
// Blocks are numbered by sections of consecutive heads (batch * hq + head); in a section row blocks are the outer loop
// and heads the inner one. A section has the heads that share K and V, so that these are loaded to L2 once, spread over
// time. All heads from bulk_heads on are the last section, which has so many heads that the blocks at its end, which
// are short under a band, fill all SMs.
//
// Some blocks may be cut into splits: without a mask the last ones, if they do not fill the SMs; under a band, if all
// blocks do not fill the SMs, the first and longest ones. Each split stores its O and its row statistics to global
// memory, and the split that finishes last combines them in order.
#pragma once
#include "host_device/mask.h"

namespace fulgur::kernels {

struct Work {
  int row_blocks;     // of the longest sequence
  int heads;          // batch * hq, or groups whose heads share blocks (host_device/strips.h)
  int section_heads;  // heads of a section
  int bulk_heads;     // heads in such sections
  int q_tiles;        // blocks that are not cut, and splits of the others
  int first_split;    // blocks [first_split, end_split) are cut
  int end_split;      // see first_split
  int splits;         // splits of such a block

  friend FULGUR_SHARED bool operator==(const Work&, const Work&) = default;
};

struct QTile {
  int block;  // index in its sequence; < 0: no more work
  int head, batch;
  int split;  // index among the splits of all cut blocks; < 0: a whole block
};

// The cut block of a split, and the index of the split in it.
struct Split {
  int block, index;
};

FULGUR_SHARED Split split_of(const Work& work, int split) {
  const int block = int(u32(split) / u32(work.splits));
  return {block, split - block * work.splits};
}

// `hq`: heads of a sequence, counted as in `work`. `splits`: some blocks are cut. The row blocks of a section that see
// the maximum of keys are first: its last blocks, unless there is only a left bound.
FULGUR_SHARED QTile q_tile_of(const Work& work, int hq, bool splits, const Band& band, int number) {
  if (number >= work.q_tiles) return {-1, 0, 0, -1};
  QTile tile = {0, 0, 0, -1};
  if (splits && number >= work.first_split) {
    const int cut = work.end_split - work.first_split;
    const int split = number - work.first_split;
    if (split < cut * work.splits) {
      tile.split = split;
      number = work.first_split + split_of(work, split).block;
    } else {
      number -= cut * (work.splits - 1);
    }
  }
  const bool last = number >= work.bulk_heads * work.row_blocks;
  const int section_heads = last ? work.heads - work.bulk_heads : work.section_heads;
  const int first_head = last ? work.bulk_heads : number / (section_heads * work.row_blocks) * section_heads;
  const int rest = number - first_head * work.row_blocks;
  const int head = first_head + rest % section_heads;
  const int block = rest / section_heads;
  tile.block = first_rows_see_most(band) ? block : work.row_blocks - 1 - block;
  tile.head = head % hq;
  tile.batch = head / hq;
  return tile;
}

// The key tiles of a split of a block with key tiles `all`.
FULGUR_SHARED KeyTiles tiles_of_split(const Work& work, KeyTiles all, int split) {
  const int count = all.end - all.begin;
  const int index = split_of(work, split).index;
  return {all.begin + count * index / work.splits, all.begin + count * (index + 1) / work.splits};
}

FULGUR_SHARED int blocks_of(const Work& work) { return work.row_blocks * work.heads; }
FULGUR_SHARED int split_blocks(const Work& work) { return work.end_split - work.first_split; }

// Counters of the scheduler: q tiles taken, and CTAs that have finished.
enum : int { kSchedulerCounters = 2 };

// Floats of the partial result of a strip: each of 128 threads has its fragment of O, two shifts and two sums.
FULGUR_SHARED int partial_floats(int value_dim) { return 128 * (value_dim / 2 + 4); }

}  // namespace fulgur::kernels
