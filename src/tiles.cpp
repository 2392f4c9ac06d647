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

TileMap tile_map(const Mask& mask, const Sequence& s, int64_t Br, int64_t Bc) {
  TileMap map{Br, Bc, (s.sq + Br - 1) / Br, (s.sk + Bc - 1) / Bc, {}};
  map.tiles.resize(map.rows * map.cols, Tile::kEmpty);
  for (int64_t r = 0; r < map.rows; ++r) {
    // Both ends of what a row sees grow with the row.
    const KeyRange first = visible_keys(mask, s, r * Br);
    const KeyRange last = visible_keys(mask, s, std::min(s.sq, (r + 1) * Br) - 1);
    KeyTiles tiles({0, s.sk}, {first.begin, last.end}, {last.begin, first.end}, Bc);
    for (; !tiles.done(); tiles.next()) {
      const auto [j, n, partial] = tiles.tile();
      map.tiles[r * map.cols + j / Bc] = partial ? Tile::kPartial : Tile::kFull;
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
