#pragma once

#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/device/gpu.h"
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
  bool elements = false;  ///< gradients are stored by elements

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
    f("kElements", elements);
  }

  /// Whether dQ is added to dq_accum while dK and dV are computed; otherwise dS is stored.
  bool accumulates_dq() const { return dq_method != DqMethod::kStored; }
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
  bool operator==(const AnyBackwardPlan&) const = default;

  bool copies() const {
    return !(copies_q + copies_k + copies_v + copies_dout + copies_bias).empty();
  }
};

/// Why no kernels compute a backward problem; empty where they do.
std::string backward_rejects(const Problem& problem);

void set_problem(const Problem& problem, AnyBackwardKey& key, AnyBackwardPlan& plan);

/// Adds to a plan what both have of it: copies, dsinks, how gradients are stored.
void describe_backward(const AnyBackwardKey& key, const AnyBackwardPlan& plan, Explanation& to);

/// The kernels of kernels/backward/, with the fields of a key that their text depends on.
KernelUse prepare_kernel(const AnyBackwardKey& key);
KernelUse round_kernel(const AnyBackwardKey& key);
KernelUse sinks_kernel(const AnyBackwardKey& key);

/// What all kernels are told, without addresses. They compute 2^p_log2 P.
BackwardParams backward_params(const Problem& problem, const AnyBackwardKey& key,
                               const AnyBackwardPlan& plan, double p_log2);
/// The addresses of a run's tensors.
void set_backward_tensors(BackwardParams& params, const BackwardArgs& args, const Run& run);

/// Keys of a tile of dbias, and where dbias lies, and over which dimensions its elements are sums.
inline constexpr int kBiasGradientKeys = 64;
BiasSums bias_sums(const Problem& problem);
/// The rest, for tiles of so many rows: a run's dbias may have more rows and keys than the longest
/// sequence, and so more tiles. Where elements are no sums of several scores, a work tile has more
/// tiles of keys, which share Q and dO, but not so many that SMs would idle.
void set_bias_sums(const Tensor& dbias, int64_t sk, int sms, int tile_rows, BiasSums& sums);

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
  Start start_ = Start::kAfterAll;  ///< of all but the first
};

}  // namespace fulgur::cuda
