#include "cuda/sm90/decode_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "call/append_then_attend.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/host_metadata.h"
#include "cuda/device/launch_memory.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/tensor_map.h"
#include "kernels/host_device/stream_k.h"
#include "kernels/sm90/decode/layout.h"

namespace fulgur::cuda {
namespace {

constexpr int kSwizzledRows = 8;
constexpr int kMaxBoxKeys = 16;   // lest the memory close the rows before their next panel comes
constexpr int64_t kWholeRow = 8;  // elements that a lane copies at once
constexpr int kMaxWarps = 8;
constexpr int64_t kLongSlice = 32;       // chunks of keys, of an SM
constexpr int kReservedBytes = 1024;     // of shared memory, for each CTA but the first
constexpr int64_t kWarpPathRows = 16;    // of a kv head: a warp's
constexpr int64_t kLongDynamic = 49152;  // keys of a CTA, by the dynamic scheduler
constexpr int64_t kLanes = 32;
/// Q blocks of more rows are cut into as many splits as there are CTAs where each would have
/// parts in so many of these: one of them puts the parts together slower than another kernel does.
constexpr int64_t kSomeSplits = 2;
/// Those of warp-path groups, where each has so many parts, which hardly differ in length.
constexpr int64_t kEvenSplits = 8;
/// Beyond so many rows of a kv head other kernels are faster, where they can have them.
constexpr int64_t kMaxRowsForModel = 128;

/// Rows that a group of lanes of a CTA may write one after the other before it attends:
/// each waits for memory about a third of a microsecond, and a launch takes 2.5 to 4.
constexpr int64_t kMaxAppendRounds = 8;

// Measured on an H200.
constexpr double kDecodeShare = 0.917;    // of what the memory gives
constexpr double kStartCycles = 2000;     // lengths, first loads, combines
constexpr double kManyRowsCycles = 6000;  // more, where a q block has more than 64 rows
constexpr double kProductFlops = 2000;    // a cycle, where products bind

/// Of the longest sequence that it computes.
int64_t rows_of_kv_head(const Problem& p) {
  return (takes_both(p) ? few_queries(p) : p.sq) * p.group();
}

kernels::DecodeTile tile_of(const HopperDecodeKey& key) {
  return {key.head_dim,  key.value_dim,  key.warps_per_group, key.warp_groups,
          key.tile_rows, key.block_keys, key.k_stages,        key.v_stages};
}

int bytes_of(const HopperDecodeKey& key) { return kernels::decode_layout(tile_of(key)).bytes; }

/// Why lanes cannot copy 16 bytes of each row at once; empty when they can.
std::string not_whole(const Layout& strides) {
  for (const auto& [name, stride] :
       {std::pair{"batch", strides.batch}, std::pair{"seqlen", strides.row},
        std::pair{"heads", strides.head}}) {
    if (stride % kWholeRow != 0) {
      return fmt::format("has a stride of {} elements between {}, want a multiple of {}", stride,
                         name, kWholeRow);
    }
  }
  return strides.aligned ? "" : "has data at no multiple of 16 bytes";
}

/// The keys of a tile that TMA brings at once, of one page; 0 where it cannot.
int box_keys_of(const Problem& p, int block_keys) {
  const int page = static_cast<int>(p.cache.page);
  const int box = std::gcd(std::gcd(page, block_keys), kMaxBoxKeys);
  const ForwardMaps maps = forward_maps(p, box);
  for (const TensorMapShape* shape : {&maps.k, &maps.v}) {
    if (!map_unsupported(*shape).empty() || !not_addressable(*shape).empty()) return 0;
  }
  // Boxes begin where the swizzle does.
  return page > 0 && (p.has(Arg::kLeftpadK) || box % kSwizzledRows != 0) ? 0 : box;
}

/// Whether each q block is computed by many CTAs, `parts` or more.
bool has_few_q_blocks(const Problem& p, int blocks, int64_t splits = kSomeSplits) {
  return p.batch <= kernels::kFillSequences && splits * p.batch * p.hk <= blocks;
}

/// Whether up to 16 rows of a kv head are those of warpgroups, too, as splits of few q blocks are
/// theirs: always beyond half a warp's rows. Warp-path groups have such splits of fewer q blocks,
/// and with fewer rows parts that cost them little where sequences are many or slices long.
bool splits_pay(const Problem& p, int blocks, int64_t rows, bool long_shares) {
  if (!has_few_q_blocks(p, blocks) || p.sk <= kernels::kChunkKeys) return false;
  if (rows > kWarpPathRows / 2) return true;
  const bool some = kEvenSplits * p.batch * p.hk > blocks && p.batch <= kLanes;
  return some && (rows > kWarpPathRows / 4 || !long_shares);
}

/// Whether q blocks, taken whole, leave few of the CTAs idle: round_robin_is_even says how few.
bool has_enough_q_blocks(const Problem& p, int blocks) {
  return 17 * p.batch * p.hk >= 16 * blocks;
}

/// Warp groups, their keys and their buffers, for as many rows as a kv head has and as shared
/// memory holds.
void set_tile(HopperDecodePlan& plan, const Problem& p, const Card& card) {
  // How many rows there are depends on the batch: invariant calls have a tile for many and few.
  const int64_t rows = p.invariant ? kFewRows : rows_of_kv_head(p);
  const int dim = std::max(plan.head_dim, plan.value_dim);
  const int64_t chunks = p.batch * p.hk * ceil_div(p.sk, kernels::kChunkKeys);
  const bool long_shares = chunks >= kLongSlice * card.sms;
  // Two warps of lanes that copy begin sooner than warpgroups, which read memory faster, and whose
  // splits fill the card.
  const bool wide_pays = long_shares || has_few_q_blocks(p, card.sms);
  const bool boxes = box_keys_of(p, kernels::kChunkKeys) > 0;
  const bool two_warps = rows <= 2 * kWarpPathRows && dim <= 128 && !(wide_pays && boxes);
  const bool narrow =
      rows <= kWarpPathRows && !(boxes && splits_pay(p, card.sms, rows, long_shares));
  plan.warps_per_group = narrow ? 1 : two_warps ? 2 : rows <= 64 ? 4 : kMaxWarps;
  plan.tile_rows = plan.warps_per_group > 1 ? plan.block_rows()
                   : rows <= 4              ? 4
                   : rows <= 8              ? 8
                                            : 16;
  // Two CTAs hide each other's page ids, but they double the parts that q blocks have.
  const bool a_line_each = has_enough_q_blocks(p, card.sms) && p.batch * p.hk <= card.sms;
  const bool two = plan.page > 0 && plan.warps_per_group == 1 && dim <= 128 && long_shares &&
                   !a_line_each && !has_few_q_blocks(p, card.sms, kEvenSplits);
  plan.residents = two ? 2 : 1;
  plan.warp_groups = kMaxWarps / plan.warps_per_group / plan.residents;
  const bool wide = plan.warps_per_group >= kernels::kWarpgroupWarps;
  plan.block_keys = std::min((dim <= 64 ? 32 : 16) * plan.warps_per_group, dim <= 128 ? 64 : 32);
  if (wide) {
    // Loads keep up with the products of larger tiles, but for lanes that look up pages; of these
    // tiles there are six buffers or more, lest V wait for a place. A word of a tree mask has bits
    // for 64 keys.
    const int large = dim <= 128 ? 128 : dim <= 192 ? 64 : 48;
    const bool by_boxes = box_keys_of(p, large) > 0;
    const bool keeps_up = by_boxes || (dim <= 128 && plan.page == 0);
    if (plan.warps_per_group == kMaxWarps && !plan.tree && keeps_up) plan.block_keys = large;
    // With the widest heads what scores need besides has no registers where lanes copy; invariant
    // calls have one tile wherever keys lie.
    const bool more_scores = plan.transforms_scores || plan.has_left;
    const bool no_registers = more_scores && (p.invariant || !by_boxes);
    if (dim > 128 && (plan.tree || no_registers)) plan.block_keys = 16;
  }
  const int most = wide ? 10 : 6, step = wide ? 1 : 2;  // buffers of K and V
  const auto set_buffers = [&](int count) {
    plan.k_stages = (count + 1) / 2;
    plan.v_stages = count / 2;
    return count;
  };
  const int room = card.shared_bytes / plan.residents - kReservedBytes * (plan.residents - 1);
  int buffers = set_buffers(most);
  while (bytes_of(plan) > room) {
    if (buffers == 4) plan.warp_groups /= 2;
    buffers = set_buffers(buffers == 4 ? most : buffers - step);
  }
  plan.shared_bytes = bytes_of(plan);
  if (wide) plan.box_keys = box_keys_of(p, plan.block_keys);
}

/// Of a key of a kv head: to read it, and to multiply with it.
struct KeyCycles {
  double reading, products;
};

KeyCycles key_cycles(const HopperDecodePlan& plan, const Problem& p) {
  const int64_t rows = p.of_groups ? ceil_div(rows_of_kv_head(p), p.batch) : rows_of_kv_head(p);
  const double blocks = ceil_div(rows, plan.block_rows());
  const double dims = plan.head_dim + plan.value_dim;
  const double bytes = kDecodeShare * plan.card.bytes_per_cycle / plan.card.sms;  // of an SM
  return {2 * dims / bytes, blocks * 2 * dims * plan.block_rows() / kProductFlops};
}

/// Of fewer parts a warp of the kernel that combines takes more columns: a warp costs more than
/// their loads.
int64_t many_splits(const HopperDecodePlan& plan) { return plan.warps_per_group + 1; }

/// For how many splits there is room in the workspace.
int64_t room_for_splits(const Problem& p, const HopperDecodePlan& plan) {
  if (plan.pieces == kernels::kSplitToFill) return plan.grid;
  return (p.packed_k ? p.total_k / kernels::kPackedSplitKeys : p.batch * plan.max_splits) * p.hk;
}

/// How q blocks are cut.
int invariant_splits(const Problem& p, const HopperDecodePlan& plan) {
  if (p.invariant) return kernels::kInvariantSplits;
  const bool wide = plan.warps_per_group >= kernels::kWarpgroupWarps;
  const int64_t lines = p.batch * p.hk;
  // Two q blocks of warp-path groups have slices, which measure 11.1 us where splits of them
  // take 14.2.
  const bool few = has_few_q_blocks(p, plan.grid, wide ? kSomeSplits : kEvenSplits) &&
                   (wide || lines == 1 || kernels::kMaxSplits * lines >= plan.grid);
  const bool fills =
      few && rows_of_kv_head(p) <= plan.block_rows() && p.sk > kernels::chunk_keys(plan.block_keys);
  return fills ? kernels::kSplitToFill : kernels::kSplitBySlices;
}

/// Whether CTAs may take q blocks one after the other, instead of slices that cut them:
/// each sequence has one q block a kv head, and there are enough for all CTAs.
bool has_round_robin(const Problem& p, const HopperDecodePlan& plan) {
  // Warp-path groups have no registers for it with all that a tree mask takes.
  if (plan.tree && plan.warps_per_group < kernels::kWarpgroupWarps) return false;
  return plan.pieces == kernels::kSplitBySlices && !p.of_groups &&
         rows_of_kv_head(p) <= plan.block_rows() && has_enough_q_blocks(p, plan.grid);
}

/// Whether q blocks go by the dynamic scheduler: of warpgroups where some CTA has two, of narrow
/// ones where what a slice of so many keys takes longer on one SM than on another is more than
/// turns cost.
bool is_dynamic(const Problem& p, const HopperDecodePlan& plan) {
  if (!plan.round_robin || p.batch > kernels::kDynamicSequences) return false;
  const int64_t lines = p.batch * p.hk;
  if (plan.warps_per_group >= kernels::kWarpgroupWarps) return lines > plan.grid;
  return lines * p.sk >= kLongDynamic * plan.grid;
}

/// Of `q blocks`, in words.
std::string how_q_blocks_are_split(const HopperDecodePlan& plan, int64_t lines) {
  if (plan.pieces == kernels::kSplitToFill) {
    return fmt::format("cut so that each CTA has about one piece, which {} merges",
                       plan.combines_later() ? "another kernel" : "the last one at a line");
  }
  if (plan.max_splits > 1) {
    return fmt::format(
        "cut where their own keys say (`invariant`), into up to {} pieces, which another kernel "
        "merges",
        plan.max_splits);
  }
  if (plan.pieces == kernels::kInvariantSplits) return "of which none is cut (`invariant`)";
  if (plan.turns) {
    return "the longest first, each by the one that comes to it first; cut where they are longer "
           "than what each has in all";
  }
  return fmt::format(
      "in up to {} parts, which the last one at a line merges{}", lines + plan.grid - 1,
      plan.round_robin ? "; or whole lines, where these lengths make that as even" : "");
}

const char* schedule_of(const HopperDecodePlan& plan) {
  if (plan.pieces == kernels::kSplitToFill) return "split_per_cta";
  if (plan.pieces == kernels::kInvariantSplits) return "invariant_splits";
  return plan.turns ? "dynamic" : "stream_k";
}

double predicted_cycles(const HopperDecodePlan& plan, const Problem& p, int sms) {
  const KeyCycles key = key_cycles(plan, p);
  const double keys = static_cast<double>(p.batch * p.hk) * static_cast<double>(p.sk) / sms;
  const double start = kStartCycles + (plan.block_rows() > kFewRows ? kManyRowsCycles : 0);
  return start + keys * std::max(key.reading, key.products);
}

}  // namespace

int HopperDecodePlan::threads() const { return 32 * kernels::decode_warps(tile_of(*this)); }

int HopperDecodePlan::split_floats() const {
  return split_rows * kernels::partial_row_floats(value_dim);
}

bool HopperDecodePlan::combines_later() const {
  return pieces == kernels::kInvariantSplits ||
         (pieces == kernels::kSplitToFill && warps_per_group >= kernels::kWarpgroupWarps);
}

int HopperDecodePlan::combine_units() const {
  return pieces == kernels::kSplitToFill ? warps_per_group * ceil_div(value_dim / 8, combine_eights)
                                         : split_rows;
}

HopperDecodeWorkspace workspace_of(const Problem& p, const HopperDecodePlan& plan) {
  if (p.total_q == 0) return {};
  int64_t floats = 0;  // that parts leave
  if (plan.pieces == kernels::kSplitBySlices)
    floats = int64_t{2} * plan.grid * plan.tile_rows * kernels::partial_row_floats(plan.value_dim);
  else if (plan.max_splits > 1)
    floats = room_for_splits(p, plan) * plan.split_floats();
  const ForwardMaps maps = forward_maps(p, plan.block_keys);
  HopperDecodeWorkspace at;
  Arena arena(LaunchMemory::kZeroed);
  const auto copy = [&](const TensorMapShape& shape, const std::string& why) {
    return arena.take(why.empty() ? 0 : copied_bytes(shape));
  };
  at.copies = {copy(maps.k, plan.copies_k), copy(maps.v, plan.copies_v)};
  at.turned = arena.take(rotated_bytes(p));
  at.partial = arena.take(floats * int64_t{sizeof(float)});
  at.numbers = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

std::string decode_rejects(const Problem& p) {
  const std::string why = hopper_decode_rejects_few(p);
  if (!why.empty() || !rows_decide(p) || p.sq <= few_queries(p)) return why;
  return fmt::format(
      "computes `invariant` calls on contiguous keys up to {} rows of a kv head, got {} queries of "
      "{} heads",
      kFewRows, p.sq, p.group());
}

std::string hopper_decode_rejects_few(const Problem& p) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return "computes bf16 and f16";
  if (p.d > kMaxDim || p.dv > kMaxDim) {
    return fmt::format("computes d and dv up to {}, got {} and {}", kMaxDim, p.d, p.dv);
  }
  if (p.dropout_p > 0) return "computes without dropout";
  // Other rows are copied where no other kernel can take the call.
  const bool others_take = !rows_decide(p) && !has_cache(p) && !p.has(Arg::kTreeMask);
  for (const auto& [name, strides] : {std::pair{"k", &p.k}, std::pair{"v", &p.v}}) {
    if (const std::string why = not_whole(*strides); !why.empty() && others_take) {
      return fmt::format("computes contiguous keys in rows of multiples of 16 bytes: {} {}", name,
                         why);
    }
  }
  const int64_t total_q = p.packed ? p.total_q : 0, total_k = p.packed_k ? p.total_k : 0;
  if (std::max({total_q, total_k, rows_of_kv_head(p), p.sk}) >= kMaxRows) {
    return fmt::format("computes less than 2^29 rows, got {} of q, {} of a kv head and {} keys",
                       total_q, rows_of_kv_head(p), std::max(total_k, p.sk));
  }
  if (std::max({p.cache.entries, p.cache.ids, p.cache.page}) > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 pages of up to 2^31 keys, got {} of {} and {} ids",
                       p.cache.entries, p.cache.page, p.cache.ids);
  }
  // The least rows of a block bound the count of q blocks; the kernel numbers their chunks with
  // ints.
  const int64_t min_rows = p.invariant ? kFewRows : 16;
  // Doubles, as with no rows of q there may be any number of its heads.
  const int64_t blocks = std::max<int64_t>(ceil_div(rows_of_kv_head(p), min_rows), 1);
  const double lines =
      static_cast<double>(p.batch) * static_cast<double>(p.hk) * static_cast<double>(blocks);
  const double chunks = lines * (kernels::kTileOverhead + ceil_div(p.sk, kernels::kChunkKeys));
  if (chunks > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 tiles of {} x {}, got {:.3g}", min_rows,
                       int{kernels::kChunkKeys}, chunks);
  }
  return {};
}

