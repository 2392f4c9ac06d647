#pragma once

#include <vector>

#include "cuda/passes/forward.h"
#include "cuda/sm90/forward_plan.h"
#include "kernels/sm90/forward/params.h"

namespace fulgur::cuda::sm90 {

/// The kernels of a plan: first the forward kernel, if there is work.
std::vector<KernelUse> forward_kernels(const ForwardPlan& plan);

/// The host half of sm90/forward/forward.cu: a plan with its compiled kernels on a device.
class ForwardExecutable final : public ForwardPassExecutable {
 public:
  ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan,
                    Explanation explanation);

 private:
  void launch(const ForwardArgs& args, const Run& run, char* workspace) const override;
  /// Whether the kernel reads an input by a tensor map.
  bool has_map(size_t input) const;
  ForwardParams arguments(const ForwardArgs& args, const Run& run, char* workspace) const;

  ForwardPlan plan_;
  TensorShape out_;
  ForwardWorkspace at_;
  TileMap map_;
  CUfunction kernel_ = nullptr, values_kernel_ = nullptr;
  int values_grid_ = 0, values_warps_ = 0;
  ForwardParams params_{};  ///< the arguments that are the same in every run
};

}  // namespace fulgur::cuda::sm90
