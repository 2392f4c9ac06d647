#include "cuda/decode/candidates.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "cuda/decode/cost.h"
#include "cuda/decode/rejects.h"
#include "cuda/decode/tiles.h"
#include "cuda/passes/forward.h"
#include "kernels/decode/layout.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

constexpr int64_t kLanes = 32;
constexpr int64_t kTileRows[] = {4, 8, 16, 32, 64, 128};  ///< maximum of rows of each tile
/// With more rows of a kv head other kernels are faster, where these can compute the call.
constexpr int64_t kMaxRowsForModel = 128;
/// Scales predicted cycles to those of the forward family, which predicts too few for few rows (on
/// an H100).
constexpr double kForwardCycles = 0.94;

/// Whether a schedule can compute a problem with a tile.
bool fits(DecodeSchedule schedule, const DecodePlan& tile, const Problem& problem) {
  const Problem p = as_planned(problem, tile);
  if (schedule == DecodeSchedule::kStreamK) return true;
  // Eight warps that convert zero points, or q8_0 of pages, have no registers for its requests.
  const bool q8_0 = tile.stored.k == DType::kQ8_0 || tile.stored.v == DType::kQ8_0;
  const bool many_registers = tile.k_zero_point || tile.v_zero_point || (q8_0 && tile.page > 0);
  if (schedule == DecodeSchedule::kDynamic && tile.convert_warps > kernels::kLoadWarps &&
      many_registers)
    return false;
  // With several heads, warps that load nothing would have to read the scheduler's answers.
  if (tile.heads > 1 && schedule == DecodeSchedule::kDynamic) return false;
  // Each sequence has one q block a kv head.
  if (rows_of_kv_head(p) > tile.q_block_rows()) return false;
  const int64_t q_blocks = p.batch * p.hk;
  if (schedule == DecodeSchedule::kSplitToFill) {
    return p.batch <= kernels::kFillSequences && q_blocks < tile.grid &&
           p.sk > kernels::chunk_keys(tile.block_keys);
  }
  // On the wide path no warp is there to request q blocks while others compute, and that of
  // warpgroups has no room for the scheduler's answers.
  if (schedule == DecodeSchedule::kDynamic && tile.is_wide()) return false;
  // With a q block for each CTA there is nothing to request, and Dynamic's kernel cannot append.
  const bool requests = p.batch <= kernels::kDynamicSequences && q_blocks > tile.grid;
  const bool has_mbarriers = features_of(tile.card.target).has_tma;
  if (schedule == DecodeSchedule::kDynamic && !(requests && has_mbarriers)) return false;
  // On the warp path a tree mask leaves no registers for schedules of whole q blocks.
  return !p.of_groups && !(tile.tree && !tile.warpgroup_path());
}

/// Sets the partial results of a schedule whose splits are counted before they are computed.
void set_splits(DecodePlan& plan, const Problem& p) {
  const int64_t chunks = ceil_div(p.sk, kernels::chunk_keys(plan.block_keys));
  if (plan.schedule == DecodeSchedule::kSplitToFill) {
    if (p.batch > kLanes) plan.lane_sequences = 2;
    // With few splits a warp of combine.cu takes more columns: a warp costs more than their loads.
    if ((plan.warps_per_group + 1) * p.batch * p.hk > plan.grid) plan.combine_eights = 4;
    plan.max_splits = static_cast<int>(std::min<int64_t>(chunks, plan.grid));
    plan.split_rows = plan.tile_rows;
  } else if (plan.schedule == DecodeSchedule::kInvariantSplits) {
    plan.max_splits = kernels::max_splits(static_cast<int>(chunks));
    plan.split_rows = static_cast<int>(std::min<int64_t>(rows_of_kv_head(p), plan.tile_rows));
  }
}

void set_cost(DecodePlan& plan, const Problem& p) {
  plan.cycles = decode_cycles(plan, p);
  plan.expected_cycles = expected_decode_cycles(plan, p);
  plan.memory_binds = memory_binds(plan, p);
}

}  // namespace

