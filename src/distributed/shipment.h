/// Parts of tensors that ranks send each other in one step.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "distributed/group.h"
#include "distributed/memory.h"

namespace fulgur::distributed {

/// What a step brings. The parts for a rank are sent in the order of their calls, and received so.
class Shipment {
 public:
  Shipment(const Group::Impl& group, Memory& memory);
  void send(int to, const Part& part) { sends_[to].push_back(part); }
  void receive(int from, const Part& part) { receives_[from].push_back({part, {}}); }
  /// Calls take(part) with what comes, a part of the shape of `like`, rank after rank.
  using Take = std::function<void(const Part&)>;
  void receive(int from, const Part& like, Take take) {
    receives_[from].push_back({like, std::move(take)});
  }
  /// Adds what comes to what there is, rank after rank: of f32 or f64.
  void receive_sum(int from, const Part& part) {
    receive(from, part, [this, part](const Part& came) { memory_.add(came, part); });
  }

  /// Makes the step. `alone`: all ranks send to themselves only.
  void run(bool alone);
  /// Makes the step with what lies in a step's room, which begins there: what others have for this
  /// rank lies in theirs where it has what it sends to itself.
  void run_in(Memory::Use use, const std::byte* room);

 private:
  struct Target {
    Part part;
    Take take;  ///< none: it is copied there
  };
  void take(const Part& from, const Target& to);
  void take_all(const std::vector<std::span<std::byte>>& receives);
  /// Where what comes from a rank is to lie, where all of it is copied side by side.
  std::vector<Memory::Place> places_of(int rank) const;

  int rank_;
  Memory& memory_;
  std::vector<std::vector<Part>> sends_;
  std::vector<std::vector<Target>> receives_;
};

}  // namespace fulgur::distributed
