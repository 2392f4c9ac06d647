#pragma once

#include <array>
#include <vector>

#include "cuda/common/expression.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_map.h"
#include "cuda/device/gpu.h"
#include "cuda/sm90/forward_plan.h"
#include "engine/engine.h"
#include "kernels/common/copy_rows_params.h"
#include "kernels/common/padding_params.h"
#include "kernels/sm90/forward/params.h"

namespace fulgur::cuda::sm90 {

/// What a plan launches: the forward kernel first, if there is work, then those with it.
std::vector<KernelUse> forward_kernels(const ForwardPlan& plan);

/// The host's half of sm90/forward/forward.cu: a plan with its compiled kernels on a device.
class ForwardExecutable final : public Executable {
 public:
  ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan, Reasons reasons);

  /// Encodes the tensor maps and launches on the stream.
  void run(const Call& call, const Run& run) const override;
  Explanation explain() const override;
  WorkspaceNeed workspace() const override;

 private:
  /// q, k, v or the bias, and how it gets where its map says.
  struct Input {
    const char* name = "";
    TensorShape shape;  ///< of the copy where it is copied
    bool copied = false;
    int64_t offset = 0;                              ///< of the copy in the workspace
    ForwardCopyParams copy{};                        ///< without addresses
    CUfunction copies = nullptr;                     ///< the kernel that makes the copy
    TensorMapBlob ForwardParams::*map = nullptr;     ///< null: TMA does not load it
    StridedTensor ForwardParams::*tensor = nullptr;  ///< null: of the bias
  };
  /// The arguments of one run's kernels.
  struct Arguments {
    ForwardParams forward;
    ForwardPaddingParams padding;
    std::array<ForwardCopyParams, 4> copies;  ///< of the inputs
  };

  void set_params(const Problem& problem);
  void set_inputs();
  Arguments arguments(const ForwardArgs& args, const Run& run, char* workspace) const;
  void launch(const Arguments& arguments, CUstream stream) const;

  Gpu& gpu_;
  ForwardPlan plan_;
  Reasons reasons_;
  ForwardShapes maps_;
  HostMetadata numbers_;
  DeviceExpressions expressions_;
  CUfunction kernel_ = nullptr, padding_kernel_ = nullptr, values_kernel_ = nullptr;
  int values_grid_ = 0, values_shared_bytes_ = 0;
  ForwardWorkspace workspace_;
  ForwardParams params_{};  ///< what every run has in common
  ForwardPaddingParams padding_{};
  std::vector<Input> inputs_;  ///< q, k, v and the bias if there is one
};

}  // namespace fulgur::cuda::sm90
