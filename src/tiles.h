#pragma once

#include <cstdint>

#include "fulgur/attention.h"
#include "sequences.h"

namespace fulgur {

/// A half-open range of keys.
struct KeyRange {
  int64_t begin = 0, end = 0;
  bool empty() const { return begin >= end; }
};

/// The keys that query i of a sequence sees: the band's intersection with [0, sk).
KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i);

/// The keys that any query of [i_begin, i_end) sees: both ends of visible_keys grow with i.
KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i_begin, int64_t i_end);

/// Whether the scores of queries [i_begin, i_end) and keys [j_begin, j_end) are all masked, all
/// visible, or mixed.
Tile classify(const Mask& mask, const Sequence& s, int64_t i_begin, int64_t i_end, int64_t j_begin,
              int64_t j_end);

/// The tiles of one sequence.
TileMap tile_map(const Mask& mask, const Sequence& s, int64_t Br, int64_t Bc);

/// Visible scores of one head of a sequence.
double visible_scores(const Mask& mask, const Sequence& s);

}  // namespace fulgur
