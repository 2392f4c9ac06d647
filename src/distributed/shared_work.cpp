#include "distributed/shared_work.h"

#include <algorithm>
#include <atomic>
#include <functional>

#include "base/parallel.h"
#include "call/mask.h"

namespace fulgur::distributed {
namespace {

constexpr double kUnits = 128;  // per rank, independent of its threads, so that all ranks cut alike
constexpr double kUnitFlops = 3e7;  // minimum of a unit, since each one is a call
constexpr double kOffered = 0.75;   // fraction of the scores of a rank that others may claim
// Minimum of rows of a kv head in a unit. Engines pack 16-bit keys for AMX tiles once for so many
// rows; other keys are read once for each block of rows.
constexpr int64_t kRowsOf16Bits = 512, kRows = 384;

double scores_of(const RowsPlan& plan, const RowsCall& c) {
  const auto keys_of = [&](int64_t row) {
    const KeyRange keys = visible_keys(plan.problem.mask, {.sq = c.of.queries, .sk = c.of.keys},
                                       c.run.begin + row, c.run.begin + row + 1);
    return static_cast<double>(std::max<int64_t>(0, keys.end - keys.begin));
  };
  return static_cast<double>(c.size) * (keys_of(0) + keys_of(c.size - 1)) / 2;
}

}  // namespace

SharedWork::SharedWork(const RowsPlan& plan, const ForwardArgs& args, StepCalls<ForwardArgs>& calls,
                       Memory& memory)
    : plan_(plan),
      calls_(calls),
      memory_(memory),
      local_{Part::of_rows(args.q), Part::of_rows(args.out), {}},
      offers_([&] {
        StepMemory arena(memory.work_buffer());
        return Offers(plan, arena);
      }()) {
  if (plan.problem.has(Arg::kLse)) local_.lse = Part::of_lse(args.lse);
  units_ = units_of(plan.me);
  claimed_here_.resize(units_.count());
}

/// Cuts the work of a rank into units of about equally many scores, but of no fewer rows than
/// above.
auto SharedWork::units_of(int rank) const -> Units {
  const std::vector<RowsCall> calls = calls_.calls_of_step(0, rank);
  double all = 0;
  for (const RowsCall& c : calls) {
    all += scores_of(plan_, c) * static_cast<double>(c.of.count * plan_.problem.hk);
  }
  const Problem& p = plan_.problem;
  const auto flops = static_cast<double>(2 * (p.d + p.dv) * p.group());  // per score of a kv head
  Units units;
  for (const RowsCall& c : calls) {
    cut(c, std::max(all / kUnits, kUnitFlops / flops), units.all);
  }
  std::ranges::stable_sort(units.all, std::greater(), &Unit::scores);
  for (double own = 0; units.offered < units.all.size() && own < (1 - kOffered) * all;) {
    own += units.all[units.offered++].scores;
  }
  return units;
}

void SharedWork::cut(const RowsCall& call, double max_scores, std::vector<Unit>& units) const {
  const int64_t hk = plan_.problem.hk, group = plan_.problem.group();
  const int64_t whole = size_of(plan_.problem.dtypes.k) == 2 ? kRowsOf16Bits : kRows;
  const int64_t block = std::max<int64_t>(1, whole / group / 64) * 64;
  const double of_head = scores_of(plan_, call);
  const double of_sequence = of_head * static_cast<double>(hk);
  const int64_t sequences =
      of_sequence * static_cast<double>(call.of.count) > max_scores ? 1 : call.of.count;
  const int64_t heads = of_sequence > max_scores ? 1 : hk;
  int64_t rows = call.size;
  if (of_head > max_scores) {
    const auto fitting =
        static_cast<int64_t>(max_scores / of_head * static_cast<double>(call.size));
    rows = std::max<int64_t>(1, fitting / block) * block;
  }
  for (int64_t row = 0; row < call.size; row += rows) {
    RowsCall part = call;
    part.source = plan_.me;  // the rows of every rank lie in its buffers as those of this rank do
    part.size = std::min(rows, call.size - row);
    part.run.begin += row;
    part.run.place += row;
    part.run.end = part.run.begin + part.size;
    part.of.count = sequences;
    const double scores = scores_of(plan_, part) * static_cast<double>(sequences * heads);
    for (int64_t b = 0; b < call.of.count; b += sequences) {
      part.of.first = call.of.first + b;
      part.of.number = call.of.number + b;
      for (int64_t head = 0; head < hk; head += heads) {
        units.push_back({part, {head, heads}, scores});
      }
    }
  }
}

Part SharedWork::rows_of(const Unit& unit, const Part& x) const {
  const Heads heads = plan_.q_heads(unit.kv);
  const RowsCall& c = unit.call;
  return c.of.of(x).heads(heads.begin, heads.count).rows(c.run.place, c.size);
}

void SharedWork::offer() {
  std::atomic_ref(offers_.counters[plan_.me].next).store(0);
  std::atomic_ref(offers_.counters[plan_.me].count).store(units_.count());
  for (size_t i = units_.offered; i < units_.all.size(); ++i) {
    memory_.copy(rows_of(units_.all[i], local_.q),
                 rows_of(units_.all[i], offers_.ranks[plan_.me].q));
  }
}

/// Claims the next unit of a rank.
int64_t SharedWork::claim(int rank) const {
  return std::atomic_ref(offers_.counters[rank].next).fetch_add(1);
}

/// The other rank with the most units left; -1: no rank has any.
int SharedWork::rank_with_most_left() const {
  int rank = -1;
  int64_t max_left = 0;
  for (int i = 1; i < plan_.group.size(); ++i) {
    const int r = (plan_.me + i) % plan_.group.size();
    const int64_t left = std::atomic_ref(offers_.counters[r].count).load() -
                         std::atomic_ref(offers_.counters[r].next).load();
    if (left <= max_left) continue;
    max_left = left;
    rank = r;
  }
  return rank;
}

auto SharedWork::units_of_other(int rank) -> const Units& {
  const std::lock_guard lock(others_);
  const auto [at, fresh] = units_of_others_.try_emplace(rank);
  if (fresh) at->second = units_of(rank);
  return at->second;
}

void SharedWork::compute(const Unit& unit, const Offers::Rank& of, const Step& step) {
  const Heads heads = plan_.q_heads(unit.kv);
  Step own;
  own.k = step.k.heads(unit.kv.begin, unit.kv.count);
  own.v = step.v.heads(unit.kv.begin, unit.kv.count);
  own.q = of.q.heads(heads.begin, heads.count);
  own.out = of.out.heads(heads.begin, heads.count);
  if (of.lse.shape[0] > 0) own.lse = of.lse.heads(heads.begin, heads.count);
  calls_.compute_alone(unit.call, heads, own);
}

void SharedWork::compute(const Step& step) {
  calls_.begin(step);
  std::atomic<size_t> next = 0;
  const int threads = calls_.threads();
  parallel_for(threads, threads, [&](int64_t) {
    for (size_t i; (i = next.fetch_add(1)) < units_.offered;) {
      compute(units_.all[i], local_, step);
    }
    for (int64_t i; (i = claim(plan_.me)) < units_.count();) {
      claimed_here_[i] = 1;
      compute(units_.all[units_.offered + i], local_, step);
    }
    for (int r; (r = rank_with_most_left()) >= 0;) {
      const Units& theirs = units_of_other(r);
      const int64_t i = claim(r);
      if (i < theirs.count()) compute(theirs.all[theirs.offered + i], offers_.ranks[r], step);
    }
  });
}

void SharedWork::collect() {
  const Offers::Rank& from = offers_.ranks[plan_.me];
  for (size_t i = 0; i < claimed_here_.size(); ++i) {
    if (claimed_here_[i] != 0) continue;
    const Unit& unit = units_.all[units_.offered + i];
    memory_.copy(rows_of(unit, from.out), rows_of(unit, local_.out));
    if (local_.lse.shape[0] > 0) memory_.copy(rows_of(unit, from.lse), rows_of(unit, local_.lse));
  }
}

}  // namespace fulgur::distributed
