#pragma once

#include <optional>
#include <span>
#include <string>

#include "cuda/jit/capability.h"

namespace fulgur::cuda {

/// What kernels are compiled for: machine code (a cubin), which devices of the same major
/// capability with that minor or a higher one run, or PTX, which the driver of any later device
/// compiles for it.
struct Target {
  enum class Form : unsigned char {
    kCubin,     ///< "sm_80"
    kSpecific,  ///< "sm_90a": machine code with all that this one capability has
    kPtx,       ///< "compute_80"
  };
  int capability = 90;
  Form form = Form::kSpecific;

  /// As the compiler names it.
  std::string name() const;
  bool operator==(const Target&) const = default;
};

/// What text for a target may use.
Capability features_of(const Target& target);

/// Whether devices of a capability run code for a target.
bool runs(int capability, const Target& target);

/// What devices of a capability get from a compiler that lists these: machine code of their own,
/// for 9.0 the one with all that it has, or that of a smaller minor, or PTX of the highest
/// capability below theirs. Throws Error(kUnavailable) where there is none.
Target target_of(int capability, std::span<const int> listed);

/// The target of a name that users gave as `what`. Throws Error(kInvalidArgument) for one that is
/// no target, below 8.0 or not listed.
Target target_called(const std::string& name, const std::string& what, std::span<const int> listed);

/// What FULGUR_CUDA_TARGET forces for every device; none where it is not set. Throws as
/// target_called() does, and as nvrtc_capabilities().
std::optional<Target> forced_target();

/// "8.6" of 86.
std::string capability_text(int capability);

}  // namespace fulgur::cuda
