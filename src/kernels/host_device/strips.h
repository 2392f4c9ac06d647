// Rows: a sequence is cut into strips of 64 rows, and a block is as many consecutive strips of it as a CTA has
// consumer warpgroups. The heads of a group, which share K and V, may share blocks as well: then strips are numbered
// with these heads innermost, so that the strips of a block are of the same rows or of neighbouring ones.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

enum : int { kStripRows = 64 };

FULGUR_SHARED int strips_of(int rows) { return (rows + kStripRows - 1) / kStripRows; }

// Where a strip begins, and its head.
struct Strip {
  int row, head;
};

// Blocks of up to `block_strips` strips, of `heads` that share them.
FULGUR_SHARED int blocks_of(int rows, int block_strips, int heads = 1) {
  return (strips_of(rows) * heads + block_strips - 1) / block_strips;
}

// Where strips do not fill blocks, blocks at the beginning have one less: under a band they see the fewest keys. Of one
// or two short blocks the last strips may be empty.
FULGUR_SHARED int first_strip(int rows, int block_strips, int block, int heads = 1) {
  const int missing = (block_strips - strips_of(rows) * heads % block_strips) % block_strips;
  return block_strips * block - min_of(block, missing);
}

}  // namespace fulgur::kernels
