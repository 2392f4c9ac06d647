// The mask hook on fragments (fragment.cuh): which keys a thread's rows see, or which rows its keys, and what becomes
// of entries that are hidden. host_device/mask.h has the formulas, and says which tiles need this.
#pragma once
#include "device/math.cuh"
#include "device/schedule.cuh"
#include "attention/fragment.cuh"

// The keys that rows r and r + 8 of this thread see: [low[i], high[i]), and with kTree from `tokens` on those with a
// bit in tree[i].
struct VisibleKeys {
  int low[2], high[2];
  int tokens;
  unsigned long long tree[2];

  // A bit for each of 64 keys from `key` on: all, but for tokens that the tree mask hides.
  __device__ __forceinline__ unsigned long long bits(int i, int key) const {
    const int token = key - tokens;
    if (token >= 0) return tree[i] >> min(token, 63);
    return token > -64 ? ~(~tree[i] << -token) : ~0ull;
  }
  __device__ __forceinline__ bool sees(int i, int key) const {
    const bool shown = !kTree || (bits(i, key) & 1);
    return key >= low[i] && key < high[i] && shown;
  }
};

// The tree mask of a query.
__device__ __forceinline__ unsigned long long tree_word(const unsigned long long* tree_mask, const CallParams& p,
                                                        const Lengths& n, int batch, int query) {
  return tree_mask[(kPacked ? n.q_start : (long long)(batch) * p.sq) + query];
}

// The keys that a thread's two rows of a strip see. Rows are queries. `diagonal`: that of the strip's first row.
__device__ __forceinline__ VisibleKeys visible_keys_of_strip(const CallParams& p, int sk, int diagonal) {
  diagonal += warp_row() + thread_row();
  VisibleKeys visible = {{0, 0}, {sk, sk}, 0, {0, 0}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (kHasRight) visible.high[i] = min(sk, diagonal + 8 * i + p.window_right + 1);
    if (kHasLeft) visible.low[i] = diagonal + 8 * i - p.window_left;  // in front of the first key, too
    if (kHasChunk) {
      const KeyRange keys = keys_seen_from(band_of(p), sk, diagonal + 8 * i);
      visible.low[i] = keys.begin;
      visible.high[i] = keys.end;
    }
  }
  return visible;
}

// The keys that two rows see which are any queries. `tree`: with kTree their words of the tree mask.
__device__ __forceinline__ VisibleKeys visible_keys_of_queries(const CallParams& p, const Lengths& n,
                                                               const int (&query)[2],
                                                               const unsigned long long (&tree)[2]) {
  VisibleKeys visible;
  visible.tokens = n.sk - n.sq;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const KeyRange keys = visible_keys(band_of(p), n, query[i]);
    visible.low[i] = keys.begin;
    visible.high[i] = keys.end;
    visible.tree[i] = tree[i];
  }
  return visible;
}

// The keys that all of the queries [first, last] see, for is_partial.
__device__ __forceinline__ KeyRange keys_seen_by_all(const CallParams& p, const Lengths& n, int first, int last) {
  KeyRange keys = keys_seen_by_all(band_of(p), n, first, last);
  if (kTree) keys.end = min(keys.end, n.sk - n.sq);  // the tokens have bits
  return keys;
}

// The tiles that are full for the rows of the strip that begins at `row`, whatever a dense bias is.
__device__ __forceinline__ KeyTiles full_tiles_of_strip(const CallParams& p, const Lengths& n, int row) {
  KeyTiles full = full_key_tiles(band_of(p), n, kBlockKeys, row, row + kStripRows - 1);
  if (kTree) full.end = min(full.end, max(n.sk - n.sq, 0) / kBlockKeys);
  return full;
}

// -inf for the scores that are hidden, of a Layout (fragment.cuh). `first`: the key of this thread's first column.
// `strip`: the rows are those of a strip, and but for chunks low[1] is low[0] + 8, so that both rows share comparisons.
template <bool strip, class Layout = ByRows, int count>
__device__ __forceinline__ void hide_keys(float (&S)[count], const VisibleKeys& visible, int first) {
  const int low0 = visible.low[0] - first;
  const int low[2] = {low0, strip && !kHasChunk ? low0 + 8 : visible.low[1] - first};
  const int high[2] = {visible.high[0] - first, visible.high[1] - first};
  const unsigned long long bits[2] = {kTree ? visible.bits(0, first) : 0, kTree ? visible.bits(1, first) : 0};
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int half = Layout::row(i);
    const int column = Layout::column(i);
    bool seen = column < high[half];
    if (kHasLeft) seen = seen && column >= low[half];
    if (kTree) seen = seen && (bits[half] >> column & 1);
    S[i] = seen ? S[i] : -infinity();
  }
}

// Zeros for the elements of hidden keys in words of two, in the order of packed scores of a strip. `first`: as above.
template <int count>
__device__ __forceinline__ void clear_pairs_of_hidden_keys(u32 (&words)[count], const VisibleKeys& visible, int first) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int half = i & 1;
    const int key = first + i / 2 * 8;
    if (!visible.sees(half, key)) words[i] &= 0xffff0000;
    if (!visible.sees(half, key + 1)) words[i] &= 0xffff;
  }
}

// The rows of a tile of S^T or dP^T that see this thread's keys r and r + 8, [begin[i], end[i]), relative to its first
// column.
struct VisibleRows {
  int begin[2], end[2];
};

// The rows that see the keys `key` and key + 8, in the tile of `rows` rows from `row` on.
template <int rows>
__device__ __forceinline__ VisibleRows visible_rows(const CallParams& p, const Lengths& n, int key, int row) {
  const int column = row + int(thread_column());
  const int offset = diagonal_of(band_of(p), n, 0);
  VisibleRows visible = {{-column, -column}, {rows, rows}};
  if (kHasRight) {
    visible.begin[0] = key - offset - p.window_right - column;
    visible.begin[1] = visible.begin[0] + 8;
  }
  if (kHasLeft) {
    visible.end[0] = key - offset + p.window_left + 1 - column;
    visible.end[1] = visible.end[0] + 8;
  }
  if (kHasChunk) {  // r and r + 8 may lie in two of them
    // The compiler would divide ahead of the steps, and keep what comes of it where registers are full.
    u32 now[1] = {u32(key)};
    register_fence(now);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowRange seeing = rows_seeing(band_of(p), n, int(now[0]) + 8 * i);
      visible.begin[i] = seeing.begin - column;
      visible.end[i] = seeing.end - column;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (key + 8 * i >= n.sk) visible.end[i] = 0, visible.begin[i] = rows;
  return visible;
}

// 0 where a row does not see a key, whatever was computed there.
template <int count>
__device__ __forceinline__ void hide_rows(float (&X)[count], const VisibleRows& visible) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int half = i >> 1 & 1;
    const int row = i / 4 * 8 + (i & 1);
    X[i] = row >= visible.begin[half] && row < visible.end[half] ? X[i] : 0;
  }
}
