#include "plan.h"

#include <fmt/format.h>

#include "fulgur/error.h"
#include "tiles.h"

namespace fulgur {

double visible_scores(const Problem& p) {
  if (p.packed && p.cu_q.empty()) {  // lengths known on the device only: the longest stand for all
    return static_cast<double>(p.batch * p.hq) * visible_scores(p.mask, {0, 0, p.sq, p.sk});
  }
  if (!p.packed && p.used_k.empty()) {
    return static_cast<double>(p.batch * p.hq) * visible_scores(p.mask, {0, 0, p.sq, p.sk});
  }
  double n = 0;
  for (int64_t b = 0; b < p.batch; ++b) n += visible_scores(p.mask, p.sequence(b));
  return n * static_cast<double>(p.hq);
}

double flops(const Problem& p) {
  const auto d = static_cast<double>(p.d), dv = static_cast<double>(p.dv);
  return visible_scores(p) * (p.pass == Pass::kForward ? 2 * d + 2 * dv : 6 * d + 4 * dv);
}

double bytes(const Problem& p) {
  const double q_rows = static_cast<double>(p.total_q) * static_cast<double>(p.hq);
  const double k_rows = static_cast<double>(p.total_k) * static_cast<double>(p.hk);
  const auto d = static_cast<double>(p.d), dv = static_cast<double>(p.dv);
  const double once = q_rows * (d + dv) + k_rows * (d + dv);  // q, out, k, v
  const double gradients = p.pass == Pass::kBackward ? once : 0;
  const double lse = p.want_lse ? q_rows * (p.dtype == DType::kF64 ? 8 : 4) : 0;
  return (once + gradients) * static_cast<double>(size_of(p.dtype)) + lse;
}

namespace {

void require(const Plan::Impl& impl, Pass pass) {
  if (impl.problem.pass == pass) return;
  throw Error(Status::kInvalidArgument,
              pass == Pass::kForward
                  ? "args: got tensors of the forward pass, want BackwardArgs as planned"
                  : "args: got tensors of the backward pass, want ForwardArgs as planned");
}

std::string summary(const Problem& p) {
  std::string s = fmt::format("{} attention, {} on {}: batch {}, ",
                              p.pass == Pass::kForward ? "forward" : "backward", name_of(p.dtype),
                              name_of(p.device), p.batch);
  s += p.packed
           ? fmt::format("packed {} x {} rows, longest {} x {}, ", p.total_q, p.total_k, p.sq, p.sk)
           : fmt::format("sq {}, sk {}, ", p.sq, p.sk);
  s += fmt::format("hq {}, hk {}, d {}, dv {}, ", p.hq, p.hk, p.d, p.dv);
  if (p.mask == full()) {
    s += "full";
  } else if (p.mask == causal()) {
    s += "causal";
  } else {
    s += fmt::format("window ({}, {})", p.mask.left, p.mask.right);
  }
  s += fmt::format(", scale {:.6g}", p.scale);
  if (p.softcap > 0) s += fmt::format(", softcap {}", p.softcap);
  if (p.alibi_slopes.given()) s += ", ALiBi";
  if (p.dropout.p > 0) s += fmt::format(", dropout {}", p.dropout.p);
  if (p.seqused_k.given()) s += ", seqused_k";
  return s;
}

std::string amount(double x, const char* unit) {
  const char* prefixes[] = {"", "k", "M", "G", "T", "P"};
  int i = 0;
  for (; x >= 1000 && i < 5; ++i) x /= 1000;
  return fmt::format("{:.4g} {}{}", x, prefixes[i], unit);
}

}  // namespace

void Plan::run(const ForwardArgs& args) const {
  require(*impl_, Pass::kForward);
  check_run(impl_->forward, args);
  impl_->executable->run(args);
}

void Plan::run(const BackwardArgs& args) const {
  require(*impl_, Pass::kBackward);
  check_run(impl_->backward, args);
  impl_->executable->run(args);
}

std::string Plan::explain() const {
  const Explanation e = impl_->executable->explain();
  const double work = flops(), moved = bytes();
  std::string s = fmt::format("{}\nengine    {}: {}\n", summary(impl_->problem),
                              impl_->engine->name(), impl_->engine->description());
  for (const std::string& decision : e.decisions) s += fmt::format("plan      {}\n", decision);
  for (const std::string& why : impl_->rejected) s += fmt::format("rejected  {}\n", why);
  for (const std::string& why : e.rejected) s += fmt::format("rejected  {}\n", why);
  s += fmt::format("work      {}, {} of tensors, {:.1f} flop per byte\n", amount(work, "flop"),
                   amount(moved, "B"), moved > 0 ? work / moved : 0);
  s += fmt::format("memory    {} besides the tensors\n",
                   amount(static_cast<double>(e.workspace_bytes), "B"));
  return s;
}

std::string Plan::engine() const { return impl_->engine->name(); }
double Plan::flops() const { return fulgur::flops(impl_->problem); }
double Plan::bytes() const { return fulgur::bytes(impl_->problem); }
int64_t Plan::workspace_bytes() const { return impl_->executable->explain().workspace_bytes; }

TileMap Plan::tiles(int64_t b) const {
  const Problem& p = impl_->problem;
  if (b < 0 || b >= p.batch) {
    throw Error(Status::kInvalidArgument,
                fmt::format("b: got {}, want a sequence of the batch of {}", b, p.batch));
  }
  if ((p.packed && p.cu_q.empty()) || (p.seqused_k.given() && p.used_k.empty())) {
    throw Error(Status::kUnsupported, "tiles: the lengths of the sequences are on the device");
  }
  const Explanation e = impl_->executable->explain();
  return tile_map(p.mask, p.sequence(b), e.Br, e.Bc);
}

}  // namespace fulgur
