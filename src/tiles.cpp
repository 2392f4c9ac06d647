#include "tiles.h"

#include <algorithm>

namespace fulgur {

KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i) {
  const int64_t diagonal = i + s.sk - s.sq;
  // A window wider than the sequence is unbounded; the comparison also keeps the sums in range.
  const bool left = mask.left >= 0 && mask.left < s.sq + s.sk;
  const bool right = mask.right >= 0 && mask.right < s.sq + s.sk;
  const int64_t begin = left ? std::clamp<int64_t>(diagonal - mask.left, 0, s.sk) : 0;
  const int64_t end = right ? std::clamp<int64_t>(diagonal + mask.right + 1, 0, s.sk) : s.sk;
  return {begin, std::max(begin, end)};
}

KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i_begin, int64_t i_end) {
  if (i_begin >= i_end) return {};
  return {visible_keys(mask, s, i_begin).begin, visible_keys(mask, s, i_end - 1).end};
}

Tile classify(const Mask& mask, const Sequence& s, int64_t i_begin, int64_t i_end, int64_t j_begin,
              int64_t j_end) {
  const KeyRange first = visible_keys(mask, s, i_begin), last = visible_keys(mask, s, i_end - 1);
  if (j_begin >= last.end || j_end <= first.begin) return Tile::kEmpty;
  if (j_begin >= last.begin && j_end <= first.end) return Tile::kFull;
  return Tile::kPartial;
}

TileMap tile_map(const Mask& mask, const Sequence& s, int64_t Br, int64_t Bc) {
  TileMap map{Br, Bc, (s.sq + Br - 1) / Br, (s.sk + Bc - 1) / Bc, {}};
  map.tiles.reserve(map.rows * map.cols);
  for (int64_t r = 0; r < map.rows; ++r) {
    for (int64_t c = 0; c < map.cols; ++c) {
      map.tiles.push_back(classify(mask, s, r * Br, std::min(s.sq, (r + 1) * Br), c * Bc,
                                   std::min(s.sk, (c + 1) * Bc)));
    }
  }
  return map;
}

double visible_scores(const Mask& mask, const Sequence& s) {
  double n = 0;
  for (int64_t i = 0; i < s.sq; ++i) {
    const KeyRange keys = visible_keys(mask, s, i);
    n += static_cast<double>(keys.end - keys.begin);
  }
  return n;
}

}  // namespace fulgur