HopperDecodeTile decode_candidate(const Problem& p, const Card& card) {
  HopperDecodePlan plan;
  static_cast<HopperAnyForwardKey&>(plan) = hopper_any_forward_key(p);
  plan.card = card;
  plan.whole_columns = plan.head_dim == p.d && plan.value_dim == p.dv;
  plan.batch_idx = p.has(Arg::kCacheBatchIdx);
  plan.leftpad = p.has(Arg::kLeftpadK);
  plan.tree = p.has(Arg::kTreeMask);
  plan.group = static_cast<int>(p.group());
  plan.q_whole = p.d % kWholeRow == 0 && not_whole(p.q).empty();
  plan.o_whole = p.dv % kWholeRow == 0 && not_whole(p.out).empty();
  plan.copies_k = not_whole(p.k);
  plan.copies_v = not_whole(p.v);
  set_tile(plan, p, card);
  plan.grid = std::min(card.sms * plan.residents, int{kernels::kMaxSlices});
  plan.pieces = invariant_splits(p, plan);
  plan.round_robin = has_round_robin(p, plan);
  plan.turns = is_dynamic(p, plan);
  if (plan.pieces == kernels::kSplitToFill && p.batch > kLanes) plan.lane_sequences = 2;
  if (plan.pieces != kernels::kSplitBySlices) {
    const int64_t chunks = ceil_div(p.sk, kernels::chunk_keys(plan.block_keys));
    const bool own = plan.pieces == kernels::kInvariantSplits;
    plan.max_splits = own ? kernels::max_splits(static_cast<int>(chunks))
                          : static_cast<int>(std::min<int64_t>(chunks, plan.grid));
    if (plan.pieces == kernels::kSplitToFill && many_splits(plan) * p.batch * p.hk > plan.grid) {
      plan.combine_eights = 4;
    }
    // Splits that fill the card have all rows of a block.
    plan.split_rows = plan.tile_rows;
    if (own) {
      plan.split_rows = static_cast<int>(std::min<int64_t>(rows_of_kv_head(p), plan.split_rows));
    }
  }
  HopperDecodeTile tile{plan, predicted_cycles(plan, p, card.sms), {}};
  // Groups have few q blocks with many keys, which no other kernel cuts where lengths differ.
  if (!p.of_groups && rows_of_kv_head(p) > kMaxRowsForModel) {
    tile.tuned_only = fmt::format("made for up to {} rows of a kv head", kMaxRowsForModel);
  }
  return tile;
}

