#pragma once

#include "cuda/device/gpu.h"

namespace fulgur::cuda {

/// FLOP per clock and SM of mma.sync with 16-bit inputs and f32 accumulators. Measured when a model
/// of device is first used, in less than a millisecond, and stored in the default cache folder. The
/// minimum of its compute capability if it cannot be measured.
double mma_rate(Gpu& gpu);

/// Bytes per microsecond of memory, measured by copies, for devices whose memory clock the driver
/// does not know. Measured and stored likewise, in some milliseconds; 0 if it cannot be measured.
double memory_rate(Gpu& gpu);

/// The kernel that measures mma.sync.
KernelUse mma_rate_kernel();

}  // namespace fulgur::cuda
