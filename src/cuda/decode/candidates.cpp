#include "cuda/decode/candidates.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "cuda/common/forward.h"
#include "cuda/common/tensor_map.h"
#include "cuda/decode/cost.h"
#include "kernels/decode/layout.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

constexpr int kSwizzledRows = 8;
constexpr int kMaxBoxKeys = 16;  // lest the memory close the rows before their next panel comes
constexpr int kMaxWarps = 8;     // of a CTA that compute
constexpr int kReservedBytes = 1024;  // of shared memory, for each CTA but the first
constexpr int kManyKeysBits = 1024;  // of K and V of a key, up to which tiles of codes have 64 keys
constexpr int kManyWarpsBits = 512;  // and CTAs 12 warps, also of heads of 64 columns by TMA
constexpr int kMaxStages = 8;        // of several heads together
constexpr int64_t kManyKeysOfHeads = 1024;  // of a CTA, from which on it reads several heads
constexpr int64_t kLanes = 32;
constexpr int64_t kTileRows[] = {4, 8, 16, 32, 64, 128};  // of the tiles, at most
/// Beyond so many rows of a kv head other kernels are faster, where they can have them.
constexpr int64_t kMaxRowsForModel = 128;
/// Of a cycle of the forward family, which predicts too few where rows are few (on an H100).
constexpr double kOfForwardCycle = 0.94;

/// The keys of a tile that TMA brings at once, of one page; 0 where it cannot.
int box_keys_of(const Problem& p, int block_keys) {
  const int page = static_cast<int>(p.cache.page);
  const int box = std::gcd(std::gcd(page, block_keys), kMaxBoxKeys);
  const ForwardShapes maps = forward_shapes(p, box);
  for (const TensorShape* shape : {&maps.k, &maps.v}) {
    if (!rows_unsupported(*shape).empty() || !not_addressable(*shape).empty()) return 0;
  }
  // Boxes begin where the swizzle does.
  return page > 0 && (p.has(Arg::kLeftpadK) || box % kSwizzledRows != 0) ? 0 : box;
}

/// The same of codes, whose boxes have the keys of a tile or of a page; and how rows of blocks lie.
void set_boxes_of_codes(DecodePlan& plan, const Problem& p) {
  constexpr int kBoxStart = 16;  // bytes, at multiples of which boxes begin
  if (!features_of(plan.card.target).has_tma) return;
  // Short rows across lines of L2 come faster by lanes.
  const auto short_blocks = [](DType dtype, int dim) { return dtype == DType::kQ8_0 && dim <= 64; };
  if (short_blocks(p.dtypes.k, plan.head_dim) || short_blocks(p.dtypes.v, plan.value_dim)) return;
  DecodePlan boxed = plan;
  boxed.k_piece = piece_of(p.dtypes.k, plan.head_dim, p.k, !plan.copies_k.empty(), true);
  boxed.v_piece = piece_of(p.dtypes.v, plan.value_dim, p.v, !plan.copies_v.empty(), true);
  for (const int piece : {boxed.k_piece, boxed.v_piece})
    if (piece > kernels::kMiddle && piece < kBoxStart) return;
  boxed.box_keys = std::gcd(static_cast<int>(p.cache.page), plan.block_keys);
  if (boxed.box_keys % kSwizzledRows != 0 || (plan.page > 0 && p.has(Arg::kLeftpadK))) return;
  for (const TensorShape& shape : box_shapes(p, boxed, boxed.box_keys)) {
    if (!rows_unsupported(shape).empty() || !not_addressable(shape).empty()) return;
  }
  plan = boxed;
}

