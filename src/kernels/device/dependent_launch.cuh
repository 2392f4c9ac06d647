// Programmatic dependent launch: a kernel may start while the one before it on the stream still runs. Until it has
// waited, it neither reads what earlier kernels of the stream write nor writes what they access. A thread of every CTA
// waits before the CTA ends: the kernel after this one waits for this one alone, and with it for all before. Where
// kEarlyStarts is 0, kernels start after each other, and there is nothing to say.
#pragma once
#include "kernel_config.h"

// Until the kernel before has ended and its results are visible.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  if constexpr (kEarlyStarts) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The kernel after this one may start once every CTA has come here or ended.
__device__ __forceinline__ void let_next_kernel_start() {
  if constexpr (kEarlyStarts) asm volatile("griddepcontrol.launch_dependents;");
}
