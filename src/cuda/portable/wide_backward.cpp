#include "cuda/portable/wide_backward.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/common/launch.h"
#include "cuda/portable/backward_parts.h"

namespace fulgur::cuda::portable {
namespace {

/// The tensors that kernels copy to shared memory.
constexpr StridedTensor BackwardParams::*kInputs[] = {&BackwardParams::q, &BackwardParams::k,
                                                      &BackwardParams::v, &BackwardParams::dout};

KernelUse gradient_kernel(const WideBackwardKey& key) {
  return {{"portable/wide_backward/gradient.cu", kernel_config(key)},
          "fulgur_wide_gradient",
          key.layout().bytes};
}

}  // namespace

std::vector<KernelUse> wide_backward_kernels(const WideBackwardPlan& plan) {
  std::vector<KernelUse> kernels;
  for (const WideGradient of : plan.gradients())
    kernels.push_back(gradient_kernel(plan.key_of(of)));
  if (plan.reduces()) kernels.push_back(reduce_kernel(plan));
  if (plan.repairs()) kernels.push_back(repair_kernel(plan));
  add_backward_kernels(plan, plan, /*rounds=*/false,
                       bias_gradient_kernel(plan, plan, plan.whole_columns), kernels);
  if (plan.dtensors) {
    std::ranges::move(expression_gradient_kernels(key_of_tiles(plan, plan.whole_columns)),
                      std::back_inserter(kernels));
  }
  return kernels;
}

WideBackwardExecutable::WideBackwardExecutable(const Problem& problem, Gpu& gpu,
                                               const WideBackwardPlan& plan,
                                               Explanation explanation)
    : BackwardPassExecutable(problem, gpu, std::move(explanation), plan, plan,
                             workspace_of(problem, plan), std::size(kInputs), /*p_log2=*/0,
                             /*rounds=*/false,
                             bias_gradient_kernel(plan, plan, plan.whole_columns)),
      at_(workspace_of(problem, plan)) {
  if (at_.end == 0) return;
  params_.key_blocks = plan.key_blocks;
  params_.row_blocks = plan.row_blocks;
  for (size_t i = 0; i < inputs_.size(); ++i)
    params_.*kInputs[i] = strided(inputs_[i].shape.strides);
  for (const WideGradient of : plan.gradients()) {
    const WideBackwardKey key = plan.key_of(of);
    const auto ctas = static_cast<int>(plan.ctas_of(of));
    if (ctas == 0) continue;
    gradients_.push_back(
        {gpu.kernel(gradient_kernel(key)).function, ctas, key.threads(), key.layout().bytes});
  }
  if (plan.reduces()) reduce_ = gpu.kernel(reduce_kernel(plan)).function;
  if (plan.repairs()) repair_ = gpu.kernel(repair_kernel(plan)).function;
  tensor_gradients_ = ExpressionGradients(problem, key_of_tiles(plan, plan.whole_columns), gpu);
}

void WideBackwardExecutable::launch(const BackwardArgs& args, const Run& run,
                                    char* workspace) const {
  const auto stream = static_cast<CUstream>(run.stream);
  BackwardParams p = arguments(args, run, workspace);
  for (size_t i = 0; i < inputs_.size(); ++i)
    (p.*kInputs[i]).data = inputs_[i].data(args, workspace);
  launch_map(stream, workspace, p);
  row_kernels_.launch_first(stream, p);
  for (const GradientLaunch& of : gradients_) {
    cuda::launch(stream, of.kernel, &p, {of.ctas}, of.threads, of.shared_bytes,
                 "launching the backward kernel of wide heads");
  }
  if (reduce_ != nullptr) launch_reduce(stream, reduce_, p, gpu_.sms());
  if (repair_ != nullptr) {
    cuda::launch(stream, repair_, &p, {gpu_.sms()}, kRepairThreads, 0,
                 "launching the kernel that repairs gradients");
  }
  launch_bias_gradient(stream, p);
  tensor_gradients_.launch(stream, p, args, workspace + at_.tensor_sums);
}

const Family& wide_backward_family() {
  static const PlannedFamily<WideBackwardCandidate> kFamily(
      [](const Problem& p) { return p.pass == Pass::kBackward && has_wide_heads(p); },
      wide_backward_rejects, wide_backward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda::portable
