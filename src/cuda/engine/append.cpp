#include "cuda/engine/append.h"

#include <algorithm>

#include "call/append_lengths.h"
#include "cuda/common/append_arguments.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/host_metadata.h"
#include "cuda/engine/devices.h"

namespace fulgur::cuda {
namespace {

/// Rows that CTAs take one by one.
int64_t rows_of(const AppendParams& p) { return int64_t{p.tokens.count} + p.queries.count; }

void launch_append(const AppendCall& call, Gpu& gpu, CUstream stream, const AppendParams& params) {
  const int64_t blocks = std::max<int64_t>(rows_of(params), 1);
  launch(append_kernel(call.p.dtype), gpu, stream, &params, blocks,
         std::max(2 * params.k.heads, params.q.heads), params.lanes_log2);
}

}  // namespace

void append(const AppendCall& call, const Run& run) {
  refuse_f64("k_cache", call.args.k_cache, "append");
  const AppendLengths checked(call);
  AppendParams params = append_params(call);
  Gpu& gpu = usable_gpu(call.p.device.index);
  if (params.batch == 0 || rows_of(params) == 0) return;
  const CurrentContext current(gpu.context());
  const auto stream = static_cast<CUstream>(run.stream);
  loaded(append_kernel(call.p.dtype), gpu, stream);  // before anything is launched, as it may throw
  const HostMetadata numbers(call, gpu, stream);
  LaunchMemory::Lease lease;
  void* there = nullptr;
  if (numbers.bytes() > 0) {
    lease = gpu.launch_memory().take(stream, LaunchMemory::kZeroed + numbers.bytes());
    there = lease.data + LaunchMemory::kZeroed;
  }
  set_lengths(numbers.moved(call.args, there), params);
  numbers.store(call.args, stream, there);
  launch_append(call, gpu, stream, params);
}

void append(const AppendCall& call, const AppendMemory& memory, const Run& run) {
  AppendParams params = append_params(call);
  if (params.batch == 0) return;
  Gpu& gpu = usable_gpu(call.p.device.index);
  const auto stream = static_cast<CUstream>(run.stream);
  const HostMetadata numbers(call, gpu, stream);
  set_lengths(numbers.moved(call.args, memory.numbers), params);
  params.lengths = memory.lengths;
  numbers.store(call.args, stream, memory.numbers);
  launch_append(call, gpu, stream, params);
}

void prepare(const AppendCall& call) {
  refuse_f64("k_cache", call.args.k_cache, "append");
  load(append_kernel(call.p.dtype), usable_gpu(call.p.device.index));
}

void prepare_append(Device device, DType dtype, bool host_numbers) {
  Gpu& gpu = usable_gpu(device.index);
  load(append_kernel(dtype), gpu);
  if (host_numbers) load(CallKernel::kUpload, gpu);
}

void with_workspace(Device device, int64_t bytes, const Run& run,
                    const std::function<void(void*)>& compute) {
  Gpu& gpu = usable_gpu(device.index);
  const CurrentContext current(gpu.context());
  const LaunchMemory::Lease lease = gpu.launch_memory().of(run, bytes);
  compute(lease.data);
}

int64_t free_from(const WorkspaceNeed& attention) {
  return std::max(attention.bytes, LaunchMemory::kZeroed);
}

}  // namespace fulgur::cuda
