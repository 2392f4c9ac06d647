#include "cuda/decode/decode.h"

#include <fmt/format.h>

#include "call/append_then_attend.h"
#include "cuda/common/append_arguments.h"
#include "cuda/common/few_rows.h"
#include "cuda/common/launch.h"
#include "cuda/common/tensor_map.h"
#include "fulgur/error.h"
#include "kernels/decode/layout.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

KernelUse decode_kernel(const DecodePlan& plan) {
  DecodeKey key = plan;
  key.combine_eights = 1;  // combine.cu's alone
  return {{plan.warpgroup_path() ? "decode/decode_warpgroup.cu" : "decode/decode_warp.cu",
           kernel_config(key)},
          "fulgur_decode",
          plan.shared_bytes};
}

/// It reads neither q, k nor v, no scores, and of new rows only how many there are. Of tiles of
/// keys it knows the chunks alone.
KernelUse combine_kernel(const DecodePlan& plan) {
  DecodeKey key = plan;
  key.head_dim = key.value_dim;
  key.transforms_scores = key.softcap = key.alibi = false;
  key.bias = 0;
  key.k_stages = key.v_stages = key.warp_groups = key.residents = 1;
  key.block_keys = kernels::chunk_keys(key.block_keys);
  key.box_keys = 0;
  key.q_whole = key.rotates_q = key.unread_rows = false;
  return {{"decode/combine.cu", kernel_config(key)}, "fulgur_decode_combine", 0};
}

CodeScales scales_of(const Scales& at) {
  return {nullptr, element_of(at.dtype), at.of_rows, at.batch, at.row, at.head, at.group};
}

StridedTensor tensor_of(const Layout& l) { return {nullptr, l.batch, l.row, l.head}; }

const int* ints(const ConstTensor& t) { return static_cast<const int*>(t.data); }

}  // namespace

std::vector<KernelUse> decode_kernels(const DecodePlan& plan) {
  std::vector<KernelUse> kernels = {decode_kernel(plan)};
  if (plan.has_combine_kernel()) kernels.push_back(combine_kernel(plan));
  if (plan.has_padding()) kernels.push_back(padding_kernel());
  if (plan.copies()) kernels.push_back(copy_kernel());
  return kernels;
}

DecodeExecutable::DecodeExecutable(const Problem& p, Gpu& gpu, const DecodePlan& plan,
                                   Reasons reasons)
    : problem_(p),
      gpu_(gpu),
      plan_(plan),
      reasons_(std::move(reasons)),
      maps_(decode_shapes(p, plan.box_keys)),
      no_keys_(p.sk == 0 || p.total_k == 0),
      metadata_(p, gpu),
      workspace_(workspace_of(p, plan)),
      padding_(padding_params(p)) {
  static_cast<CallParams&>(params_) = call_params(p, band_of(plan, p.mask));
  params_.q = tensor_of(p.q);
  copy_k_ = copy_of(maps_.k, plan.copies_k, workspace_.copies[0], &params_.k);
  copy_v_ = copy_of(maps_.v, plan.copies_v, workspace_.copies[1], &params_.v);
  params_.o = tensor_of(p.out);
  params_.lse_batch_stride = p.lse.batch;
  params_.lse_head_stride = p.lse.head;
  params_.batch = static_cast<int>(p.batch);
  params_.hk = static_cast<int>(p.hk);
  params_.pages = key_pages(p);
  params_.k_scale = scales_of(p.k_descale);
  params_.v_scale = scales_of(p.v_descale);
  params_.k_zero_point = scales_of(p.k_zero_point);
  params_.v_zero_point = scales_of(p.v_zero_point);
  params_.max_splits = plan.max_splits;
  params_.split_floats = plan.split_floats();
  if (plan.schedule == DecodeSchedule::kSplitToFill) {
    params_.to_fill = kernels::divisor(plan.grid);
    params_.to_fit = kernels::divisor(plan.grid - params_.batch * params_.hk);
    params_.heads = kernels::divisor(params_.hk);
  }
  kernel_ = gpu_.kernel(decode_kernel(plan_)).function;
  if (plan_.has_combine_kernel()) combine_kernel_ = gpu_.kernel(combine_kernel(plan_)).function;
  if (plan_.has_padding()) padding_kernel_ = gpu_.kernel(padding_kernel()).function;
  if (plan_.copies()) copy_kernel_ = gpu_.kernel(copy_kernel()).function;
}

DecodeExecutable::Copy DecodeExecutable::copy_of(const TensorShape& shape, const std::string& why,
                                                 int64_t offset, StridedTensor* to) const {
  const bool needed = !why.empty();
  const TensorShape lies = needed ? copied(shape) : shape;
  *to = tensor_of(lies.strides);
  return {needed, offset, copy_params(shape, lies)};
}

