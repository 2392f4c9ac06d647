// Arguments of common/mma_rate.cu, the same for the host and the device.
#pragma once

constexpr int kMmaRateWarps = 8;
constexpr int kMmaRateChains = 8;  // of a warp: products that wait for none of the others

struct MmaRateParams {
  int rounds;         // products of each chain, 16 x 16 by 16 x 8
  long long* cycles;  // that all of them took
};
