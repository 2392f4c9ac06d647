#include "reference/reference_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "base/convert.h"
#include "base/parallel.h"
#include "call/dropout.h"
#include "call/kv_locator.h"
#include "call/padding.h"
#include "call/tree.h"
#include "host/host_engine.h"
#include "reference/algorithms.h"
#include "reference/expressions.h"

namespace fulgur::reference {
namespace {

constexpr int64_t kFastMemory = 32 * 1024;  // elements: half of a common L2 cache
constexpr int64_t kScoreRows = 64;          // of a task: each copies the keys of its head

/// Rows [begin, begin + count) of one head, dense.
std::vector<double> gather(const ConstTensor& t, const Layout& layout, int64_t b, int64_t begin,
                           int64_t count, int64_t h, int64_t dim) {
  std::vector<double> dense(count * dim);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t at = layout.offset(b, begin + r, h);
    for (int64_t c = 0; c < dim; ++c) dense[r * dim + c] = load_element(t.data, t.dtype, at + c);
  }
  return dense;
}

/// Codes of rows that lie at [begin, ...) of an entry to numbers; `b` and `kv` as in Scales.
void descale(const Scaling& scaling, int64_t b, int64_t kv, int64_t entry, int64_t begin, int64_t h,
             int64_t dim, std::vector<double>& dense) {
  if (!scaling.given()) return;
  const int64_t columns = dim / scaling.scale.at.groups;
  for (size_t i = 0; i < dense.size(); ++i) {
    const int64_t row = begin + static_cast<int64_t>(i) / dim;
    const int64_t group = static_cast<int64_t>(i) % dim / columns;
    const ScaleTensor& zero = scaling.zero_point;
    if (zero.given()) dense[i] -= zero.of(b, kv, entry, row, h, group);
    dense[i] *= scaling.scale.of(b, kv, entry, row, h, group);
  }
}

void scatter(const std::vector<double>& dense, const Tensor& t, const Layout& layout, int64_t b,
             int64_t begin, int64_t h, int64_t dim) {
  for (size_t i = 0; i < dense.size(); ++i) {
    const int64_t row = begin + static_cast<int64_t>(i) / dim;
    store_element(t.data, t.dtype, layout.offset(b, row, h) + static_cast<int64_t>(i) % dim,
                  dense[i]);
  }
}

/// Writes sums, side by side in the shape of a tensor, to its elements.
void write_sums(const std::vector<double>& sums, const Tensor& to) {
  for (size_t n = 0; n < sums.size(); ++n) {
    int64_t at = 0, rest = static_cast<int64_t>(n);
    for (int i = to.rank - 1; i >= 0; --i) {
      at += rest % to.shape[i] * to.strides[i];
      rest /= to.shape[i];
    }
    store_element(to.data, to.dtype, at, sums[n]);
  }
}

/// One call.
template <class Args>
class Work {
 public:
  Work(const Problem& problem, int threads, const PassExpressions& expressions, const Args& args,
       const Run& run)
      : p_(problem),
        threads_(threads),
        args_(args),
        sequences_(problem, args),
        keys_(problem, sequences_, args),
        scaling_(problem, args),
        dropout_(dropout_of(problem, args, run)),
        expressions_(expressions),
        bound_(problem.expressions.bound(args.tensors)) {
    for (const TensorBinding& binding : bound_) tensors_.push_back(binding.tensor);
  }

  void forward() const {
    if (p_.total_q == 0) return;  // with no rows there may be any number of heads
    parallel_for(p_.batch * p_.hq, threads_, [&](int64_t item) {
      const int64_t b = item / p_.hq, h = item % p_.hq, kv = h / p_.group();
      const Sequence s = sequences_[b];
      auto q = gather(args_.q, p_.q, b, s.q_begin, s.sq, h, p_.d);
      descale(scaling_.q, b, kv, b, s.q_begin, h, p_.d, q);
      const auto k = gather_keys(args_.k, p_.k, scaling_.k, b, s, kv, p_.d);
      const auto v = gather_keys(args_.v, p_.v, scaling_.v, b, s, kv, p_.dv);
      HeadExpressions expressions = expressions_of(b, h, s, {});
      const Forward f = forward_of(head(b, h, s, q, k, v, &expressions));
      scatter(f.o, args_.out, p_.out, b, s.q_begin, h, p_.dv);
      if (p_.has(Arg::kLse)) scatter(f.lse, args_.lse, p_.lse, b, s.q_begin, h, 1);
    });
    write_padding(p_, sequences_, args_);
  }

