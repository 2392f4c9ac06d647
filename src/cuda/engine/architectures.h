#pragma once

#include <span>
#include <string>

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// What devices of one compute capability attend with. Their kernels may use what later ones lack.
struct Architecture {
  int capability;    ///< 90 is 9.0
  const char* name;  ///< "Hopper"
  std::span<const Family* const> families;
  std::span<const Card> cards;  ///< the cards there are: what prewarming compiles for
};

/// Every architecture that there are kernels for.
std::span<const Architecture> architectures();

/// The one of a compute capability; null when there are no kernels for it.
const Architecture* architecture_of(int capability);

/// The row of a device of that architecture that has as many SMs, or the last one, with the SMs and
/// the shared memory of the device.
Card card_of(const Architecture& architecture, int sms, int shared_bytes);

/// Why no family of any architecture computes a problem; empty when one does.
std::string no_family_computes(const Problem& problem);

/// "9.0 (Hopper)": the capabilities that there are kernels for.
std::string known_capabilities();

}  // namespace fulgur::cuda
