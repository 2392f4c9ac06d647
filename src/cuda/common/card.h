#pragma once

#include <cstdint>
#include <string_view>

#include "cuda/jit/target.h"
#include "fulgur/tensor.h"

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

/// FLOP per clock and SM of dense products by mma.sync. One of f32 is three of tf32, which every
/// card multiplies at half the rate of 16 bits. Where mma.sync multiplies f16 alone, other products
/// are FMAs, whose operands take as long to come from other lanes.
inline double mma_rate(DType dtype, const Card& card) {
  const Capability features = features_of(card.target);
  if (!features.has_bf16_mma && dtype != DType::kF16) return features.fp32_lanes;
  return dtype == DType::kF32 ? card.mma_rate / 6 : card.mma_rate;
}

/// FLOP per clock and SM of the fastest dense products that its kernels use.
inline double tensor_rate(DType dtype, const Card& card) {
  constexpr double kWgmmaRate = 4096;
  const bool by_wgmma = features_of(card.target).has_wgmma && dtype != DType::kF32;
  return by_wgmma ? kWgmmaRate : mma_rate(dtype, card);
}

}  // namespace fulgur::cuda
