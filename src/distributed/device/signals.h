/// Synchronization among the streams of ranks of one machine: counters in shared host memory, which
/// a stream of one rank writes and a stream of another rank waits for. When another rank has left,
/// the host ends all waits of this rank.
#pragma once

#include <cstdint>

#include "cuda/driver/driver.h"
#include "distributed/group/group.h"
#include "distributed/transport/shared_memory.h"

namespace fulgur::distributed {

class Signals {
 public:
  enum What : uint8_t { kReady, kTaken };

  /// Collective, with a current context.
  explicit Signals(Group::Impl& group);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  /// The stream writes its count for rank `to`.
  void signal(cuda::CUstream stream, int to, What what, uint32_t count) const;
  /// The stream waits until rank `from` has written this count or a later one.
  void wait(cuda::CUstream stream, int from, What what, uint32_t count) const;
  /// Whether the stream of this rank has written this count, or a later one, for rank `to`.
  bool has_signaled(int to, What what, uint32_t count) const;
  /// Ends all current waits, which are for counts near this one. Other ranks may still write
  /// theirs.
  void end_waits(uint32_t count) const;

 private:
  /// The counters that one rank writes for another one.
  struct alignas(64) Cell {
    uint32_t counts[2];
  };
  Cell& cell(int to, int from) const {
    return reinterpret_cast<Cell*>(memory_.data())[to * ranks_ + from];
  }
  cuda::CUdeviceptr address(const uint32_t& count) const;
  void use(SharedMemory memory);

  int rank_, ranks_;
  SharedMemory memory_;
  cuda::CUdeviceptr on_device_ = 0;  ///< the address of the memory for GPUs
};

}  // namespace fulgur::distributed
