#pragma once

#include <span>
#include <string>

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// What devices whose kernels are compiled for some targets attend with.
struct Architecture {
  std::span<const Family* const> families;  ///< of calls that name no algorithm
  std::span<const Card> cards;              ///< the cards there are: what prewarming compiles for
};

/// The one of a target: this alone decides between families. Hopper's kernels need sm_90a; the
/// portable ones have every other target.
const Architecture& architecture_of(const Target& target);

/// The families of a target for calls by an algorithm; none where its devices do not have it.
std::span<const Family* const> families_of(const Target& target, Algorithm algorithm);

/// The row of a device of that architecture that has as many SMs, or the last one, with the SMs and
/// the shared memory of the device.
Card card_of(const Architecture& architecture, int sms, int shared_bytes);

/// Why none of these families computes a problem; empty when one does.
std::string no_family_computes(const Problem& problem, std::span<const Family* const> families);

}  // namespace fulgur::cuda
