#pragma once

#include <array>
#include <vector>

#include "cuda/common/expression.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_map.h"
#include "cuda/device/gpu.h"
#include "cuda/sm90/backward_plan.h"
#include "engine/engine.h"
#include "kernels/backward/params.h"
#include "kernels/common/copy_rows_params.h"

namespace fulgur::cuda::sm90 {

/// The kernels that a plan launches, the kernel by keys first.
std::vector<KernelUse> backward_kernels(const BackwardPlan& plan);

/// The host's half of the kernels of sm90/backward/: a plan with its compiled kernels on a device.
class BackwardExecutable final : public Executable {
 public:
  BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan, Reasons reasons);

  /// Encodes the tensor maps and launches on the stream.
  void run(const Call& call, const Run& run) const override;
  Explanation explain() const override;
  WorkspaceNeed workspace() const override;

 private:
  /// q, k, v or dout, and its tensor map, of the tensor or of its copy.
  struct Input {
    const char* name = "";
    ConstTensor BackwardArgs::*argument = nullptr;
    TensorShape shape;  ///< of the copy if it is copied
    bool copied = false;
    int64_t offset = 0;        ///< of the copy in the workspace
    ForwardCopyParams copy{};  ///< without addresses
    TensorMapBlob BackwardParams::*map = nullptr;
  };

  void set_params(const Problem& problem);
  void set_inputs(const Problem& problem);
  BackwardParams params(const BackwardArgs& args, const Run& run, char* workspace) const;

  Gpu& gpu_;
  BackwardPlan plan_;
  Reasons reasons_;
  HostMetadata metadata_;
  DeviceExpressions expressions_;
  RowKernels row_kernels_;
  CUfunction keys_ = nullptr, rows_ = nullptr, bias_gradient_ = nullptr, reduce_ = nullptr,
             repair_ = nullptr, copy_ = nullptr;
  BackwardWorkspace workspace_;
  BackwardParams params_{};  ///< what every run has in common
  std::vector<Input> inputs_;
};

}  // namespace fulgur::cuda::sm90
