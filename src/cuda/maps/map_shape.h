#pragma once

#include <cstdint>

#include "call/problem.h"
#include "kernels/host_device/tile_map.h"

namespace fulgur::cuda {

/// Which kernels make a map of tiles.
enum class MapMethod {
  kSeparate,  ///< one for the hulls of nodes or the bits of a mask, then one for the map
  kFused,     ///< one for both (kernels/maps/fused_map.cuh): fuses_map()
  kPrepare,   ///< the kernel that prepares the rows of a backward call: prepares_map()
};

/// The tiles of a plan that has a map (kernels/host_device/tile_map.h), and how the map is made.
struct MapTiles {
  int block_strips = 0;       ///< strips of a block of rows; 0: its rows are block_rows
  int block_rows = 0;         ///< rows of a block
  int block_keys = 0;         ///< keys of a tile
  bool by_keys = false;       ///< CTAs of the attention kernel have keys, and iterate over rows
  bool by_rows_too = false;   ///< kernels read a map by keys and also one by rows
  bool early_starts = false;  ///< a kernel may start while the previous one runs
  MapMethod method = MapMethod::kSeparate;
};

/// Whether a forward call takes less time with a fused map than with separate kernels.
bool fuses_map(const Problem& problem, const MapTiles& tiles);
/// Whether a backward call takes less time if the kernel that prepares rows makes the map of
/// mask_mod.
bool prepares_map(const Problem& problem, const MapTiles& tiles);

/// How many maps a call has, and of how many tiles.
kernels::MapShape map_shape(const Problem& problem, const MapTiles& tiles);
/// Words of all maps.
int64_t words_of_maps(const kernels::MapShape& shape, bool by_keys);
/// The words of maps as kernels read them, without their address.
kernels::SeenWords seen_words(const kernels::MapShape& shape, bool by_keys);

/// Hulls of row nodes in all blocks of rows, and of key nodes in all tiles of keys.
struct HullCounts {
  int64_t rows = 0, keys = 0;
};
HullCounts hull_counts(const Problem& problem, const kernels::MapShape& shape);

}  // namespace fulgur::cuda
