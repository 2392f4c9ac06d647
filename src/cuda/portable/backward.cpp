#include "cuda/portable/backward.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/common/launch.h"
#include "kernels/portable/backward/bias_tile.h"

namespace fulgur::cuda::portable {
namespace {

KernelUse keys_kernel(const BackwardPlan& plan) {
  BackwardKey key = plan;
  key.has_dlse = false;  // the kernel that prepares rows knows of it
  return {{"portable/backward/keys.cu", kernel_config(key)},
          "fulgur_portable_backward",
          plan.shared_bytes};
}

/// Of kernels whose tiles are 64 queries and 64 keys, whatever those of the kernel by keys are.
BackwardKey key_of_tiles(const BackwardPlan& plan) {
  BackwardKey key;
  static_cast<KernelKey&>(key) = plan;
  key.block_rows = key.block_keys = kernels::kPortableBiasTile;
  key.dropout = plan.dropout;
  key.whole_columns = plan.whole_columns;
  key.dq_by_fours = plan.dq_by_fours;
  key.early_starts = plan.early_starts;
  return key;
}

KernelUse bias_gradient_kernel(const BackwardPlan& plan) {
  const BackwardKey key = key_of_tiles(plan);
  const int shared_bytes =
      kernels::portable_bias_layout(operands_of(key), key.head_dim, key.value_dim).bytes;
  return {{"portable/backward/bias_gradient.cu", kernel_config(key)},
          "fulgur_portable_bias_gradient",
          shared_bytes};
}

}  // namespace

std::vector<KernelUse> backward_kernels(const BackwardPlan& plan) {
  std::vector<KernelUse> kernels = {keys_kernel(plan), prepare_kernel(plan), round_kernel(plan)};
  if (plan.dsinks) kernels.push_back(sinks_kernel(plan));
  if (plan.dbias) kernels.push_back(bias_gradient_kernel(plan));
  if (plan.dtensors)
    std::ranges::move(expression_gradient_kernels(key_of_tiles(plan)), std::back_inserter(kernels));
  if (plan.copies()) kernels.push_back(copy_kernel());
  return kernels;
}

BackwardExecutable::BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan,
                                       Reasons reasons)
    : gpu_(gpu),
      plan_(plan),
      reasons_(std::move(reasons)),
      metadata_(problem, gpu),
      expressions_(problem),
      workspace_(workspace_of(problem, plan)) {
  if (workspace_.end == 0) return;
  params_ = backward_params(problem, plan_, plan_, /*p_log2=*/0);
  params_.key_blocks = plan_.key_blocks;
  params_.splits = params_.row_splits = 1;
  params_.split_heads = params_.group;
  params_.row_split_tiles = std::max(ceil_div(problem.sq, plan_.block_rows), 1);
  if (plan_.dbias) params_.bias_sums = bias_sums(problem);
  set_inputs(problem);
  row_kernels_ = RowKernels(problem, plan_, plan_, /*rounds=*/true, gpu_);
  keys_ = gpu_.kernel(keys_kernel(plan_)).function;
  if (plan_.dbias) bias_gradient_ = gpu_.kernel(bias_gradient_kernel(plan_)).function;
  tensor_gradients_ = ExpressionGradients(problem, key_of_tiles(plan_), gpu_);
  if (plan_.copies()) copy_ = gpu_.kernel(copy_kernel()).function;
}

void BackwardExecutable::set_inputs(const Problem& p) {
  const BackwardShapes shapes = backward_shapes(p);
  const auto input = [&](const char* name, ConstTensor BackwardArgs::*argument,
                         const TensorShape& shape, bool copied, int64_t offset,
                         StridedTensor BackwardParams::*tensor) {
    const TensorShape lies = copied ? cuda::copied(shape) : shape;
    params_.*tensor = {nullptr, lies.strides.batch, lies.strides.row, lies.strides.head};
    return Input{name, argument, lies, copied, offset, copy_params(shape, lies), tensor};
  };
  const auto& [q, k, v, dout] = workspace_.copies;
  inputs_ = {input("q", &BackwardArgs::q, shapes.q, !plan_.copies_q.empty(), q, &BackwardParams::q),
             input("k", &BackwardArgs::k, shapes.k, !plan_.copies_k.empty(), k, &BackwardParams::k),
             input("v", &BackwardArgs::v, shapes.v, !plan_.copies_v.empty(), v, &BackwardParams::v),
             input("dout", &BackwardArgs::dout, shapes.dout, !plan_.copies_dout.empty(), dout,
                   &BackwardParams::dout)};
}

