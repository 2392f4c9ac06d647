// Sums of dS for the gradient of a dense bias, in fragments (attention/fragment.cuh) whose rows are queries: the score
// tiles that a CTA sums for a tile of dbias of kBlockRows queries x kBlockKeys keys, their terms, and the stores of
// sums. The order of each sum depends only on sizes, so that the same inputs give the same bits.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "backward/params.h"
#include "device/score.cuh"

// Iterates over the tiles of dbias of a CTA and over the score tiles that are summed in each. The producer and the
// consumers iterate alike.
struct TileIterator {
  const BackwardParams& p;
  const BiasSums& s;
  int batch, head, row_tile, key_tile;  // of dbias
  int key_end;                          // after the last key tile of this work tile
  long long work;

  __device__ __forceinline__ explicit TileIterator(const BackwardParams& p) : p(p), s(p.bias_sums), work(blockIdx.x) {}

  __device__ __forceinline__ bool more() {
    if (work >= s.work_tiles) return false;
    long long rest = work;
    const int chunk = int(rest % s.key_chunks);
    rest /= s.key_chunks;
    row_tile = int(rest % s.row_tiles);
    rest /= s.row_tiles;
    head = int(rest % s.heads);
    batch = int(rest / s.heads);
    key_tile = chunk * s.chunk_tiles;
    key_end = min(key_tile + s.chunk_tiles, s.key_tiles);
    work += gridDim.x;
    return true;
  }

  // Calls use(batch, head, row, n) for each score tile that is summed in the current tile of dbias and has rows that
  // see some of its keys.
  template <class Use>
  __device__ __forceinline__ void for_each_score_tile(Use use) const {
    const int batches = s.of_batch ? batch + 1 : p.batch;
    const int heads = s.of_heads ? head + 1 : p.hq;
#pragma unroll 1
    for (int b = s.of_batch ? batch : 0; b < batches; ++b) {
      const Lengths n = lengths_of(p, b);
      const int row_end = s.of_rows ? min((row_tile + 1) * kBlockRows, n.sq) : n.sq;
#pragma unroll 1
      for (int h = s.of_heads ? head : 0; h < heads; ++h)
#pragma unroll 1
        for (int row = s.of_rows ? row_tile * kBlockRows : 0; row < row_end; row += kBlockRows) {
          const KeyTiles seen = key_tiles(band_of(p), n, kBlockKeys, row, min(row + kBlockRows, n.sq) - 1);
          if (key_tile >= seen.begin && key_tile < seen.end) use(b, h, row, n);
        }
    }
  }
};

// Adds dS of a strip to the sums, from S in X and dP in Y. `row`: the strip's first row. load_bias(at, column, bias)
// loads the bias of 16 columns from `column` on, where `at` is the place of the thread's first score.
template <class LoadBias>
__device__ __forceinline__ void add_gradients(const BackwardParams& p, float (&sums)[kBlockKeys / 2],
                                              const float (&X)[kBlockKeys / 2], const float (&Y)[kBlockKeys / 2],
                                              int batch, int head, int row, int first_key, const Lengths& n,
                                              const Kept<kBlockKeys>& kept, const LoadBias& load_bias) {
  const ScoreHead of_head = kScoreReadsHead ? score_head(p, n, batch, head) : ScoreHead{};
  const int query = row + int(warp_row() + thread_row());
  const int diagonal = diagonal_of(band_of(p), n, query);
  const int key = first_key + int(thread_column());
  const long long statistics = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq) + query;
  VisibleKeys visible = visible_keys_of_strip(p, n.sk, diagonal_of(band_of(p), n, row));
  float shift[2] = {};
  float delta[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (query + 8 * i >= n.sq) {
      visible.high[i] = visible.low[i];
      continue;
    }
    shift[i] = p.shift[statistics + 8 * i];
    delta[i] = p.delta[statistics + 8 * i];
  }
  const ScoreContext at = score_context(of_head, query, diagonal, key);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 8) {  // 16 keys
    float of_keys[8];
    load_bias(at, 2 * i, of_keys);
#pragma unroll
    for (int j = i; j < i + 8; ++j) {
      const int half = j >> 1 & 1;
      const int column = j / 4 * 8 + (j & 1);
      const ScoreContext entry = at.moved(8 * half, column);
      const bool seen = key + column >= visible.low[half] && key + column < visible.high[half] &&
                        !(of_keys[j - i] < float(kHidingBias)) && !mods_hide(p, entry, X[j]);
      const float probability = exp2_fast(exponent_up_to(p, entry, X[j], of_keys[j - i], shift[half], p.p_log2));
      const bool keeps = !kDropout || (kept.pair(j / 2) >> (j % 2 * 16) & 1);
      const float dp = kDropout ? (keeps ? Y[j] * p.keep_scale : 0) : Y[j];
      sums[j] += seen ? probability * (dp + delta[half]) : 0;
    }
  }
}

