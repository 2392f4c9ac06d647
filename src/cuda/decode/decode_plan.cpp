#include "cuda/decode/decode_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/formats.h"
#include "call/append_then_attend.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_map.h"
#include "cuda/device/launch_memory.h"
#include "cuda/passes/forward.h"
#include "kernels/decode/layout.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

constexpr int64_t kLaneBytes = 16;  ///< that a lane copies at once
/// Rows that a group of lanes may write one after another before its CTA attends: each one waits
/// for memory about a third of a microsecond, and a launch takes 2.5 to 4.
constexpr int64_t kMaxAppendRounds = 8;

int64_t lane_elements(DType dtype) { return kLaneBytes * block_of(dtype) / size_of(dtype); }

/// Whether rows are blocks of codes with their scales.
bool has_blocks(DType dtype) { return is_low_bit(dtype) && format_of(dtype)->scaled; }

/// How many partial results the workspace has room for.
int64_t room_for_splits(const Problem& p, const DecodePlan& plan) {
  if (plan.schedule == DecodeSchedule::kSplitToFill) return plan.ctas();
  return (p.packed_k ? p.total_k / kernels::kPackedSplitKeys : p.batch * plan.max_splits) *
         (p.hk / plan.heads);
}

/// How `q_blocks` are scheduled, in words.
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

/// The name of a schedule in the details of an explanation.
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

}  // namespace

std::string not_whole(const Layout& strides, DType dtype) {
  if (has_blocks(dtype) && strides.aligned) return {};  // such rows begin anywhere
  for (const auto& [name, stride] :
       {std::pair{"batch", strides.batch}, std::pair{"seqlen", strides.row},
        std::pair{"heads", strides.head}}) {
    if (stride % lane_elements(dtype) != 0) {
      return fmt::format("has a stride of {} elements between {}, want a multiple of {}", stride,
                         name, lane_elements(dtype));
    }
  }
  return strides.aligned ? "" : "has data at no multiple of 16 bytes";
}

int64_t rows_of_kv_head(const Problem& p) {
  return (takes_both(p) ? few_queries(p) : p.sq) * p.group();
}

bool may_have_v_in_k(const Problem& p, const DecodeKey& plan) {
  const ForwardShapes shapes = forward_shapes(p, 1);
  const auto k = outer_dimensions(shapes.k), v = outer_dimensions(shapes.v);
  for (size_t i = 0; i < k.size(); ++i)
    if (k[i].extent > 1 && k[i].stride != v[i].stride) return false;
  const auto panels = [&](int dim) { return kernels::panels_of(element_of(p.dtypes.k), dim); };
  return p.dtypes.k == p.dtypes.v && p.dv <= p.d && panels(plan.value_dim) <= panels(plan.head_dim);
}

Problem as_planned(Problem p, const DecodeKey& plan) {
  p.hk /= plan.heads;
  return p;
}

kernels::DecodeTile decode_tile(const DecodeKey& key) {
  const auto words_of = [&](int scales, DType type) {
    if (key.heads == 1 || scales == 0) return kernels::scale_words(scales, element_of(type));
    return kernels::pitch_of_heads(key.heads * scales * static_cast<int>(size_of(type))) / 4;
  };
  const auto words = [&](DType codes, int scales, DType type, bool zero_point,
                         DType zero_point_type) {
    if (has_blocks(codes)) return 0;
    return words_of(scales, type) + (zero_point ? words_of(scales, zero_point_type) : 0);
  };
  const OperandTypes& stored = key.stored;
  return {
      operands_of(key),
      {element_of(stored.q), element_of(stored.k), element_of(stored.v), element_of(stored.out)},
      words(stored.k, key.k_scales, key.k_scale_type, key.k_zero_point, key.k_zero_point_type) +
          words(stored.v, key.v_scales, key.v_scale_type, key.v_zero_point, key.v_zero_point_type),
      key.heads,
      key.k_piece,
      key.v_piece,
      key.head_dim,
      key.value_dim,
      key.warps_per_group,
      key.warp_groups,
      key.tile_rows,
      key.block_keys,
      key.box_keys,
      key.k_stages,
      key.v_stages,
      key.code_stages,
      key.convert_warps,
      key.column_shares,
      key.warp_strips,
      key.chunk_bytes,
      key.column_groups};
}

