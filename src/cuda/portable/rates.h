#pragma once

namespace fulgur::cuda::portable {

// What the cost models know of every SM, a clock.
inline constexpr double kExponentials = 16;
inline constexpr double kSharedBytes = 128;

inline constexpr double kNotHidden = 0.38;  ///< of the work of the units that do not bind

}  // namespace fulgur::cuda::portable
