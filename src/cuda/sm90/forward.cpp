#include "cuda/sm90/forward.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cuda/common/launch.h"
#include "fulgur/error.h"
#include "kernels/sm90/forward/layout.h"

namespace fulgur::cuda::sm90 {
namespace {

KernelUse main_kernel(const ForwardPlan& plan) {
  return {{"sm90/forward/forward.cu", kernel_config(plan)}, "fulgur_forward", plan.shared_bytes};
}

/// V for products of e4m3.
KernelUse values_kernel(const ForwardPlan& plan) {
  return {{"sm90/forward/values.cu", kernel_config(plan)},
          "fulgur_forward_values",
          kernels::values_shared_bytes(kernels::stretch_keys(plan.block_keys), plan.block_keys)};
}

}  // namespace

std::vector<KernelUse> forward_kernels(const ForwardPlan& plan) {
  std::vector<KernelUse> kernels;
  if (plan.work.q_tiles > 0) kernels.push_back(main_kernel(plan));
  if (plan.has_padding()) kernels.push_back(padding_kernel());
  if (plan.copies()) kernels.push_back(copy_kernel());
  if (plan.widens_v) kernels.push_back(widen_kernel());
  if (plan.work.q_tiles > 0 && plan.centers_v()) kernels.push_back(values_kernel(plan));
  return kernels;
}

ForwardExecutable::ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan,
                                     Reasons reasons)
    : gpu_(gpu),
      plan_(plan),
      reasons_(std::move(reasons)),
      maps_(forward_shapes(problem, plan.box_keys)),
      numbers_(problem, gpu),
      expressions_(problem),
      workspace_(workspace_of(problem, plan)) {
  set_params(problem);
  set_inputs();
  if (plan_.work.q_tiles > 0) {
    kernel_ = gpu_.kernel(main_kernel(plan_)).function;
    if (plan_.centers_v()) values_kernel_ = gpu_.kernel(values_kernel(plan_)).function;
  }
  if (plan_.has_padding()) padding_kernel_ = gpu_.kernel(padding_kernel()).function;
}

void ForwardExecutable::set_params(const Problem& p) {
  if (plan_.counters() * int64_t{sizeof(int)} > LaunchMemory::kZeroed) {
    throw Error(Status::kInternal,
                fmt::format("{} counters do not fit the workspace", plan_.counters()));
  }
  static_cast<CallParams&>(params_) = call_params(p, band_of(plan_, p.mask));
  params_.o = {nullptr, p.out.batch, p.out.row, p.out.head};
  params_.lse_batch_stride = p.lse.batch;
  params_.lse_head_stride = p.lse.head;
  params_.work = plan_.work;
  params_.pages = key_pages(p);
  params_.q_descale = descale_of(p.q_descale);
  params_.k_descale = descale_of(p.k_descale);
  params_.v_descale = descale_of(p.v_descale);
  padding_ = padding_params(p);
  if (!plan_.centers_v()) return;
  params_.values = centered_values(p, plan_);
  values_shared_bytes_ = kernels::values_shared_bytes(static_cast<int>(p.sk), plan_.block_keys);
  // A CTA for 32 columns of a stretch.
  const int columns = static_cast<int>(p.batch * p.hk) * plan_.value_dim;
  values_grid_ = p.sk > 0 ? columns / 32 * params_.values.stretches : 0;
}

void ForwardExecutable::set_inputs() {
  const auto input = [&](const char* name, const TensorShape& shape, DType dtype, bool copied,
                         int64_t offset, TensorMapBlob ForwardParams::*map,
                         StridedTensor ForwardParams::*tensor) {
    Input in{name,  copied ? cuda::copied(shape, dtype) : shape, copied, offset, {}, {}, map,
             tensor};
    if (copied) {
      const bool widens = dtype != shape.dtype;
      in.copies = gpu_.kernel(widens ? widen_kernel() : copy_kernel()).function;
    }
    const Layout& to = in.shape.strides;
    if (tensor != nullptr) params_.*tensor = {nullptr, to.batch, to.row, to.head};
    in.copy = copy_params(shape, in.shape);
    return in;
  };
  const auto& [q, k, v, bias] = workspace_.copies;
  const OperandTypes types = plan_.dtypes;
  inputs_ = {input("q", maps_.q, types.q, !plan_.copies_q.empty(), q, &ForwardParams::q_map,
                   &ForwardParams::q),
             input("k", maps_.k, types.k, !plan_.copies_k.empty(), k, &ForwardParams::k_map,
                   &ForwardParams::k),
             input("v", maps_.v, types.v, !plan_.copies_v.empty(), v,
                   plan_.centers_v() ? nullptr : &ForwardParams::v_map, &ForwardParams::v)};
  if (plan_.bias != 0) {
    inputs_.push_back(input("bias", maps_.bias, maps_.bias.dtype, !plan_.copies_bias.empty(), bias,
                            &ForwardParams::bias_map, nullptr));
  }
}

