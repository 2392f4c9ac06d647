#include "cuda/sm90/backward_candidates.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "cuda/common/tensor_map.h"
#include "cuda/maps/mask_bits.h"
#include "cuda/sm90/backward_cost.h"
#include "cuda/sm90/backward_waves.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr int kMaxStages = 6;

/// A variant of the kernels. Each is tried for every problem.
struct Form {
  DqMethod dq_method;
  int consumers;
  bool mask_bits = false;  ///< a bool mask is read as bits
};
constexpr Form kForms[] = {{DqMethod::kAtomic, 2},        {DqMethod::kOrdered, 2},
                           {DqMethod::kStored, 2},        {DqMethod::kNone, 2},
                           {DqMethod::kAtomic, 1},        {DqMethod::kAtomic, 2, true},
                           {DqMethod::kOrdered, 2, true}, {DqMethod::kStored, 2, true}};

/// Whether dK and dV of 64 keys need a warpgroup each, because the registers of one cannot hold
/// both with the derivatives of scores, or with P before dropout.
bool needs_wide(const BackwardPlan& plan) {
  if (plan.has_score_slope() && plan.dropout) return std::max(plan.head_dim, plan.value_dim) > 96;
  const bool large_bias = plan.bias == 1 + kernels::kF32;  // its tiles need the shared memory
  const bool fewer = plan.has_score_slope() || plan.dropout || large_bias;
  return plan.head_dim > (fewer ? 128 : 192) || plan.value_dim > 128;
}

/// The maximum of d and dv for which a warpgroup can hold dK and dV while another one computes dQ.
int max_accumulated_dim(const BackwardPlan& plan) {
  return plan.has_score_slope() ? 64 : plan.dropout ? 96 : 128;
}

/// Whether each SM has at most one key block of `block_keys` keys.
bool one_round(const Problem& p, int block_keys, int sms) {
  return p.batch * p.hk * ceil_div(p.sk, block_keys) <= sms;
}

/// Whether CTAs of one warpgroup with 64 keys may be faster than CTAs of two with 128: twice as
/// many SMs have work, each for half of the time, but dQ is added twice as often. Measured up to so
/// many rows; slower if a kv head has several q heads.
bool is_short(const Problem& p, int sms) {
  constexpr int64_t kMaxShortRows = 1024;
  return p.sq <= kMaxShortRows && p.group() == 1 && one_round(p, 64, sms);
}

/// Whether the kernel by keys also rounds dQ: if each CTA has one key block, so that all blocks of
/// a head run at the same time, and each row sees some key, so that some block adds to it last. It
/// has to count additions, which takes longer than the additions: measured as faster if each CTA
/// has few.
bool rounds_dq(const Problem& p, const BackwardPlan& plan, int sms) {
  constexpr int64_t kMaxRows = 1024;
  if (plan.dq_method != DqMethod::kAtomic || plan.maps_tiles || p.sq > kMaxRows || p.group() > 1 ||
      p.packed || p.has(Arg::kSeqUsedQ) || p.has(Arg::kSeqUsedK) ||
      !one_round(p, plan.block_keys, sms)) {
    return false;
  }
  const BackwardWork work(p, plan);
  for (int tile = 0; tile < work.row_tiles; ++tile) {
    const kernels::KeyTiles seen = kernels::key_tiles_of(work.band, work.lengths, work.tile, tile);
    if (seen.begin >= seen.end) return false;
  }
  if (plan.consumers == 2) return plan.repairs() ? work.row_tiles <= 4 : has_one_panel(plan);
  return work.row_tiles <= 2 && (plan.repairs() || !has_one_panel(plan));
}

/// Br: 128 if rows are one panel, which needs fewer waits per row; 64 if a call is so short that
/// the wait for the first step matters more.
int step_rows(const BackwardPlan& plan, const Problem& p, int sms) {
  constexpr int64_t kFewRows = 256;
  const bool few =
      plan.dq_method == DqMethod::kAtomic && p.sq <= kFewRows && one_round(p, plan.block_keys, sms);
  const bool more = plan.has_score_slope() || plan.dropout || plan.bias_tile() != 0;
  return has_one_panel(plan) && !more && !few ? 128 : 64;
}

/// Sets the stages of the kernel by keys to fill shared memory. Returns false if two stages of Q
/// and of dO do not fit.
bool derive_stages(BackwardPlan& plan, int shared_bytes) {
  // A second stage of K loads the next block during the last steps of this one. For rows of several
  // panels it uses the shared memory of a second stage of dS, which is faster only with ordered
  // additions, for which the warpgroup that reads dS has to wait.
  const bool no_dq = plan.dq_method == DqMethod::kNone;
  const bool instead_of_ds =
      !has_one_panel(plan) && !plan.wide() && (no_dq || plan.dq_method == DqMethod::kAtomic);
  plan.k_stages = has_one_panel(plan) || instead_of_ds ? 2 : 1;
  plan.ds_stages = no_dq ? 0 : instead_of_ds ? 1 : 2;
  // A warp that adds in order keeps its stage until the addition is complete, which takes longer
  // than a step of 64 rows.
  const bool third = plan.dq_method == DqMethod::kOrdered && plan.block_rows == 64;
  plan.dq_stages = !plan.accumulates_dq() ? 0 : third ? 3 : 2;
  // Limited by the registers: of consumers for dQ, and of the producer for the addresses of tiles.
  plan.row_tiles = plan.head_dim > 128 ? 1 : plan.head_dim > 64 || plan.block_rows == 64 ? 2 : 4;
  const auto keys_bytes = [&](int q_stages, int o_stages) {
    plan.q_stages = q_stages;
    plan.o_stages = o_stages;
    return plan.keys_shared_bytes = plan.wide() ? kernels::keys_wide_layout(tile_of(plan)).bytes
                                                : kernels::keys_layout(tile_of(plan)).bytes;
  };
  // A stage of Q is in use for two steps, a stage of dO for one.
  int q_stages = 2, o_stages = 2;
  if (plan.bias_tile() != 0 && keys_bytes(q_stages, o_stages) > shared_bytes)
    plan.k_stages = plan.ds_stages = 1;
  if (keys_bytes(q_stages, o_stages) > shared_bytes) return false;
  for (bool grown = true; grown;) {
    grown = false;
    if (q_stages <= o_stages && q_stages < kMaxStages &&
        keys_bytes(q_stages + 1, o_stages) <= shared_bytes) {
      ++q_stages;
      grown = true;
    } else if (o_stages < kMaxStages && keys_bytes(q_stages, o_stages + 1) <= shared_bytes) {
      ++o_stages;
      grown = true;
    }
  }
  keys_bytes(q_stages, o_stages);
  return true;
}

