#include "cuda/device/launch_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

namespace fulgur::cuda {
namespace {

struct Capture {
  bool active = false;
  unsigned long long id = 0;  ///< unique among all captures of the process; 0 without an active one
  CUgraph graph = nullptr;
};

Capture capture_of(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  Capture capture;
  check(driver().cuStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph, nullptr,
                                        nullptr),
        "stream");
  capture.active = status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return capture.active ? capture : Capture{};
}

/// An id of this thread's default stream. The default streams of all threads have the same handle.
unsigned long long id_of_thread() {
  static std::atomic<unsigned long long> threads = 0;
  thread_local const unsigned long long kThread = ++threads;
  return ~kThread;
}

/// A number of a stream that no other current stream has. During a capture, asking the driver for
/// the id could end it.
unsigned long long handle_of(CUstream stream) {
  return stream == CU_STREAM_PER_THREAD ? id_of_thread() : reinterpret_cast<uintptr_t>(stream);
}

/// A number of a stream that no other stream ever has.
unsigned long long id_of(CUstream stream) {
  if (stream == CU_STREAM_PER_THREAD) return id_of_thread();
  unsigned long long id = 0;
  check(driver().cuStreamGetId(stream, &id), "stream");
  return id;
}

}  // namespace

OutsideCapture::OutsideCapture() : mode_(CU_STREAM_CAPTURE_MODE_RELAXED) {
  check(driver().cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode");
}

OutsideCapture::~OutsideCapture() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

bool is_capturing(CUstream stream) { return capture_of(stream).active; }

/// A block that belongs to a graph.
struct LaunchMemory::Held {
  std::shared_ptr<Returned> returned;
  Block block;

  /// Called when the graph and its copies are destroyed and none of them runs. Must not call the
  /// driver.
  static void release(void* held) {
    const std::unique_ptr<Held> self(static_cast<Held*>(held));
    const std::scoped_lock lock(self->returned->mutex);
    self->returned->blocks.push_back(self->block);
  }
};

LaunchMemory::Block LaunchMemory::allocate(int64_t bytes) {
  const OutsideCapture outside;
  const Driver& api = driver();
  Block block{0, std::max(bytes, kZeroed)};
  check(api.cuMemAlloc(&block.data, static_cast<size_t>(block.bytes)),
        fmt::format("workspace of {} bytes", block.bytes).c_str());
  if (zeroing_ == nullptr)
    check(api.cuStreamCreate(&zeroing_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  check(api.cuMemsetD8Async(block.data, 0, kZeroed, zeroing_), "cuMemsetD8Async");
  check(api.cuStreamSynchronize(zeroing_), "cuStreamSynchronize");
  return block;
}

LaunchMemory::Block LaunchMemory::for_graph(CUgraph graph, int64_t bytes) {
  Block block;
  {
    const std::scoped_lock lock(returned_->mutex);
    auto& blocks = returned_->blocks;
    const auto found = std::find_if(blocks.begin(), blocks.end(),
                                    [&](const Block& b) { return b.bytes >= bytes; });
    if (found != blocks.end()) {
      block = *found;
      blocks.erase(found);
    }
  }
  if (block.data == 0) block = allocate(bytes);
  auto held = std::make_unique<Held>(Held{returned_, block});
  CUuserObject object = nullptr;
  check(driver().cuUserObjectCreate(&object, held.get(), Held::release, 1,
                                    CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
        "cuUserObjectCreate");
  held.release();
  check(driver().cuGraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE),
        "cuGraphRetainUserObject");
  return block;
}

LaunchMemory::Lease LaunchMemory::take(CUstream stream, int64_t bytes) {
  const Capture capture = capture_of(stream);
  const unsigned long long id = capture.active ? handle_of(stream) : id_of(stream);
  Shared* shared = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    shared = &(capture.active ? by_capturing_stream_ : by_stream_)[id];
  }
  Lease lease{nullptr, std::unique_lock(shared->turn)};
  if (shared->capture != capture.id) {
    shared->capture = capture.id;
    shared->block = {};  // it belongs to the previous graph
  }
  if (shared->block.bytes < bytes || shared->block.data == 0) {
    // The old block may still be in use: it is freed with its graph, or never. Sizes at least
    // double, so that all old blocks together are no larger than the new one.
    const int64_t larger = std::max(bytes, 2 * shared->block.bytes);
    const std::scoped_lock lock(mutex_);
    shared->block = capture.active ? for_graph(capture.graph, larger) : allocate(larger);
  }
  lease.data = reinterpret_cast<char*>(shared->block.data);
  return lease;
}

LaunchMemory::Lease LaunchMemory::of(const Run& run, const WorkspaceNeed& need) {
  if (run.workspace.data != nullptr) return {static_cast<char*>(run.workspace.data)};
  const int64_t kept = need.zeroed_bytes > 0
                           ? 0
                           : kZeroed;  // the zeroed beginning is reserved for launches that need it
  Lease lease = take(static_cast<CUstream>(run.stream), kept + need.bytes);
  lease.data += kept;
  return lease;
}

}  // namespace fulgur::cuda
