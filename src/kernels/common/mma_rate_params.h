// Arguments of common/mma_rate.cu, the same for the host and the device.
#pragma once

constexpr int kMmaRateWarps = 8;
constexpr int kMmaRateChains = 8;  // chains of dependent products per warp

struct MmaRateParams {
  int rounds;         // products of each chain, 16 x 16 by 16 x 8
  long long* cycles;  // SM cycles of all products
};
