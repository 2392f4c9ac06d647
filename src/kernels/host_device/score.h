// Constants of the score hook (device/score.cuh), the same for the host and the device.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

// A dense bias below this counts as -inf. Times the scale it is finite in f32, and so are differences of scores.
constexpr double kHidingBias = -0x1p115;

// softcap * tanh(x), x = scale * s / softcap, by tanh(x) = 1 - 2 / (exp(2x) + 1), which cancels for small x. There,
// x * p(x) with an even polynomial p, so that the error of a score is relative and does not grow with the cap: of both
// together at most 2^-19.7, ex2.approx and rcp.approx included. With u = 2 x log2(e), p is the minimax of
// tanh(x) / x up to |u| = kTanhSmall, its square completed, which saves an instruction and all registers for constants:
// p = kTanhSquare * ((u^2 - kTanhCenter)^2 + kTanhRest).
constexpr double kTanhSmall = 0.76;
constexpr double kTanhLinear = -0.040024832;
constexpr double kTanhSquare = 0.001850669;
constexpr double kTanhCenter = -kTanhLinear / (2 * kTanhSquare);
constexpr double kTanhRest = 1 / kTanhSquare - kTanhCenter * kTanhCenter;

}  // namespace fulgur::kernels
