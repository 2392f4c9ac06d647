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

namespace fulgur::cuda::sm90 {
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
/// The warpgroup path has SplitToFill where each q block gets so many splits: one CTA combines them
/// slower than another kernel does.
constexpr int64_t kSomeSplits = 2;
/// The warp path has it where each gets so many, which then hardly differ in length.
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

kernels::DecodeTile tile_of(const DecodeKey& key) {
  return {operands_of(key), key.head_dim,   key.value_dim, key.warps_per_group, key.warp_groups,
          key.tile_rows,    key.block_keys, key.k_stages,  key.v_stages};
}

int bytes_of(const DecodeKey& key) { return kernels::decode_layout(tile_of(key)).bytes; }

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

/// Whether there are CTAs for `splits` splits of each q block, or more.
bool has_few_q_blocks(const Problem& p, int ctas, int64_t splits = kSomeSplits) {
  return p.batch <= kernels::kFillSequences && splits * p.batch * p.hk <= ctas;
}

/// Whether up to 16 rows of a kv head go to the warpgroup path, too, which has SplitToFill for few
/// q blocks: always beyond half a warp's rows. The warp path has it for fewer q blocks, and with
/// fewer rows its splits cost little where sequences are many or slices long.
bool splits_pay(const Problem& p, int ctas, int64_t rows, bool long_slices) {
  if (!has_few_q_blocks(p, ctas) || p.sk <= kernels::kChunkKeys) return false;
  if (rows > kWarpPathRows / 2) return true;
  const bool some = kEvenSplits * p.batch * p.hk > ctas && p.batch <= kLanes;
  return some && (rows > kWarpPathRows / 4 || !long_slices);
}

/// Whether whole q blocks leave few of the CTAs idle: round_robin_is_even says how few.
bool has_enough_q_blocks(const Problem& p, int ctas) { return 17 * p.batch * p.hk >= 16 * ctas; }

/// The path, warp groups, their tiles and their buffers, for the rows of a kv head and as shared
/// memory holds.
void set_tile(DecodePlan& plan, const Problem& p, const Card& card) {
  // How many rows there are depends on the batch: invariant calls have a tile for many and few.
  const int64_t rows = p.invariant ? kFewRows : rows_of_kv_head(p);
  const int dim = std::max(plan.head_dim, plan.value_dim);
  const int64_t chunks = p.batch * p.hk * ceil_div(p.sk, kernels::kChunkKeys);
  const bool long_slices = chunks >= kLongSlice * card.sms;
  // Two warps that load by lanes begin sooner than warpgroups, which read memory faster by TMA and
  // have SplitToFill.
  const bool warpgroups_pay = long_slices || has_few_q_blocks(p, card.sms);
  const bool boxes = box_keys_of(p, kernels::kChunkKeys) > 0;
  const bool two_warps = rows <= 2 * kWarpPathRows && dim <= 128 && !(warpgroups_pay && boxes);
  const bool one_warp =
      rows <= kWarpPathRows && !(boxes && splits_pay(p, card.sms, rows, long_slices));
  plan.warps_per_group = one_warp ? 1 : two_warps ? 2 : rows <= 64 ? 4 : kMaxWarps;
  plan.tile_rows = plan.warps_per_group > 1 ? plan.block_rows()
                   : rows <= 4              ? 4
                   : rows <= 8              ? 8
                                            : 16;
  // Two CTAs an SM hide each other's loads of page ids, but q blocks have twice as many splits.
  const bool one_q_block_each = has_enough_q_blocks(p, card.sms) && p.batch * p.hk <= card.sms;
  const bool two = plan.page > 0 && plan.warps_per_group == 1 && dim <= 128 && long_slices &&
                   !one_q_block_each && !has_few_q_blocks(p, card.sms, kEvenSplits);
  plan.residents = two ? 2 : 1;
  plan.warp_groups = kMaxWarps / plan.warps_per_group / plan.residents;
  plan.block_keys = std::min((dim <= 64 ? 32 : 16) * plan.warps_per_group, dim <= 128 ? 64 : 32);
  if (plan.warpgroup_path()) {
    // Loads keep up with the products of larger tiles, but for lanes that look up pages. Of larger
    // tiles there are six buffers or more, lest V wait for one. A word of a tree mask has bits for
    // 64 keys.
    const int large = dim <= 128 ? 128 : dim <= 192 ? 64 : 48;
    const bool by_boxes = box_keys_of(p, large) > 0;
    const bool keeps_up = by_boxes || (dim <= 128 && plan.page == 0);
    if (plan.warps_per_group == kMaxWarps && !plan.tree && keeps_up) plan.block_keys = large;
    // With the widest heads there are no registers for windows and transformed scores where lanes
    // copy. Invariant calls have one tile wherever keys lie.
    const bool more_scores = plan.transforms_scores || plan.has_left;
    const bool no_registers = more_scores && (p.invariant || !by_boxes);
    if (dim > 128 && (plan.tree || no_registers)) plan.block_keys = 16;
  }
  // Buffers of K and V together, of which the warp path has as many of each.
  const int max_buffers = plan.warpgroup_path() ? 10 : 6, step = plan.warpgroup_path() ? 1 : 2;
  const auto set_buffers = [&](int count) {
    plan.k_stages = (count + 1) / 2;
    plan.v_stages = count / 2;
    return count;
  };
  const int room = card.shared_bytes / plan.residents - kReservedBytes * (plan.residents - 1);
  int buffers = set_buffers(max_buffers);
  while (bytes_of(plan) > room) {
    if (buffers == 4) plan.warp_groups /= 2;
    buffers = set_buffers(buffers == 4 ? max_buffers : buffers - step);
  }
  plan.shared_bytes = bytes_of(plan);
  if (plan.warpgroup_path()) plan.box_keys = box_keys_of(p, plan.block_keys);
}

/// Of a key of a kv head: to read it, and to multiply with it.
struct KeyCycles {
  double reading, products;
};

KeyCycles key_cycles(const DecodePlan& plan, const Problem& p) {
  const int64_t rows = p.of_groups ? ceil_div(rows_of_kv_head(p), p.batch) : rows_of_kv_head(p);
  const double blocks = ceil_div(rows, plan.block_rows());
  const double dims = plan.head_dim + plan.value_dim;
  const double bytes = kDecodeShare * plan.card.bytes_per_cycle / plan.card.sms;  // of an SM
  return {2 * dims / bytes, blocks * 2 * dims * plan.block_rows() / kProductFlops};
}

/// Of fewer splits a warp of combine.cu takes more columns: a warp costs more than their loads.
int64_t many_splits(const DecodePlan& plan) { return plan.warps_per_group + 1; }

/// For how many splits there is room in the workspace.
int64_t room_for_splits(const Problem& p, const DecodePlan& plan) {
  if (plan.schedule == DecodeSchedule::kSplitToFill) return plan.grid;
  return (p.packed_k ? p.total_k / kernels::kPackedSplitKeys : p.batch * plan.max_splits) * p.hk;
}

/// Whether few q blocks are split so that each CTA has about one split.
bool splits_to_fill(const Problem& p, const DecodePlan& plan) {
  const bool warpgroups = plan.warpgroup_path();
  const int64_t q_blocks = p.batch * p.hk;
  // Two q blocks of the warp path have slices, which measure 11.1 us where such splits take 14.2.
  const bool few = has_few_q_blocks(p, plan.grid, warpgroups ? kSomeSplits : kEvenSplits) &&
                   (warpgroups || q_blocks == 1 || kernels::kMaxSplits * q_blocks >= plan.grid);
  return few && rows_of_kv_head(p) <= plan.block_rows() &&
         p.sk > kernels::chunk_keys(plan.block_keys);
}

/// Whether CTAs may take whole q blocks: each sequence has one for each kv head, and there are
/// enough of them for all CTAs.
bool takes_whole_q_blocks(const Problem& p, const DecodePlan& plan) {
  // The warp path has no registers for it with all that a tree mask takes.
  if (plan.tree && !plan.warpgroup_path()) return false;
  return !p.of_groups && rows_of_kv_head(p) <= plan.block_rows() &&
         has_enough_q_blocks(p, plan.grid);
}

/// Whether such q blocks go by the dynamic scheduler: of the warpgroup path where some CTA has two,
/// of the warp path where equal slices of so many keys differ in time between SMs by more than the
/// scheduler costs.
bool is_dynamic(const Problem& p, const DecodePlan& plan) {
  if (p.batch > kernels::kDynamicSequences) return false;
  const int64_t q_blocks = p.batch * p.hk;
  if (plan.warpgroup_path()) return q_blocks > plan.grid;
  return q_blocks * p.sk >= kLongDynamic * plan.grid;
}

DecodeSchedule schedule_for(const Problem& p, const DecodePlan& plan) {
  if (p.invariant) return DecodeSchedule::kInvariantSplits;
  if (splits_to_fill(p, plan)) return DecodeSchedule::kSplitToFill;
  if (!takes_whole_q_blocks(p, plan)) return DecodeSchedule::kStreamK;
  return is_dynamic(p, plan) ? DecodeSchedule::kDynamic : DecodeSchedule::kStreamKOrRoundRobin;
}

/// The schedule of `q_blocks`, in words.
std::string how_q_blocks_are_scheduled(const DecodePlan& plan, int64_t q_blocks) {
  switch (plan.schedule) {
    case DecodeSchedule::kSplitToFill:
      return fmt::format(
          "each CTA computes about one split of a q block, and {} combines them",
          plan.has_combine_kernel() ? "another kernel" : "the last CTA at a q block");
    case DecodeSchedule::kInvariantSplits:
      if (plan.max_splits == 1) return "no q block is split (`invariant`)";
      return fmt::format(
          "a q block has up to {} splits, as its own keys say (`invariant`), and "
          "another kernel combines them",
          plan.max_splits);
    case DecodeSchedule::kDynamic:
      return "CTAs request q blocks one after another, the longest first; those longer than what "
             "a CTA has in all are split";
    case DecodeSchedule::kStreamK:
    case DecodeSchedule::kStreamKOrRoundRobin:
      break;
  }
  return fmt::format(
      "each CTA takes an equal slice (stream-K), and the last CTA at a q block "
      "combines its splits, up to {} in all{}",
      q_blocks + plan.grid - 1,
      plan.schedule == DecodeSchedule::kStreamKOrRoundRobin
          ? "; or whole q blocks, where the lengths make that as even"
          : "");
}

/// The schedule, as `details` names it.
const char* name_of(DecodeSchedule schedule) {
  switch (schedule) {
    case DecodeSchedule::kSplitToFill:
      return "split_per_cta";
    case DecodeSchedule::kInvariantSplits:
      return "invariant_splits";
    case DecodeSchedule::kDynamic:
      return "dynamic";
    case DecodeSchedule::kStreamK:
    case DecodeSchedule::kStreamKOrRoundRobin:
      break;
  }
  return "stream_k";
}

/// What partial results a schedule has whose splits are counted before they are computed.
void set_splits(DecodePlan& plan, const Problem& p) {
  const int64_t chunks = ceil_div(p.sk, kernels::chunk_keys(plan.block_keys));
  if (plan.schedule == DecodeSchedule::kSplitToFill) {
    if (p.batch > kLanes) plan.lane_sequences = 2;
    if (many_splits(plan) * p.batch * p.hk > plan.grid) plan.combine_eights = 4;
    plan.max_splits = static_cast<int>(std::min<int64_t>(chunks, plan.grid));
    plan.split_rows = plan.tile_rows;
  } else if (plan.schedule == DecodeSchedule::kInvariantSplits) {
    plan.max_splits = kernels::max_splits(static_cast<int>(chunks));
    plan.split_rows = static_cast<int>(std::min<int64_t>(rows_of_kv_head(p), plan.tile_rows));
  }
}

double predicted_cycles(const DecodePlan& plan, const Problem& p, int sms) {
  const KeyCycles key = key_cycles(plan, p);
  const double keys = static_cast<double>(p.batch * p.hk) * static_cast<double>(p.sk) / sms;
  const double start = kStartCycles + (plan.block_rows() > kFewRows ? kManyRowsCycles : 0);
  return start + keys * std::max(key.reading, key.products);
}

}  // namespace

