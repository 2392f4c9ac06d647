// Keys: which ones a row may see, and the tiles of keys that they lie in.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

// A sequence: its first row of q and of k among all packed rows (0 unless packed), and how many it has.
struct Lengths {
  int q_start, k_start, sq, sk;
};

// A row on the diagonal of key j sees keys j - left to j + right; a bound that is not had hides nothing. With chunk > 0
// it sees of these the keys of the chunk of j, which begins at a multiple of `chunk`. Both bounds are had, then, and
// less than a chunk, as if that were a window that ends where chunks do.
struct Band {
  bool has_left, has_right;
  int left, right;
  int chunk;
};

// Keys [begin, end); none when begin >= end.
struct KeyRange {
  int begin, end;
};

// The key on the diagonal of a row: the last row stands at the last key.
FULGUR_SHARED int diagonal_of(const Lengths& n, int row) { return row + n.sk - n.sq; }

// Where the chunk of a key begins, which may be one in front of the first.
FULGUR_SHARED int chunk_begin(const Band& band, int key) {
  return (key < 0 ? key - band.chunk + 1 : key) / band.chunk * band.chunk;
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
  return keys_seen_from(band, n.sk, diagonal_of(n, row));
}

// Rows [begin, end).
struct RowRange {
  int begin, end;
};

// The rows that see a key, wherever rows begin and end. The right bound bounds `begin`, the left one `end`: without it
// that says nothing.
FULGUR_SHARED RowRange rows_seeing(const Band& band, const Lengths& n, int key) {
  const int offset = n.sk - n.sq;
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

// Those that rows [first, last] may see.
FULGUR_SHARED KeyTiles key_tiles(const Band& band, const Lengths& n, int tile_keys, int first, int last) {
  const int begin = visible_keys(band, n, first).begin;
  const int end = visible_keys(band, n, last).end;
  if (first >= n.sq || end <= begin) return {0, 0};
  return {begin / tile_keys, (end + tile_keys - 1) / tile_keys};
}

}  // namespace fulgur::kernels
