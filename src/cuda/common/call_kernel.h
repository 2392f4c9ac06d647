#pragma once

#include "base/check.h"
#include "cuda/device/gpu.h"

namespace fulgur::cuda {

// The kernels of calls without a plan (append, merge, quantize), and others that are the same for
// all plans.

/// kAppend and kQuantize append rows of a dtype, as they are or quantized. kUpload writes the
/// numbers in its arguments to memory. kDivide computes the lengths of the parts of a plan over
/// shared prefixes. kMeasure and kFit compute scales that rows share; kNumbers dequantizes.
/// kHadamard rotates rows. kMeans computes means of columns, kAddMeans adds their products to LSE.
/// kAddRows adds sums of gradients of several processes, and rounds them.
enum class CallKernel : uint8_t {
  kAppendF16,
  kAppendBF16,
  kAppendF32,
  kQuantizeF16,
  kQuantizeBF16,
  kQuantizeF32,
  kMerge,
  kUpload,
  kDivide,
  kMeasureF16,
  kMeasureBF16,
  kMeasureF32,
  kNumbersF16,
  kNumbersBF16,
  kNumbersF32,
  kHadamardF16,
  kHadamardBF16,
  kHadamardF32,
  kMeansF16,
  kMeansBF16,
  kMeansF32,
  kAddMeansF16,
  kAddMeansBF16,
  kAddMeansF32,
  kFit,
  kAddRows
};

KernelUse use_of(CallKernel kernel);

/// The kernel of a dtype, one of three consecutive ones: `first` is that of f16.
CallKernel of_dtype(CallKernel first, DType dtype);
/// The kernel that appends rows of f16, bf16 or f32, as they are or quantized to `codes`.
CallKernel append_kernel(DType rows, bool codes);

/// The kernel on a device, whose context must be current. The first call loads the kernel, after
/// compiling it if necessary. Throws Error(kInvalidArgument) if the first call is for a stream that
/// is being captured.
CUfunction loaded(CallKernel kernel, Gpu& gpu, CUstream stream);

/// Loads a kernel, so that later calls may be captured.
CUfunction load(CallKernel kernel, Gpu& gpu);

/// Launches a kernel in which each CTA computes a token, and each group of 2^lanes_log2 lanes a
/// head.
void launch(CallKernel kernel, Gpu& gpu, CUstream stream, const void* params, int64_t tokens,
            int heads, int lanes_log2);

/// Throws Error(kUnsupported) for f64. `call`: the name of the call in the error ("append").
void refuse_f64(const char* name, const ConstTensor& tensor, const char* call);

/// `count` as an int, with which kernels count. Throws Error(kUnsupported) for 2^30 or more.
int counted(const char* name, int64_t count, const char* of_what, const char* call);

/// Whether all rows are aligned to 16 bytes.
bool rows_aligned(const Layout& rows, DType dtype);

/// log2 of the lanes of a row, which a single lane would compute in `steps` steps; at most a warp.
int lanes_log2(int64_t steps);

}  // namespace fulgur::cuda
