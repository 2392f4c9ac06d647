#pragma once

namespace fulgur::cuda::portable {

// Rates of an SM per clock, the same for all cards.
inline constexpr double kExponentials = 16;
inline constexpr double kSharedBytes = 128;

inline constexpr double kNotHidden =
    0.38;  ///< fraction of the work that does not overlap with the bottleneck

}  // namespace fulgur::cuda::portable
