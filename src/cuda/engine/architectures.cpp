#include "cuda/engine/architectures.h"

#include <fmt/format.h>

#include <array>

#include "cuda/sm90/common.h"
#include "cuda/sm90/families.h"
#include "cuda/sm90/invariant_by_rows.h"

namespace fulgur::cuda {

std::span<const Architecture> architectures() {
  static const std::array<const Family*, 4> kHopper = {
      &hopper_forward_family(), &hopper_decode_family(), &hopper_invariant_by_rows(),
      &hopper_backward_family()};
  // H100 PCIe; every other H100, H200 and GH200.
  static constexpr std::array<Target, 2> kHopperCards = {Target{114, 232448}, Target{132, 232448}};
  static const std::array<Architecture, 1> kArchitectures = {
      {{kHopperCapability, "Hopper", kHopper, kHopperCards}}};
  return kArchitectures;
}

const Architecture* architecture_of(int capability) {
  for (const Architecture& architecture : architectures()) {
    if (architecture.capability == capability) return &architecture;
  }
  return nullptr;
}

std::string no_family_computes(const Problem& problem) {
  std::string reasons;
  for (const Architecture& architecture : architectures()) {
    for (const Family* family : architecture.families) {
      if (!family->is_for(problem)) continue;
      const std::string why = family->rejects(problem);
      if (why.empty()) return {};
      reasons += (reasons.empty() ? "" : "; ") + why;
    }
  }
  return reasons;
}

std::string known_capabilities() {
  std::string known;
  for (const Architecture& a : architectures()) {
    known += fmt::format("{}{}.{} ({})", known.empty() ? "" : " or ", a.capability / 10,
                         a.capability % 10, a.name);
  }
  return known;
}

}  // namespace fulgur::cuda
