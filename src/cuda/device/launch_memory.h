#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/driver/driver.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Lets this thread allocate and load while a stream of the process is being captured, which the
/// driver otherwise answers by ending the capture. What is done under it touches no capture.
class OutsideCapture {
 public:
  OutsideCapture();
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  CUstreamCaptureMode mode_;
};

/// Whether what is put on the stream now becomes part of a graph.
bool is_capturing(CUstream stream);

/// Workspaces for launches whose caller brought none, in the current context of one device. The
/// launches on a stream follow each other, so that they share one; those that are captured on it
/// share another one, which lives and dies with their graph and the graph's executable copies.
class LaunchMemory {
 public:
  /// Of a workspace, zero when it is handed out first; every launch leaves them zero.
  static constexpr int64_t kZeroed = 8192;

  /// A workspace, and the right to launch with it: other threads wait until this is gone.
  struct Lease {
    char* data = nullptr;
    std::unique_lock<std::mutex> turn{};
  };

  /// At least `bytes` for launches put on the stream while the lease lasts.
  Lease take(CUstream stream, int64_t bytes);
  /// The workspace that a run brought, or else memory for its launches as `need` says.
  Lease of(const Run& run, const WorkspaceNeed& need);

 private:
  struct Block {
    CUdeviceptr data = 0;
    int64_t bytes = 0;
  };
  /// Of launches that follow each other: on a stream, or in a graph that is captured on it.
  struct Shared {
    std::mutex turn;
    Block block;
    unsigned long long capture = 0;  ///< which graph has the block; 0: none
  };
  /// Blocks that no graph holds any more. Graphs may outlive everything else.
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