/// The same for the stages of the kernel by rows.
bool derive_row_stages(BackwardPlan& plan, int shared_bytes) {
  for (plan.row_stages = kMaxStages; plan.row_stages >= 2; --plan.row_stages) {
    plan.rows_shared_bytes = kernels::rows_layout(tile_of(plan)).bytes;
    if (plan.rows_shared_bytes <= shared_bytes) return true;
  }
  return false;
}

/// Whether a form computes exactly the requested gradients. Forms that accumulate dQ always compute
/// dK and dV, too.
bool computes_what_is_wanted(DqMethod method, const Problem& p) {
  if (!p.wants_dq()) return method == DqMethod::kNone;
  return method == DqMethod::kStored || (method != DqMethod::kNone && p.wants_dk_dv());
}

/// Why a plan that accumulates dQ does not compute a problem; empty if it computes it.
std::string not_accumulated(const BackwardPlan& plan, const Problem& p) {
  if (const int max = max_accumulated_dim(plan); std::max(p.d, p.dv) > max) {
    return fmt::format("dQ accumulated: computes d and dv up to {}{}, got {} and {}", max,
                       plan.has_score_slope() ? " with derivatives of scores"
                       : plan.dropout         ? " with dropout"
                                              : "",
                       p.d, p.dv);
  }
  if (p.invariant) {
    return "dQ accumulated: whether it fits the workspace depends on the batch, which an "
           "`invariant` call must not";
  }
  if (plan.dq_method == DqMethod::kAtomic && p.deterministic) {
    return "dQ accumulated in no fixed order: the last bits would differ from run to run";
  }
  return {};
}

}  // namespace

std::vector<Fitting<BackwardPlan>> backward_candidates(const Problem& p, const Card& card,
                                                       std::vector<std::string>* rejected) {
  std::vector<Fitting<BackwardPlan>> tiles;
  for (const auto [dq_method, consumers, bits] : kForms) {
    if (consumers == 1 && !is_short(p, card.sms)) continue;
    if (bits && !(packs_mask(p) && p.wants_dk_dv())) continue;
    if (!computes_what_is_wanted(dq_method, p)) continue;
    Fitting<BackwardPlan> tile;
    BackwardPlan& plan = tile.plan;
    set_problem(p, plan, plan);
    plan.dq_method = dq_method;
    plan.maps_tiles = plan.mask_mod;
    // In a fixed order key blocks would wait for others while the mask leaves them without work.
    if (plan.maps_tiles && dq_method == DqMethod::kOrdered && !p.deterministic) continue;
    if (bits) {
      if (needs_wide(plan))
        continue;  // its warpgroups have no registers left for words of the mask
      use_mask_bits(plan);
      plan.copies_bias.clear();
    }
    if (dq_method == DqMethod::kOrdered) plan.dq_parts = kernels::dq_panels_of(plan.head_dim);
    plan.consumers = consumers;
    plan.block_keys = needs_wide(plan) ? 64 : 64 * consumers;
    // Calls for dQ alone compute scores a step ahead, while other products are in flight.
    if (!plan.wide() && plan.key_gradients) plan.bias_terms = bias_terms(p);
    plan.block_rows = step_rows(plan, p, card.sms);
    if (plan.accumulates_dq()) {
      const std::string why = not_accumulated(plan, p);
      // The reason is the same for all forms: the first one adds it.
      if (!why.empty() && dq_method == DqMethod::kAtomic && consumers == 2 && !bits)
        rejected->push_back(why);
      if (!why.empty()) continue;
    }
    if (!derive_stages(plan, card.shared_bytes)) continue;
    plan.makes_map =
        plan.maps_tiles && !bits && plan.early_starts && prepares_map(p, map_tiles(plan));
    plan.grid = card.sms;
    plan.rounds_dq = rounds_dq(p, plan, card.sms);
    BackwardPlan unlimited = plan;
    tile.cycles = plan_waves(plan, p, card, p.max_workspace) + packing_cycles(p, plan, card);
    plan.rounds_dq = plan.rounds_dq && plan.splits == 1;
    if (!derive_row_stages(plan, card.shared_bytes)) continue;
    const double cycles = p.max_workspace > 0
                              ? plan_waves(unlimited, p, card, 0) + packing_cycles(p, plan, card)
                              : tile.cycles;
    if (p.max_workspace > 0 && unlimited.waves.size() < plan.waves.size()) {
      rejected->push_back(fmt::format(
          "{} waves instead of {}: {:.3g} of the predicted time, but {} bytes of workspace, "
          "max_workspace is {}",
          unlimited.waves.size(), plan.waves.size(), cycles / tile.cycles,
          workspace_of(p, unlimited).end, p.max_workspace));
    }
    tiles.push_back(std::move(tile));
  }
  return tiles;
}

}  // namespace fulgur::cuda::sm90
