#include "cuda/engine/quantize.h"

#include <algorithm>
#include <cstdint>

#include "cuda/common/append_arguments.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/launch.h"
#include "cuda/engine/devices.h"
#include "kernels/codes/hadamard_params.h"
#include "kernels/codes/means_params.h"
#include "kernels/codes/quantize_params.h"
#include "kernels/host_device/heads.h"

namespace fulgur::cuda {
namespace {

constexpr int64_t kMeasuringCtas = 1024;

/// The tokens and heads that a kernel of `call` computes.
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
  set_means(codes.means, p.rows);
  p.batch = counts.batch;
  p.rows_each = counts.rows_each;
  return p;
}

/// Computes the scales that rows share.
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

/// Computes the means of columns over the measured rows.
void write_means(const MeasureParams& measured, DType dtype, Gpu& gpu, const Run& run) {
  const MeansParams p{measured.rows, measured.batch, measured.rows_each};
  const auto stream = static_cast<CUstream>(run.stream);
  launch(stream, loaded(of_dtype(CallKernel::kMeansF16, dtype), gpu, stream), &p,
         {p.batch * p.rows.heads, (p.rows.dim - 1) / 32 + 1}, kernels::kHeadThreads, 0,
         "launching the kernel of means");
}

/// The one of three kernels that reads rows of q, which may be quantized.
CallKernel of_queries(CallKernel first, DType q) {
  return of_dtype(first, is_low_bit(q) ? DType::kF16 : q);
}

/// A problem with only those lengths that determine the sequence of a row, for their upload.
Problem with_starts_alone(Problem p) {
  const bool starts = p.on_host.has(Arg::kCuSeqlensQ);
  p.on_host = {};
  p.on_host.set(Arg::kCuSeqlensQ, starts);
  return p;
}

class CudaCodeSteps final : public CodeSteps {
 public:
  CudaCodeSteps(const Problem& p, Gpu& gpu)
      : p_(p), gpu_(gpu), numbers_(with_starts_alone(p), gpu) {
    if (p.hadamard && !is_low_bit(p.dtypes.q))
      load(of_dtype(CallKernel::kHadamardF16, p.dtypes.q), gpu);
    if (p.has(Arg::kKMean)) load(of_queries(CallKernel::kAddMeansF16, p.dtypes.q), gpu);
  }

  int64_t bytes() const override { return numbers_.bytes(); }

  void rotate(const HadamardCall& call, const Run& run) const override {
    cuda::hadamard(call, run);
  }

  void add_means(const ForwardArgs& args, void* memory, const Run& run) const override {
    multiply(args, static_cast<float*>(args.lse.data), p_.lse, true, memory, run);
  }

  void multiply_means(const ForwardArgs& args, void* to, void* memory,
                      const Run& run) const override {
    Layout side_by_side{};
    side_by_side.batch = p_.packed ? 0 : p_.hq * p_.sq;
    side_by_side.head = p_.packed ? p_.total_q : p_.sq;
    multiply(args, static_cast<float*>(to), side_by_side, false, memory, run);
  }

 private:
  void multiply(const ForwardArgs& args, float* to, const Layout& at, bool adds, void* memory,
                const Run& run) const {
    if (p_.batch == 0 || p_.total_q == 0) return;
    const auto stream = static_cast<CUstream>(run.stream);
    const CurrentContext current(gpu_.context());
    numbers_.store(args, stream, memory);
    const ForwardArgs here = numbers_.moved(args, memory);
    const Means means(args.descales.k_mean);
    AddMeansParams p{};
    p.q = args.q.data;
    p.q_batch = p_.q.batch;
    p.q_row = p_.q.row;
    p.q_head = p_.q.head;
    p.codes = codes_of(p_.dtypes.q, {{args.descales.q_descale.data, p_.q_descale}, {}});
    p.lse = to;
    p.lse_batch = at.batch;
    p.lse_head = at.head;
    p.adds = adds;
    p.mean = means.data;
    p.mean_batch = means.batch;
    p.mean_head = means.head;
    p.scale = static_cast<float>(p_.scale);
    p.batch = static_cast<int>(p_.batch);
    p.rows_each = static_cast<int>(p_.packed ? p_.total_q : p_.sq);
    p.heads = static_cast<int>(p_.hq);
    p.group = static_cast<int>(p_.group());
    p.dim = static_cast<int>(p_.d);
    p.cu_seqlens = static_cast<const int*>(here.lengths.cu_seqlens_q.data);
    launch(of_queries(CallKernel::kAddMeansF16, p_.dtypes.q), gpu_, stream, &p, p_.total_q, p.heads,
           kCodeLanesLog2);
  }

  Problem p_;
  Gpu& gpu_;
  HostMetadata numbers_;
};

}  // namespace

std::unique_ptr<const CodeSteps> code_steps(const Problem& p, Gpu& gpu) {
  return std::make_unique<CudaCodeSteps>(p, gpu);
}

void quantize(const QuantizeCall& c, const Run& run) {
  MeasureParams measured = measure_params(c.to, c.x, c.batch, c.rows, c.heads);
  Gpu& gpu = usable_gpu(c.x.device.index);
  const CurrentContext current(gpu.context());
  AppendCodes& codes = measured.rows.codes;
  codes.fits = codes.groups > 0 && !c.fixed;
  const CallKernel kernel = append_kernel(c.x.dtype, true);
  loaded(kernel, gpu, static_cast<CUstream>(run.stream));  // before any launch, as it may throw
  if (c.mean.given()) write_means(measured, c.x.dtype, gpu, run);
  if (codes.fits && !codes.of_rows) {
    fit_scales(measured, c.x.dtype, gpu, run);
    codes.fits = false;
  }
  if (measured.rows_each == 0) return;
  AppendParams p{};
  p.k = measured.rows;
  p.tokens = {measured.batch * measured.rows_each, measured.rows_each, nullptr};
  p.batch = measured.batch;
  p.capacity = measured.rows_each;
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
  set_means(c.from.means, p.rows);
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