ForwardExecutable::Arguments ForwardExecutable::arguments(const ForwardArgs& args, const Run& run,
                                                          char* workspace) const {
  Arguments a{params_, padding_, {}};
  ForwardParams& p = a.forward;
  p.counters = reinterpret_cast<int*>(workspace);
  p.tickets = p.counters + kernels::kSchedulerCounters;
  p.partial = reinterpret_cast<float*>(workspace + workspace_.partial);
  p.values.image = reinterpret_cast<unsigned char*>(workspace + workspace_.image);
  p.values.means = reinterpret_cast<float*>(workspace + workspace_.means);
  p.values.sums = reinterpret_cast<RowSum*>(workspace + workspace_.sums);
  set_tensors(p, args);
  p.expression = expressions_.arguments(args.tensors);
  set_random_numbers(p, run);
  a.padding.cu_seqlens_q = p.cu_seqlens_q;
  a.padding.seqused_q = p.seqused_q;
  p.pages.table = static_cast<const int*>(args.cache.page_table.data);
  p.pages.indptr = static_cast<const int*>(args.cache.page_indptr.data);
  p.sinks = sinks_of(args.sinks);
  p.q_descale.data = args.descales.q_descale.data;
  p.k_descale.data = args.descales.k_descale.data;
  p.v_descale.data = args.descales.v_descale.data;
  p.lse = a.padding.lse = static_cast<float*>(args.lse.data);

  const bool elements = plan_.store == ForwardPlan::Store::kElements;
  void* const out = elements ? args.out.data : aligned_data("out", args.out, maps_.o.empty());
  if (plan_.store == ForwardPlan::Store::kTiles) encode(maps_.o, out, &p.o_map);
  p.o.data = a.padding.o = out;

  const std::array<const ConstTensor*, 4> tensors = {&args.q, &args.k, &args.v, &args.bias};
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Input& in = inputs_[i];
    a.copies[i] = in.copy;
    a.copies[i].from = tensors[i]->data;
    a.copies[i].to = workspace + in.offset;
    if (in.map == nullptr) {
      (p.*in.tensor).data = const_cast<void*>(tensors[i]->data);
      continue;
    }
    void* data = in.copied ? a.copies[i].to : aligned_data(in.name, *tensors[i], in.shape.empty());
    // An empty q or out launches nothing; empty k and v are never read, but their maps must be
    // valid: they lie around out.
    if (in.shape.empty()) data = out;
    encode(in.shape, data, &(p.*in.map));
    if (in.tensor != nullptr) (p.*in.tensor).data = data;
  }
  return a;
}

void ForwardExecutable::launch(const Arguments& arguments, CUstream stream) const {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i].copied) continue;
    cuda::launch(stream, inputs_[i].copies, &arguments.copies[i], {kCopyBlocks * gpu_.sms()},
                 kCopyThreads, 0, "launching the kernel that copies rows");
  }
  if (values_grid_ > 0) {
    cuda::launch(stream, values_kernel_, &arguments.forward, {values_grid_},
                 kernels::kValuesThreads, values_shared_bytes_,
                 "launching the kernel that centres V");
  }
  if (plan_.work.q_tiles > 0) {
    cuda::launch(stream, kernel_, &arguments.forward, {plan_.grid}, plan_.threads(),
                 plan_.shared_bytes, "launching the forward kernel");
  }
  if (plan_.has_padding()) {
    launch_padding(stream, padding_kernel_, arguments.padding, gpu_.sms());
  }
}

void ForwardExecutable::run(const Call& call, const Run& run) const {
  const ForwardArgs& args = *std::get<const ForwardArgs*>(call);
  numbers_.check(args);
  if (maps_.o.empty()) return;
  const CurrentContext current(gpu_.context());
  const auto stream = static_cast<CUstream>(run.stream);
  const LaunchMemory::Lease lease = gpu_.launch_memory().of(run, workspace());
  char* const workspace = lease.data;
  void* const numbers = workspace + workspace_.numbers;
  const Arguments there = arguments(numbers_.moved(args, numbers), run, workspace);
  numbers_.store(args, stream, numbers);
  launch(there, stream);
}

Explanation ForwardExecutable::explain() const {
  Explanation e = with_reasons(describe(plan_), reasons_);
  numbers_.describe(e);
  return e;
}

WorkspaceNeed ForwardExecutable::workspace() const {
  if (workspace_.end == 0) return {};
  return {workspace_.end, kWorkspaceAlignment, LaunchMemory::kZeroed};
}

}  // namespace fulgur::cuda::sm90
