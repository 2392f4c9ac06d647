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
  std::string unavailable;  ///< why there are none; empty when there are some

  Machine();
  /// Looked for once.
  static const Machine& here();

 private:
  void find_devices();
};

/// Device `index`, where it runs kernels of no architecture: append, merge. Throws
/// Error(kUnavailable) otherwise.
Gpu& usable_gpu(int index);
/// The same where attention has kernels for it, too.
Gpu& attending_gpu(int index);

/// The families that a call on device `index` chooses from: those of the device where it attends,
/// and else those for Hopper, which say why they do not compute a call.
std::span<const Family* const> families_at(int index, Algorithm algorithm);

/// What planning must know of a device that attends.
Card card_of(Gpu& gpu);

/// The targets of the devices that attend, each once: those of FULGUR_CUDA_TARGET or Hopper where
/// there are none. Throws Error as forced_target() does.
std::vector<Target> targets_here();

}  // namespace fulgur::cuda
