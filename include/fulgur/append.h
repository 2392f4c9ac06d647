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

/// Low-bit formats, which k and v of forward() may have, and whose codes stand for these numbers:
///
///   e4m3, e5m2      (torch.float8_e4m3fn, float8_e5m2): code * scale
///   int8, int4      two's complement: (code - zero point) * scale. Two int4 lie in a byte, the
///                   first in its lower half: dims are even
///   q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl
///                   ggml's blocks of 32 columns, which begin with a scale in f16
///
/// Scales lie in tensors of their own (Descales) or in blocks.
struct QuantizeArgs {
  /// f32, bf16, f16 or f64: (batch, seqlen, heads, dim), or pages, or (total, heads, dim).
  ConstTensor x{};
  Tensor codes{};  ///< written: the shape of x, its dtype is the format
  /// Written, or read: f32 or f16, of the shapes of Descales, where (total, heads, dim) is one
  /// sequence. Without: x itself is rounded to codes. Not of ggml's formats.
  Tensor scale{};
  Tensor zero_point{};        ///< likewise, of int8 and int4 with a scale; without: 0
  bool static_scale = false;  ///< scale and zero_point are read: codes of numbers to come have them
  /// f32 (batch, heads, dim), packed (1, heads, dim), or read also (1, heads, dim): x less it
  /// becomes codes. Written: the mean of the rows of x, of those numbers that are finite.
  Tensor mean{};
  bool static_mean = false;  ///< mean is read
};

/// Rounds numbers to codes, by scales that are as small as the numbers that share one let them be
/// (docs/contract.md). Of `options` it takes the threads, of `run` the stream. All tensors are on
/// one device; on cuda it only launches, as append() does, and takes no f64. Throws Error:
/// kInvalidArgument, kUnsupported.
FULGUR_API void quantize(const QuantizeArgs& args, const Options& options = {},
                         const Run& run = {});

/// Tensors of dequantize().
struct DequantizeArgs {
  ConstTensor codes{}, scale{}, zero_point{};  ///< as of QuantizeArgs
  Tensor x{};                                  ///< written
  ConstTensor mean{};                          ///< as of QuantizeArgs
};

/// The numbers that codes stand for, rounded to the dtype of x; likewise.
FULGUR_API void dequantize(const DequantizeArgs& args, const Options& options = {},
                           const Run& run = {});

/// Whether the blocks of a format have their scales, as ggml's.
FULGUR_API bool has_scales(DType format);
/// The format of this name: "q8_0"; throws Error(kInvalidArgument) where there is none.
FULGUR_API DType format_named(const char* name);

}  // namespace fulgur
