/// Work stealing in a forward pass of ranks of one machine. The work of each rank is cut into
/// units; a rank that has computed its own units claims those of slower ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "distributed/group/memory.h"
#include "distributed/plan.h"
#include "distributed/step_calls.h"

namespace fulgur::distributed {

class SharedWork {
 public:
  /// Uses the shared work buffer of `memory`.
  SharedWork(const RowsPlan& plan, const ForwardArgs& args, StepCalls<ForwardArgs>& calls,
             Memory& memory);
  /// Copies the queries of the units that other ranks may claim to the work buffer. A barrier must
  /// follow.
  void offer();
  /// Computes units, with the keys of all ranks, until no rank has any left.
  void compute(const Step& step);
  /// Copies the results that other ranks have computed for this one. After a barrier.
  void collect();

 private:
  /// Rows of a run, for some sequences and heads.
  struct Unit {
    RowsCall call;
    Heads kv;
    double scores;
  };
  /// All units of a rank, the largest first. Other ranks may claim those from `offered` on.
  struct Units {
    std::vector<Unit> all;
    size_t offered = 0;
    int64_t count() const { return std::ssize(all) - static_cast<int64_t>(offered); }
  };

  Units units_of(int rank) const;
  void cut(const RowsCall& call, double max_scores, std::vector<Unit>& units) const;
  const Units& units_of_other(int rank);
  int64_t claim(int rank) const;
  int rank_with_most_left() const;
  void compute(const Unit& unit, const Offers::Rank& of, const Step& step);
  Part rows_of(const Unit& unit, const Part& x) const;

  const RowsPlan& plan_;
  StepCalls<ForwardArgs>& calls_;
  Memory& memory_;
  Offers::Rank local_;  // in the tensors of the caller
  Offers offers_;
  Units units_;
  std::vector<char>
      claimed_here_;  // for each offered unit of this rank: whether it computed the unit itself
  std::mutex others_;
  std::map<int, Units> units_of_others_;
};

}  // namespace fulgur::distributed