  void backward() const {
    std::vector<double> dsinks(p_.has(Arg::kDsinks) && p_.total_q > 0 ? p_.batch * p_.hq : 0);
    std::vector<double> dbias(args_.dbias.given() ? args_.dbias.numel() : 0);
    std::vector<std::vector<double>> of_tensors(bound_.size());
    for (size_t n = 0; n < bound_.size(); ++n) {
      if (bound_[n].grad.given()) of_tensors[n].resize(bound_[n].grad.numel());
    }
    gradients(dsinks, dbias, of_tensors);
    if (p_.has(Arg::kDsinks)) write_dsinks(dsinks);
    write_sums(dbias, args_.dbias);
    for (size_t n = 0; n < bound_.size(); ++n) write_sums(of_tensors[n], bound_[n].grad);
  }

  void scores() const {
    const Tensor& to = args_.scores;
    const int64_t* const rows = chosen_rows();
    const int64_t count = to.shape[2], blocks = (count + kScoreRows - 1) / kScoreRows;
    const bool logits = args_.stage != ScoreStage::kProbabilities;
    parallel_for(p_.batch * p_.hq * blocks, threads_, [&](int64_t item) {
      const int64_t b = item / blocks / p_.hq, h = item / blocks % p_.hq, kv = h / p_.group();
      const int64_t begin = item % blocks * kScoreRows;
      const Sequence s = sequences_[b];
      const auto q = gather(args_.q, p_.q, b, s.q_begin, s.sq, h, p_.d);
      const auto k = gather_keys(args_.k, p_.k, scaling_.k, b, s, kv, p_.d);
      HeadExpressions expressions = expressions_of(b, h, s, {});
      Head one = head(b, h, s, q, k, {}, &expressions);
      one.rule = rule_until(args_.stage, one.rule);
      for (int64_t r = begin; r < std::min(begin + kScoreRows, count); ++r) {
        // Queries and keys that do not exist have no score: logits are -inf there, probabilities 0.
        std::vector<double> row(p_.sk, logits ? -std::numeric_limits<double>::infinity() : 0);
        const int64_t i = rows == nullptr ? r : rows[r];
        if (i < s.sq) score_row(one, args_.stage, i, row.data());
        const int64_t at = b * to.strides[0] + h * to.strides[1] + r * to.strides[2];
        for (int64_t j = 0; j < p_.sk; ++j) store_element(to.data, to.dtype, at + j, row[j]);
      }
    });
  }

 private:
  /// A head by the algorithm of the problem.
  Forward forward_of(const Head& h) const {
    if (p_.algorithm == Algorithm::kStandard) return standard_forward(h);
    if (p_.algorithm != Algorithm::kFa1) return flash2_forward(h, kFastMemory);
    Flash1Forward f = flash1_forward(h, kFastMemory);
    for (int64_t i = 0; i < h.sq; ++i) f.m[i] += std::log(f.l[i]);  // LSE
    return {std::move(f.o), std::move(f.m)};
  }
  Backward backward_of(const Head& h, const Forward& f, const OutputGradient& dout,
                       const BiasGradient& dbias) const {
    if (p_.algorithm == Algorithm::kStandard) return standard_backward(h, dout, nullptr, dbias);
    if (p_.algorithm != Algorithm::kFa1)
      return flash2_backward(h, f, dout, kFastMemory, nullptr, dbias);
    const Flash1Forward left{f.o, std::vector<double>(h.sq, 1), f.lse};  // LSE = m + log(l)
    return flash1_backward(h, left, dout, kFastMemory);
  }

  /// The keys of a sequence of one head of K or V, dense.
  std::vector<double> gather_keys(const ConstTensor& t, const Layout& layout,
                                  const Scaling& scaling, int64_t b, const Sequence& s, int64_t kv,
                                  int64_t dim) const {
    std::vector<double> dense;
    dense.reserve(s.sk * dim);
    for (KvRuns run(keys_.of(b, s), 0, s.sk); !run.done(); run.next()) {
      auto rows = gather(t, layout, run.entry, run.row, run.count, kv, dim);
      descale(scaling, b, kv, run.entry, run.row, kv, dim, rows);
      dense.insert(dense.end(), rows.begin(), rows.end());
    }
    return dense;
  }

  /// Null: all rows.
  const int64_t* chosen_rows() const {
    if (!p_.has(Arg::kRows)) return nullptr;
    const auto* rows = static_cast<const int64_t*>(args_.rows.data);
    for (int64_t r = 0; r < args_.rows.shape[0]; ++r) {
      if (rows[r] >= 0 && rows[r] < p_.sq) continue;
      fail("rows", "got {} at {}, want a query of the {} of a sequence", rows[r], r, p_.sq);
    }
    return rows;
  }

