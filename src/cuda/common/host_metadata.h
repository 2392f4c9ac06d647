#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "call/append_call.h"
#include "call/problem.h"
#include "cuda/device/gpu.h"
#include "engine/engine.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Bytes that they take in the workspace of a problem's runs, 0 where there are none.
int64_t host_metadata_bytes(const Problem& problem);

/// The lengths, slopes and sinks of a problem that lie in the host's memory. A run reads them,
/// checks the lengths, and launches them to its workspace, where its kernels find them: it does not
/// wait, its caller may change them once it has returned, and a graph keeps those of its capture.
class HostMetadata {
 public:
  /// Loads the kernel, if there are such numbers.
  HostMetadata(const Problem& problem, Gpu& gpu);
  /// The same of a call without a plan, in the device's context.
  HostMetadata(const AppendCall& call, Gpu& gpu, CUstream stream);

  /// Bytes that they take in the workspace, 0 where there are none.
  int64_t bytes() const { return count_ * int64_t{sizeof(int)}; }

  /// Checks the lengths of a call. Throws Error(kInvalidArgument). `Args`: ForwardArgs,
  /// BackwardArgs, ScoresArgs.
  template <class Args>
  void check(const Args& args) const;
  /// The call with its numbers at `to`, which is memory of the device, side by side. `Args` may be
  /// AppendArgs, too.
  template <class Args>
  Args moved(Args args, void* to) const;
  /// Puts the kernels on the stream that write them there.
  template <class Args>
  void store(const Args& args, CUstream stream, void* to) const;

  /// Says what they cost, if there are any.
  void describe(Explanation& plan) const;

 private:
  Problem problem_;
  std::vector<const char*> names_;
  int64_t count_ = 0;  ///< of all numbers, each of 32 bits
  CUfunction kernel_ = nullptr;
};

}  // namespace fulgur::cuda
