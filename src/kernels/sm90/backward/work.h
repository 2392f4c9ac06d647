// Work of the backward pass. The scores of a head are cut into tiles of `rows` x `keys`. One kernel takes blocks of
// keys and walks down their row tiles; it leaves dS in the workspace, from which another, that takes blocks of rows,
// computes dQ = dS K. dS of all heads at once would be too much: a wave is what the workspace holds.
#pragma once
#include "host_device/band.h"

namespace fulgur::kernels {

// dS lies in pieces of 64 queries x 64 keys: a row of 128 bytes is a key, and its queries are swizzled as TMA does it.
enum : int { kPieceRows = 64, kPieceKeys = 64, kPieceBytes = 2 * kPieceRows * kPieceKeys };
// LSE and D of a sequence begin at multiples of so many rows.
enum : int { kStatisticsRows = 128 };

struct ScoreTile {
  int rows, keys;  // multiples of 64; keys are once or twice the rows
};

// x / y where y is 1 in most calls: a division by what the compiler does not know takes a hundred cycles, which nothing
// hides before a block's first load.
FULGUR_SHARED int quotient(int x, int y) { return y == 1 ? x : x / y; }

FULGUR_SHARED int count_of(int all, int each) { return (all + each - 1) / each; }

// Row tiles [begin, end) of which some row sees one of the keys [first, first + count).
struct RowTiles {
  int begin, end;
};

FULGUR_SHARED RowTiles row_tiles(const Band& band, const Lengths& n, int tile_rows, int first, int count) {
  const int all = count_of(n.sq, tile_rows);
  const int last = min_of(first + count, n.sk);  // after the keys
  if (first >= n.sk) return {0, 0};
  RowTiles tiles = {0, all};
  if (band.has_right) {
    const int row = rows_seeing(band, n, first).begin;  // the first that sees a key
    if (row >= n.sq) return {0, 0};
    tiles.begin = max_of(row, 0) / tile_rows;
  }
  if (band.has_left) {
    const int end = rows_seeing(band, n, last - 1).end;  // after the last row that sees a key
    tiles.end = end <= 0 ? 0 : min_of(all, count_of(end, tile_rows));
  }
  return tiles.end > tiles.begin ? tiles : RowTiles{0, 0};
}

// Whether every row of the tile that begins at `row` sees all keys [first, first + count).
FULGUR_SHARED bool all_visible(const Band& band, const Lengths& n, int tile_rows, int row, int first, int count) {
  const int last = min_of(row + tile_rows, n.sq) - 1;
  const KeyRange seen_first = visible_keys(band, n, row);
  const KeyRange seen_last = visible_keys(band, n, last);
  return first >= seen_last.begin && first + count <= seen_first.end;
}

// What is computed between two times that dQ is: heads, sequences, and row tiles of each. A head here is one of k and v
// with all of its q heads, or with a part of them.
struct Wave {
  int first_head, heads;
  int first_batch, batches;
  int first_tile, tiles;

  friend FULGUR_SHARED bool operator==(const Wave&, const Wave&) = default;
};

// In which order the blocks of a pair are taken. Alternating: the last first in every second bunch, from bunch 0 on.
enum BlockOrder : int { kFirstBlockFirst, kLastBlockFirst, kAlternating };

// Blocks of pairs of a head and a sequence, which CTAs take by their number. Pairs are taken in bunches, in
// which blocks are outermost.
struct Blocks {
  int blocks;  // of a pair
  int pairs;
  int bunch;    // pairs of one
  int bunches;  // the last one has what is left over
  BlockOrder order;

