/// The computation of a rank in a call of all ranks, step by step.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

#include "call/mask.h"
#include "distributed/group/memory.h"
#include "distributed/plan.h"

namespace fulgur::distributed {

/// Consecutive sequences of the batch that a call computes, and their lengths. `number`: the index
/// of the first one among all packed sequences.
struct Sequences {
  int64_t number, first, count, queries, keys;

  Part of(const Part& x) const { return x.slice(0, first, count); }
};

/// A call of one run of rows, with the range of keys that it computes with. `keys_at`: where these
/// begin among the keys that the rank has in the step.
struct RowsCall {
  int source;
  RowRun run;
  Sequences of;
  int64_t size;
  KeyRange keys;
  int64_t keys_at;
};

/// The calls of a one-device engine that compute the steps of a run. Each run of rows is a call, so
/// that the sums of a row are those of one device.
template <class Args>
class StepCalls {
  static constexpr bool kBackward = std::is_same_v<Args, BackwardArgs>;

 public:
  StepCalls(const RowsPlan& plan, const Args& args, const Run& run);

  /// Sets the parts of a step that lie in the caller's tensors: queries that are not transferred
  /// and, in the first step of a ring, keys.
  void set_queries(int64_t number, Step& step) const;
  void compute(int64_t number, const Step& step);

  /// Begins a step: waits for transfers if the host reads their data, and writes the results of
  /// rows that do not exist.
  void begin(const Step& step);
  /// The calls of a rank in a step, the one with the most scores first.
  std::vector<RowsCall> calls_of_step(int64_t number, int rank) const;
  /// Computes a call of the forward pass by the calling thread alone, for some heads.
  void compute_alone(const RowsCall& c, const Heads& heads, const Step& step) const;
  int threads() const;

  /// An event of each stream, after all calls up to now.
  using Events = std::array<Queue::Event, 2>;
  Events record();
  /// The following calls wait for an event.
  void wait(const Queue::Event& event);
  /// The stream of the run waits for all calls.
  void join();
  /// Rounds the merged results of a ring's forward pass to out and lse.
  void round_merged() const;

  Sums sums;
  std::vector<double> dsinks;  ///< of each head, if dsinks are requested

 private:
  /// A stream that executes calls.
  struct Stream {
    Run run;
    Queue* queue = nullptr;
  };

  bool has_lengths() const { return !used_q_.empty() || !used_k_.empty(); }
  template <class Visit>
  void each_run(const Rows& rows, int rank, const Visit& visit) const;
  Options options_of(const Sequences& s, const Heads& heads, int64_t query, int64_t key) const;
  Args call_of(const RowsCall& c, const Heads& heads, const Step& step) const;
  Args forward_call_of(const RowsCall& c, const Heads& heads, const Step& step) const;
  void backward(Args call, const Options& options, const RowsCall& c, const Heads& heads,
                const Stream& stream) const;
  void set_gradients(std::vector<TensorBinding>& tensors) const;
  void compute_key_gradients(const Heads& heads, const Step& step);
  void compute_dsinks(const Heads& heads, const Step& step);
  bool first_call_covers() const;
  void clear_outside(Queue& queue, const KeyRange& stored, const Part& sums) const;
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
  std::unique_ptr<Queue> computing_, second_;
  /// Calls of the forward pass, and steps of the backward pass, alternate between two streams, so
  /// that one starts where the previous one leaves SMs idle.
  std::array<Stream, 2> streams_;
  std::vector<int64_t> used_q_, used_k_;  // of each sequence; empty if all rows are used
};

}  // namespace fulgur::distributed
