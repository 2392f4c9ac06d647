#include "cuda/portable/backward_cost.h"

#include <algorithm>

#include "cuda/portable/rates.h"

namespace fulgur::cuda::portable {
namespace {

constexpr double kAddedBytes = 14;  // to dq_accum, per SM and clock

// Instructions per score without its products, counted in compiled kernels: P and dS alone, and
// what softcap or ALiBi, a dense bias, or dropout add.
constexpr double kGradients = 9, kOfTransform = 8, kOfBias = 12, kOfDropout = 14;

constexpr double kBarrierCycles = 120;  // of each barrier of a step
constexpr double kBlockCycles = 4000;   // loads of K and V, stores of dK and dV
constexpr double kWaitForOrder = 1.08;  // factor of key blocks that add dQ in order
constexpr double kReduceLaunchCycles = 6000;
constexpr double kReduceBytes = 10;  // per element of partial dK and dV

/// Cycles of a CTA in a step.
double step_cycles(const BackwardPlan& plan, const Card& card) {
  const double rows = plan.block_rows, keys = plan.block_keys, scores = rows * keys;
  const double d = plan.head_dim, dv = plan.value_dim;
  const double instructions = kGradients + kOfTransform * plan.transforms_scores +
                              kOfBias * plan.scores_hide() + kOfDropout * plan.dropout;
  const double products = 2 * scores * (3 * d + 2 * dv) / mma_rate(plan.dtypes.q, card);
  const double scalar = scores * instructions / capability_row(card.capability).fp32_lanes;
  const double exponentials = scores / kExponentials;
  // Elements read from shared memory: K and V by the two warps of a role that have the same keys; Q
  // and dO by the key warps of a role for scores and, by each of its warps half of the columns, for
  // gradients; for dQ, K by two groups of rows, and dS by each group of columns.
  const double groups = plan.warps / 2.0, key_warps = groups / plan.roles;
  const double elements =
      2 * keys * (2 * d + dv) + key_warps * rows * 2 * (d + dv) + scores * (2 + 2 + groups);
  const double shared = static_cast<double>(size_of(plan.dtypes.q)) * elements / kSharedBytes;
  const double added = rows * d * 4 / kAddedBytes;
  const double longest = std::max({products, scalar, exponentials, shared, added});
  const double others = products + scalar + exponentials + shared + added - longest;
  const int barriers = plan.roles == 2 ? 3 : 4 - plan.stages;
  return longest + kNotHidden * others + kBarrierCycles * barriers;
}

/// Cycles to write partial dK and dV of splits, and to add them by another kernel.
double reduce_cycles(const BackwardPlan& plan, const Problem& p, const Card& card) {
  if (!plan.reduces()) return 0;
  const auto elements = static_cast<double>(p.batch * p.hk * plan.splits * p.sk * (p.d + p.dv));
  return kReduceLaunchCycles + kReduceBytes * elements / card.bytes_per_cycle;
}

}  // namespace

double predicted_cycles(const BackwardPlan& plan, const Problem& p, const Card& card) {
  const kernels::Lengths longest{0, 0, static_cast<int>(p.sq), static_cast<int>(p.sk)};
  const kernels::Band band = band_of(plan, p);
  const double step = step_cycles(plan, card);
  double all = 0, longest_block = 0;
  for (int block = 0; block < plan.key_blocks.blocks; ++block) {
    const kernels::RowTiles tiles = kernels::row_tiles(band, longest, plan.block_rows,
                                                       block * plan.block_keys, plan.block_keys);
    const double cycles =
        kBlockCycles + step * static_cast<double>(tiles.end - tiles.begin) * plan.split_heads;
    all += cycles;
    longest_block = std::max(longest_block, cycles);
  }
  const double busy = all * plan.key_blocks.batch_heads / card.sms + longest_block / 4;
  const double factor = plan.dq_method == DqMethod::kOrdered ? kWaitForOrder : 1;
  return factor * std::max(longest_block, busy) + reduce_cycles(plan, p, card);
}

}  // namespace fulgur::cuda::portable
