#pragma once

#include <span>

#include "fulgur/attention.h"
#include "fulgur/export.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// Attention over a part of the keys: out [b, sq, h, dv] and lse [b, h, sq] (packed [total, h, dv]
/// and [h, total]).
struct Partial {
  ConstTensor out{}, lse{};
};

/// Where the combination goes.
struct Merged {
  Tensor out{}, lse{};
};

/// Combines attention over disjoint sets of keys into attention over all of them
/// (FlashAttention-3's split-KV combine): lse = log sum_i exp(lse_i), out = sum_i exp(lse_i - lse)
/// out_i. Parts with lse = -inf count nothing; where all do, out = 0 and lse = -inf. Parts and
/// result share a shape and a device; out may have any float dtype in each, lse is f32 (or f64).
/// `lse` may be not given. Sinks belong to one of the parts. A result may be the very tensor of a
/// part. Throws Error(kInvalidArgument).
///
/// It uses only the stream of `run`. On cuda it only launches, after a first call like that of
/// append(), and takes at most 64 parts, without f64 (kUnsupported).
FULGUR_API void merge(std::span<const Partial> parts, const Merged& result, const Run& run = {});

}  // namespace fulgur
