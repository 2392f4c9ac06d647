#pragma once

#include "fulgur/attention.h"
#include "fulgur/export.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// New keys and values, the caches that they are written to, and what turns them.
///
/// Token i of sequence b goes to row cache_seqlens[b] + i of its cache. The attention that follows
/// has seqused_k = cache_seqlens + the new rows, and reads what was stored, after rounding: the
/// bits of a step are those of all steps to come.
///
/// Lengths (cu_seqlens_k_new, cache_seqlens, rotary_seqlens, cu_seqlens_q) lie on the device of the
/// caches or in host memory, where each call reads and checks them; they may change once it has
/// returned, and a graph keeps those of its capture.
struct AppendArgs {
  /// Written in place: of K and V (batch, sk, hk, dim) or (pages, page, hk, dim), as the k and v of
  /// ForwardArgs. Rows that take no token keep their bits.
  Tensor k_cache{}, v_cache{};
  /// The new rows (batch, s_new, hk, dim), or packed (total, hk, dim) with cu_seqlens_k_new, in the
  /// dtype of the caches: f32, bf16, f16 or f64. Packed rows of no sequence are not
  /// looked at.
  ConstTensor k_new{}, v_new{};
  ConstTensor cu_seqlens_k_new{};  ///< i32 (batch + 1), as cu_seqlens_k of ForwardArgs
  /// i32 (batch): the old lengths, counted from the first row of each sequence, left padding
  /// included.
  ConstTensor cache_seqlens{};
  /// As in ForwardArgs. Ids are looked at where new rows go; no row may take two tokens.
  ConstTensor page_table{}, page_indptr{}, cache_batch_idx{};

  // Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34) of the new keys, and of queries
  // with them; values never turn.

  /// (positions, rotary_dim / 2) in the dtype of the caches or f32, both or none: row n turns a
  /// token at position n. Of each row the first rotary_dim columns turn; it is even and at most d.
  /// Computed in f32 (f64 for f64) and rounded once.
  ConstTensor cos{}, sin{};
  /// Which columns are a pair: (2 i, 2 i + 1), or else (i, i + rotary_dim / 2).
  bool interleaved = false;
  /// i32 (batch): the position of each sequence's first new token, where it is not cache_seqlens.
  ConstTensor rotary_seqlens{};
  /// Queries to turn: (batch, sq, hq, d), or packed (total_q, hq, d) with cu_seqlens_q, and where
  /// they go, which may be q itself. Query i of a sequence turns to the position of its first new
  /// token + i under a mask that hides any keys (causal, windowed, chunked), else all of them to
  /// that of the first: FlashAttention's rule. Packed rows of no sequence are not
  /// written.
  ConstTensor q{};
  Tensor q_out{};
  ConstTensor cu_seqlens_q{};  ///< i32 (batch + 1)
};

/// Writes new rows into caches of K and V. Of `options` it takes the mask, the threads and the name
/// of an engine, which must be one of the tensors' device; of `run` the stream. Throws
/// Error(kInvalidArgument) before anything is written.
///
/// On cuda it only launches (bf16, f16 and f32; kUnsupported for f64), and may be captured into a
/// graph once a call of that dtype, and with lengths in host memory if it has such, has been made
/// on the device. Lengths and tables there are read by the kernel and not checked: a token whose
/// row, page or position does not exist is not written, and where two tokens have one row, it holds
/// any of both.
FULGUR_API void append(const AppendArgs& args, const Options& options = {}, const Run& run = {});

}  // namespace fulgur
