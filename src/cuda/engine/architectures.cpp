#include "cuda/engine/architectures.h"

#include <fmt/format.h>

#include <array>

#include "cuda/common/scores.h"
#include "cuda/decode/family.h"
#include "cuda/engine/cards.h"
#include "cuda/papers/fa1.h"
#include "cuda/papers/standard.h"
#include "cuda/passes/converted.h"
#include "cuda/portable/backward.h"
#include "cuda/portable/forward.h"
#include "cuda/portable/wide_backward.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/families.h"

namespace fulgur::cuda {

const Architecture& architecture_of(const Target& target) {
  static const ConvertedFamily kHopperConverted(sm90::forward_family());
  static const ConvertedFamily kHopperConvertedF32(portable::forward_family_for_hopper());
  static const ConvertedFamily kHopperConvertedDecode(decode::hopper_family(), /*f32_alone=*/true);
  static const ConvertedFamily kPortableConverted(portable::forward_family());
  static const ConvertedFamily kPortableConvertedDecode(decode::portable_family(),
                                                        /*f32_alone=*/true);
  static const std::array<const Family*, 11> kHopperFamilies = {
      &sm90::forward_family(),
      &portable::forward_family_for_hopper(),
      &decode::hopper_family(),
      &sm90::invariant_by_rows_family(),
      &kHopperConverted,
      &kHopperConvertedF32,
      &kHopperConvertedDecode,
      &sm90::backward_family(),
      &portable::backward_family_for_hopper(),
      &portable::wide_backward_family(),
      &scores_family()};
  // The rates of every H100, H200 and GH200 are those measured on an H200. For the H100 PCIe the
  // memory bandwidth per SM is assumed to be the same.
  static constexpr Card kH200{};
  static constexpr std::array<Card, 2> kHopperCards = {
      Card{.name = "H100 PCIe",
           .sms = 114,
           .bytes_per_cycle = kH200.bytes_per_cycle * 114 / kH200.sms},
      kH200};
  static const Architecture kHopper{kHopperFamilies, kHopperCards};
  static const std::array<const Family*, 7> kPortableFamilies = {&portable::forward_family(),
                                                                 &decode::portable_family(),
                                                                 &kPortableConverted,
                                                                 &kPortableConvertedDecode,
                                                                 &portable::backward_family(),
                                                                 &portable::wide_backward_family(),
                                                                 &scores_family()};
  static const Architecture kPortable{kPortableFamilies, known_cards()};
  return target == sm90::kTarget ? kHopper : kPortable;
}

std::span<const Family* const> families_of(const Target& target, Algorithm algorithm) {
  static const std::array<const Family*, 1> kStandard = {&papers::standard_family()};
  static const std::array<const Family*, 2> kFa1 = {&papers::fa1_forward_family(),
                                                    &papers::fa1_backward_family()};
  switch (algorithm) {
    case Algorithm::kStandard:
      return kStandard;
    case Algorithm::kFa1:
      return kFa1;
    case Algorithm::kFa2:
      return architecture_of({kMinCapability, Target::Form::kPtx}).families;
    case Algorithm::kFa3:
      if (target != sm90::kTarget) return {};
      break;
    case Algorithm::kAny:
      break;
  }
  return architecture_of(target).families;
}

Card card_of(const Architecture& architecture, int sms, int shared_bytes) {
  Card card = architecture.cards.back();
  for (const Card& known : architecture.cards) {
    if (known.sms == sms) card = known;
  }
  card.sms = sms;
  card.shared_bytes = shared_bytes;
  return card;
}

std::string no_family_computes(const Problem& problem, std::span<const Family* const> families) {
  if (families.empty()) {
    return fmt::format("computes by the algorithm fa3 where kernels are for {}",
                       sm90::kTarget.name());
  }
  std::string reasons;
  for (const Family* family : families) {
    if (!family->is_for(problem)) continue;
    const std::string why = family->rejects(problem);
    if (why.empty()) return {};
    if (reasons.find(why) == std::string::npos) reasons += (reasons.empty() ? "" : "; ") + why;
  }
  return reasons;
}

}  // namespace fulgur::cuda
