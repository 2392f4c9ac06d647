/// Parts of tensors that ranks send each other in one step.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "distributed/group/group.h"
#include "distributed/group/memory.h"

namespace fulgur::distributed {

/// A step of transfers. The parts for a rank are received in the order of the calls of send().
class Shipment {
 public:
  Shipment(const Group::Impl& group, Memory& memory);
  void send(int to, const Part& part) { sends_[to].push_back(part); }
  void receive(int from, const Part& part) { receives_[from].push_back({part, {}}); }
  /// Calls take(part) with each received part, which has the shape of `like`, in the order of
  /// ranks.
  using Take = std::function<void(const Part&)>;
  void receive(int from, const Part& like, Take take) {
    receives_[from].push_back({like, std::move(take)});
  }
  /// Adds received parts, of f32 or f64, to `part` in the order of ranks.
  void receive_sum(int from, const Part& part) {
    receive(from, part, [this, part](const Part& came) { memory_.add(came, part); });
  }

  /// Executes the step. `alone`: all ranks send to themselves only.
  void run(bool alone);
  /// Executes the step without packing: parts are sent from the buffer of a step, which begins at
  /// `buffer`. The parts that a rank has for this one must lie in its buffer where the parts that
  /// this rank sends to itself lie in its own.
  void run_in(Memory::Use use, const std::byte* buffer);

 private:
  struct Target {
    Part part;
    Take take;  ///< empty: the received part is copied to `part`
  };
  void take(const Part& from, const Target& to);
  void take_all(const std::vector<std::span<std::byte>>& receives);
  /// The places of all parts from a rank; empty unless each is copied as one contiguous piece.
  std::vector<Memory::Place> places_of(int rank) const;

  int rank_;
  Memory& memory_;
  std::vector<std::vector<Part>> sends_;
  std::vector<std::vector<Target>> receives_;
};

}  // namespace fulgur::distributed
