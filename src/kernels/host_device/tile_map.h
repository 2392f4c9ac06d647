// The map of tiles of a call whose mask no closed form says, of mask_mod or of a bool mask: which tiles of scores some
// row sees a key of, and of these which are partial, because the mask hides some key from some row, whatever the bounds
// of the call do. maps/tile_map.cu or maps/mask_bits.cu makes it before the attention kernel, which walks
// over the tiles that are seen (attention/seen_tiles.cuh) and applies the mask in partial ones; for short backward calls
// backward/prepare.cu does.
//
// kernel_config.h of these has, with the constants of a mask and of lengths, which
// sm90/forward/params.h lists:
//   kBlockStrips    strips of a block of rows (host_device/strips.h); 0: its rows are
//   kBlockRows      as many, and blocks begin at multiples of them
//   kBlockKeys      keys of a tile
//   kMapByKeys      1: the words of a tile of keys have a bit for each block of rows; 0: the other way round
//   kMapOfRows      1: kernels want both
#pragma once
#include "host_device/attention_params.h"

namespace fulgur::kernels {

// In which the values lie that a node of an expression has in a block of rows, or in a tile of keys: ints in the order
// of the values, and which 6-bit hashes integers have.
struct PanelHull {
  int low, high;
  u64 hashes;
};

// How many masks maps/mask_bits.cu packs, and of what.
struct MaskShape {
  int batches, heads;  // 1 where all have the same
  int lines, cells;    // strips of 64 rows, or of 64 keys where the map is by keys, and words of a thread in each
};

FULGUR_SHARED int map_words(int tiles) { return (tiles + 31) / 32; }

// Of maps that are made at once, each CTA with the hulls that it needs (attention/panel_hulls.cuh): blocks of a CTA, the
// most tiles of a block, and the most panels.
enum : int { kOwnBlocks = 4, kMaxOwnTiles = 256, kMaxOwnPanels = 4 };
FULGUR_SHARED int ctas_of_map(const MapShape& of, bool by_keys, bool of_both) {
  const int keys = (of.key_tiles + kOwnBlocks - 1) / kOwnBlocks, rows = (of.row_blocks + kOwnBlocks - 1) / kOwnBlocks;
  return of.batches * of.heads * (of_both ? keys + rows : by_keys ? keys : rows);
}

// With the span of a block that has one.
FULGUR_SHARED int block_words(int tiles) { return map_words(tiles) + (map_words(tiles) > kWordsAtOnce); }

}  // namespace fulgur::kernels

struct TileMapParams : AttentionParams {
  fulgur::kernels::MapShape shape;
  fulgur::kernels::MaskShape mask;        // kMaskBits
  fulgur::kernels::PanelHull* row_hulls;  // [batches][heads][row blocks][kRowPanels]
  fulgur::kernels::PanelHull* key_hulls;  // [batches][key tiles][kKeyPanels]
  fulgur::kernels::u64* words;            // those of the map, from the first span on
  fulgur::kernels::u64* words_of_rows;    // of fulgur_map_of_rows
};
