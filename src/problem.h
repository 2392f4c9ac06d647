#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "fulgur/attention.h"

namespace fulgur {

/// One sequence: its first row in q and in k (0 unless packed) and its lengths.
struct Sequence {
  int64_t q_begin = 0, k_begin = 0, sq = 0, sk = 0;
  bool operator==(const Sequence&) const = default;
};

enum class Pass : uint8_t { kForward, kBackward };

/// A validated call: everything that is computed, nothing about how. Immutable once made.
struct Problem {
  Pass pass = Pass::kForward;
  DType dtype = DType::kF32;
  Device device;
  int64_t batch = 0, sq = 0, sk = 0;  ///< sq, sk: the longest sequence
  int64_t hq = 0, hk = 0, d = 0, dv = 0;
  bool packed = false;
  int64_t total_q = 0, total_k = 0;  ///< rows of q and k in all, padding included

  Layout q, k, v, out, dout, dq, dk, dv_grad;
  Layout lse;  ///< row stride of (batch, hq, sq) / (hq, total_q)
  bool want_lse = false;

  Mask mask;
  double scale = 1, softcap = 0;
  Dropout dropout;
  Tensor alibi_slopes;                           ///< not given, (hq) or (batch, hq)
  Tensor cu_seqlens_q, cu_seqlens_k, seqused_k;  ///< as passed: engines on a device read them there
  std::vector<int32_t> cu_q, cu_k, used_k;       ///< their values when they are on the CPU
  bool deterministic = false, invariant = false;
  int threads = 0;
  std::string engine;
  void* stream = nullptr;

  int64_t group() const { return hq / hk; }
  /// Sequence b; needs the lengths on the CPU.
  Sequence sequence(int64_t b) const;
  /// First row and count of the packed rows behind the last sequence, or of no rows.
  Sequence padding() const;
  /// Slope of head h in sequence b, 0 without ALiBi. CPU tensors only.
  double slope(int64_t b, int64_t h) const;
};

/// Checks all that a user passes, once for every engine; data pointers of the big tensors aside.
/// Throws Error(kInvalidArgument) that names the argument, what it got and what it wants.
Problem make_problem(const ForwardArgs& args, const Options& options);
Problem make_problem(const BackwardArgs& args, const Options& options);

/// Checks the pointers of a call, and that its tensors are those `planned` was made for.
void check_run(const ForwardArgs& planned, const ForwardArgs& args);
void check_run(const BackwardArgs& planned, const BackwardArgs& args);

}  // namespace fulgur
