/// The tensors of a Case, filled with fresh random numbers and surrounded by poison.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cases.h"
#include "fulgur/attention.h"
#include "storage.h"

namespace fulgur::test {

/// A sequence of a case: where its rows start among all rows of q and of k (batch and sequence
/// flattened), and how many there are. sk counts the keys that exist (seqused_k).
struct Rows {
  int64_t q_begin, k_begin, sq, sk;
};

/// The tensors of a call, all of which the tests may write.
struct ForwardTensors {
  Tensor q{}, k{}, v{}, out{}, lse{}, alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{}, seqused_k{};
  operator ForwardArgs() const {
    return {q, k, v, out, lse, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_k};
  }
};
struct BackwardTensors {
  Tensor dout{}, q{}, k{}, v{}, out{}, lse{}, dq{}, dk{}, dv{};
  Tensor alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{}, seqused_k{};
  operator BackwardArgs() const {
    return {dout,         q,        k, v, out, lse, dq, dk, dv, alibi_slopes, cu_seqlens_q,
            cu_seqlens_k, seqused_k};
  }
};

class Workload {
 public:
  Workload(const Case& c, uint64_t seed);
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  /// Poisons out, lse, dq, dk, dv and takes the picture that `check_memory` compares with. Call it
  /// after changing inputs by hand.
  void seal();
  /// Plans and runs a pass as the options say: engine "cuda" on copies in device memory, guard
  /// zones included, which are copied back.
  void run_forward();
  void run_backward();
  void run() { run_forward(), run_backward(); }
  /// Inputs unchanged; of the outputs' buffers only the outputs' own elements changed.
  testing::AssertionResult check_memory() const;
  /// Outputs, too, are unchanged since `seal`.
  testing::AssertionResult nothing_written() const;

  /// Packed: (hq, total_q). Else (batch, hq, sq). Index of row r of sequence b among the elements.
  int64_t lse_index(size_t b, int64_t h, int64_t r) const;

  Case c;
  std::vector<Rows> sequences;
  int64_t total_q = 0, total_k = 0;  ///< rows in all, packed padding included
  ForwardTensors forward;
  BackwardTensors backward;
  Options options;
  Run run_options;  ///< of every run

 private:
  Storage& storage(DType dtype, int64_t elements, bool output);
  Tensor tensor(int64_t rows, int64_t max_len, int64_t heads, int64_t dim, bool output);
  void interleaved(bool output, Tensor* q, Tensor* k, Tensor* v);
  Tensor lengths(const std::vector<int64_t>& values);
  void make_sequences();
  void make_options(uint64_t seed);
  void poison_missing_rows();

  class OnDevice;

  std::deque<Storage> inputs_, outputs_;
};

}  // namespace fulgur::test
