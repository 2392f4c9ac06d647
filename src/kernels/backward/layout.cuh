// Types and constants of the backward kernels of every architecture, from the constants of kernel_config.h.
#pragma once
#include "device/operands.cuh"
#include "device/schedule.cuh"
#include "backward/params.h"

__device__ constexpr ScoreTile kScoreTile = {kBlockRows, kBlockKeys};

using ElementP = ElementO;   // of P in products with dO
using ElementDs = ElementQ;  // of dS in products with Q and K
using ElementDk = ElementType<kF32KeyGradients ? kF32 : ElementK::kType>;
using ElementDv = ElementType<kF32KeyGradients ? kF32 : ElementV::kType>;

enum : int {
  kComputesDq = kDqMethod != int(DqMethod::kNone),
  kStoresDs = kDqMethod == int(DqMethod::kStored),
  kAccumulatesDq = kComputesDq && !kStoresDs,
  kOrderedDq = kDqMethod == int(DqMethod::kOrdered),
  kDqPanels = dq_panels_of(kHeadDim),
  kRepairs = kHidesKeys,  // a hidden NaN or infinity may reach gradients
};
