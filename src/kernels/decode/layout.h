// Sizes and the map of shared memory of the decode kernels.
#pragma once
#include "host_device/element.h"

namespace fulgur::kernels {

enum : int {
  kWarpRows = 16,
  kWarpgroupWarps = 4,      // the minimum of warps in a warp group of warpgroups (the warpgroup path)
  kLoadWarps = 4,           // of a CTA of the warpgroup path, and of one that reads several heads
  kCombineWarps = 8,        // of a CTA of decode/combine.cu
  kDynamicSlots = 4,        // splits of the dynamic scheduler that warps of a CTA may be at, at a time
  kDynamicSequences = 256,  // the maximum of sequences that the dynamic scheduler ranks
};

// ---- Rows of blocks: each block of codes has its scale in front ----

FULGUR_SHARED int block_bytes(Element type) { return 2 + kBlockColumns * bits_of(type) / 8; }
// Bytes of a row in shared memory, where rows begin at multiples of 16 bytes, and eight successive rows share no banks.
// `piece` says how a row is copied: by pieces of 16, 8 or 4 bytes; 2: by words of 4 bytes, where it may begin in the
// middle of one, which the row's last word then says; kMiddle: by pieces of 16 bytes, in the middle of which all rows
// of a kv head begin at the same place.
enum : int { kMiddle = 1 };
FULGUR_SHARED int shared_row_of_blocks(Element type, int dim, int piece) {
  return ((row_of_blocks(type, dim) + (piece == 2 ? 6 : 0) + 15) / 16 | 1) * 16;
}

// Products read a row of blocks in chunks of 16 bytes: eight pairs of bytes, which may be codes or a scale. A block
// has 8 n + 1 pairs, so that block b, of at most eight, begins with pair b of chunk n b. A chunk with codes of two
// blocks is multiplied once for each. Where rows begin m pairs after a multiple of 16 bytes, block b begins with pair
// b + m, which has to be one of the eight: m is at most (16 - step) / 2, where `step` divides all such beginnings in
// bytes.
FULGUR_SHARED bool may_begin_in_middle(int dim, int step) { return (16 - step) / 2 + dim / kBlockColumns - 1 < 8; }
FULGUR_SHARED int chunks_of_blocks(Element type, int dim) { return (row_of_blocks(type, dim) + 15) / 16; }
FULGUR_SHARED int first_block(Element type, int chunk) { return 16 * chunk / block_bytes(type); }
FULGUR_SHARED int last_block(Element type, int dim, int chunk) {
  return min_of((16 * chunk + 12) / block_bytes(type), dim / kBlockColumns - 1);
}
// How many passes of products come before a chunk: one for each chunk, and another one for those with codes of two
// blocks. Block 7 has only its scale in its first chunk, so that this takes one pass.
FULGUR_SHARED int passes_before_chunk(Element type, int dim, int chunk) {
  const int begun = max_of(chunk - 1, 0) / (block_bytes(type) / 16);
  return chunk + min_of(begun, min_of(dim / kBlockColumns - 1, 6));
}
// The columns that Q has in shared memory for rows of K, with those of chunks that are multiplied twice.
FULGUR_SHARED int query_columns(Element stored, int dim) {
  if (!is_block(stored)) return dim;
  return passes_before_chunk(stored, dim, chunks_of_blocks(stored, dim)) * (128 / bits_of(stored));
}

// ---- Shared memory ----

// The constants of kernel_config.h on which the map of shared memory depends.
struct DecodeTile {
  Operands types, stored;
  int scale_words;       // words of scales and zero points of a key, not in blocks
  int heads;             // kv heads that a CTA reads together, a warp for each
  int k_piece, v_piece;  // bytes of rows of blocks that are copied at once
  int head_dim, value_dim, warps_per_group, warp_groups, tile_rows, block_keys, box_keys, k_stages, v_stages;
  int code_stages, convert_warps;  // of codes on the warpgroup path; warps that convert them, to tiles of f16
  // On the wide path warps that share rows, times 16 rows that they have, and bytes of a chunk of K or V; else 1, 1, 0.
  int column_shares, warp_strips, chunk_bytes;
  int column_groups;               // warpgroups that share the rows and keys of a tile, each with a part of O's columns
};

// Whether several warps share rows, because a warp has no registers for all columns of their O (decode/wide/).
FULGUR_SHARED bool is_wide_path(const DecodeTile& tile) { return tile.column_shares > 1; }
// Rows of a block.
FULGUR_SHARED int rows_of_block(const DecodeTile& tile) {
  return kWarpRows * tile.warp_strips * tile.warps_per_group / tile.column_shares;
}
// Columns of O that a warp has.
FULGUR_SHARED int columns_of_share(const DecodeTile& tile) {
  return (tile.value_dim + 16 * tile.column_shares - 1) / (16 * tile.column_shares) * 16;
}
// Keys of a chunk of V on the wide path: 16 times a power of 2, as many as it has room for.
FULGUR_SHARED int keys_of_value_chunk(const DecodeTile& tile) {
  int keys = 16;
  while (2 * keys <= tile.block_keys &&
         2 * keys * panels_of(tile.types.v, tile.value_dim) * kPanelRowBytes <= tile.chunk_bytes)
    keys *= 2;
  return keys;
}

// Columns of a chunk of K there, and chunks of a tile.
FULGUR_SHARED int columns_of_key_chunk(const DecodeTile& tile) {
  return tile.chunk_bytes / (tile.block_keys * kPanelRowBytes) * panel_columns(tile.types.k);
}
FULGUR_SHARED int chunks_of_wide_tile(const DecodeTile& tile) {
  const int columns = columns_of_key_chunk(tile);
  return (tile.head_dim + columns - 1) / columns + tile.block_keys / keys_of_value_chunk(tile);
}

// Whether warp groups are made of warpgroups.
FULGUR_SHARED bool is_warpgroup_path(const DecodeTile& tile) {
  return tile.heads == 1 && tile.warps_per_group >= kWarpgroupWarps && !is_wide_path(tile);
}

// Whether warpgroups convert codes to operands in registers (decode_codes_warpgroup.cu): no other warps do.
FULGUR_SHARED bool converts_in_registers(const DecodeTile& tile) {
  return is_warpgroup_path(tile) && is_code(tile.stored.k) && tile.convert_warps == 0;
}

// Bytes of a row of a panel of K or V. Narrow rows of codes lie two or four in 128 bytes.
FULGUR_SHARED int panel_row_bytes(Element stored, int dim) {
  const int bytes = dim * bits_of(stored) / 8;
  return !is_code(stored) || bytes > 64 ? int(kPanelRowBytes) : bytes > 32 ? 64 : 32;
}
// Bytes of a row of codes in memory.
FULGUR_SHARED int code_row_bytes(Element stored, int dim) {
  return is_block(stored) ? row_of_blocks(stored, dim) : dim * bits_of(stored) / 8;
}
// The rows of several heads lie side by side in shared memory as in memory. The bytes from one key to the next are an
// odd multiple of 16, so that eight keys share no banks.
FULGUR_SHARED int pitch_of_heads(int bytes) { return (bytes / 16 | 1) * 16; }
// Bytes of a tile of K or V.
FULGUR_SHARED int tile_bytes(Element stored, int dim, int keys, int piece, int heads) {
  if (heads > 1) return pitch_of_heads(heads * code_row_bytes(stored, dim)) * keys;
  if (is_block(stored)) return shared_row_of_blocks(stored, dim, piece) * keys;
  return panels_of(stored, dim) * panel_row_bytes(stored, dim) * keys;
}

// Panels of a tile of K or V, where warpgroups have different columns of O.
FULGUR_SHARED int wide_panels(const DecodeTile& tile) {
  return max_of(panels_of(tile.types.k, tile.head_dim), panels_of(tile.types.v, tile.value_dim));
}
// Those of a buffer for it: P of the tile takes the panel after V, where K has been read.
FULGUR_SHARED int wide_buffer_panels(const DecodeTile& tile) {
  return max_of(panels_of(tile.types.k, tile.head_dim), panels_of(tile.types.v, tile.value_dim) + 1);
}

// Warps of a CTA.
FULGUR_SHARED int decode_warps(const DecodeTile& tile) {
  const int load_warps = tile.convert_warps > 0                       ? tile.convert_warps
                         : is_warpgroup_path(tile) || tile.heads > 1 ? int(kLoadWarps)
                                                                     : 0;
  return tile.warp_groups * tile.warps_per_group * tile.column_groups + load_warps;
}

// Rows of Q in shared memory of a warp. With several heads these are all rows of a kv head, for which 8 may suffice.
FULGUR_SHARED int rows_of_warp(const DecodeTile& tile) {
  if (converts_in_registers(tile)) return tile.tile_rows / tile.warps_per_group;
  if (is_wide_path(tile)) return rows_of_block(tile) / tile.warps_per_group;
  return tile.heads > 1 && tile.tile_rows / tile.heads <= 8 ? 8 : int(kWarpRows);
}

// Columns of O that warp groups combine at a time, and floats from one row of them to the next, by which the rows of a
// quarter of a warp are in different banks.
FULGUR_SHARED int exchange_columns(const DecodeTile& tile) {
  if (tile.heads > 1) return 32;
  // Beside large tiles of codes there is little room.
  const int share = is_warpgroup_path(tile) ? (tile.convert_warps > 0 && tile.block_keys > 64 ? 4 : 2) : 1;
  const int of_block = (tile.value_dim > 128 ? 64 : 32) / share;
  return of_block * kWarpRows * tile.warps_per_group / tile.tile_rows;
}
FULGUR_SHARED int exchange_stride(const DecodeTile& tile) { return exchange_columns(tile) + 8; }

// Words of a key's scales, or zero points.
FULGUR_SHARED int scale_words(int count, Element type) { return (count * bytes_of(type) + 3) / 4; }

// The map of shared memory: byte offsets, and bytes of buffers. K and V are panels of 64 columns, swizzled.
struct DecodeLayout {
  int k_bytes, v_bytes;                  // of a stage
  int k, v;                              // [stage], of a warp group
  int scales, scale_bytes;               // [stage], likewise; bytes of a stage
  int codes, code_bytes;                 // [code stage]: K, V and scales before their conversion; bytes of a stage
  int coded_v, coded_scales;             // in a stage
  int code_full;                         // [K, V][warp that converts][code stage]: barriers of boxes of codes
  int k_factors, v_factors;              // [stage][key]: what scales the scores of a key, and its P
  int shared_factors;                    // [K, V][stage][warp that converts]: those that its keys share
  int k_full, k_empty, v_full, v_empty;  // [stage]: barriers of a warpgroup path, and of heads together; of warpgroups
                                         // with different columns of O: k_full[stage][panel], k_empty[stage][warpgroup]
  int v_tail;                            // a barrier: the last V of a sequence is there, and its tail may be cleared; of
                                         // warpgroups with different columns of O: [warpgroup]
  int group_bytes;                       // from one warp group's buffers to the next one's
  int q;                                 // [panel][row][64 columns], swizzled
  int q_full, q_empty;                   // barriers of Q of warpgroups
  int exchange;                          // [warp group][row][exchange_stride]: columns of O; where codes are converted,
                                         // in the place of Q
  int stats;                             // [warp group][row]{shift, sum}, then {factor, sum}
  int totals;                            // [row]{shift, sum}
  int q_factors;                         // [row]: what Q was divided by, with codes
  int work_tiles;                        // 16 ints a warp: WorkTiles
  int tile_full;                         // [warp group][stage]: barriers of boxes of K and V on the warp path
  int schedule;                          // 16 ints: what a schedule has for the whole CTA
  int slots;                             // Dynamic: [slot]{16 bytes}: splits, then [2][slot]: barriers
  int ranks;                             // Dynamic: [kDynamicSequences]: an int for each sequence, by length
  int scan;                              // two ints a warp: sums over sequences, and the longest q block; later a flag
  int states, state_bytes;               // [warp group]: rows, votes and scales of V of one that converts codes
  int p_rows, p_hidden, sums;            // of warpgroups that share tiles: [row]: the shift of P of a tile; [thread]:
                                         // bits of its hidden scores; [warpgroup][row]: sums
  int bytes;
};

// That of the wide path: k_stages chunks of K and V, Q, P in `exchange`, and `stats` of each share.
FULGUR_SHARED DecodeLayout wide_layout(const DecodeTile& tile) {
  const int row_bytes = rows_of_block(tile) * kPanelRowBytes;
  DecodeLayout map = {};
  map.q = tile.k_stages * tile.chunk_bytes;
  map.exchange = map.q + panels_of(tile.types.q, tile.head_dim) * row_bytes;
  map.stats = map.exchange + panels_of(tile.types.v, tile.block_keys) * row_bytes;
  map.work_tiles = map.stats + tile.column_shares * rows_of_block(tile) * 4;
  map.schedule = map.work_tiles + 2 * tile.warps_per_group * 64;  // those that it computes, and those that it loads
  map.scan = map.schedule + 64;
  map.bytes = map.scan + decode_warps(tile) * 8;
  return map;
}

FULGUR_SHARED DecodeLayout decode_layout(const DecodeTile& tile) {
  if (is_wide_path(tile)) return wide_layout(tile);
  const int rows = rows_of_warp(tile) * tile.warps_per_group;
  DecodeLayout map = {};
  const bool converts = tile.convert_warps > 0, in_registers = converts_in_registers(tile);
  const int stored_k_bytes = tile_bytes(tile.stored.k, tile.head_dim, tile.block_keys, tile.k_piece, tile.heads);
  const int stored_v_bytes = tile_bytes(tile.stored.v, tile.value_dim, tile.block_keys, tile.v_piece, tile.heads);
  map.k_bytes = converts ? tile_bytes(tile.types.k, tile.head_dim, tile.block_keys, 0, 1) : stored_k_bytes;
  map.v_bytes = converts ? tile_bytes(tile.types.v, tile.value_dim, tile.block_keys, 0, 1) : stored_v_bytes;
  // Warpgroups with different columns of O have one ring, of tiles of K and of V.
  if (tile.column_groups > 1) map.k_bytes = wide_buffer_panels(tile) * tile.block_keys * kPanelRowBytes;
  map.k = in_registers ? tile.block_keys * kPanelRowBytes : 0;  // after P
  // Boxes begin where swizzles of eight of their rows do.
  const int lines = is_warpgroup_path(tile) || tile.box_keys == 0 || tile.heads > 1
                        ? 1
                        : 8 * max_of(panel_row_bytes(tile.stored.k, tile.head_dim),
                                     panel_row_bytes(tile.stored.v, tile.value_dim));
  map.v = map.k + (tile.k_stages * map.k_bytes + lines - 1) / lines * lines;
  map.scales = map.v + tile.v_stages * map.v_bytes;
  map.scale_bytes = tile.scale_words * tile.block_keys * 4;
  map.k_full = map.scales + tile.k_stages * map.scale_bytes;
  if (converts) {
    map.codes = map.scales;
    const int start = tile.box_keys > 0 ? 1024 : 128;  // boxes begin where swizzles of eight rows do
    map.coded_v = (stored_k_bytes + start - 1) / start * start;
    map.coded_scales = map.coded_v + stored_v_bytes;
    map.code_bytes = (map.coded_scales + map.scale_bytes + start - 1) / start * start;
    map.k_factors = map.codes + tile.code_stages * map.code_bytes;
    const bool has_factors = tile.scale_words > 0 || is_block(tile.stored.k) || is_block(tile.stored.v);
    const int factor_bytes = has_factors ? tile.block_keys * 4 : 0;
    map.v_factors = map.k_factors + tile.k_stages * factor_bytes;
    map.k_full = (map.v_factors + tile.v_stages * factor_bytes + 1023) / 1024 * 1024;
  }
  map.k_empty = map.k_full + 8 * tile.k_stages * (tile.column_groups > 1 ? wide_panels(tile) : 1);
  map.v_full = map.k_empty + 8 * tile.k_stages * tile.column_groups;
  map.v_empty = map.v_full + 8 * tile.v_stages;
  map.v_tail = map.v_empty + 8 * tile.v_stages;
  map.code_full = map.v_tail + 8 * tile.column_groups;
  map.shared_factors = map.k_full + 448;
  const bool has_barriers = is_warpgroup_path(tile) || tile.heads > 1;
  map.group_bytes = in_registers   ? (map.v_tail + 8 + 1023) / 1024 * 1024
                    : has_barriers ? map.k_full + 1024
                                   : (map.k_full + lines - 1) / lines * lines;
  map.q = (tile.heads > 1 ? 1 : tile.warp_groups) * map.group_bytes;
  // The warp path of codes stores O from where warp groups exchange it, be it one.
  const bool has_codes = is_code(tile.stored.k) || is_code(tile.stored.v);
  const bool exchanges = tile.warp_groups > 1 || tile.heads > 1 || (has_codes && !is_warpgroup_path(tile));
  const int exchanged_rows = exchanges ? tile.tile_rows : 0;
  const int q_columns = converts || in_registers ? tile.head_dim : query_columns(tile.stored.k, tile.head_dim);
  const int q_bytes = panels_of(tile.types.q, q_columns) * rows * kPanelRowBytes;
  const int exchange_bytes = tile.warp_groups * exchanged_rows * exchange_stride(tile) * 4;
  // Warps that compute convert Q for themselves, after they have combined O. Others have the next Q by then.
  map.q_full = map.q + (converts ? max_of(q_bytes, exchange_bytes) : q_bytes);
  map.q_empty = map.q_full + 8;
  map.exchange = converts ? map.q : map.q_full + 16;
  map.stats = map.q_full + 16 + (converts ? 0 : exchange_bytes);
  map.totals = map.stats + tile.warp_groups * exchanged_rows * 8;
  map.q_factors = map.totals + exchanged_rows * 8;
  map.work_tiles = map.q_factors + (is_code(tile.stored.k) && !converts ? rows * 4 : 0);
  // 1024 bytes have barriers, shared factors, and room for 128 rows.
  if (converts) map.q_factors = map.k_full + 512;
  map.tile_full = map.work_tiles + tile.warp_groups * tile.warps_per_group * tile.column_groups * 64;
  const bool of_boxes = tile.box_keys > 0 && tile.heads == 1 && !is_warpgroup_path(tile);
  const int barriers = of_boxes ? tile.warp_groups * tile.k_stages : 0;
  map.schedule = map.tile_full + (barriers + 1) / 2 * 16;
  map.slots = map.schedule + 64;
  map.ranks = map.slots + kDynamicSlots * 32;
  map.scan = map.ranks + kDynamicSequences * 4;
  map.bytes = map.scan + decode_warps(tile) * 8;
  if (tile.column_groups > 1) {
    map.p_rows = map.bytes;
    map.p_hidden = map.p_rows + rows * 4;
    map.sums = map.p_hidden + kWarpgroupWarps * 32 * 4;
    map.bytes = map.sums + tile.column_groups * rows * 4;
  }
  if (in_registers) {
    map.states = (map.bytes + 127) / 128 * 128;
    const int value_scale_bytes = tile.value_dim / 32 * 4 * tile.block_keys;
    map.state_bytes = tile.tile_rows * 28 + 16 + value_scale_bytes;
    map.bytes = map.states + tile.warp_groups * map.state_bytes;
  }
  return map;
}

// Floats of a row of a partial result: its O, its shift and its sum.
FULGUR_SHARED int partial_row_floats(int value_dim) { return value_dim + 4; }

}  // namespace fulgur::kernels
