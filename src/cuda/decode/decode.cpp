#include "cuda/decode/decode.h"

#include <utility>

#include "call/append_then_attend.h"
#include "cuda/common/append_arguments.h"
#include "cuda/common/launch.h"
#include "cuda/common/tensor_map.h"
#include "kernels/decode/layout.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

const char* source_of(const DecodePlan& plan) {
  if (plan.is_wide_by_warpgroups()) return "decode/wide/decode_wide_warpgroup.cu";
  if (plan.is_wide()) return "decode/wide/decode_wide.cu";
  if (plan.converts_in_registers()) return "decode/decode_codes_warpgroup.cu";
  if (plan.warpgroup_path()) return "decode/decode_warpgroup.cu";
  return plan.has_codes() ? "decode/decode_codes.cu" : "decode/decode_warp.cu";
}

KernelUse decode_kernel(const DecodePlan& plan) {
  DecodeKey key = plan;
  key.combine_eights = 1;  // only combine.cu reads it
  const bool spills_outside_of_loops =
      plan.heads > 1 || plan.is_wide() || plan.convert_warps > 0 || exceeds_16_bits(plan.dtypes);
  return {{source_of(plan), kernel_config(key)},
          "fulgur_decode",
          plan.shared_bytes,
          spills_outside_of_loops ? kSpilledBytesOutsideOfLoops : kFewSpilledBytes};
}

/// The combine kernel reads neither q, k, v nor scores, and of new rows only their number. It
/// counts keys in chunks, not in tiles. Its constants do not depend on the rest of the plan, so
/// that plans share it.
KernelUse combine_kernel(const DecodePlan& plan) {
  DecodeKey key = plan;
  if (!plan.is_wide()) key.head_dim = key.value_dim;  // a head may be wide by d alone
  key.transforms_scores = key.softcap = key.alibi = false;
  key.bias = 0;
  key.score_mod = key.mask_mod = key.score_mod_slope = false;
  key.expressions.clear();
  key.k_stages = key.v_stages = key.warp_groups = key.residents = 1;
  key.code_stages = 0;
  key.block_keys = kernels::chunk_keys(key.block_keys);
  key.box_keys = 0;
  key.q_whole = key.rotates_q = key.unread_rows = false;
  return {{"decode/combine.cu", kernel_config(key)}, "fulgur_decode_combine", 0};
}

CodeScales scales_of(const Scales& at) {
  const int64_t bytes = size_of(at.dtype);
  return {nullptr,          element_of(at.dtype), at.of_rows,      false,
          bytes * at.batch, bytes * at.row,       bytes * at.head, bytes * at.group};
}

/// Sets the data of scales. A lane copies `count` scales of a key at once. `heads` are read
/// together.
void set_data(const ConstTensor& t, int count, int heads, CodeScales* scales) {
  scales->data = t.data;
  const int bytes = kernels::bytes_of(scales->type), piece = scale_piece(count * bytes);
  const auto at = reinterpret_cast<intptr_t>(t.data);
  if (heads > 1) {  // the scales of all heads are copied by 16 bytes
    scales->runs = (at | scales->batch | scales->row | heads * scales->head) % 16 == 0;
    return;
  }
  scales->runs = piece > 0 && (count == 1 || scales->group == bytes) &&
                 (at | scales->batch | scales->row | scales->head) % piece == 0;
}

}  // namespace

std::vector<KernelUse> decode_kernels(const DecodePlan& plan) {
  std::vector<KernelUse> kernels = {decode_kernel(plan)};
  if (plan.has_combine_kernel()) kernels.push_back(combine_kernel(plan));
  add_forward_kernels(plan, kernels);
  return kernels;
}

