#include "cuda/engine/append.h"

#include <algorithm>
#include <cstddef>

#include "base/convert.h"
#include "call/append_lengths.h"
#include "cuda/common/append_arguments.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/host_metadata.h"
#include "cuda/engine/devices.h"
#include "engine/workspace.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

/// The kernel that appends new rows of dtype `rows` to `caches`.
CallKernel kernel_of(DType rows, const OperandTypes& caches) {
  return append_kernel(rows, is_low_bit(caches.k) || is_low_bit(caches.v));
}

CallKernel kernel_of(const AppendCall& call) { return kernel_of(call.rows, call.p.dtypes); }

/// Tokens and queries, each of which a CTA computes.
int64_t rows_of(const AppendParams& p) { return int64_t{p.tokens.count} + p.queries.count; }

void launch_append(const AppendCall& call, Gpu& gpu, CUstream stream, const AppendParams& params) {
  const int64_t blocks = std::max<int64_t>(rows_of(params), 1);
  launch(kernel_of(call), gpu, stream, &params, blocks,
         std::max(2 * params.k.heads, params.q.heads), params.lanes_log2);
}

/// Throws Error(kUnsupported) for caches of f64.
void refuse(const AppendCall& call) { refuse_f64("k_cache", call.args.rows.k_cache, "append"); }

class CudaAppendStep final : public AppendStep {
 public:
  CudaAppendStep(const Problem& p, Gpu& gpu) : gpu_(gpu) {
    load(kernel_of(p.dtypes.q, p.dtypes), gpu);
    if (p.append.host_numbers > 0) load(CallKernel::kUpload, gpu);
    Arena arena;
    lengths_ = arena.take(p.append.batch * int64_t{sizeof(int32_t)});
    numbers_ = arena.take(p.append.host_numbers * int64_t{sizeof(int32_t)});
    bytes_ = arena.end();
  }

  int64_t bytes() const override { return bytes_; }

  const int32_t* append(const AppendCall& call, void* memory, const Run& run) const override {
    auto* const bytes = static_cast<std::byte*>(memory);
    auto* const lengths = reinterpret_cast<int32_t*>(bytes + lengths_);
    AppendParams params = append_params(call);
    if (params.batch == 0) return lengths;
    const auto stream = static_cast<CUstream>(run.stream);
    const HostMetadata numbers(call, gpu_, stream);
    set_lengths(numbers.moved(call.args, bytes + numbers_), params);
    params.lengths = lengths;
    numbers.store(call.args, stream, bytes + numbers_);
    launch_append(call, gpu_, stream, params);
    return lengths;
  }

 private:
  Gpu& gpu_;
  int64_t lengths_ = 0, numbers_ = 0, bytes_ = 0;
};

}  // namespace

void append(const AppendCall& call, const Run& run) {
  refuse(call);
  const AppendLengths checked(call);
  AppendParams params = append_params(call);
  Gpu& gpu = usable_gpu(call.p.device.index);
  if (params.batch == 0 || rows_of(params) == 0) return;
  const CurrentContext current(gpu.context());
  const auto stream = static_cast<CUstream>(run.stream);
  loaded(kernel_of(call), gpu,
         stream);  // before any launch, as it may throw
  const HostMetadata numbers(call, gpu, stream);
  LaunchMemory::Lease lease;
  if (numbers.bytes() > 0) {
    lease = gpu.launch_memory().of({.stream = run.stream}, {.bytes = numbers.bytes()});
  }
  set_lengths(numbers.moved(call.args, lease.data), params);
  numbers.store(call.args, stream, lease.data);
  launch_append(call, gpu, stream, params);
}

void prepare(const AppendCall& call) {
  refuse(call);
  load(kernel_of(call), usable_gpu(call.p.device.index));
}

std::unique_ptr<const AppendStep> append_step(const Problem& problem) {
  return std::make_unique<CudaAppendStep>(problem, attending_gpu(problem.device.index));
}

}  // namespace fulgur::cuda
