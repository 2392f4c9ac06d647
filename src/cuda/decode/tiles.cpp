#include "cuda/decode/tiles.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "cuda/common/tensor_map.h"
#include "cuda/passes/forward.h"
#include "kernels/decode/layout.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

constexpr int kSwizzledRows = 8;
/// Keys of a box: with more, memory would close the rows before their next panel is read.
constexpr int kMaxBoxKeys = 16;
constexpr int kMaxWarps = 8;        ///< of a CTA, that compute
constexpr int kMaxRowBlocks = 4;    ///< that share the keys of wide heads
constexpr int kWideBlockKeys = 64;  ///< of tiles of wide heads
/// Bits of codes in K and V of a key, up to which tiles have 64 keys, and up to which CTAs have 12
/// warps.
constexpr int kMaxBitsOfLargeTiles = 1024, kMaxBitsOfManyWarps = 512;
constexpr int kMaxStages = 8;  ///< of a CTA that reads several heads together
/// Keys of a CTA, from which on it reads several heads together.
constexpr int64_t kMinKeysOfHeads = 1024;
/// The keys of a box, which lie in one page; 0 where TMA cannot load K and V.
int box_keys_of(const Problem& p, int block_keys, int max_keys = kMaxBoxKeys) {
  const int page = static_cast<int>(p.cache.page);
  const int box = std::gcd(std::gcd(page, block_keys), max_keys);
  const ForwardShapes maps = forward_shapes(p, box);
  for (const TensorShape* shape : {&maps.k, &maps.v}) {
    if (!rows_unsupported(*shape).empty() || !not_addressable(*shape).empty()) return 0;
  }
  // Boxes begin where the pattern of the swizzle does.
  return page > 0 && (p.has(Arg::kLeftpadK) || box % kSwizzledRows != 0) ? 0 : box;
}

/// Lets TMA load codes where it can, in boxes of up to so many keys, all of one page.
void set_boxes_of_codes(DecodePlan& plan, const Problem& p, int keys) {
  constexpr int kBoxStart = 16;  // bytes, at multiples of which boxes begin
  if (!features_of(plan.card.target).has_tma) return;
  DecodePlan boxed = plan;
  boxed.k_piece = piece_of(p.dtypes.k, plan.head_dim, p.k, !plan.copies_k.empty(), Copies::kBoxes);
  boxed.v_piece = piece_of(p.dtypes.v, plan.value_dim, p.v, !plan.copies_v.empty(), Copies::kBoxes);
  for (const int piece : {boxed.k_piece, boxed.v_piece})
    if (piece > kernels::kMiddle && piece < kBoxStart) return;
  boxed.box_keys = std::gcd(static_cast<int>(p.cache.page), keys);
  if (boxed.box_keys % kSwizzledRows != 0 || (plan.page > 0 && p.has(Arg::kLeftpadK))) return;
  for (const TensorShape& shape : box_shapes(p, boxed, boxed.box_keys)) {
    if (!rows_unsupported(shape).empty() || !not_addressable(shape).empty()) return;
  }
  plan = boxed;
}

/// Whether rows of K or V are short and cross lines of L2: warps that compute copy them faster
/// than TMA does.
bool short_blocks(const DecodePlan& plan, const Problem& p) {
  const auto is_short = [](DType dtype, int dim) { return dtype == DType::kQ8_0 && dim <= 64; };
  return is_short(p.dtypes.k, plan.head_dim) || is_short(p.dtypes.v, plan.value_dim);
}

