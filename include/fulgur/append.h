#pragma once

#include "fulgur/attention.h"
#include "fulgur/cache.h"
#include "fulgur/export.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// Tensors of append(): new rows, where the caches keep their sequences, and queries to rotate.
struct AppendArgs {
  NewRows rows{};
  /// Ids are looked at where new rows go; no row may take two tokens.
  KvCache cache{};
  /// Queries to rotate: (batch, sq, hq, d), or packed (total_q, hq, d) with cu_seqlens_q, and where
  /// they go, which may be q itself. Query i of a sequence is rotated to the position of its first
  /// new token + i under a mask that hides any keys (causal, windowed, chunked), else all of them
  /// to that of the first: FlashAttention's rule. Packed rows of no sequence are not written.
  ConstTensor q{};
  Tensor q_out{};
  ConstTensor cu_seqlens_q{};  ///< i32 (batch + 1), on the device of the caches or in host memory
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
