// Which key tiles a q tile has, and what a consumer warpgroup must know of its strip of it.
#pragma once
#include "host_device/strips.h"
#include "host_device/work_tiles.h"

namespace fulgur::kernels {

// The key tiles of a q tile. `block_strips`, `heads`: as in first_strip.
FULGUR_SHARED KeyTiles key_tiles_of(const Work& work, const Band& band, const Lengths& n, int block_strips,
                                      int tile_keys, bool splits, const QTile& q_tile, int heads = 1) {
  const int first = first_strip(n.sq, block_strips, q_tile.block, heads);
  const int next = first_strip(n.sq, block_strips, q_tile.block + 1, heads);
  const int begin = kStripRows * (first / heads);
  const int end = min_of(kStripRows * ((next + heads - 1) / heads), n.sq);
  const KeyTiles all = key_tiles(band, n, tile_keys, begin, end - 1);
  return splits && q_tile.split >= 0 ? tiles_of_split(work, all, q_tile.split) : all;
}

// The key tiles of a q tile from right to left, as one of its strips meets them: the next tile, and its state for the
// strip. The producer, the consumers and the repair of rows walk alike. Under a band this is a closed form: the tiles
// that a strip sees lie together, and so do those that all of its rows see.
struct KeyWalk {
  int tile;                    // the walk is here
  int last;                    // and ends after this one
  int skip_front, skip_back;   // tiles of the q tile before and after those, of which the strip sees nothing
  int full_begin, full_end;    // tiles in [full_begin, full_end) are visible to all rows; with a map what consumers
                               // hear of a tile, ToldTile::hides
  int sk;
  int diagonal;  // of the first row

  FULGUR_SHARED bool no_more_work() const { return skip_front < 0; }
  FULGUR_SHARED bool more() const { return tile >= last; }
  FULGUR_SHARED bool next() { return --tile >= last; }
  // Whether some rows do not see all of this tile. `rightmost`: it is the strip's first, where the keys may end.
  FULGUR_SHARED bool masked(const Band& band, bool rightmost) const {
    bool some = rightmost || band.has_right ? tile >= full_end : false;
    if (band.has_left) some = some || tile < full_begin;
    return some;
  }
};

// The walk over all key tiles of a q tile.
FULGUR_SHARED KeyWalk walk_of_tiles(const KeyTiles& all) { return {all.end - 1, all.begin, 0, 0, 0, 0, 0, 0}; }

// The walk of the strip that begins at `row`; empty where there are no such rows.
FULGUR_SHARED KeyWalk walk_of_strip(const Band& band, const Lengths& n, int tile_keys, const KeyTiles& all, int row) {
  KeyTiles mine = key_tiles(band, n, tile_keys, row, min_of(row + kStripRows, n.sq) - 1);
  mine.end = min_of(mine.end, all.end);
  mine.begin = max_of(mine.begin, all.begin);
  if (mine.end <= mine.begin) mine.begin = mine.end = all.begin;
  const KeyTiles full = full_key_tiles(band, n, tile_keys, row, row + kStripRows - 1);
  return {mine.end - 1, mine.begin, all.end - mine.end, mine.begin - all.begin, full.begin, full.end, n.sk,
          diagonal_of(band, n, row)};
}

// The bounds of the call; mask_mod, or a mask whose words come with K.
enum TileHides : int { kBoundsHide = 1, kMaskHides = 2 };

// What the producer tells of a tile ahead, kMaskBits, and what hides some of it; -1: there is none.
FULGUR_SHARED int told_of(int tile, int hides) { return 4 * tile + hides; }
FULGUR_SHARED int told_tile(int told) { return told >> 2; }
FULGUR_SHARED int told_hides(int told) { return told & 3; }

// Where a map says which key tiles are seen (host_device/tile_map.h), only the producer walks over it, and all strips
// of the q tile take the tiles that it tells of, each with its K. `first`: what is told of the first one.
FULGUR_SHARED KeyWalk walk_as_told(const Band& band, const Lengths& n, int first, int row) {
  return {told_tile(first), 0, 0, 0, 0, told_hides(first), n.sk, diagonal_of(band, n, row)};
}

struct alignas(16) ToldTile {
  int tile;
  int last;   // the walk ends after this one
  int hides;  // bits of TileHides: what hides some of it from some row
  int ahead;  // kMaskBits, alone: told_of() the tile after it
};

// Where a strip lies.
struct Place {
  int row;  // its first, in its sequence
  int head, batch;
  int split;  // as in QTile
};

// What a consumer warpgroup must know of its strip of a q tile. The producer computes it, and the consumers keep little
// of it in registers: the main loop has none to spare. One lane writes it and one lane of each warp reads it, those
// that arrive at the barriers of Q.
struct View {
  KeyWalk walk;
  Place place;
};

FULGUR_SHARED View view_of(const Band& band, const Lengths& n, int tile_keys, const QTile& q_tile,
                           const KeyTiles& all_tiles, const Strip& strip) {
  return {walk_of_strip(band, n, tile_keys, all_tiles, strip.row),
          {strip.row, strip.head, q_tile.batch, q_tile.split}};
}

FULGUR_SHARED View view_of_the_end() { return {{0, 0, -1, 0, 0, 0, 0, 0}, {0, 0, 0, 0}}; }

}  // namespace fulgur::kernels
