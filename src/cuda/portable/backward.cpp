#include "cuda/portable/backward.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/common/launch.h"
#include "cuda/portable/backward_parts.h"

namespace fulgur::cuda::portable {
namespace {

/// Whether a plan launches round.cu, which rounds dQ and repairs dK and dV.
bool has_round_kernel(const BackwardPlan& plan) { return plan.accumulates_dq() || plan.repairs(); }

/// The tensors that kernels copy to shared memory.
constexpr StridedTensor BackwardParams::*kInputs[] = {&BackwardParams::q, &BackwardParams::k,
                                                      &BackwardParams::v, &BackwardParams::dout};

KernelUse keys_kernel(const BackwardPlan& plan) {
  BackwardKey key = plan;
  key.has_dlse = false;  // only the kernel that prepares rows depends on it
  const char* const source =
      plan.roles == 1 ? "portable/backward/keys.cu" : "portable/backward/keys_wide.cu";
  return {{source, kernel_config(key)}, "fulgur_portable_backward", plan.shared_bytes};
}

}  // namespace

std::vector<KernelUse> backward_kernels(const BackwardPlan& plan) {
  std::vector<KernelUse> kernels = {keys_kernel(plan)};
  if (plan.reduces()) kernels.push_back(reduce_kernel(plan));
  add_backward_kernels(plan, plan, has_round_kernel(plan),
                       bias_gradient_kernel(plan, plan, plan.whole_columns), kernels);
  if (plan.dtensors) {
    std::ranges::move(expression_gradient_kernels(key_of_tiles(plan, plan.whole_columns)),
                      std::back_inserter(kernels));
  }
  return kernels;
}

BackwardExecutable::BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan,
                                       Explanation explanation)
    : BackwardPassExecutable(problem, gpu, std::move(explanation), plan, plan,
                             workspace_of(problem, plan), std::size(kInputs), plan.p_log2(),
                             has_round_kernel(plan),
                             bias_gradient_kernel(plan, plan, plan.whole_columns)),
      plan_(plan),
      at_(workspace_of(problem, plan)) {
  if (at_.end == 0) return;
  params_.key_blocks = plan_.key_blocks;
  for (size_t i = 0; i < inputs_.size(); ++i)
    params_.*kInputs[i] = strided(inputs_[i].shape.strides);
  keys_ = gpu.kernel(keys_kernel(plan_)).function;
  if (plan_.reduces()) reduce_ = gpu.kernel(reduce_kernel(plan_)).function;
  tensor_gradients_ = ExpressionGradients(problem, key_of_tiles(plan_, plan_.whole_columns), gpu);
}

void BackwardExecutable::launch(const BackwardArgs& args, const Run& run, char* workspace) const {
  const auto stream = static_cast<CUstream>(run.stream);
  BackwardParams p = arguments(args, run, workspace);
  for (size_t i = 0; i < inputs_.size(); ++i)
    (p.*kInputs[i]).data = inputs_[i].data(args, workspace);
  launch_map(stream, workspace, p);
  row_kernels_.launch_first(stream, p);
  if (plan_.ctas() > 0) {
    cuda::launch(stream, keys_, &p, {static_cast<int>(plan_.ctas())}, plan_.threads(),
                 plan_.shared_bytes, "launching the backward kernel by keys");
  }
  if (reduce_ != nullptr) launch_reduce(stream, reduce_, p, gpu_.sms());
  row_kernels_.launch_last(stream, p);
  launch_bias_gradient(stream, p);
  tensor_gradients_.launch(stream, p, args, workspace + at_.tensor_sums);
}

const Family& backward_family_for_hopper() {
  static const PlannedFamily<BackwardCandidate> kFamily(
      [](const Problem& p) {
        const bool others = p.expressions.given() || exceeds_16_bits(p.dtypes);
        return p.pass == Pass::kBackward && others;
      },
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
