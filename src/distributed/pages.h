/// Attention over caches whose pages lie on all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "distributed/plan.h"

namespace fulgur::distributed {

/// Every rank computes all queries over the keys of its pages. The partial results of each head are
/// merged, in the order of ranks, by one rank, which returns them to all ranks.
class PagesPlan final : public DistributedPlan::Impl {
 public:
  PagesPlan(const ForwardArgs& args, const Options& options, const Group& group,
            const Distribution& distribution);

  void run(const ForwardArgs& args, const Run& run) const override;
  std::string explain() const override;
  int64_t workspace_bytes() const override;

 private:
  struct Rows;
  struct Memory;

  int64_t rows() const { return problem_.batch * problem_.sq; }
  /// The dtype of partial results: on GPUs that of q, as kernels write it.
  DType partial_dtype() const {
    const DType q = problem_.dtypes.q;
    return problem_.device != Device{} || q == DType::kF64 ? q : DType::kF32;
  }
  /// The heads that a rank merges.
  Heads heads(int rank) const;
  /// How many of the keys before `key` lie on this rank.
  int64_t keys_before(int64_t key) const;
  void compute(const ForwardArgs& args, const Run& run) const;
  Rows rows_of(const ForwardArgs& args) const;

  Group group_;
  int me_, ranks_;
  Options options_;
  Problem problem_;
  ForwardArgs planned_;
  distributed::Memory* transfers_;
};

}  // namespace fulgur::distributed