/// How many kv heads a CTA may read together: those of a key, of K and of V, lie side by side, with
/// their scales, and TMA brings them as one row. 1: it cannot.
int heads_together(const DecodePlan& plan, const Problem& p) {
  constexpr int kMaxHeads = 8, kMinHeads = 4, kMaxBoxBytes = 2048, kMaxRowBytes = 144;
  constexpr int kMinPageOfScales = 64;
  // Whole lines of memory come as fast by one head.
  const auto short_rows = [](DType dtype, int dim) {
    const kernels::Element codes = element_of(dtype);
    return is_low_bit(dtype) && (kernels::is_block(codes) || kernels::bits_of(codes) < 8) &&
           kernels::code_row_bytes(codes, dim) <= kMaxRowBytes;
  };
  if (!short_rows(p.dtypes.k, plan.head_dim) || !short_rows(p.dtypes.v, plan.value_dim)) return 1;
  if (p.invariant || p.of_groups) return 1;
  const bool zero_points = plan.k_zero_point || plan.v_zero_point;
  const bool blocks =
      kernels::is_block(element_of(p.dtypes.k)) && kernels::is_block(element_of(p.dtypes.v));
  // Of wide heads what scales codes takes longer; and lanes find scales of small pages slowly, and
  // zero points as well as scales of any.
  if (std::max(plan.head_dim, plan.value_dim) > 128 &&
      ((!blocks && !zero_points) || rows_of_kv_head(p) > 8))
    return 1;
  if (plan.page > 0 && !blocks && (zero_points || plan.page < kMinPageOfScales)) return 1;
  if (!features_of(plan.card.target).has_tma || plan.copies()) return 1;
  if (plan.page > 0 && (p.has(Arg::kLeftpadK) || p.cache.page % kSwizzledRows != 0)) return 1;
  const auto whole = [&](DType dtype, int dim, int64_t columns, const Layout& strides, int heads) {
    const int row = kernels::code_row_bytes(element_of(dtype), dim), all = heads * row;
    const int piece = piece_of(dtype, dim, strides, false, true);
    return dim == columns && strides.aligned && bytes_of(dtype, strides.head) == row &&
           all % kCopyAlignment == 0 && kernels::pitch_of_heads(all) <= kMaxBoxBytes &&
           bytes_of(dtype, strides.row) % kCopyAlignment == 0 &&
           bytes_of(dtype, strides.batch) % kCopyAlignment == 0 &&
           (piece == 0 || piece == kernels::kMiddle || piece == kCopyAlignment);
  };
  const auto scales_whole = [&](const Scales& scales, int count, int heads) {
    if (count == 0) return true;
    const int64_t bytes = count * size_of(scales.dtype);
    return scales.of_rows && (count == 1 || scales.group == 1) && scales.head == count &&
           heads * bytes % kCopyAlignment == 0 && (count == 1 || bytes % 4 == 0);
  };
  const bool k_blocks = kernels::is_block(element_of(p.dtypes.k));
  const bool v_blocks = kernels::is_block(element_of(p.dtypes.v));
  for (int heads = kMaxHeads; heads >= kMinHeads; heads /= 2) {
    if (p.hk % heads == 0 && whole(p.dtypes.k, plan.head_dim, p.d, p.k, heads) &&
        whole(p.dtypes.v, plan.value_dim, p.dv, p.v, heads) &&
        scales_whole(p.k_descale, k_blocks ? 0 : plan.k_scales, heads) &&
        scales_whole(p.v_descale, v_blocks ? 0 : plan.v_scales, heads) &&
        scales_whole(p.k_zero_point, plan.k_zero_point ? plan.k_scales : 0, heads) &&
        scales_whole(p.v_zero_point, plan.v_zero_point ? plan.v_scales : 0, heads))
      return heads;
  }
  return 1;
}

/// Bits of codes in K and V of a key.
int code_bits(const DecodePlan& plan) {
  return plan.head_dim * kernels::bits_of(element_of(plan.stored.k)) +
         plan.value_dim * kernels::bits_of(element_of(plan.stored.v));
}

/// Bc.
int block_keys_of(const DecodePlan& plan, const Problem& p) {
  const int dim = std::max(plan.head_dim, plan.value_dim);
  const int keys = std::min((dim <= 64 ? 32 : 16) * plan.warps_per_group, dim <= 128 ? 64 : 32);
  if (plan.has_codes()) {
    // Four matrices of eight keys come at once; more keys where these are few bytes and registers
    // are left: not with many rows, nor with 12 warps and several scales of a key. Rows of blocks
    // take long to come, so that more buffers of them gain more.
    const auto has_blocks = [](DType dtype) { return kernels::is_block(element_of(dtype)); };
    const bool blocks = has_blocks(plan.stored.k) || has_blocks(plan.stored.v);
    const bool narrow = dim <= 64 && (code_bits(plan) > kManyWarpsBits ||
                                      std::max(plan.k_scales, plan.v_scales) > 1);
    const bool many = code_bits(plan) <= kManyKeysBits && plan.tile_rows <= 8;
    return many && !blocks && !narrow ? 64 : 32;
  }
  if (!plan.warpgroup_path()) return keys;
  // Loads keep up with the products of larger tiles, but for lanes that look up pages. Of larger
  // tiles there are six buffers or more, lest V wait for one. A word of a tree mask has bits for
  // 64 keys.
  const int large = dim <= 128 ? 128 : dim <= 192 ? 64 : 48;
  const bool by_boxes = box_keys_of(p, large) > 0;
  const bool keeps_up = by_boxes || (dim <= 128 && plan.page == 0);
  // With the widest heads there are no registers for windows and transformed scores where lanes
  // copy. Invariant calls have one tile wherever keys lie.
  const bool more_scores = plan.transforms_scores || plan.has_left || plan.scores_hide();
  const bool no_registers = more_scores && (p.invariant || !by_boxes);
  if (dim > 128 && (plan.tree || no_registers)) return 16;
  // Nor are there any where TMA brings pages and q is read by elements.
  const bool elements = !plan.q_whole && plan.page > 0 && by_boxes;
  if (dim > 240 && elements && plan.warps_per_group < kMaxWarps) return 16;
  const bool small = plan.tree || plan.scores_hide();  // no registers for more
  return plan.warps_per_group == kMaxWarps && !small && keeps_up ? large : keys;
}