std::vector<DecodePlan> decode_plans(const Problem& p, const Card& card) {
  const DecodePlan common = decode_common(p, card);
  std::vector<DecodePlan> plans;
  const auto add = [&](DecodePlan plan, DecodeSchedule schedule) {
    plan.schedule = schedule;
    const Problem as_one = as_planned(p, plan);
    set_splits(plan, as_one);
    set_cost(plan, as_one);
    plans.push_back(plan);
  };
  if (p.invariant) {
    const int warps = common.has_codes() ? 1 : kernels::kWarpgroupWarps;
    add(with_tile(common, p, card, warps, 1), DecodeSchedule::kInvariantSplits);
    return plans;
  }
  for (const DecodePlan& tile : tiles_of(common, p, card)) {
    for (const DecodeSchedule schedule :
         {DecodeSchedule::kStreamK, DecodeSchedule::kStreamKOrRoundRobin, DecodeSchedule::kDynamic,
          DecodeSchedule::kSplitToFill}) {
      if (fits(schedule, tile, p)) add(tile, schedule);
    }
  }
  return plans;
}

Fitting<DecodePlan> decode_candidate(const Problem& p, const Card& card) {
  const std::vector<DecodePlan> plans = decode_plans(p, card);
  const DecodePlan& cheapest = *std::ranges::min_element(plans, {}, &DecodePlan::expected_cycles);
  Fitting<DecodePlan> tile{cheapest, kForwardCycles * cheapest.expected_cycles, {}};
  // Groups have few q blocks with many keys, which no other kernel splits where lengths differ.
  if (!p.of_groups && !cheapest.has_codes() && !cheapest.is_wide() &&
      rows_of_kv_head(p) > kMaxRowsForModel) {
    tile.tuned_only = fmt::format("made for up to {} rows of a kv head", kMaxRowsForModel);
  }
  return tile;
}

std::vector<std::pair<Problem, DecodePlan>> decode_reachable(const Problem& problem,
                                                             const Card& card) {
  std::vector<std::pair<Problem, DecodePlan>> reachable;
  if (problem.pass != Pass::kForward || problem.invariant) return reachable;
  // Numbers of queries that have each tile and mask, of keys that have each mask, and of sequences:
  // few, with many splits of a q block and with few splits, and so many that CTAs have several q
  // blocks.
  const int64_t group = problem.group();
  std::set<int64_t> queries = {1}, keys = {8192}, batches = {1, 33, kernels::kDynamicSequences};
  for (const int64_t rows : kTileRows) queries.insert(std::max<int64_t>(rows / group, 1));
  const Mask& mask = problem.mask;
  if (mask.right >= 0) queries.insert({mask.right + 1, mask.right + 2});
  if (mask.left >= 0) keys.insert({mask.left + 1, mask.left + 2});
  if (mask.chunk > 0) keys.insert({mask.chunk, mask.chunk + 1});
  const int64_t max_few = std::max<int64_t>((card.sms - 1) / problem.hk, 1);
  for (const int64_t batch : {int64_t{32}, int64_t{kernels::kFillSequences}})
    batches.insert(std::min(batch, max_few));
  const auto& rejects = features_of(card.target).has_wgmma ? decode_rejects : decode_rejects_few;
  std::set<std::string> kernels;
  Problem p = problem;
  for (const int64_t sq : queries) {
    for (const int64_t sk : keys) {
      for (const int64_t batch : batches) {
        p.sq = sq, p.sk = sk, p.batch = batch;
        if (!rejects(p).empty()) continue;
        for (const DecodePlan& plan : decode_plans(p, card)) {
          if (plan.shared_bytes <= card.shared_bytes && kernels.insert(kernel_config(plan)).second)
            reachable.emplace_back(p, plan);
        }
      }
    }
  }
  return reachable;
}

}  // namespace fulgur::cuda::decode
