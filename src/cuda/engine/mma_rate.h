#pragma once

#include "cuda/device/gpu.h"

namespace fulgur::cuda {

/// FLOP a clock of an SM by mma.sync with 16-bit inputs and sums of f32. Measured on the first look
/// at a model of device, which takes less than a millisecond, and kept in the default cache folder;
/// the least of its compute capability where it cannot be measured.
double mma_rate(Gpu& gpu);

/// Bytes a microsecond of memory, by copies, where the driver does not know the memory's clock.
/// Measured and kept likewise, in some milliseconds; 0 where it cannot be measured.
double memory_rate(Gpu& gpu);

/// The kernel that is measured.
KernelUse mma_rate_kernel();

}  // namespace fulgur::cuda
