#pragma once

#include <array>
#include <vector>

#include "cuda/common/expression.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/planned_family.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/device/gpu.h"
#include "cuda/portable/forward_plan.h"
#include "engine/engine.h"
#include "kernels/common/copy_rows_params.h"
#include "kernels/common/padding_params.h"
#include "kernels/portable/forward/params.h"

namespace fulgur::cuda::portable {

/// What a plan launches: the forward kernel first, if there is work, then those with it.
std::vector<KernelUse> forward_kernels(const ForwardPlan& plan);

/// The host's half of portable/forward/forward.cu: a plan with its compiled kernels on a device.
class ForwardExecutable final : public Executable {
 public:
  ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan, Reasons reasons);

  void run(const Call& call, const Run& run) const override;
  Explanation explain() const override;
  WorkspaceNeed workspace() const override;

 private:
  /// q, k or v, and how it gets where the kernel reads it.
  struct Input {
    const char* name = "";
    TensorShape shape;
    bool copied = false;
    int64_t offset = 0;        ///< of the copy in the workspace
    ForwardCopyParams copy{};  ///< without addresses
    StridedTensor PortableForwardParams::*tensor = nullptr;
  };

  void set_params(const Problem& problem);
  void set_inputs(const Problem& problem);
  PortableForwardParams arguments(const ForwardArgs& args, const Run& run, char* workspace) const;
  void launch(const ForwardArgs& args, const PortableForwardParams& params, CUstream stream) const;

  Gpu& gpu_;
  ForwardPlan plan_;
  Reasons reasons_;
  TensorShape out_;
  HostMetadata numbers_;
  DeviceExpressions expressions_;
  CUfunction kernel_ = nullptr, padding_kernel_ = nullptr, copy_kernel_ = nullptr;
  ForwardWorkspace workspace_;
  PortableForwardParams params_{};  ///< what every run has in common
  ForwardPaddingParams padding_{};
  std::array<Input, 3> inputs_;
};

using ForwardCandidate = PlannedCandidate<ForwardPlan, ForwardExecutable, forward_kernels>;

/// The kernels of portable/forward/.
const Family& forward_family();

}  // namespace fulgur::cuda::portable
