#include "cuda/engine/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "cuda/papers/counts.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

/// The measured microseconds of each candidate; none unless all of them were measured.
std::optional<std::vector<double>> times_of(const Candidates& candidates,
                                            std::span<const MeasuredTile> measured) {
  if (candidates.size() != measured.size()) return std::nullopt;
  std::vector<double> times;
  for (const auto& candidate : candidates) {
    const auto found = std::find_if(measured.begin(), measured.end(), [&](const MeasuredTile& m) {
      return m.tile == candidate->tile;
    });
    if (found == measured.end()) return std::nullopt;
    times.push_back(found->microseconds);
  }
  return times;
}

/// Sorts the candidates that fit max_workspace by cost; if none fits, returns the one with the
/// smallest workspace. Adds to the reasons how much longer the others take, and the bytes that they
/// need.
Candidates sorted(const Problem& problem, const Candidates& candidates,
                  const std::vector<double>& costs, const char* how, Reasons* reasons) {
  std::vector<size_t> order(candidates.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t x, size_t y) { return costs[x] < costs[y]; });
  const auto bytes_of = [&](size_t i) { return candidates[i]->workspace; };
  const int64_t min_bytes = bytes_of(*std::ranges::min_element(order, {}, bytes_of));
  const int64_t max_bytes = problem.has_room(min_bytes) ? problem.max_workspace : min_bytes;
  std::erase_if(order, [&](size_t i) {
    if (max_bytes == 0 || bytes_of(i) <= max_bytes) return false;
    reasons->rejected.push_back(
        fmt::format("tile {}: wants {} bytes of workspace, max_workspace is {}",
                    candidates[i]->tile.text(), bytes_of(i), problem.max_workspace));
    return true;
  });
  Candidates result;
  for (const size_t i : order) {
    result.push_back(candidates[i]);
    if (i == order[0]) continue;
    const double ratio = costs[order[0]] > 0 ? costs[i] / costs[order[0]] : 1;
    reasons->rejected.push_back(
        fmt::format("tile {}: {} {:.3g} times as long, wants {} bytes of workspace",
                    candidates[i]->tile.text(), how, ratio, candidates[i]->workspace));
  }
  return result;
}

}  // namespace

Candidates all_candidates(const Problem& problem, std::span<const Family* const> families,
                          const Card& card, std::vector<std::string>* rejected) {
  Candidates all;
  for (const Family* family : families) {
    if (!family->is_for(problem)) continue;
    if (const std::string why = family->rejects(problem); !why.empty()) {
      if (std::ranges::find(*rejected, why) == rejected->end()) rejected->push_back(why);
      continue;
    }
    std::ranges::move(family->candidates(problem, card, rejected), std::back_inserter(all));
  }
  return all;
}

Candidates ranked(const Problem& problem, std::span<const Family* const> families, const Card& card,
                  std::span<const MeasuredTile> measured, Reasons* reasons) {
  Candidates all = all_candidates(problem, families, card, &reasons->rejected);
  if (all.empty()) {
    throw Error(Status::kUnsupported, fmt::format("engine cuda: no tile computes this: {}",
                                                  fmt::join(reasons->rejected, "; ")));
  }
  if (problem.invariant && !measured.empty()) {
    reasons->rejected.push_back(
        "tile tuned on this device: it depends on the batch, `invariant` must not");
  } else if (!measured.empty()) {
    if (const auto times = times_of(all, measured)) {
      const Candidates best = sorted(problem, all, *times, "measured", reasons);
      const auto index = std::ranges::find(all, best.at(0)) - all.begin();
      const double microseconds = times->at(static_cast<size_t>(index));
      reasons->details.add("tile_from", "tuning");
      reasons->details.add("measured_us", microseconds);
      reasons->decisions.push_back(fmt::format(
          "tile tuned on this device: measured {:.4g} us for a call of this class", microseconds));
      return best;
    }
    reasons->rejected.push_back("tile tuned on this device: other tiles were measured");
  }
  const auto preferred = [](const auto& candidate) { return candidate->tuned_only.empty(); };
  if (std::ranges::any_of(all, preferred)) {
    std::erase_if(all, [&](const auto& c) {
      if (preferred(c)) return false;
      reasons->rejected.push_back(fmt::format("tile {}: {}", c->tile.text(), c->tuned_only));
      return true;
    });
  }
  std::vector<double> cycles;
  for (const auto& candidate : all) cycles.push_back(candidate->cycles);
  reasons->details.add("tile_from", "cost_model");
  reasons->decisions.push_back("tile chosen by the cost model");
  return sorted(problem, all, cycles, "predicted", reasons);
}

std::unique_ptr<const Executable> load_best(const Candidates& candidates, const Problem& problem,
                                            Gpu& gpu, Reasons reasons) {
  const auto defect_of = [&](const Candidate& candidate) {
    const std::vector<KernelUse> kernels = candidate.kernels();
    if (kernels.empty()) return std::string();
    gpu.load(kernels);
    return gpu.kernel(kernels[0]).defect;
  };
  // A defect seldom costs more: decoding 32 rows over 64 x 8k keys of int4 with zero points took
  // 421 us (H200) with a kernel that spills, and 1739 us with the first one that does not.
  constexpr double kMaxSlowdown = 1.5;
  std::string defect;  // of the first candidate
  Reasons passed_over = reasons;
  for (const auto& candidate : candidates) {
    if (candidate->cycles > kMaxSlowdown * candidates.at(0)->cycles) break;
    const std::string why = defect_of(*candidate);
    if (why.empty()) {
      papers::add_counts(problem, *candidate, &passed_over);
      return candidate->executable(gpu, passed_over);
    }
    if (defect.empty()) defect = why;
    passed_over.rejected.push_back(fmt::format("tile {}: {}", candidate->tile.text(), why));
    if (problem.invariant) break;
  }
  reasons.details.add("kernel_defect", defect);
  reasons.decisions.push_back(
      fmt::format("the compiled kernel is slower than it looks: it {}; {}", defect,
                  problem.invariant ? "the tile of an invariant call depends on nothing else"
                                    : "so are those of all tiles that are about as fast"));
  papers::add_counts(problem, *candidates.at(0), &reasons);
  return candidates.at(0)->executable(gpu, reasons);
}

}  // namespace fulgur::cuda
