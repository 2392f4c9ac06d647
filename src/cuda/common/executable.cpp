#include "cuda/common/executable.h"

#include <utility>

#include "cuda/common/launch.h"
#include "engine/workspace.h"

namespace fulgur::cuda {

template <class Args>
AttentionExecutable<Args>::AttentionExecutable(const Problem& problem, Gpu& gpu,
                                               Explanation explanation,
                                               const CallWorkspace& workspace, bool launches)
    : gpu_(gpu),
      metadata_(problem, gpu),
      expressions_(problem),
      explanation_(std::move(explanation)),
      workspace_(workspace),
      launches_(launches) {
  metadata_.describe(explanation_);
}

template <class Args>
Input<Args>& AttentionExecutable<Args>::add_input(const char* name, ConstTensor Args::*argument,
                                                  const TensorShape& shape, const Copied& copied) {
  Input<Args> in{name, argument, shape, shape.empty(), nullptr, copied.offset, {}};
  if (!copied.why.empty()) {
    in.shape = cuda::copied(shape, copied.dtype.value_or(shape.dtype));
    const bool widens = in.shape.dtype != shape.dtype;
    in.copies = gpu_.kernel(widens ? widen_kernel(shape.dtype) : copy_kernel()).function;
    in.copy = copy_params(shape, in.shape);
  }
  return inputs_.emplace_back(std::move(in));
}

template <class Args>
void AttentionExecutable<Args>::check_addresses(const Args& args) const {
  for (const Input<Args>& in : inputs_) {
    if (in.copies == nullptr) aligned_data(in.name, args.*in.argument, in.any_alignment);
  }
}

template <class Args>
LaunchMemory::Lease AttentionExecutable<Args>::memory(const Run& run) const {
  if (workspace_.end == 0) return {};
  return gpu_.launch_memory().of(run, workspace());
}

template <class Args>
const Args& AttentionExecutable<Args>::ready(const Args& args, const Run& run, char* workspace,
                                             std::optional<Args>& moved) const {
  check_addresses(args);
  const auto stream = static_cast<CUstream>(run.stream);
  if (metadata_.bytes() > 0) {
    void* const numbers = workspace + workspace_.metadata;
    metadata_.store(args, stream, numbers);
    moved.emplace(metadata_.moved(args, numbers));
  }
  for (const Input<Args>& in : inputs_) {
    if (in.copies == nullptr) continue;
    ForwardCopyParams copy = in.copy;
    copy.from = (args.*in.argument).data;
    copy.to = in.data(args, workspace);
    cuda::launch(stream, in.copies, &copy, {kCopyBlocks * gpu_.sms()}, kCopyThreads, 0,
                 "launching the kernel that copies rows");
  }
  return moved ? *moved : args;
}

template <class Args>
void AttentionExecutable<Args>::run(const Call& call, const Run& run) const {
  const Args& args = *std::get<const Args*>(call);
  metadata_.check(args);
  if (!launches_) return;
  const CurrentContext current(gpu_.context());
  const LaunchMemory::Lease lease = memory(run);
  std::optional<Args> moved;
  launch(ready(args, run, lease.data, moved), run, lease.data);
}

template <class Args>
Explanation AttentionExecutable<Args>::explain() const {
  return explanation_;
}

template <class Args>
WorkspaceNeed AttentionExecutable<Args>::workspace() const {
  if (workspace_.end == 0) return {};
  return {workspace_.end, kWorkspaceAlignment, workspace_.zeroed};
}

template class AttentionExecutable<ForwardArgs>;
template class AttentionExecutable<BackwardArgs>;
template class AttentionExecutable<ScoresArgs>;

}  // namespace fulgur::cuda
