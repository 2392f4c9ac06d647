#include "cuda/device/launch_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

namespace fulgur::cuda {
namespace {

struct Capture {
  bool active = false;
  unsigned long long id = 0;  ///< that no other capture has or will have; 0 where none is active
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

/// Of this thread's default stream: those of all threads go by one handle.
unsigned long long id_of_thread() {
  static std::atomic<unsigned long long> threads = 0;
  thread_local const unsigned long long kThread = ++threads;
  return ~kThread;
}

/// A number of the stream that no other stream has now: a capture may not bear to be asked for
/// more.
unsigned long long handle_of(CUstream stream) {
  return stream == CU_STREAM_PER_THREAD ? id_of_thread() : reinterpret_cast<uintptr_t>(stream);
}

/// A number of the stream that no other stream has or will have.
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

/// A block that a graph holds.
struct LaunchMemory::Held {
  std::shared_ptr<Returned> returned;
  Block block;

  /// Called when the graph and its copies are gone and none of them runs. The driver may not be
  /// called here.
  static void give_back(void* held) {
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
  check(driver().cuUserObjectCreate(&object, held.get(), Held::give_back, 1,
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
    shared->block = {};  // the graph before has it
  }
  if (shared->block.bytes < bytes || shared->block.data == 0) {
    // The block before may still be in use; it is freed with its graph or never, and all of them
    // are together no larger than this one.
    const int64_t larger = std::max(bytes, 2 * shared->block.bytes);
    const std::scoped_lock lock(mutex_);
    shared->block = capture.active ? for_graph(capture.graph, larger) : allocate(larger);
  }
  lease.data = reinterpret_cast<char*>(shared->block.data);
  return lease;
}

LaunchMemory::Lease LaunchMemory::of(const Run& run, const WorkspaceNeed& need) {
  if (run.workspace.data != nullptr) return {static_cast<char*>(run.workspace.data)};
  const int64_t kept = need.zeroed_bytes > 0 ? 0 : kZeroed;  // by those that need it zero
  Lease lease = take(static_cast<CUstream>(run.stream), kept + need.bytes);
  lease.data += kept;
  return lease;
}

}  // namespace fulgur::cuda
