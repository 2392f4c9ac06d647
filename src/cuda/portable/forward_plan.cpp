#include "cuda/portable/forward_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>

#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/portable/forward_cost.h"

namespace fulgur::cuda::portable {
namespace {

using kernels::Work;

/// A tile for above_dim < max(d, dv) <= max_dim. The compiler keeps S, O and P of a warp in
/// registers with all options of `scores`; with more keys or dims it would spill.
struct Tile {
  /// What the kernel computes with scores (scores_of). kCrowded: only the softmax, but other
  /// options need registers; kCrowdedPacked: sequences are packed, with a left bound.
  /// kBiasedCrowded and kAllCrowded: a bias, or a bias and dropout, from compute capability 10.0
  /// on.
  enum Scores {
    kPlain = 1,
    kCrowded = 2,
    kCrowdedPacked = 4,
    kTransformed = 8,
    kDropped = 16,
    kBiased = 32,
    kBiasedDropped = 64,
    kBiasedCrowded = 128,
    kAllCrowded = 256,
  };
  int above_dim, max_dim;
  int strips, warp_strips, block_keys, stages;
  bool q_in_registers;
  int residents;
  int scores;  ///< the Scores that it may compute
  int q_kept = 0;
  bool small = false;  ///< only where no tile before it fits shared memory
};
constexpr int kUntransformed = Tile::kPlain | Tile::kCrowded | Tile::kCrowdedPacked;
constexpr int kUnbiased = kUntransformed | Tile::kTransformed | Tile::kDropped;
constexpr int kNotAll = kUnbiased | Tile::kBiased | Tile::kBiasedDropped | Tile::kBiasedCrowded;
constexpr int kAny = kNotAll | Tile::kAllCrowded;
constexpr int kDropping = Tile::kDropped | Tile::kBiasedDropped | Tile::kAllCrowded;
constexpr Tile kTiles[] = {
    {0, 64, 2, 2, 64, 2, true, 2, kUnbiased},
    {0, 64, 1, 1, 64, 2, true, 3, kUnbiased | Tile::kBiased},
    {0, 64, 1, 1, 64, 2, true, 2, Tile::kBiasedDropped | Tile::kBiasedCrowded | Tile::kAllCrowded},
    {64, 128, 2, 2, 64, 2, false, 2, Tile::kPlain},
    {64, 128, 2, 2, 48, 2, false, 2, Tile::kPlain},
    {64, 128, 2, 2, 32, 2, false, 2, kUnbiased & ~Tile::kPlain},
    {64, 128, 2, 1, 64, 2, true, 1, kNotAll},
    {64, 128, 1, 1, 64, 1, false, 2, kNotAll},
    {64, 128, 1, 1, 32, 1, false, 2, Tile::kAllCrowded},
    {128, 192, 2, 1, 64, 1, false, 1, kAny},
    {128, 192, 1, 1, 64, 1, false, 2, kAny},
    {128, 192, 1, 1, 32, 1, false, 1, kAny, 0, true},
    {192, 256, 2, 1, 64, 1, false, 1, Tile::kPlain | Tile::kCrowded},
    {192, 256, 1, 1, 64, 1, false, 2, Tile::kPlain, 6},
    {192, 256, 1, 1, 64, 1, false, 2, kUntransformed & ~Tile::kPlain},
    {192, 256, 1, 1, 32, 1, false, 2, kAny},
    {192, 256, 1, 1, 16, 1, false, 1, kDropping, 0, true},
};

// Those of f32, whose elements take twice the shared memory, and P twice the registers.
constexpr Tile kTilesOfF32[] = {
    {0, 64, 2, 1, 32, 1, false, 1, kAny},
    {0, 64, 1, 1, 32, 1, false, 3, kAny},
    {64, 128, 2, 1, 32, 1, false, 1, kAny},
    {64, 128, 1, 1, 32, 1, false, 2, kAny},
    {64, 128, 1, 1, 16, 1, false, 1, kDropping, 0, true},
    {128, 192, 2, 1, 32, 1, false, 1, kAny},
    {128, 192, 1, 1, 32, 1, false, 2, kAny},
    {128, 192, 1, 1, 16, 1, false, 1, kAny, 0, true},
    {192, 256, 2, 1, 32, 1, false, 1, kAny},
    {192, 256, 1, 1, 32, 1, false, 1, kAny},
    {192, 256, 1, 1, 16, 1, false, 2, kAny},
};

std::span<const Tile> tiles_of(const Problem& p) {
  if (p.dtypes.q == DType::kF32) return kTilesOfF32;
  return kTiles;
}

// The mma.sync rate from which on warps of 16 rows are limited by loads from shared memory.
constexpr int kFastRate = 2048;
constexpr int kAnyBlockKeys =
    64;  // for shapes whose alignment is checked, which does not depend on it
constexpr int kMaxSectionBlocks = 4;  // of the last section, per SM

/// The decisions that are the same for every tile.
ForwardPlan common(const Problem& p) {
  ForwardPlan plan;
  static_cast<AnyForwardKey&>(plan) = any_forward_key(p);
  plan.maps_tiles = plan.mask_mod;
  plan.dropout = p.dropout_p > 0;
  plan.whole_columns = plan.head_dim == p.d && plan.value_dim == p.dv;
  plan.work.heads = static_cast<int>(p.batch * p.hq);
  const ForwardShapes shapes = forward_shapes(p, kAnyBlockKeys);
  plan.copies_q = not_addressable(shapes.q);
  plan.copies_k = not_addressable(shapes.k);
  plan.copies_v = not_addressable(shapes.v);
  const bool rows =
      p.dv * size_of(p.dtypes.out) % kCopyAlignment == 0 && not_addressable(shapes.o).empty();
  plan.store = rows ? ForwardPlan::Store::kRows : ForwardPlan::Store::kElements;
  return plan;
}

/// The Tile::Scores of a problem. Registers that the widest plain tile would need are used by: a
/// left bound, lengths of q, a tree mask and, from compute capability 10.0 on, any code of ptxas.
int scores_of(const Problem& p, const Card& card) {
  const AnyForwardKey key = any_forward_key(p);
  const bool crowds = card.target.capability >= 100, dropped = p.dropout_p > 0;
  if (p.has(Arg::kBias) || p.expressions.given()) {
    if (dropped) return crowds ? Tile::kAllCrowded : Tile::kBiasedDropped;
    return crowds ? Tile::kBiasedCrowded : Tile::kBiased;
  }
  if (dropped) return Tile::kDropped;
  if (transforms(p)) return Tile::kTransformed;
  if (key.has_left && key.packed) return Tile::kCrowdedPacked;
  return crowds || key.has_left || key.seqused_q || key.tree ? Tile::kCrowded : Tile::kPlain;
}

/// Divides the heads into sections, in which row blocks are the outer loop. Most sections are one
/// kv head, so that K and V are loaded to L2 once. The last section has so many heads that the
/// blocks at its end, which are short under a band, fill all SMs.
void divide_heads(ForwardPlan& plan, const Problem& p, int sms) {
  Work& work = plan.work;
  work.row_blocks = kernels::blocks_of(static_cast<int>(p.sq), plan.strips);
  const bool band = plan.has_left || plan.has_right;
  const int blocks = (band ? kMaxSectionBlocks : 1) * sms * plan.residents;
  const int64_t heads = ceil_div(blocks, std::max(work.row_blocks, 1));
  const int64_t last = ceil_div(heads, p.group()) * p.group();
  work.section_heads = static_cast<int>(p.group());
  work.bulk_heads = last > work.heads ? 0 : static_cast<int>(work.heads - last);
  work.splits = 1;
  work.q_tiles = work.first_split = work.end_split = kernels::blocks_of(work);
}

/// The predicted cycles by which tiles are compared.
double predict(ForwardPlan& plan, const Problem& p, const Card& card) {
  divide_heads(plan, p, card.sms);
  if (!p.invariant) return predicted_cycles(plan, p, card);
  const Problem one = long_sequences(p, 1);
  ForwardPlan other = plan;
  other.work.heads = card.sms;
  divide_heads(other, one, card.sms);
  return predicted_cycles(other, one, card);
}

}  // namespace

ForwardWorkspace workspace_of(const Problem& p, const ForwardPlan& plan) {
  const ForwardShapes shapes = forward_shapes(p, kAnyBlockKeys);
  if (shapes.o.empty()) return {};
  ForwardWorkspace at;
  Arena arena;
  at.copies = {arena.take(copied_bytes(shapes.q, plan.copies_q)),
               arena.take(copied_bytes(shapes.k, plan.copies_k)),
               arena.take(copied_bytes(shapes.v, plan.copies_v))};
  at.map = arena.take(TileMap::bytes(p, plan, plan.map_tiles()));
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

std::string forward_rejects(const Problem& p) {
  if (std::string why = dtypes_rejected(p.dtypes, /*takes_f32=*/true); !why.empty()) return why;
  if (std::string why = sizes_rejected(p); !why.empty()) return why;
  if (p.cache.paged() && p.cache.ids * p.cache.page > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 keys in lists of pages, got {} pages of {}",
                       p.cache.ids, p.cache.page);
  }
  const ForwardShapes shapes = forward_shapes(p, kAnyBlockKeys);
  for (const auto& [name, shape] : {std::pair{"q", &shapes.q}, std::pair{"k", &shapes.k},
                                    std::pair{"v", &shapes.v}, std::pair{"out", &shapes.o}}) {
    if (const std::string why = rows_unsupported(*shape); !why.empty()) {
      return fmt::format("{} {}", name, why);
    }
  }
  // Products of doubles cannot overflow: without rows of q it may have any number of heads.
  const int64_t blocks = std::max<int64_t>(kernels::strips_of(static_cast<int>(p.sq)), 1);
  const double heads = static_cast<double>(p.batch) * static_cast<double>(p.hq);
  if (heads * static_cast<double>(blocks) > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 row blocks, got {:.0f} heads of {}", heads, blocks);
  }
  return {};
}

std::vector<Fitting<ForwardPlan>> forward_candidates(const Problem& p, const Card& card,
                                                     std::vector<std::string>* rejected) {
  std::vector<Fitting<ForwardPlan>> tiles;
  const int scores = scores_of(p, card);
  const int reserved = features_of(card.target).reserved_bytes;
  bool wide = false;
  for (const Tile& tile : tiles_of(p)) {
    const int64_t dim = std::max<int64_t>(std::max(p.d, p.dv), 1);
    if (dim <= tile.above_dim || dim > tile.max_dim || (tile.scores & scores) == 0) continue;
    if (tile.small && !tiles.empty()) continue;
    Fitting<ForwardPlan> t{common(p), 0, {}};
    t.plan.strips = tile.strips;
    t.plan.warp_strips = tile.warp_strips;
    t.plan.block_keys = tile.block_keys;
    t.plan.stages = tile.stages;
    t.plan.q_in_registers = tile.q_in_registers;
    t.plan.q_kept = p.cache.paged() ? 0 : tile.q_kept;  // addresses of pages need these registers
    t.plan.shared_bytes = t.plan.layout().bytes;
    if (t.plan.shared_bytes > card.shared_bytes) {
      rejected->push_back(fmt::format("tile {}: its {} bytes of shared memory do not fit {}",
                                      t.plan.tile().text(), t.plan.shared_bytes,
                                      card.shared_bytes));
      continue;
    }
    const int fit = card.sm_shared_bytes / (t.plan.shared_bytes + reserved);
    if (tile.warp_strips > 1) {  // only the wide tile with the largest Bc is a candidate
      if (wide || fit < tile.residents) {
        rejected->push_back(fmt::format(
            "tile {}: {}", t.plan.tile().text(),
            wide ? "another wide one has more keys" : "two of its CTAs do not fit an SM"));
        continue;
      }
      wide = true;
    }
    t.plan.residents = std::clamp(fit, 1, tile.residents);
    t.cycles = predict(t.plan, p, card);
    if (tile.warp_strips > 1 && card.mma_rate < kFastRate) {
      t.tuned_only = fmt::format("made for tensor cores of {} FLOP a clock and SM", kFastRate);
    }
    tiles.push_back(std::move(t));
  }
  return tiles;
}

Explanation describe(const ForwardPlan& plan) {
  const Work& work = plan.work;
  Explanation e;
  // Br of the explanation is a strip: each is computed alone, and blocks begin at any strip.
  e.Br = kernels::kStripRows;
  e.Bc = plan.block_keys;
  const auto say = [&](std::string sentence) { e.decisions.push_back(std::move(sentence)); };
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("warps", plan.threads() / 32);
  e.details.add("stages", plan.stages);
  e.details.add("shared_bytes", plan.shared_bytes);
  e.details.add("ctas", work.q_tiles);
  e.details.add("q_blocks", kernels::blocks_of(work));
  say(fmt::format("mma.sync: {} warps of {} rows (Br {}), Bc {} keys, d {} and dv {} as computed",
                  plan.threads() / 32, 16 * plan.warp_strips, plan.block_rows(), plan.block_keys,
                  plan.head_dim, plan.value_dim));
  say(fmt::format("{} of K and V, Q in {}: {} bytes of shared memory, {} a SM",
                  plan.stages == 1 ? "1 buffer" : fmt::format("{} buffers", plan.stages),
                  plan.q_in_registers ? "registers" : "shared memory", plan.shared_bytes,
                  plan.residents == 1 ? "1 CTA" : fmt::format("{} CTAs", plan.residents)));
  say(fmt::format(
      "a CTA for each of {} blocks of rows{}, in sections of {} heads and a last one "
      "of {}",
      kernels::blocks_of(work), plan.has_left || plan.has_right ? ", longest first" : "",
      work.section_heads, work.heads - work.bulk_heads));
  describe_copies({{"q", plan.copies_q}, {"k", plan.copies_k}, {"v", plan.copies_v}}, e);
  describe_map(plan, e);
  if (plan.page > 0) {
    say(fmt::format("keys lie in pages of {}, which {} names", plan.page,
                    plan.page_lists ? "page_indptr" : "page_table"));
  }
  if (plan.store == ForwardPlan::Store::kElements) {
    e.details.add("stores_elements", true);
    say("O is stored by elements: its rows are no multiples of 16 bytes");
  }
  return e;
}

}  // namespace fulgur::cuda::portable
