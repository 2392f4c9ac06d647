#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/driver/driver.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Allows this thread to allocate memory and to load kernels while any stream of the process is
/// being captured; without it the driver would end the capture.
class OutsideCapture {
 public:
  OutsideCapture();
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  CUstreamCaptureMode mode_;
};

/// Whether a stream is being captured to a graph.
bool is_capturing(CUstream stream);

/// Workspaces for launches whose caller passed none, in the current context of one device. Launches
/// of a stream run one after the other, so they use the same workspace. Launches that are captured
/// on a stream use another one, which is freed with their graph and the graph's executable copies.
class LaunchMemory {
 public:
  /// Bytes at the beginning of a workspace that are zero at first. Every launch leaves them zero.
  static constexpr int64_t kZeroed = 8192;

  /// A locked workspace: other threads wait for it until the lease is destroyed.
  struct Lease {
    char* data = nullptr;
    std::unique_lock<std::mutex> turn{};
  };

  /// At least `bytes` for launches on the stream during the lease.
  Lease take(CUstream stream, int64_t bytes);
  /// The workspace that a run has, or else one of the size that `need` requires.
  Lease of(const Run& run, const WorkspaceNeed& need);

 private:
  struct Block {
    CUdeviceptr data = 0;
    int64_t bytes = 0;
  };
  /// The workspace of launches on a stream, or in a graph that is captured on it.
  struct Shared {
    std::mutex turn;
    Block block;
    unsigned long long capture = 0;  ///< the capture that the block belongs to; 0: none
  };
  /// Blocks of destroyed graphs. Shared with graphs, which may outlive everything else.
  struct Returned {
    std::mutex mutex;
    std::vector<Block> blocks;
  };
  struct Held;

  Block allocate(int64_t bytes);
  Block for_graph(CUgraph graph, int64_t bytes);

  std::mutex mutex_;
  std::map<unsigned long long, Shared> by_stream_, by_capturing_stream_;
  std::shared_ptr<Returned> returned_ = std::make_shared<Returned>();
  CUstream zeroing_ = nullptr;
};

}  // namespace fulgur::cuda
