// Masks and scores of the decode kernels: which keys the rows of a thread see, and what a score becomes before the
// softmax.
#pragma once
#include "device/score.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "decode/schedule/schedule.cuh"

static_assert(!kTree || kBlockKeys <= 64 || kWidePath);  // a word of the tree mask has the bits of a warp's keys

// The keys that all rows of a work tile see. None where scores may hide keys, as a bias of -inf does.
__device__ __forceinline__ KeyRange keys_seen_by_all(const DecodeParams& p, const WorkTile& tile) {
  if (kScoresHide) return {0, 0};
  const TileRows rows = rows_of_tile(p, tile);
  return keys_seen_by_all(p, tile.sequence.n, rows.first / kGroup, (rows.first + rows.count - 1) / kGroup);
}

// The two rows of a thread.
struct ThreadRows {
  VisibleKeys keys;
  int query[2], diagonal[2];
  ScoreHead head[2];

  __device__ __forceinline__ ScoreContext context(int i, int key) const {
    return score_context(head[i], query[i], diagonal[i], key);
  }
};

// A thread's rows: row `first` in the order of the warps of a block (row_of_warps), and the one `step` rows on.
__device__ __forceinline__ ThreadRows rows_of_thread(const DecodeParams& p, const WorkTile& tile, int first, int step) {
  ThreadRows rows;
  const Lengths& n = tile.sequence.n;
  unsigned long long tree[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = tile.block * kBlockRows + row_of_warps(first + step * i);
    rows.query[i] = min(row / kGroup, n.sq - 1);
    if (kTree) tree[i] = tree_word(p.tree_mask, p, n, tile.batch, rows.query[i]);
    rows.diagonal[i] = diagonal_of(band_of(p), n, rows.query[i]);
    rows.head[i] = score_head(p, n, tile.batch, tile.head * kGroup + row % kGroup);
  }
  rows.keys = visible_keys_of_queries(p, n, rows.query, tree);
  return rows;
}

// The mask of a work tile.
struct WorkTileMask {
  KeyRange seen_by_all;

  __device__ __forceinline__ WorkTileMask(const DecodeParams& p, const WorkTile& tile)
      : seen_by_all(keys_seen_by_all(p, tile)) {}

  // Whether some row does not see all keys of a tile.
  __device__ __forceinline__ bool cuts(int key_tile) const {
    return is_partial(seen_by_all, key_tile * kBlockKeys, (key_tile + 1) * kBlockKeys);
  }
};

// The mask of a work tile for the rows r and r + 8 of a thread.
struct TileMask : WorkTileMask {
  ThreadRows rows;

  __device__ __forceinline__ TileMask(const DecodeParams& p, const WorkTile& tile, int warp_in_group)
      : WorkTileMask(p, tile),
        rows(rows_of_thread(p, tile, kWarpRows * warp_in_group + int(thread_row()), 8)) {}
};

// With score_mod: which scores of a tile an expression has made -inf. This depends on the score, so that it cannot be
// computed again later. A thread has a bit for each of its scores, and gets those of other keys from other lanes.
template <class Layout>
class HiddenScores {
 public:
  HiddenScores() = default;
  template <int count>
  __device__ __forceinline__ explicit HiddenScores(const float (&S)[count]) {
#pragma unroll
    for (int i = 0; kScoreMod && i < count; ++i) bits_[i / 32] |= u32(S[i] == -infinity()) << i % 32;
  }
  // The bits of up to 32 scores, and scores with these bits.
  __device__ __forceinline__ u32 word() const { return bits_[0]; }
  __device__ __forceinline__ explicit HiddenScores(u32 word) : bits_{word, 0} {}
  // Whether the thread's i-th row has such a score at a key of the tile. All lanes of the warp call this together.
  __device__ __forceinline__ bool has(int i, int key) const {
    const int lane = Layout::lane_of(key), bit = Layout::element_of(i, key);
    const u32 word = __shfl_sync(0xffffffff, bits_[0], lane), next = __shfl_sync(0xffffffff, bits_[1], lane);
    return (bit < 32 ? word : next) >> bit % 32 & 1;
  }

 private:
  static_assert(kBlockKeys <= 128);
  u32 bits_[2] = {};
};

// Transforms scores (softcap, ALiBi, expressions), and makes those of hidden keys -inf where the tile is `masked`.
// `key`: that of the first column.
template <class Layout, int count>
__device__ __forceinline__ HiddenScores<Layout> adjust_scores_from(const DecodeParams& p, float (&S)[count],
                                                                   const ThreadRows& rows, int key, bool masked) {
  const int first = key + int(Layout::first_column());
  const ScoreContext at[2] = {rows.context(0, first), rows.context(1, first)};
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const ScoreContext entry = at[Layout::row(i)].moved(0, Layout::column(i));
    S[i] = score(p, entry, S[i], bias_of(p, entry));
  }
  const HiddenScores<Layout> hidden(S);
  if (masked) hide_keys<false, Layout>(S, rows.keys, first);
  return hidden;
}

// The same for the keys of a whole tile.
template <class Layout, int count>
__device__ __forceinline__ HiddenScores<Layout> adjust_scores(const DecodeParams& p, float (&S)[count],
                                                              const ThreadRows& rows, int key_tile, bool masked) {
  return adjust_scores_from<Layout>(p, S, rows, key_tile * kBlockKeys, masked);
}

// Whether the thread's i-th row sees a key of a tile.
template <class Layout>
__device__ __forceinline__ bool sees(const DecodeParams& p, const ThreadRows& rows, const HiddenScores<Layout>& hidden,
                                     int i, int key_tile, int key) {
  const int place = key_tile * kBlockKeys + key;
  const bool hides_key = kScoreMod ? hidden.has(i, key) : hides(p, rows.context(i, place));
  return rows.keys.sees(i, place) && !hides_key;
}
