#pragma once

#include <string>

#include "cuda/common/family.h"
#include "cuda/device/gpu.h"

namespace fulgur::cuda {

/// The devices of this machine that attention has kernels for.
struct Machine {
  std::string description = "Hopper kernels compiled at run time";
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

/// What planning must know of a device that attends.
Card card_of(const Gpu& gpu);

}  // namespace fulgur::cuda
