/// The tensors of a Case, filled with fresh random numbers and surrounded by poison.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "cases.h"
#include "fulgur/attention.h"
#include "random_expression.h"
#include "storage.h"
#include "tensors.h"

namespace fulgur::test {

/// A sequence of a case: where its rows start among all rows of q and of k (batch and sequence
/// flattened), and how many there are, of those that exist (seqused_q, seqused_k).
struct Rows {
  int64_t q_begin, k_begin, sq, sk;
};

class Workload {
 public:
  /// Packed cases: `lengths` (sq and sk of each sequence) instead of those that Case stands for.
  Workload(const Case& c, uint64_t seed, std::vector<Rows> lengths = {});
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  /// Poisons out, lse, dq, dk, dv and takes the picture that `check_memory` compares with. Call it
  /// after changing inputs by hand.
  void seal();
  /// Plans and runs a pass, in the memory of the engine that the options name.
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
  /// What the expressions of the options compute, for the oracle; null without.
  ValueAt score_value, mask_value;

 private:
  Storage& storage(DType dtype, int64_t elements, bool output);
  Tensor tensor(int64_t rows, int64_t max_len, int64_t heads, int64_t dim, bool output);
  Tensor lse_tensor(int64_t gap, bool output);
  void interleaved(bool output, Tensor* q, Tensor* k, Tensor* v);
  Tensor lengths(const std::vector<int64_t>& values);
  void make_sequences(const std::vector<Rows>& given);
  void make_options(uint64_t seed);
  void make_sinks();
  void make_trees(uint64_t seed);
  void make_bias(uint64_t seed);
  void poison_missing_rows();
  void poison_unused_dlse();

  std::deque<Storage> inputs_, outputs_;
};

}  // namespace fulgur::test
