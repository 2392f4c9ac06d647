#pragma once

#include <string>

#include "fulgur/attention.h"

namespace fulgur::app {

/// The tile map of a score matrix [sq, sk] as a self-contained SVG picture: a cell a tile, in the
/// colour of empty, partial or full, with axes and a legend. Large maps are merged to at most
/// 256 x 256 cells; a cell of unlike tiles counts as partial. `title` is escaped.
std::string tile_map_svg(const TileMap& map, int64_t sq, int64_t sk, const std::string& title);

}  // namespace fulgur::app
