// Sizes and the map of shared memory of the decode kernel.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

enum : int {
  kWarpRows = 16,
  kWideTeam = 4,  // warps of a team, from which on products are those of warpgroups, and other warps load for it
  kLoadWarps = 4,  // of all such teams
  kMergeWarps = 8,  // of a CTA of sm90/decode/combine.cu, a row each
  kTurnSlots = 4,        // of the turns that some warp of a CTA may be at
  kTurnSequences = 256,  // most, of lines that go by turns
};

// What the map depends on: constants of kernel_config.h.
struct DecodeTile {
  int head_dim, value_dim, team_warps, teams, line_rows, block_keys, k_stages, v_stages;
};

// Whether teams are warpgroups.
FULGUR_SHARED bool is_wide(const DecodeTile& tile) { return tile.team_warps >= kWideTeam; }

// Warps of a CTA.
FULGUR_SHARED int decode_warps(const DecodeTile& tile) {
  return tile.teams * tile.team_warps + (is_wide(tile) ? int(kLoadWarps) : 0);
}

// Columns of O that teams put together at a time, and floats from one row of them to the next: a quarter of a warp has
// rows in different banks.
FULGUR_SHARED int merge_columns(const DecodeTile& tile) {
  const int of_block = (tile.value_dim > 128 ? 64 : 32) / (is_wide(tile) ? 2 : 1);
  return of_block * kWarpRows * tile.team_warps / tile.line_rows;
}
FULGUR_SHARED int merge_stride(const DecodeTile& tile) { return merge_columns(tile) + 8; }

// Byte offsets, and bytes of buffers; those of K and V are panels of 64 columns, swizzled.
struct DecodeLayout {
  int k_bytes, v_bytes;  // of a stage
  int k, v;              // [stage], of a team
  int k_full, k_empty, v_full, v_empty;  // [stage]: barriers of a wide team
  int v_tail;            // a barrier: the last V of a sequence is there, before what is after it is cleared
  int team_bytes;        // from one team's buffers to the next one's
  int q;                 // [panel][row][64 columns], swizzled
  int q_full, q_empty;   // barriers of Q of wide teams
  int merge;             // [team][row][merge_stride]: columns of O
  int stats;             // [team][row]{shift, sum}, then {factor, sum}
  int totals;            // [row]{shift, sum}
  int items;             // 16 ints a warp: the item at hand
  int share;             // 16 ints: the share of the CTA, or how lines go by turns
  int turns;             // [slot]{16 bytes}: pieces by turns, then barriers, then barriers
  int ranks;             // [kTurnSequences]: an int for each sequence, in the order of their lengths
  int scan;              // two ints a warp: sums over sequences, and the longest line; later a flag
  int bytes;
};

FULGUR_SHARED DecodeLayout decode_layout(const DecodeTile& tile) {
  const int rows = kWarpRows * tile.team_warps;
  DecodeLayout map = {};
  map.k_bytes = (tile.head_dim + 63) / 64 * tile.block_keys * 128;
  map.v_bytes = (tile.value_dim + 63) / 64 * tile.block_keys * 128;
  map.k = 0;
  map.v = tile.k_stages * map.k_bytes;
  map.k_full = map.v + tile.v_stages * map.v_bytes;
  map.k_empty = map.k_full + 8 * tile.k_stages;
  map.v_full = map.k_empty + 8 * tile.k_stages;
  map.v_empty = map.v_full + 8 * tile.v_stages;
  map.v_tail = map.v_empty + 8 * tile.v_stages;
  map.team_bytes = map.k_full + (is_wide(tile) ? 1024 : 0);
  map.q = tile.teams * map.team_bytes;
  const int merged_rows = tile.teams > 1 ? tile.line_rows : 0;
  map.q_full = map.q + (tile.head_dim + 63) / 64 * rows * 128;
  map.q_empty = map.q_full + 8;
  map.merge = map.q_full + 16;
  map.stats = map.merge + tile.teams * merged_rows * merge_stride(tile) * 4;
  map.totals = map.stats + tile.teams * merged_rows * 8;
  map.items = map.totals + merged_rows * 8;
  map.share = map.items + tile.teams * tile.team_warps * 64;
  map.turns = map.share + 64;
  map.ranks = map.turns + kTurnSlots * 32;
  map.scan = map.ranks + kTurnSequences * 4;
  map.bytes = map.scan + decode_warps(tile) * 8;
  return map;
}

// Of a row of a part: its O, its shift and its sum.
FULGUR_SHARED int partial_row_floats(int value_dim) { return value_dim + 4; }

}  // namespace fulgur::kernels
