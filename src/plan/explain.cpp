// The description of a plan, as text and as data.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "call/mask.h"
#include "call/tensors.h"
#include "plan/plan.h"

namespace fulgur {
namespace {

std::string summary(const Problem::Cache& c) {
  std::string s;
  if (c.paged()) {
    s += fmt::format(", {} pages of {} keys, ", c.entries, c.page);
    s += c.pages == Problem::Cache::Pages::kTable
             ? fmt::format("page_table of {} a sequence", c.ids)
             : fmt::format("page_table of {} by page_indptr", c.ids);
  }
  return s;
}

/// The names of the optional tensors that a call has.
Details::Texts optional_tensors(const Problem& p) {
  Details::Texts names;
  const auto add = [&](const TensorRule& rule, const auto&) {
    if (rule.need == Need::kOptional && p.has(rule.arg)) names.emplace_back(rule.name);
  };
  if (p.pass == Pass::kForward) {
    const ForwardArgs none;
    for_each_tensor(add, none);
  } else {
    const BackwardArgs none;
    for_each_tensor(add, none);
  }
  return names;
}

/// Those of the dtypes of k, v and out that are not that of q, by the names of their tensors.
std::vector<std::pair<const char*, DType>> other_dtypes(const Problem& p) {
  std::vector<std::pair<const char*, DType>> others;
  for (const auto& [name, dtype] :
       {std::pair{"k", p.dtypes.k}, std::pair{"v", p.dtypes.v}, std::pair{"out", p.dtypes.out}}) {
    if (dtype != p.dtypes.q) others.emplace_back(name, dtype);
  }
  return others;
}

std::string summary(const Problem& p) {
  std::string s = fmt::format("{} attention, {} on {}: batch {}, ",
                              p.pass == Pass::kForward ? "forward" : "backward",
                              name_of(p.dtypes.q), name_of(p.device), p.batch);
  for (const auto& [name, dtype] : other_dtypes(p)) {
    s += fmt::format("{} of {}, ", name, name_of(dtype));
  }
  if (p.packed_k) {
    s += fmt::format("packed {} x {} rows, longest {} x {}, ", p.total_q, p.total_k, p.sq, p.sk);
  } else if (p.packed) {
    s += fmt::format("packed {} rows, longest {}, sk {}, ", p.total_q, p.sq, p.sk);
  } else {
    s += fmt::format("sq {}, sk {}, ", p.sq, p.sk);
  }
  s += fmt::format("hq {}, hk {}, d {}, dv {}, ", p.hq, p.hk, p.d, p.dv);
  const Mask band = window(p.mask.left, p.mask.right);
  if (band == full()) {
    s += "full";
  } else if (band == causal()) {
    s += "causal";
  } else {
    s += fmt::format("window ({}, {})", band.left, band.right);
  }
  if (p.mask.chunk > 0) s += fmt::format(", chunks of {} keys", p.mask.chunk);
  if (p.mask.top_left) s += ", aligned top-left";
  s += fmt::format(", scale {:.6g}", p.scale);
  if (p.softcap > 0) s += fmt::format(", softcap {}", p.softcap);
  if (p.dropout_p > 0) s += fmt::format(", dropout {}", p.dropout_p);
  if (p.fast_codes) s += ", fast_codes";
  if (p.hadamard) s += ", hadamard";
  if (p.expressions.changes_scores()) s += ", score_mod " + p.expressions.score_text();
  if (p.expressions.masks()) s += ", mask_mod " + p.expressions.mask_text();
  s += summary(p.cache);
  if (p.prefix_groups > 0) s += fmt::format(", shared prefixes of {} groups", p.prefix_groups);
  if (p.append.given) s += fmt::format(", {} new rows of k and v", p.append.tokens);
  for (const std::string& name : optional_tensors(p)) s += ", " + name;
  return s;
}

/// The problem as data: the same as summary() has as text.
Details call_details(const Problem& p) {
  Details call;
  call.add("pass", p.pass == Pass::kForward ? "forward" : "backward");
  call.add("dtype", name_of(p.dtypes.q));
  for (const auto& [name, dtype] : other_dtypes(p)) {
    call.add(fmt::format("{}_dtype", name), name_of(dtype));
  }
  call.add("device", name_of(p.device));
  for (const auto& [name, size] :
       {std::pair{"batch", p.batch}, std::pair{"sq", p.sq}, std::pair{"sk", p.sk},
        std::pair{"hq", p.hq}, std::pair{"hk", p.hk}, std::pair{"d", p.d}, std::pair{"dv", p.dv}}) {
    call.add(name, size);
  }
  if (p.packed) call.add("total_q", p.total_q);
  if (p.packed_k) call.add("total_k", p.total_k);
  if (p.mask.left >= 0) call.add("left", p.mask.left);
  if (p.mask.right >= 0) call.add("right", p.mask.right);
  if (p.mask.chunk > 0) call.add("chunk", p.mask.chunk);
  if (p.mask.top_left) call.add("top_left", true);
  call.add("scale", p.scale);
  if (p.softcap > 0) call.add("softcap", p.softcap);
  if (p.dropout_p > 0) call.add("dropout_p", p.dropout_p);
  if (p.invariant) call.add("invariant", true);
  if (p.hadamard) call.add("hadamard", true);
  if (p.algorithm != Algorithm::kAny) call.add("algorithm", name_of(p.algorithm));
  if (p.expressions.changes_scores()) call.add("score_mod", p.expressions.score_text());
  if (p.expressions.masks()) call.add("mask_mod", p.expressions.mask_text());
  if (p.cache.paged()) {
    call.add("page", p.cache.page);
    call.add("pages", p.cache.entries);
  }
  if (p.prefix_groups > 0) call.add("prefix_groups", p.prefix_groups);
  if (p.append.given) call.add("append_tokens", p.append.tokens);
  call.add("optional_tensors", optional_tensors(p));
  return call;
}

Estimate estimate_of(const Plan::Impl& impl) {
  return impl.lengths ? impl.executable->estimate(*impl.lengths) : Estimate{};
}

std::string amount(double x, const char* unit) {
  const char* prefixes[] = {"", "k", "M", "G", "T", "P"};
  int i = 0;
  for (; x >= 1000 && i < 5; ++i) x /= 1000;
  return fmt::format("{:.4g} {}{}", x, prefixes[i], unit);
}

}  // namespace

std::string Plan::explain() const {
  const Problem& p = impl_->problem;
  const Explanation e = impl_->executable->explain();
  std::string s = fmt::format("{}\nengine    {}: {}\n", summary(p), impl_->engine->name(),
                              impl_->engine->description());
  for (const std::string& decision : e.decisions) s += fmt::format("plan      {}\n", decision);
  for (const std::string& why : impl_->rejected) s += fmt::format("rejected  {}\n", why);
  for (const std::string& why : e.rejected) s += fmt::format("rejected  {}\n", why);
  const double moved = bytes();
  if (impl_->lengths) {
    const double work = flops();
    s += fmt::format("work      {}, {} of tensors, {:.1f} flop per byte\n", amount(work, "flop"),
                     amount(moved, "B"), moved > 0 ? work / moved : 0);
    const std::string expected = estimate_of(*impl_).sentence;
    if (!expected.empty()) s += fmt::format("expects   {}\n", expected);
  } else {
    s += fmt::format("work      as the lengths on the device say, up to {} of tensors\n",
                     amount(moved, "B"));
  }
  const int64_t wanted = workspace().bytes;
  s += fmt::format("memory    {} besides the tensors: {} bytes",
                   amount(static_cast<double>(wanted), "B"), wanted);
  if (p.max_workspace > 0) s += fmt::format(", max_workspace is {}", p.max_workspace);
  s += "\n";
  return s;
}

std::string Plan::explain(std::span<const TensorBinding> tensors) const {
  const Problem& p = impl_->problem;
  std::string s = explain();
  const bool has_mask = p.has(Arg::kBias) && p.bias.dtype == DType::kBool &&
                        std::any_of(tensors.begin(), tensors.end(),
                                    [](const TensorBinding& t) { return t.name == "bias"; });
  if ((!p.expressions.masks() && !has_mask) || !impl_->lengths || p.hq == 0) return s;
  constexpr double kMaxTiles = 1 << 22, kMaxScores = 0x1p31;  // about a second of counting
  double all = 0, scores = 0, of_tile[3] = {};
  const Explanation e = impl_->executable->explain();
  for (const Sequence& its : *impl_->lengths) {
    all += std::ceil(static_cast<double>(its.sq) / static_cast<double>(e.Br)) *
           std::ceil(static_cast<double>(its.sk) / static_cast<double>(e.Bc));
    scores += static_cast<double>(its.sq) * static_cast<double>(its.sk);
  }
  if (p.alike()) {
    all *= static_cast<double>(p.batch);
    scores *= static_cast<double>(p.batch);
  }
  if (all > kMaxTiles || (has_mask && scores > kMaxScores)) {
    return s + fmt::format("tiles     {:.0f}: too many to look at what {} hides\n", all,
                           p.expressions.masks() ? "mask_mod" : "bias");
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    for (const Tile tile : tiles(b, tensors).tiles) ++of_tile[static_cast<int>(tile)];
  }
  return s + fmt::format(
                 "tiles     of q head 0: {:.0f} hidden, {:.0f} shown in full, {:.0f} in part\n",
                 of_tile[static_cast<int>(Tile::kEmpty)], of_tile[static_cast<int>(Tile::kFull)],
                 of_tile[static_cast<int>(Tile::kPartial)]);
}

Details Plan::details() const {
  const Problem& p = impl_->problem;
  const Explanation e = impl_->executable->explain();
  Details details;
  details.add("engine", impl_->engine->name());
  details.add("call", call_details(p));
  details.add_all(e.details);
  if (impl_->lengths) details.add("flops", flops());
  details.add("bytes", bytes());
  if (const Estimate expected = estimate_of(*impl_); expected.microseconds > 0) {
    details.add("estimate_us", expected.microseconds);
    details.add("bound", expected.bound);
    details.add("estimate_is_minimum", expected.at_least);
  }
  details.add("workspace_bytes", workspace().bytes);
  if (p.max_workspace > 0) details.add("max_workspace", p.max_workspace);
  Details::Texts rejected = impl_->rejected;
  rejected.insert(rejected.end(), e.rejected.begin(), e.rejected.end());
  details.add("rejected", std::move(rejected));
  return details;
}

}  // namespace fulgur
