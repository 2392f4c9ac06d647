#pragma once

#include <array>
#include <vector>

#include "cuda/common/expression.h"
#include "cuda/common/host_metadata.h"
#include "cuda/device/gpu.h"
#include "cuda/portable/backward_plan.h"
#include "cuda/portable/expression_gradients.h"
#include "engine/engine.h"
#include "kernels/common/copy_rows_params.h"

namespace fulgur::cuda::portable {

/// The kernels that a plan launches, the kernel by keys first.
std::vector<KernelUse> backward_kernels(const BackwardPlan& plan);

/// The host's half of portable/backward/keys.cu: a plan with its compiled kernels on a device.
class BackwardExecutable final : public Executable {
 public:
  BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan, Reasons reasons);

  void run(const Call& call, const Run& run) const override;
  Explanation explain() const override;
  WorkspaceNeed workspace() const override;

 private:
  /// q, k, v or dout, and how it gets where the kernel reads it.
  struct Input {
    const char* name = "";
    ConstTensor BackwardArgs::*argument = nullptr;
    TensorShape shape;  ///< of the copy if it is copied
    bool copied = false;
    int64_t offset = 0;        ///< of the copy in the workspace
    ForwardCopyParams copy{};  ///< without addresses
    StridedTensor BackwardParams::*tensor = nullptr;
  };

  void set_inputs(const Problem& problem);
  BackwardParams params(const BackwardArgs& args, const Run& run, char* workspace) const;

  Gpu& gpu_;
  BackwardPlan plan_;
  Reasons reasons_;
  HostMetadata metadata_;
  DeviceExpressions expressions_;
  ExpressionGradients tensor_gradients_;
  BackwardWorkspace workspace_;
  RowKernels row_kernels_;
  CUfunction keys_ = nullptr, bias_gradient_ = nullptr, copy_ = nullptr;
  BackwardParams params_{};  ///< what every run has in common
  std::array<Input, 4> inputs_;
};

using BackwardCandidate = PlannedCandidate<BackwardPlan, BackwardExecutable, backward_kernels>;

/// The kernels of portable/backward/.
const Family& backward_family();
/// Those for calls with expressions alone, on devices whose other calls are another family's.
const Family& backward_family_of_expressions();

}  // namespace fulgur::cuda::portable
