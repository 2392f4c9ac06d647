// What becomes of a strip's products between Q K^T and the softmax: descales, softcap, ALiBi, score_mod and bias, then
// -inf for the scores of masked keys; and which entries of P dropout keeps.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "sm90/forward/bias_words.cuh"
#include "sm90/forward/maps/mask_words.cuh"
#include "sm90/forward/valid_rows.cuh"

// Softcap, ALiBi, score_mod and the bias. `view`: where the View of the strip lies. `key`: that of this thread's first
// column. `bias`: the tile of a dense bias in shared memory; kBiasInRegisters: `words` of it.
__device__ __forceinline__ void transform_scores(const ForwardParams& p, float (&S)[kBlockKeys / 2], u32 view,
                                                 const KeyWalk& walk, int key, u32 bias, const u32 (&words)[kPWords]) {
  if constexpr (kBiasByProducts || (kMapsTiles && kScoreMode == 0 && kBiasTile == 0)) return;
  ScoreHead head = {};
  int row = int(warp_row() + thread_row());
  const int diagonal = walk.diagonal + row;
  if (kScoreReadsHead) {
    const Place place = load_place(view);
    head = score_head(p, lengths_of(p, place.batch), place.batch, place.head);
    row += place.row;
  }
  const ScoreContext at = score_context(head, row, diagonal, key);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 8) {  // 16 keys
    float of_keys[8] = {};
    if constexpr (kBiasInRegisters) unpack_bias(words + i / 2, of_keys);
    else if constexpr (kBiasTile != 0) load_bias_of_strip(bias, 2 * i, of_keys);
    if constexpr (kBiasTile != 0 && kBiasRows != 0 && (kPacked || kSeqUsedQ))
      clear_bias_after_sequence(p, walk, view, of_keys);
#pragma unroll
    for (int j = i; j < i + 8; ++j)
      S[j] =
          score<!kMapsTiles, !kBiasInRegisters>(p, at.moved(j & 2 ? 8 : 0, j / 4 * 8 + (j & 1)), S[j], of_keys[j - i]);
  }
}

// -inf for the scores that mask_mod hides.
__device__ __forceinline__ void hide_by_mask_mod(const ForwardParams& p, float (&S)[kBlockKeys / 2], u32 view,
                                                 int diagonal, int key) {
  const Place place = load_place(view);
  const ScoreHead head = score_head(p, lengths_of(p, place.batch), place.batch, place.head);
  const int row = int(warp_row() + thread_row());
  const ScoreContext at = score_context(head, row + place.row, row + diagonal, key);
#pragma unroll
  for (int j = 0; j < kBlockKeys / 2; ++j)
    if (mask_mod_hides(p, at.moved(j & 2 ? 8 : 0, j / 4 * 8 + (j & 1)))) S[j] = -infinity();
}

// The scores of a strip, tile after tile of its walk. `key`: first_key() of the tile.
struct StripScores {
  const ForwardParams& p;
  u32 view;
  const KeyWalk& walk;
  const ProductScale& scale;
  const VisibleKeys& visible;

  // The key of this thread's first column.
  __device__ __forceinline__ int first_key() const { return walk.tile * kBlockKeys + int(thread_column()); }

  // Products become scores. `bias`, `words`: as in transform_scores().
  __device__ __forceinline__ void transform(float (&S)[kBlockKeys / 2], int key, u32 bias,
                                            const u32 (&words)[kPWords]) const {
    if (kHasCodes && (kScoreMode != 0 || scale.of_products != 1)) {
#pragma unroll
      for (float& s : S) s *= scale.of_products;
    }
    transform_scores(p, S, view, walk, key, bias, words);
  }

  // -inf for the keys that the bounds of the call, or mask_mod, hide. `rightmost`: the tile is the strip's first one.
  // `masked_by`: what hides keys of it, kMapsTiles.
  __device__ __forceinline__ void mask(float (&S)[kBlockKeys / 2], int key, bool rightmost, int masked_by) const {
    const bool masked = kMapsTiles ? masked_by : walk.masked(band_of(p), rightmost);
    if (masked && kMaskedTilesApart) {  // of few tiles: the loop has no registers for what they need
      const int diagonal = load_shared_struct_uniform<KeyWalk>(view).diagonal;
      hide_keys<true>(S, visible_keys_of_strip(p, walk.sk, diagonal), key);
    } else if (masked) {
      hide_keys<true>(S, visible, key);
    }
    if constexpr (kMapsTiles && !kMaskBits) {
      // Without bounds the end of a sequence hides keys, in few tiles: a test of `masked` is enough.
      if (kHasLeft || kHasRight ? masked_by & kMaskedByMask : masked)
        hide_by_mask_mod(p, S, view, walk.diagonal, key);
    }
  }

  // -inf for the keys that a bool mask of bits, or the bounds, hide.
  __device__ __forceinline__ void mask(float (&S)[kBlockKeys / 2], MaskWords& words, int masked_by) const {
    if constexpr (kBiasRows && kSeqUsedQ) words.show_to_rows_from(valid_rows(p, walk, view));
    hide_by_bits(S, words.word, -infinity());
    if (masked_by & kMaskedByBounds) hide_keys<true>(S, visible, first_key());
  }
};

// Dropout of a tile of P, decided while its products run. `dropout_key`: where the key of Philox lies in shared memory.
// `view`: where the View of the strip does.
__device__ __forceinline__ Kept<kBlockKeys> kept_of_tile(const ForwardParams& p, u32 dropout_key, u32 view,
                                                         int key_tile) {
  const Place at = load_place(view);
  return kept_scores<kBlockKeys>(p, dropout_key, dropout_head(p, at.batch, at.head), at.row + warp_row(),
                                 key_tile * kBlockKeys);
}