std::string DecodeKey::schedule_type() const {
  switch (schedule) {
    case DecodeSchedule::kSplitToFill:
      return fmt::format("SplitToFill<{}>", lane_sequences);
    case DecodeSchedule::kInvariantSplits:
      return "InvariantSplits";
    case DecodeSchedule::kDynamic:
      return "Dynamic";
    case DecodeSchedule::kStreamKOrRoundRobin:
      return "StreamKOrRoundRobin";
    case DecodeSchedule::kStreamK:
      break;
  }
  return "StreamK";
}

int DecodePlan::threads() const { return 32 * kernels::decode_warps(tile_of(*this)); }

int DecodePlan::split_floats() const { return split_rows * kernels::partial_row_floats(value_dim); }

bool DecodePlan::warpgroup_path() const { return kernels::is_warpgroup_path(tile_of(*this)); }

bool DecodePlan::has_combine_kernel() const {
  return schedule == DecodeSchedule::kInvariantSplits ||
         (schedule == DecodeSchedule::kSplitToFill && warpgroup_path());
}

bool DecodePlan::counts_splits() const {
  return schedule == DecodeSchedule::kSplitToFill || schedule == DecodeSchedule::kInvariantSplits;
}

int DecodePlan::combine_warps() const {
  return schedule == DecodeSchedule::kSplitToFill
             ? warps_per_group * ceil_div(value_dim / 8, combine_eights)
             : split_rows;
}

