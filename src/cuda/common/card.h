#pragma once

#include <cstdint>
#include <string_view>

#include "cuda/jit/target.h"

namespace fulgur::cuda {

/// The properties of a device that planning depends on. The default is an H200.
struct Card {
  std::string_view name = "H200";
  int sms = 132;
  int shared_bytes = capability_row(90).shared_bytes;  ///< maximum of a CTA
  int64_t l2_bytes = 50 << 20;                         ///< of the L2 cache
  double bytes_per_cycle = 2735;                       ///< memory bandwidth of all SMs
  double megahertz = 1755;                             ///< clock during memory-bound kernels
  double launch_microseconds = 5.5;  ///< of a launch, with the wait for the last CTA
  int capability = 90;               ///< 90 is 9.0
  Target target{};                   ///< of its kernels
  int sm_shared_bytes = capability_row(90).sm_shared_bytes;  ///< of an SM, for all of its CTAs
  double mma_rate = 2560;  ///< FLOP per clock and SM of dense mma.sync with f32 accumulators
  bool operator==(const Card&) const = default;
};

/// FLOP per clock and SM of the fastest dense products of 16-bit inputs that its kernels use.
inline double tensor_rate(const Card& card) {
  constexpr double kWgmmaRate = 4096;
  return features_of(card.target).has_wgmma ? kWgmmaRate : card.mma_rate;
}

}  // namespace fulgur::cuda
