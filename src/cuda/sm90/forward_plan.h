#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "call/problem.h"
#include "cuda/common/executable.h"
#include "cuda/common/family.h"
#include "cuda/common/kernel_key.h"
#include "cuda/maps/tile_map.h"
#include "kernels/attention/bias_tile.h"
#include "kernels/host_device/work_tiles.h"
#include "kernels/sm90/forward/params.h"

namespace fulgur::cuda::sm90 {

/// The constants of kernel_config.h.
struct ForwardKey : AnyForwardKey {
  int consumers = 0;   ///< warpgroups of 64 rows each
  int block_keys = 0;  ///< Bc
  int q_stages = 0, k_stages = 0, v_stages = 0;
  int producer_registers = 0, consumer_registers = 0;
  int bias_terms = 0;          ///< of products that add the bias; 0: they do not
  bool pairs = false;          ///< K of a tile and V of the previous tile are loaded together
  bool mean_products = false;  ///< means of V are added by products of the tensor cores
  bool dropout = false;
  bool shares_blocks = false;  ///< the heads of a group share blocks of rows
  int box_keys = 0;            ///< keys of a TMA box, all of one page
  bool split_tail = false;
  enum class Store : uint8_t { kTiles, kRows, kElements };
  Store store = Store::kTiles;  ///< how O is stored
  bool fused_map = false;       ///< the map of tiles is fused; no device text depends on it

  template <class F>
  void for_each_field(const F& f) const {
    AnyForwardKey::for_each_field(f);
    f("kConsumers", consumers);
    f("kBlockKeys", block_keys);
    f("kQStages", q_stages);
    f("kKStages", k_stages);
    f("kVStages", v_stages);
    f("kBiasTerms", bias_terms);
    f("kPairs", pairs);
    f("kMeanProducts", mean_products);
    f("kProducerRegisters", producer_registers);
    f("kConsumerRegisters", consumer_registers);
    f("kDropout", dropout);
    f("kSharesBlocks", shares_blocks);
    f("kBoxKeys", box_keys);
    f("kSplitTail", split_tail);
    f("kStore", store);
    f("kEarlyStarts", (pairs && !bias_in_p()) || maps_tiles);
    f("kEvenBlocks", even_blocks());
  }
  bool operator==(const ForwardKey& o) const { return kernel_config(*this) == kernel_config(o); }

  /// Whether another kernel prepares V for products of e4m3 (kernels/sm90/forward/values.cuh).
  bool centers_v() const { return dtypes.v == DType::kE4M3; }
  /// How the kernel reads a bias of 16 bits (kernels/attention/bias_tile.h).
  bool bias_in_registers() const { return kernels::bias_in_registers(bias_tile(), consumers); }
  bool bias_in_p() const { return kernels::bias_in_p(bias_tile(), consumers, value_dim); }
  /// Whether rows of q may belong to no sequence.
  bool has_padding() const { return packed || seqused_q; }
  /// Whether blocks of rows are told how many there are, and have as many strips, or one less.
  bool even_blocks() const {
    return maps_tiles && !mask_bits && consumers == 3 && !(has_left || has_right || has_padding());
  }
  MapTiles map_tiles() const {
    return {.block_strips = mask_bits ? consumers : 1,
            .block_keys = block_keys,
            .early_starts = true,
            .method = fused_map ? MapMethod::kFused : MapMethod::kSeparate};
  }
};

/// How it is launched.
struct ForwardLaunch {
  int shared_bytes = 0;
  int residents = 1;     ///< CTAs that fit an SM
  bool shares = false;   ///< whether there are so many CTAs that some share an SM
  kernels::Work work{};  ///< how rows, heads and keys are cut into q tiles
  int grid = 0;          ///< CTAs
  bool operator==(const ForwardLaunch&) const = default;
};

/// Every decision about a forward pass by sm90/forward/forward.cu.
struct ForwardPlan : ForwardKey, ForwardLaunch {
  /// Why q, k, v and the bias are copied to where TMA can address them; empty where they are not.
  std::string copies_q, copies_k, copies_v, copies_bias;
  std::optional<DType> widens_v;  ///< the copy of v is of f16, where v has these codes
  bool operator==(const ForwardPlan&) const = default;

  TileId tile() const {
    return {mask_bits ? "sm90_forward_bits" : "sm90_forward", block_rows(), block_keys};
  }
  /// Whether there are copies of the tensors' own dtypes.
  bool copies() const {
    return !(copies_q + copies_k + copies_bias).empty() || (!copies_v.empty() && !widens_v);
  }
  int block_rows() const { return 64 * consumers; }  ///< Br
  /// Heads that share blocks of rows.
  int block_heads(const Problem& p) const {
    return shares_blocks ? static_cast<int>(p.group()) : 1;
  }
  int threads() const { return 128 * (consumers + 1); }
  /// Floats of the partial results of split blocks.
  int64_t partial_floats() const;
  /// Counters that are zero between launches: two of the scheduler, and the tickets of split
  /// blocks.
  int counters() const;
};

/// Offsets in the workspace, in bytes, after the counters and tickets. All are 0 if nothing is
/// launched.
struct ForwardWorkspace : CallWorkspace {
  int64_t partial = 0;                                     ///< partial results of split blocks
  std::array<int64_t, 4> copies{};                         ///< copies of q, k, v and the bias
  int64_t image = 0, means = 0, mean_steps = 0, sums = 0;  ///< V prepared for products of e4m3
};
ForwardWorkspace workspace_of(const Problem& problem, const ForwardPlan& plan);

/// The layout of V prepared for products of e4m3, without addresses.
CenteredValues centered_values(const Problem& problem, const ForwardPlan& plan);

/// For forward_shapes(), where a result does not depend on the keys of a tile.
constexpr int kAnyBlockKeys = 64;

/// The plan in sentences and as data.
Explanation describe(const ForwardPlan& plan);

}  // namespace fulgur::cuda::sm90
