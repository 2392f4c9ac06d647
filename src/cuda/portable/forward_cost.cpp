#include "cuda/portable/forward_cost.h"

#include <algorithm>

#include "cuda/portable/rates.h"
#include "kernels/host_device/key_walk.h"

namespace fulgur::cuda::portable {
namespace {

constexpr double kL2Bytes = 40;           // per SM and clock
constexpr double kMemoryFraction = 0.85;  // of the memory bandwidth

// Instructions per score without its products, counted in compiled kernels: softmax alone, and what
// softcap or ALiBi, a dense bias, or dropout add.
constexpr double kSoftmax = 6.2, kTransform = 6, kBias = 12, kDropout = 12;
// Those of the products of f32, per score and dim: numbers become two parts, sums are added up.
constexpr double kParts = 0.38;

// Fitted to an H200, d 64 to 256, within 8%.
constexpr double kTileCycles = 150;  // barriers of a key tile, and waits for the first fragments
constexpr double kEndCycles = 2500;  // load of Q, store of O

/// Warps of a CTA, per scheduler.
double warps_of(const ForwardPlan& plan) { return plan.strips / plan.warp_strips; }

/// Cycles of four warps, one per scheduler, for a key tile.
struct KeyTile {
  double busy;   ///< in which they occupy units of the SM, which other warps also need
  double chain;  ///< latency from one key tile to the next of the same warps
};

KeyTile key_tile_of(const ForwardPlan& plan, const Card& card) {
  const double scores = 64.0 * plan.warp_strips * plan.block_keys;
  const int dims = plan.head_dim + plan.value_dim;
  const auto bytes = static_cast<double>(size_of(plan.dtypes.q));
  const bool f32 = plan.dtypes.q == DType::kF32;
  const double instructions = kSoftmax + kTransform * plan.transforms_scores +
                              kBias * plan.scores_hide() + kDropout * plan.dropout +
                              (f32 ? kParts * dims : 0);
  const double products = 2 * scores * dims / mma_rate(plan.dtypes.q, card);
  const double scalar = scores * instructions / capability_row(card.capability).fp32_lanes;
  const double exponentials = scores / kExponentials;
  const double keys = 4.0 * plan.block_keys * dims * bytes;  // of K and V, read by each warp
  const double q = plan.q_in_registers ? 0 : 64.0 * plan.warp_strips * plan.head_dim * bytes;
  const double shared = (keys + q) / kSharedBytes;
  const double copies = plan.block_keys * dims * bytes * plan.warp_strips / plan.strips / kL2Bytes;
  const double longest = std::max({products, scalar, exponentials, shared, copies});
  const double others = products + scalar + exponentials + shared - longest;
  // Each product of f32 waits for its operands, which are loaded and split immediately before it.
  const double waits = f32 ? scalar + shared : std::max(scalar, exponentials);
  // Without cp.async all warps of a CTA wait for the copies of the next tile.
  const double copying = features_of(card.target).has_async_copies ? 0 : copies * warps_of(plan);
  return {longest + kNotHidden * others, products + waits + copying + kTileCycles};
}

}  // namespace

double predicted_cycles(const ForwardPlan& plan, const Problem& p, const Card& card) {
  const KeyTile tile = key_tile_of(plan, card);
  const double warps = warps_of(plan);
  const double steady = std::max(tile.busy, tile.chain / (warps * plan.residents)) * warps;
  const kernels::Lengths longest{0, 0, static_cast<int>(p.sq), static_cast<int>(p.sk)};
  const kernels::Band band = band_of(plan, p);
  kernels::Work head{};  // one head alone
  head.row_blocks = head.q_tiles = plan.work.row_blocks;
  head.heads = head.section_heads = 1;
  double all = 0, longest_chain = 0;
  for (int number = 0; number < head.q_tiles; ++number) {
    const kernels::QTile q_tile = kernels::q_tile_of(head, 1, /*splits=*/false, band, number);
    const kernels::KeyTiles keys = kernels::key_tiles_of(head, band, longest, plan.strips,
                                                         plan.block_keys, /*splits=*/false, q_tile);
    const int count = keys.end - keys.begin;
    all += kEndCycles / plan.residents + steady * count;
    longest_chain =
        std::max(longest_chain, kEndCycles + std::max(tile.chain, tile.busy * warps) * count);
  }
  const double keys = static_cast<double>(p.packed_k ? p.total_k : p.batch * p.sk);
  const double reading =
      keys * static_cast<double>(p.key_bytes()) / (kMemoryFraction * card.bytes_per_cycle);
  return std::max({longest_chain, all * plan.work.heads / card.sms + longest_chain / 4, reading});
}

}  // namespace fulgur::cuda::portable
