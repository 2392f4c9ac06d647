#pragma once

#include <span>
#include <string>
#include <vector>

#include "cuda/common/family.h"
#include "cuda/device/gpu.h"

namespace fulgur::cuda {

/// The devices of this machine that attention has kernels for.
struct Machine {
  std::string description = "kernels compiled at run time";
  std::string unavailable;  ///< why there are none; empty if there are some

  Machine();
  /// The devices are detected once.
  static const Machine& here();

 private:
  void find_devices();
};

/// Device `index`, which can run the kernels of all architectures: append, merge. Throws
/// Error(kUnavailable) if it cannot.
Gpu& usable_gpu(int index);
/// The same for a device for which attention has kernels.
Gpu& attending_gpu(int index);

/// The families among which a call on device `index` chooses: those of the device if attention has
/// kernels for it, else those for Hopper, whose reasons say why they do not compute the call.
std::span<const Family* const> families_at(int index, Algorithm algorithm);

/// The card of a device for which attention has kernels.
Card card_of(Gpu& gpu);

/// The distinct targets of the devices for which attention has kernels; without such devices that
/// of FULGUR_CUDA_TARGET, or of Hopper. Throws the errors of forced_target().
std::vector<Target> targets_here();

}  // namespace fulgur::cuda
