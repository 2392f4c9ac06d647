#include "plan/code_steps.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/convert.h"
#include "base/hadamard.h"
#include "call/append_then_attend.h"
#include "fulgur/error.h"
#include "plan/step_places.h"

namespace fulgur {
namespace {

/// Codes are of rotated rows already.
bool rotates_queries(const Problem& p) { return p.hadamard && !is_low_bit(p.dtypes.q); }

/// Whether the products of q and the means are added to the scores, and not to LSE.
bool scores_take_means(const Problem& p) {
  return p.has(Arg::kKMean) &&
         (p.softcap > 0 || p.has(Arg::kSinks) || p.expressions.changes_scores());
}

/// The products of rows of q and k_mean, scaled, as an expression indexes them: (batch, hq, sq) or
/// (hq, total_q).
TensorBinding products(const Problem& p, void* memory) {
  std::vector<TensorSymbol> others = p.expressions.graph(false).graph.tensors;
  TensorBinding of_rows{.name = "k_mean"};
  while (std::ranges::find(others, of_rows.name, &TensorSymbol::name) != others.end()) {
    of_rows.name += '_';
  }
  of_rows.tensor =
      p.packed ? ConstTensor::contiguous(memory, p.lse_dtype(), {p.hq, p.total_q}, p.device)
               : ConstTensor::contiguous(memory, p.lse_dtype(), {p.batch, p.hq, p.sq}, p.device);
  return of_rows;
}
int64_t products_bytes(const Problem& p) {
  return scores_take_means(p) ? p.hq * p.total_q * size_of(p.lse_dtype()) : 0;
}

/// The expressions of such scores: the means first, then the softcap, then those of the user.
expression::Expressions with_means(const Problem& p) {
  using namespace symbols;
  const TensorBinding of_rows = products(p, nullptr);
  const TensorSymbol tensor(of_rows.name, of_rows.tensor.dtype, of_rows.tensor.rank);
  Expr whole = score + (p.packed ? tensor(h, q0 + q) : tensor(b, h, q));
  if (p.softcap > 0) whole = Expr(p.softcap) * tanh(whole / Expr(p.softcap));
  return p.expressions.of(whole, of_rows);
}

/// The offsets in the workspace of the memory of CodeSteps, and of its products.
struct Places : StepPlaces {
  Places(const Problem& p, const CodeSteps& steps, int64_t begin)
      : StepPlaces(rotates_queries(p) ? rotated_bytes(p) : 0, steps.bytes(), begin) {
    Arena arena(end);
    products = arena.take(products_bytes(p));
    end = arena.end();
  }
  int64_t products;
};

class CodeStepsExecutable final : public Executable {
 public:
  CodeStepsExecutable(const Problem& p, const Engine& engine,
                      std::unique_ptr<const CodeSteps> steps,
                      std::unique_ptr<const Executable> attention)
      : p_(p),
        engine_(engine),
        steps_(std::move(steps)),
        attention_(std::move(attention)),
        at_(p, *steps_, attention_->workspace().bytes) {}

  void run(const Call& call, const Run& run) const override {
    ForwardArgs args = *std::get<const ForwardArgs*>(call);
    engine_.with_workspace(p_.device, workspace(), run, [&](void* memory) {
      auto* const bytes = static_cast<std::byte*>(memory);
      if (rotates_queries(p_) && p_.total_q > 0) {
        const Tensor to = rotated_like(args.q, bytes + at_.rotated);
        const int64_t batch = p_.packed ? 1 : p_.batch;
        steps_->rotate({args.q, to, false, batch, p_.total_q / batch, p_.hq, p_.d}, run);
        args.q = to;
      }
      if (scores_take_means(p_)) {
        const TensorBinding of_rows = products(p_, bytes + at_.products);
        steps_->multiply_means(args, bytes + at_.products, bytes + at_.step, run);
        args.tensors.push_back(of_rows);
      }
      Run attend = run;
      if (at_.end > 0) attend.workspace = {bytes, attention_->workspace().bytes};
      attention_->run(&args, attend);
      if (adds_means()) steps_->add_means(args, bytes + at_.step, run);
    });
  }

  Explanation explain() const override {
    Explanation e = attention_->explain();
    if (rotates_queries(p_)) {
      e.decisions.insert(e.decisions.begin(), "q is rotated first, as the keys are (hadamard)");
    }
    if (adds_means()) e.decisions.push_back("lse takes the products of q and k_mean at last");
    if (scores_take_means(p_)) {
      e.decisions.insert(e.decisions.begin(),
                         "scores take the products of q and k_mean, which are computed first");
    }
    return e;
  }

  Estimate estimate(const std::vector<Sequence>& lengths) const override {
    Estimate attention = attention_->estimate(lengths);
    attention.at_least = true;
    return attention;
  }

  WorkspaceNeed workspace() const override { return at_.need(attention_->workspace()); }

 private:
  bool adds_means() const {
    return p_.has(Arg::kKMean) && p_.has(Arg::kLse) && !scores_take_means(p_);
  }

  Problem p_;
  const Engine& engine_;
  std::unique_ptr<const CodeSteps> steps_;
  std::unique_ptr<const Executable> attention_;
  Places at_;
};

}  // namespace

bool has_code_steps(const Problem& p) { return p.hadamard || p.has(Arg::kKMean); }

Problem without_code_steps(Problem p) {
  if (scores_take_means(p)) {
    p.expressions = with_means(p);
    p.softcap = 0;
  }
  if (rotates_queries(p)) p = with_rotated_queries(p);
  p.hadamard = false;
  p.given.set(Arg::kKMean, false);
  return p;
}

std::unique_ptr<const Executable> plan_code_steps(const Problem& p, const Engine& engine,
                                                  int threads, const PlanAttention& plan_attention,
                                                  std::vector<std::string>* rejected) {
  if (p.has(Arg::kKMean) && p.softcap > 0 && p.has(Arg::kAlibiSlopes)) {
    throw Error(Status::kUnsupported,
                "k_mean: given with softcap and alibi_slopes, want one of them: both see scores "
                "that have their means");
  }
  auto steps = engine.code_steps(rotates_queries(p) ? with_rotated_queries(p) : p, threads);
  Problem attention = without_code_steps(p);
  if (attention.max_workspace > 0) {
    attention.max_workspace = Places(p, *steps, 0).left_of(attention.max_workspace);
  }
  return std::make_unique<CodeStepsExecutable>(p, engine, std::move(steps),
                                               plan_attention(attention, rejected));
}

}  // namespace fulgur
