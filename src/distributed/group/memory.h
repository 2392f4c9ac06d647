/// The memory in which the tensors of a group's calls lie: operations that copy, add and exchange
/// rows there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "distributed/group/part.h"
#include "fulgur/attention.h"

namespace fulgur::distributed {

/// Operations that are executed in order: those of a stream of a GPU, or of a thread of the host.
/// The parts of an operation have the same shape.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void copy(const Part& from, const Part& to) = 0;
  /// Adds in f32 or, on the host, in f64, and rounds to the dtype of `to`. `to` may be `with`.
  virtual void sum(const Part& from, const Part& with, const Part& to) = 0;
  void add(const Part& from, const Part& to) { sum(from, to, to); }
  /// Rounds sums of f32 or f64 to the dtype of a gradient.
  virtual void round(const Part& from, const Part& to) = 0;
  virtual void clear(const Part& part) = 0;  ///< a contiguous part
  /// Copies from and to host memory; the host waits for it.
  virtual void download(void* to, const void* from, int64_t bytes) = 0;
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;

  /// All operations up to now.
  using Event = std::shared_ptr<void>;
  virtual Event record() = 0;
  /// The following operations wait for an event of another queue.
  virtual void wait(const Event& event) = 0;
  /// The host waits for all operations.
  virtual void synchronize() = 0;
};

/// Transfers between ranks, and the buffers of a group for them.
class Memory : public Queue {
 public:
  enum Use : uint8_t { kStep, kNextStep, kSums, kRow, kSends, kReceives, kUses };
  /// A buffer of at least `bytes` bytes, valid until the next call with this use; not cleared.
  virtual std::byte* buffer(Use use, int64_t bytes) = 0;
  /// Where bytes [begin, begin + bytes) of the data from a rank are to be written.
  struct Place {
    int64_t begin, bytes;
    std::byte* to;
  };
  /// A step in which all ranks exchange bytes. `sends` lie in the buffer `from`: in kSends, which
  /// is invalid afterwards, or in the buffer of a step. `receives`: how many bytes come from each
  /// rank. Returns where these lie until the next exchange, before which the caller must have used
  /// them. The result of a rank is empty if its bytes were written to its `places`, as some
  /// memories do.
  virtual std::vector<std::span<std::byte>> exchange(
      Use from, std::span<const std::span<const std::byte>> sends,
      std::span<const int64_t> receives, std::span<const std::vector<Place>> places) = 0;
  /// Whether other ranks fetch from the buffer of a step, which must then stay unchanged until
  /// complete_transfers().
  virtual bool fetches_in_place() const { return false; }
  /// Waits until all transfers of all ranks are complete. Called before the host waits for kernels
  /// that use received rows, and at the end of a run.
  virtual void complete_transfers() = 0;
  /// Ends all waits for other ranks, because the group is dead.
  virtual void abandon() {}
  /// The queue in which a run computes.
  virtual std::unique_ptr<Queue> compute_queue(const Run& run) = 0;
  /// A run on a second stream, whose kernels fill SMs that those of `run` leave idle; none on the
  /// host, where each call uses the whole machine.
  virtual std::optional<Run> second_stream(const Run&) { return {}; }

  static constexpr int kSharedBuffers = 3;  // used cyclically
  /// Whether ranks can share buffers.
  virtual bool has_shared_buffers() const { return false; }
  /// Collective, between runs: allocates so many bytes for each shared buffer, and for the work
  /// buffer.
  virtual void reserve(int64_t, int64_t) {}
  /// The next shared buffer, the same on all ranks. While it is written, a step of this rank
  /// computes with the previous one; other ranks are at most one barrier behind, and may still
  /// compute with the one before that.
  virtual std::byte* shared_buffer() { return nullptr; }
  /// The shared buffer for work stealing (SharedWork), the same in each run.
  virtual std::byte* work_buffer() { return nullptr; }
  /// Waits until all ranks have called it.
  virtual void barrier() {}

 protected:
  /// Divides kReceives into a buffer for each rank, of `bytes[rank]` bytes.
  std::vector<std::span<std::byte>> receive_buffers(std::span<const int64_t> bytes) {
    std::byte* at = buffer(kReceives, std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
    std::vector<std::span<std::byte>> buffers;
    for (const int64_t n : bytes) {
      buffers.emplace_back(at, n);
      at += n;
    }
    return buffers;
  }
};

}  // namespace fulgur::distributed
