#pragma once

#include "base/check.h"
#include "call/kv_cache.h"
#include "call/problem.h"
#include "fulgur/append.h"

namespace fulgur {

/// A call of append whose shapes are checked, once for every device. Its arguments must outlive it.
struct AppendCall {
  /// The name of the tensor whose dtype, device and heads the other tensors must have.
  static constexpr const char* kLike = "k_cache";
  static constexpr int64_t kMaxDim = 512;

  const AppendArgs& args;
  Problem p{};  ///< of the caches as k and v, and of the rows of q
  KvCache tables{};
  DType rows = DType::kF32;  ///< of new rows and of q: that of caches that hold no codes
  bool packed_new = false;
  int64_t tokens = 0;  ///< rows of k_new, those after the last sequence included
  int64_t hq = 0;
  int64_t pairs = 0;        ///< of columns that are rotated
  bool advance = false;     ///< each query has a position of its own
  bool hadamard = false;    ///< new keys are rotated before they become codes (Options::hadamard)
  bool hadamard_q = false;  ///< and queries, which are attended with
  Layout k_new{}, v_new{}, q_out{};
};

/// The position of the first new token of each sequence.
inline const ConstTensor& first_positions(const AppendArgs& args) {
  return args.rows.rotary.rotary_seqlens.given() ? args.rows.rotary.rotary_seqlens
                                                 : args.rows.cache_seqlens;
}

/// Checks shapes, strides, dtypes and devices. Throws Error(kInvalidArgument). `hadamard`,
/// `hadamard_q`: as of AppendCall.
AppendCall checked_append(const AppendArgs& args, const Mask& mask, bool hadamard,
                          bool hadamard_q = false);

}  // namespace fulgur
