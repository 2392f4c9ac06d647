/// Parts of tensors that ranks send each other in one step.
#pragma once

#include <vector>

#include "distributed/group.h"
#include "distributed/memory.h"

namespace fulgur::distributed {

/// What a step brings. The parts for a rank are sent in the order of their calls, and received so.
class Shipment {
 public:
  Shipment(const Group::Impl& group, Memory& memory);
  void send(int to, const Part& part) { sends_[to].push_back(part); }
  void receive(int from, const Part& part) { receives_[from].push_back({part, false}); }
  /// Adds what comes to what there is, rank after rank: of f32 or f64.
  void receive_sum(int from, const Part& part) { receives_[from].push_back({part, true}); }

  /// Makes the step. `alone`: all ranks send to themselves only.
  void run(bool alone);

 private:
  struct Target {
    Part part;
    bool adds;
  };
  void take(const Part& from, const Target& to);

  int rank_;
  Memory& memory_;
  std::vector<std::vector<Part>> sends_;
  std::vector<std::vector<Target>> receives_;
};

}  // namespace fulgur::distributed
