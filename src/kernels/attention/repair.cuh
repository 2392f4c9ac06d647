// Repair of rows that NaN or infinity in V has reached although the mask hides its key from them.
//
// P is 0 at a hidden key, but 0 * NaN is NaN, and one product serves 64 rows: what V holds at a key that the mask shows
// to some of them reaches all. It shows in every row of the product, so that each warp looks at eight of its rows as it
// stores them. When one is not finite, the warp computes its rows again from the definition, slowly, over the keys that
// each of them sees, unless V is finite at all hidden keys.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/output.cuh"
#include "attention/pages.cuh"
#include "device/score.cuh"

// Whether V is not finite at a key of the tiles that the strip's products touched and some of the warp's 16 rows may
// not see.
__device__ __forceinline__ bool hidden_poison(const AttentionParams& p, const Place& place, const Lengths& n, int row,
                                              const KeyTiles& touched) {
  const KeyTiles full = full_tiles_of_strip(p, n, place.row);
  const KeyRange seen = keys_seen_by_all(p, n, row, min(row + 16, n.sq) - 1);
  bool found = false;
#pragma unroll 1
  for (int tile = touched.begin; tile < touched.end; ++tile) {
    if (!kScoresHide && tile >= full.begin && tile < full.end) continue;
    const int end = min((tile + 1) * kBlockKeys, n.sk);
#pragma unroll 1
    for (int key = tile * kBlockKeys; key < end; ++key) {
      if (!kScoresHide && key >= seen.begin && key < seen.end) continue;
      const ElementV::Memory* v = key_row<ElementV>(p, p.v, place, n, key);
#pragma unroll 1
      for (int i = threadIdx.x % 32; i < p.dv; i += 32)
        found = found || !(fabsf(element_of<ElementV>(v, i)) < infinity());
    }
  }
  return __any_sync(0xffffffff, found);
}

// One row from the definition, with the shift and the sum that the products gave, which V does not touch. A lane holds
// every 32nd column.
__device__ __forceinline__ void compute_row(const AttentionParams& p, const Place& place, const Lengths& n, int row,
                                            float shift, float sum) {
  const u32 lane = threadIdx.x % 32;
  constexpr int kQuery = (kHeadDim + 31) / 32;
  constexpr int kOutput = (kValueDim + 31) / 32;
  float q[kQuery];
  float o[kOutput];
  const ElementQ::Memory* q_row = row_of<ElementQ>(p.q, place.batch, n.q_start + row, place.head);
#pragma unroll
  for (int i = 0; i < kQuery; ++i) q[i] = lane + 32 * i < p.d ? ElementQ::to_float(q_row[lane + 32 * i]) : 0;
#pragma unroll
  for (int i = 0; i < kOutput; ++i) o[i] = 0;
  const KeyRange keys = visible_keys(band_of(p), n, row);
  const ScoreHead head = score_head(p, n, place.batch, place.head);
  const float descale = kHasCodes ? product_descale(p, place.batch, place.head / p.group) : 1;
  const DropoutMask dropout = kDropout ? dropout_of(p) : DropoutMask{};
  const int tokens = n.sk - n.sq;
  const unsigned long long tree = kTree ? tree_word(p.tree_mask, p, n, place.batch, row) : 0;
  bool done = false;
#pragma unroll 1
  for (int key = keys.begin; key < keys.end && !done; ++key) {
    const ScoreContext at = score_context(head, row, diagonal_of(band_of(p), n, row), key);
    if (hides(p, at) || (kTree && key >= tokens && !(tree >> (key - tokens) & 1))) continue;
    const ElementK::Memory* k = key_row<ElementK>(p, p.k, place, n, key);
    const ElementV::Memory* v = key_row<ElementV>(p, p.v, place, n, key);
    float s = 0;
#pragma unroll
    for (int i = 0; i < kQuery; ++i) s += lane + 32 * i < p.d ? q[i] * element_of<ElementK>(k, lane + 32 * i) : 0;
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) s += __shfl_xor_sync(0xffffffff, s, bit);
    if (kHasCodes) s *= descale;
    if (score_mod_hides(p, at, s)) continue;
    float weight = exp2_fast(exponent(p, at, s, bias_of(p, at), shift));
    if (kDropout && !keeps(p, dropout, place.batch, place.head, row, key)) weight = 0;
    done = true;
#pragma unroll
    for (int i = 0; i < kOutput; ++i) {
      if (lane + 32 * i >= p.dv) continue;
      o[i] += weight * element_of<ElementV>(v, lane + 32 * i);
      done = done && o[i] != o[i];
    }
    done = __all_sync(0xffffffff, done);  // all columns are NaN, which further keys do not change
  }
  ElementO::Memory* out = output_row(p, place, n, row);
  const float scale =
      output_scale(p, place.head, sum, shift, value_descale(p, place.batch, place.head / p.group));
#pragma unroll
  for (int i = 0; i < kOutput; ++i) {
    if (lane + 32 * i < p.dv) out[lane + 32 * i] = from_f32<ElementO::kType>(o[i] * scale);
  }
}

// The 16 rows of a warp from `row` on, which it has stored, and whose products touched the key tiles `touched`; rows
// whose scores are NaN stay as they are. Part of the caller: a call would take the uniform registers of the main loop.
__device__ __forceinline__ void repair_rows(const AttentionParams& p, const Place& place, const Lengths& n, int row,
                                            const KeyTiles& touched, const Rows& rows) {
  if (!hidden_poison(p, place, n, row, touched)) return;
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < 16 && row + i < n.sq; ++i) {
    const float shift = __shfl_sync(0xffffffff, i < 8 ? rows.shift[0] : rows.shift[1], 4 * (i % 8));
    const float sum = __shfl_sync(0xffffffff, i < 8 ? rows.sum[0] : rows.sum[1], 4 * (i % 8));
    if (sum < infinity()) compute_row(p, place, n, row + i, shift == infinity() ? 0 : shift, sum);
  }
}
