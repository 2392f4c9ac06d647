#include "cuda/common/family.h"

#include <fmt/format.h>

namespace fulgur::cuda {

Explanation with_reasons(Explanation plan, const Reasons& reasons) {
  plan.decisions.insert(plan.decisions.begin() + 1, reasons.decisions.begin(),
                        reasons.decisions.end());
  plan.rejected = reasons.rejected;
  plan.details.add_all(reasons.details);
  return plan;
}

std::shared_ptr<const Candidate> Candidate::fused(const Problem::Append&,
                                                  std::string* why_not) const {
  *why_not = fmt::format("tile {} has none", tile.text());
  return nullptr;
}

std::string TileId::text() const { return fmt::format("{} {} x {}", family, Br, Bc); }

}  // namespace fulgur::cuda
