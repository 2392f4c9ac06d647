#pragma once

#include <array>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/executable.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/device/gpu.h"
#include "cuda/maps/tile_map.h"
#include "kernels/backward/params.h"

namespace fulgur::cuda {

// What the backward passes of all architectures have in common: the kernels of kernels/backward/,
// which prepare rows, round dQ and compute dsinks, and what all of their kernels are told.

using kernels::DqMethod;

/// What kernel_config.h fixes at compile time.
struct AnyBackwardKey : KernelKey {
  int block_rows = 0;  ///< Br
  int block_keys = 0;  ///< Bc
  DqMethod dq_method = DqMethod::kStored;
  int dq_parts = 0;          ///< semaphores of 64 rows of dQ, or of a row tile if that is smaller
  bool dq_by_fours = true;   ///< four sums of a thread are added at once
  bool early_starts = true;  ///< kernels start while the one before runs
  bool rounds_dq = false;    ///< the kernel by keys rounds dQ, too: of a short call
  bool dropout = false, has_dlse = false;
  bool key_gradients = true;       ///< dK and dV are computed
  bool f32_key_gradients = false;  ///< dK and dV are stored in f32
  bool elements = false;           ///< gradients are stored by elements
  bool makes_map = false;          ///< the kernel that prepares rows makes the map of tiles, too

  template <class F>
  void for_each_field(const F& f) const {
    KernelKey::for_each_field(f);
    f("kBlockRows", block_rows);
    f("kBlockKeys", block_keys);
    f("kDqMethod", dq_method);
    f("kDqParts", dq_parts);
    f("kDqByFours", dq_by_fours);
    f("kEarlyStarts", early_starts);
    f("kRoundsDq", rounds_dq);
    f("kPackedK", packed);
    f("kDropout", dropout);
    f("kHasDlse", has_dlse);
    f("kKeyGradients", key_gradients);
    f("kF32KeyGradients", f32_key_gradients);
    f("kElements", elements);
    f("kMakesMap", makes_map);
  }

  /// Whether dQ is added to dq_accum while dK and dV are computed, or dS is stored for it.
  bool accumulates_dq() const {
    return dq_method == DqMethod::kAtomic || dq_method == DqMethod::kOrdered;
  }
  bool stores_ds() const { return dq_method == DqMethod::kStored; }
  /// Whether gradients may need repair, since a mask hides what products touch.
  bool repairs() const { return has_left || has_right || scores_hide(); }
  int64_t dq_accum_floats(int64_t rows) const;  ///< of so many rows of all heads
};

/// What the problem fixes of a plan besides its key.
struct AnyBackwardPlan {
  /// Why tensors are copied to where they can be addressed; empty for those that are not.
  std::string copies_q, copies_k, copies_v, copies_dout, copies_bias;
  bool dsinks = false;      ///< the gradient of the sinks is wanted
  bool dbias = false;       ///< that of the bias is
  bool dtensors = false;    ///< those of tensors that score_mod indexes are
  int statistics_rows = 0;  ///< of a q head
  /// A kv head is computed in `splits` splits by different CTAs. Each has split_heads q heads of
  /// the group; row_splits of them have the same q heads and different rows.
  int splits = 1, split_heads = 1, row_splits = 1;
  bool operator==(const AnyBackwardPlan&) const = default;

