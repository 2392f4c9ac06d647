#include "cuda/portable/forward.h"

#include <utility>

#include "cuda/common/launch.h"

namespace fulgur::cuda::portable {
namespace {

KernelUse main_kernel(const ForwardPlan& plan) {
  return {{"portable/forward/forward.cu", kernel_config(plan)},
          "fulgur_portable_forward",
          plan.shared_bytes};
}

}  // namespace

std::vector<KernelUse> forward_kernels(const ForwardPlan& plan) {
  std::vector<KernelUse> kernels;
  if (plan.work.q_tiles > 0) kernels.push_back(main_kernel(plan));
  if (plan.has_padding()) kernels.push_back(padding_kernel());
  if (plan.copies()) kernels.push_back(copy_kernel());
  return kernels;
}

ForwardExecutable::ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan,
                                     Reasons reasons)
    : gpu_(gpu),
      plan_(plan),
      reasons_(std::move(reasons)),
      out_(forward_shapes(problem, plan.block_keys).o),
      numbers_(problem, gpu),
      expressions_(problem),
      workspace_(workspace_of(problem, plan)),
      padding_(padding_params(problem)) {
  set_params(problem);
  set_inputs(problem);
  if (plan_.work.q_tiles > 0) kernel_ = gpu_.kernel(main_kernel(plan_)).function;
  if (plan_.has_padding()) padding_kernel_ = gpu_.kernel(padding_kernel()).function;
  if (plan_.copies()) copy_kernel_ = gpu_.kernel(copy_kernel()).function;
}

void ForwardExecutable::set_params(const Problem& p) {
  static_cast<CallParams&>(params_) = call_params(p, band_of(plan_, p.mask));
  params_.o = {nullptr, p.out.batch, p.out.row, p.out.head};
  params_.lse_batch_stride = p.lse.batch;
  params_.lse_head_stride = p.lse.head;
  params_.work = plan_.work;
  params_.pages = key_pages(p);
}

void ForwardExecutable::set_inputs(const Problem& p) {
  const auto input = [&](const char* name, const TensorShape& shape, bool copied, int64_t offset,
                         StridedTensor PortableForwardParams::*tensor) {
    const TensorShape lies = copied ? cuda::copied(shape) : shape;
    params_.*tensor = {nullptr, lies.strides.batch, lies.strides.row, lies.strides.head};
    return Input{name, lies, copied, offset, copy_params(shape, lies), tensor};
  };
  const ForwardShapes shapes = forward_shapes(p, plan_.block_keys);
  const auto& [q, k, v] = workspace_.copies;
  inputs_ = {input("q", shapes.q, !plan_.copies_q.empty(), q, &PortableForwardParams::q),
             input("k", shapes.k, !plan_.copies_k.empty(), k, &PortableForwardParams::k),
             input("v", shapes.v, !plan_.copies_v.empty(), v, &PortableForwardParams::v)};
}

PortableForwardParams ForwardExecutable::arguments(const ForwardArgs& args, const Run& run,
                                                   char* workspace) const {
  PortableForwardParams p = params_;
  set_tensors(p, args);
  p.expression = expressions_.arguments(args.tensors);
  set_random_numbers(p, run);
  p.pages.table = static_cast<const int*>(args.cache.page_table.data);
  p.pages.indptr = static_cast<const int*>(args.cache.page_indptr.data);
  p.cache_batch_idx = static_cast<const int*>(args.cache.cache_batch_idx.data);
  p.leftpad_k = static_cast<const int*>(args.cache.leftpad_k.data);
  p.tree_mask = static_cast<const unsigned long long*>(args.tree_mask.data);
  p.sinks = sinks_of(args.sinks);
  p.lse = static_cast<float*>(args.lse.data);
  const bool elements = plan_.store == ForwardPlan::Store::kElements;
  p.o.data = elements ? args.out.data : aligned_data("out", args.out, out_.empty());
  const std::array<const ConstTensor*, 3> tensors = {&args.q, &args.k, &args.v};
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Input& in = inputs_[i];
    (p.*in.tensor).data =
        in.copied ? workspace + in.offset : aligned_data(in.name, *tensors[i], in.shape.empty());
  }
  return p;
}

void ForwardExecutable::launch(const ForwardArgs& args, const PortableForwardParams& params,
                               CUstream stream) const {
  const std::array<const ConstTensor*, 3> tensors = {&args.q, &args.k, &args.v};
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Input& in = inputs_[i];
    if (!in.copied) continue;
    ForwardCopyParams copy = in.copy;
    copy.from = tensors[i]->data;
    copy.to = (params.*in.tensor).data;
    cuda::launch(stream, copy_kernel_, &copy, {kCopyBlocks * gpu_.sms()}, kCopyThreads, 0,
                 "launching the kernel that copies rows");
  }
  if (plan_.work.q_tiles > 0) {
    cuda::launch(stream, kernel_, &params, {plan_.work.q_tiles}, plan_.threads(),
                 plan_.shared_bytes, "launching the forward kernel");
  }
  if (!plan_.has_padding()) return;
  ForwardPaddingParams padding = padding_;
  padding.o = params.o.data;
  padding.lse = params.lse;
  padding.cu_seqlens_q = params.cu_seqlens_q;
  padding.seqused_q = params.seqused_q;
  launch_padding(stream, padding_kernel_, padding, gpu_.sms());
}

void ForwardExecutable::run(const Call& call, const Run& run) const {
  const ForwardArgs& args = *std::get<const ForwardArgs*>(call);
  numbers_.check(args);
  if (out_.empty()) return;
  const CurrentContext current(gpu_.context());
  const auto stream = static_cast<CUstream>(run.stream);
  LaunchMemory::Lease lease;
  if (workspace_.end > 0) lease = gpu_.launch_memory().of(run, workspace());
  void* const numbers = lease.data + workspace_.numbers;
  const ForwardArgs there = numbers_.moved(args, numbers);
  const PortableForwardParams params = arguments(there, run, lease.data);
  numbers_.store(args, stream, numbers);
  launch(there, params, stream);
}

Explanation ForwardExecutable::explain() const {
  Explanation e = with_reasons(describe(plan_), reasons_);
  numbers_.describe(e);
  return e;
}

WorkspaceNeed ForwardExecutable::workspace() const {
  if (workspace_.end == 0) return {};
  return {workspace_.end, kWorkspaceAlignment, 0};
}

const Family& forward_family() {
  static const PlannedFamily<ForwardCandidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kForward; }, forward_rejects,
      forward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda::portable
