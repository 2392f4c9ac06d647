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
  /// Checks that no argument is given twice, the shapes of the new rows, and the lengths that the
  /// host can read. Throws Error(kInvalidArgument).
  AppendThenAttend(const ForwardArgs& args, const Mask& mask, bool hadamard);
  AppendThenAttend(const AppendThenAttend&) = delete;
  AppendThenAttend& operator=(const AppendThenAttend&) = delete;

  const AppendCall& call() const { return call_; }
  const AppendArgs& rows() const { return rows_; }
  /// The arguments of the attention. k and v are the caches. seqused_k has the lengths after the
  /// append if the host can read them; if not, it is a tensor without data on the device of
  /// cache_seqlens.
  const ForwardArgs& attention() const { return attention_; }

  bool rotates() const { return rows_.q.given(); }
  /// Sets the memory to which append writes the rotated queries, and from which attention reads
  /// them.
  void rotate_into(void* memory);
  /// Sets the lengths after the append, in memory of the device.
  void attend_to(const int32_t* lengths);

 private:
  void set_lengths();

  AppendArgs rows_;
  AppendCall call_;
  ForwardArgs attention_;
  std::vector<int32_t> lengths_;
};

/// The new rows as a problem describes them.
Problem::Append append_of(const AppendThenAttend& appending);

/// The problem of the attention that follows.
Problem without_append(Problem problem);

/// The problem with its queries in memory of the call, to which they are rotated first.
Problem with_rotated_queries(Problem problem);
/// The bytes of that memory, 0 where no queries are rotated, and the queries as a tensor in it.
int64_t rotated_bytes(const Problem& problem);
Tensor rotated_like(const ConstTensor& q, void* memory);

}  // namespace fulgur