/// As many buffers of K and V as shared memory has room for, and warp groups.
void set_buffers(DecodePlan& plan, const Card& card) {
  const bool boxes = plan.box_keys > 0 && std::max(plan.head_dim, plan.value_dim) <= 64;
  const bool many = plan.has_codes() && plan.tile_rows <= 8 && plan.residents == 1 &&
                    (boxes || code_bits(plan) <= kManyWarpsBits);
  plan.warp_groups = (many ? 12 : kMaxWarps) / plan.warps_per_group / plan.residents;
  // Of K and V together, of which the warp path has as many of each.
  const int max_buffers = plan.warpgroup_path() || plan.has_codes() ? 10 : 6,
            step = plan.warpgroup_path() ? 1 : 2;
  const int room = card.shared_bytes / plan.residents - kReservedBytes * (plan.residents - 1);
  const auto set = [&](int count) {
    plan.k_stages = (count + 1) / 2;
    plan.v_stages = count / 2;
    plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
    return count;
  };
  int buffers = set(max_buffers);
  while (plan.shared_bytes > room) {
    if (buffers == 4) plan.warp_groups /= 2;
    buffers = set(buffers == 4 ? max_buffers : buffers - step);
  }
}

/// A tile of warp groups of so many warps.
DecodePlan with_tile(DecodePlan plan, const Problem& p, const Card& card, int warps,
                     int residents) {
  const int64_t rows = rows_of_kv_head(p);
  plan.warps_per_group = warps;
  plan.residents = residents;
  // How many rows there are depends on the batch, which an invariant call must not.
  const bool any_rows = warps > 1 || p.invariant;
  plan.tile_rows = any_rows ? plan.block_rows() : rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
  plan.block_keys = block_keys_of(plan, p);
  if (plan.has_codes())
    set_boxes_of_codes(plan, p);
  else if (plan.warps_per_group >= kernels::kWarpgroupWarps)
    plan.box_keys = box_keys_of(p, plan.block_keys);
  set_buffers(plan, card);
  plan.grid = std::min(card.sms * residents, int{kernels::kMaxSlices});
  return plan;
}

/// The tile of several heads together, a warp for each head and tile of keys.
DecodePlan of_heads(DecodePlan plan, const Problem& p, const Card& card, int heads) {
  const int64_t rows = rows_of_kv_head(p);
  const int dim = std::max(plan.head_dim, plan.value_dim);
  const bool few = rows <= 8, zero_points = plan.k_zero_point || plan.v_zero_point;
  plan.heads = plan.warps_per_group = heads;
  plan.residents = 1;
  plan.tile_rows = heads * (rows <= 4 ? 4 : few ? 8 : 16);
  plan.group *= heads;
  plan.k_piece = piece_of(p.dtypes.k, plan.head_dim, p.k, false, true);
  plan.v_piece = piece_of(p.dtypes.v, plan.value_dim, p.v, false, true);
  plan.grid = std::min(card.sms, int{kernels::kMaxSlices});
  // More warps where registers are left for these.
  plan.warp_groups = (few && dim <= 64 && !zero_points ? 2 : 1) * kMaxWarps / heads;
  const auto fits = [&](int keys, int stages) {
    plan.block_keys = keys;
    plan.box_keys = std::gcd(static_cast<int>(p.cache.page), keys);
    plan.k_stages = plan.v_stages = stages;
    plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
    return plan.shared_bytes <= card.shared_bytes;
  };
  // Each warp group has buffers of its own.
  const int step = plan.warp_groups, least = std::max(step, 2);
  const bool more_keys = few && dim <= 128 && !(zero_points && dim > 64) && fits(64, least);
  const int keys = more_keys ? 64 : 32;
  int stages = least;
  while (stages + step <= kMaxStages && fits(keys, stages + step)) stages += step;
  fits(keys, stages);
  return plan;
}

