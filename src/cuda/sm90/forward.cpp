#include "cuda/sm90/forward.h"

#include <fmt/format.h>

#include <utility>

#include "cuda/common/launch.h"
#include "cuda/common/tensor_map.h"
#include "fulgur/error.h"
#include "kernels/sm90/forward/layout.h"

namespace fulgur::cuda::sm90 {
namespace {

/// The tensor maps of q, k, v and the bias.
constexpr TensorMapBlob ForwardParams::*kMaps[] = {&ForwardParams::q_map, &ForwardParams::k_map,
                                                   &ForwardParams::v_map, &ForwardParams::bias_map};

KernelUse main_kernel(const ForwardPlan& plan) {
  return {{"sm90/forward/forward.cu", kernel_config(plan)}, "fulgur_forward", plan.shared_bytes};
}

/// The kernel that prepares V for products of e4m3.
KernelUse values_kernel(const ForwardPlan& plan) {
  return {{"sm90/forward/values.cu", kernel_config(plan)},
          "fulgur_forward_values",
          kernels::kValuesThreads / 32 * kernels::kValuesWarpBytes};
}

}  // namespace

std::vector<KernelUse> forward_kernels(const ForwardPlan& plan) {
  std::vector<KernelUse> kernels;
  if (plan.work.q_tiles > 0) kernels.push_back(main_kernel(plan));
  add_forward_kernels(plan, kernels);
  if (plan.widens_v) kernels.push_back(widen_kernel(*plan.widens_v));
  if (plan.work.q_tiles > 0 && plan.centers_v()) kernels.push_back(values_kernel(plan));
  return kernels;
}

ForwardExecutable::ForwardExecutable(const Problem& p, Gpu& gpu, const ForwardPlan& plan,
                                     Explanation explanation)
    : ForwardPassExecutable(p, gpu, std::move(explanation), workspace_of(p, plan),
                            !forward_shapes(p, plan.box_keys).o.empty(),
                            plan.store != ForwardPlan::Store::kElements, plan.has_padding()),
      plan_(plan),
      out_(forward_shapes(p, plan.box_keys).o),
      at_(workspace_of(p, plan)) {
  if (plan_.counters() * int64_t{sizeof(int)} > LaunchMemory::kZeroed) {
    throw Error(Status::kInternal,
                fmt::format("{} counters do not fit the workspace", plan_.counters()));
  }
  set_forward_call(params_, p, plan_);
  params_.work = plan_.work;
  params_.q_descale = descale_of(p.q_descale);
  params_.k_descale = descale_of(p.k_descale);
  params_.v_descale = descale_of(p.v_descale);
  const ForwardShapes shapes = forward_shapes(p, plan.box_keys);
  const OperandTypes types = plan.dtypes;
  const auto& copies = at_.copies;
  add_operands(params_, shapes,
               {{{plan.copies_q, copies[0], types.q},
                 {plan.copies_k, copies[1], types.k},
                 {plan.copies_v, copies[2], types.v}}});
  inputs_[2].any_alignment |= plan.centers_v();  // no tensor map reads V
  if (plan.bias_tile() != 0)
    add_input("bias", &ForwardArgs::bias, shapes.bias, {plan.copies_bias, copies[3]});
  if (plan_.work.q_tiles == 0) return;
  kernel_ = gpu.kernel(main_kernel(plan_)).function;
  {
    const CurrentContext current(gpu.context());
    if (plan_.store == ForwardPlan::Store::kTiles) encode(out_, &params_.o_map);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (has_map(i)) encode(inputs_[i].shape, &(params_.*kMaps[i]));
    }
  }
  map_ = TileMap(p, plan_, plan_.map_tiles(), gpu);
  if (!plan_.centers_v()) return;
  values_kernel_ = gpu.kernel(values_kernel(plan_)).function;
  params_.values = centered_values(p, plan_);
  values_warps_ = kernels::values_warps(static_cast<int>(p.sk), plan_.block_keys);
  // A CTA computes 32 columns of a segment.
  const int columns = static_cast<int>(p.batch * p.hk) * plan_.value_dim;
  values_grid_ = p.sk > 0 ? columns / 32 * params_.values.segments : 0;
}

bool ForwardExecutable::has_map(size_t input) const {
  return !plan_.centers_v() || kMaps[input] != &ForwardParams::v_map;
}

ForwardParams ForwardExecutable::arguments(const ForwardArgs& args, const Run& run,
                                           char* workspace) const {
  ForwardParams p = params_;
  set_run(p, args, run, workspace);
  p.q_descale.data = args.descales.q_descale.data;
  p.k_descale.data = args.descales.k_descale.data;
  p.v_descale.data = args.descales.v_descale.data;
  p.counters = reinterpret_cast<int*>(workspace);
  p.tickets = p.counters + kernels::kSchedulerCounters;
  p.partial = reinterpret_cast<float*>(workspace + at_.partial);
  p.values.image = reinterpret_cast<unsigned char*>(workspace + at_.image);
  p.values.means = reinterpret_cast<float*>(workspace + at_.means);
  p.values.mean_steps = reinterpret_cast<unsigned char*>(workspace + at_.mean_steps);
  p.values.sums = reinterpret_cast<RowSum*>(workspace + at_.sums);
  if (plan_.store == ForwardPlan::Store::kTiles) place(out_, p.o.data, &p.o_map);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!has_map(i)) continue;
    // With an empty q or out nothing is launched. Empty k and v are never read, but their tensor
    // maps must be valid: they point to out.
    const TensorShape& shape = inputs_[i].shape;
    place(shape, shape.empty() ? p.o.data : inputs_[i].data(args, workspace), &(p.*kMaps[i]));
  }
  return p;
}

void ForwardExecutable::launch(const ForwardArgs& args, const Run& run, char* workspace) const {
  const auto stream = static_cast<CUstream>(run.stream);
  if (kernel_ == nullptr) return launch_padding(args, stream);
  ForwardParams params = arguments(args, run, workspace);
  map_.launch(stream, workspace + at_.map, params, params.expression);
  if (values_grid_ > 0) {
    cuda::launch(stream, values_kernel_, &params, {values_grid_}, 32 * values_warps_,
                 values_warps_ * kernels::kValuesWarpBytes, "launching the kernel that centres V");
  }
  // The kernel loads Q and K and computes first scores while V is prepared, and starts while the
  // map is made.
  const bool prepares_v = plan_.pairs && (values_grid_ > 0 || plan_.widens_v);
  const Start start = prepares_v || map_.launches() ? Start::kEarly : Start::kAfterAll;
  cuda::launch(stream, kernel_, &params, {plan_.grid}, plan_.threads(), plan_.shared_bytes,
               "launching the forward kernel", start);
  launch_padding(args, stream);
}

}  // namespace fulgur::cuda::sm90
