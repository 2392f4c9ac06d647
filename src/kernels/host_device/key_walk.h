// Which key tiles a q tile has, and what a consumer warpgroup must know of its strip of it.
#pragma once
#include "host_device/strips.h"
#include "host_device/work_tiles.h"

namespace fulgur::kernels {

// The key tiles of a q tile, whose block has these strips of `heads` heads.
FULGUR_SHARED KeyTiles key_tiles_of(const Work& work, const Band& band, const Lengths& n, const BlockStrips& strips,
                                      int tile_keys, bool splits, const QTile& q_tile, int heads = 1) {
  const int begin = kStripRows * (strips.first / heads);
  const int end = min_of(kStripRows * ((strips.end + heads - 1) / heads), n.sq);
  const KeyTiles all = key_tiles(band, n, tile_keys, begin, end - 1);
  return splits && q_tile.split >= 0 ? tiles_of_split(work, all, q_tile.split) : all;
}

// `block_strips`, `heads`: as in first_strip.
FULGUR_SHARED KeyTiles key_tiles_of(const Work& work, const Band& band, const Lengths& n, int block_strips,
                                      int tile_keys, bool splits, const QTile& q_tile, int heads = 1) {
  return key_tiles_of(work, band, n, strips_of_block(n.sq, block_strips, q_tile.block, heads), tile_keys, splits,
                      q_tile, heads);
}

// What masks keys of a tile for a strip: the bounds of the call; mask_mod, or a bool mask whose words come with K. Of
// an unseen tile the strip sees nothing.
enum MaskedBy : int { kMaskedByBounds = 1, kMaskedByMask = 2, kUnseen = 4 };

// A tile and its MaskedBy in one word, kMapsTiles; -1, which is unseen: there is no tile.
FULGUR_SHARED int pack_tile(int tile, int masked_by) { return 8 * tile + masked_by; }
FULGUR_SHARED int packed_tile(int packed) { return packed >> 3; }
FULGUR_SHARED int packed_masked_by(int packed) { return packed & 7; }

// What the producer publishes of the next key tile of a strip, kMapsTiles.
struct NextTile {
  int packed;
  int alike;  // the tiles from it down to this one come one after the other, and the same masks them
};
constexpr NextTile kNoTile = {-1, 0};

// What it publishes with K of a key tile: the next tile of each strip.
struct alignas(16) TileInfo {
  NextTile next[4];
};

// The walk of a strip over the key tiles of its q tile from right to left: the tile it is at, and what the strip sees
// of it. The producer, the consumers and the repair of rows walk alike. Under a band this is a closed form: the tiles
// that a strip sees lie together, and so do those that all of its rows see.
struct KeyWalk {
  int tile;                    // the walk is here
  int last;                    // the walk ends after this tile
  int skip_front, skip_back;   // tiles of the q tile before and after those of the walk: the strip sees nothing of them
  int full_begin, full_end;    // tiles in [full_begin, full_end) are visible to all rows
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

  // Whether two tiles are left that all rows see.
  FULGUR_SHARED bool two_are_whole(const Band& band) const {
    return tile > last + 1 && (!band.has_right || tile <= full_end) && (!band.has_left || tile > full_begin + 1);
  }

  // Where a map says which tiles are visible (kMapsTiles), full_end has the MaskedBy of this tile, and full_begin is
  // NextTile::alike.
  FULGUR_SHARED int masked_by() const { return full_end; }
  // Whether the strip sees something of it; false at the end of the walk.
  FULGUR_SHARED bool sees_tile() const { return (masked_by() & kUnseen) == 0; }
  // Moves the walk. Returns whether the tile comes now and is masked as the one before.
  FULGUR_SHARED bool next_alike() { return --tile >= full_begin; }
  // The next call of next() leads to this tile.
  FULGUR_SHARED void set_next(const NextTile& to) {
    tile = packed_tile(to.packed) + 1;
    full_end = packed_masked_by(to.packed);
    full_begin = to.alike;
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

// Where a map says which key tiles are visible (host_device/tile_map.h), only the producer walks over it, and publishes
// the tiles of each strip. `first`: the first one, packed.
FULGUR_SHARED View view_of_published_tiles(const Band& band, const Lengths& n, const QTile& q_tile, int first,
                                           const Strip& strip) {
  return {{packed_tile(first), 0, 0, 0, 0, packed_masked_by(first), n.sk, diagonal_of(band, n, strip.row)},
          {strip.row, strip.head, q_tile.batch, q_tile.split}};
}

FULGUR_SHARED View view_of_the_end() { return {{0, 0, -1, 0, 0, 0, 0, 0}, {0, 0, 0, 0}}; }

}  // namespace fulgur::kernels
