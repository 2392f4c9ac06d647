#include "cuda/sm90/forward_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_map.h"
#include "cuda/device/launch_memory.h"
#include "cuda/maps/mask_bits.h"
#include "cuda/passes/forward.h"
#include "cuda/sm90/forward_cost.h"
#include "kernels/sm90/forward/layout.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr int kMaxSplits = 8;  // more splits have not been measured
constexpr int kMaxCutPagesDim = 192, kMaxChunkPagesDim = 192;
constexpr double kWorthCutting =
    0.85;  // maximum of the predicted time ratio for which unequal blocks are cut
constexpr int kLongKeys = 2048;
constexpr int kSharingRows = 768;  // that read the same K and V; with fewer, calls are memory-bound
constexpr int kMaxStages = 6, kKeysAhead = 512;  // more buffers hide no more latency

using kernels::Work;

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

constexpr int kBoxRows = 8;  // the period of the swizzle: boxes of a tile begin at multiples of it
constexpr int kAnyBlockKeys = 64;  // whether a tensor needs a copy does not depend on it

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
    const int free_bytes = shared_bytes - kernels::kControlBytes - plan.q_stages * one.q_bytes;
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
/// last. Only the kernels with a bias in P are told the number of blocks. Returns the predicted
/// cycles.
double balance_last_round(ForwardPlan& plan, const Problem& p, const BlockCost& cost, int sms,
                          double best) {
  if (!plan.bias_in_p() || is_banded(plan) || !all_heads_fit(plan, p, sms)) return best;
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

/// The predicted cycles by which tiles are compared. Schedules the plan.
double predict(ForwardPlan& plan, const Problem& p, const Card& card) {
  const double cycles = schedule(plan, p, card);
  if (!p.invariant) return cycles;
  const Problem one = long_sequences(p, 1);
  ForwardPlan other = plan;
  other.work.heads = card.sms;
  return schedule(other, one, card);
}

/// Whether three warpgroups hold the bias in registers: if it has 16 bits, and no other option of
/// the call needs registers of the consumers or of the producer.
bool takes_bias_in_registers(const Problem& p) {
  const bool bias = p.has(Arg::kBias) && size_of(p.bias.dtype) == 2;
  const bool plain = p.alike() && p.origin == Origin{} && !(left_binds(p) && right_binds(p)) &&
                     p.dropout_p == 0 && !p.expressions.given() && !transforms(p);
  return bias && plain && size_of(p.dtypes.v) == 2;
}

/// Why it does not compute keys in such pages; empty if it does.
std::string pages_rejected(const Problem& p) {
  // The bits of a decoding step must not depend on its batch, so a decode kernel computes all
  // invariant calls with pages.
  if (p.invariant) return "computes pages without `invariant`";
  if (p.cache.page % kBoxRows != 0) {
    return fmt::format("computes pages of multiples of {} keys, got {}", kBoxRows, p.cache.page);
  }
  if (p.cache.ids * p.cache.page > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 keys in lists of pages, got {} pages of {}",
                       p.cache.ids, p.cache.page);
  }
  // With page ids the widest heads have no registers left for chunks.
  if (chunk_binds(p) && std::max(p.d, p.dv) > kMaxChunkPagesDim) {
    return fmt::format("computes chunks over pages with d and dv up to {}, got {} and {}",
                       kMaxChunkPagesDim, p.d, p.dv);
  }
  const ForwardShapes maps = forward_shapes(p, kAnyBlockKeys);
  for (const auto& [name, shape] : {std::pair{"k", &maps.k}, std::pair{"v", &maps.v}}) {
    if (const std::string why = not_addressable(*shape); !why.empty()) {
      return fmt::format("computes pages that TMA can address: of {}, {}", name, why);
    }
  }
  return {};
}

}  // namespace

