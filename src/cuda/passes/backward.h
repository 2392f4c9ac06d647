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
// which prepare rows, round dQ and compute dsinks, and the arguments of all of their kernels.

using kernels::DqMethod;

/// The constants of kernel_config.h that all architectures have.
struct AnyBackwardKey : KernelKey {
  int block_rows = 0;  ///< Br
  int block_keys = 0;  ///< Bc
  DqMethod dq_method = DqMethod::kStored;
  int dq_parts = 0;          ///< semaphores for 64 rows of dQ, or for a row tile if it is smaller
  bool dq_by_fours = true;   ///< a thread adds four sums by one instruction
  bool early_starts = true;  ///< kernels start while the previous one runs
  bool rounds_dq = false;    ///< the kernel by keys also rounds dQ, in short calls
  bool dropout = false, has_dlse = false;
  bool key_gradients = true;       ///< dK and dV are computed
  bool f32_key_gradients = false;  ///< dK and dV are stored in f32
  bool elements = false;           ///< gradients are stored one element at a time
  bool makes_map = false;          ///< the kernel that prepares rows also makes the map of tiles

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

  /// Whether dQ is accumulated in dq_accum while dK and dV are computed; or dS is stored for dQ.
  bool accumulates_dq() const {
    return dq_method == DqMethod::kAtomic || dq_method == DqMethod::kOrdered;
  }
  bool stores_ds() const { return dq_method == DqMethod::kStored; }
  /// Whether gradients may need repair, because hidden keys with NaN take part in products.
  bool repairs() const { return has_left || has_right || scores_hide(); }
  int64_t dq_accum_floats(int64_t rows) const;  ///< for `rows` rows of all heads
};

/// The decisions of a plan that no kernel's text depends on.
struct AnyBackwardPlan {
  /// Why tensors are copied to rows that kernels can address; empty for tensors that are not.
  std::string copies_q, copies_k, copies_v, copies_dout, copies_bias;
  bool dsinks = false;      ///< the gradient of the sinks is requested
  bool dbias = false;       ///< the gradient of the bias is requested
  bool dtensors = false;    ///< gradients of tensors that score_mod indexes are requested
  int statistics_rows = 0;  ///< rows of statistics per q head
  /// A kv head is computed in `splits` splits by different CTAs. Each split has split_heads q heads
  /// of the group; row_splits splits have the same q heads and different rows.
  int splits = 1, split_heads = 1, row_splits = 1;
  bool operator==(const AnyBackwardPlan&) const = default;

  bool copies() const {
    return !(copies_q + copies_k + copies_v + copies_dout + copies_bias).empty();
  }
  /// Whether a kernel adds the partial dK and dV of splits.
  bool reduces() const { return splits > 1; }
};

/// Offsets in the workspace of any plan, in bytes, after the counters. All are 0 if nothing is
/// launched.
struct AnyBackwardWorkspace : CallWorkspace {
  int64_t shift = 0, delta = 0;            ///< statistics of rows
  int64_t dq_accum = 0, dq_semaphore = 0;  ///< if dQ is accumulated
  int64_t partial_dk = 0, partial_dv = 0;  ///< for later CTAs, or for the reduction
  std::array<int64_t, 5> copies{};         ///< copies of q, k, v, dout and the bias
};
/// Allocates it, but for host metadata. `partial_keys`: rows of partial dK and dV.
AnyBackwardWorkspace backward_workspace(const Problem& problem, const AnyBackwardKey& key,
                                        const AnyBackwardPlan& plan, int64_t dq_semaphores,
                                        int64_t partial_keys, Arena& arena);

/// The fields of a key that its map of tiles depends on: the mask and the lengths.
AnyForwardKey map_key(const AnyBackwardKey& key);
/// The fields of a key that the kernel depends on which adds partial dK and dV.
AnyBackwardKey reduce_key(const AnyBackwardKey& key);
inline MapTiles map_tiles(const AnyBackwardKey& key) {
  return {.block_rows = key.block_rows,
          .block_keys = key.block_keys,
          .by_keys = true,
          .by_rows_too = key.stores_ds() || key.dq_method == DqMethod::kOrdered ||
                         key.dq_method == DqMethod::kByRows,
          .early_starts = key.early_starts,
          .method = key.makes_map ? MapMethod::kPrepare : MapMethod::kSeparate};
}

