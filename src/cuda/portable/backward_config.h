#pragma once

#include <cstdint>

#include "cuda/common/backward.h"
#include "kernels/portable/backward/layout.h"

namespace fulgur::cuda::portable {

/// What kernel_config.h fixes at compile time of portable/backward/keys.cu.
struct BackwardKey : AnyBackwardKey {
  int key_warps = 0;             ///< that share the keys; a second one has the same keys
  int stages = 0;                ///< buffers of Q and dO
  bool whole_columns = false;    ///< d and dv are head_dim and value_dim
  bool stores_matrices = false;  ///< P and dS are stored by matrices
  bool whole_heads = false;      ///< a CTA has all key blocks of a kv head (FlashAttention)
  bool splits_heads = false;     ///< several CTAs share the q heads of a key block

  template <class F>
  void for_each_field(const F& f) const {
    AnyBackwardKey::for_each_field(f);
    f("kKeyWarps", key_warps);
    f("kStages", stages);
    f("kDsStages", ds_stages());
    f("kWholeColumns", whole_columns);
    f("kStoresMatrices", stores_matrices);
    f("kWholeHeads", whole_heads);
    f("kSplits", splits_heads);
  }
  bool operator==(const BackwardKey& o) const { return kernel_config(*this) == kernel_config(o); }

  /// Buffers of P and dS: with two a step takes one barrier, if the next step is there by then.
  int ds_stages() const { return stages > 2 ? 2 : 1; }
  int threads() const { return 2 * 32 * key_warps; }
  kernels::PortableBackwardLayout layout() const {
    return kernels::portable_backward_layout(
        {operands_of(*this), head_dim, value_dim, block_rows, block_keys, stages, ds_stages()});
  }
};

/// Every decision about a backward pass by portable/backward/keys.cu.
struct BackwardPlan : BackwardKey, AnyBackwardPlan {
  int shared_bytes = 0;
  kernels::BlockSchedule key_blocks{};  ///< a CTA for each, or for all of a kv head
  bool operator==(const BackwardPlan&) const = default;

  TileId tile() const;
  int64_t ctas() const {
    return int64_t{whole_heads ? 1 : key_blocks.blocks} * key_blocks.batch_heads;
  }
};

}  // namespace fulgur::cuda::portable
