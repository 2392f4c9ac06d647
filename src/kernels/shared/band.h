// Keys: which ones a row may see, and the tiles of keys that they lie in.
#pragma once
#include "shared/host_device.h"

namespace fulgur::kernels {

// A sequence: its first row of q and of k among all packed rows (0 unless packed), and how many it has.
struct Lengths {
  int q_start, k_start, sq, sk;
};

// A row on the diagonal of key j sees keys j - left to j + right; a bound that is not had hides nothing.
struct Band {
  bool has_left, has_right;
  int left, right;
};

// Keys [begin, end); none when begin >= end.
struct KeyRange {
  int begin, end;
};

// The key on the diagonal of a row: the last row stands at the last key.
FULGUR_SHARED int diagonal_of(const Lengths& n, int row) { return row + n.sk - n.sq; }

FULGUR_SHARED KeyRange visible_keys(const Band& band, const Lengths& n, int row) {
  const int diagonal = diagonal_of(n, row);
  return {band.has_left ? most(0, diagonal - band.left) : 0,
          band.has_right ? least(n.sk, diagonal + band.right + 1) : n.sk};
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