DecodeWorkspace workspace_of(const Problem& p, const DecodePlan& plan) {
  if (p.total_q == 0) return {};
  int64_t floats = 0;  // of partial results
  if (!plan.counts_splits())
    floats = int64_t{2} * plan.grid * plan.tile_rows * kernels::partial_row_floats(plan.value_dim);
  else if (plan.max_splits > 1)
    floats = room_for_splits(p, plan) * plan.split_floats();
  const ForwardMaps maps = forward_maps(p, plan.block_keys);
  DecodeWorkspace at;
  Arena arena(LaunchMemory::kZeroed);
  const auto copy = [&](const TensorMapShape& shape, const std::string& why) {
    return arena.take(why.empty() ? 0 : copied_bytes(shape));
  };
  at.copies = {copy(maps.k, plan.copies_k), copy(maps.v, plan.copies_v)};
  at.rotated = arena.take(rotated_bytes(p));
  at.partial = arena.take(floats * int64_t{sizeof(float)});
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

std::string decode_rejects(const Problem& p) {
  const std::string why = decode_rejects_few(p);
  if (!why.empty() || !rows_decide(p) || p.sq <= few_queries(p)) return why;
  return fmt::format(
      "computes `invariant` calls on contiguous keys up to {} rows of a kv head, got {} queries of "
      "{} heads",
      kFewRows, p.sq, p.group());
}

std::string decode_rejects_few(const Problem& p) {
  if (std::string why = dtypes_rejected(p.dtypes); !why.empty()) return why;
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
  // The kernels number the chunks of all q blocks with ints, of blocks as small as they may be.
  const int64_t min_rows = p.invariant ? kFewRows : 16;
  // Doubles, as with no rows of q there may be any number of its heads.
  const int64_t blocks = std::max<int64_t>(ceil_div(rows_of_kv_head(p), min_rows), 1);
  const double q_blocks =
      static_cast<double>(p.batch) * static_cast<double>(p.hk) * static_cast<double>(blocks);
  const double chunks = q_blocks * (kernels::kTileOverhead + ceil_div(p.sk, kernels::kChunkKeys));
  if (chunks > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 tiles of {} x {}, got {:.3g}", min_rows,
                       int{kernels::kChunkKeys}, chunks);
  }
  return {};
}