ForwardShapes decode_shapes(const Problem& p, int box_keys) {
  ForwardShapes shapes = forward_shapes(p, box_keys);
  for (TensorShape* shape : {&shapes.k, &shapes.v}) {
    if (block_of(shape->dtype) == 1) continue;
    const DType dtype = std::exchange(shape->dtype, DType::kInt8);
    for (int64_t* count :
         {&shape->dim, &shape->strides.batch, &shape->strides.row, &shape->strides.head})
      *count = bytes_of(dtype, *count);
  }
  return shapes;
}

int piece_of(DType dtype, int dim, const Layout& strides, bool copied, Copies by) {
  constexpr int64_t kMaxMiddle = 128;  // rows of more bytes come faster by pieces
  if (!has_blocks(dtype)) return 0;
  const auto step = [&](std::initializer_list<int64_t> strides) {
    int64_t bytes = kLaneBytes;
    for (const int64_t stride : strides) bytes |= bytes_of(dtype, stride);
    return static_cast<int>(bytes & -bytes);
  };
  if (copied) return step({dim});
  const int piece = step({strides.batch, strides.row, strides.head, dim});
  const bool by_heads = step({strides.batch, strides.row}) == kLaneBytes;
  const bool middle = by_heads && kernels::may_begin_in_middle(dim, step({strides.head})) &&
                      by != Copies::kInPlace &&
                      (by == Copies::kBoxes || bytes_of(dtype, dim) <= kMaxMiddle);
  return piece < kLaneBytes && middle ? int{kernels::kMiddle} : piece;
}

std::array<TensorShape, 2> box_shapes(const Problem& p, const DecodePlan& plan, int box_keys) {
  const ForwardShapes shapes = decode_shapes(p, box_keys);
  const auto boxes = [&plan](TensorShape shape, const std::string& why_copied, DType stored,
                             int dim, int piece) {
    if (!why_copied.empty()) shape = copied(shape);
    if (plan.heads > 1) {
      // Elements are words of 8 bytes, as a box has at most 256 elements in a row. TMA fills what
      // the box has after the heads with zeros.
      const int64_t bytes = plan.heads * kernels::code_row_bytes(element_of(stored), dim);
      shape.dtype = DType::kI64;
      const int64_t word = size_of(shape.dtype);
      shape.dim = bytes / word;
      shape.heads /= plan.heads;
      shape.strides.head = bytes / word;
      shape.strides.batch /= word;
      shape.strides.row /= word;
      shape.swizzled = false;
      shape.box_bytes = kernels::pitch_of_heads(static_cast<int>(bytes));
      return shape;
    }
    if (has_blocks(stored)) {
      // Elements are pairs of bytes. Where rows of some heads begin at no multiples of 16 bytes, a
      // row of the map has all heads.
      shape.dtype = DType::kF16;
      if (piece == kernels::kMiddle) {
        shape.dim += (shape.heads - 1) * shape.strides.head;
        shape.heads = 1;
      }
      for (int64_t* bytes :
           {&shape.dim, &shape.strides.batch, &shape.strides.row, &shape.strides.head})
        *bytes /= size_of(shape.dtype);
      shape.swizzled = false;
      shape.box_bytes = kernels::shared_row_of_blocks(element_of(stored), dim, piece);
    } else if (is_low_bit(stored)) {
      shape.box_bytes = kernels::panel_row_bytes(element_of(stored), dim);
    }
    return shape;
  };
  return {boxes(shapes.k, plan.copies_k, plan.stored.k, plan.head_dim, plan.k_piece),
          boxes(shapes.v, plan.copies_v, plan.stored.v, plan.value_dim, plan.v_piece)};
}

