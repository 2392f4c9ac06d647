#include "cuda/common/call_kernel.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "cuda/common/launch.h"
#include "fulgur/error.h"
#include "kernels/host_device/element.h"
#include "kernels/host_device/heads.h"

namespace fulgur::cuda {

static_assert(kernels::kF16 == static_cast<int>(DType::kF16) &&
              kernels::kBF16 == static_cast<int>(DType::kBF16) &&
              kernels::kF32 == static_cast<int>(DType::kF32));

KernelUse use_of(CallKernel kernel) {
  if (kernel == CallKernel::kMerge) return {{"common/merge.cu", ""}, "fulgur_merge", 0};
  if (kernel == CallKernel::kUpload)
    return {{"common/upload_metadata.cu", ""}, "fulgur_upload_metadata", 0};
  if (kernel == CallKernel::kDivide)
    return {{"common/shared_prefix.cu", ""}, "fulgur_shared_prefix", 0};
  if (kernel == CallKernel::kAddRows) return {{"backward/add_rows.cu", ""}, "fulgur_add_rows", 0};
  const char* const elements[] = {"kF16", "kBF16", "kF32"};
  const bool codes = kernel >= CallKernel::kQuantizeF16 && kernel <= CallKernel::kQuantizeF32;
  const std::string header = fmt::format(
      "#pragma once\n#include \"host_device/element.h\"\nconstexpr Element kElement = {};\n"
      "constexpr bool kCodes = {};\n",
      elements[static_cast<int>(kernel) % 3], codes);
  if (kernel < CallKernel::kMeasureF16) return {{"common/append.cu", header}, "fulgur_append", 0};
  if (kernel >= CallKernel::kHadamardF16 && kernel <= CallKernel::kHadamardF32)
    return {{"codes/hadamard.cu", header}, "fulgur_hadamard", 0};
  if (kernel >= CallKernel::kMeansF16 && kernel <= CallKernel::kMeansF32)
    return {{"codes/means.cu", header}, "fulgur_means", 0};
  if (kernel >= CallKernel::kAddMeansF16 && kernel <= CallKernel::kAddMeansF32)
    return {{"codes/means.cu", header}, "fulgur_add_means", 0};
  const char* const entry = kernel == CallKernel::kFit          ? "fulgur_fit"
                            : kernel >= CallKernel::kNumbersF16 ? "fulgur_dequantize"
                                                                : "fulgur_measure";
  return {{"codes/quantize.cu", header}, entry, 0};
}

CallKernel append_kernel(DType rows, bool codes) {
  return of_dtype(codes ? CallKernel::kQuantizeF16 : CallKernel::kAppendF16, rows);
}

CallKernel of_dtype(CallKernel first, DType dtype) {
  return static_cast<CallKernel>(static_cast<int>(first) + static_cast<int>(dtype));
}

CUfunction loaded(CallKernel kernel, Gpu& gpu, CUstream stream) {
  const std::atomic<CUfunction>& function = gpu.call_function(static_cast<int>(kernel));
  if (CUfunction ready = function.load(std::memory_order_acquire); ready != nullptr) return ready;
  if (is_capturing(stream)) {
    fail("stream",
         "is being captured, and this is the first launch of {} on the device, which loads it; "
         "make such a call before the capture",
         use_of(kernel).entry);
  }
  return load(kernel, gpu);
}

CUfunction load(CallKernel kernel, Gpu& gpu) {
  const CUfunction function = gpu.kernel(use_of(kernel)).function;
  gpu.call_function(static_cast<int>(kernel)).store(function, std::memory_order_release);
  return function;
}

void launch(CallKernel kernel, Gpu& gpu, CUstream stream, const void* params, int64_t tokens,
            int heads, int lanes_log2) {
  const CurrentContext current(gpu.context());
  constexpr int64_t kMaxX = std::numeric_limits<int>::max(), kMaxY = 65535;
  constexpr int64_t kWarp = 32;
  const int64_t lanes = (int64_t{heads} << lanes_log2) + kWarp - 1;
  const int64_t threads = std::min<int64_t>(lanes / kWarp * kWarp, kernels::kHeadThreads);
  const Grid grid{static_cast<int>(std::min(tokens, kMaxX)),
                  static_cast<int>(std::min((lanes - kWarp) / threads + 1, kMaxY))};
  launch(stream, loaded(kernel, gpu, stream), params, grid, static_cast<int>(threads), 0,
         kernel == CallKernel::kMerge        ? "launching the kernel of merge"
         : kernel >= CallKernel::kMeasureF16 ? "launching the kernel of dequantize"
                                             : "launching the kernel of append");
}

void refuse_f64(const char* name, const ConstTensor& tensor, const char* call) {
  if (tensor.dtype != DType::kF64) return;
  throw Error(Status::kUnsupported,
              fmt::format("{}: got f64, {} on cuda takes none of it", name, call));
}

int counted(const char* name, int64_t count, const char* of_what, const char* call) {
  constexpr int64_t kMax = (int64_t{1} << 30) - 1;
  if (count <= kMax) return static_cast<int>(count);
  throw Error(Status::kUnsupported, fmt::format("{}: got {} {}, {} on cuda takes at most {}", name,
                                                count, of_what, call, kMax));
}

bool rows_aligned(const Layout& rows, DType dtype) {
  return rows.aligned && (rows.batch | rows.row | rows.head) * size_of(dtype) % 16 == 0;
}

int lanes_log2(int64_t steps) {
  constexpr uint64_t kWarp = 32;
  return std::bit_width(std::bit_ceil(std::min<uint64_t>(steps, kWarp))) - 1;
}

}  // namespace fulgur::cuda