  /// `dsinks`, where it is not empty, takes those of every head of every sequence; `dbias` and
  /// those of tensors are added to, side by side in their shapes.
  void gradients(std::vector<double>& dsinks, std::vector<double>& dbias,
                 std::vector<std::vector<double>>& of_tensors) const {
    if (p_.total_q == 0 && p_.total_k == 0) return;
    // One task owns a kv head, so that the gradients of its q heads add up in a fixed order, and
    // where heads or sequences share a bias or a tensor, one thread does.
    const bool alone = (!dbias.empty() && (p_.dbias.batch == 0 || p_.dbias.head == 0)) ||
                       p_.expressions.wants_gradients();
    parallel_for(p_.batch * p_.hk, alone ? 1 : threads_, [&](int64_t item) {
      const int64_t b = item / p_.hk, kv = item % p_.hk;
      const Sequence s = sequences_[b];
      const auto k = gather_keys(args_.k, p_.k, scaling_.k, b, s, kv, p_.d);
      const auto v = gather_keys(args_.v, p_.v, scaling_.v, b, s, kv, p_.dv);
      std::vector<double> dk(k.size()), dv(v.size());
      const int64_t heads = s.sq == 0 ? 0 : p_.group();
      for (int64_t h = kv * p_.group(); h < kv * p_.group() + heads; ++h) {
        const auto q = gather(args_.q, p_.q, b, s.q_begin, s.sq, h, p_.d);
        const auto dout = gather(args_.dout, p_.dout, b, s.q_begin, s.sq, h, p_.dv);
        const auto dlse = !p_.has(Arg::kDlse)
                              ? std::vector<double>()
                              : gather(args_.dlse, p_.dlse, b, s.q_begin, s.sq, h, 1);
        const OutputGradient gradient{dout.data(), p_.has(Arg::kDlse) ? dlse.data() : nullptr};
        const Forward f{gather(args_.out, p_.out, b, s.q_begin, s.sq, h, p_.dv),
                        gather(args_.lse, p_.lse, b, s.q_begin, s.sq, h, 1)};
        HeadExpressions expressions = expressions_of(b, h, s, of_tensors);
        const Backward g = backward_of(head(b, h, s, q, k, v, &expressions), f, gradient,
                                       bias_gradient(b, h, dbias));
        if (p_.wants_dq()) scatter(g.dq, args_.dq, p_.dq, b, s.q_begin, h, p_.d);
        if (!dsinks.empty()) dsinks[b * p_.hq + h] = g.dsink;
        std::transform(dk.begin(), dk.end(), g.dk.begin(), dk.begin(), std::plus<>());
        std::transform(dv.begin(), dv.end(), g.dv.begin(), dv.begin(), std::plus<>());
      }
      if (!p_.wants_dk_dv()) return;
      scatter(dk, args_.dk, p_.dk, b, s.k_begin, kv, p_.d);
      scatter(dv, args_.dv, p_.dv_grad, b, s.k_begin, kv, p_.dv);
    });
    write_padding(p_, sequences_, args_);
  }

  void write_dsinks(const std::vector<double>& of_sequences) const {
    for (int64_t h = 0; h < p_.hq; ++h) {
      double sum = 0;
      for (size_t at = h; at < of_sequences.size(); at += p_.hq) sum += of_sequences[at];
      store_element(args_.dsinks.data, args_.dsinks.dtype, h, sum);
    }
  }

  /// Where a head's part of the gradient of the bias is added up.
  BiasGradient bias_gradient(int64_t b, int64_t h, std::vector<double>& dbias) const {
    if (dbias.empty()) return {};
    const auto& n = args_.dbias.shape;
    const int64_t head = (n[0] == 1 ? 0 : b) * n[1] + (n[1] == 1 ? 0 : h);
    return {&dbias[head * n[2] * n[3]], n[2] == 1 ? 0 : n[3], n[3] == 1 ? 0 : 1};
  }

  double slope(int64_t b, int64_t h) const {
    if (!p_.has(Arg::kAlibiSlopes)) return 0;
    return load_element(args_.alibi_slopes.data, DType::kF32,
                        b * p_.slopes_batch + h * p_.slopes_head);
  }

  double sink(int64_t h) const {
    if (!p_.has(Arg::kSinks)) return -std::numeric_limits<double>::infinity();
    return load_element(args_.sinks.data, args_.sinks.dtype, h);
  }

  HeadBias bias(int64_t b, int64_t h) const {
    if (!p_.has(Arg::kBias)) return {};
    const Problem::Bias& l = p_.bias;
    return {args_.bias.data, l.dtype, b * l.batch + h * l.head, l.row, l.key};
  }

