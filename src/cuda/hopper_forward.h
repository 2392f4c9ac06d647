#pragma once

#include <array>
#include <vector>

#include "cuda/gpu.h"
#include "cuda/hopper_forward_plan.h"
#include "cuda/tensor_map.h"
#include "engine.h"
#include "kernels/forward_copy_params.h"
#include "kernels/forward_padding_params.h"

namespace fulgur::cuda {

/// The kernel that a plan compiles to.
KernelRequest kernel_request(const HopperForwardPlan& plan);

/// Every kernel that calls like `problem` can need.
std::vector<KernelRequest> forward_kernels(const Problem& problem, const HopperTarget& target);

/// The host's half of sm90/forward.cu: a plan with its compiled kernel and workspace on a device.
class HopperForward final : public Executable {
 public:
  HopperForward(const Problem& problem, Gpu& gpu, const HopperForwardPlan& plan,
                std::vector<std::string> rejected);
  ~HopperForward() override;
  HopperForward(const HopperForward&) = delete;
  HopperForward& operator=(const HopperForward&) = delete;

  /// Encodes tensor maps of pointers it has not seen last time, and launches on the stream.
  void run(const ForwardArgs& args) override;
  [[noreturn]] void run(const BackwardArgs& args) override;
  Explanation explain() const override;

 private:
  /// q, k or v: its map, and how it gets where the map says.
  struct Input {
    const char* name = "";
    TensorMapShape shape;  ///< of the copy where it is copied
    bool copied = false;
    ForwardCopyParams copy{};
    TensorMapBlob* map = nullptr;
    StridedTensor* tensor = nullptr;  ///< with the data that the map was encoded for
  };

  void set_params(const Problem& problem);
  void set_inputs();
  void set_pointers(const ForwardArgs& args);
  void launch(CUfunction kernel, void* params, int grid, int threads, int shared_bytes,
              const char* what);

  Gpu& gpu_;
  HopperForwardPlan plan_;
  std::vector<std::string> rejected_;
  ForwardMaps maps_;
  CUstream stream_ = nullptr;
  CUfunction kernel_ = nullptr, padding_kernel_ = nullptr, copy_kernel_ = nullptr;
  Gpu::Workspace workspace_;
  ForwardParams params_{};
  ForwardPaddingParams padding_{};
  std::array<Input, 3> inputs_;
};

}  // namespace fulgur::cuda
