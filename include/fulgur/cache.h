#pragma once

#include "fulgur/tensor.h"

namespace fulgur {

/// Where the sequences of caches of K and V lie, and where their keys begin. What the tensors hold
/// may change from call to call of a plan. q may be packed by cu_seqlens_q alone, K and V then have
/// four dimensions.
struct KvCache {
  /// Paged KV: K is (pages, page, hk, d), V (pages, page, hk, dv), and key j of sequence b is row j
  /// % page of page page_table[b, j / page]. i32 (batch, max_pages) with any stride between rows;
  /// ids after those that seqused_k[b] keys need are not looked at. seqused_k must be given,
  /// cu_seqlens_k must not.
  ConstTensor page_table{};
  /// i32 (batch + 1), non-decreasing, first >= 0, last <= the number of ids: page_table is then i32
  /// (ids), and the pages of sequence b are page_table[page_indptr[b]] .. page_table[page_indptr[b
  /// + 1] - 1].
  ConstTensor page_indptr{};
  /// i32 (batch): sequence b is row cache_batch_idx[b] of K and V, which may have more or fewer
  /// rows than q has sequences. Not looked at where a sequence has no keys. Not with page_table.
  ConstTensor cache_batch_idx{};
  /// i32 (batch), on the device of q or in host memory: the first leftpad_k[b] keys of sequence b
  /// do not exist, so that those in [leftpad_k[b], seqused_k[b]) do. Masks and ALiBi know of no
  /// others. append() does not look at it, as cache_seqlens counts them.
  ConstTensor leftpad_k{};
};

/// What codes of low-bit formats (append.h) are multiplied by: an element of k is (code -
/// k_zero_point) * k_descale, in f32; not given: 0 and 1. f32 or f16, any strides, of the shape
///   (1)                       for the whole tensor,
///   (batch or 1, hk or 1)     for each sequence and kv head, of q likewise, or
///   that of q, k or v but for its last dimension, which is a number of groups: of a row's
///   columns, side by side, each group shares a scale. One group, or groups of a multiple of 16
///   columns; scales lie in pages where k and v do.
/// Not with ggml's formats, whose blocks have scales.
struct Descales {
  ConstTensor q_descale{}, k_descale{}, v_descale{};
  ConstTensor k_zero_point{}, v_zero_point{};  ///< of int8 and int4, in the shape of the descale
  /// f32 (batch or 1, hk, d): what each column of k has besides: (code - k_zero_point) * k_descale
  /// + k_mean, of any format. The keys of a sequence have one, and scores less q times it the same
  /// softmax, so that it is added to lse alone; but to scores with softcap, score_mod or sinks. Not
  /// with both softcap and ALiBi.
  ConstTensor k_mean{};
};

/// Sequences that begin with the same keys and values, in the same pages or in others of the same
/// content: those are read through the pages of the first sequence of a group, once, where that
/// pays. Says where keys are read, not what is computed. With page_table alone. Both or none, on
/// the device of q or in host memory.
struct SharedPrefix {
  /// i32 (groups + 1), non-decreasing, first 0, last = batch: group g is the sequences
  /// prefix_groups[g] .. prefix_groups[g+1]-1.
  ConstTensor prefix_groups{};
  /// i32 (groups): so many keys, no more than each sequence of the group has in front of its
  /// queries' own, seqused_k[b] less the queries of b.
  ConstTensor prefix_lens{};
};

/// Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34) of new keys, and of queries with
/// them; values are never rotated.
struct Rotary {
  /// (positions, rotary_dim / 2) in the dtype of the caches or f32, both or none: row n rotates a
  /// token at position n. Of each row the first rotary_dim columns are rotated; it is even and at
  /// most d. Computed in f32 (f64 for f64) and rounded once.
  ConstTensor cos{}, sin{};
  /// i32 (batch), on the device of the caches or in host memory: the position of each sequence's
  /// first new token, where it is not cache_seqlens.
  ConstTensor rotary_seqlens{};
  /// Which columns are a pair: (2 i, 2 i + 1), or else (i, i + rotary_dim / 2).
  bool interleaved = false;
};

/// New keys and values, the caches that they are written to, and what rotates them.
///
/// Token i of sequence b goes to row cache_seqlens[b] + i of its cache. The attention that follows
/// has seqused_k = cache_seqlens + the new rows, and reads what was stored, after rounding: the
/// bits of a step are those of all steps to come.
///
/// Lengths (cu_seqlens_k_new, cache_seqlens, rotary_seqlens) lie on the device of the caches or in
/// host memory, where each call reads and checks them; they may change once it has returned, and a
/// graph keeps those of its capture.
struct NewRows {
  /// Written in place: of K and V (batch, sk, hk, dim) or (pages, page, hk, dim), as the k and v of
  /// ForwardArgs. Rows that take no token keep their bits.
  Tensor k_cache{}, v_cache{};
  /// The new rows (batch, s_new, hk, dim), or packed (total, hk, dim) with cu_seqlens_k_new, in the
  /// dtype of the caches: f32, bf16, f16 or f64, any of which a cache of codes (append.h) takes.
  /// Packed rows of no sequence are not looked at.
  ConstTensor k_new{}, v_new{};
  ConstTensor cu_seqlens_k_new{};  ///< i32 (batch + 1), as cu_seqlens_k of VarLen
  /// i32 (batch): the old lengths, counted from the first row of each sequence, left padding
  /// included.
  ConstTensor cache_seqlens{};
  Rotary rotary{};
  /// Of caches of codes, as k_descale of Descales. New rows become codes as quantize() makes them;
  /// those that lie as the rows of the cache are written with the codes, and the others read.
  Tensor k_cache_descale{}, v_cache_descale{};
  Tensor k_cache_zero_point{}, v_cache_zero_point{};
  ConstTensor k_cache_mean{};  ///< as k_mean of Descales: new keys are codes of what is beyond it
};

}  // namespace fulgur