/// The tiles that read each key of a kv head once: of each path the smallest that has all its rows,
/// else the largest. On the warp path, whose lanes wait for page ids, two CTAs an SM hide that.
/// Where there is no other path it has any rows, and reads each key once for each block of them.
std::vector<DecodePlan> tiles_of(const DecodePlan& common, const Problem& p, const Card& card) {
  const int64_t rows = rows_of_kv_head(p);
  const int dim = std::max(common.head_dim, common.value_dim);
  std::vector<DecodePlan> tiles;
  const auto add = [&](int warps, int residents = 1) {
    tiles.push_back(with_tile(common, p, card, warps, residents));
  };
  if (!common.has_wgmma()) {
    add(rows > 16 && dim <= 128 ? 2 : 1);
    if (rows <= 16 && common.page > 0 && dim <= 128) add(1, 2);
    return tiles;
  }
  if (rows <= 16) add(1);
  if (rows <= 16 && common.page > 0 && dim <= 128) add(1, 2);
  if (common.has_codes()) {
    if (rows > 16) add(2);
    const int heads = rows <= 16 ? heads_together(common, p) : 1;
    const int64_t keys = p.batch * p.sk * p.hk / heads;  // that all CTAs have at most
    if (heads > 1 && keys >= kManyKeysOfHeads * card.sms) {
      const DecodePlan tile = of_heads(common, p, card, heads);
      const bool addressable =
          std::ranges::all_of(box_shapes(p, tile, tile.box_keys), [](const TensorShape& shape) {
            return rows_unsupported(shape).empty() && not_addressable(shape).empty();
          });
      if (addressable && tile.shared_bytes <= card.shared_bytes) tiles = {tile};
    }
    return tiles;
  }
  if (rows > 16 && rows <= 32 && dim <= 128) add(2);
  add(rows <= kFewRows ? kernels::kWarpgroupWarps : kMaxWarps);
  return tiles;
}

/// Whether a schedule can compute a problem with a tile.
bool fits(DecodeSchedule schedule, const DecodePlan& tile, const Problem& problem) {
  const Problem p = as_planned(problem, tile);
  if (schedule == DecodeSchedule::kStreamK) return true;
  // Warps that load nothing for several heads would have to read its answers.
  if (tile.heads > 1 && schedule == DecodeSchedule::kDynamic) return false;
  // Each sequence has one q block a kv head.
  if (rows_of_kv_head(p) > tile.block_rows()) return false;
  const int64_t q_blocks = p.batch * p.hk;
  if (schedule == DecodeSchedule::kSplitToFill) {
    return p.batch <= kernels::kFillSequences && q_blocks < tile.grid &&
           p.sk > kernels::chunk_keys(tile.block_keys);
  }
  // With a q block for each CTA there is nothing to request, and its kernel could not append.
  const bool requests = p.batch <= kernels::kDynamicSequences && q_blocks > tile.grid;
  const bool has_mbarriers = features_of(tile.card.target).has_tma;
  if (schedule == DecodeSchedule::kDynamic && !(requests && has_mbarriers)) return false;
  // The warp path has no registers for whole q blocks with all that a tree mask takes.
  return !p.of_groups && !(tile.tree && !tile.warpgroup_path());
}

/// What partial results a schedule has whose splits are counted before they are computed.
void set_splits(DecodePlan& plan, const Problem& p) {
  const int64_t chunks = ceil_div(p.sk, kernels::chunk_keys(plan.block_keys));
  if (plan.schedule == DecodeSchedule::kSplitToFill) {
    if (p.batch > kLanes) plan.lane_sequences = 2;
    // Of fewer splits a warp of combine.cu takes more columns: a warp costs more than their loads.
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
  Fitting<DecodePlan> tile{cheapest, kOfForwardCycle * cheapest.expected_cycles, {}};
  // Groups have few q blocks with many keys, which no other kernel cuts where lengths differ.
  if (!p.of_groups && !cheapest.has_codes() && rows_of_kv_head(p) > kMaxRowsForModel) {
    tile.tuned_only = fmt::format("made for up to {} rows of a kv head", kMaxRowsForModel);
  }
  return tile;
}

std::vector<std::pair<Problem, DecodePlan>> decode_reachable(const Problem& problem,
                                                             const Card& card) {
  std::vector<std::pair<Problem, DecodePlan>> reachable;
  if (problem.pass != Pass::kForward || problem.invariant) return reachable;
  // Numbers of queries with each tile and mask, of keys with each mask, and of sequences: few ones
  // with many splits of a q block and with few, and so many that CTAs have several q blocks.
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
  std::set<std::string> kernels;
  Problem p = problem;
  for (const int64_t sq : queries) {
    for (const int64_t sk : keys) {
      for (const int64_t batch : batches) {
        p.sq = sq, p.sk = sk, p.batch = batch;
        if (!decode_rejects(p).empty()) continue;
        for (const DecodePlan& plan : decode_plans(p, card))
          if (kernels.insert(kernel_config(plan)).second) reachable.emplace_back(p, plan);
      }
    }
  }
  return reachable;
}

}  // namespace fulgur::cuda::decode
