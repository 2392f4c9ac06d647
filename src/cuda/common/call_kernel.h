#pragma once

#include "base/check.h"
#include "cuda/device/gpu.h"

namespace fulgur::cuda {

// The kernels of calls without a plan, append and merge, and others that are the same for all
// plans.

/// Append has one for each dtype, and one that makes codes of it. kUpload writes numbers of its
/// arguments to memory, of plans, too; kDivide what the parts of a plan over shared prefixes are
/// told. Of quantize kMeasure and kFit make scales that rows share; kNumbers is its inverse.
/// kHadamard rotates rows; kMeans makes means of columns, kAddMeans adds their products to LSE.
/// kAddRows adds sums of gradients of several processes and rounds them.
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

/// The one of three, of which `first` is that of f16.
CallKernel of_dtype(CallKernel first, DType dtype);
/// That of append for new rows of f16, bf16 or f32, which caches take as they are or as `codes`.
CallKernel append_kernel(DType rows, bool codes);

/// The kernel on a device, in its context. The first call loads it, and compiles it if need be.
/// Throws Error(kInvalidArgument) for a first call on a stream that is being captured.
CUfunction loaded(CallKernel kernel, Gpu& gpu, CUstream stream);

/// Loads it for calls to come, which a capture may then be of.
CUfunction load(CallKernel kernel, Gpu& gpu);

/// Puts a kernel on the stream whose CTAs take a token each, and groups of 2^lanes_log2
/// lanes a head.
void launch(CallKernel kernel, Gpu& gpu, CUstream stream, const void* params, int64_t tokens,
            int heads, int lanes_log2);

/// Throws Error(kUnsupported) for f64. `call`: "append".
void refuse_f64(const char* name, const ConstTensor& tensor, const char* call);

/// `count` of what a tensor has, as kernels count. Throws Error(kUnsupported) for 2^30 and more.
int counted(const char* name, int64_t count, const char* of_what, const char* call);

/// Whether rows begin at multiples of 16 bytes.
bool rows_aligned(const Layout& rows, DType dtype);

/// The lanes that share a row which takes a lane that many steps: a power of two, at most a warp.
int lanes_log2(int64_t steps);

}  // namespace fulgur::cuda
