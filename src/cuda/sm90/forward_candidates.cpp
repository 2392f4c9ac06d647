#include "cuda/sm90/forward_candidates.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "cuda/common/tensor_map.h"
#include "cuda/maps/mask_bits.h"
#include "cuda/passes/forward.h"
#include "cuda/sm90/forward_cost.h"
#include "cuda/sm90/forward_schedule.h"
#include "kernels/sm90/forward/layout.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr int kMaxStages = 6, kKeysAhead = 512;  // more buffers hide no more latency

kernels::ForwardLayout layout_of(const ForwardPlan& plan) {
  return kernels::forward_layout({operands_of(plan), plan.head_dim, plan.value_dim, plan.consumers,
                                  plan.block_keys, plan.q_stages, plan.k_stages, plan.v_stages,
                                  plan.bias_tile(), plan.bias_rows, plan.pairs, plan.maps_tiles,
                                  plan.mask_bits});
}

/// Registers per thread that setmaxnreg gives to producer and consumers.
struct Registers {
  int producer, consumer;
};
constexpr Registers registers_of(int consumers) {
  return consumers == 1   ? Registers{40, 208}
         : consumers == 4 ? Registers{32, 112}
         : consumers == 3 ? Registers{32, 160}
                          : Registers{40, 232};
}

constexpr int kPageRegisters = 40;  // of a producer that looks up pages

/// A tile for d and dv up to max_dim, and dv up to max_value_dim. The compiler keeps its S, O and P
/// in registers with all options of `scores`; with more keys or dims it would spill. The cost model
/// was fitted to dims above above_dim; for smaller ones only tuning chooses the tile.
struct Tile {
  enum Scores {
    kPlain = 1,
    kTransformed = 2,
    kDropped = 4,
    kBiased = 8,
    kMasked = 16,           ///< with bits of a bool mask
    kBiasInRegisters = 32,  ///< a bias of 16 bits: takes_bias_in_registers()
    /// With a map of mask_mod. Masks are seen by strips of 64 rows: tiles of more keys than that
    /// are partial more often.
    kMapped = 64
  };  // all but kPlain need registers
  int above_dim, max_dim, max_value_dim, consumers, block_keys;
  int scores;  ///< kDropped: with or without a transformation; kBiased: also with or without
               ///< dropout
  /// Tiles for e4m3 only: K leaves shared memory for more keys, or P V is of e4m3, too.
  enum Codes { kAnyElements, kCodes, kCodesInPV };
  Codes codes = kAnyElements;
};
constexpr int kUndropped = Tile::kPlain | Tile::kTransformed, kAny = kUndropped | Tile::kDropped;
constexpr Tile kTiles[] = {
    {0, 32, 32, 3, 112, kAny | Tile::kMapped},
    {32, 64, 64, 3, 128, Tile::kPlain | Tile::kMasked},
    {32, 64, 64, 3, 112, Tile::kTransformed | Tile::kMasked},
    {32, 64, 64, 3, 96, Tile::kDropped | Tile::kMasked | Tile::kMapped},
    {32, 64, 64, 4, 64, kUndropped | Tile::kMapped},
    {64, 96, 96, 3, 96, kUndropped | Tile::kMasked},
    {96, 128, 128, 3, 80, kUndropped | Tile::kMasked},
    {64, 128, 128, 3, 64, kAny | Tile::kBiasInRegisters | Tile::kMapped},
    {32, 128, 128, 1, 128, kAny | Tile::kMapped},
    {64, 192, 128, 2, 128, kAny | Tile::kBiased | Tile::kMasked | Tile::kMapped},
    {128, 192, 192, 2, 80, kAny | Tile::kMasked},
    {128, 256, 256, 2, 64, kAny | Tile::kBiased | Tile::kMasked | Tile::kMapped},
    {192, 256, 256, 2, 80, kUndropped, Tile::kCodes},
    {96, 128, 128, 3, 96, kUndropped, Tile::kCodesInPV},
    {128, 256, 256, 2, 96, kUndropped, Tile::kCodesInPV},
    {128, 256, 256, 2, 32, Tile::kBiased},  // with a bias of f32
};

/// Shared memory of each of `residents` CTAs of an SM. CUDA reserves some for each CTA but one.
int shared_bytes_of(int residents, const Card& card) {
  constexpr int kReservedBytes = 1024;
  return card.shared_bytes / residents - kReservedBytes * (residents - 1);
}

/// How O is stored: by TMA from the buffer of Q, if there is a second one and rows of O can be
/// addressed by TMA, which writes multiples of 16 bytes.
ForwardPlan::Store store_of(const Problem& p, bool through_q) {
  if (p.dv * size_of(p.dtypes.out) % kCopyAlignment != 0 ||
      !not_addressable(forward_shapes(p, kAnyBlockKeys).o).empty()) {
    return ForwardPlan::Store::kElements;
  }
  return through_q ? ForwardPlan::Store::kTiles : ForwardPlan::Store::kRows;
}