/// Why no kernel of 16-bit operands computes a backward problem; empty if one does.
std::string backward_rejects(const Problem& problem);
/// Why no kernel computes one of so many rows, heads and columns; empty if one does.
std::string backward_sizes_rejected(const Problem& problem, const HeadDims& max = kMaxDims);

void set_problem(const Problem& problem, AnyBackwardKey& key, AnyBackwardPlan& plan);

/// Describes what plans of all architectures have: splits, copies, dsinks, how gradients are
/// stored.
void describe_backward(const AnyBackwardKey& key, const AnyBackwardPlan& plan, Explanation& to);

/// The kernels of kernels/backward/, compiled with only those fields of a key that they depend on.
KernelUse prepare_kernel(const AnyBackwardKey& key);
KernelUse round_kernel(const AnyBackwardKey& key);
KernelUse sinks_kernel(const AnyBackwardKey& key);
/// The kernel that repairs gradients where a kernel by rows computes dQ.
KernelUse repair_kernel(const AnyBackwardKey& key);
inline constexpr int kRepairThreads = 256;

/// The arguments of all kernels that are the same in every run, without addresses. The kernels by
/// keys compute 2^p_log2 P.
BackwardParams backward_params(const Problem& problem, const AnyBackwardKey& key,
                               const AnyBackwardPlan& plan, double p_log2);

/// Keys of a tile of dbias.
inline constexpr int kBiasGradientKeys = 64;
/// The strides of dbias, and the dimensions over which its elements are sums.
BiasSums bias_sums(const Problem& problem);
/// The kernel that computes dbias.
struct BiasGradientKernel {
  KernelUse use;
  int tile_rows = 0, threads = 0, sm_blocks = 0;  ///< of a tile; of a CTA; CTAs of an SM
};

/// Adds the kernels that all families use. `rounds`: the kernel that rounds dQ is one of them.
void add_backward_kernels(const AnyBackwardKey& key, const AnyBackwardPlan& plan, bool rounds,
                          const BiasGradientKernel& bias_gradient, std::vector<KernelUse>& kernels);

/// The kernels of kernels/backward/ on a device.
class RowKernels {
 public:
  RowKernels() = default;
  /// `rounds`: the kernel that rounds dQ is one of them.
  RowKernels(const Problem& problem, const AnyBackwardKey& key, const AnyBackwardPlan& plan,
             bool rounds, Gpu& gpu);

  /// Launches the kernels that prepare rows and compute dsinks.
  void launch_first(CUstream stream, const BackwardParams& params) const;
  /// Launches the kernel that rounds dQ, if there is one.
  void launch_last(CUstream stream, const BackwardParams& params) const;

 private:
  CUfunction prepare_ = nullptr, sinks_ = nullptr, round_ = nullptr;
  int row_chunks_ = 0, batch_heads_ = 0, round_threads_ = 0;
  Start start_ = Start::kAfterAll;  ///< of all kernels but the first
  bool makes_map_ = false,
       maps_rows_ = false;  ///< the first kernel makes a map by keys; also by rows
};

/// The base of the executables of all architectures.
class BackwardPassExecutable : public AttentionExecutable<BackwardArgs> {
 protected:
  /// `inputs`: how many of q, k, v, dout and the bias, in this order, kernels copy to shared
  /// memory. `rounds`: RowKernels round dQ.
  BackwardPassExecutable(const Problem& problem, Gpu& gpu, Explanation explanation,
                         const AnyBackwardKey& key, const AnyBackwardPlan& plan,
                         const AnyBackwardWorkspace& workspace, int inputs, double p_log2,
                         bool rounds, const BiasGradientKernel& bias_gradient);

  /// The arguments of kernels in a run.
  BackwardParams arguments(const BackwardArgs& args, const Run& run, char* workspace) const;
  /// Makes the map of tiles, if the plan has one, and sets the arguments that refer to it.
  void launch_map(CUstream stream, char* workspace, BackwardParams& params) const;
  /// Computes dbias, if it is requested.
  void launch_bias_gradient(CUstream stream, const BackwardParams& params) const;

  BackwardParams params_{};  ///< the arguments that are the same in every run
  RowKernels row_kernels_;

 private:
  AnyBackwardWorkspace at_;
  TileMap map_;
  BiasGradientKernel bias_gradient_;
  CUfunction bias_gradient_kernel_ = nullptr;
};

}  // namespace fulgur::cuda
