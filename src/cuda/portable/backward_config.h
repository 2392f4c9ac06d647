#pragma once

#include <cstdint>

#include "cuda/passes/backward.h"
#include "kernels/portable/backward/layout.h"

namespace fulgur::cuda::portable {

/// The constants of kernel_config.h of portable/backward/keys.cu and keys_wide.cu.
struct BackwardKey : AnyBackwardKey {
  int warps = 0;
  int roles = 0;                 ///< 2: half of the warps compute P and dV, the others dS and dK
  int stages = 0;                ///< buffers of Q and dO
  int ds_stages = 0;             ///< buffers of P and dS
  bool whole_columns = false;    ///< d = head_dim and dv = value_dim: no columns are padded
  bool stores_matrices = false;  ///< P and dS are stored by stmatrix
  bool whole_heads = false;      ///< a CTA computes all key blocks of a kv head (FlashAttention)
  bool splits_heads = false;     ///< several CTAs share the q heads of a key block
  bool dk_first = false;         ///< with two roles: dK of a step comes before its dQ

  template <class F>
  void for_each_field(const F& f) const {
    AnyBackwardKey::for_each_field(f);
    f("kWarps", warps);
    f("kRoles", roles);
    f("kStages", stages);
    f("kDsStages", ds_stages);
    f("kWholeColumns", whole_columns);
    f("kStoresMatrices", stores_matrices);
    f("kWholeHeads", whole_heads);
    f("kSplits", splits_heads);
    f("kDkFirst", dk_first);
  }
  bool operator==(const BackwardKey& o) const { return kernel_config(*this) == kernel_config(o); }

  int threads() const { return 32 * warps; }
  /// The kernel by keys computes 2^p_log2 P. Warps of one role pass P to the other role as f16, in
  /// which 2^12 P is a normal number for P >= 2^-26.
  double p_log2() const { return roles == 2 && dtypes.out == DType::kBF16 ? 12 : 0; }
  kernels::PortableBackwardLayout layout() const {
    return kernels::portable_backward_layout(
        {operands_of(*this), head_dim, value_dim, block_rows, block_keys, stages, ds_stages});
  }
};

/// Every decision about a backward pass by portable/backward/keys.cu.
struct BackwardPlan : BackwardKey, AnyBackwardPlan {
  int shared_bytes = 0;
  kernels::BlockSchedule key_blocks{};  ///< each has a CTA, or all of a kv head have one
  bool operator==(const BackwardPlan&) const = default;

  TileId tile() const;
  int64_t ctas() const {
    return int64_t{whole_heads ? 1 : key_blocks.blocks} * key_blocks.batch_heads;
  }
};

}  // namespace fulgur::cuda::portable
