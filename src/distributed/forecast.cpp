#include "fulgur/distributed/forecast.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "distributed/plan.h"

namespace fulgur {
namespace {

/// Bytes that a rank receives over each kind of link.
struct Traffic {
  double in_node = 0, between = 0;

  double bytes() const { return in_node + between; }
  /// Both kinds of links transfer at the same time, and all messages of a step are sent together.
  double seconds(const Ranks& ranks) const {
    const auto of = [](double bytes, const Link& link) {
      return bytes == 0 ? 0 : bytes / link.bytes_per_second + link.seconds;
    };
    return std::max(of(in_node, ranks.in_node), of(between, ranks.between));
  }
};

/// The bytes of all rows of the tensors of a call.
struct WholeCall {
  double q, kv, out, lse, sums;  // sums: dK and dV, in f32 if q has 16 bits
  int64_t hk;
  bool backward, on_host, invariant;
  double seconds;  // on one device
};

WholeCall whole_call(const Plan& plan) {
  const Details details = plan.details();
  if (!details.has("estimate_us")) {
    throw Error(Status::kUnsupported,
                "forecast: the plan has no estimate, want one for a card by its name, or of a CPU");
  }
  const auto number = [&](const char* name) {
    return static_cast<double>(details.get<int64_t>(std::string("call.") + name));
  };
  const std::string& dtype = details.get<std::string>("call.dtype");
  const double element = dtype == "f64" ? 8 : dtype == "f32" ? 4 : 2;
  const double rows = number("batch") * number("sq"), keys = number("batch") * number("sk");
  const double kv = keys * number("hk") * (number("d") + number("dv"));
  return {.q = rows * number("hq") * number("d") * element,
          .kv = kv * element,
          .out = rows * number("hq") * number("dv") * element,
          .lse = rows * number("hq") * 4,
          .sums = kv * std::max(4.0, element),
          .hk = details.get<int64_t>("call.hk"),
          .backward = details.get<std::string>("call.pass") == "backward",
          .on_host = details.get<std::string>("call.device") == "cpu",
          .invariant = details.has("call.invariant"),
          .seconds = details.get<double>("estimate_us") * 1e-6};
}

/// Each rank sends an L-th of `bytes` to each of the L ranks of its node, which divide the heads.
Traffic exchange(double bytes, double L) { return {.in_node = bytes * (L - 1) / L}; }

/// A rank gathers an L-th of the rows of all ranks: from its node, except from the L ranks that
/// divide the heads with it, and from all other nodes.
Traffic gather(double bytes, double L, const Ranks& ranks) {
  const double N = ranks.count, M = std::max<double>(L, ranks.node);
  return {.in_node = bytes / L * (M - L) / N, .between = bytes / L * (N - M) / N};
}

Traffic operator+(const Traffic& a, const Traffic& b) {
  return {a.in_node + b.in_node, a.between + b.between};
}

/// A rank gathers the rows of its heads, as a DistributedPlan does.
Forecast by_gather(const WholeCall& s, const Ranks& ranks, int head_ranks) {
  const double N = ranks.count, L = head_ranks;
  const double rows = s.q + (s.backward ? 2 * s.out + s.lse : 0);  // transferred with queries
  const bool gathers_queries = s.backward && s.invariant;
  const Traffic fetched =
      exchange((rows + s.kv) / N, L) + gather(s.kv + (gathers_queries ? rows : 0), L, ranks);
  Traffic returned = exchange((s.backward ? s.q : s.out + s.lse) / N, L);
  if (gathers_queries) {
    returned = returned + exchange(s.kv / N, L);
  } else if (s.backward) {
    returned = returned + exchange(s.sums / N, L) + gather(s.sums, L, ranks);
  }
  const Pass pass = s.backward ? Pass::kBackward : Pass::kForward;
  const double steps =
      gathers_queries
          ? 1
          : static_cast<double>(distributed::steps_of(pass, s.on_host, s.hk / head_ranks));
  const auto step = [&](Traffic t) {
    t.in_node /= steps;
    t.between /= steps;
    return t.seconds(ranks);
  };
  // Of the five products of gradients two are computed for dQ and again for dK and dV.
  const double compute = s.seconds / N * (gathers_queries ? 1.4 : 1);
  const double fetch = step(fetched), give = step(returned);
  Forecast f;
  f.way = head_ranks == 1 ? "gather" : head_ranks == ranks.count ? "heads" : "heads and gather";
  f.head_ranks = head_ranks;
  f.bytes = fetched.bytes() + returned.bytes();
  f.memory = gathers_queries
                 ? 2 * (2 * s.kv + rows + s.q) / L
                 : 2 * (s.kv / L + (s.backward ? s.sums / L : 0)) / steps + (rows + s.out) / N;
  f.compute = compute;
  // The first rows fetched and the last ones returned, and what computation does not hide.
  f.exposed = fetch + give + (steps - 1) * std::max(0.0, fetch + give - compute / steps);
  f.efficiency = compute / (compute + f.exposed);
  return f;
}

/// Keys pass from rank to rank, and with them the sums of their gradients.
Forecast by_ring(const WholeCall& s, const Ranks& ranks) {
  const double N = ranks.count, hop = (s.kv + (s.backward ? s.sums : 0)) / N;
  const Link& link = ranks.count > ranks.node ? ranks.between : ranks.in_node;
  Forecast f;
  f.way = "ring";
  f.bytes = hop * (N - 1);
  f.memory = 2 * hop + (s.backward ? 0 : 2 * s.out / N);  // and partial results in f32
  f.compute = s.seconds / N;
  f.exposed = (N - 1) * std::max(0.0, hop / link.bytes_per_second + link.seconds - f.compute / N);
  f.efficiency = f.compute / (f.compute + f.exposed);
  return f;
}

void check_link(const char* name, const Link& link) {
  if (link.bytes_per_second > 0 && link.seconds >= 0) return;
  fail(name, "got {} bytes a second and {} seconds, want more than 0 and at least 0",
       link.bytes_per_second, link.seconds);
}

}  // namespace

std::vector<Forecast> forecast(const Plan& plan, const Ranks& ranks) {
  if (ranks.count < 1) fail("ranks", "got {}, want at least 1", ranks.count);
  if (ranks.node < 1 || (ranks.node < ranks.count && ranks.count % ranks.node != 0)) {
    fail("node", "got {}, want a divisor of the {} ranks", ranks.node, ranks.count);
  }
  check_link("link", ranks.in_node);
  check_link("node_link", ranks.between);
  Ranks all = ranks;
  all.node = std::min(ranks.node, ranks.count);
  const WholeCall call = whole_call(plan);
  std::vector<Forecast> ways = {by_gather(call, all, 1)};
  for (int L = 2; L <= all.count; ++L) {
    const bool divides = all.count % L == 0 && call.hk % L == 0;
    if (divides && (L == all.count || (L <= all.node && all.node % L == 0))) {
      ways.push_back(by_gather(call, all, L));
    }
  }
  if (!call.invariant) ways.push_back(by_ring(call, all));  // its results depend on the ranks
  return ways;
}

}  // namespace fulgur
