#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/common/expression.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/device/gpu.h"
#include "engine/engine.h"

namespace fulgur::cuda {

/// Offsets and sizes in the workspace of any plan of attention kernels, in bytes.
struct CallWorkspace {
  int64_t zeroed =
      0;  ///< size of the counters at its beginning, which are zero before and after each run
  int64_t map = 0;       ///< offset of the map of tiles
  int64_t metadata = 0;  ///< offset of host metadata
  int64_t end = 0;
};

/// Why a tensor is copied to the workspace (empty if it is not), the offset of the copy, and its
/// dtype if it is not that of the tensor.
struct Copied {
  std::string why;
  int64_t offset = 0;
  std::optional<DType> dtype{};
};

/// A tensor that kernels copy to shared memory. If they cannot address it, another kernel copies it
/// to the workspace first.
template <class Args>
struct Input {
  const char* name = "";
  ConstTensor Args::*argument = nullptr;
  TensorShape shape;            ///< of the tensor or copy that kernels read
  bool any_alignment = false;   ///< data that is not copied may have any alignment
  CUfunction copies = nullptr;  ///< the kernel that copies it; null: it is not copied
  int64_t offset = 0;           ///< of the copy in the workspace
  ForwardCopyParams copy{};     ///< arguments without addresses

  /// The address at which kernels read it.
  void* data(const Args& args, char* workspace) const {
    if (copies != nullptr) return workspace + offset;
    return const_cast<void*>((args.*argument).data);  // tensor maps have no const
  }
};

/// The base of the executables of all attention kernels: what they do before and after launches.
/// `Args`: ForwardArgs, BackwardArgs or ScoresArgs.
template <class Args>
class AttentionExecutable : public Executable {
 public:
  void run(const Call& call, const Run& run) const override;
  Explanation explain() const final;
  WorkspaceNeed workspace() const final;

 protected:
  /// `launches`: whether a run launches any kernel.
  AttentionExecutable(const Problem& problem, Gpu& gpu, Explanation explanation,
                      const CallWorkspace& workspace, bool launches);

  Input<Args>& add_input(const char* name, ConstTensor Args::*argument, const TensorShape& shape,
                         const Copied& copied);

  /// Throws Error(kInvalidArgument) for addresses that are less aligned than the plan expects.
  virtual void check_addresses(const Args& args) const;
  /// Launches the kernels. The kernels that copy inputs and host metadata are on the stream
  /// already.
  virtual void launch(const Args& args, const Run& run, char* workspace) const = 0;

  /// The workspace of a run.
  LaunchMemory::Lease memory(const Run& run) const;
  /// Launches the kernels that copy inputs and host metadata to the workspace. Returns the call
  /// with its metadata there (`moved`), or `args` if it has none on the host.
  const Args& ready(const Args& args, const Run& run, char* workspace,
                    std::optional<Args>& moved) const;

  Gpu& gpu_;
  HostMetadata metadata_;
  DeviceExpressions expressions_;
  std::vector<Input<Args>> inputs_;

 private:
  Explanation explanation_;
  CallWorkspace workspace_;
  bool launches_;
};

}  // namespace fulgur::cuda
