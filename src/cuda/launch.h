#pragma once

#include "cuda/driver.h"
#include "cuda/jit.h"
#include "cuda/tensor_map.h"
#include "fulgur/tensor.h"
#include "kernels/forward_copy_params.h"
#include "kernels/forward_padding_params.h"
#include "problem.h"

namespace fulgur::cuda {

// What executables of all families do to start their kernels.

/// Thread blocks of a launch.
struct Grid {
  int x = 1, y = 1;
};

/// Puts a kernel whose one argument is `params` on the stream. `what`: of the error.
void launch(CUstream stream, CUfunction kernel, const void* params, Grid grid, int threads,
            int shared_bytes, const char* what);

/// Copies a tensor that TMA cannot address to rows of multiples of 16 bytes.
extern const KernelUse kCopyKernel;
inline constexpr int kCopyThreads = 256, kCopyBlocks = 8;  // blocks a multiprocessor
/// Its arguments, without addresses.
ForwardCopyParams copy_params(const TensorMapShape& from, const TensorMapShape& to);

/// Writes the rows of outputs that belong to no sequence.
extern const KernelUse kPaddingKernel;
/// Its arguments, without addresses.
ForwardPaddingParams padding_params(const Problem& problem);
void launch_padding(CUstream stream, CUfunction kernel, const ForwardPaddingParams& params,
                    int multiprocessors);

/// A run's data, where it is aligned as the plan was told; an empty tensor's may be anything.
/// Throws Error(kInvalidArgument).
void* aligned_data(const char* name, const ConstTensor& tensor, bool empty);

}  // namespace fulgur::cuda
