// The mask hook: which keys a row sees, which rows see a key, and which tiles are empty, partial or full. Kernels,
// planners and cost models call these functions and do not know the bounds; attention/mask.cuh hides the scores of a
// partial tile. All functions rely on the fact that both ends of the keys that a row sees grow with the row.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

// A sequence: its first rows of q and k among all packed rows (0 unless packed), and the numbers of its rows.
struct Lengths {
  int q_start, k_start, sq, sk;
};

// A row on the diagonal of key j sees keys j - left to j + right; without has_left or has_right that bound hides
// nothing. With chunk > 0 it sees only those keys that are in the chunk of j, which begins at a multiple of `chunk`.
// Then both bounds exist, and are less than a chunk.
struct Band {
  bool has_left, has_right;
  int left, right;
  int chunk;
  bool top_left;  // the first row is on the diagonal of the first key; else the last row on that of the last key
  int shift = 0;      // in a part of a longer sequence: the shift of diagonals, in keys
  int first_key = 0;  // and the index of its first key, for chunks
};

// Keys [begin, end); none when begin >= end.
struct KeyRange {
  int begin, end;
};

// Whether the first rows see more keys than the last ones; otherwise it is the other way round.
FULGUR_SHARED bool first_rows_see_most(const Band& band) { return band.has_left && !band.has_right; }

// The key on the diagonal of a row.
FULGUR_SHARED int diagonal_of(const Band& band, const Lengths& n, int row) {
  return (band.top_left ? row : row + n.sk - n.sq) + band.shift;
}

// The first key of the chunk of a key, which may be negative.
FULGUR_SHARED int chunk_begin(const Band& band, int key) {
  const int of_all = key + band.first_key;
  return (of_all < 0 ? of_all - band.chunk + 1 : of_all) / band.chunk * band.chunk - band.first_key;
}

// The keys of `sk` that a row on the diagonal of key `diagonal` sees.
FULGUR_SHARED KeyRange keys_seen_from(const Band& band, int sk, int diagonal) {
  KeyRange keys = {band.has_left ? max_of(0, diagonal - band.left) : 0,
                   band.has_right ? min_of(sk, diagonal + band.right + 1) : sk};
  if (band.chunk > 0) {
    const int begin = chunk_begin(band, diagonal);
    keys = {max_of(keys.begin, begin), min_of(keys.end, begin + band.chunk)};
  }
  return keys;
}

FULGUR_SHARED KeyRange visible_keys(const Band& band, const Lengths& n, int row) {
  return keys_seen_from(band, n.sk, diagonal_of(band, n, row));
}

// The range of keys that some row of [first, last] sees.
FULGUR_SHARED KeyRange keys_seen_by_any(const Band& band, const Lengths& n, int first, int last) {
  return {visible_keys(band, n, first).begin, visible_keys(band, n, last).end};
}

// The keys that each row of [first, last] sees. The end may be before the first key.
FULGUR_SHARED KeyRange keys_seen_by_all(const Band& band, const Lengths& n, int first, int last) {
  return {visible_keys(band, n, last).begin, visible_keys(band, n, first).end};
}

// Whether some row does not see some key of a tile [begin, end). `all`: the keys that all rows see.
FULGUR_SHARED bool is_partial(const KeyRange& all, int begin, int end) { return begin < all.begin || end > all.end; }

// Rows [begin, end).
struct RowRange {
  int begin, end;
};

// The rows that see a key, not limited to existing rows. `begin` follows from the right bound, and `end` from the left
// one; without that bound the value is meaningless.
FULGUR_SHARED RowRange rows_seeing(const Band& band, const Lengths& n, int key) {
  const int offset = diagonal_of(band, n, 0);
  RowRange rows = {key - offset - band.right, key - offset + band.left + 1};
  if (band.chunk > 0) {
    const int begin = chunk_begin(band, key) - offset;
    rows = {max_of(rows.begin, begin), min_of(rows.end, begin + band.chunk)};
  }
  return rows;
}

// Tiles [begin, end) of `tile_keys` keys each.
struct KeyTiles {
  int begin, end;
};

// The key tiles that are not empty for rows [first, last].
FULGUR_SHARED KeyTiles key_tiles(const Band& band, const Lengths& n, int tile_keys, int first, int last) {
  const KeyRange keys = keys_seen_by_any(band, n, first, last);
  if (first >= n.sq || keys.end <= keys.begin) return {0, 0};
  return {keys.begin / tile_keys, (keys.end + tile_keys - 1) / tile_keys};
}

// The key tiles that are full for rows [first, last]; none if begin >= end.
FULGUR_SHARED KeyTiles full_key_tiles(const Band& band, const Lengths& n, int tile_keys, int first, int last) {
  const KeyRange keys = keys_seen_by_all(band, n, first, last);
  return {(keys.begin + tile_keys - 1) / tile_keys, max_of(keys.end, 0) / tile_keys};
}

// Tiles [begin, end) of `tile_rows` rows each.
struct RowTiles {
  int begin, end;
};

// The row tiles that are not empty for keys [first, first + count).
FULGUR_SHARED RowTiles row_tiles(const Band& band, const Lengths& n, int tile_rows, int first, int count) {
  const int all = (n.sq + tile_rows - 1) / tile_rows;
  const int last = min_of(first + count, n.sk);  // the end of the keys
  if (first >= n.sk) return {0, 0};
  RowTiles tiles = {0, all};
  if (band.has_right) {
    const int row = rows_seeing(band, n, first).begin;  // the first row that sees a key
    if (row >= n.sq) return {0, 0};
    tiles.begin = max_of(row, 0) / tile_rows;
  }
  if (band.has_left) {
    const int end = rows_seeing(band, n, last - 1).end;  // after the last row that sees a key
    tiles.end = end <= 0 ? 0 : min_of(all, (end + tile_rows - 1) / tile_rows);
  }
  return tiles.end > tiles.begin ? tiles : RowTiles{0, 0};
}

}  // namespace fulgur::kernels
