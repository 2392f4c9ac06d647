/// What a rank computes of a call of all ranks, step by step.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "call/mask.h"
#include "distributed/memory.h"
#include "distributed/plan.h"

namespace fulgur::distributed {

/// Sequences of the batch, side by side, that a call computes, and their lengths. The first one's
/// number is that of all packed sequences.
struct Sequences {
  int64_t number, first, count, queries, keys;

  Part of(const Part& x) const { return x.slice(0, first, count); }
};

/// A run of rows as a call, with those of all keys that it computes with, and where these begin
/// among the keys at hand.
struct RowsCall {
  int source;
  RowRun run;
  Sequences of;
  int64_t size;
  KeyRange keys;
  int64_t keys_at;
};

/// The calls of the one-device engine that a run makes of its steps. A run of rows is a call, so
/// that the sums of a row are those of one device.
template <class Args>
class StepCalls {
  static constexpr bool kBackward = std::is_same_v<Args, BackwardArgs>;

 public:
  StepCalls(const RowsPlan& plan, const Args& args, const Run& run);

  /// The queries of this rank, where they are, and of a ring its keys, with which it begins.
  void set_queries(int64_t number, Step& step) const;
  void compute(int64_t number, const Step& step);

  /// What begins a step: the host has it, and rows that do not exist have results.
  void begin(const Step& step);
  /// The calls of a rank in a step, the one with the most scores first.
  std::vector<RowsCall> calls_of_step(int64_t number, int rank) const;
  /// A call of the forward pass by one thread, with the queries and keys of some heads.
  void compute_alone(const RowsCall& c, const Heads& heads, const Step& step) const;
  int threads() const;

  /// All calls until now, of each stream.
  using Marks = std::array<Order::Mark, 2>;
  Marks marks();
  /// Calls from now on wait for a mark.
  void after(const Order::Mark& mark);
  /// The stream of the run waits for all calls.
  void join();
  /// The results of a ring's forward pass.
  void round_merged() const;

  Sums sums;
  std::vector<double> dsinks;  ///< of each head, if they are wanted

 private:
  /// What calls are put on.
  struct Stream {
    Run run;
    Order* order = nullptr;
  };

  bool has_lengths() const { return !used_q_.empty() || !used_k_.empty(); }
  template <class Visit>
  void each_run(const Rows& rows, int rank, const Visit& visit) const;
  Options options_of(const Sequences& s, const Heads& heads, int64_t query, int64_t key) const;
  Args call_of(const RowsCall& c, const Heads& heads, const Step& step) const;
  Args forward_call_of(const RowsCall& c, const Heads& heads, const Step& step) const;
  void backward(Args call, const Options& options, const RowsCall& c, const Heads& heads,
                const Stream& stream) const;
  void take_rooms(std::vector<TensorBinding>& tensors) const;
  void compute_key_gradients(const Heads& heads, const Step& step);
  void compute_dsinks(const Heads& heads, const Step& step);
  bool first_call_covers() const;
  void clear_outside(Order& order, const KeyRange& stored, const Part& sums) const;
  void write_padding(const Step& step) const;
  void fill(Part to, float value) const;
  Part keys_of(const RowsCall& c, const Part& x) const;
  ConstTensor slopes(const Heads& heads, const Sequences& s) const;
  void make_sums();

  const RowsPlan& plan_;
  const Problem& p_;
  const Args& args_;
  Run run_;
  Memory& memory_;
  std::unique_ptr<Order> computing_, second_;
  /// Calls take them in turn, and steps of the backward pass: one begins where the one before
  /// leaves SMs idle.
  std::array<Stream, 2> streams_;
  std::vector<int64_t> used_q_, used_k_;  // of each sequence, where not all rows exist
};

}  // namespace fulgur::distributed
