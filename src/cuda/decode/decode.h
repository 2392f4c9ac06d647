#pragma once

#include <vector>

#include "cuda/decode/decode_plan.h"
#include "cuda/passes/forward.h"
#include "kernels/decode/params.h"

namespace fulgur::cuda::decode {

/// The kernels that a plan launches, the decode kernel first.
std::vector<KernelUse> decode_kernels(const DecodePlan& plan);

/// A plan of the decode kernels with its compiled kernels on a device.
class DecodeExecutable final : public ForwardPassExecutable {
 public:
  DecodeExecutable(const Problem& problem, Gpu& gpu, const DecodePlan& plan,
                   Explanation explanation);

  /// Also runs calls that append new rows, if the plan appends.
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
  DecodeParams params_{};  ///< the arguments that are the same in every run
};

}  // namespace fulgur::cuda::decode
