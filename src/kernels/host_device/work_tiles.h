// The work of a launch: q tiles that CTAs take from a counter, one after another. A q tile is a block of rows of one
// head with all of its key tiles, or one split of it: a run of its key tiles.
//
// Blocks are numbered by sections of consecutive heads (batch * hq + head); inside a section row blocks are outermost
// and heads innermost. A section is as many heads as share K and V, so that these come to L2 once, little by little,
// with the loads of the sections before. All heads from bulk_heads on are the last section, which is long enough to
// leave the SMs with short blocks at the end.
//
// Some blocks may be cut into splits: under a full mask the last ones, too few to fill the SMs; under a
// band, where all are too few, the first and longest. Each split leaves its O and its row statistics in global memory,
// and the one that finishes last combines them in order.
#pragma once
#include "host_device/mask.h"

namespace fulgur::kernels {

struct Work {
  int row_blocks;     // of the longest sequence
  int heads;          // batch * hq, or of groups whose heads share blocks (host_device/strips.h)
  int section_heads;  // heads a section
  int bulk_heads;     // heads in such sections
  int q_tiles;        // blocks that are not cut, and splits of those that are
  int first_split;    // blocks from here on
  int end_split;      // to here are cut
  int splits;         // into so many

  friend FULGUR_SHARED bool operator==(const Work&, const Work&) = default;
};

struct QTile {
  int block;  // of its sequence; < 0: no more work
  int head, batch;
  int split;  // its number among the splits of all blocks that are cut; < 0: a whole block
};

// Which of the blocks that are cut a split belongs to, and which of that block's splits it is.
struct Split {
  int block, index;
};

FULGUR_SHARED Split split_of(const Work& work, int split) {
  const int block = int(u32(split) / u32(work.splits));
  return {block, split - block * work.splits};
}

// `hq`: heads of a sequence, counted as in `work`. `splits`: some blocks are cut. Those row blocks of a section come
// first that see the most keys: the last ones, unless only a left bound hides some.
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

// The key tiles of a split of a block that has `all`.
FULGUR_SHARED KeyTiles tiles_of_split(const Work& work, KeyTiles all, int split) {
  const int count = all.end - all.begin;
  const int index = split_of(work, split).index;
  return {all.begin + count * index / work.splits, all.begin + count * (index + 1) / work.splits};
}

FULGUR_SHARED int blocks_of(const Work& work) { return work.row_blocks * work.heads; }
FULGUR_SHARED int split_blocks(const Work& work) { return work.end_split - work.first_split; }

// Of the scheduler: q tiles given out, and CTAs that have finished.
enum : int { kSchedulerCounters = 2 };

// What a split leaves of a strip: of each of the warpgroup's 128 threads its fragment of O, two shifts and two sums.
FULGUR_SHARED int partial_floats(int value_dim) { return 128 * (value_dim / 2 + 4); }

}  // namespace fulgur::kernels
