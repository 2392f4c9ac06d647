#include "distributed/step_calls.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>

#include "base/convert.h"
#include "base/parallel.h"
#include "fulgur/merge.h"

namespace fulgur::distributed {
namespace {

/// Elements [begin, begin + count) of a dimension, unless it is broadcast (has size 1).
template <class T>
T narrow(T t, int dim, int64_t begin, int64_t count) {
  if (!t.given() || t.shape[dim] == 1) return t;
  using Byte = std::conditional_t<std::is_same_v<T, Tensor>, std::byte, const std::byte>;
  t.data = static_cast<Byte*>(t.data) + begin * t.strides[dim] * size_of(t.dtype);
  t.shape[dim] = count;
  return t;
}

int64_t count_of(const KeyRange& keys) { return keys.end - keys.begin; }

/// The part of the bias, or of its gradient, for some sequences, heads, queries and keys.
template <class T>
T part_of_bias(const T& whole, const Sequences& s, const Heads& heads, const Heads& queries,
               const Heads& keys) {
  T t = narrow(whole, 0, s.number, s.count);
  t = narrow(t, 1, heads.begin, heads.count);
  t = narrow(t, 2, queries.begin, queries.count);
  return narrow(t, 3, keys.begin, keys.count);
}
template <class T>
T of_bias(const T& whole, const RowsCall& c, const Heads& heads) {
  return part_of_bias(whole, c.of, heads, {c.run.begin, c.size}, {c.keys.begin, count_of(c.keys)});
}

Part part(const ConstTensor& t) { return Part::of_rows(t); }
Part part(const Tensor& t) { return Part::of_rows(t); }

/// The rows of a call, which begin at row `at`.
Part part_of(const Part& x, const RowsCall& c, int64_t at) { return c.of.of(x).rows(at, c.size); }

}  // namespace

template <class Args>
StepCalls<Args>::StepCalls(const RowsPlan& plan, const Args& args, const Run& run)
    : plan_(plan),
      p_(plan.problem),
      args_(args),
      run_(run),
      memory_(*plan.memory),
      computing_(memory_.compute_queue(run)),
      used_q_(plan.used_queries(args.lengths)),
      used_k_(plan.used_keys(args.lengths)) {
  run_.workspace = {};
  memory_.wait(computing_->record());
  make_sums();
  streams_.fill({run_, computing_.get()});
  // With sums over all calls of a run, calls are executed one after the other.
  const bool sums_of_run = kBackward && (plan_.gathers_queries() || !sums.whole.empty() ||
                                         !dsinks.empty() || has_lengths());
  const std::optional<Run> second =
      plan_.ring || sums_of_run ? std::nullopt : memory_.second_stream(run_);
  if (!second) return;
  second_ = memory_.compute_queue(*second);
  streams_[1] = {*second, second_.get()};
}

template <class Args>
auto StepCalls<Args>::record() -> Events {
  return {computing_->record(), second_ == nullptr ? nullptr : second_->record()};
}

template <class Args>
void StepCalls<Args>::join() {
  computing_->wait(streams_[1].queue->record());
}

template <class Args>
void StepCalls<Args>::wait(const Queue::Event& event) {
  for (const Stream& stream : streams_) stream.queue->wait(event);
}

/// Calls visit(source rank, run, sequences) for all runs whose queries, or keys, a rank has to
/// compute; for each sequence separately if sequences have lengths of their own.
template <class Args>
template <class Visit>
void StepCalls<Args>::each_run(const Rows& rows, int rank, const Visit& visit) const {
  const bool alone = !plan_.packed && has_lengths();
  for (int source = 0; source < plan_.group.size(); ++source) {
    if (!plan_.same_node(rank, source)) continue;
    for (const RowRun& run : rows.of(source)) {
      for (int64_t b = 0; b < (alone ? p_.batch : 1); ++b) {
        const int64_t number = alone ? b : run.sequence;
        visit(source, run,
              Sequences{
                  .number = number,
                  .first = b,
                  .count = alone ? 1 : p_.batch,
                  .queries = used_q_.empty() ? plan_.q_rows.length(run.sequence) : used_q_[number],
                  .keys = used_k_.empty() ? plan_.k_rows.length(run.sequence) : used_k_[number]});
      }
    }
  }
}

template <class Args>
void StepCalls<Args>::set_queries(int64_t number, Step& step) const {
  const Heads heads = plan_.q_heads(plan_.heads(plan_.me, number));
  const auto of_heads = [&](const Part& x) { return x.heads(heads.begin, heads.count); };
  step.q = of_heads(part(args_.q));
  step.out = of_heads(part(args_.out));
  if (p_.has(Arg::kLse)) step.lse = of_heads(Part::of_lse(args_.lse));
  if constexpr (kBackward) {
    step.dout = of_heads(part(args_.dout));
    if (p_.has(Arg::kDlse)) step.dlse = of_heads(Part::of_lse(args_.dlse));
    step.dq = plan_.ring ? sums.of_call_dq : of_heads(part(args_.dq));
  } else if (plan_.ring) {
    step.out = sums.of_call_out;
    step.lse = sums.of_call_lse;
  }
  if (!plan_.ring || number > 0) return;
  step.k = part(args_.k);
  step.v = part(args_.v);
}

/// The options of a call that computes a part of a sequence.
template <class Args>
Options StepCalls<Args>::options_of(const Sequences& s, const Heads& heads, int64_t query,
                                    int64_t key) const {
  Options options = plan_.options;
  options.max_seqlen_q = options.max_seqlen_k = options.max_workspace = 0;
  options.origin = {.batch = s.number,
                    .head = heads.begin,
                    .query = query,
                    .key = key,
                    .heads = p_.hq,
                    .queries = s.queries,
                    .keys = s.keys};
  return options;
}

/// The calls of a step, the one with the most scores first, so that short ones fill the SMs that
/// idle at its end. A backward call has only the keys that some of its rows see.
template <class Args>
std::vector<RowsCall> StepCalls<Args>::calls_of_step(int64_t number, int rank) const {
  std::vector<RowsCall> calls;
  each_run(plan_.q_rows, rank, [&](int source, const RowRun& run, const Sequences& s) {
    const int64_t size = std::min(run.end, s.queries) - run.begin;
    if (size <= 0) return;
    KeyRange keys{0, s.keys};
    if (plan_.ring || (kBackward && !plan_.gathers_queries())) {
      constexpr int64_t kKeys = 64;  // the first key of a call is a multiple of it
      keys = visible_keys(p_.mask, {.sq = s.queries, .sk = s.keys}, run.begin, run.begin + size);
      keys.begin = std::min(keys.begin, keys.end) / kKeys * kKeys;
    }
    if (!plan_.ring) {
      calls.push_back({source, run, s, size, keys, plan_.k_rows.begin(run.sequence) + keys.begin});
      return;
    }
    for (const RowRun& here : plan_.k_rows.of(plan_.source(number))) {
      const KeyRange seen{std::max(keys.begin, here.begin), std::min(keys.end, here.end)};
      if (here.sequence != run.sequence || seen.empty()) continue;
      calls.push_back({source, run, s, size, seen, here.place + seen.begin - here.begin});
    }
    // A call without keys adds the sinks to the softmax, once.
    if (!kBackward && number == 0 && args_.sinks.given()) {
      calls.push_back({source, run, s, size, {}, 0});
    }
  });
  std::ranges::stable_sort(calls, std::greater(), [](const RowsCall& c) {
    return static_cast<double>(c.size) * static_cast<double>(c.keys.end - c.keys.begin);
  });
  return calls;
}

template <class Args>
void StepCalls<Args>::begin(const Step& step) {
  if (has_lengths() || !dsinks.empty())
    memory_.complete_transfers();  // the host reads data of the step
  if (has_lengths() && !plan_.ring) write_padding(step);
}

template <class Args>
int StepCalls<Args>::threads() const {
  return thread_count(plan_.options.threads);
}

template <class Args>
void StepCalls<Args>::compute_alone(const RowsCall& c, const Heads& heads, const Step& step) const {
  if constexpr (!kBackward) {
    Options options = options_of(c.of, heads, c.run.begin, c.keys.begin);
    options.threads = 1;
    fulgur::forward(forward_call_of(c, heads, step), options, run_);
  }
}

template <class Args>
void StepCalls<Args>::compute(int64_t number, const Step& step) {
  const Heads heads = plan_.q_heads(plan_.heads(plan_.me, number));
  begin(step);
  const std::vector<RowsCall> calls = calls_of_step(number, plan_.me);
  const auto stream_of = [&](size_t call) -> const Stream& {
    return streams_[(call + (kBackward ? number : 0)) % 2];
  };
  bool stores = false;  // the first call stores dk and dv where those of the other calls are added
  Queue::Event added;   // after the last addition to dk and dv
  if constexpr (kBackward) {
    if (args_.dsinks.given() && (!plan_.ring || number == 0)) compute_dsinks(heads, step);
    stores = first_call_covers();
    const KeyRange stored = stores ? calls.front().keys : KeyRange{};
    if (has_lengths() || !plan_.gathers_queries()) {
      clear_outside(*stream_of(0).queue, stored, step.dk);
      clear_outside(*stream_of(0).queue, stored, step.dv);
    }
  } else {
    streams_[1].queue->wait(computing_->record());
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    const RowsCall& c = calls[i];
    const Stream& stream = stream_of(i);
    const Options options = options_of(c.of, heads, c.run.begin, c.keys.begin);
    if constexpr (kBackward) {
      Args call = call_of(c, heads, step);
      if (plan_.gathers_queries()) {  // other calls compute dk and dv: compute_key_gradients
        backward(call, options, c, heads, stream);
        continue;
      }
      const bool in_place = i == 0 && stores;
      if (i > 1 || !stores) stream.queue->wait(added);  // part_dk and part_dv are in use until then
      const auto part = [&](const Part& x) { return c.of.of(x).rows(0, count_of(c.keys)); };
      const Part dk = in_place ? keys_of(c, step.dk) : part(step.part_dk);
      const Part dv = in_place ? keys_of(c, step.dv) : part(step.part_dv);
      call.dk = dk.tensor();
      call.dv = dv.tensor();
      backward(call, options, c, heads, stream);
      if (plan_.ring) {
        const int64_t at = plan_.place(plan_.me, c.source, c.run);
        stream.queue->add(part_of(step.dq, c, at), part_of(sums.dq, c, at));
      }
      Queue& first = *stream_of(0).queue;
      if (!in_place) {  // in the first stream, so that the other one can go on with the next step
        first.wait(stream.queue->record());
        first.add(dk, keys_of(c, step.dk));
        first.add(dv, keys_of(c, step.dv));
      }
      added = first.record();
    } else {
      const Args call = forward_call_of(c, heads, step);
      fulgur::forward(call, options, stream.run);
      if (!plan_.ring) continue;
      const int64_t at = plan_.place(plan_.me, c.source, c.run);
      const Tensor out = part_of(sums.out, c, at).tensor(), lse = part_of(sums.lse, c, at).lse();
      merge(std::array<Partial, 2>{{{out, lse}, {call.out, call.lse}}}, {out, lse}, stream.run);
    }
  }
  if constexpr (kBackward) {
    if (plan_.gathers_queries()) compute_key_gradients(heads, step);
  }
}

template <class Args>
Args StepCalls<Args>::forward_call_of(const RowsCall& c, const Heads& heads,
                                      const Step& step) const {
  Args call = call_of(c, heads, step);
  const bool with_sinks = !plan_.ring || c.keys.empty();
  if (with_sinks) call.sinks = narrow(args_.sinks, 0, heads.begin, heads.count);
  return call;
}

/// The arguments of a call, but for the gradients of keys.
template <class Args>
Args StepCalls<Args>::call_of(const RowsCall& c, const Heads& heads, const Step& step) const {
  const int64_t at = plan_.place(plan_.me, c.source, c.run);
  const auto rows = [&](const Part& x) { return part_of(x, c, at); };
  const auto keys = [&](const Part& x) { return keys_of(c, x).tensor(); };
  Args call;
  call.q = rows(step.q).tensor();
  call.k = keys(step.k);
  call.v = keys(step.v);
  call.out = rows(step.out).tensor();
  if (p_.has(Arg::kLse) || plan_.ring) call.lse = rows(step.lse).lse();
  call.alibi_slopes = slopes(heads, c.of);
  call.rng_state = args_.rng_state;
  call.bias = of_bias(args_.bias, c, heads);
  call.tensors = args_.tensors;
  if constexpr (kBackward) {
    call.dout = rows(step.dout).tensor();
    if (p_.has(Arg::kDlse)) call.dlse = rows(step.dlse).lse();
    call.dq = rows(step.dq).tensor();
  }
  return call;
}

/// The keys of a call.
template <class Args>
Part StepCalls<Args>::keys_of(const RowsCall& c, const Part& x) const {
  return c.of.of(x).rows(c.keys_at, count_of(c.keys));
}

/// Computes a call, and adds its gradients of the bias and of tensors of expressions to the sums.
template <class Args>
void StepCalls<Args>::backward(Args call, const Options& options, const RowsCall& c,
                               const Heads& heads, const Stream& stream) const {
  if constexpr (kBackward) {
    auto whole = sums.whole.begin();
    Part bias, sum_of_bias;
    if (args_.dbias.given()) {
      const Tensor to = of_bias(whole->shaped(whole->sums), c, heads);
      bias = whole->of_call;
      bias.shape = to.shape;
      sum_of_bias = Part::of_rows(to);
      bias = bias.packed(bias.data);
      call.dbias = bias.tensor();
      ++whole;
    }
    set_gradients(call.tensors);
    fulgur::backward(call, options, stream.run);
    if (args_.dbias.given()) stream.queue->add(bias, sum_of_bias);
    for (; whole != sums.whole.end(); ++whole) stream.queue->add(whole->of_call, whole->sums);
  }
}

/// Has the gradients of tensors of expressions written to the memory for those of one call.
template <class Args>
void StepCalls<Args>::set_gradients(std::vector<TensorBinding>& tensors) const {
  auto buffer = sums.whole.rbegin();
  for (auto t = tensors.rbegin(); t != tensors.rend(); ++t) {
    if (!t->grad.given()) continue;
    t->grad = buffer->shaped(buffer->of_call);
    ++buffer;
  }
}

/// Clears the sums of dk or dv, but for the keys that the first call stores.
template <class Args>
void StepCalls<Args>::clear_outside(Queue& queue, const KeyRange& stored,
                                    const Part& of_keys) const {
  if (stored.empty()) return queue.clear(of_keys);
  for (int64_t b = 0; b < of_keys.shape[0]; ++b) {
    const Part of_sequence = of_keys.slice(0, b, 1);
    queue.clear(of_sequence.rows(0, stored.begin));
    queue.clear(of_sequence.rows(stored.end, of_keys.shape[1] - stored.end));
  }
}

/// Whether the first call of a step has all keys of all sequences, so that it stores its dk and dv
/// where those of the other calls are added.
template <class Args>
bool StepCalls<Args>::first_call_covers() const {
  return !plan_.ring && !plan_.gathers_queries() && !plan_.packed && !has_lengths() &&
         plan_.queries() > 0;
}

/// Writes the results of rows that do not exist: out and gradients 0, LSE -inf.
template <class Args>
void StepCalls<Args>::write_padding(const Step& step) const {
  if constexpr (kBackward) {
    fill(step.dq, 0);
  } else {
    fill(step.out, 0);
    if (p_.has(Arg::kLse)) fill(step.lse, -std::numeric_limits<float>::infinity());
  }
}

template <class Args>
void StepCalls<Args>::round_merged() const {
  if constexpr (!kBackward) {
    computing_->round(sums.out, part(args_.out));
    if (p_.has(Arg::kLse)) computing_->copy(sums.lse, Part::of_lse(args_.lse));
  }
}

template <class Args>
void StepCalls<Args>::fill(Part to, float value) const {
  const std::vector<float> row(to.shape[3], value);
  const int64_t bytes = std::ssize(row) * int64_t{sizeof(float)};
  Part from{memory_.buffer(Memory::kRow, bytes), DType::kF32, to.shape, {0, 0, 0, 1}, p_.device};
  computing_->upload(from.data, row.data(), bytes);
  computing_->round(from, to);
}

template <class Args>
ConstTensor StepCalls<Args>::slopes(const Heads& heads, const Sequences& s) const {
  const ConstTensor& t = args_.alibi_slopes;
  const ConstTensor own = t.rank == 2 ? narrow(t, 0, s.number, s.count) : t;
  return narrow(own, t.rank - 1, heads.begin, heads.count);
}

/// Computes dK and dV of the keys of this node from all queries.
template <class Args>
void StepCalls<Args>::compute_key_gradients(const Heads& heads, const Step& step) {
  if constexpr (kBackward) {
    each_run(plan_.k_rows, plan_.me, [&](int, const RowRun& run, const Sequences& s) {
      const int64_t size = std::min(run.end, s.keys) - run.begin;
      if (size <= 0) return;
      const int64_t first = plan_.q_rows.begin(run.sequence), count = s.queries;
      const auto queries = [&](const Part& x) { return s.of(x).rows(first, count); };
      const auto keys = [&](const Part& x) {
        return s.of(x).rows(plan_.k_rows.row(run), size).tensor();
      };
      Args call;
      call.q = queries(step.q).tensor();
      call.k = keys(step.k);
      call.v = keys(step.v);
      call.out = queries(step.out).tensor();
      call.lse = queries(step.lse).lse();
      call.dout = queries(step.dout).tensor();
      if (p_.has(Arg::kDlse)) call.dlse = queries(step.dlse).lse();
      call.alibi_slopes = slopes(heads, s);
      call.rng_state = args_.rng_state;
      call.bias = part_of_bias(args_.bias, s, heads, {0, count}, {run.begin, size});
      call.tensors = args_.tensors;
      set_gradients(
          call.tensors);  // not used, but without them calls have other kernels and other bits
      call.dk = keys(step.dk);
      call.dv = keys(step.dv);
      fulgur::backward(call, options_of(s, heads, 0, run.begin), run_);
    });
  }
}

/// Adds the gradients of sinks from the queries of this rank. They need no keys, as LSE holds them.
template <class Args>
void StepCalls<Args>::compute_dsinks(const Heads& heads, const Step& step) {
  if constexpr (kBackward) {
    const bool whole = plan_.gathers_queries();
    if (whole && plan_.me >= plan_.head_ranks) return;  // other ranks compute the same
    std::vector<double> sinks(heads.count),
        of_heads(heads.count);  // of 8 bytes, as large as any dtype
    const DType dtype = whole ? args_.sinks.dtype : DType::kF32;
    for (int64_t h = 0; h < heads.count; ++h) {
      const ConstTensor one = narrow(args_.sinks, 0, heads.begin + h, 1);
      double element = 0;  // as large as any dtype
      if (on_host(one)) {
        plan_.host_memory->download(&element, one.data, size_of(one.dtype));
      } else {
        computing_->download(&element, one.data, size_of(one.dtype));
      }
      store_element(sinks.data(), dtype, h, load_element(&element, one.dtype, 0));
    }
    Args call;
    call.q = step.q.tensor();
    call.k = step.k.rows(0, 0).tensor();
    call.v = step.v.rows(0, 0).tensor();
    call.out = step.out.tensor();
    call.lse = step.lse.lse();
    call.dout = step.dout.tensor();
    if (p_.has(Arg::kDlse)) call.dlse = step.dlse.lse();
    call.dq = step.dq.tensor();
    call.sinks = ConstTensor::contiguous(sinks.data(), dtype, {heads.count});
    std::byte* const buffer = memory_.buffer(Memory::kRow, p_.hq * int64_t{sizeof(double)});
    call.dsinks = Tensor::contiguous(buffer, dtype, {heads.count});
    call.dsinks.device = p_.device;
    Options options;
    options.invariant = p_.invariant;
    options.threads = plan_.options.threads;
    options.engine = plan_.options.engine;
    fulgur::backward(call, options, run_);
    computing_->download(of_heads.data(), buffer, heads.count * size_of(dtype));
    for (int64_t h = 0; h < heads.count; ++h) {
      dsinks[heads.begin + h] = load_element(of_heads.data(), dtype, h);
    }
  }
}

template <class Args>
void StepCalls<Args>::make_sums() {
  StepMemory arena(memory_.buffer(Memory::kSums, plan_.sum_bytes), p_.device);
  sums = Sums(plan_, args_, arena);
  if (plan_.ring) computing_->wait(memory_.record());
  if constexpr (kBackward) {
    if (plan_.ring) {
      computing_->clear(sums.dq);
      memory_.clear(sums.dk);
      memory_.clear(sums.dv);
    }
    for (const WholeGradient& g : sums.whole) memory_.clear(g.sums);
    if (args_.dsinks.given()) dsinks.resize(p_.hq);
  } else if (plan_.ring) {
    computing_->clear(sums.out);
    fill(sums.lse, -std::numeric_limits<float>::infinity());
  }
}

template class StepCalls<ForwardArgs>;
template class StepCalls<BackwardArgs>;

}  // namespace fulgur::distributed
