// Programmatic dependent launch: a kernel may start while the previous kernel of the stream still runs. Until it has
// waited, it must neither read what earlier kernels write nor write what they access. A thread of every CTA must wait
// before the CTA ends: the next kernel waits only for this one, and through it for all earlier ones. If kEarlyStarts is
// 0, kernels start one after the other, and these functions do nothing.
#pragma once
#include "kernel_config.h"

// Waits until the previous kernel has ended and its results are visible.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  if constexpr (kEarlyStarts) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may start when every CTA has called this or ended.
__device__ __forceinline__ void let_next_kernel_start() {
  if constexpr (kEarlyStarts) asm volatile("griddepcontrol.launch_dependents;");
}
