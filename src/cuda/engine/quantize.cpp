#include "cuda/engine/quantize.h"

#include <algorithm>
#include <cstdint>

#include "cuda/common/append_arguments.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/launch.h"
#include "cuda/engine/devices.h"
#include "kernels/codes/hadamard_params.h"
#include "kernels/codes/quantize_params.h"
#include "kernels/host_device/heads.h"

namespace fulgur::cuda {
namespace {

constexpr int64_t kMeasuringCtas = 1024;

/// The tokens and heads that a kernel of `call` takes.
struct Counts {
  int batch, rows_each;
};
Counts counts_of(int64_t batch, int64_t rows, int64_t heads, const char* call) {
  counted("x", batch * rows, "rows", call);
  counted("x", batch * heads, "heads", call);
  return {counted("x", batch, "sequences", call), counted("x", rows, "rows of a sequence", call)};
}

MeasureParams measure_params(const CodeTensor& codes, const ConstTensor& x, int64_t batch,
                             int64_t rows, int64_t heads) {
  refuse_f64("x", x, "quantize");
  const Counts counts = counts_of(batch, rows, heads, "quantize");
  MeasureParams p{};
  p.rows = rows_between(x.data, rows_layout(x), codes.codes, codes.at, heads, codes.columns, 0);
  p.rows.codes = codes_of(codes.format.dtype, codes.scaling);
  p.batch = counts.batch;
  p.rows_each = counts.rows_each;
  return p;
}

/// Scales that rows share.
void fit_scales(MeasureParams p, DType dtype, Gpu& gpu, const Run& run) {
  const auto stream = static_cast<CUstream>(run.stream);
  const int64_t sets = int64_t{p.batch} * p.rows.heads;
  constexpr int kWarps = kernels::kHeadThreads / 32;
  const int64_t ctas = std::min<int64_t>(kMeasuringCtas / sets, p.rows_each / kWarps);
  const Grid grid{static_cast<int>(sets), static_cast<int>(std::max<int64_t>(ctas, 1))};
  p.slices = grid.y * kWarps;
  const CUfunction measure = loaded(of_dtype(CallKernel::kMeasureF16, dtype), gpu, stream);
  const CUfunction fit = loaded(CallKernel::kFit, gpu, stream);
  const LaunchMemory::Lease lease = gpu.launch_memory().of(
      {.stream = run.stream}, {.bytes = sets * p.slices * 4 * int64_t{sizeof(float)}});
  p.measured = reinterpret_cast<float*>(lease.data);
  constexpr const char* kWhat = "launching the kernels of quantize";
  launch(stream, measure, &p, grid, kernels::kHeadThreads, 0, kWhat);
  launch(stream, fit, &p, {grid.x}, 32, 0, kWhat);
}

}  // namespace

void quantize(const QuantizeCall& c, const Run& run) {
  MeasureParams measured = measure_params(c.to, c.x, c.batch, c.rows, c.heads);
  Gpu& gpu = usable_gpu(c.x.device.index);
  const CurrentContext current(gpu.context());
  AppendCodes& codes = measured.rows.codes;
  codes.fits = codes.groups > 0 && !c.fixed;
  const CallKernel kernel = append_kernel(c.x.dtype, true);
  loaded(kernel, gpu, static_cast<CUstream>(run.stream));  // before anything is launched
  if (codes.fits && !codes.of_rows) {
    fit_scales(measured, c.x.dtype, gpu, run);
    codes.fits = false;
  }
  AppendParams p{};
  p.k = measured.rows;
  p.tokens = {measured.batch * measured.rows_each, measured.rows_each, nullptr};
  p.batch = measured.batch;
  p.room = measured.rows_each;
  p.entries = measured.batch;
  p.page = 1;
  p.lanes_log2 = kCodeLanesLog2;
  launch(kernel, gpu, static_cast<CUstream>(run.stream), &p, p.tokens.count, p.k.heads,
         p.lanes_log2);
}

void dequantize(const DequantizeCall& c, const Run& run) {
  MeasureParams p = measure_params(c.from, c.x, c.batch, c.rows, c.heads);
  p.rows =
      rows_between(c.from.codes, c.from.at, c.x.data, rows_layout(c.x), c.heads, c.from.columns, 0);
  p.rows.codes = codes_of(c.from.format.dtype, c.from.scaling);
  Gpu& gpu = usable_gpu(c.x.device.index);
  launch(of_dtype(CallKernel::kNumbersF16, c.x.dtype), gpu, static_cast<CUstream>(run.stream), &p,
         int64_t{p.batch} * p.rows_each, p.rows.heads, kCodeLanesLog2);
}

void hadamard(const HadamardCall& c, const Run& run) {
  refuse_f64("x", c.x, "hadamard");
  const Counts counts = counts_of(c.batch, c.rows, c.heads, "hadamard");
  HadamardParams p{};
  p.rows =
      rows_between(c.x.data, rows_layout(c.x), c.y.data, rows_layout(c.y), c.heads, c.columns, 0);
  p.batch = counts.batch;
  p.rows_each = counts.rows_each;
  p.inverse = c.inverse;
  p.to_f32 = c.y.dtype == DType::kF32;
  Gpu& gpu = usable_gpu(c.x.device.index);
  launch(of_dtype(CallKernel::kHadamardF16, c.x.dtype), gpu, static_cast<CUstream>(run.stream), &p,
         c.batch * c.rows, p.rows.heads, kCodeLanesLog2);
}

}  // namespace fulgur::cuda
