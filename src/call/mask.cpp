#include "call/mask.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "fulgur/error.h"

namespace fulgur {
namespace {

constexpr int64_t kMaxTiles = int64_t{1} << 31;  // of a map, a byte each

}  // namespace

Mask window_around(const Mask& mask) {
  if (mask.chunk == 0) return mask;
  const auto side = [&](int64_t keys) {
    return keys < 0 ? mask.chunk - 1 : std::min(keys, mask.chunk - 1);
  };
  return {side(mask.left), side(mask.right), 0, mask.top_left};
}

int64_t diagonal_of(const Mask& mask, const Sequence& s, int64_t i) {
  return (mask.top_left ? i : i + s.sk - s.sq) + s.shift;
}

KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i) {
  const int64_t diagonal = diagonal_of(mask, s, i);
  const int64_t longest = s.sq + s.sk + std::abs(s.shift) + s.first_key;
  // A window wider than the sequence is unbounded; the comparison also keeps the sums in range.
  const bool left = mask.left >= 0 && mask.left < longest;
  const bool right = mask.right >= 0 && mask.right < longest;
  KeyRange keys{left ? diagonal - mask.left : 0, right ? diagonal + mask.right + 1 : s.sk};
  if (mask.chunk > 0) {
    const int64_t chunk = std::min(mask.chunk, longest);
    const int64_t inside = ((diagonal + s.first_key) % chunk + chunk) % chunk;
    keys.begin = std::max(keys.begin, diagonal - inside);
    keys.end = std::min(keys.end, diagonal - inside + chunk);
  }
  keys.begin = std::clamp<int64_t>(keys.begin, 0, s.sk);
  keys.end = std::clamp<int64_t>(keys.end, keys.begin, s.sk);
  return keys;
}

KeyRange visible_keys(const Mask& mask, const Sequence& s, int64_t i_begin, int64_t i_end) {
  if (i_begin >= i_end) return {};
  return {visible_keys(mask, s, i_begin).begin, visible_keys(mask, s, i_end - 1).end};
}

TileMap tile_map(const Mask& mask, const Sequence& s, int64_t Br, int64_t Bc) {
  TileMap map{Br, Bc, (s.sq + Br - 1) / Br, (s.sk + Bc - 1) / Bc, {}};
  if (map.cols > 0 && map.rows > kMaxTiles / map.cols) {
    throw Error(
        Status::kUnsupported,
        fmt::format("tiles: the map has {} x {} of them, want at most 2^31", map.rows, map.cols));
  }
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
