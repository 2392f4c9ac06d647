/// How far ranks of one machine are, said by their GPUs: counters in memory of the host that all of
/// them have in common, which the streams of one rank write and those of another one wait for. The
/// host ends all waits of this rank where another one has left.
#pragma once

#include <cstdint>

#include "cuda/driver/driver.h"
#include "distributed/group.h"
#include "distributed/transport/shared_room.h"

namespace fulgur::distributed {

class Signals {
 public:
  enum What : uint8_t { kReady, kTaken };

  /// Collective, with a context.
  explicit Signals(Group::Impl& group);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  /// The stream tells rank `to` how far it is.
  void tell(cuda::CUstream stream, int to, What what, uint32_t count) const;
  /// The stream waits until rank `from` is so far.
  void wait(cuda::CUstream stream, int from, What what, uint32_t count) const;
  /// Whether the stream of this rank has told rank `to` so.
  bool told(int to, What what, uint32_t count) const;
  /// Ends what waits now for a count near this one. Others may still write theirs.
  void end_waits(uint32_t count) const;

 private:
  /// What one rank tells another one.
  struct alignas(64) Cell {
    uint32_t counts[2];
  };
  Cell& cell(int to, int from) const {
    return reinterpret_cast<Cell*>(room_.data())[to * ranks_ + from];
  }
  cuda::CUdeviceptr address(const uint32_t& count) const;
  void use(SharedRoom room);

  int rank_, ranks_;
  SharedRoom room_;
  cuda::CUdeviceptr on_device_ = 0;  ///< where GPUs see it
};

}  // namespace fulgur::distributed
