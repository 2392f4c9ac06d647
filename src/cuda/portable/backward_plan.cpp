#include "cuda/portable/backward_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "cuda/common/host_metadata.h"
#include "cuda/device/launch_memory.h"
#include "cuda/portable/backward_cost.h"
#include "cuda/portable/expression_gradients.h"

namespace fulgur::cuda::portable {
namespace {

/// Tiles for d and dv above above_dim, up to max_dim. The compiler keeps dK, dV, S and dP of a warp
/// in registers; with more keys or dims it would spill.
struct BackwardTile {
  int above_dim, max_dim;
  int block_rows, block_keys, warps, roles;
  bool biased;         ///< also where a dense bias takes registers for its addresses
  bool small = false;  ///< only where no tile before it fits shared memory
};
constexpr BackwardTile kBackwardTiles[] = {
    {0, 64, 64, 128, 8, 1, false},        {0, 64, 32, 64, 8, 1, true},
    {64, 128, 64, 128, 8, 1, false},      {64, 128, 32, 64, 8, 1, true},
    {128, 192, 64, 64, 8, 2, true},       {128, 192, 32, 64, 8, 2, true},
    {128, 192, 32, 32, 4, 2, true, true}, {192, 256, 64, 64, 8, 2, true},
    {192, 256, 32, 64, 8, 2, true},       {192, 256, 32, 32, 4, 2, true},
    {192, 256, 32, 16, 4, 2, true, true},
};
// Those of f32, whose elements take twice the shared memory.
constexpr BackwardTile kBackwardTilesOfF32[] = {
    {0, 64, 32, 128, 8, 1, true},      {0, 64, 32, 64, 8, 1, true},
    {0, 64, 32, 32, 8, 2, true, true}, {64, 128, 32, 64, 8, 1, true},
    {64, 128, 32, 32, 8, 2, true},     {64, 128, 32, 16, 4, 2, true, true},
    {128, 192, 32, 64, 8, 1, true},    {128, 192, 32, 32, 8, 2, true},
    {128, 192, 32, 16, 4, 2, true},    {192, 256, 32, 64, 8, 1, true},
    {192, 256, 32, 32, 8, 2, true},    {192, 256, 32, 16, 4, 2, true},
};

std::span<const BackwardTile> tiles_of(const Problem& p) {
  if (p.dtypes.q == DType::kF32) return kBackwardTilesOfF32;
  return kBackwardTiles;
}

constexpr int kMaxStages = 3;
constexpr int kFewKeyBlocks = 2;   // per SM: with four, splits were 1 to 4% slower
constexpr int kOrderedBlocks = 8;  // per SM and section, if they add dQ in order
// If they add in order, at most so many key blocks of a head need to run at the same time.
constexpr int kLongHead = 64;
// Per SM: with fewer, descending order loses, as the longest blocks end last and leave SMs idle.
constexpr int kManyKeyBlocks = 12;

/// How dQ is added. Deterministic and invariant calls need a fixed order of additions, which
/// kOrdered has; with whole heads one CTA adds in order anyway.
DqMethod method_of(const Problem& p, bool whole_heads) {
  if (!p.wants_dq()) return DqMethod::kNone;
  const bool ordered = (p.deterministic || p.invariant) && !whole_heads;
  return ordered ? DqMethod::kOrdered : DqMethod::kAtomic;
}

/// The decisions that are the same for every tile.
BackwardPlan plan_of(const Problem& p, const Card& card) {
  BackwardPlan plan;
  set_problem(p, plan, plan);
  plan.copies_bias.clear();  // kernels read its elements from memory directly
  plan.whole_heads = p.algorithm == Algorithm::kFa1;
  plan.dq_method = method_of(p, plan.whole_heads);
  plan.dq_parts = plan.dq_method == DqMethod::kOrdered ? 1 : 0;
  plan.maps_tiles = plan.mask_mod;
  const Capability features = features_of(card.target);
  plan.dq_by_fours = features.has_red_v4;
  plan.stores_matrices = features.has_stmatrix;
  plan.early_starts = false;
  plan.whole_columns = plan.head_dim == p.d && plan.value_dim == p.dv;
  return plan;
}

/// The order of key blocks. The heads of a section begin and end together, so that L2 holds their
/// rows: a section has as many heads as give each SM a key block. If key blocks add dQ in order, it
/// has so many that few blocks of a head run at the same time and wait for each other. It has fewer
/// with two roles, whose blocks add more often for their products: without a mask blocks wait only
/// once; with a right bound the last blocks are short and would wait longest, but in descending
/// order no block waits (portable/backward/tile.cuh).
kernels::BlockSchedule schedule(const Problem& p, const BackwardPlan& plan, int sms) {
  kernels::BlockSchedule blocks{};
  blocks.blocks = ceil_div(p.sk, plan.block_keys);
  blocks.batch_heads = static_cast<int>(p.batch * p.hk) * plan.splits;
  const bool ordered = plan.dq_method == DqMethod::kOrdered, wide = plan.roles == 2;
  const bool many = int64_t{blocks.blocks} * blocks.batch_heads >= int64_t{kManyKeyBlocks} * sms;
  // The order of additions of an invariant call must not depend on the batch.
  const bool descends = ordered && wide && plan.has_right && !plan.maps_tiles && !p.invariant &&
                        many && blocks.blocks < kLongHead;
  blocks.order = descends ? kernels::kDescending : kernels::kAscending;
  const int of_sm = !ordered || descends ? 1 : wide && !plan.has_right ? 2 : kOrderedBlocks;
  blocks.section_heads = std::clamp(ceil_div(of_sm * sms, std::max(blocks.blocks, 1)), 1,
                                    std::max(blocks.batch_heads, 1));
  blocks.sections = std::max(blocks.batch_heads / blocks.section_heads, 1);
  return blocks;
}

/// Sets the number of buffers to the maximum that fits shared memory. Returns false if not even one
/// fits. With one role there are two buffers of P and dS if there are three of Q and dO.
bool derive_stages(BackwardPlan& plan, int shared_bytes) {
  for (plan.stages = kMaxStages; plan.stages > 0; --plan.stages) {
    const bool two = plan.roles == 2 || plan.stages == kMaxStages;
    const bool one = plan.roles == 2 || !two;
    for (plan.ds_stages = two ? 2 : 1; plan.ds_stages >= (one ? 1 : 2); --plan.ds_stages) {
      plan.shared_bytes = plan.layout().bytes;
      if (plan.shared_bytes <= shared_bytes) return true;
    }
  }
  plan.stages = plan.ds_stages = 1;
  plan.shared_bytes = plan.layout().bytes;
  return false;
}

/// The predicted cycles by which tiles are compared.
double predict(const BackwardPlan& plan, const Problem& p, const Card& card) {
  if (!p.invariant) return predicted_cycles(plan, p, card);
  const Problem sequences = long_sequences(p, card.sms);
  BackwardPlan other = plan;
  other.key_blocks = schedule(sequences, other, card.sms);
  return predicted_cycles(other, sequences, card);
}

/// Divides the q heads of a group among several CTAs if there are few kv heads and keys, so that
/// the call is fastest. In invariant calls one CTA computes all q heads, because the order of a sum
/// over splits, and with it its last bits, would depend on the batch. Returns the predicted cycles,
/// which do not depend on the requested gradients: they decide the tile, and with it bits.
double divide_heads(BackwardPlan& plan, const Problem& p, const Card& card) {
  plan.key_blocks = schedule(p, plan, card.sms);
  double cycles = predict(plan, p, card);
  const bool few = int64_t{plan.key_blocks.blocks} * plan.key_blocks.batch_heads <
                   int64_t{kFewKeyBlocks} * card.sms;
  if (p.invariant || !plan.key_gradients || plan.whole_heads || !few) return cycles;
  const int group = static_cast<int>(p.group());
  for (int splits = 2; splits <= group; ++splits) {
    if (group % splits != 0) continue;
    BackwardPlan divided = plan;
    divided.splits = splits;
    divided.split_heads = group / splits;
    divided.splits_heads = true;
    divided.key_blocks = schedule(p, divided, card.sms);
    const double predicted = predict(divided, p, card);
    if (predicted >= cycles || !p.has_room(workspace_of(p, divided).end)) continue;
    plan = divided;
    cycles = predicted;
  }
  return cycles;
}

/// Whether dK of a step is computed before dQ, so that both roles add to dQ at the end of a step.
/// It is faster above d 192 if many key blocks of a head compute the same steps one after the
/// other, but not with several q heads.
bool dk_comes_first(const BackwardPlan& plan) {
  return plan.dq_method == DqMethod::kOrdered && plan.roles == 2 && plan.has_right &&
         std::max(plan.head_dim, plan.value_dim) > 192 && plan.split_heads == 1 &&
         plan.key_blocks.blocks > kLongHead;
}

}  // namespace

TileId BackwardPlan::tile() const {
  const bool ordered = dq_method == DqMethod::kOrdered;
  return {whole_heads        ? "fa1_backward"
          : ordered          ? "portable_backward_ordered"
          : accumulates_dq() ? "portable_backward_atomic"
                             : "portable_backward_none",
          block_rows, block_keys};
}

BackwardWorkspace workspace_of(const Problem& p, const BackwardPlan& plan) {
  if (p.nothing_to_do() && !plan.dsinks && !plan.dbias && !plan.dtensors) return {};
  Arena arena(LaunchMemory::kZeroed);
  const int64_t rows = p.hq * plan.statistics_rows;
  const int64_t semaphores = plan.dq_method == DqMethod::kOrdered ? rows / plan.block_rows : 0;
  const int64_t keys = int64_t{plan.key_blocks.blocks} * plan.block_keys;
  const int64_t partial_keys = plan.reduces() ? p.batch * p.hk * plan.splits * keys : 0;
  BackwardWorkspace at{backward_workspace(p, plan, plan, semaphores, partial_keys, arena)};
  at.tensor_sums = arena.take(ExpressionGradients::bytes(p));
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

std::string backward_rejects(const Problem& p) {
  std::string why = dtypes_rejected(p.dtypes, /*takes_f32=*/true);
  return why.empty() ? backward_sizes_rejected(p) : why;
}

std::vector<Fitting<BackwardPlan>> backward_candidates(const Problem& p, const Card& card,
                                                       std::vector<std::string>* rejected) {
  std::vector<Fitting<BackwardPlan>> tiles;
  for (const BackwardTile& tile : tiles_of(p)) {
    const int64_t dim = std::max<int64_t>(std::max(p.d, p.dv), 1);
    if (dim <= tile.above_dim || dim > tile.max_dim) continue;
    if ((p.has(Arg::kBias) || p.expressions.given()) && !tile.biased) continue;
    if (tile.small && !tiles.empty()) continue;
    Fitting<BackwardPlan> t{plan_of(p, card), 0, {}};
    t.plan.block_rows = tile.block_rows;
    t.plan.block_keys = tile.block_keys;
    t.plan.warps = tile.warps;
    t.plan.roles = tile.roles;
    if (!derive_stages(t.plan, card.shared_bytes)) {
      rejected->push_back(fmt::format("tile {}: its {} bytes of shared memory do not fit {}",
                                      t.plan.tile().text(), t.plan.shared_bytes,
                                      card.shared_bytes));
      continue;
    }
    t.cycles = divide_heads(t.plan, p, card);
    t.plan.dk_first = dk_comes_first(t.plan);
    tiles.push_back(std::move(t));
  }
  return tiles;
}

Explanation describe(const BackwardPlan& plan) {
  Explanation e;
  e.Br = plan.block_rows;
  e.Bc = plan.block_keys;
  const bool ordered = plan.dq_method == DqMethod::kOrdered;
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("warps", plan.warps);
  e.details.add("stages", plan.stages);
  e.details.add("ds_stages", plan.ds_stages);
  e.details.add("shared_bytes", plan.shared_bytes);
  e.details.add("ctas", plan.ctas());
  e.details.add("dq", ordered ? "ordered" : plan.accumulates_dq() ? "atomic" : "none");
  e.details.add("deterministic", ordered || plan.whole_heads || !plan.accumulates_dq());
  e.decisions.push_back(fmt::format(
      "mma.sync: key blocks of {} keys for dK and dV, steps of {} rows; d {} and dv {} as computed",
      plan.block_keys, plan.block_rows, plan.head_dim, plan.value_dim));
  const auto buffers = [](int count) {
    return count == 1 ? std::string("1 buffer") : fmt::format("{} buffers", count);
  };
  e.decisions.push_back(fmt::format(
      "{} warps, {}; {} of Q and dO, {} of P and dS: {} bytes of shared memory", plan.warps,
      plan.roles == 2 ? "half of them for P and dV, half for dS and dK"
                      : "each for P, dS, dV and dK",
      buffers(plan.stages), buffers(plan.ds_stages), plan.shared_bytes));
  if (plan.accumulates_dq()) {
    e.decisions.push_back(fmt::format(
        "dQ accumulated in f32, additions {}",
        plan.whole_heads ? "by the one CTA of a kv head, key block by key block: deterministic"
        : ordered        ? "ordered by semaphores: deterministic"
                         : "atomic, in no fixed order: not deterministic"));
  }
  describe_backward(plan, plan, e);
  return e;
}

}  // namespace fulgur::cuda::portable
