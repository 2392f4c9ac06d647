#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fulgur/attention.h"
#include "fulgur/distributed/group.h"
#include "fulgur/export.h"

/// Attention over sequences whose rows lie in several processes (docs/distributed.md).
namespace fulgur {

/// Which rows of the sequences a rank has. All cut sequences at multiples of 64 rows.
enum class Sharding : uint8_t {
  kContiguous,  ///< a run of rows each, for full masks and windows
  kZigzag,      ///< of 2 N runs those r and 2 N - 1 - r, for causal masks
  kByArea,      ///< runs so that all ranks have as many visible scores, for packed documents
  /// Caches: of N ranks rank r has each page j of a sequence with j % N = r, in their order, and
  /// all have all queries.
  kByPage,
};

/// How rows and heads are shared out.
struct Distribution {
  Sharding sharding = Sharding::kContiguous;
  /// Groups of so many consecutive ranks exchange heads for rows before they compute (Ulysses):
  /// each then has a part of the heads of all their rows. It divides the ranks and the heads of k.
  /// 1: each computes its own rows; all ranks: keys need not be gathered.
  int head_ranks = 1;
  /// Keys of one rank at a time come instead of all of some heads, and partial results are merged:
  /// less memory, for other last bits than one process has, so that `invariant` calls take none.
  /// Also what a call does whose max_workspace a gather of one head a step would exceed.
  bool ring = false;
};

/// The rows of a sequence that a rank has, in their order: for data loaders and position ids. Those
/// of kByArea depend on the mask.
FULGUR_API std::vector<int64_t> rows_of(Sharding sharding, int64_t length, int ranks, int rank,
                                        const Mask& mask = causal());
/// The same for packed sequences; rows are counted over all sequences.
FULGUR_API std::vector<int64_t> rows_of(Sharding sharding, std::span<const int32_t> cu_seqlens,
                                        int ranks, int rank, const Mask& mask = causal());

/// A call that all ranks compute together, decided once, on CPUs or on GPUs of one machine; each
/// run takes memory of workspace_bytes().
class FULGUR_API DistributedPlan {
 public:
  struct Impl;
  explicit DistributedPlan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  /// Collective: all ranks run their plans of one call. The tensors must be as planned.
  void run(const ForwardArgs& args, const Run& run = {}) const;
  void run(const BackwardArgs& args, const Run& run = {}) const;
  std::string explain() const;
  int64_t workspace_bytes() const;

 private:
  std::shared_ptr<const Impl> impl_;
};

/// Collective: makes the plan of a call whose tensors hold the rows of this rank, as in one process
/// else; what is no row of q, k and v - lengths, slopes, sinks, a bias, tensors of expressions, and
/// their gradients - is that of the whole call on all ranks. Where ranks disagree, or one of them
/// has a wrong argument, all throw the same error, which names the rank and the argument.
///
/// With `invariant` both passes have the bits of one process, whatever the number of ranks, but for
/// gradients of tensors of expressions and of a bias that rows or heads share. Otherwise gradients
/// of keys and of whole tensors are sums of parts of all ranks, in their order, the same in every
/// run with as many. Takes no caches and no tree_mask. `max_workspace` bounds workspace_bytes().
///
/// With kByPage, forward alone: q, out and lse are whole on all ranks, and so is seqused_k; k, v
/// and page_table (batch, max_pages) are those of this rank, and page_table has the pages of each
/// sequence that lie here. Each rank computes all queries over its keys, in f32 (f64 where q is, on
/// GPUs in the dtype of q); their results are merged in the order of ranks and rounded once, which
/// gives the same bits in every run with as many. Takes no other lengths, prefix_groups, tree_mask,
/// bias, expressions and dropout.
FULGUR_API DistributedPlan plan(const ForwardArgs& args, const Options& options, const Group& group,
                                const Distribution& distribution);
FULGUR_API DistributedPlan plan(const BackwardArgs& args, const Options& options,
                                const Group& group, const Distribution& distribution);

/// Collective: plan() and its run.
FULGUR_API void forward(const ForwardArgs& args, const Options& options, const Group& group,
                        const Distribution& distribution, const Run& run = {});
FULGUR_API void backward(const BackwardArgs& args, const Options& options, const Group& group,
                         const Distribution& distribution, const Run& run = {});

}  // namespace fulgur
