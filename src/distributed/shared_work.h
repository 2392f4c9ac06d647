/// A forward pass of ranks of one machine, cut into units. A rank that is done with its own takes
/// those of slower ones: threads of one process, which take work one by one, wait for none either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "distributed/memory.h"
#include "distributed/plan.h"
#include "distributed/step_calls.h"

namespace fulgur::distributed {

class SharedWork {
 public:
  /// In memory that ranks have in common.
  SharedWork(const RowsPlan& plan, const ForwardArgs& args, StepCalls<ForwardArgs>& calls,
             Memory& memory);
  /// What others may take of this rank's, before ranks meet.
  void offer();
  /// Computes until no unit is left, by keys of all ranks.
  void compute(const Step& step);
  /// What others have computed for this rank, when ranks have met again.
  void collect();

 private:
  /// Rows of a run, of some sequences and heads.
  struct Unit {
    RowsCall call;
    Heads kv;
    double scores;
  };
  /// All of a rank, the largest first; from `offered` on others may take them.
  struct Units {
    std::vector<Unit> all;
    size_t offered = 0;
    int64_t count() const { return std::ssize(all) - static_cast<int64_t>(offered); }
  };

  Units units_of(int rank) const;
  void cut(const RowsCall& call, double most, std::vector<Unit>& units) const;
  const Units& units_of_other(int rank);
  int64_t take(int rank) const;
  int richest() const;
  void compute(const Unit& unit, const Offers::Rank& of, const Step& step);
  Part rows_of(const Unit& unit, const Part& x) const;

  const RowsPlan& plan_;
  StepCalls<ForwardArgs>& calls_;
  Memory& memory_;
  Offers::Rank local_;  // where the caller has them
  Offers offers_;
  Units units_;
  std::vector<char> taken_here_;  // of the units that this rank offers
  std::mutex others_;
  std::map<int, Units> units_of_others_;
};

}  // namespace fulgur::distributed