DecodePlan decode_common(const Problem& p, const Card& card) {
  DecodePlan plan;
  Problem multiplied = p;
  if (is_low_bit(p.dtypes.q)) multiplied.dtypes.q = DType::kF16;  // codes become these
  static_cast<AnyForwardKey&>(plan) = forward_key_by_rows(multiplied);
  plan.card = card;
  plan.stored = p.dtypes;
  const auto in_chunks = [](int dim, DType dtype) {
    const int chunk = kernels::chunk_columns(element_of(dtype));
    return is_low_bit(dtype) ? ceil_div(dim, chunk) * chunk : dim;
  };
  plan.head_dim = in_chunks(plan.head_dim, p.dtypes.k);
  plan.value_dim = in_chunks(plan.value_dim, p.dtypes.v);
  plan.k_zero_point = p.has(Arg::kKZeroPoint);
  plan.v_zero_point = p.has(Arg::kVZeroPoint);
  // Scales of a whole sequence and kv head are read once a work tile, unless there are zero points.
  const auto scales_of_key = [](const Scales& scales, bool zero_point) {
    return scales.of_rows || zero_point ? static_cast<int>(scales.groups) : 0;
  };
  plan.k_scales = scales_of_key(p.k_descale, plan.k_zero_point);
  plan.v_scales = scales_of_key(p.v_descale, plan.v_zero_point);
  if (plan.k_scales > 0) plan.k_scale_type = p.k_descale.dtype;
  if (plan.v_scales > 0) plan.v_scale_type = p.v_descale.dtype;
  if (has_blocks(p.dtypes.k)) {
    plan.k_scales = plan.head_dim / kernels::kBlockColumns;
    plan.k_scale_type = DType::kF16;
  }
  if (has_blocks(p.dtypes.v)) {
    plan.v_scales = plan.value_dim / kernels::kBlockColumns;
    plan.v_scale_type = DType::kF16;
  }
  if (plan.k_zero_point) plan.k_zero_point_type = p.k_zero_point.dtype;
  if (plan.v_zero_point) plan.v_zero_point_type = p.v_zero_point.dtype;
  plan.whole_columns = plan.head_dim == p.d && plan.value_dim == p.dv;
  plan.group = static_cast<int>(p.group());
  const auto whole = [](int64_t dim, const Layout& strides, DType dtype) {
    return dim % lane_elements(dtype) == 0 && not_whole(strides, dtype).empty();
  };
  plan.q_whole = whole(p.d, p.q, p.dtypes.q);
  plan.o_whole = whole(p.dv, p.out, p.dtypes.out);
  plan.copies_k = not_whole(p.k, p.dtypes.k);
  plan.copies_v = not_whole(p.v, p.dtypes.v);
  plan.k_piece = piece_of(p.dtypes.k, plan.head_dim, p.k, !plan.copies_k.empty(), Copies::kLanes);
  plan.v_piece = piece_of(p.dtypes.v, plan.value_dim, p.v, !plan.copies_v.empty(), Copies::kLanes);
  return plan;
}

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

int DecodePlan::threads() const { return 32 * kernels::decode_warps(decode_tile(*this)); }

int DecodePlan::split_floats() const { return split_rows * kernels::partial_row_floats(value_dim); }

bool DecodePlan::warpgroup_path() const { return kernels::is_warpgroup_path(decode_tile(*this)); }

bool DecodePlan::converts_in_registers() const {
  return kernels::converts_in_registers(decode_tile(*this));
}

bool DecodePlan::converts_long() const {
  const auto is_float = [](DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2; };
  return !is_float(stored.k) || !is_float(stored.v) || std::max(k_scales, v_scales) > 1;
}

bool DecodePlan::has_combine_kernel() const {
  return schedule == DecodeSchedule::kInvariantSplits ||
         (schedule == DecodeSchedule::kSplitToFill && (warpgroup_path() || is_wide()));
}

bool DecodePlan::counts_splits() const {
  return schedule == DecodeSchedule::kSplitToFill || schedule == DecodeSchedule::kInvariantSplits;
}

int DecodePlan::combine_warps() const {
  return schedule == DecodeSchedule::kSplitToFill && warpgroup_path() && !converts_in_registers()
             ? warps_per_group * ceil_div(value_dim / 8, combine_eights)
             : split_rows;
}