  bool copies() const {
    return !(copies_q + copies_k + copies_v + copies_dout + copies_bias).empty();
  }
  /// Whether a kernel adds partial dK and dV of splits.
  bool reduces() const { return splits > 1; }
};

/// Where things begin in the workspace of any plan, in bytes, after the counters. All 0 where
/// nothing is launched.
struct AnyBackwardWorkspace : CallWorkspace {
  int64_t shift = 0, delta = 0;            ///< statistics of rows
  int64_t dq_accum = 0, dq_semaphore = 0;  ///< of plans that accumulate dQ
  int64_t partial_dk = 0, partial_dv = 0;  ///< for later CTAs, or reduction
  std::array<int64_t, 5> copies{};         ///< of q, k, v, dout and the bias
};
/// Takes all of it but the numbers of the host, with so many semaphores of dQ, and partial dK and
/// dV of so many keys.
AnyBackwardWorkspace backward_workspace(const Problem& problem, const AnyBackwardKey& key,
                                        const AnyBackwardPlan& plan, int64_t dq_semaphores,
                                        int64_t partial_keys, Arena& arena);

/// Of the mask and the lengths of a backward pass, what a map of its tiles depends on.
AnyForwardKey map_key(const AnyBackwardKey& key);
/// What kernels that add up parts of dK and dV depend on, of the key of those that compute them.
AnyBackwardKey reduce_key(const AnyBackwardKey& key);
inline MapTiles map_tiles(const AnyBackwardKey& key) {
  return {.block_rows = key.block_rows,
          .block_keys = key.block_keys,
          .by_keys = true,
          .by_rows_too = key.stores_ds() || key.dq_method == DqMethod::kOrdered,
          .early_starts = key.early_starts,
          .method = key.makes_map ? MapMethod::kPrepare : MapMethod::kSeparate};
}

/// Why no kernels compute a backward problem; empty where they do.
std::string backward_rejects(const Problem& problem);

void set_problem(const Problem& problem, AnyBackwardKey& key, AnyBackwardPlan& plan);

/// Adds to a plan what both have of it: splits, copies, dsinks, how gradients are stored.
void describe_backward(const AnyBackwardKey& key, const AnyBackwardPlan& plan, Explanation& to);

/// The kernels of kernels/backward/, with the fields of a key that their text depends on.
KernelUse prepare_kernel(const AnyBackwardKey& key);
KernelUse round_kernel(const AnyBackwardKey& key);
KernelUse sinks_kernel(const AnyBackwardKey& key);

/// What all kernels are told of a call in every run, without addresses. They compute 2^p_log2 P.
BackwardParams backward_params(const Problem& problem, const AnyBackwardKey& key,
                               const AnyBackwardPlan& plan, double p_log2);

/// Keys of a tile of dbias, and where dbias lies, and over which dimensions its elements are sums.
inline constexpr int kBiasGradientKeys = 64;
BiasSums bias_sums(const Problem& problem);
/// The kernel of dbias, of plans that compute it.
struct BiasGradientKernel {
  KernelUse use;
  int tile_rows = 0, threads = 0, sm_blocks = 0;  ///< rows of a tile; of a block; blocks of an SM
};

/// Adds the kernels that are not a family's alone. `rounds`: dQ of dq_accum is for them to round.
void add_backward_kernels(const AnyBackwardKey& key, const AnyBackwardPlan& plan, bool rounds,
                          const BiasGradientKernel& bias_gradient, std::vector<KernelUse>& kernels);

/// The kernels of kernels/backward/ on a device.
class RowKernels {
 public:
  RowKernels() = default;
  /// `rounds`: dQ of dq_accum is for them to round.
  RowKernels(const Problem& problem, const AnyBackwardKey& key, const AnyBackwardPlan& plan,
             bool rounds, Gpu& gpu);

  /// What comes before the kernels by keys, and dsinks.
  void launch_first(CUstream stream, const BackwardParams& params) const;
  /// dQ from dq_accum, if it is for them to round.
  void launch_last(CUstream stream, const BackwardParams& params) const;

 private:
  CUfunction prepare_ = nullptr, sinks_ = nullptr, round_ = nullptr;
  int row_chunks_ = 0, batch_heads_ = 0, round_threads_ = 0;
  Start start_ = Start::kAfterAll;              ///< of all but the first
  bool makes_map_ = false, maps_rows_ = false;  ///< with the first, the latter by rows, too
};

/// What the executables of all architectures do, besides.
class BackwardPassExecutable : public AttentionExecutable<BackwardArgs> {
 protected:
  /// `inputs`: as many of q, k, v, dout and the bias as kernels copy to shared memory. `rounds`: dQ
  /// of dq_accum is for the kernels of rows to round.
  BackwardPassExecutable(const Problem& problem, Gpu& gpu, Explanation explanation,
                         const AnyBackwardKey& key, const AnyBackwardPlan& plan,
                         const AnyBackwardWorkspace& workspace, int inputs, double p_log2,
                         bool rounds, const BiasGradientKernel& bias_gradient);

  /// What kernels are told in a run.
  BackwardParams arguments(const BackwardArgs& args, const Run& run, char* workspace) const;
  /// The map of tiles, if there is one, of which kernels are told.
  void launch_map(CUstream stream, char* workspace, BackwardParams& params) const;
  /// dbias, if it is wanted.
  void launch_bias_gradient(CUstream stream, const BackwardParams& params) const;

  BackwardParams params_{};  ///< what every run has in common
  RowKernels row_kernels_;

 private:
  AnyBackwardWorkspace at_;
  TileMap map_;
  BiasGradientKernel bias_gradient_;
  CUfunction bias_gradient_kernel_ = nullptr;
};

}  // namespace fulgur::cuda
