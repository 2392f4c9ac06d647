#pragma once

#include <array>

namespace fulgur::cuda {

/// Properties of devices of a compute capability, and features that text compiled for it may use.
struct Capability {
  int number;             ///< 90 is 9.0
  int shared_bytes;       ///< maximum of shared memory of a CTA
  int sm_shared_bytes;    ///< of an SM, for all of its CTAs and what is reserved for each
  int fp32_lanes;         ///< per SM: FMAs per clock
  int reserved_bytes;     ///< of shared memory, for each CTA
  int mma_rate;           ///< FLOP per clock and SM of dense mma.sync with 16-bit inputs and f32
                          ///< accumulators: the minimum of its models
  bool has_bf16_mma;      ///< mma.sync of bf16 and tf32, not of f16 alone
  bool has_async_copies;  ///< cp.async
  bool has_tma;           ///< also cp.async.bulk and mbarriers
  bool has_stmatrix;
  bool has_red_v4;       ///< red.global.add.v4.f32
  bool has_early_start;  ///< programmatic dependent launch
  bool has_fp8_mma;      ///< mma.sync of e4m3 that is not emulated
  bool has_setmaxnreg;   ///< only in text for this capability alone (sm_90a)
  bool has_wgmma;        ///< likewise
};

inline constexpr std::array<Capability, 10> kCapabilities = {{
    // clang-format off
    {75,   65536,  65536,  64,    0,  512, false, false, false, false, false, false, false, false, false},
    {80,  166912, 167936,  64, 1024, 2048, true,  true,  false, false, false, false, false, false, false},
    {86,  101376, 102400, 128, 1024,  512, true,  true,  false, false, false, false, false, false, false},
    {87,  166912, 167936, 128, 1024,  512, true,  true,  false, false, false, false, false, false, false},
    {89,  101376, 102400, 128, 1024,  512, true,  true,  false, false, false, false, true,  false, false},
    {90,  232448, 233472, 128, 1024, 2048, true,  true,  true,  true,  true,  true,  false, true,  true },
    {100, 232448, 233472, 128, 1024, 2048, true,  true,  true,  true,  true,  true,  false, true,  false},
    {110, 232448, 233472, 128, 1024, 1024, true,  true,  true,  true,  true,  true,  false, true,  false},
    {120, 101376, 102400, 128, 1024,  512, true,  true,  true,  true,  true,  true,  true,  true,  false},
    {121, 101376, 102400, 128, 1024,  512, true,  true,  true,  true,  true,  true,  true,  true,  false},
    // clang-format on
}};

inline constexpr int kMinCapability = kCapabilities[0].number;  ///< 7.5: ldmatrix

/// The row of a capability of at least 7.5: its own, or else that of the next lower one.
constexpr const Capability& capability_row(int capability) {
  const Capability* row = kCapabilities.data();
  for (const Capability& known : kCapabilities) {
    if (known.number <= capability) row = &known;
  }
  return *row;
}

}  // namespace fulgur::cuda
