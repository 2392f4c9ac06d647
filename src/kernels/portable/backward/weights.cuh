// P of the portable backward kernels, in fragments whose rows are keys and whose columns are rows of Q.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "backward/layout.cuh"
#include "device/score.cuh"

// For 16 keys and `rows` rows of a warp in a step: which rows see the keys, which entries dropout keeps, and
// derivatives of scores.
template <int rows>
struct TileWeights {
  VisibleRows visible;
  Kept<rows> kept;
  float slopes[kHasScoreSlope ? rows / 2 : 1];
};

// P^T of the 16 keys from `first` on and the rows from `row` on, of a q head of a sequence. S^T in S becomes P before
// dropout; P is after dropout. `masked`: the mask may hide some of them. `shifts`: where shift of the rows lies in
// shared memory; `dropout_key`: where the key of Philox does.
template <int rows>
__device__ __forceinline__ void weights_of_tile(const BackwardParams& p, u32 dropout_key, const Lengths& n, int batch,
                                                int head, bool masked, u32 shifts, int row, int first,
                                                float (&S)[rows / 2], u32 (&P)[words_of<ElementP>(rows / 2)],
                                                TileWeights<rows>& tile) {
  const int query = row + int(thread_column());
  const int key = first + int(thread_row());
  const ScoreContext at = score_context(score_head(p, n, batch, head), query, diagonal_of(band_of(p), n, query), key);
  shifts += 4 * thread_column();
  if (kDropout) tile.kept = kept_transposed<rows>(p, dropout_key, dropout_head(p, batch, head), row, first);
#pragma unroll
  for (int j = 0; j < rows / 8; ++j) {
    float shift[2];
    load_shared_pair(shifts + 32 * j, shift[0], shift[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = S[4 * j + i];
      const ScoreContext entry = at.moved(8 * j + (i & 1), i & 2 ? 8 : 0);
      if (kHasScoreSlope) tile.slopes[4 * j + i] = score_slope(p, entry, x);
      x = exp2_fast(exponent_up_to<!kMapsTiles>(p, entry, x, bias_of(p, entry), shift[i & 1], p.p_log2));
    }
  }
  if (masked) {
    tile.visible = visible_rows<rows>(p, n, key, row);
    hide_rows(S, tile.visible);
    if constexpr (kMapsTiles) {
#pragma unroll
      for (int i = 0; i < rows / 2; ++i)
        if (mask_mod_hides(p, at.moved(i / 4 * 8 + (i & 1), i & 2 ? 8 : 0))) S[i] = 0;
    }
  }
  pack_words<ElementP>(S, P);
  if (kDropout) tile.kept.template drop_words<ElementP>(P);
}