Fitting<DecodePlan> decode_candidate(const Problem& p, const Card& card) {
  DecodePlan plan;
  static_cast<AnyForwardKey&>(plan) = any_forward_key(p);
  plan.card = card;
  plan.whole_columns = plan.head_dim == p.d && plan.value_dim == p.dv;
  plan.batch_idx = p.has(Arg::kCacheBatchIdx);
  plan.leftpad = p.has(Arg::kLeftpadK);
  plan.group = static_cast<int>(p.group());
  plan.q_whole = p.d % kWholeRow == 0 && not_whole(p.q).empty();
  plan.o_whole = p.dv % kWholeRow == 0 && not_whole(p.out).empty();
  plan.copies_k = not_whole(p.k);
  plan.copies_v = not_whole(p.v);
  set_tile(plan, p, card);
  plan.grid = std::min(card.sms * plan.residents, int{kernels::kMaxSlices});
  plan.schedule = schedule_for(p, plan);
  set_splits(plan, p);
  Fitting<DecodePlan> tile{plan, predicted_cycles(plan, p, card.sms), {}};
  // Groups have few q blocks with many keys, which no other kernel cuts where lengths differ.
  if (!p.of_groups && rows_of_kv_head(p) > kMaxRowsForModel) {
    tile.tuned_only = fmt::format("made for up to {} rows of a kv head", kMaxRowsForModel);
  }
  return tile;
}

PlanEdges decode_edges(const Problem& p, const Card& card) {
  PlanEdges edges;
  if (p.pass != Pass::kForward) return edges;
  for (const int64_t rows : {4, 8, 16, 32, 64, 128})
    edges.queries.push_back(std::max<int64_t>(rows / p.group(), 1));
  const int64_t ctas = card.sms;
  for (const int64_t q_blocks :
       {ctas / (kMaxWarps + 1), ctas / kEvenSplits, ctas / (kernels::kWarpgroupWarps + 1),
        ctas / kSomeSplits, (16 * ctas - 1) / 17, ctas, (32 * ctas - 1) / 17}) {
    edges.batches.push_back(std::max<int64_t>(q_blocks / p.hk, 1));
  }
  return edges;
}

