#include "cpu/cpu_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>

#include "parallel.h"

namespace fulgur::cpu {
namespace {

constexpr int64_t kDecodeMostRows = 16;       // more rows than this fill the panels' vectors well
constexpr int64_t kLeastSplitKeys = 4 * kBc;  // below, merging costs more than it gains
constexpr int64_t kInvariantSplitKeys = 1024;
constexpr int64_t kMostDecodeHeads = 16;  // a tile of so many heads still fits the L2 cache

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

CpuPlan plan_decode(const Problem& p, const Kernels& k, CpuPlan plan) {
  plan.schedule = Schedule::kDecode;
  plan.Br = p.group() * p.sq;
  // Heads that lie side by side are read together, in the order of memory.
  if (std::abs(p.k.head) < std::abs(p.k.row)) {
    plan.heads = p.hk;
    while (plan.heads > kMostDecodeHeads && plan.heads % 2 == 0) plan.heads /= 2;
  }
  if (p.invariant) {
    plan.split_keys = kInvariantSplitKeys;
  } else {
    // Several tasks a thread, so that a slow one does not keep the others waiting.
    const int64_t runs = std::max<int64_t>(1, p.batch * p.hk / plan.heads);
    const int64_t splits = ceil_div(8 * plan.threads, runs);
    plan.split_keys = std::max(kLeastSplitKeys, ceil_div(ceil_div(p.sk, splits), kBc) * kBc);
  }
  plan.scratch = k.decode_scratch(p, plan.heads);
  plan.shared = p.batch * p.hk * ceil_div(p.sk, plan.split_keys) * plan.Br * (p.dv + 2);
  return plan;
}

CpuPlan plan_backward(const Problem& p, const Kernels& k, CpuPlan plan) {
  plan.schedule = Schedule::kBackward;
  plan.Br = k.panel_rows;
  const int64_t heads = std::max<int64_t>(1, p.batch * p.hk);
  // A split adds a dQ accumulator of the whole sequence: no more of them than keep all threads
  // busy.
  if (!p.invariant && heads < plan.threads) {
    plan.splits = std::min<int64_t>(ceil_div(plan.threads, heads),
                                    std::max<int64_t>(1, ceil_div(p.sk, kTiles * kBc)));
  }
  const int64_t rows = p.group() * p.sq;
  const int64_t accumulators = plan.splits > 1 ? heads * plan.splits : plan.threads;
  plan.scratch = k.backward_scratch(p);
  plan.dq_offset = ceil_div(p.total_q * p.hq, 16) * 16;
  plan.shared = plan.dq_offset + accumulators * rows * k.dq_stride(p);
  return plan;
}

}  // namespace

CpuPlan make_plan(const Problem& p, int threads, const Kernels& k,
                  std::vector<std::string>* rejected) {
  CpuPlan plan;
  plan.threads = thread_count(threads);
  if (p.pass == Pass::kBackward) return plan_backward(p, k, plan);

  const int64_t rows = p.group() * p.sq;
  const int64_t most = std::min(kDecodeMostRows, k.panel_rows);
  if (rows > 0 && rows <= most) {
    rejected->push_back(fmt::format("row panels: {} rows a kv head leave vectors empty", rows));
    return plan_decode(p, k, plan);
  }
  rejected->push_back(
      fmt::format("decode split over keys: {} rows a kv head, more than {}", rows, most));
  // Long rows in half as many panels, so that a block's Q and O stay in the L2 cache.
  const int64_t most_rows = (p.d + p.dv <= 256 ? kPanels : kPanels / 2) * k.panel_rows;
  plan.Br = most_rows;
  // Fewer panels a block where blocks would be too few to share out.
  const int64_t heads = std::max<int64_t>(1, p.batch * p.hk);
  while (plan.Br > k.panel_rows && heads * ceil_div(rows, plan.Br) < 4 * plan.threads) {
    plan.Br /= 2;
  }
  if (plan.Br < most_rows) {
    rejected->push_back(fmt::format("blocks of {} rows: fewer than 4 tasks a thread", most_rows));
  }
  plan.scratch = k.forward_scratch(p);
  return plan;
}

std::vector<std::string> describe(const CpuPlan& plan, const Problem& p) {
  const auto tile =
      fmt::format("Br {} rows (q heads of a kv head packed), Bc {} keys", plan.Br, plan.Bc);
  switch (plan.schedule) {
    case Schedule::kPanels:
      return {fmt::format("row blocks over all their keys: {}", tile),
              fmt::format("{} threads take blocks, longest first", plan.threads)};
    case Schedule::kDecode:
      return {fmt::format("decode: {}, keys in parts of {}, merged by their LSE", tile,
                          plan.split_keys),
              fmt::format("{} threads take parts{}", plan.threads,
                          p.invariant ? ", cut without regard to batch and threads" : "")};
    case Schedule::kBackward:
      return {
          fmt::format("key tiles outside, row panels inside: {}, {} tiles a pass", tile, kTiles),
          fmt::format("{} threads take {} parts of the keys of a kv head; dQ is added up in "
                      "fixed order",
                      plan.threads, plan.splits)};
  }
  return {};
}

}  // namespace fulgur::cpu
