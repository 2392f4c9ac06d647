#pragma once

#include <array>

namespace fulgur::cuda {

/// What devices of one compute capability have, and what text that is compiled for it may use.
struct Capability {
  int number;           ///< 90 is 9.0
  int shared_bytes;     ///< of shared memory, at most, that a CTA may ask for
  int sm_shared_bytes;  ///< that the CTAs of an SM share, with 1 KB that each of them costs
  int fp32_lanes;       ///< of an SM: so many FMAs a clock
  int mma_rate;  ///< FLOP a clock and SM of dense mma.sync, 16-bit inputs and sums of f32: the
                 ///< least of its models
  bool has_tma;  ///< cp.async.bulk and mbarriers, too
  bool has_stmatrix;
  bool has_red_v4;       ///< red.global.add.v4.f32
  bool has_early_start;  ///< programmatic dependent launch
  bool has_fp8_mma;      ///< mma.sync of e4m3 that is no emulation
  bool has_setmaxnreg;   ///< in text for the capability alone, as sm_90a
  bool has_wgmma;        ///< in such text, too
};

inline constexpr std::array<Capability, 9> kCapabilities = {{
    // clang-format off
    {80,  166912, 167936,  64, 2048, false, false, false, false, false, false, false},
    {86,  101376, 102400, 128,  512, false, false, false, false, false, false, false},
    {87,  166912, 167936, 128,  512, false, false, false, false, false, false, false},
    {89,  101376, 102400, 128,  512, false, false, false, false, true,  false, false},
    {90,  232448, 233472, 128, 2048, true,  true,  true,  true,  false, true,  true },
    {100, 232448, 233472, 128, 2048, true,  true,  true,  true,  false, true,  false},
    {110, 232448, 233472, 128, 1024, true,  true,  true,  true,  false, true,  false},
    {120, 101376, 102400, 128,  512, true,  true,  true,  true,  true,  true,  false},
    {121, 101376, 102400, 128,  512, true,  true,  true,  true,  true,  true,  false},
    // clang-format on
}};

inline constexpr int kMinCapability = kCapabilities[0].number;  ///< 8.0: cp.async and bf16

/// The row of a capability of 8.0 or more: its own, or else the highest one below it.
constexpr const Capability& capability_row(int capability) {
  const Capability* row = kCapabilities.data();
  for (const Capability& known : kCapabilities) {
    if (known.number <= capability) row = &known;
  }
  return *row;
}

}  // namespace fulgur::cuda
