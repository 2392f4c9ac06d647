#pragma once

#include <string>
#include <vector>

#include "fulgur/attention.h"
#include "fulgur/export.h"

namespace fulgur {

/// What carries bytes from a rank to another one.
struct Link {
  double bytes_per_second = 0;  ///< that a rank receives
  double seconds = 0;           ///< that what is sent at a time takes besides
};

/// Ranks that need not be here: `node` of them side by side are joined by a faster link.
struct Ranks {
  int count = 1, node = 1;
  Link in_node{}, between{};
};

/// What a way to share out a call is expected to take, of each rank.
struct Forecast {
  std::string way;        ///< "gather", "heads", "heads and gather", or "ring"
  int head_ranks = 1;     ///< Distribution::head_ranks
  double bytes = 0;       ///< received
  double memory = 0;      ///< bytes of gathered rows and sums
  double compute = 0;     ///< seconds
  double exposed = 0;     ///< seconds in which nothing is computed, as rows are on their way
  double efficiency = 0;  ///< of all ranks: compute / (compute + exposed)
};

/// The ways to share out the call of a plan of one device among ranks with such devices: rows
/// evenly, so that each computes as much. What a rank computes takes as long as its share of
/// the plan's estimate, of `invariant` gradients 7/5 of it: a part of the products is computed
/// twice. Transfers go by steps of heads, the next one's while one is computed; those
/// of one step follow each other. Throws Error(kUnsupported) for a plan without an estimate
/// (plan_for_card() has one), and kInvalidArgument.
FULGUR_API std::vector<Forecast> forecast(const Plan& plan, const Ranks& ranks);

}  // namespace fulgur
