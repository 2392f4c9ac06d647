#include "cuda/sm90/families.h"

#include "cuda/sm90/backward_candidates.h"
#include "cuda/sm90/common.h"

namespace fulgur::cuda {
namespace {

/// Whether one kernel computes all sequences of a forward pass.
bool takes_one(const Problem& p) { return p.pass == Pass::kForward && !takes_both(p); }

bool is_backward(const Problem& p) { return p.pass == Pass::kBackward; }

std::vector<HopperDecodeTile> decode_candidates(const Problem& problem, const Card& card,
                                                std::vector<std::string>*) {
  return {decode_candidate(problem, card)};
}

}  // namespace

const Family& hopper_forward_family() {
  static const PlannedFamily<HopperForwardCandidate> kFamily(takes_one, forward_rejects,
                                                             forward_candidates);
  return kFamily;
}

const Family& hopper_decode_family() {
  static const PlannedFamily<HopperDecodeCandidate> kFamily(takes_one, decode_rejects,
                                                            decode_candidates, decode_edges);
  return kFamily;
}

const Family& hopper_backward_family() {
  static const PlannedFamily<HopperBackwardCandidate> kFamily(is_backward, backward_rejects,
                                                              backward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda
