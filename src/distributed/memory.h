/// The memory in which the tensors of a group's calls lie: what moves and adds rows there, in
/// order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "distributed/part.h"
#include "fulgur/attention.h"

namespace fulgur::distributed {

/// Operations that follow each other; on a GPU a stream. Parts of both sides have one shape.
class Order {
 public:
  virtual ~Order() = default;
  virtual void copy(const Part& from, const Part& to) = 0;
  /// Adds in f32 or, on the host, f64, and rounds to the dtype of `to`, which may be `with`.
  virtual void sum(const Part& from, const Part& with, const Part& to) = 0;
  void add(const Part& from, const Part& to) { sum(from, to, to); }
  /// Sums in f32 or f64 as a gradient.
  virtual void round(const Part& from, const Part& to) = 0;
  virtual void clear(const Part& part) = 0;  ///< all of it lies side by side
  /// To and from the memory of the host, which waits.
  virtual void download(void* to, const void* from, int64_t bytes) = 0;
  virtual void upload(void* to, const void* from, int64_t bytes) = 0;

  /// What is in the order by now.
  using Mark = std::shared_ptr<void>;
  virtual Mark mark() = 0;
  /// What comes next waits for a mark of another order.
  virtual void after(const Mark& mark) = 0;
  /// Waits for all.
  virtual void finish() = 0;
};

/// Transfers between ranks, and the memory of a group for them.
class Memory : public Order {
 public:
  enum Use : uint8_t { kStep, kNextStep, kSums, kRow, kSends, kReceives, kUses };
  /// Room that is this until it is asked for again; not cleared.
  virtual std::byte* room(Use use, int64_t bytes) = 0;
  /// Where some of the bytes that come from a rank are to lie.
  struct Place {
    int64_t begin, bytes;
    std::byte* to;
  };
  /// A step of all ranks: sends lie in `from`, kSends, which has to be asked for again after it, or
  /// a step's; so many bytes come from each rank. Returns where, until the next exchange, before
  /// which what came is finished; nowhere where it lies in the places that are given for a rank, of
  /// which not all memory makes use.
  virtual std::vector<std::span<std::byte>> exchange(
      Use from, std::span<const std::span<const std::byte>> sends,
      std::span<const int64_t> receives, std::span<const std::vector<Place>> places) = 0;
  /// Whether others fetch what lies in a step's room, which then stays until they have settled.
  virtual bool offers_steps() const { return false; }
  /// Waits until all that has been sent is where it goes, on all ranks: the host may wait for what
  /// computes with it. At the end of a run, too.
  virtual void settle() = 0;
  /// No other rank is waited for any more: the group is dead.
  virtual void abandon() {}
  /// The order in which a run computes.
  virtual std::unique_ptr<Order> computing(const Run& run) = 0;
  /// A run on another stream, whose kernels start where those of `run` leave SMs idle; none where
  /// the calls of a run use all of the machine one after the other.
  virtual std::optional<Run> second(const Run&) { return {}; }

  static constexpr int kInCommon = 3;  // rooms in turn
  /// Whether ranks may have rooms in common.
  virtual bool has_common() const { return false; }
  /// Collective, between runs: so many bytes for each room that ranks have in common, and for work
  /// that they take from each other.
  virtual void reserve(int64_t, int64_t) {}
  /// The next one, which is that of all ranks. It is written while a step computes with the last
  /// one, and others may compute with the one before yet, as they have met since.
  virtual std::byte* common() { return nullptr; }
  /// That of work, the same in each run.
  virtual std::byte* work() { return nullptr; }
  /// Waits until all ranks have come here.
  virtual void meet() {}

 protected:
  /// kReceives, for so many bytes of each rank.
  std::vector<std::span<std::byte>> room_to_receive(std::span<const int64_t> bytes) {
    std::byte* at = room(kReceives, std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
    std::vector<std::span<std::byte>> rooms;
    for (const int64_t n : bytes) {
      rooms.emplace_back(at, n);
      at += n;
    }
    return rooms;
  }
};

}  // namespace fulgur::distributed
