// The map of tiles of a call whose mask has no closed form: mask_mod or a bool mask. It says of each tile of S whether
// some row sees some key there (the tile is seen), and whether the mask hides some key from some row there (the tile is
// partial). Attention kernels skip tiles that are not seen and apply the mask in partial tiles only
// (attention/seen_tiles.cuh). Of the bounds of a call (causal, window, chunk, lengths) a map knows only that a tile
// outside of them is not seen: they make no tile partial, since kernels apply them by themselves.
//
// The words of a map (SeenWords, host_device/expression.h) belong to its blocks, each of which has a bit for each of
// its tiles. Blocks are blocks of rows, and their tiles are tiles of keys. In a map by keys (kMapByKeys) blocks are
// tiles of keys, and their tiles are blocks of rows.
//
// Who makes a map before the attention kernel reads it:
//   maps/tile_map.cu     of mask_mod: two kernels, or for short calls one (the fused map, maps/fused_map.cuh)
//   maps/mask_bits.cu    of a bool mask, which it packs to bits
//   backward/prepare.cu  of mask_mod in short backward calls: a fused map (backward/prepare_map.cuh)
//
// kernel_config.h of these has, with the constants of a mask and of lengths, which sm90/forward/params.h lists:
//   kBlockStrips    strips of a block of rows (host_device/strips.h); 0: blocks begin at multiples of kBlockRows
//   kBlockRows      rows of a block, where kBlockStrips is 0
//   kBlockKeys      keys of a tile
//   kMapByKeys      1: the map is by keys
//   kMapOfRows      1: kernels read the map by rows, too
#pragma once
#include "host_device/attention_params.h"

namespace fulgur::kernels {

// The hull of a row node or key node (maps/node_hulls.cuh): the interval of its values in a block of rows or a tile of
// keys, as ints that are ordered like the values, and the set of the 6-bit hashes of integers.
struct NodeHull {
  int low, high;
  u64 hashes;
};

// The masks that maps/mask_bits.cu packs, cut into cells of 64 rows x 64 keys. A line is the cells of a strip of rows,
// or of 64 keys where the map is by keys.
struct MaskShape {
  int batches, heads;  // 1 where all have the same mask
  int lines, cells;    // lines of a mask, cells of a line
};

FULGUR_SHARED int map_words(int tiles) { return (tiles + 31) / 32; }

// With the span of a block that has one.
FULGUR_SHARED int block_words(int tiles) { return map_words(tiles) + (map_words(tiles) > kWordsAtOnce); }

// Fused maps: blocks of a CTA, the max number of tiles of a block, and the max number of row nodes or key nodes.
enum : int { kFusedBlocks = 4, kMaxFusedTiles = 256, kMaxFusedNodes = 4 };
FULGUR_SHARED int fused_map_ctas(const MapShape& of, bool by_keys, bool of_both) {
  const int keys = (of.key_tiles + kFusedBlocks - 1) / kFusedBlocks;
  const int rows = (of.row_blocks + kFusedBlocks - 1) / kFusedBlocks;
  return of.batches * of.heads * (of_both ? keys + rows : by_keys ? keys : rows);
}

}  // namespace fulgur::kernels

struct TileMapParams : AttentionParams {
  fulgur::kernels::MapShape shape;
  fulgur::kernels::MaskShape mask;        // kMaskBits
  fulgur::kernels::NodeHull* row_hulls;  // [batches][heads][row blocks][kRowNodes], not of a fused map
  fulgur::kernels::NodeHull* key_hulls;  // [batches][key tiles][kKeyNodes], likewise
  fulgur::kernels::u64* words;            // of the map, from the first block's span on where blocks have one
  fulgur::kernels::u64* words_of_rows;    // kMapOfRows: of the map by rows
};
