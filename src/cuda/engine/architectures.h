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
  std::span<const Target> targets;  ///< the cards there are: what prewarming compiles for
};

/// Every architecture that there are kernels for.
std::span<const Architecture> architectures();

/// The one of a compute capability; null when there are no kernels for it.
const Architecture* architecture_of(int capability);

/// Why no family of any architecture computes a problem; empty when one does.
std::string no_family_computes(const Problem& problem);

/// "9.0 (Hopper)": the capabilities that there are kernels for.
std::string known_capabilities();

}  // namespace fulgur::cuda
