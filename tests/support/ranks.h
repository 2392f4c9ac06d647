/// Calls whose rows are shared out to ranks, which are processes.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "engines.h"
#include "fulgur/distributed/plan.h"
#include "processes.h"

namespace fulgur::test {

/// A tensor of some indices of a dimension of another one.
struct Taken {
  Bytes memory;
  Tensor tensor;
};

/// Calls visit(element of `from`, element of `to`) for the elements that `to` has of `from`.
template <class Visit>
void each_pair(const Tensor& from, const Tensor& to, int dim, const std::vector<int64_t>& rows,
               const Visit& visit) {
  const int64_t size = size_of(from.dtype);
  for (int64_t n = 0; n < to.numel(); ++n) {
    int64_t rest = n, at_from = 0, at_to = 0;
    for (int i = to.rank - 1; i >= 0; --i) {
      const int64_t index = rest % to.shape[i];
      rest /= to.shape[i];
      at_to += index * to.strides[i];
      at_from += (i == dim ? rows[index] : index) * from.strides[i];
    }
    visit(static_cast<std::byte*>(from.data) + at_from * size,
          static_cast<std::byte*>(to.data) + at_to * size);
  }
}

/// The indices `rows` of dimension `dim` of a tensor.
Taken take(const Tensor& from, int dim, const std::vector<int64_t>& rows);

struct DistributedCase {
  Case c;
  Distribution distribution;
  std::vector<Rows> lengths = {};                     // packed
  std::function<void(Workload&)> add = [](auto&) {};  // expressions
};

/// What the rows of a tensor belong to: queries, keys, or neither; then all ranks have it whole.
enum class Of { kQueries, kKeys, kAll };

struct Output {
  Tensor tensor;
  int dim;  // of the rows
  Of of;
};

/// A workload and how its rows are shared out.
struct DistributedWorkload {
  const DistributedCase& problem;
  Workload& w;

  std::vector<int64_t> rows(bool of_q, int ranks, int rank) const {
    const Case& c = problem.c;
    if (!c.packed()) {
      return rows_of(problem.distribution.sharding, of_q ? c.sq : c.sk, ranks, rank, c.mask);
    }
    const Tensor& cu = of_q ? w.forward.cu_seqlens_q : w.forward.cu_seqlens_k;
    const auto* const ends = static_cast<const int32_t*>(cu.data);
    return rows_of(problem.distribution.sharding, {ends, static_cast<size_t>(cu.shape[0])}, ranks,
                   rank, c.mask);
  }
  int row_dim() const { return problem.c.packed() ? 0 : 1; }
  int lse_dim() const { return problem.c.packed() ? 1 : 2; }

  /// The outputs; gradients of tensors of expressions come last.
  std::vector<Output> outputs() const {
    const BackwardTensors& g = w.backward;
    std::vector<Output> all = {{w.forward.out, row_dim(), Of::kQueries},
                               {w.forward.lse, lse_dim(), Of::kQueries},
                               {g.dq, row_dim(), Of::kQueries},
                               {g.dk, row_dim(), Of::kKeys},
                               {g.dv, row_dim(), Of::kKeys}};
    if (g.dsinks.given()) all.push_back({g.dsinks, 0, Of::kAll});
    if (g.dbias.given()) all.push_back({g.dbias, 0, Of::kAll});
    for (const TensorBinding& t : g.tensors) {
      if (t.grad.given()) all.push_back({t.grad, 0, Of::kAll});
    }
    return all;
  }
  /// Which rows of an output a rank has.
  std::vector<int64_t> rows(const Output& x, int ranks, int rank) const {
    if (x.of != Of::kAll) return rows(x.of == Of::kQueries, ranks, rank);
    std::vector<int64_t> all(x.tensor.shape[x.dim]);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
};

/// Both passes of a rank: the bytes of its outputs, one after the other.
Bytes compute_rank(const DistributedWorkload& s, const Group& group, Device device = {});

/// Writes the outputs of a rank to their rows.
testing::AssertionResult put(const DistributedWorkload& s, int ranks, int rank, const Bytes& bytes);

std::vector<Bytes> all_bits(const Workload& w);

/// All ranks, each a process, into the workload's outputs; on GPUs where there are any to use.
/// connected(rank) is called in each process before it computes.
void compute_by(
    int ranks, const DistributedWorkload& s, int gpus = 0,
    const std::function<void(int rank)>& connected = [](int) {});

}  // namespace fulgur::test
