#pragma once

#include <optional>
#include <span>
#include <string>

#include "cuda/jit/capability.h"

namespace fulgur::cuda {

/// What kernels are compiled for: machine code (a cubin), which runs on devices of the same major
/// capability and at least that minor one, or PTX, which the driver compiles for any later device.
struct Target {
  enum class Form : unsigned char {
    kCubin,     ///< "sm_80"
    kSpecific,  ///< "sm_90a": machine code with all features of this capability alone
    kPtx,       ///< "compute_80"
  };
  int capability = 90;
  Form form = Form::kSpecific;

  /// The name of the target for the compiler.
  std::string name() const;
  bool operator==(const Target&) const = default;
};

/// The features that text for a target may use.
Capability features_of(const Target& target);

/// Whether devices of a capability run code for a target.
bool runs(int capability, const Target& target);

/// The best target for devices of a capability, among those that a compiler lists: machine code for
/// it (kSpecific for 9.0), or for a smaller minor capability, or PTX for the highest capability
/// below it. Throws Error(kUnavailable) if there is none.
Target target_of(int capability, std::span<const int> listed);

/// The target of a name that a user passed as `what`. Throws Error(kInvalidArgument) for a name
/// that is no target, is below 7.5 or not listed.
Target target_called(const std::string& name, const std::string& what, std::span<const int> listed);

/// The target that FULGUR_CUDA_TARGET forces for every device; none if it is not set. Throws the
/// errors of target_called() and nvrtc_capabilities().
std::optional<Target> forced_target();

/// The text of a capability: "8.6" for 86.
std::string capability_text(int capability);

}  // namespace fulgur::cuda
