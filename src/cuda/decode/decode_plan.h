#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/executable.h"
#include "cuda/common/family.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/passes/forward.h"
#include "kernels/decode/layout.h"

namespace fulgur::cuda::decode {

/// Which CTA computes which keys: the types in src/kernels/decode/schedule/.
enum class DecodeSchedule {
  kStreamK,              ///< equal slices of all q blocks laid end to end
  kStreamKOrRoundRobin,  ///< whole q blocks in turn where lengths make that as even as slices
  kDynamic,              ///< q blocks by the dynamic scheduler, the longest first
  kSplitToFill,          ///< few q blocks, split into about as many splits as there are CTAs
  kInvariantSplits,      ///< splits that depend on nothing but the q block's own keys
};

/// What kernel_config.h fixes at compile time.
struct DecodeKey : AnyForwardKey {
  OperandTypes stored;             ///< in memory, where k and v, and with them q, may have codes
  int k_scales = 0, v_scales = 0;  ///< of a key; 0: a sequence and kv head has one scale
  bool k_zero_point = false, v_zero_point = false;
  /// The types of those scales and zero points; f32 where a sequence and kv head has one.
  DType k_scale_type = DType::kF32, v_scale_type = DType::kF32;
  DType k_zero_point_type = DType::kF32, v_zero_point_type = DType::kF32;
  /// How rows of blocks are copied (kernels/decode/layout.h): by pieces of 4, 8 or 16 bytes, 2 or
  /// kernels::kMiddle; 0: there are no blocks.
  int k_piece = 0, v_piece = 0;
  int heads = 1;                   ///< kv heads that a CTA reads together, a warp for each
  int warps_per_group = 0;         ///< of 16 rows each, but on the wide path
  int column_shares = 1;           ///< the wide path: warps that share rows, each with some columns
  int warp_strips = 1;             ///< the wide path: times 16 rows that these have
  int chunk_bytes = 0;             ///< the wide path: of a chunk of K or V
  int warp_groups = 0;             ///< of a CTA, with tiles of their own
  int block_keys = 0;              ///< Bc
  int k_stages = 0, v_stages = 0;  ///< buffers of a warp group
  int code_stages = 0;             ///< of codes, on the warpgroup path
  int convert_warps = 0;           ///< that convert these; 0: no warps do
  int column_groups = 1;           ///< warpgroups that share tiles, each with columns of O
  int box_keys = 0;                ///< keys of a box that TMA loads; 0: lanes copy rows
  int residents = 0;               ///< CTAs of an SM
  int tile_rows = 0;               ///< rows of a block that a kv head may have
  int row_blocks = 1;              ///< blocks of rows, of CTAs that compute them over the same keys
  int group = 0;                   ///< hq / hk
  DecodeSchedule schedule = DecodeSchedule::kStreamK;
  int lane_sequences = 1;  ///< kSplitToFill: sequences whose splits each lane computes
  int combine_eights = 1;  ///< times eight columns that a warp of combine.cu takes of fragments
  bool q_whole = false, o_whole = false;  ///< rows of multiples of 16 bytes
  bool whole_columns = false;             ///< d and dv are computed as they are
  bool appends = false;                   ///< appends new rows of K and V before it attends
  bool rotates_q = false;                 ///< and rotates q
  bool unread_rows = false;               ///< perhaps no CTA reads some of the new rows

  /// The type of the schedule, as device text names it.
  std::string schedule_type() const;

  template <class F>
  void for_each_field(const F& f) const {
    AnyForwardKey::for_each_field(f);
    f("kStoredQ", stored.q);
    f("kStoredK", stored.k);
    f("kStoredV", stored.v);
    f("kKScales", k_scales);
    f("kVScales", v_scales);
    f("kKZeroPoint", k_zero_point);
    f("kVZeroPoint", v_zero_point);
    f("kKScaleType", k_scale_type);
    f("kVScaleType", v_scale_type);
    f("kKZeroPointType", k_zero_point_type);
    f("kVZeroPointType", v_zero_point_type);
    f("kKPiece", k_piece);
    f("kVPiece", v_piece);
    f("kHeads", heads);
    f("kWarpsPerGroup", warps_per_group);
    f("kColumnShares", column_shares);
    f("kWarpStrips", warp_strips);
    f("kChunkBytes", chunk_bytes);
    f("kWarpGroups", warp_groups);
    f("kBlockKeys", block_keys);
    f("kKStages", k_stages);
    f("kVStages", v_stages);
    f("kCodeStages", code_stages);
    f("kConvertWarps", convert_warps);
    f("kColumnGroups", column_groups);
    f("kBoxKeys", box_keys);
    f("kResidents", residents);
    f("kTileRows", tile_rows);
    f("kRowBlocks", row_blocks);
    f("kGroup", group);
    f("FULGUR_SCHEDULE", schedule_type());
    f("kCombineEights", combine_eights);
    f("kQWhole", q_whole);
    f("kOWhole", o_whole);
    f("kWholeColumns", whole_columns);
    f("kAppends", appends);
    f("kRotatesQ", rotates_q);
    f("kUnreadRows", unread_rows);
  }
  bool operator==(const DecodeKey& o) const { return kernel_config(*this) == kernel_config(o); }