DecodeParams DecodeExecutable::arguments(const ForwardArgs& args, char* workspace) const {
  DecodeParams p = params_;
  const auto elements = [](const char* name, const ConstTensor& t, bool any_alignment) {
    return aligned_data(name, t, any_alignment);
  };
  p.q.data = elements("q", args.q, !plan_.q_whole);
  const auto keys = [&](const char* name, const ConstTensor& t, const Copy& copy) {
    if (!copy.needed) return elements(name, t, no_keys_);
    return static_cast<void*>(workspace + copy.offset);
  };
  p.k.data = keys("k", args.k, copy_k_);
  p.v.data = keys("v", args.v, copy_v_);
  p.o.data = elements("out", args.out, !plan_.o_whole);
  if (plan_.box_keys > 0) {
    const auto encode_keys = [&](const TensorShape& shape, void* data, TensorMapBlob* map) {
      encode(shape, shape.empty() ? args.out.data : data, map, Promotion::k128Bytes);
    };
    encode_keys(maps_.k, p.k.data, &p.k_map);
    encode_keys(maps_.v, p.v.data, &p.v_map);
  }
  p.lse = static_cast<float*>(args.lse.data);
  set_tensors(p, args);
  p.sinks = sinks_of(args.sinks);
  p.k_scale.data = args.descales.k_descale.data;
  p.v_scale.data = args.descales.v_descale.data;
  p.k_zero_point.data = args.descales.k_zero_point.data;
  p.v_zero_point.data = args.descales.v_zero_point.data;
  p.pages.table = ints(args.cache.page_table);
  p.pages.indptr = ints(args.cache.page_indptr);
  p.cache_batch_idx = ints(args.cache.cache_batch_idx);
  p.leftpad_k = ints(args.cache.leftpad_k);
  p.tree_mask = static_cast<const unsigned long long*>(args.tree_mask.data);
  p.tickets = reinterpret_cast<int*>(workspace);
  p.partial = reinterpret_cast<float*>(workspace + workspace_.partial);
  return p;
}

void DecodeExecutable::launch_copies(const ForwardArgs& args, const DecodeParams& params,
                                     CUstream stream) const {
  const auto launch_copy = [&](const Copy& copy, const ConstTensor& from, void* to) {
    if (!copy.needed) return;
    ForwardCopyParams p = copy.params;
    p.from = from.data;
    p.to = to;
    launch(stream, copy_kernel_, &p, {kCopyBlocks * gpu_.sms()}, kCopyThreads, 0,
           "launching the kernel that copies rows");
  };
  launch_copy(copy_k_, args.k, params.k.data);
  launch_copy(copy_v_, args.v, params.v.data);
}

void DecodeExecutable::run(const Call& call, const Run& run) const {
  const ForwardArgs& args = *std::get<const ForwardArgs*>(call);
  const auto stream = static_cast<CUstream>(run.stream);
  if (!plan_.appends) {
    metadata_.check(args);
    if (workspace_.end == 0) return;
    const CurrentContext current(gpu_.context());
    const LaunchMemory::Lease lease = gpu_.launch_memory().of(run, workspace());
    return this->run(args, {}, lease.data, stream);
  }
  AppendThenAttend appending(args, problem_.mask);
  metadata_.check(appending.attention());
  const CurrentContext current(gpu_.context());
  const LaunchMemory::Lease lease = gpu_.launch_memory().of(run, workspace());
  appending.rotate_into(lease.data + workspace_.rotated);
  AppendParams append = append_params(appending.call());
  set_lengths(appending.rows(), append);
  this->run(appending.attention(), append, lease.data, stream);
}

void DecodeExecutable::run(const ForwardArgs& args, const AppendParams& append, char* workspace,
                           CUstream stream) const {
  void* const metadata = workspace + workspace_.metadata;
  const DecodeAppendParams params{arguments(metadata_.moved(args, metadata), workspace), append};
  metadata_.store(args, stream, metadata);
  if (params.batch > 0) {  // else all rows are padding
    launch_copies(args, params, stream);
    launch(stream, kernel_, &params, {plan_.grid}, plan_.threads(), plan_.shared_bytes,
           "launching the decode kernel");
    if (plan_.has_combine_kernel() && plan_.max_splits > 1) {
      launch(stream, combine_kernel_, &params,
             {params.batch * params.hk, ceil_div(plan_.combine_warps(), kernels::kCombineWarps)},
             32 * kernels::kCombineWarps, 0, "launching the kernel that combines splits");
    }
  }
  if (!plan_.has_padding()) return;
  ForwardPaddingParams padding = padding_;
  padding.o = params.o.data;
  padding.lse = params.lse;
  padding.cu_seqlens_q = params.cu_seqlens_q;
  padding.seqused_q = params.seqused_q;
  launch_padding(stream, padding_kernel_, padding, gpu_.sms());
}

Explanation DecodeExecutable::explain() const {
  Explanation e = with_reasons(describe(plan_, problem_), reasons_);
  metadata_.describe(e);
  return e;
}

WorkspaceNeed DecodeExecutable::workspace() const {
  if (workspace_.end == 0) return {};
  return {workspace_.end, kWorkspaceAlignment, LaunchMemory::kZeroed};
}

}  // namespace fulgur::cuda::decode
