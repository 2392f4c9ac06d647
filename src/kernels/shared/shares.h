// How the keys of a launch are shared out among thread blocks that stay for all of it.
//
// A line is a block of rows beside the keys that it sees. Lines stand behind each other, each as long as its keys in
// units and an entry that stands for its beginning and end. The share of a thread block is a stretch of all that, as
// long as every other: it begins and ends inside lines, and each of these it computes a part of. Which share a unit is
// in is a formula, so that nobody but the thread blocks themselves need know the lengths (stream-K; LeanAttention,
// arXiv 2405.10480).
#pragma once
#include "shared/band.h"

namespace fulgur::kernels {

enum : int {
  kUnitKeys = 64,
  kEntryUnits = 1,    // what a line takes beside its keys
  kMostShares = 160,  // so many parts a line may have
};

struct Shares {
  long long units;
  int count;
};

// No share is empty, lest a line have parts that nobody computes.
FULGUR_SHARED Shares shares_of(long long units, int blocks) {
  return {units, units < blocks ? int(units) : blocks};
}

FULGUR_SHARED long long share_begin(const Shares& shares, int share) { return shares.units * share / shares.count; }

FULGUR_SHARED int share_of_unit(const Shares& shares, long long unit) {
  return int(((unit + 1) * shares.count - 1) / shares.units);
}

// Units of the keys [begin, end) of a line, whose borders are those of the sequence.
struct Units {
  int first, count;
};

FULGUR_SHARED Units units_of(const KeyRange& keys) {
  if (keys.begin >= keys.end) return {0, 0};
  const int first = keys.begin / kUnitKeys;
  return {first, (keys.end + kUnitKeys - 1) / kUnitKeys - first};
}

// The units of a line, of `count`, that lie in the share [begin, end); the line stands at `at`. A line without keys has
// its entry alone, which is in the share that it begins in: {0, 0} there, {0, -1} elsewhere.
struct UnitRange {
  int begin, end;
  FULGUR_SHARED bool any() const { return end >= 0; }
};

FULGUR_SHARED UnitRange units_in_share(long long at, int count, long long begin, long long end) {
  if (count == 0) return {0, at >= begin && at < end ? 0 : -1};
  const long long keys = at + kEntryUnits;
  const long long from = begin <= keys ? 0 : begin - keys;
  const long long to = end - keys < count ? end - keys : count;
  return to > from ? UnitRange{int(from), int(to)} : UnitRange{0, -1};
}

}  // namespace fulgur::kernels
