#pragma once

#include "call/problem.h"
#include "cuda/driver/driver.h"
#include "cuda/jit/compile.h"
#include "fulgur/tensor.h"
#include "kernels/common/padding_params.h"

namespace fulgur::cuda {

// What executables of all families do to start their kernels.

/// CTAs of a launch.
struct Grid {
  int x = 1, y = 1;
};

/// When a kernel may start: after all that comes before it on the stream, or while the kernel
/// before it runs, which is for kernels that wait for it (kernels/device/dependent_launch.cuh).
enum class Start { kAfterAll, kEarly };

/// Puts a kernel whose one argument is `params` on the stream. `what`: of the error.
void launch(CUstream stream, CUfunction kernel, const void* params, Grid grid, int threads,
            int shared_bytes, const char* what, Start start = Start::kAfterAll);

/// Writes the rows of outputs that belong to no sequence.
KernelUse padding_kernel();
/// Its arguments, without addresses.
ForwardPaddingParams padding_params(const Problem& problem);
void launch_padding(CUstream stream, CUfunction kernel, const ForwardPaddingParams& params,
                    int sms);

}  // namespace fulgur::cuda
