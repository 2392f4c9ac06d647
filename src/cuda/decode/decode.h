#pragma once

#include <vector>

#include "cuda/common/forward.h"
#include "cuda/decode/decode_plan.h"
#include "kernels/decode/params.h"

namespace fulgur::cuda::decode {

/// What a plan launches: the decode kernel first, then those with it.
std::vector<KernelUse> decode_kernels(const DecodePlan& plan);

/// The host's half of the kernels of decode/: a plan with its compiled kernels on a device.
class DecodeExecutable final : public ForwardPassExecutable {
 public:
  DecodeExecutable(const Problem& problem, Gpu& gpu, const DecodePlan& plan,
                   Explanation explanation);

  /// Besides, it brings a call to append to its kernel.
  void run(const Call& call, const Run& run) const override;

 private:
  void launch(const ForwardArgs& args, const Run& run, char* workspace) const override;
  void launch(const ForwardArgs& args, const AppendParams* append, const Run& run,
              char* workspace) const;
  DecodeParams arguments(const ForwardArgs& args, const Run& run, char* workspace) const;

  Problem problem_;
  DecodePlan plan_;
  DecodeWorkspace at_;
  CUfunction kernel_ = nullptr, combine_kernel_ = nullptr;
  DecodeParams params_{};  ///< what every run has in common
};

}  // namespace fulgur::cuda::decode