/// The decisions that are the same for every tile. `bits`: a bool mask is read as bits.
ForwardPlan common(const Problem& p, bool bits) {
  ForwardPlan plan;
  static_cast<AnyForwardKey&>(plan) = forward_key_by_rows(p);
  plan.dropout = p.dropout_p > 0;
  const ForwardShapes maps = forward_shapes(p, kAnyBlockKeys);
  plan.copies_q = not_addressable(maps.q);
  plan.copies_k = not_addressable(maps.k);
  if (plan.dtypes.v != p.dtypes.v) plan.widens_v = p.dtypes.v;
  plan.maps_tiles = plan.mask_mod;
  if (bits) use_mask_bits(plan);
  // With a bias that is not in P, buffers of K are in use for longer than those of V; with a map of
  // tiles the previous tile is not known in advance.
  plan.pairs = (plan.widens_v || plan.centers_v()) && plan.bias == 0 && !plan.maps_tiles;
  plan.copies_v = plan.centers_v() ? ""
                  : plan.widens_v  ? "its codes are multiplied as f16"
                                   : not_addressable(maps.v);
  plan.copies_bias = bits ? "" : not_addressable(maps.bias);
  return plan;
}

/// Whether the heads of a group share blocks: if there are at max_cycles 5% fewer blocks then, or
/// if it balances the keys that the strips of 256 rows see under a band. Not with a bias or a map
/// of tiles, which belong to one head, nor in invariant calls, whose kernel must not depend on
/// lengths. Low-bit formats, pages and expressions have not been measured.
bool shares_blocks(const ForwardPlan& plan, const Problem& p) {
  if (plan.bias != 0 || plan.maps_tiles || p.invariant) return false;
  if (p.dtypes.q == DType::kE4M3 || plan.page > 0 || p.expressions.given()) return false;
  const int rows = static_cast<int>(p.sq), group = static_cast<int>(p.group());
  const int64_t apart = int64_t{group} * kernels::blocks_of(rows, plan.consumers);
  const int64_t together = kernels::blocks_of(rows, plan.consumers, group);
  const bool levels = group > 1 && plan.consumers > 3 && (plan.has_left || plan.has_right);
  return 20 * together < 19 * apart || levels;
}

/// Whether means of V are added by products of the tensor cores: if rows have many columns or many
/// segments. Measured with d 64, 128 and 256.
bool has_mean_products(const ForwardPlan& plan, const Problem& p) {
  if (!plan.centers_v() || !plan.pairs || plan.has_left) return false;
  const bool many = !p.invariant && p.sk > kernels::segment_keys(plan.block_keys);
  return plan.value_dim > 128 || (plan.value_dim > 64 && many);
}

/// Sets the number of buffers to fill shared memory. Returns false if two of K and two of V do not
/// fit.
bool derive_stages(ForwardPlan& plan, int shared_bytes) {
  const int max_stages = std::min(kMaxStages, kKeysAhead / plan.block_keys);
  // Two buffers of Q overlap the end of a block with the next one, if enough shared memory is left
  // to hide the loads of K and V.
  for (plan.q_stages = 2; plan.q_stages >= 1; --plan.q_stages) {
    plan.k_stages = plan.v_stages = 0;
    const kernels::ForwardLayout one = layout_of(plan);  // the bytes of one buffer each
    const int free_bytes = shared_bytes - one.bytes;
    plan.v_stages = std::min(free_bytes / (one.k_bytes + one.v_bytes), max_stages);
    plan.k_stages =
        plan.pairs ? plan.v_stages
                   : std::min((free_bytes - plan.v_stages * one.v_bytes) / std::max(one.k_bytes, 1),
                              std::min(plan.v_stages + 1, max_stages));
    plan.shared_bytes = layout_of(plan).bytes;
    if (plan.k_stages + plan.v_stages >= 5) return true;
  }
  plan.q_stages = 1;
  return plan.k_stages >= 2 && plan.v_stages >= 2;
}

/// Whether three warpgroups hold the bias in registers: if it has 16 bits, and no other option of
/// the call needs registers of the consumers or of the producer.
bool takes_bias_in_registers(const Problem& p) {
  const bool bias = p.has(Arg::kBias) && size_of(p.bias.dtype) == 2;
  const bool plain = p.alike() && p.origin == Origin{} && !(left_binds(p) && right_binds(p)) &&
                     p.dropout_p == 0 && !p.expressions.given() && !transforms(p);
  return bias && plain && size_of(p.dtypes.v) == 2;
}

