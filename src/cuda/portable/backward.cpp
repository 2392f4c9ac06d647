#include "cuda/portable/backward.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/common/launch.h"
#include "kernels/portable/backward/bias_tile.h"

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

/// The kernel that adds dK and dV of splits.
KernelUse reduce_kernel(const BackwardPlan& plan) {
  BackwardKey key;
  static_cast<AnyBackwardKey&>(key) = reduce_key(plan);
  key.splits_heads = true;
  return {{"portable/backward/reduce.cu", kernel_config(key)}, "fulgur_portable_reduce", 0};
}

/// The key of kernels with tiles of 64 queries and 64 keys, whatever tiles the kernel by keys has.
BackwardKey key_of_tiles(const BackwardPlan& plan) {
  BackwardKey key;
  static_cast<KernelKey&>(key) = plan;
  key.maps_tiles = false;
  key.block_rows = key.block_keys = kernels::kPortableBiasTile;
  key.dropout = plan.dropout;
  key.whole_columns = plan.whole_columns;
  key.dq_by_fours = plan.dq_by_fours;
  key.early_starts = plan.early_starts;
  return key;
}

BiasGradientKernel bias_gradient_kernel(const BackwardPlan& plan) {
  if (!plan.dbias) return {};
  const BackwardKey key = key_of_tiles(plan);
  const int shared_bytes =
      kernels::portable_bias_layout(operands_of(key), key.head_dim, key.value_dim).bytes;
  return {{{"portable/backward/bias_gradient.cu", kernel_config(key)},
           "fulgur_portable_bias_gradient",
           shared_bytes},
          kernels::kPortableBiasTile,
          128,
          2};
}

}  // namespace

std::vector<KernelUse> backward_kernels(const BackwardPlan& plan) {
  std::vector<KernelUse> kernels = {keys_kernel(plan)};
  if (plan.reduces()) kernels.push_back(reduce_kernel(plan));
  add_backward_kernels(plan, plan, has_round_kernel(plan), bias_gradient_kernel(plan), kernels);
  if (plan.dtensors)
    std::ranges::move(expression_gradient_kernels(key_of_tiles(plan)), std::back_inserter(kernels));
  return kernels;
}

BackwardExecutable::BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan,
                                       Explanation explanation)
    : BackwardPassExecutable(problem, gpu, std::move(explanation), plan, plan,
                             workspace_of(problem, plan), std::size(kInputs), plan.p_log2(),
                             has_round_kernel(plan), bias_gradient_kernel(plan)),
      plan_(plan),
      at_(workspace_of(problem, plan)) {
  if (at_.end == 0) return;
  params_.key_blocks = plan_.key_blocks;
  for (size_t i = 0; i < inputs_.size(); ++i)
    params_.*kInputs[i] = strided(inputs_[i].shape.strides);
  keys_ = gpu.kernel(keys_kernel(plan_)).function;
  if (plan_.reduces()) reduce_ = gpu.kernel(reduce_kernel(plan_)).function;
  tensor_gradients_ = ExpressionGradients(problem, key_of_tiles(plan_), gpu);
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
  if (reduce_ != nullptr) {
    constexpr int kThreads = 256, kBlocks = 8, kMaxGridY = 65535;  // kBlocks: CTAs per SM
    const int heads = std::clamp(p.batch * (p.hq / p.group), 1, kMaxGridY);
    cuda::launch(stream, reduce_, &p, {ceil_div(kBlocks * gpu_.sms(), heads), heads}, kThreads, 0,
                 "launching the kernel that reduces dK and dV");
  }
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