BackwardParams BackwardExecutable::params(const BackwardArgs& args, const Run& run,
                                          char* workspace) const {
  BackwardParams p = params_;
  set_backward_tensors(p, args, run);
  p.expression = expressions_.arguments(args.tensors);
  for (const Input& in : inputs_) {
    const ConstTensor& tensor = args.*in.argument;
    (p.*in.tensor).data =
        in.copied ? workspace + in.offset : aligned_data(in.name, tensor, in.shape.empty());
  }
  if (plan_.dbias)
    set_bias_sums(args.dbias, p.sk, gpu_.sms(), kernels::kPortableBiasTile, p.bias_sums);
  p.counters = reinterpret_cast<int*>(workspace);
  p.not_finite = p.counters + kernels::kSchedulerCounters;
  p.shift = reinterpret_cast<float*>(workspace + workspace_.shift);
  p.delta = reinterpret_cast<float*>(workspace + workspace_.delta);
  p.dq_accum = reinterpret_cast<float*>(workspace + workspace_.dq_accum);
  p.dq_semaphore = reinterpret_cast<int*>(workspace + workspace_.dq_semaphore);
  return p;
}

void BackwardExecutable::run(const Call& call, const Run& run) const {
  const BackwardArgs& args = *std::get<const BackwardArgs*>(call);
  metadata_.check(args);
  if (workspace_.end == 0) return;
  const CurrentContext current(gpu_.context());
  const auto stream = static_cast<CUstream>(run.stream);
  const LaunchMemory::Lease lease = gpu_.launch_memory().of(run, workspace());
  void* const metadata = lease.data + workspace_.metadata;
  const BackwardParams p = params(metadata_.moved(args, metadata), run, lease.data);
  metadata_.store(args, stream, metadata);
  for (const Input& in : inputs_) {
    if (!in.copied) continue;
    ForwardCopyParams copy = in.copy;
    copy.from = (args.*in.argument).data;
    copy.to = (p.*in.tensor).data;
    launch(stream, copy_, &copy, {kCopyBlocks * gpu_.sms()}, kCopyThreads, 0,
           "launching the kernel that copies rows");
  }
  row_kernels_.launch_first(stream, p);
  if (plan_.ctas() > 0) {
    launch(stream, keys_, &p, {static_cast<int>(plan_.ctas())}, plan_.threads(), plan_.shared_bytes,
           "launching the backward kernel by keys");
  }
  row_kernels_.launch_last(stream, p);
  if (plan_.dbias && p.bias_sums.work_tiles > 0) {
    constexpr int kThreads = 128, kBlocks = 2;  // blocks an SM
    const auto grid = std::min<int64_t>(kBlocks * gpu_.sms(), p.bias_sums.work_tiles);
    launch(stream, bias_gradient_, &p, {static_cast<int>(grid)}, kThreads,
           bias_gradient_kernel(plan_).shared_bytes, "launching the kernel of dbias");
  }
  tensor_gradients_.launch(stream, p, args, lease.data + workspace_.tensor_sums);
}

Explanation BackwardExecutable::explain() const {
  Explanation e = with_reasons(describe(plan_), reasons_);
  metadata_.describe(e);
  return e;
}

WorkspaceNeed BackwardExecutable::workspace() const {
  if (workspace_.end == 0) return {};
  return {workspace_.end, kWorkspaceAlignment, LaunchMemory::kZeroed};
}

const Family& backward_family_of_expressions() {
  static const PlannedFamily<BackwardCandidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kBackward && p.expressions.given(); },
      backward_rejects, backward_candidates);
  return kFamily;
}

const Family& backward_family() {
  static const PlannedFamily<BackwardCandidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kBackward; }, backward_rejects,
      backward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda::portable
