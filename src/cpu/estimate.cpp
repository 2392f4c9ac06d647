#include "cpu/estimate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "base/fork_mutex.h"
#include "call/mask.h"
#include "cpu/kernels/probes.h"

namespace fulgur::cpu {
namespace {

double of_dims(const Speeds::OfDims& speed, const Problem& p) {
  return std::max(p.d, p.dv) <= 64 ? speed.narrow : speed.wide;
}

/// The work of a head in scores: those of the whole key tiles that its row tiles visit, and the
/// cost of its rows apart from their keys.
double computed_scores(const Problem& p, const Kernels& k, const Sequence& s) {
  double n = static_cast<double>(s.sq * k.row_keys);
  for (int64_t i = 0; i < s.sq; i += k.Br) {
    const int64_t end = std::min(s.sq, i + k.Br);
    const KeyRange keys = visible_keys(p.mask, s, i, end);
    if (keys.empty()) continue;
    const int64_t tiles_end = std::min(s.sk, ceil_div(keys.end, kBc) * kBc);
    n += static_cast<double>(end - i) * static_cast<double>(tiles_end - keys.begin / kBc * kBc);
  }
  return n;
}

/// The ratio of the time a row of these blocks takes to that in full blocks, which share the
/// packing of keys among more rows.
double packing(const CpuPlan& plan, const Kernels& k, int64_t rows) {
  const auto taken = [&](int64_t block_rows) {
    return 1 + static_cast<double>(k.packing_rows) / static_cast<double>(block_rows);
  };
  return taken(std::min(plan.block_rows, rows)) / taken(k.row_tiles * k.Br);
}

/// The sum of the keys of all decode tasks.
int64_t keys_to_decode(const CpuPlan& plan, const Problem& p,
                       const std::vector<Sequence>& lengths) {
  int64_t sum = 0;
  for (const Sequence& s : lengths) {
    if (p.group() * s.sq > plan.decode_rows) continue;
    const KeyRange keys = decoded_keys(p.mask, s);
    sum += keys.end - keys.begin;
  }
  return sum * (p.hk / plan.decode_heads) * (p.alike() ? p.batch : 1);
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.3g} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3g} ms", seconds * 1e3);
  return fmt::format("{:.3g} s", seconds);
}

}  // namespace

Cost cost_of(const CpuPlan& plan, const Kernels& k, const Problem& p,
             const std::vector<Sequence>& lengths) {
  const bool forward = p.pass == Pass::kForward;
  const auto hq = static_cast<double>(p.hq), hk = static_cast<double>(p.hk);
  const double flops = flops_per_score(p), sequences = p.alike() ? static_cast<double>(p.batch) : 1;
  // The bytes of a key of a kv head in k and v. Its gradients have as many.
  const auto element = static_cast<double>(bytes_of(p.dtypes.k, p.d) + bytes_of(p.dtypes.v, p.dv));
  const int64_t all_keys = forward ? keys_to_decode(plan, p, lengths) : 0;
  Cost cost;
  cost.at_least = p.softcap > 0 || p.dropout_p > 0;
  for (const Sequence& s : lengths) {
    const double scores = visible_scores(p.mask, s);
    if (scores == 0) continue;
    const KeyRange keys = decoded_keys(p.mask, s);
    const int64_t rows = p.group() * s.sq, seen = keys.end - keys.begin;
    double taken, tasks;  // scores of a head at the peak, tasks of a kv head
    if (!forward) {
      taken = computed_scores(p, k, s) / of_dims(k.speeds.backward, p);
      tasks = static_cast<double>(plan.splits);
    } else if (rows > plan.decode_rows) {
      taken = computed_scores(p, k, s) * packing(plan, k, rows) / of_dims(k.speeds.forward, p);
      tasks = static_cast<double>(ceil_div(rows, plan.block_rows));
    } else {
      taken = scores / k.speeds.decode;
      tasks = static_cast<double>(ceil_div(seen, plan.part_keys(seen, all_keys))) /
              static_cast<double>(plan.decode_heads);
    }
    cost.flops += sequences * hq * scores * flops;
    cost.as_fma += sequences * hq * taken * flops;
    cost.bytes += sequences * (hq * static_cast<double>(s.sq) + hk * static_cast<double>(seen)) *
                  element * (forward ? 1 : 2);
    cost.tasks += sequences * hk * tasks;
  }
  return cost;
}

Peaks peaks_of(int threads) {
  static constinit ForkMutex mutex;
  static constinit MadeOnce<std::map<int, Peaks>> made;
  const std::lock_guard lock(mutex);
  auto& known = made.get([] { return std::map<int, Peaks>(); });
  const auto found = known.find(threads);
  if (found != known.end()) return found->second;
  const double fma = fma_rate(machine().vectors.fma_rounds, threads, kBrief) / threads;
  return known[threads] = {threads, fma, read_rate(threads, kBrief)};
}

Estimate estimate(const Cost& cost, const Peaks& peaks) {
  const double products = cost.as_fma / (peaks.fma * peaks.threads);
  const double reading = cost.bytes / peaks.read;
  // Reads and products overlap, but less so the closer their times are. Measured times of decoding
  // are close to this.
  const double seconds = std::hypot(products, reading);
  const std::string takes =
      fmt::format("{} {}", cost.at_least ? "at least" : "about", duration(seconds));
  if (products < reading) {
    const double rate = cost.bytes / seconds;
    return {
        seconds * 1e6, "memory", cost.at_least,
        fmt::format("{}; reading memory binds: {:.3g} GB/s, {:.0f}% of what {} thread{} read here",
                    takes, rate * 1e-9, 100 * rate / peaks.read, peaks.threads,
                    peaks.threads == 1 ? "" : "s")};
  }
  const double each = cost.flops / seconds / peaks.threads;
  return {seconds * 1e6, "products", cost.at_least,
          fmt::format(
              "{}; the products bind: {:.3g} GFLOP/s of {}, {:.0f}% of the f32 FMA peak "
              "measured here",
              takes, each * 1e-9,
              peaks.threads == 1 ? "1 thread" : fmt::format("each of {} threads", peaks.threads),
              100 * each / peaks.fma)};
}

}  // namespace fulgur::cpu