/// Adds the candidates that read a bool mask as bits, or all others.
void add_candidates(const Problem& p, const Card& card, bool bits,
                    std::vector<Fitting<ForwardPlan>>* tiles, std::vector<std::string>* rejected) {
  const bool codes = p.dtypes.q == DType::kE4M3;
  // With expressions only d up to 128 was measured with other tiles.
  const int64_t dim = std::max(p.d, p.dv);
  const bool biased = !bits && (p.has(Arg::kBias) || (p.expressions.given() && dim > 128));
  const int scores = (bits ? Tile::kMasked : 0) | (p.expressions.masks() ? Tile::kMapped : 0) |
                     (biased            ? Tile::kBiased
                      : p.dropout_p > 0 ? Tile::kDropped
                      : transforms(p)   ? Tile::kTransformed
                                        : Tile::kPlain);
  // For d up to 64 tiles of three warpgroups are up to 1.08 times as fast as those of one if all
  // SMs have such a block, but not with a map of tiles.
  const double blocks = static_cast<double>(p.total_q) * static_cast<double>(p.hq) / 192;
  const bool of_three = p.expressions.changes_scores() && !p.expressions.masks() && dim <= 64 &&
                        blocks >= 2 * card.sms && !p.invariant;
  for (const Tile& tile : kTiles) {
    const bool fits = std::max(p.d, p.dv) <= tile.max_dim && p.dv <= tile.max_value_dim;
    const bool in_registers =
        (tile.scores & Tile::kBiasInRegisters) != 0 && takes_bias_in_registers(p);
    if (!fits || (!in_registers && (tile.scores & scores) != scores)) continue;
    if (tile.codes == Tile::kCodes && !codes) continue;
    if (of_three && tile.consumers == 1) continue;
    if (p.cache.paged() && registers_of(tile.consumers).producer < kPageRegisters) continue;
    Fitting<ForwardPlan> t{common(p, bits), 0, {}};
    if (tile.consumers == 1 && t.plan.value_dim == 112) continue;  // its O leaves no registers
    const bool centers = t.plan.centers_v();
    if (centers && tile.block_keys % kernels::k_step(kernels::kE4M3) != 0) continue;
    if (tile.codes != Tile::kAnyElements && (tile.codes == Tile::kCodesInPV) != centers) continue;
    if (codes && t.plan.has_chunk && (tile.consumers == 1 || tile.codes))
      continue;  // these leave none for chunks
    t.plan.consumers = tile.consumers;
    // With a bias in P products that add it take more than they save.
    if (t.plan.bias_in_registers() && !t.plan.bias_in_p()) t.plan.bias_terms = bias_terms(p);
    t.plan.pairs |= t.plan.bias_in_p();
    t.plan.shares_blocks = shares_blocks(t.plan, p);
    t.plan.work.heads = static_cast<int>(p.batch * p.hq) / t.plan.block_heads(p);
    t.plan.block_keys = tile.block_keys;
    t.plan.mean_products = has_mean_products(t.plan, p);
    t.plan.box_keys = p.cache.paged() ? std::gcd(t.plan.page, tile.block_keys) : tile.block_keys;
    t.plan.producer_registers = registers_of(tile.consumers).producer;
    t.plan.consumer_registers = registers_of(tile.consumers).consumer;
    for (t.plan.residents = tile.consumers == 1 ? 2 : 1; t.plan.residents > 0; --t.plan.residents) {
      if (derive_stages(t.plan, shared_bytes_of(t.plan.residents, card))) break;
    }
    if (t.plan.residents == 0) {
      rejected->push_back(
          fmt::format("tile {}: two stages of K and V do not fit {} bytes of shared memory",
                      t.plan.tile().text(), card.shared_bytes));
      continue;
    }
    t.plan.store = store_of(p, t.plan.q_stages > 1 && !centers);
    t.plan.fused_map = t.plan.maps_tiles && fuses_map(p, t.plan.map_tiles());
    t.cycles = schedule_and_predict(t.plan, p, card) + packing_cycles(p, t.plan, card);
    // The bytes read depend on the batch; the tile of an invariant call must not.
    if (!p.invariant) t.cycles = std::max(t.cycles, reading_cycles(p, card));
    if (std::max(p.d, p.dv) <= tile.above_dim && !p.cache.paged() && !biased) {
      t.tuned_only = fmt::format("made for d or dv above {}", tile.above_dim);
    }
    tiles->push_back(std::move(t));
  }
}

}  // namespace

std::vector<Fitting<ForwardPlan>> forward_candidates(const Problem& p, const Card& card,
                                                     std::vector<std::string>* rejected) {
  std::vector<Fitting<ForwardPlan>> tiles;
  add_candidates(p, card, false, &tiles, rejected);
  if (packs_mask(p)) add_candidates(p, card, true, &tiles, rejected);
  return tiles;
}

}  // namespace fulgur::cuda::sm90
