#include "cuda/sm90/families.h"

#include "cuda/sm90/backward_candidates.h"
#include "cuda/sm90/common.h"

namespace fulgur::cuda::sm90 {
namespace {

/// Whether one kernel computes all sequences of a forward pass.
bool takes_one(const Problem& p) { return p.pass == Pass::kForward && !takes_both(p); }

bool is_backward(const Problem& p) { return p.pass == Pass::kBackward; }

std::vector<Fitting<DecodePlan>> decode_candidates(const Problem& problem, const Card& card,
                                                   std::vector<std::string>*) {
  return {decode_candidate(problem, card)};
}

}  // namespace

const Family& forward_family() {
  static const PlannedFamily<ForwardCandidate> kFamily(takes_one, forward_rejects,
                                                       forward_candidates);
  return kFamily;
}

const Family& decode_family() {
  static const PlannedFamily<DecodeCandidate> kFamily(takes_one, decode_rejects, decode_candidates,
                                                      decode_edges);
  return kFamily;
}

const Family& backward_family() {
  static const PlannedFamily<BackwardCandidate> kFamily(is_backward, backward_rejects,
                                                        backward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda::sm90