ForwardWorkspace workspace_of(const Problem& p, const ForwardPlan& plan) {
  const ForwardShapes maps = forward_shapes(p, plan.box_keys);
  if (maps.o.empty()) return {};
  ForwardWorkspace at;
  at.zeroed = LaunchMemory::kZeroed;
  Arena arena(at.zeroed);
  at.partial = arena.take(plan.partial_floats() * int64_t{sizeof(float)});
  at.copies = {arena.take(copied_bytes(maps.q, plan.copies_q, plan.dtypes.q)),
               arena.take(copied_bytes(maps.k, plan.copies_k, plan.dtypes.k)),
               arena.take(copied_bytes(maps.v, plan.copies_v, plan.dtypes.v)),
               arena.take(copied_bytes(maps.bias, plan.copies_bias))};
  if (plan.centers_v()) {
    const CenteredValues v = centered_values(p, plan);
    const int64_t tiles = p.packed_k ? p.hk * v.head_tiles : p.batch * v.batch_tiles;
    const int64_t rows = int64_t{plan.grid} * plan.block_rows();
    at.image = arena.take(tiles * plan.block_keys * plan.value_dim);
    at.means = arena.take(p.batch * p.hk * v.segments * plan.value_dim * int64_t{sizeof(float)});
    if (plan.mean_products) {
      at.mean_steps = arena.take(p.batch * p.hk * kernels::mean_steps_of_segments(v.segments) *
                                 int64_t{kernels::mean_step_bytes(plan.value_dim)});
    }
    const int left = v.segments > 1 ? v.segments : 0;
    at.sums = arena.take(rows * left * int64_t{sizeof(RowSum)});
  }
  at.map = arena.take(TileMap::bytes(p, plan, plan.map_tiles()));
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

CenteredValues centered_values(const Problem& p, const ForwardPlan& plan) {
  CenteredValues v{};
  v.head_tiles = p.packed_k ? static_cast<int>(p.total_k / plan.block_keys + p.batch)
                            : ceil_div(p.sk, plan.block_keys);
  v.batch_tiles = p.packed_k ? 0 : static_cast<int>(p.hk * v.head_tiles);
  v.segments = std::max(ceil_div(p.sk, kernels::segment_keys(plan.block_keys)), 1);
  return v;
}

std::string forward_rejects(const Problem& p) {
  const bool codes = is_low_bit(p.dtypes.q);
  const std::string dtypes = codes ? products_of_codes_rejected(p) : dtypes_rejected(p.dtypes);
  if (!dtypes.empty()) return dtypes;
  if (codes && p.cache.paged()) return "computes e4m3 without pages";
  if (p.has(Arg::kTreeMask)) return "computes without tree masks";
  if (std::string why = sizes_rejected(p); !why.empty()) return why;
  if (rows_decide(p) && deciding_queries(p) <= few_queries(p)) {
    return fmt::format(
        "computes `invariant` calls from {} rows of a kv head on, got {} queries of {} heads",
        kFewRows + 1, deciding_queries(p), p.group());
  }
  if (p.cache.paged()) {
    if (const std::string why = pages_rejected(p); !why.empty()) return why;
  }
  if (p.has(Arg::kCacheBatchIdx))
    return "computes sequence b from row b of k: not with a cache_batch_idx";
  if (p.has(Arg::kLeftpadK)) return "computes keys from the first on: not with a leftpad_k";
  if (p.packed != p.packed_k && !p.cache.paged()) {
    return "computes packed queries with packed keys or pages alone";
  }
  const ForwardShapes maps = forward_shapes(p, kAnyBlockKeys);
  for (const auto& [name, shape] : {std::pair{"q", &maps.q}, std::pair{"k", &maps.k},
                                    std::pair{"v", &maps.v}, std::pair{"out", &maps.o}}) {
    if (const std::string why = rows_unsupported(*shape); !why.empty()) {
      return fmt::format("{} {}", name, why);
    }
  }
  // Blocks of the minimum of rows bound the number of work tiles, which the kernel counts with
  // ints.
  const int64_t blocks = std::max<int64_t>((p.sq + 127) / 128, 1);
  // Products of doubles cannot overflow: without rows of q it may have any number of heads.
  const double heads = static_cast<double>(p.batch) * static_cast<double>(p.hq);
  if (heads * static_cast<double>(blocks) * kMaxSplits > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^28 row blocks, got {:.0f} heads of {}", heads, blocks);
  }
  return {};
}

namespace {

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
    t.cycles = predict(t.plan, p, card) + packing_cycles(p, t.plan, card);
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

Explanation describe(const ForwardPlan& plan) {
  const Work& work = plan.work;
  Explanation e;
  // Br of the explanation is a strip: each is computed by one warpgroup, and blocks begin at any
  // strip.
  e.Br = plan.block_rows() / plan.consumers;
  e.Bc = plan.block_keys;
  const auto say = [&](std::string sentence) { e.decisions.push_back(std::move(sentence)); };
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("warpgroups", plan.consumers);
  e.details.add("q_stages", plan.q_stages);
  e.details.add("k_stages", plan.k_stages);
  e.details.add("v_stages", plan.v_stages);
  e.details.add("shared_bytes", plan.shared_bytes);
  e.details.add("ctas", plan.grid);
  e.details.add("q_blocks", kernels::blocks_of(work));
  if (plan.shares_blocks) e.details.add("shares_blocks", true);
  e.details.add("splits", work.splits);
  e.details.add("split_q_blocks", kernels::split_blocks(work));
  say(fmt::format(
      "Hopper: {} warpgroups of 64 rows (Br {}), Bc {} keys, d {} and dv {} as computed",
      plan.consumers, plan.block_rows(), plan.block_keys, plan.head_dim, plan.value_dim));
  say(fmt::format("{} buffers of Q, {} of K, {} of V: {} bytes of shared memory", plan.q_stages,
                  plan.k_stages, plan.v_stages, plan.shared_bytes));
  say(fmt::format("{} CTAs take {} blocks of rows{}{}, in sections of {} {} and a last one of {}",
                  plan.grid, kernels::blocks_of(work),
                  plan.shares_blocks ? ", which the heads of a group share" : "",
                  plan.has_left || plan.has_right ? ", longest first" : "", work.section_heads,
                  plan.shares_blocks ? "kv heads" : "heads", work.heads - work.bulk_heads));
  if (plan.split_tail) {
    say(fmt::format("{} blocks, {}, are cut into {} splits of their keys",
                    kernels::split_blocks(work), work.first_split > 0 ? "the last" : "the first",
                    work.splits));
  }
  describe_copies({{"q", plan.copies_q},
                   {"k", plan.copies_k},
                   {"v", plan.copies_v},
                   {"bias", plan.copies_bias}},
                  e);
  describe_map(plan, e);
  if (plan.centers_v()) {
    e.details.add("centers_v", true);
    say("P V is multiplied in e4m3: V is centred and laid out for it first");
  }
  if (plan.page > 0) {
    e.details.add("box_keys", plan.box_keys);
    say(fmt::format("keys lie in pages of {}, which {} names, and come in boxes of {}", plan.page,
                    plan.page_lists ? "page_indptr" : "page_table", plan.box_keys));
  }
  if (plan.store == ForwardPlan::Store::kElements) {
    e.details.add("stores_elements", true);
    say("O is stored by elements: its rows are no multiples of 16 bytes");
  }
  return e;
}

}  // namespace fulgur::cuda::sm90