std::string not_fused(const Problem& p, const HopperDecodePlan& plan) {
  if (p.batch == 0 || p.total_q == 0) return "there are no queries";
  if (p.append.host_numbers > 0) {
    return "its lengths lie in the host's memory, from where a launch brings them first";
  }
  if (plan.copies()) return "k and v are copied first, to rows of multiples of 16 bytes";
  if (plan.turns) return "its CTAs may take lines by turns, and must know before which they write";
  if (plan.warps_per_group < kernels::kWarpgroupWarps && plan.transforms_scores && plan.has_left) {
    return "narrow teams have no registers for it with a softcap or ALiBi and a window";
  }
  const int64_t lines = p.batch * p.hk * ceil_div(rows_of_kv_head(p), plan.block_rows());
  const int64_t items =
      plan.pieces == kernels::kSplitToFill ? 1 : ceil_div(lines * plan.max_splits, plan.grid) + 1;
  const int64_t new_rows = 2 * ceil_div(p.append.tokens, p.batch);  // of K and V
  const int64_t queries = std::min<int64_t>(rows_of_kv_head(p), plan.block_rows());
  const int64_t rows = items * (new_rows + (p.append.turns ? queries : 0));
  const int groups = plan.threads() >> lanes_log2(ceil_div(std::max(p.d, p.dv), kWholeRow));
  const int64_t rounds = ceil_div(rows, groups);
  if (rounds <= kMaxAppendRounds) return {};
  return fmt::format(
      "a CTA would write {} rows before it attends, {} at a time, in {} rounds, which up "
      "to {} take less than a launch",
      rows, groups, rounds, kMaxAppendRounds);
}

