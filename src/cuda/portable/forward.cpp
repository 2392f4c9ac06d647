#include "cuda/portable/forward.h"

#include <utility>

#include "cuda/common/tensor_shape.h"

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
  add_forward_kernels(plan, kernels);
  return kernels;
}

ForwardExecutable::ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan,
                                     Explanation explanation)
    : ForwardPassExecutable(problem, gpu, std::move(explanation), workspace_of(problem, plan),
                            !forward_shapes(problem, plan.block_keys).o.empty(),
                            plan.store != ForwardPlan::Store::kElements, plan.has_padding()),
      plan_(plan) {
  set_forward_call(params_, problem, plan_);
  params_.work = plan_.work;
  const auto& copies = workspace_of(problem, plan).copies;
  add_operands(
      params_, forward_shapes(problem, plan.block_keys),
      {{{plan.copies_q, copies[0]}, {plan.copies_k, copies[1]}, {plan.copies_v, copies[2]}}});
  map_ = TileMap(problem, plan_, plan_.map_tiles(), gpu);
  map_at_ = workspace_of(problem, plan).map;
  if (plan_.work.q_tiles > 0) kernel_ = gpu.kernel(main_kernel(plan_)).function;
}

void ForwardExecutable::launch(const ForwardArgs& args, const Run& run, char* workspace) const {
  PortableForwardParams params = params_;
  set_run(params, args, run, workspace);
  const auto stream = static_cast<CUstream>(run.stream);
  map_.launch(stream, workspace + map_at_, params, params.expression);
  if (kernel_ != nullptr) {
    cuda::launch(stream, kernel_, &params, {plan_.work.q_tiles}, plan_.threads(),
                 plan_.shared_bytes, "launching the forward kernel");
  }
  launch_padding(args, stream);
}

const Family& forward_family() {
  static const PlannedFamily<ForwardCandidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kForward; }, forward_rejects,
      forward_candidates);
  return kFamily;
}

const Family& forward_family_for_hopper() {
  static const PlannedFamily<ForwardCandidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kForward && exceeds_16_bits(p.dtypes); },
      forward_rejects, forward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda::portable