// Stores a complete element of dbias.
__device__ __forceinline__ void store_sum(const BackwardParams& p, const TileIterator& it, int query, int key,
                                          float sum) {
  const BiasSums& s = p.bias_sums;
  if (query >= s.rows || key >= s.keys) return;
  const long long at = it.batch * s.batch_stride + it.head * s.head_stride + query * s.row_stride +
                       key * s.key_stride;
  sum *= p.p_scale;
  if (s.type == kF32) static_cast<float*>(s.data)[at] = sum;
  else static_cast<unsigned short*>(s.data)[at] = s.type == kBF16 ? from_f32<kBF16>(sum) : from_f32<kF16>(sum);
}

// Stores the sums of a tile, after adding those of all queries, or of all keys, that belong to the same element.
// `scratch`: a row of floats for each of `warps` warps; four warps have a strip. Meet::strip() is the strip of a
// thread, Meet::thread() its number among the threads of all strips, for which meet() is a barrier.
template <int warps, class Meet>
__device__ __forceinline__ void store_sums(const BackwardParams& p, const TileIterator& it, int key_tile,
                                           float (&sums)[kBlockKeys / 2], u32 scratch, const Meet& meet) {
  const BiasSums& s = p.bias_sums;
  const int query = it.row_tile * kBlockRows + int(Meet::strip() * 64 + warp_row() + thread_row());
  const int key = key_tile * kBlockKeys + int(thread_column());
  if (s.of_keys && s.of_rows) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i)
      store_sum(p, it, query + (i & 2 ? 8 : 0), key + i / 4 * 8 + (i & 1), sums[i]);
    return;
  }
  if (!s.of_keys) {  // sums of a row go to its first two elements
#pragma unroll
    for (int i = 4; i < kBlockKeys / 2; ++i) sums[i % 4] += sums[i];
    sums[0] = quad_sum(sums[0] + sums[1]);
    sums[1] = quad_sum(sums[2] + sums[3]);
    if (s.of_rows) {
      if (threadIdx.x % 4 == 0) {
        store_sum(p, it, query, 0, sums[0]);
        store_sum(p, it, query + 8, 0, sums[1]);
      }
      return;
    }
  }
  // Sums over the rows of a warp, then over warps.
  const int count = s.of_keys ? kBlockKeys : 1;
  const u32 warp = Meet::strip() * 4 + threadIdx.x % 128 / 32;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 4)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!s.of_keys && i + j > 0) continue;
      float sum = s.of_keys ? sums[i + j] + sums[i + j + 2] : sums[0] + sums[1];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
      if (threadIdx.x % 32 < (s.of_keys ? 4 : 1))
        store_shared(scratch + 4 * (warp * kBlockKeys + i / 4 * 8 + int(thread_column()) + j), __float_as_int(sum));
    }
  meet();
  const int thread = Meet::thread();
  if (thread < count) {
    float sum = 0;
    for (int i = 0; i < warps; ++i) sum += __int_as_float(load_shared(scratch + 4 * (i * kBlockKeys + thread)));
    store_sum(p, it, 0, s.of_keys ? key_tile * kBlockKeys + thread : 0, sum);
  }
  meet();
}
