#pragma once

#include "fulgur/attention.h"

namespace fulgur {

/// Tensors of hadamard().
struct HadamardArgs {
  /// f32, bf16, f16 or f64: (batch, seqlen, heads, dim), or pages, or (total, heads, dim).
  ConstTensor x{};
  Tensor y{};            ///< written: the shape of x, f32 or the dtype of x
  bool inverse = false;  ///< x is a result, and y becomes what it is of
};

/// Rotates rows so that no column is much larger than the others, for codes that share a
/// scale: y = H D x / sqrt(n), where H is the Hadamard matrix of order n and D a diagonal matrix of
/// fixed signs, of each n columns, n the largest power of two that divides dim and is at most 512.
/// Products of two rows are as before, and so are the scores of q and k that are both rotated. It
/// computes in f32 and rounds once. Of `options` it takes the threads, of `run` the stream. All
/// tensors are on one device; on cuda it only launches, and takes no f64. Throws Error:
/// kInvalidArgument, kUnsupported.
FULGUR_API void hadamard(const HadamardArgs& args, const Options& options = {},
                         const Run& run = {});

}  // namespace fulgur