/// How many kv heads a CTA reads together: their rows of a key lie side by side, and so do their
/// scales, so that TMA loads them as one row. 1: it cannot.
int heads_together(const DecodePlan& plan, const Problem& p) {
  constexpr int kMaxHeads = 8, kMinHeads = 4, kMaxBoxBytes = 2048, kMaxRowBytes = 144;
  constexpr int kMinPageOfScales = 64;
  // Longer rows are whole lines of memory, which are as fast by one head.
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
  // One head is faster where it has more than 128 columns and scales take long, and where lanes
  // would have to find the scales of small pages, or zero points of any pages.
  if (std::max(plan.head_dim, plan.value_dim) > 128 &&
      ((!blocks && !zero_points) || rows_of_kv_head(p) > 8))
    return 1;
  if (plan.page > 0 && !blocks && (zero_points || plan.page < kMinPageOfScales)) return 1;
  if (!features_of(plan.card.target).has_tma || plan.copies()) return 1;
  if (plan.page > 0 && (p.has(Arg::kLeftpadK) || p.cache.page % kSwizzledRows != 0)) return 1;
  const auto whole = [&](DType dtype, int dim, int64_t columns, const Layout& strides, int heads) {
    const int row = kernels::code_row_bytes(element_of(dtype), dim), all = heads * row;
    const int piece = piece_of(dtype, dim, strides, false, Copies::kBoxes);
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

/// Bits of K and V of a key.
int code_bits(const DecodePlan& plan) {
  return plan.head_dim * kernels::bits_of(element_of(plan.stored.k)) +
         plan.value_dim * kernels::bits_of(element_of(plan.stored.v));
}

/// Whether codes have 8 bits and at most one scale of a key.
bool converts_simply(const DecodePlan& plan) {
  return code_bits(plan) >= 8 * (plan.head_dim + plan.value_dim) &&
         std::max(plan.k_scales, plan.v_scales) <= 1;
}

/// Bc.
int block_keys_of(const DecodePlan& plan, const Problem& p) {
  const int dim = std::max(plan.head_dim, plan.value_dim);
  const auto halves = static_cast<int>(dim * size_of(plan.stored.k) / 2);  // of 16 bits in a row
  const int keys_of_warp = halves <= 64 ? 32 : halves <= 256 ? 16 : 8;
  const int keys = std::min(keys_of_warp * plan.warps_per_group, dim <= 128 ? 64 : 32);
  if (plan.has_codes() && plan.warps_per_group >= kernels::kWarpgroupWarps) {
    // Registers suffice for large tiles without factors of keys, or with few columns.
    const bool few_registers =
        (dim > 64 && plan.k_scales + plan.v_scales > 0) || plan.tree || plan.scores_hide();
    const bool large = (plan.warps_per_group == kMaxWarps || dim <= 64) && !few_registers;
    return dim > 128 ? 32 : large ? 128 : 64;
  }
  if (plan.has_codes()) {
    // One ldmatrix loads 32 keys. Tiles have 64 where these are few bytes and registers are left:
    // not with many rows, nor with 12 warps and several scales of a key. Rows of blocks take long
    // to load, so that more buffers gain more.
    const auto has_blocks = [](DType dtype) { return kernels::is_block(element_of(dtype)); };
    const bool blocks = has_blocks(plan.stored.k) || has_blocks(plan.stored.v);
    const bool narrow = dim <= 64 && (code_bits(plan) > kMaxBitsOfManyWarps ||
                                      std::max(plan.k_scales, plan.v_scales) > 1);
    const bool many = code_bits(plan) <= kMaxBitsOfLargeTiles && plan.tile_rows <= 8;
    return many && !blocks && !narrow ? 64 : 32;
  }
  if (!plan.warpgroup_path()) return keys;
  // Loads keep up with the products of large tiles, except by lanes that look up pages. Shared
  // memory has room for six buffers of a large tile or more, so that V does not wait for one. A
  // word of a tree mask has bits for 64 keys.
  const int large = dim <= 128 ? 128 : dim <= 192 ? 64 : 48;
  const bool by_boxes = box_keys_of(p, large) > 0;
  const bool keeps_up = by_boxes || (dim <= 128 && plan.page == 0);
  // The widest heads leave no registers for windows and transformed scores where lanes copy.
  // Invariant calls have the same tile wherever keys lie.
  const bool more_scores = plan.transforms_scores || plan.has_left || plan.scores_hide();
  const bool no_registers = more_scores && (p.invariant || !by_boxes);
  if (dim > 128 && (plan.tree || no_registers)) return 16;
  // Registers are as scarce where TMA loads pages and q is read by elements.
  const bool elements = !plan.q_whole && plan.page > 0 && by_boxes;
  if (dim > 240 && elements && plan.warps_per_group < kMaxWarps) return 16;
  const bool small = plan.tree || plan.scores_hide();  // no registers for more
  return plan.warps_per_group == kMaxWarps && !small && keeps_up ? large : keys;
}

/// A plan whose warpgroups convert codes of K and V to operands in registers, where it can compute
/// the call: three of them, which take turns at it and at products, or two.
std::optional<DecodePlan> of_registers(DecodePlan plan, const Problem& p, const Card& card) {
  constexpr int kMaxRows = 32, kUnaligned = 2;
  // Columns of a product with V^T, and the fewest of a scale.
  constexpr int kStripColumns = 64, kGroupColumns = 32;
  const auto takes = [](DType dtype, int dim, int scales, bool zero_point) {
    return dim % kStripColumns == 0 && (scales <= 1 || dim / scales % kGroupColumns == 0) &&
           (!zero_point || dtype == DType::kInt8 || dtype == DType::kInt4);
  };
  // The four warps of a warpgroup share the columns of V evenly.
  const bool uneven = kernels::bits_of(element_of(plan.stored.v)) == 4 && plan.value_dim == 192;
  if (rows_of_kv_head(p) > kMaxRows || uneven ||
      !takes(plan.stored.k, plan.head_dim, plan.k_scales, plan.k_zero_point) ||
      !takes(plan.stored.v, plan.value_dim, plan.v_scales, plan.v_zero_point))
    return {};
  plan.tile_rows = kMaxRows;
  plan.block_keys = 64;
  set_boxes_of_codes(plan, p, plan.block_keys);
  // Lanes read words of rows of blocks.
  for (const int piece : {plan.k_piece, plan.v_piece})
    if (piece == kUnaligned) return {};
  for (plan.warp_groups = 3; plan.warp_groups > 1; --plan.warp_groups) {
    for (int stages = kMaxStages; stages >= plan.warp_groups; --stages) {
      plan.k_stages = plan.v_stages = stages;
      plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
      if (plan.shared_bytes <= card.shared_bytes) return plan;
    }
  }
  return {};
}

/// Chooses the number of warp groups where codes are converted, of the warps that do, and buffers
/// of K, of V and of codes: as many of codes that memory is never idle while others are converted.
void set_buffers_of_codes(DecodePlan& plan, const Problem& p, const Card& card) {
  constexpr int kFewConvertWarps = 4, kManyConvertWarps = 8;
  const int dim = std::max(plan.head_dim, plan.value_dim);
  // A lane that looks up the page of each of its keys has no registers for one of more warps.
  const bool ids = dim <= 128 && plan.page > 0 && (plan.page % 16 != 0 || p.has(Arg::kLeftpadK));
  const bool fast = dim > 64 ? !plan.converts_long() : converts_simply(plan);
  const bool few = plan.warps_per_group == kMaxWarps || fast || ids;
  plan.convert_warps = few ? kFewConvertWarps : kManyConvertWarps;
  // Lanes load words of rows of blocks.
  const auto in_words = [](DType dtype, const Layout& strides) {
    return bytes_of(dtype, strides.head) % 4 == 0;
  };
  const bool has_words = in_words(p.dtypes.k, p.k) && in_words(p.dtypes.v, p.v);
  const auto fits = [&](int k, int v, int codes) {
    if (has_words)
      set_boxes_of_codes(plan, p, 2 * plan.block_keys * plan.warp_groups / plan.convert_warps);
    plan.k_stages = k;
    plan.v_stages = v;
    plan.code_stages = codes;
    plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
    return plan.shared_bytes <= card.shared_bytes;
  };
  // With twice as many warps that convert, registers suffice for one warp group of more than 128
  // columns.
  plan.warp_groups = dim > 128 && !few ? 1 : kMaxWarps / plan.warps_per_group;
  if (plan.warp_groups == 1 && dim > 128) plan.block_keys = 64;
  for (;;) {
    // A lane that copies many scales remembers few stages of them.
    const int keys_of_warp = 2 * plan.block_keys * plan.warp_groups / plan.convert_warps;
    for (int codes = keys_of_warp > 64 ? 4 : 6; codes >= 2; --codes)
      if (fits(2, 2, codes)) return;
    if (plan.block_keys > (dim > 128 ? 32 : 64)) {
      plan.block_keys /= 2;
      continue;
    }
    if (fits(2, 1, 2) || fits(1, 1, 3) || fits(1, 1, 2) || plan.warp_groups == 1) return;
    plan.warp_groups /= 2;
  }
}

/// Bytes of shared memory for each of so many CTAs of an SM.
int room_of_cta(const Card& card, int residents) {
  return card.shared_bytes / residents - features_of(card.target).reserved_bytes * (residents - 1);
}

/// Chooses the number of warp groups, and as many buffers of K and V as fit into shared memory;
/// where not even two do with one warp group, the plan does not fit the card.
void set_buffers(DecodePlan& plan, const Card& card) {
  const bool boxes = plan.box_keys > 0 && std::max(plan.head_dim, plan.value_dim) <= 64;
  const bool many = plan.has_codes() && plan.tile_rows <= 8 && plan.residents == 1 &&
                    (boxes || code_bits(plan) <= kMaxBitsOfManyWarps);
  plan.warp_groups = (many ? 12 : kMaxWarps) / plan.warps_per_group / plan.residents;
  // Buffers of K and V together. The warp path has equally many of both.
  const int max_buffers = plan.warpgroup_path() || plan.has_codes() ? 10 : 6,
            step = plan.warpgroup_path() ? 1 : 2;
  const int room = room_of_cta(card, plan.residents);
  const auto set = [&](int count) {
    plan.k_stages = (count + 1) / 2;
    plan.v_stages = count / 2;
    plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
    return count;
  };
  int buffers = set(max_buffers);
  while (plan.shared_bytes > room && (buffers > 4 || plan.warp_groups > 1)) {
    if (buffers == 4) plan.warp_groups /= 2;
    buffers = set(buffers == 4 ? max_buffers : buffers - step);
  }
}

/// Whether warpgroups compute wide heads: TMA loads these.
bool takes_warpgroups(const DecodePlan& plan, const Problem& p) {
  return features_of(plan.card.target).has_wgmma && !exceeds_16_bits(plan.dtypes) &&
         box_keys_of(p, kWideBlockKeys, kWideBlockKeys) > 0;
}

/// A plan with the tile of wide heads for warpgroups: one ring of tiles of K and V, as many as
/// shared memory holds.
DecodePlan with_wide_warpgroups(DecodePlan plan, const Problem& p, const Card& card) {
  constexpr int kColumns = 128;  // of V: a panel for each warpgroup
  plan.column_groups = 2;
  plan.warp_groups = 1;
  plan.warps_per_group = kernels::kWarpgroupWarps;
  plan.residents = 1;
  plan.tile_rows = plan.block_rows();
  plan.value_dim = (plan.value_dim + kColumns - 1) / kColumns * kColumns;
  plan.whole_columns = false;
  plan.block_keys = kWideBlockKeys;
  plan.box_keys = box_keys_of(p, plan.block_keys, plan.block_keys);
  // More blocks of rows of a kv head have CTAs of their own only where they are many.
  const int blocks = ceil_div(rows_of_kv_head(p), plan.block_rows());
  plan.row_blocks = blocks <= kMaxRowBlocks ? std::max(blocks, 1) : 1;
  plan.grid = std::clamp(card.sms / plan.row_blocks, 1, int{kernels::kMaxSlices});
  for (plan.k_stages = kMaxStages; plan.k_stages > 1; --plan.k_stages) {
    plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
    if (plan.shared_bytes <= card.shared_bytes) break;
  }
  return plan;
}

/// A plan with the tile of several heads together: a warp for each head and tile of keys.
DecodePlan of_heads(DecodePlan plan, const Problem& p, const Card& card, int heads) {
  const int64_t rows = rows_of_kv_head(p);
  const int dim = std::max(plan.head_dim, plan.value_dim);
  const bool few = rows <= 8, zero_points = plan.k_zero_point || plan.v_zero_point;
  plan.heads = plan.warps_per_group = heads;
  plan.residents = 1;
  plan.tile_rows = heads * (rows <= 4 ? 4 : few ? 8 : 16);
  plan.group *= heads;
  plan.k_piece = piece_of(p.dtypes.k, plan.head_dim, p.k, false, Copies::kBoxes);
  plan.v_piece = piece_of(p.dtypes.v, plan.value_dim, p.v, false, Copies::kBoxes);
  plan.grid = std::min(card.sms, int{kernels::kMaxSlices});
  // Twice as many warps where registers suffice.
  plan.warp_groups = (few && dim <= 64 && !zero_points ? 2 : 1) * kMaxWarps / heads;
  const auto fits = [&](int keys, int stages) {
    plan.block_keys = keys;
    plan.box_keys = std::gcd(static_cast<int>(p.cache.page), keys);
    plan.k_stages = plan.v_stages = stages;
    plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
    return plan.shared_bytes <= card.shared_bytes;
  };
  // Each warp group has equally many buffers.
  const int step = plan.warp_groups, min_stages = std::max(step, 2);
  const bool more_keys = few && dim <= 128 && !(zero_points && dim > 64) && fits(64, min_stages);
  const int keys = more_keys ? 64 : 32;
  int stages = min_stages;
  while (stages + step <= kMaxStages && fits(keys, stages + step)) stages += step;
  fits(keys, stages);
  return plan;
}

/// A plan with the tile of the wide path that has all rows of a kv head, else the largest.
DecodePlan with_wide_tile(DecodePlan plan, const Problem& p, const Card& card) {
  constexpr int kMaxBuffers = 128 << 10, kMinStages = 2, kFewStages = 3;
  constexpr int kChunkBytes = 16 << 10, kLargeChunkBytes = 32 << 10;
  struct Tile {
    int rows, strips, shares, keys;
  };
  // Warps of 32 rows use what they load from shared memory for twice as many rows, and with 128
  // keys they use Q for twice as many keys.
  constexpr Tile kTiles[] = {{64, 2, 4, 128}, {64, 2, 4, 64}, {32, 1, 4, 64}, {16, 1, 8, 128}};
  const int64_t rows = rows_of_kv_head(p);
  plan.warps_per_group = kMaxWarps;
  plan.warp_groups = plan.residents = 1;
  plan.grid = std::min(card.sms, int{kernels::kMaxSlices});
  const auto fits = [&](int stages) {
    plan.k_stages = plan.v_stages = stages;
    plan.shared_bytes = kernels::decode_layout(decode_tile(plan)).bytes;
    return plan.shared_bytes <= card.shared_bytes;
  };
  for (const Tile& tile : kTiles) {
    // Words of a tree mask have the bits of 64 keys. They, and windows of transformed scores, leave
    // no registers for 32 rows, and a bias none for as many keys.
    if (plan.tree && tile.keys > 64) continue;
    if (tile.strips > 1 && (plan.tree || (plan.transforms_scores && plan.has_left))) continue;
    if (tile.strips > 1 && tile.keys > 64 && plan.scores_hide()) continue;
    const bool last = tile.rows == (plan.tree ? 32 : 16);
    if (rows <= tile.rows / 2 && !last) continue;
    plan.warp_strips = tile.strips;
    plan.column_shares = tile.shares;
    plan.block_keys = tile.keys;
    plan.tile_rows = tile.rows;
    int stages = 0;
    // Where products bind, large chunks take half the barriers.
    for (const int bytes : {kLargeChunkBytes, kChunkBytes}) {
      if (tile.strips == 1 && bytes > kChunkBytes) continue;
      plan.chunk_bytes = bytes;
      stages = std::min(kMaxBuffers / bytes, kernels::chunks_of_wide_tile(decode_tile(plan)));
      while (stages > kMinStages && !fits(stages)) --stages;
      if (fits(stages) && stages >= kFewStages) break;
    }
    if (fits(stages) || last) break;
  }
  return plan;
}

}  // namespace

DecodePlan with_tile(DecodePlan plan, const Problem& p, const Card& card, int warps,
                     int residents) {
  const int64_t rows = rows_of_kv_head(p);
  plan.warps_per_group = warps;
  plan.residents = residents;
  // The rows of a kv head depend on the batch, and an invariant call must not.
  const bool any_rows = warps > 1 || p.invariant;
  plan.tile_rows = any_rows ? plan.block_rows() : rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
  plan.block_keys = block_keys_of(plan, p);
  if (plan.has_codes() && warps >= kernels::kWarpgroupWarps) {
    plan.k_piece =
        piece_of(p.dtypes.k, plan.head_dim, p.k, !plan.copies_k.empty(), Copies::kInPlace);
    plan.v_piece =
        piece_of(p.dtypes.v, plan.value_dim, p.v, !plan.copies_v.empty(), Copies::kInPlace);
    if (const std::optional<DecodePlan> in_registers = of_registers(plan, p, card))
      plan = *in_registers;
    else
      set_buffers_of_codes(plan, p, card);
  } else {
    if (plan.has_codes()) {
      if (!short_blocks(plan, p)) set_boxes_of_codes(plan, p, plan.block_keys);
    } else if (plan.warps_per_group >= kernels::kWarpgroupWarps) {
      plan.box_keys = box_keys_of(p, plan.block_keys);
    }
    set_buffers(plan, card);
  }
  plan.grid = std::min(card.sms * residents, int{kernels::kMaxSlices});
  return plan;
}

std::vector<DecodePlan> tiles_of(const DecodePlan& common, const Problem& p, const Card& card) {
  const int64_t rows = rows_of_kv_head(p);
  const int dim = std::max(common.head_dim, common.value_dim);
  std::vector<DecodePlan> tiles;
  const auto add = [&](int warps, int residents = 1) {
    tiles.push_back(with_tile(common, p, card, warps, residents));
  };
  if (common.is_wide()) {
    return {takes_warpgroups(common, p) ? with_wide_warpgroups(common, p, card)
                                        : with_wide_tile(common, p, card)};
  }
  if (!common.has_wgmma()) {
    const auto fits = [&] {
      return tiles.back().shared_bytes <= room_of_cta(card, tiles.back().residents);
    };
    if (rows > 16 && dim <= 128) {
      add(2);
      if (fits()) return tiles;
      tiles.clear();
    }
    add(1);
    if (rows <= 16 && common.page > 0 && dim <= 128) {
      add(1, 2);
      if (!fits()) tiles.pop_back();
    }
    return tiles;
  }
  if (rows <= 16) add(1);
  if (rows <= 16 && common.page > 0 && dim <= 128) add(1, 2);
  if (common.has_codes()) {
    // Of more than 16 rows, warpgroups or warps that load convert codes of both K and V, for as
    // many rows as 128 where registers suffice: up to 128 columns. With more columns, few rows
    // meet codes of 8 bits with one scale faster on the warp path than where warps convert that
    // load.
    const bool both = is_low_bit(common.stored.k) && is_low_bit(common.stored.v);
    const bool simple = converts_simply(common);
    if (rows > 16 && both)
      add(rows <= kFewRows || dim > 128 ? kernels::kWarpgroupWarps : kMaxWarps);
    const bool converting = !tiles.empty() && tiles.back().convert_warps > 0;
    if (rows > 16 && (!both || (converting && rows <= 32 && dim > 128 && simple))) {
      tiles.clear();
      add(2);
    }
    const int heads = rows <= 16 ? heads_together(common, p) : 1;
    const int64_t keys = p.batch * p.sk * p.hk / heads;  // maximum of all CTAs
    if (heads > 1 && keys >= kMinKeysOfHeads * card.sms) {
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

}  // namespace fulgur::cuda::decode
