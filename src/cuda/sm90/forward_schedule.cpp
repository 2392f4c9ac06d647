#include "cuda/sm90/forward_schedule.h"

#include <algorithm>
#include <vector>

#include "cuda/sm90/forward_cost.h"
#include "kernels/host_device/strips.h"
#include "kernels/sm90/forward/layout.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr double kWorthCutting =
    0.85;  // maximum of the predicted time ratio for which unequal blocks are cut
constexpr int kMaxCutPagesDim = 192;
constexpr int kLongKeys = 2048;
constexpr int kSharingRows = 768;  // that read the same K and V; with fewer, calls are memory-bound

using kernels::Work;

/// Whether some rows do not see all keys.
bool is_banded(const ForwardPlan& plan) { return plan.has_left || plan.has_right; }

/// Whether blocks of all heads may be computed at a time: enough rows share the K and V of each.
bool all_heads_fit(const ForwardPlan& plan, const Problem& p, int sms) {
  return p.batch * p.hk * kSharingRows <= int64_t{sms} * plan.block_rows();
}

/// Divides the heads into sections, in which row blocks are the outer loop. Most sections are one
/// kv head, so that K and V are loaded to L2 once, spread over time. The last section has so many
/// heads that the blocks at its end, which are short under a band, fill all SMs. Under a band all
/// heads may be in it, if enough SMs read the K and V of each.
void divide_heads(ForwardPlan& plan, const Problem& p, int sms) {
  const bool band = is_banded(plan);
  const int blocks = !band ? 1 : p.sk < kLongKeys ? 3 : 4;  // per SM
  const int64_t heads = ceil_div(int64_t{blocks} * sms, std::max(plan.work.row_blocks, 1));
  Work& work = plan.work;
  work.section_heads = static_cast<int>(p.group()) / plan.block_heads(p);
  const int64_t last = ceil_div(heads, work.section_heads) * work.section_heads;
  work.bulk_heads = (band && all_heads_fit(plan, p, sms)) || last > work.heads
                        ? 0
                        : static_cast<int>(work.heads - last);
}

/// Takes all blocks whole, of each head work.row_blocks.
void take_whole_blocks(Work& work) {
  work.splits = 1;
  work.first_split = work.end_split = work.q_tiles = kernels::blocks_of(work);
}

/// Cuts blocks [first, end) into splits.
void cut_blocks(ForwardPlan& plan, int first, int end, int splits) {
  plan.split_tail = true;
  plan.work.first_split = first;
  plan.work.end_split = end;
  plan.work.splits = splits;
  plan.work.q_tiles = kernels::blocks_of(plan.work) + (end - first) * (splits - 1);
}

/// Cuts the last blocks, which all take about the same time, if they leave SMs idle. Returns the
/// predicted cycles.
double cut_last_blocks(ForwardPlan& plan, const BlockCost& cost, int sms, double best) {
  const int blocks = kernels::blocks_of(plan.work), first = blocks - blocks % sms;
  if (blocks == 0) return best;
  const int max_splits = std::min(kMaxSplits, std::ranges::min(cost.key_tiles));
  for (int splits = 2; splits <= max_splits && first < blocks; ++splits) {
    const double cycles = predicted_cycles(cost, blocks, first, splits, sms);
    if (cycles >= best) continue;
    best = cycles;
    cut_blocks(plan, first, blocks, splits);
  }
  return best;
}

/// If a band makes blocks unequal, and there are fewer of them than SMs, cuts the blocks that are
/// longer than a split of the longest one; they are the first ones. Returns the predicted cycles.
double cut_longest_blocks(ForwardPlan& plan, const BlockCost& cost, int sms, double best) {
  const Work whole = plan.work;
  if (kernels::blocks_of(whole) >= sms || whole.bulk_heads > 0) return best;
  const std::vector<int>& tiles = cost.key_tiles;
  const int longest = tiles.empty() ? 0 : *std::max_element(tiles.begin(), tiles.end());
  double max_cycles = kWorthCutting * best;
  for (int splits = 2; splits <= std::min(kMaxSplits, longest); ++splits) {
    const auto is_short = [&](int count) { return count * splits <= longest; };
    const int cut =
        static_cast<int>(std::find_if(tiles.begin(), tiles.end(), is_short) - tiles.begin());
    const double cycles = predicted_cycles_of_splits(cost, whole.heads, cut, splits, sms);
    if (cycles >= max_cycles) continue;
    best = max_cycles = cycles;
    cut_blocks(plan, 0, whole.heads * cut, splits);
  }
  return best;
}