  HeadExpressions expressions_of(int64_t b, int64_t h, const Sequence& s,
                                 std::span<std::vector<double>> of_tensors) const {
    return {expressions_, tensors_, place_of(p_, b, h, s), of_tensors};
  }

  Head head(int64_t b, int64_t h, const Sequence& s, const std::vector<double>& q,
            const std::vector<double>& k, const std::vector<double>& v,
            HeadExpressions* expressions) const {
    return {s.sq,
            s.sk,
            p_.d,
            p_.dv,
            q.data(),
            k.data(),
            v.data(),
            Rule{.scale = p_.scale,
                 .softcap = p_.softcap,
                 .slope = slope(b, h),
                 .sink = sink(h),
                 .band = {p_.mask.left, p_.mask.right, p_.mask.chunk, p_.mask.top_left},
                 .tree = tree_words(p_, tree_mask_of(args_), b, s),
                 .dropout = {p_.dropout_p, dropout_},
                 .head_index = dropout_head(p_, b, h),
                 .bias = bias(b, h),
                 .expressions = p_.expressions.given() ? expressions : nullptr,
                 .part = {p_.origin.query, s.first_key, s.shift}}};
  }

  const Problem& p_;
  int threads_;
  const Args& args_;
  Sequences sequences_;
  KvLocator keys_;
  OperandScaling scaling_;
  kernels::DropoutMask dropout_;
  const PassExpressions& expressions_;
  std::vector<TensorBinding> bound_;
  std::vector<ConstTensor> tensors_;
};

class ReferenceExecutable final : public Executable {
 public:
  ReferenceExecutable(const Problem& problem, int threads)
      : p_(problem),
        threads_(threads),
        expressions_(problem.expressions.graph(problem.pass == Pass::kBackward)) {}

  void run(const Call& call, const Run& run) const override {
    switch (p_.pass) {
      case Pass::kForward:
        return work(*std::get<const ForwardArgs*>(call), run).forward();
      case Pass::kBackward:
        return work(*std::get<const BackwardArgs*>(call), run).backward();
      case Pass::kScores:
        return work(*std::get<const ScoresArgs*>(call), run).scores();
    }
  }

  Explanation explain() const override {
    const int64_t rows = p_.sq + p_.sk, threads = thread_count(threads_);
    const int64_t copies = p_.pass == Pass::kForward ? 1 : 2;  // of every tensor of a head
    const int64_t copied = threads * copies * rows * (p_.d + p_.dv) * 8;
    Explanation e;
    const char* const algorithm = p_.algorithm == Algorithm::kStandard ? "standard attention"
                                  : p_.algorithm == Algorithm::kFa1    ? "FlashAttention"
                                                                       : "FlashAttention-2";
    e.decisions = {fmt::format("{} in double precision, one head a task", algorithm),
                   fmt::format("copies heads to {} bytes of its own", copied)};
    e.Br = e.Bc = 64;
    e.details.add("kernel", algorithm);
    e.details.add("Br", e.Br);
    e.details.add("Bc", e.Bc);
    e.details.add("threads", threads);
    e.details.add("copied_bytes", copied);
    return e;
  }

  WorkspaceNeed workspace() const override { return {}; }

 private:
  template <class Args>
  Work<Args> work(const Args& args, const Run& run) const {
    return Work(p_, threads_, expressions_, args, run);
  }

  Problem p_;
  int threads_;
  PassExpressions expressions_;
};

class ReferenceEngine final : public host::HostEngine {
 public:
  std::string name() const override { return "reference"; }
  std::string description() const override { return "the papers' algorithms in double precision"; }
  std::string unavailable() const override { return {}; }
  std::string rejects(const Problem& p) const override {
    if (p.device.type != DeviceType::kCpu) return "computes tensors on cpu";
    if (p.algorithm == Algorithm::kFa1 && (p.has(Arg::kDbias) || p.expressions.wants_gradients())) {
      return "computes gradients of a bias and of tensors of expressions by standard and fa2";
    }
    return algorithm_rejected(p.algorithm,
                              {Algorithm::kStandard, Algorithm::kFa1, Algorithm::kFa2});
  }
  std::string only_by_name(const Problem& p) const override {
    return p.pass == Pass::kScores || p.dtypes.in({DType::kF64})
               ? ""
               : "computes f64 unless asked for by name";
  }
  std::unique_ptr<const Executable> plan(const Problem& problem, int threads) const override {
    return std::make_unique<ReferenceExecutable>(problem, threads);
  }
};

}  // namespace

const Engine& engine() {
  static const ReferenceEngine kEngine;
  return kEngine;
}

}  // namespace fulgur::reference
