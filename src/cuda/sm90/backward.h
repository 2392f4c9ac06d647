#pragma once

#include <vector>

#include "cuda/passes/backward.h"
#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda::sm90 {

/// The kernels that a plan launches, the kernel by keys first.
std::vector<KernelUse> backward_kernels(const BackwardPlan& plan);

/// The host half of the kernels of sm90/backward/: a plan with its compiled kernels on a device.
class BackwardExecutable final : public BackwardPassExecutable {
 public:
  BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan,
                     Explanation explanation);

 private:
  /// Sets the tensor maps and launches the kernels.
  void launch(const BackwardArgs& args, const Run& run, char* workspace) const override;
  BackwardParams params(const BackwardArgs& args, const Run& run, char* workspace) const;

  BackwardPlan plan_;
  BackwardWorkspace at_;
  CUfunction keys_ = nullptr, rows_ = nullptr, reduce_ = nullptr, repair_ = nullptr;
};

}  // namespace fulgur::cuda::sm90
