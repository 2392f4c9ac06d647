#pragma once

#include "call/problem.h"
#include "cuda/driver/driver.h"
#include "cuda/jit/compile.h"
#include "fulgur/tensor.h"
#include "kernels/common/padding_params.h"

namespace fulgur::cuda {

// How executables of all families launch kernels.

/// CTAs of a launch.
struct Grid {
  int x = 1, y = 1;
};

/// When a kernel may start: after all earlier work of the stream, or while the previous kernel runs
/// (programmatic dependent launch), for which it then waits (kernels/device/dependent_launch.cuh).
enum class Start { kAfterAll, kEarly };

/// Launches a kernel whose only argument is `params`. `what`: names the launch in errors.
void launch(CUstream stream, CUfunction kernel, const void* params, Grid grid, int threads,
            int shared_bytes, const char* what, Start start = Start::kAfterAll);

/// The kernel that writes the rows of outputs that belong to no sequence.
KernelUse padding_kernel();
/// The arguments of that kernel, without addresses.
ForwardPaddingParams padding_params(const Problem& problem);
void launch_padding(CUstream stream, CUfunction kernel, const ForwardPaddingParams& params,
                    int sms);

}  // namespace fulgur::cuda