  friend FULGUR_SHARED bool operator==(const Blocks&, const Blocks&) = default;
};
struct BlockOfPair {
  int block, pair;
};

FULGUR_SHARED bool first_block_first(const Blocks& blocks, int pair) {
  if (blocks.order != kAlternating) return blocks.order == kFirstBlockFirst;
  if (blocks.bunches == 1) return false;
  return min_of(pair / blocks.bunch, blocks.bunches - 1) % 2 == 1;
}

FULGUR_SHARED int bunch_of(const Blocks& blocks, int number) {
  return blocks.bunches == 1 ? 0 : min_of(number / (blocks.blocks * blocks.bunch), blocks.bunches - 1);
}

FULGUR_SHARED BlockOfPair block_of(const Blocks& blocks, int number) {
  const int bunch = bunch_of(blocks, number);
  const int first = bunch * blocks.bunch;
  const int pairs = bunch == blocks.bunches - 1 ? blocks.pairs - first : blocks.bunch;
  const int rest = number - first * blocks.blocks;
  const int block = rest / pairs;
  const int pair = first + rest % pairs;
  return {first_block_first(blocks, pair) ? block : blocks.blocks - 1 - block, pair};
}

// The items that CTAs take of blocks of keys. The last `cut` blocks are two items each, parts of their rows:
// the first parts come before all other blocks, each longer than the one before, and the second parts after them, so
// that CTAs which start by parts of different lengths end at the same time.
FULGUR_SHARED int items_of(const Blocks& blocks, int cut) { return blocks.blocks * blocks.pairs + cut; }

FULGUR_SHARED bool is_first_part(int cut, int item) { return item < cut; }
FULGUR_SHARED bool is_second_part(const Blocks& blocks, int cut, int item) {
  return item >= items_of(blocks, cut) - cut;
}

// The number of an item's block.
FULGUR_SHARED int number_of_item(const Blocks& blocks, int cut, int item) {
  return is_first_part(cut, item) ? items_of(blocks, cut) - 2 * cut + item : item - cut;
}

// Which of all row tiles an item has. First parts are never empty.
FULGUR_SHARED RowTiles tiles_of_item(const Blocks& blocks, int cut, int item, int tiles) {
  const bool first = is_first_part(cut, item);
  if (!first && !is_second_part(blocks, cut, item)) return {0, tiles};
  const int nth = first ? item : item - (items_of(blocks, cut) - cut);
  const int between = count_of(tiles * (nth + 1), cut + 1);
  return first ? RowTiles{0, between} : RowTiles{between, tiles};
}

// Where the tiles of dS lie. A row tile has room for `pitch` of them, or, where pitch is 0, for those that it sees:
// then only the right bound hides some.
struct ScoreTiles {
  int pitch;
  int unit;      // tiles of a q head of a sequence; compact: of a q head
  bool compact;  // packed sequences follow each other, all of a head

  friend FULGUR_SHARED bool operator==(const ScoreTiles&, const ScoreTiles&) = default;
};

// 1 + ... + x, each divided by `each` and rounded up, none more than `limit`.
FULGUR_SHARED long long sum_of_quotients(long long x, int each, int limit) {
  const long long rising = x < 0 ? 0 : x < (long long)(each) * limit ? x : (long long)(each) * limit;
  const long long whole = rising / each;
  return each * whole * (whole + 1) / 2 + rising % each * (whole + 1) + (x > rising ? (x - rising) * limit : 0);
}

// Tiles in front of row tile `tile` of a sequence under a right bound.
FULGUR_SHARED long long tiles_above_diagonal(const Band& band, const Lengths& n, const ScoreTile& each, int tile) {
  const int ahead = n.sk - n.sq + band.right;  // keys that the row in front of the first sees
  const int start = ahead > 0 ? count_of(ahead, each.rows) : -(-ahead / each.rows);
  const int ratio = each.keys / each.rows;
  const int limit = count_of(n.sk, each.keys);
  return sum_of_quotients(start + tile, ratio, limit) - sum_of_quotients(start, ratio, limit);
}

FULGUR_SHARED long long tiles_before(const ScoreTiles& store, const Band& band, const Lengths& n,
                                     const ScoreTile& each, int tile) {
  return store.pitch > 0 ? (long long)(store.pitch) * tile : tiles_above_diagonal(band, n, each, tile);
}

// Key tiles [begin, end) that a row tile sees.
FULGUR_SHARED KeyTiles key_tiles_of(const Band& band, const Lengths& n, const ScoreTile& each, int tile) {
  const int row = tile * each.rows;
  return key_tiles(band, n, each.keys, row, min_of(row + each.rows, n.sq) - 1);
}

// The tile of dS of a row tile and a key tile that it sees; `head` counts q heads of the wave.
FULGUR_SHARED long long score_tile(const ScoreTiles& store, const Wave& wave, const Band& band, const Lengths& n,
                                   const ScoreTile& each, int pair_heads, int batch, int head, int tile, int key_tile) {
  const int heads = wave.heads * pair_heads;
  const long long unit = store.compact ? head : (long long)(batch - wave.first_batch) * heads + head;
  const int sequence = store.compact ? (n.q_start / kStatisticsRows + batch) * (kStatisticsRows / each.rows) : 0;
  const long long before =
      tiles_before(store, band, n, each, tile) - tiles_before(store, band, n, each, wave.first_tile);
  const int slot = key_tile - (store.pitch > 0 ? key_tiles_of(band, n, each, tile).begin : 0);
  return unit * store.unit + (long long)(sequence) * store.pitch + before + slot;
}

// The first row of a sequence among the statistics of a head.
FULGUR_SHARED int statistics_row(const Lengths& n, bool packed, int batch, int longest) {
  return packed ? (n.q_start / kStatisticsRows + batch) * kStatisticsRows
                : batch * count_of(longest, kStatisticsRows) * kStatisticsRows;
}

}  // namespace fulgur::kernels
