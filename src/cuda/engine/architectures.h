#pragma once

#include <span>
#include <string>

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// The families of kernels of devices that have the same targets.
struct Architecture {
  std::span<const Family* const> families;  ///< for calls that name no algorithm
  std::span<const Card> cards;              ///< known cards, for which prewarming compiles
};

/// The architecture of a target. Nothing else decides between families. Hopper's kernels need
/// sm_90a; all other targets have the portable kernels.
const Architecture& architecture_of(const Target& target);

/// The families of a target for calls that name an algorithm; none if its devices do not have it.
std::span<const Family* const> families_of(const Target& target, Algorithm algorithm);

/// The card of the architecture with as many SMs, or else its last card, with the SMs and the
/// shared memory of the device.
Card card_of(const Architecture& architecture, int sms, int shared_bytes);

/// Why none of these families computes a problem; empty if one does.
std::string no_family_computes(const Problem& problem, std::span<const Family* const> families);

}  // namespace fulgur::cuda