DecodeExecutable::DecodeExecutable(const Problem& p, Gpu& gpu, const DecodePlan& plan,
                                   Explanation explanation)
    : ForwardPassExecutable(p, gpu, std::move(explanation), workspace_of(p, plan),
                            workspace_of(p, plan).end > 0, plan.o_whole, plan.has_padding()),
      problem_(p),
      plan_(plan),
      at_(workspace_of(p, plan)) {
  set_forward_call(params_, p, plan);
  add_operands(params_, decode_shapes(p, plan.box_keys),
               {{{}, {plan.copies_k, at_.copies[0]}, {plan.copies_v, at_.copies[1]}}});
  inputs_[0].any_alignment = !plan.q_whole;
  inputs_[1].any_alignment = inputs_[2].any_alignment = p.sk == 0 || p.total_k == 0;
  params_.batch = static_cast<int>(p.batch);
  params_.hk = static_cast<int>(p.hk / plan.heads);
  params_.q_scale = scales_of(p.q_descale);
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
  if (plan.box_keys > 0) {
    const CurrentContext current(gpu.context());
    const auto maps = box_shapes(p, plan, plan.box_keys);
    encode(maps[0], &params_.k_map, Promotion::k128Bytes);
    encode(maps[1], &params_.v_map, Promotion::k128Bytes);
  }
  kernel_ = gpu.kernel(decode_kernel(plan)).function;
  if (plan.has_combine_kernel()) combine_kernel_ = gpu.kernel(combine_kernel(plan)).function;
}

DecodeParams DecodeExecutable::arguments(const ForwardArgs& args, const Run& run,
                                         char* workspace) const {
  DecodeParams p = params_;
  set_run(p, args, run, workspace);
  if (plan_.box_keys > 0) {
    const auto place_keys = [&](const TensorShape& shape, void* data, TensorMapBlob* map) {
      place(shape, shape.empty() ? args.out.data : data, map);
    };
    place_keys(inputs_[1].shape, p.k.data, &p.k_map);
    place_keys(inputs_[2].shape, p.v.data, &p.v_map);
  }
  p.v_in_k =
      plan_.is_wide_by_warpgroups() && may_have_v_in_k(problem_, plan_) && p.v.data == p.k.data;
  p.q_scale.data = args.descales.q_descale.data;
  set_data(args.descales.k_descale, plan_.k_scales, plan_.heads, &p.k_scale);
  set_data(args.descales.v_descale, plan_.v_scales, plan_.heads, &p.v_scale);
  set_data(args.descales.k_zero_point, plan_.k_scales, plan_.heads, &p.k_zero_point);
  set_data(args.descales.v_zero_point, plan_.v_scales, plan_.heads, &p.v_zero_point);
  p.tickets = reinterpret_cast<int*>(workspace);
  p.partial = reinterpret_cast<float*>(workspace + at_.partial);
  return p;
}

void DecodeExecutable::run(const Call& call, const Run& run) const {
  if (!plan_.appends) return ForwardPassExecutable::run(call, run);
  AppendThenAttend appending(*std::get<const ForwardArgs*>(call), problem_.mask, false);
  metadata_.check(appending.attention());
  const CurrentContext current(gpu_.context());
  const LaunchMemory::Lease lease = memory(run);
  appending.rotate_into(lease.data + at_.rotated);
  AppendParams append = append_params(appending.call());
  set_lengths(appending.rows(), append);
  std::optional<ForwardArgs> moved;
  launch(ready(appending.attention(), run, lease.data, moved), &append, run, lease.data);
}

void DecodeExecutable::launch(const ForwardArgs& args, const Run& run, char* workspace) const {
  launch(args, nullptr, run, workspace);
}

void DecodeExecutable::launch(const ForwardArgs& args, const AppendParams* append, const Run& run,
                              char* workspace) const {
  const auto stream = static_cast<CUstream>(run.stream);
  const DecodeParams attention = arguments(args, run, workspace);
  const auto launch_kernels = [&](const void* params) {
    cuda::launch(stream, kernel_, params, {plan_.grid, plan_.row_blocks}, plan_.threads(),
                 plan_.shared_bytes, "launching the decode kernel");
    if (combine_kernel_ == nullptr || plan_.max_splits <= 1) return;
    cuda::launch(stream, combine_kernel_, params,
                 {attention.batch * attention.hk * plan_.row_blocks,
                  ceil_div(plan_.combine_warps(), kernels::kCombineWarps)},
                 32 * kernels::kCombineWarps, 0, "launching the kernel that combines splits");
  };
  if (attention.batch == 0) return launch_padding(args, stream);  // no row is of a sequence
  if (append == nullptr) {
    launch_kernels(&attention);
  } else {
    const DecodeAppendParams both{{*append}, attention};
    launch_kernels(&both);
  }
  launch_padding(args, stream);
}

}  // namespace fulgur::cuda::decode