HopperDecodePlan fused_plan(const Problem& p, HopperDecodePlan plan) {
  plan.appends = true;
  plan.turns_q = p.append.turns;
  plan.unread_rows =
      plan.has_left || plan.has_chunk || plan.packed || plan.seqused_q || plan.leftpad;
  return plan;
}

Explanation describe(const HopperDecodePlan& plan, const Problem& p) {
  const int64_t lines = p.batch * p.hk * ceil_div(rows_of_kv_head(p), plan.block_rows());
  const KeyCycles key = key_cycles(plan, p);
  const double cycles = predicted_cycles(plan, p, plan.grid / plan.residents);
  const double microseconds = plan.card.launch_microseconds + cycles / plan.card.megahertz;
  const bool reading = key.reading >= key.products;
  Explanation e;
  e.Br = plan.block_rows();
  e.Bc = plan.block_keys;
  const auto say = [&](std::string sentence) { e.decisions.push_back(std::move(sentence)); };
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("warp_groups", plan.warp_groups);
  e.details.add("warps_per_group", plan.warps_per_group);
  e.details.add("k_stages", plan.k_stages);
  e.details.add("v_stages", plan.v_stages);
  e.details.add("tma", plan.box_keys > 0);
  e.details.add("shared_bytes", plan.shared_bytes);
  e.details.add("ctas", plan.grid);
  e.details.add("q_blocks", lines);
  e.details.add("schedule", schedule_of(plan));
  e.details.add("splits", plan.max_splits);
  e.details.add("combine_kernel", plan.combines_later());
  e.details.add("estimate_us", microseconds);
  e.details.add("bound", reading ? "memory" : "products");
  say(
      fmt::format("Hopper, K and V read for few rows: {} rows of a kv head (Br), {} teams of {} "
                  "warps take {} keys (Bc) at a time, d {} and dv {} as computed",
                  plan.block_rows(), plan.warp_groups, plan.warps_per_group, plan.block_keys,
                  plan.head_dim, plan.value_dim));
  say(fmt::format("{} buffers of K and {} of V a team, {}: {} bytes of shared memory",
                  plan.k_stages, plan.v_stages,
                  plan.box_keys > 0
                      ? fmt::format("which TMA fills with {} keys at once", plan.box_keys)
                      : "whose rows lanes copy",
                  plan.shared_bytes));
  say(
      fmt::format("{} CTAs take {} all keys, of the lengths that the call has when it "
                  "runs: {} lines, of a kv head and its rows, {}",
                  plan.grid, plan.turns ? "turns at" : "equal shares of", lines,
                  how_q_blocks_are_split(plan, lines)));
  say(fmt::format("about {:.3g} us on an {} where all sequences have {} keys; {}", microseconds,
                  plan.card.name, p.sk, reading ? "reading K and V binds" : "the products bind"));
  describe_copies({{"k", plan.copies_k}, {"v", plan.copies_v}}, e);
  if (plan.appends) {
    e.details.add("append", "by_attention_kernel");
    say(fmt::format(
        "new rows of k and v, {} in all, go to their caches by the CTAs that read them{}",
        p.append.tokens, plan.turns_q ? ", keys and queries turned" : ""));
  }
  if (plan.page > 0) {
    say(fmt::format("keys lie in pages of {}, which {} names", plan.page,
                    plan.page_lists ? "page_indptr" : "page_table"));
  }
  return e;
}

}  // namespace fulgur::cuda