std::string not_fused(const Problem& p, const DecodePlan& plan) {
  if (p.batch == 0 || p.total_q == 0) return "there are no queries";
  if (p.append.host_numbers > 0) {
    return "its lengths lie in the host's memory, from where a launch brings them first";
  }
  if (plan.copies()) return "k and v are copied first, to rows of multiples of 16 bytes";
  if (plan.schedule == DecodeSchedule::kDynamic) {
    return "its CTAs request q blocks from a dynamic scheduler, and must know before which rows "
           "they write";
  }
  if (!plan.warpgroup_path() && plan.transforms_scores && plan.has_left) {
    return "the warp path has no registers for it with a softcap or ALiBi and a window";
  }
  const int64_t q_blocks = p.batch * p.hk * ceil_div(rows_of_kv_head(p), plan.block_rows());
  const int64_t work_tiles = plan.schedule == DecodeSchedule::kSplitToFill
                                 ? 1
                                 : ceil_div(q_blocks * plan.max_splits, plan.grid) + 1;
  const int64_t new_rows = 2 * ceil_div(p.append.tokens, p.batch);  // of K and V
  const int64_t queries = std::min<int64_t>(rows_of_kv_head(p), plan.block_rows());
  const int64_t rows = work_tiles * (new_rows + (p.append.rotates ? queries : 0));
  const int groups = plan.threads() >> lanes_log2(ceil_div(std::max(p.d, p.dv), kWholeRow));
  const int64_t rounds = ceil_div(rows, groups);
  if (rounds <= kMaxAppendRounds) return {};
  return fmt::format(
      "a CTA would write {} rows before it attends, {} at a time, in {} rounds, which up "
      "to {} take less than a launch",
      rows, groups, rounds, kMaxAppendRounds);
}

DecodePlan fused_plan(const Problem& p, DecodePlan plan) {
  plan.appends = true;
  plan.rotates_q = p.append.rotates;
  plan.unread_rows =
      plan.has_left || plan.has_chunk || plan.packed || plan.seqused_q || plan.leftpad;
  return plan;
}

Explanation describe(const DecodePlan& plan, const Problem& p) {
  const int64_t q_blocks = p.batch * p.hk * ceil_div(rows_of_kv_head(p), plan.block_rows());
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
  e.details.add("q_blocks", q_blocks);
  e.details.add("schedule", name_of(plan.schedule));
  e.details.add("splits", plan.max_splits);
  e.details.add("combine_kernel", plan.has_combine_kernel());
  e.details.add("estimate_us", microseconds);
  e.details.add("bound", reading ? "memory" : "products");
  say(
      fmt::format("Hopper, K and V read for few rows: {} rows of a kv head (Br), {} warp groups of "
                  "{} warps take {} keys (Bc) at a time, d {} and dv {} as computed",
                  plan.block_rows(), plan.warp_groups, plan.warps_per_group, plan.block_keys,
                  plan.head_dim, plan.value_dim));
  say(fmt::format("{} buffers of K and {} of V for each, {}: {} bytes of shared memory",
                  plan.k_stages, plan.v_stages,
                  plan.box_keys > 0
                      ? fmt::format("which TMA fills with {} keys at once", plan.box_keys)
                      : "whose rows cp.async copies",
                  plan.shared_bytes));
  say(fmt::format("{} CTAs compute {} q blocks, of the lengths that the call has when it runs: {}",
                  plan.grid, q_blocks, how_q_blocks_are_scheduled(plan, q_blocks)));
  say(fmt::format("about {:.3g} us on an {} where all sequences have {} keys; {}", microseconds,
                  plan.card.name, p.sk, reading ? "reading K and V binds" : "the products bind"));
  describe_copies({{"k", plan.copies_k}, {"v", plan.copies_v}}, e);
  if (plan.appends) {
    e.details.add("append", "by_attention_kernel");
    say(fmt::format(
        "new rows of k and v, {} in all, go to their caches by the CTAs that read them{}",
        p.append.tokens, plan.rotates_q ? ", keys and queries rotated" : ""));
  }
  if (plan.page > 0) {
    say(fmt::format("keys lie in pages of {}, which {} names", plan.page,
                    plan.page_lists ? "page_indptr" : "page_table"));
  }
  return e;
}

}  // namespace fulgur::cuda::sm90
