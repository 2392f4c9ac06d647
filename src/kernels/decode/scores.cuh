// Mask and softmax inputs of both decode kernels: which keys a row sees, what a score becomes, and NaN in V at hidden
// keys.
#pragma once
#include "device/score.cuh"
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "decode/loads.cuh"

static_assert(!kTree || kBlockKeys <= 64);  // a word of the tree mask has the bits of a tile

// The keys that all rows of a work tile see, whatever a dense bias is.
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

// `first` of those of the warps of a block, and the one `step` rows on.
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

// With score_mod: which scores of a tile a bias or an expression has made -inf, as without the score nobody can say it
// later. A thread has a bit for each of its own, and asks the lanes that share its rows for theirs.
template <class Layout>
class HiddenScores {
 public:
  HiddenScores() = default;
  template <int count>
  __device__ __forceinline__ explicit HiddenScores(const float (&S)[count]) {
#pragma unroll
    for (int i = 0; kScoreMod && i < count; ++i) bits_[i / 32] |= u32(S[i] == -infinity()) << i % 32;
  }
  // That of the thread's i-th row and a key of the tile. The warp asks together.
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
template <class Layout, int count>
__device__ __forceinline__ HiddenScores<Layout> adjust_scores(const DecodeParams& p, float (&S)[count],
                                                              const ThreadRows& rows, int key_tile, bool masked) {
  const int first = key_tile * kBlockKeys + int(Layout::first_column());
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

// Whether the thread's i-th row sees a key of a tile.
template <class Layout>
__device__ __forceinline__ bool sees(const DecodeParams& p, const ThreadRows& rows, const HiddenScores<Layout>& hidden,
                                     int i, int key_tile, int key) {
  const int place = key_tile * kBlockKeys + key;
  const bool hides_key = kScoreMod ? hidden.has(i, key) : hides(p, rows.context(i, place));
  return rows.keys.sees(i, place) && !hides_key;
}

// P is 0 at a hidden key, but 0 * NaN is NaN. So NaN and infinity of V are added to O by hand in the rows that see
// their key, and replaced by 0 in shared memory for the product. `sync` is a barrier of the warp group, which shares
// the tile.
template <class Sync>
__device__ __forceinline__ void add_non_finite(const DecodeParams& p, float (&O)[kValueDim / 2], const ThreadRows& rows,
                                               const HiddenScores<ByRows>& hidden, int key_tile, u32 v, Sync sync) {
  const auto pair_at = [&](int key, int column) {
    return v + column / 64 * kPanelBytes + swizzled(key, column % 64 / 8) + column % 8 * 2;
  };
  sync();
#pragma unroll 1
  for (int key = 0; key < kBlockKeys; ++key) {
    const bool seen[2] = {sees(p, rows, hidden, 0, key_tile, key), sees(p, rows, hidden, 1, key_tile, key)};
#pragma unroll
    for (int i = 0; i < kValueDim / 2; i += 4) {
      const u32 pair = load_shared(pair_at(key, 2 * i + int(thread_column())));
      const float x[2] = {ElementV::is_finite(pair) ? 0 : ElementV::low(pair),
                          ElementV::is_finite(pair >> 16) ? 0 : ElementV::high(pair)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (seen[j / 2]) O[i + j] += x[j % 2];
      }
    }
  }
  sync();
#pragma unroll 1
  for (int at = threadIdx.x % kWarpGroupThreads; at < kBlockKeys * kValueDim / 2; at += kWarpGroupThreads) {
    const u32 address = pair_at(at / (kValueDim / 2), at % (kValueDim / 2) * 2);
    const u32 pair = load_shared(address);
    store_shared(address, (ElementV::is_finite(pair) ? pair & 0xffff : 0) |
                              (ElementV::is_finite(pair >> 16) ? pair & 0xffff0000 : 0));
  }
  sync();
}

// Whether V of a tile has NaN or infinity at a key of the sequence that some row does not see.
__device__ __forceinline__ bool hides_non_finite(u32 v, int key_tile, const KeyRange& seen_by_all, int sk) {
  constexpr int kChunks = kValueDim / 8;
  const int first = key_tile * kBlockKeys;
  const int keys = min(int(kBlockKeys), sk - first);
  const int before = max(min(seen_by_all.begin - first, keys), 0);
  const int after = max(min(seen_by_all.end - first, keys), before);
  const int hidden = before + keys - after;
  bool found = false;
#pragma unroll 1
  for (int at = threadIdx.x % 32; at < hidden * kChunks; at += 32) {
    const int i = at / kChunks;
    const int key = i < before ? i : i - before + after;
    const int column = at % kChunks * 8;
    u32 x[4];
    load_shared16(v + column / 64 * kPanelBytes + swizzled(key, column % 64 / 8), x);
#pragma unroll
    for (int j = 0; j < 4; ++j) found = found || !ElementV::is_finite(x[j]) || !ElementV::is_finite(x[j] >> 16);
  }
  return __any_sync(0xffffffff, found);
}

// The mask of a work tile, as a thread sees it.
struct TileMask {
  KeyRange seen_by_all;
  ThreadRows rows;

  __device__ __forceinline__ TileMask(const DecodeParams& p, const WorkTile& tile, int warp_of_group)
      : seen_by_all(keys_seen_by_all(p, tile)),
        rows(rows_of_thread(p, tile, kWarpRows * warp_of_group + int(thread_row()), 8)) {}

  // Whether some row does not see all keys of a tile.
  __device__ __forceinline__ bool cuts(int key_tile) const {
    return is_partial(seen_by_all, key_tile * kBlockKeys, (key_tile + 1) * kBlockKeys);
  }
};

// Keeps NaN and infinity of V in a tile that the mask cuts from the rows that do not see their keys.
template <class Sync>
__device__ __forceinline__ void add_hidden_non_finite(const DecodeParams& p, float (&O)[kValueDim / 2],
                                                      const TileMask& mask, const HiddenScores<ByRows>& hidden,
                                                      int key_tile, u32 v, const SavedWorkTiles& saved, Sync sync) {
  if (hides_non_finite(v, key_tile, mask.seen_by_all, saved.keys()))
    add_non_finite(p, O, mask.rows, hidden, key_tile, v, sync);
}
