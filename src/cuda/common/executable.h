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

/// What the workspaces of all plans of attention kernels have, in bytes.
struct CallWorkspace {
  int64_t zeroed = 0;    ///< counters at its beginning: zero before the first run and after each
  int64_t map = 0;       ///< where the map of tiles begins
  int64_t metadata = 0;  ///< where numbers of the host begin
  int64_t end = 0;
};

/// Why a tensor is copied to the workspace, empty where it is not; to where there, and to elements
/// of which dtype, if not of its own.
struct Copied {
  std::string why;
  int64_t offset = 0;
  std::optional<DType> dtype{};
};

/// A tensor that kernels copy to shared memory. Where they cannot address it a kernel copies it to
/// the workspace first.
template <class Args>
struct Input {
  const char* name = "";
  ConstTensor Args::*argument = nullptr;
  TensorShape shape;            ///< of what kernels read
  bool any_alignment = false;   ///< of its data, where it is not copied
  CUfunction copies = nullptr;  ///< the kernel that copies it; null: it is read where it lies
  int64_t offset = 0;           ///< of the copy in the workspace
  ForwardCopyParams copy{};     ///< without addresses

  /// Where kernels read it.
  void* data(const Args& args, char* workspace) const {
    if (copies != nullptr) return workspace + offset;
    return const_cast<void*>((args.*argument).data);  // a tensor map does not say what it is for
  }
};

/// What the executables of all attention kernels do around their launches. `Args`: ForwardArgs,
/// BackwardArgs, ScoresArgs.
template <class Args>
class AttentionExecutable : public Executable {
 public:
  void run(const Call& call, const Run& run) const override;
  Explanation explain() const final;
  WorkspaceNeed workspace() const final;

 protected:
  /// `launches`: whether runs launch anything.
  AttentionExecutable(const Problem& problem, Gpu& gpu, Explanation explanation,
                      const CallWorkspace& workspace, bool launches);

  Input<Args>& add_input(const char* name, ConstTensor Args::*argument, const TensorShape& shape,
                         const Copied& copied);

  /// Throws Error(kInvalidArgument) for addresses that are not as the plan was told.
  virtual void check_addresses(const Args& args) const;
  /// Puts the kernels on the stream, after those that make inputs and numbers of the host ready.
  virtual void launch(const Args& args, const Run& run, char* workspace) const = 0;

  /// The workspace of a run.
  LaunchMemory::Lease memory(const Run& run) const;
  /// Puts the kernels on the stream that write copies and numbers to the workspace. Returns the
  /// call with its numbers there: `moved`, or `args` where it has none on the host.
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
