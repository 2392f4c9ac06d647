#pragma once

#include <algorithm>
#include <cstdint>

#include "call/lengths.h"
#include "fulgur/attention.h"

namespace fulgur {

/// A half-open range of keys.
struct KeyRange {
  int64_t begin = 0, end = 0;
  bool empty() const { return begin >= end; }
};

/// A window without chunks that contains the mask: keys of a chunk are less than its length apart.
Mask window_around(const Mask& mask);

/// The key on the diagonal of query i of a sequence, which may lie outside of its keys.
int64_t diagonal_of(const Mask& mask, const Sequence& s, int64_t i);

/// The keys that query i of a sequence sees: those of its band and chunk in [0, sk).
KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i);

/// The keys that any query of [i_begin, i_end) sees: both ends of visible_keys grow with i.
KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i_begin, int64_t i_end);

/// A tile of keys that a block of rows visits.
struct KeyTile {
  int64_t j = 0, n = 0;  ///< keys [j, j + n)
  bool partial = false;  ///< some row does not see some of the keys: the tile needs the mask
};

/// A walk over the key tiles that a block of rows visits. Tiles begin at multiples of Bc, so that
/// the sums of a row do not depend on the block that it is in.
class KeyTiles {
 public:
  static constexpr int64_t kEnd = INT64_MAX;  ///< tile().j after the last tile

  KeyTiles() = default;
  /// The tiles of `keys`, which begin at a multiple of Bc. `any` are the keys that some row sees,
  /// `all` those that every row sees.
  KeyTiles(KeyRange keys, KeyRange any, KeyRange all, int64_t Bc)
      : keys_end_(keys.end),
        end_(any.empty() ? 0 : std::min(keys.end, any.end)),
        all_(all),
        Bc_(Bc) {
    go_to(std::max(keys.begin, any.begin / Bc * Bc));
  }
  bool done() const { return tile_.j == kEnd; }
  const KeyTile& tile() const { return tile_; }
  void next() { go_to(tile_.j + Bc_); }

 private:
  void go_to(int64_t j) {
    const int64_t n = std::min(Bc_, keys_end_ - j);
    tile_ = {j < end_ ? j : kEnd, n, j < all_.begin || j + n > all_.end};
  }

  int64_t keys_end_ = 0, end_ = 0;
  KeyRange all_;
  int64_t Bc_ = 0;
  KeyTile tile_{kEnd, 0, false};
};

/// The map of the tiles of one sequence: which are empty, partial or full.
TileMap tile_map(const Mask& mask, const Sequence& s, int64_t Br, int64_t Bc);

/// Visible scores of one head of a sequence.
double visible_scores(const Mask& mask, const Sequence& s);

}  // namespace fulgur
