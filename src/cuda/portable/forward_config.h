#pragma once

#include <cstdint>
#include <string>

#include "cuda/common/family.h"
#include "cuda/common/kernel_key.h"
#include "cuda/maps/tile_map.h"
#include "kernels/host_device/work_tiles.h"
#include "kernels/portable/forward/layout.h"

namespace fulgur::cuda::portable {

/// The constants of kernel_config.h.
struct ForwardKey : AnyForwardKey {
  int strips = 0;       ///< strips of 64 rows per CTA
  int warp_strips = 0;  ///< strips per four warps: a warp has 16 rows of each
  int block_keys = 0;   ///< Bc
  int stages = 0;       ///< buffers of K and V
  bool q_in_registers = false;
  int q_kept = 0;              ///< steps of 16 columns of Q that are kept in registers, too
  int residents = 1;           ///< CTAs that fit an SM
  bool whole_columns = false;  ///< d = head_dim and dv = value_dim: no columns are padded
  bool dropout = false;
  /// How O is stored, as numbered in attention/output.cuh.
  enum class Store : uint8_t { kRows = 1, kElements = 2 };
  Store store = Store::kRows;

  template <class F>
  void for_each_field(const F& f) const {
    AnyForwardKey::for_each_field(f);
    f("kStrips", strips);
    f("kWarpStrips", warp_strips);
    f("kBlockKeys", block_keys);
    f("kStages", stages);
    f("kQInRegisters", q_in_registers);
    f("kQKept", q_kept);
    f("kResidents", residents);
    f("kWholeColumns", whole_columns);
    f("kDropout", dropout);
    f("kStore", store);
  }
  bool operator==(const ForwardKey& o) const { return kernel_config(*this) == kernel_config(o); }

  /// Whether rows of q may belong to no sequence.
  bool has_padding() const { return packed || seqused_q; }
  kernels::PortableForwardLayout layout() const {
    return kernels::portable_forward_layout({operands_of(*this), head_dim, value_dim, strips,
                                             block_keys, stages, q_in_registers, dropout});
  }
  MapTiles map_tiles() const { return {.block_strips = strips, .block_keys = block_keys}; }
};

/// Every decision about a forward pass by portable/forward/forward.cu.
struct ForwardPlan : ForwardKey {
  int shared_bytes = 0;
  kernels::Work work{};  ///< how rows and heads are cut into q tiles, one for each CTA
  /// Why q, k and v are copied to rows of multiples of 16 bytes; empty where they are not.
  std::string copies_q, copies_k, copies_v;
  bool operator==(const ForwardPlan&) const = default;

  /// Tiles whose warps have 32 rows are named "portable_wide".
  TileId tile() const {
    return {warp_strips > 1 ? "portable_wide" : "portable_forward", block_rows(), block_keys};
  }
  bool copies() const { return !(copies_q + copies_k + copies_v).empty(); }
  int block_rows() const { return kernels::kStripRows * strips; }  ///< Br
  int threads() const { return 128 * strips / warp_strips; }
};

}  // namespace fulgur::cuda::portable