/// If the last round leaves SMs idle, gives each head more blocks than its strips need: more of
/// them then have one strip less. All heads become one section, so that these shorter blocks come
/// last. Only the kernels with a bias in P, or with even blocks, are told the number of blocks; the
/// latter sort the blocks of the last rounds, so that calls of more rounds stay as they are.
/// Returns the predicted cycles.
double balance_last_round(ForwardPlan& plan, const Problem& p, const BlockCost& cost, int sms,
                          double best) {
  const bool sorted =
      plan.even_blocks() && kernels::blocks_of(plan.work) <= kernels::kSortedRounds * sms;
  if (!(plan.bias_in_p() || sorted) || is_banded(plan) || !all_heads_fit(plan, p, sms)) return best;
  Work work = plan.work;
  work.bulk_heads = 0;
  const int strips = kernels::strips_of(static_cast<int>(p.sq));
  for (; (plan.consumers - 1) * work.row_blocks <= strips; ++work.row_blocks) {
    const int shorter = plan.consumers * work.row_blocks - strips;
    const double cycles =
        predicted_cycles_of_shorter(cost, work.heads, work.row_blocks - shorter, shorter, sms);
    if (cycles >= best) continue;
    best = cycles;
    plan.work = work;
    take_whole_blocks(plan.work);
    plan.grid = std::min(sms, kernels::blocks_of(work));
  }
  return best;
}

/// Decides how blocks are distributed among CTAs. Returns the predicted cycles.
double schedule(ForwardPlan& plan, const Problem& p, const Card& card) {
  Work& work = plan.work;
  work.row_blocks = kernels::blocks_of(static_cast<int>(p.sq), plan.consumers, plan.block_heads(p));
  divide_heads(plan, p, card.sms);
  take_whole_blocks(work);
  const int blocks = kernels::blocks_of(work);
  // If each block has an SM of its own, no CTAs share one.
  plan.shares = plan.residents > 1 && blocks > card.sms;
  const int at_once = card.sms * (plan.shares ? plan.residents : 1);
  const BlockCost cost = block_cost(plan, p);
  double best = predicted_cycles(cost, blocks, blocks, 1, at_once);
  plan.grid = std::min(at_once, blocks);
  ForwardPlan balanced = plan;
  // What a map shows of a block may all be in one split: splits are worth it only where SMs have no
  // block.
  const bool uneven = plan.mask_mod && blocks >= at_once;
  // No splits in invariant calls, where they would depend on the number of blocks, that is on the
  // batch; nor of packed sequences, whose lengths are not known here. With pages the widest heads
  // have no registers left for them. With a bias in registers but not in P they were not faster.
  const bool no_registers = (plan.page > 0 && plan.value_dim > kMaxCutPagesDim) ||
                            (plan.bias_in_registers() && !plan.bias_in_p());
  if (!p.invariant && !plan.packed && !no_registers && !uneven) {
    ForwardPlan cut = plan;
    const double cycles = alike(cost) ? cut_last_blocks(cut, cost, at_once, best)
                                      : cut_longest_blocks(cut, cost, at_once, best);
    cut.grid = std::min(at_once, cut.work.q_tiles);
    if (p.has_room(workspace_of(p, cut).end)) {
      plan = cut;
      best = cycles;
    }
  }
  const double cycles = balance_last_round(balanced, p, cost, at_once, best);
  if (cycles < best) plan = balanced;
  return cycles;
}

}  // namespace

double schedule_and_predict(ForwardPlan& plan, const Problem& p, const Card& card) {
  const double cycles = schedule(plan, p, card);
  if (!p.invariant) return cycles;
  const Problem one = long_sequences(p, 1);
  ForwardPlan other = plan;
  other.work.heads = card.sms;
  return schedule(other, one, card);
}

}  // namespace fulgur::cuda::sm90
