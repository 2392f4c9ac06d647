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

/// Bytes of host metadata in the workspace of a problem's runs; 0 without any.
int64_t host_metadata_bytes(const Problem& problem);

/// The lengths, slopes and sinks of a problem that lie in host memory. A run reads them, checks the
/// lengths, and uploads them to its workspace as arguments of a kernel: the host does not wait, the
/// caller may change them when the run has returned, and a graph keeps those of its capture.
class HostMetadata {
 public:
  /// Loads the kernel that uploads them, if there are any.
  HostMetadata(const Problem& problem, Gpu& gpu);
  /// The same for a call without a plan; the device's context must be current.
  HostMetadata(const AppendCall& call, Gpu& gpu, CUstream stream);

  /// Bytes in the workspace; 0 without any.
  int64_t bytes() const { return count_ * int64_t{sizeof(int)}; }

  /// Checks the lengths of a call. Throws Error(kInvalidArgument). `Args`: ForwardArgs,
  /// BackwardArgs or ScoresArgs.
  template <class Args>
  void check(const Args& args) const;
  /// The call with its metadata at `to`, which is device memory. `Args` may also be AppendArgs.
  template <class Args>
  Args moved(Args args, void* to) const;
  /// Launches the kernels that write the metadata to `to`.
  template <class Args>
  void store(const Args& args, CUstream stream, void* to) const;

  /// Describes the cost of the upload, if there is any.
  void describe(Explanation& plan) const;

 private:
  Problem problem_;
  std::vector<const char*> names_;
  int64_t count_ = 0;  ///< of numbers of 32 bits
  CUfunction kernel_ = nullptr;
};

}  // namespace fulgur::cuda