  /// Whether k or v has codes.
  bool has_codes() const { return is_low_bit(stored.k) || is_low_bit(stored.v); }
  /// Whether the call also zeros rows of out that belong to no sequence.
  bool has_padding() const { return (packed || seqused_q) && few_queries == 0; }
};

/// Every decision about a forward pass by the kernels of decode/.
struct DecodePlan : DecodeKey {
  Card card;  ///< for which it was made
  int shared_bytes = 0;
  int grid = 0;                        ///< CTAs of a block of rows
  int max_splits = 1, split_rows = 0;  ///< of a q block
  double cycles = 0;                   ///< predicted, where all sequences have sk keys
  double expected_cycles = 0;          ///< predicted, where their lengths may differ
  bool memory_binds = true;            ///< predicted; else the products bind
  /// Why k and v are copied to rows of multiples of 16 bytes; empty where they are not.
  std::string copies_k, copies_v;
  bool operator==(const DecodePlan&) const = default;

  TileId tile() const {
    return {has_wgmma() ? "sm90_decode" : "portable_decode", block_rows(), block_keys};
  }
  /// Whether the warpgroup path computes the call on the card: wgmma multiplies no f32, and its
  /// warps hold whole rows of O.
  bool has_wgmma() const {
    return features_of(card.target).has_wgmma && !exceeds_16_bits(dtypes) &&
           (!is_wide() || is_wide_by_warpgroups());
  }
  /// Whether a wide path computes the call: a warp has no registers for a whole row of O.
  bool is_wide() const { return std::max(head_dim, value_dim) > kMaxDim; }
  /// Whether it is that of warpgroups (decode_wide_warpgroup.cu); else decode_wide.cu's.
  bool is_wide_by_warpgroups() const { return column_groups > 1; }
  int block_rows() const { return 16 * warp_strips * warps_per_group / column_shares; }  ///< Br
  /// Whether it is decode_warpgroup.cu's (wgmma); else decode_warp.cu's or decode_codes.cu's
  /// (mma.sync).
  bool warpgroup_path() const;
  /// Whether it is decode_codes_warpgroup.cu's.
  bool converts_in_registers() const;
  /// Whether codes of K or V take more than a conversion of each pair to become f16.
  bool converts_long() const;
  int threads() const;
  bool copies() const { return !(copies_k + copies_v).empty(); }
  int split_floats() const;
  /// Whether decode/combine.cu combines the splits of q blocks, not the last CTA at each.
  bool has_combine_kernel() const;
  /// Whether the number of splits is computed before the splits are, so that these have a place in
  /// the workspace by their number.
  bool counts_splits() const;
  /// How many warps of decode/combine.cu a q block takes.
  int combine_warps() const;
  /// Counters that are zero between launches.
  int counters() const { return 4 * ctas() + 1; }
  int ctas() const { return grid * row_blocks; }
  /// Rows of a q block.
  int q_block_rows() const { return block_rows() * row_blocks; }
};

/// Why lanes cannot copy 16 bytes of each row of k or v at once; empty when they can.
std::string not_whole(const Layout& strides, DType dtype);

/// Rows of a kv head of the longest sequence that the decode kernels compute of a problem.
int64_t rows_of_kv_head(const Problem& problem);

/// Whether V is the first columns of K in a call of decode_wide_warpgroup.cu where both have the
/// same data.
bool may_have_v_in_k(const Problem& problem, const DecodeKey& plan);

/// A problem as a plan sees it: kv heads that a CTA reads together count as one.
Problem as_planned(Problem problem, const DecodeKey& plan);

/// The constants on which a kernel's map of shared memory depends.
kernels::DecodeTile decode_tile(const DecodeKey& key);

/// The shapes of q, k, v and out for loads and copies, for which codes of k and v are bytes.
ForwardShapes decode_shapes(const Problem& problem, int box_keys);

/// How rows of `dim` columns are copied (DecodeKey::k_piece). `copied`: they are copied to
/// multiples of 16 bytes first.
enum class Copies {
  kLanes,    ///< by lanes
  kBoxes,    ///< by TMA, if the result is 16 or kMiddle
  kInPlace,  ///< by lanes, and never kMiddle
};
int piece_of(DType dtype, int dim, const Layout& strides, bool copied, Copies by);

/// The shapes of the maps of K and V by which TMA loads a tile.
std::array<TensorShape, 2> box_shapes(const Problem& problem, const DecodePlan& plan, int box_keys);

/// The part of a plan that is the same for all plans of a problem and a card.
DecodePlan decode_common(const Problem& problem, const Card& card);

/// The byte offsets of the parts of the workspace, after the counters. All are 0 where nothing is
/// launched.
struct DecodeWorkspace : CallWorkspace {
  std::array<int64_t, 2> copies{};  ///< of k and v
  int64_t rotated = 0;              ///< q
  int64_t partial = 0;              ///< partial results of splits
};
DecodeWorkspace workspace_of(const Problem& problem, const DecodePlan& plan);

/// Why the kernel of a plan does not append the new rows of a problem itself; empty when it does.
std::string not_fused(const Problem& problem, const DecodePlan& plan);
/// The plan that does.
DecodePlan fused_plan(const Problem& problem, DecodePlan plan);

/// The plan of a problem in sentences and as data.
Explanation describe(const DecodePlan& plan, const Problem& problem);

}  // namespace fulgur::cuda::decode
