#include "cuda/decode/family.h"

#include <fmt/format.h>

#include <utility>

#include "cuda/decode/candidates.h"
#include "cuda/decode/rejects.h"
#include "cuda/passes/forward.h"

namespace fulgur::cuda::decode {
namespace {

bool is_forward(const Problem& p) { return p.pass == Pass::kForward; }

bool takes_one(const Problem& p) { return is_forward(p) && !takes_both(p); }

/// With codes no other kernel computes a call, so that bits depend on nothing but this one's
/// splits.
std::string portable_rejects(const Problem& p) {
  if (p.invariant && dtypes_rejected(p.dtypes, /*takes_f32=*/true).empty()) {
    return "splits keys, which `invariant` forbids here";
  }
  return decode_rejects_few(p);
}

std::vector<Fitting<DecodePlan>> candidates(const Problem& problem, const Card& card,
                                            std::vector<std::string>* rejected) {
  Fitting<DecodePlan> tile = decode_candidate(problem, card);
  if (tile.plan.shared_bytes <= card.shared_bytes) return {std::move(tile)};
  rejected->push_back(fmt::format("tile {}: its {} bytes of shared memory do not fit {}",
                                  tile.plan.tile().text(), tile.plan.shared_bytes,
                                  card.shared_bytes));
  return {};
}

/// As if the card had the warp path alone.
std::vector<Fitting<DecodePlan>> portable_candidates(const Problem& problem, const Card& card,
                                                     std::vector<std::string>* rejected) {
  Card portable = card;
  if (features_of(card.target).has_wgmma) portable.target.form = Target::Form::kCubin;
  return candidates(problem, portable, rejected);
}

}  // namespace

const Family& hopper_family() {
  static const PlannedFamily<DecodeCandidate> kFamily(takes_one, decode_rejects, candidates,
                                                      decode_reachable);
  return kFamily;
}

const Family& portable_family() {
  static const PlannedFamily<DecodeCandidate> kFamily(is_forward, portable_rejects,
                                                      portable_candidates, decode_reachable);
  return kFamily;
}

}  // namespace fulgur::cuda::decode
