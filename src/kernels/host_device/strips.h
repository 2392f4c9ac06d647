// Strips and blocks of rows: a sequence is cut into strips of 64 rows, and a block has as many consecutive strips as a
// CTA has consumer warpgroups. The heads of a group, which share K and V, may also share blocks: then strips are
// numbered with these heads innermost, so that a block has strips of the same rows or of adjacent ones.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

enum : int { kStripRows = 64 };

FULGUR_SHARED int strips_of(int rows) { return (rows + kStripRows - 1) / kStripRows; }

// The first row of a strip, and its head.
struct Strip {
  int row, head;
};

// The number of blocks of up to `block_strips` strips, for `heads` that share blocks.
FULGUR_SHARED int blocks_of(int rows, int block_strips, int heads = 1) {
  return (strips_of(rows) * heads + block_strips - 1) / block_strips;
}

// The first strip of a block. If strips do not fill all blocks, the first blocks have one strip less, because they see
// the fewest keys under a band. If there are only one or two short blocks, their last strips may be empty.
FULGUR_SHARED int first_strip(int rows, int block_strips, int block, int heads = 1) {
  const int missing = (block_strips - strips_of(rows) * heads % block_strips) % block_strips;
  return block_strips * block - min_of(block, missing);
}

// The strips of a block.
struct BlockStrips {
  int first, end;
};

FULGUR_SHARED BlockStrips strips_of_block(int rows, int block_strips, int block, int heads = 1) {
  return {first_strip(rows, block_strips, block, heads), first_strip(rows, block_strips, block + 1, heads)};
}

// The same of one of `blocks` blocks. They may be more than blocks_of(): then more of them have one strip less.
FULGUR_SHARED BlockStrips strips_of_block_of(int blocks, int rows, int block_strips, int block) {
  const int missing = block_strips * blocks - strips_of(rows);
  return {block_strips * block - min_of(block, missing), block_strips * (block + 1) - min_of(block + 1, missing)};
}

// The same, but if they are more than blocks_of(), those with one strip less lie among the others at even distances.
FULGUR_SHARED BlockStrips strips_of_even_block(int blocks, int rows, int block_strips, int block) {
  if (blocks == blocks_of(rows, block_strips)) return strips_of_block(rows, block_strips, block);
  const int missing = block_strips * blocks - strips_of(rows);
  return {block_strips * block - missing * block / blocks,
          block_strips * (block + 1) - missing * (block + 1) / blocks};
}

}  // namespace fulgur::kernels
