#pragma once

#include <cstdint>
#include <vector>

#include "call/append_call.h"
#include "call/problem.h"
#include "fulgur/append.h"
#include "fulgur/attention.h"

namespace fulgur {

/// A forward call that brings new rows (ForwardArgs::append) in two: what is appended, and the
/// attention that follows.
class AppendThenAttend {
 public:
  /// Checks that each thing is said once, the shapes of what is appended, and the lengths that the
  /// host can read. Throws Error(kInvalidArgument).
  AppendThenAttend(const ForwardArgs& args, const Mask& mask, bool hadamard);
  AppendThenAttend(const AppendThenAttend&) = delete;
  AppendThenAttend& operator=(const AppendThenAttend&) = delete;

  const AppendCall& call() const { return call_; }
  const AppendArgs& rows() const { return rows_; }
  /// Its k and v are the caches. Its seqused_k are the lengths attended where the host can read
  /// them, else a tensor of their shape where cache_seqlens lies.
  const ForwardArgs& attention() const { return attention_; }

  bool rotates() const { return rows_.q.given(); }
  /// The queries that are rotated, in memory of the call: what append writes, and attention reads.
  void rotate_into(void* memory);
  /// The lengths attended, in memory of the device.
  void attend_to(const int32_t* lengths);

 private:
  void set_lengths();

  AppendArgs rows_;
  AppendCall call_;
  ForwardArgs attention_;
  std::vector<int32_t> lengths_;
};

/// What a problem says of them.
Problem::Append append_of(const AppendThenAttend& appending);

/// The problem of the attention that follows.
Problem without_append(Problem problem);

/// A problem whose queries are first rotated into memory of the call.
Problem with_rotated_queries(Problem problem);
/// The bytes of that memory, 0 where none are rotated, and the queries there.
int64_t rotated_bytes(const Problem& problem);
Tensor rotated_like(const ConstTensor& q, void* memory);

}  // namespace fulgur
