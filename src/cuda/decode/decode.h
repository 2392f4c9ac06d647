#pragma once

#include <vector>

#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_map.h"
#include "cuda/decode/decode_plan.h"
#include "cuda/device/gpu.h"
#include "engine/engine.h"
#include "kernels/common/copy_rows_params.h"
#include "kernels/common/padding_params.h"
#include "kernels/decode/params.h"

namespace fulgur::cuda::decode {

/// What a plan launches: the decode kernel first, then those with it.
std::vector<KernelUse> decode_kernels(const DecodePlan& plan);

/// The host's half of the kernels of decode/: a plan with its compiled kernels on a device.
class DecodeExecutable final : public Executable {
 public:
  DecodeExecutable(const Problem& problem, Gpu& gpu, const DecodePlan& plan, Reasons reasons);

  void run(const Call& call, const Run& run) const override;
  Explanation explain() const override;
  WorkspaceNeed workspace() const override;

 private:
  /// k or v, copied to rows that lanes can copy at once.
  struct Copy {
    bool needed = false;
    int64_t offset = 0;          ///< in the workspace
    ForwardCopyParams params{};  ///< without addresses
  };

  Copy copy_of(const TensorShape& shape, const std::string& why, int64_t offset,
               StridedTensor* to) const;
  DecodeParams arguments(const ForwardArgs& args, char* workspace) const;
  /// Runs a call, of which `append` is told the kernel if it appends.
  void run(const ForwardArgs& args, const AppendParams& append, char* workspace,
           CUstream stream) const;
  void launch_copies(const ForwardArgs& args, const DecodeParams& params, CUstream stream) const;

  Problem problem_;
  Gpu& gpu_;
  DecodePlan plan_;
  Reasons reasons_;
  ForwardShapes maps_;
  bool no_keys_;  ///< no row of k
  HostMetadata metadata_;
  DecodeWorkspace workspace_;
  CUfunction kernel_ = nullptr, combine_kernel_ = nullptr;
  CUfunction padding_kernel_ = nullptr, copy_kernel_ = nullptr;
  DecodeParams params_{};  ///< what every run has in common
  Copy copy_k_, copy_v_;
  ForwardPaddingParams padding_{};
};

}  // namespace fulgur::cuda::decode
