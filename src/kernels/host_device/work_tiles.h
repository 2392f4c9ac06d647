// Work: the items that CTAs take from a counter, one after another. An item is a block of rows of one head, or
// a part of one: a run of its key tiles.
//
// Blocks are numbered by sections of consecutive heads (batch * hq + head); inside a section row blocks are outermost
// and heads innermost. A section is as many heads as share K and V, so that these come to L2 once, little by little,
// with the loads of the sections before. All heads from bulk_heads on are the last section, which is long enough to
// leave the SMs with short blocks at the end.
//
// Some blocks may be cut into parts: under a full mask the last ones, too few to fill the SMs; under a
// band, where all are too few, the first and longest. Each part leaves its O and its row statistics in global memory,
// and the one that finishes last combines them in order.
#pragma once
#include "host_device/mask.h"

namespace fulgur::kernels {

struct Work {
  int row_blocks;     // of the longest sequence
  int heads;          // batch * hq
  int section_heads;  // heads a section
  int bulk_heads;     // heads in such sections
  int items;          // blocks that are not cut, and parts of those that are
  int first_split;    // blocks from here on
  int end_split;      // to here are cut
  int split_parts;    // into so many parts

  friend FULGUR_SHARED bool operator==(const Work&, const Work&) = default;
};

struct Item {
  int block;  // of its sequence; < 0: no more work
  int head, batch;
  int part;  // its number among the parts of all blocks that are cut; < 0: a whole block
};

// Which of the blocks that are cut a part belongs to, and which of that block's parts it is.
struct Part {
  int block, index;
};

FULGUR_SHARED Part part_of(const Work& work, int part) {
  const int block = int(u32(part) / u32(work.split_parts));
  return {block, part - block * work.split_parts};
}

// `splits`: some blocks are cut. Those row blocks of a section come first that see the most keys: the last ones, unless
// only a left bound hides some.
FULGUR_SHARED Item item_of(const Work& work, int hq, bool splits, const Band& band, int number) {
  if (number >= work.items) return {-1, 0, 0, -1};
  Item item = {0, 0, 0, -1};
  if (splits && number >= work.first_split) {
    const int cut = work.end_split - work.first_split;
    const int part = number - work.first_split;
    if (part < cut * work.split_parts) {
      item.part = part;
      number = work.first_split + part_of(work, part).block;
    } else {
      number -= cut * (work.split_parts - 1);
    }
  }
  const bool last = number >= work.bulk_heads * work.row_blocks;
  const int section_heads = last ? work.heads - work.bulk_heads : work.section_heads;
  const int first_head = last ? work.bulk_heads : number / (section_heads * work.row_blocks) * section_heads;
  const int rest = number - first_head * work.row_blocks;
  const int head = first_head + rest % section_heads;
  const int block = rest / section_heads;
  item.block = first_rows_see_most(band) ? block : work.row_blocks - 1 - block;
  item.head = head % hq;
  item.batch = head / hq;
  return item;
}

// The key tiles of a part of a block that has `all`.
FULGUR_SHARED KeyTiles tiles_of_part(const Work& work, KeyTiles all, int part) {
  const int count = all.end - all.begin;
  const int index = part_of(work, part).index;
  return {all.begin + count * index / work.split_parts, all.begin + count * (index + 1) / work.split_parts};
}

FULGUR_SHARED int blocks_of(const Work& work) { return work.row_blocks * work.heads; }
FULGUR_SHARED int split_blocks(const Work& work) { return work.end_split - work.first_split; }

// Of the scheduler: items given out, and CTAs that have finished.
enum : int { kSchedulerCounters = 2 };

// What a part leaves of a strip: of each of the warpgroup's 128 threads its share of O, two shifts and two sums.
FULGUR_SHARED int partial_floats(int value_dim) { return 128 * (value_dim / 2 + 4); }

}  // namespace fulgur::kernels
