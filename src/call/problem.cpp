#include "call/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>

namespace fulgur {
namespace {

constexpr std::array kAlgorithms = {Algorithm::kAny, Algorithm::kStandard, Algorithm::kFa1,
                                    Algorithm::kFa2, Algorithm::kFa3};

}  // namespace

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAny:
      break;
    case Algorithm::kStandard:
      return "standard";
    case Algorithm::kFa1:
      return "fa1";
    case Algorithm::kFa2:
      return "fa2";
    case Algorithm::kFa3:
      return "fa3";
  }
  return "";
}

Algorithm algorithm_called(const std::string& name) {
  for (const Algorithm algorithm : kAlgorithms) {
    if (name == name_of(algorithm)) return algorithm;
  }
  fail("algorithm", "got \"{}\", want one of standard, fa1, fa2, fa3", name);
}

std::string algorithm_rejected(Algorithm asked, std::initializer_list<Algorithm> had) {
  if (asked == Algorithm::kAny || std::ranges::find(had, asked) != had.end()) return {};
  std::string names;
  for (const Algorithm algorithm : had) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", name_of(algorithm));
  }
  return fmt::format("computes by the algorithm {}, not by {}", names, name_of(asked));
}

double flops_per_score(const Problem& p) {
  const auto d = static_cast<double>(p.d), dv = static_cast<double>(p.dv);
  if (p.pass == Pass::kForward) return 2 * d + 2 * dv;
  return 2 * d + 2 * dv + (p.wants_dq() ? 2 * d : 0) + (p.wants_dk_dv() ? 2 * d + 2 * dv : 0);
}

double bytes(const Problem& p) {
  const auto q_rows = static_cast<double>(p.total_q);
  // A call reads no more of a cache than its sequences have.
  const auto k_rows = static_cast<double>(std::min(p.total_k, p.total_keys));
  // q, out, k, v.
  const double once =
      q_rows * static_cast<double>(p.query_bytes()) + k_rows * static_cast<double>(p.key_bytes());
  const double gradients = p.pass == Pass::kBackward ? once : 0;
  const double lse = (p.has(Arg::kLse) + p.has(Arg::kDlse)) * q_rows *
                     static_cast<double>(p.hq * size_of(p.lse_dtype()));
  return once + gradients + lse;
}

bool Problem::nothing_to_do() const {
  return total_q == 0 && (pass == Pass::kForward || total_k == 0);
}

size_t HashOfProblem::operator()(const Problem& p) const {
  size_t hash = 0;
  const auto add = [&](auto... values) {
    ((hash = (hash ^ static_cast<size_t>(values)) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29), ...);
  };
  add(p.pass, p.device.type, p.device.index, p.batch, p.sq, p.sk, p.hq, p.hk, p.d, p.dv);
  add(p.dtypes.q, p.dtypes.k, p.dtypes.v, p.dtypes.out);
  add(p.packed, p.packed_k, p.total_q, p.total_k, p.total_keys, p.given.bits(), p.on_host.bits(),
      p.mask.left, p.mask.right, p.mask.chunk, p.mask.top_left);
  add(p.cache.pages, p.cache.entries, p.cache.page, p.cache.ids, p.cache.table_stride,
      p.cache.id_stride, p.prefix_groups, p.of_groups);
  add(p.append.given, p.append.rotates, p.append.batch, p.append.tokens, p.append.host_numbers);
  for (const Layout* l :
       {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv_grad, &p.lse, &p.dlse}) {
    add(l->batch, l->row, l->head, l->aligned);
  }
  for (const double x : {p.scale, p.softcap, p.dropout_p}) add(std::bit_cast<uint64_t>(x));
  for (const Problem::Bias* b : {&p.bias, &p.dbias}) {
    add(b->dtype, b->batch, b->head, b->row, b->key, b->aligned);
  }
  add(p.expressions.hash());
  for (const Scales* x :
       {&p.q_descale, &p.k_descale, &p.v_descale, &p.k_zero_point, &p.v_zero_point}) {
    add(x->dtype, x->of_rows, x->groups, x->batch, x->row, x->head, x->group);
  }
  add(p.slopes_of_batch, p.slopes_batch, p.slopes_head, p.deterministic, p.invariant, p.algorithm,
      p.fast_codes, p.hadamard, p.max_workspace, p.f32_key_gradients);
  const Origin& o = p.origin;
  add(o.batch, o.head, o.query, o.key, o.heads, o.queries, o.keys);
  return hash;
}

}  // namespace fulgur