DecodeWorkspace workspace_of(const Problem& p, const DecodePlan& plan) {
  if (p.total_q == 0) return {};
  int64_t floats = 0;  // of partial results
  if (!plan.counts_splits())
    floats =
        int64_t{2} * plan.ctas() * plan.tile_rows * kernels::partial_row_floats(plan.value_dim);
  else if (plan.max_splits > 1)
    floats = room_for_splits(p, plan) * plan.split_floats();
  const ForwardShapes maps = decode_shapes(p, plan.block_keys);
  DecodeWorkspace at;
  at.zeroed = LaunchMemory::kZeroed;
  Arena arena(at.zeroed);
  at.copies = {arena.take(copied_bytes(maps.k, plan.copies_k)),
               arena.take(copied_bytes(maps.v, plan.copies_v))};
  at.rotated = arena.take(rotated_bytes(p));
  at.partial = arena.take(floats * int64_t{sizeof(float)});
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

std::string not_fused(const Problem& p, const DecodePlan& plan) {
  if (p.batch == 0 || p.total_q == 0) return "there are no queries";
  if (p.append.host_numbers > 0) {
    return "its lengths lie in the host's memory, from where a launch brings them first";
  }
  if (plan.has_codes()) return "its caches hold codes, which the kernel of append makes";
  if (plan.copies()) return "k and v are copied first, to rows of multiples of 16 bytes";
  if (plan.is_wide()) return "the kernels of wide heads do not append";
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
  const int64_t lanes =
      std::max(ceil_div(p.d, lane_elements(p.dtypes.k)), ceil_div(p.dv, lane_elements(p.dtypes.v)));
  const int groups = plan.threads() >> lanes_log2(lanes);
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
  const int64_t q_blocks = p.batch * (p.hk / plan.heads) *
                           ceil_div(plan.heads * rows_of_kv_head(p), plan.q_block_rows());
  const double microseconds = plan.card.launch_microseconds + plan.cycles / plan.card.megahertz;
  Explanation e;
  e.Br = plan.block_rows();
  e.Bc = plan.block_keys;
  const auto say = [&](std::string sentence) { e.decisions.push_back(std::move(sentence)); };
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("heads", plan.heads);
  e.details.add("warp_groups", plan.warp_groups);
  e.details.add("warps_per_group", plan.warps_per_group);
  e.details.add("column_shares", plan.column_shares);
  e.details.add("k_stages", plan.k_stages);
  e.details.add("v_stages", plan.v_stages);
  e.details.add("tma", plan.box_keys > 0);
  e.details.add("shared_bytes", plan.shared_bytes);
  e.details.add("ctas", plan.ctas());
  e.details.add("q_blocks", q_blocks);
  e.details.add("schedule", name_of(plan.schedule));
  e.details.add("splits", plan.max_splits);
  e.details.add("combine_kernel", plan.has_combine_kernel());
  e.details.add("estimate_us", microseconds);
  e.details.add("bound", plan.memory_binds ? "memory" : "products");
  say(
      fmt::format("K and V read for few rows: {} rows of a kv head (Br), {} warp groups of "
                  "{} warps take {} keys (Bc) at a time, d {} and dv {} as computed",
                  plan.block_rows(), plan.warp_groups, plan.warps_per_group, plan.block_keys,
                  plan.head_dim, plan.value_dim));
  if (plan.is_wide_by_warpgroups()) {
    say(fmt::format(
        "two warpgroups have half of the columns of O each; {} buffers of tiles of K or V, which "
        "TMA fills with {} keys at once: {} bytes of shared memory",
        plan.k_stages, plan.box_keys, plan.shared_bytes));
  } else if (plan.is_wide()) {
    say(fmt::format(
        "{} warps share rows, each with {} columns of O; {} buffers of chunks of K and V, "
        "whose rows cp.async copies: {} bytes of shared memory",
        plan.column_shares, kernels::columns_of_share(decode_tile(plan)), plan.k_stages,
        plan.shared_bytes));
  } else {
    say(fmt::format(
        "{} buffers of K and {} of V for each, {}: {} bytes of shared memory", plan.k_stages,
        plan.v_stages,
        plan.code_stages > 0
            ? fmt::format("which other warps convert from {} of codes{}", plan.code_stages,
                          plan.box_keys > 0 ? ", which TMA fills" : "")
        : plan.box_keys > 0 ? fmt::format("which TMA fills with {} keys at once", plan.box_keys)
                            : "whose rows cp.async copies",
        plan.shared_bytes));
  }
  say(fmt::format("{} CTAs compute {} q blocks, of the lengths that the call has when it runs: {}",
                  plan.ctas(), q_blocks, how_q_blocks_are_scheduled(plan, q_blocks)));
  say(fmt::format("about {:.3g} us on an {} where all sequences have {} keys; {}", microseconds,
                  plan.card.name, p.sk,
                  plan.memory_binds ? "reading K and V binds" : "the products bind"));
  if (plan.is_wide_by_warpgroups()) {
    e.details.add("v_in_k", may_have_v_in_k(p, plan));
    e.details.add("row_blocks", plan.row_blocks);
    if (may_have_v_in_k(p, plan)) say("V that is the first columns of K is read with it, once");
    if (plan.row_blocks > 1) {
      say(fmt::format("{} CTAs at a time compute a q block, {} rows each, and read the same keys",
                      plan.row_blocks, plan.block_rows()));
    }
  }
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

}  // namespace fulgur::cuda::decode
