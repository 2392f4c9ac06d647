#include "call/check_tensors.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <vector>

#include "base/convert.h"

namespace fulgur {
namespace {

/// The names of a tensor's dimensions, and their sizes. Every call makes some, so they do not
/// allocate.
struct Dims {
  const char* words;
  std::array<int64_t, ConstTensor::kMaxRank> sizes{};
  size_t rank;

  Dims(const char* in_words, std::initializer_list<int64_t> all)
      : words(in_words), rank(all.size()) {
    std::copy(all.begin(), all.end(), sizes.begin());
  }
};

Dims rows(const Problem& p, bool packed, int64_t n, int64_t total, int64_t heads, int64_t dim,
          const char* words, const char* packed_words) {
  if (packed) return {packed_words, {total, heads, dim}};
  return {words, {p.batch, n, heads, dim}};
}

Dims dims_of(const TensorRule& rule, const ConstTensor& t, const Problem& p) {
  const char *const of_q = "(batch, sq, hq, dim)", *const of_packed_q = "(total_q, hq, dim)";
  const char *const of_k = "(batch, sk, hk, dim)", *const of_packed_k = "(total_k, hk, dim)";
  switch (rule.shape) {
    case TensorShape::kOwn:
      break;
    case TensorShape::kHeads:
      return {"(hq)", {p.hq}};
    case TensorShape::kSlopes:
      if (t.rank == 2) return {"(batch, hq)", {p.batch, p.hq}};
      return {"(hq) or (batch, hq)", {p.hq}};
    case TensorShape::kBatch:
      return {"(batch)", {p.batch}};
    case TensorShape::kBatchPlusOne:
      return {"(batch + 1)", {ends_of(p.batch)}};
    case TensorShape::kGroups:
      return {"(groups)", {p.prefix_groups}};
    case TensorShape::kGroupsPlusOne:
      return {"(groups + 1)", {p.prefix_groups + 1}};
    case TensorShape::kSeedAndOffset:
      return {"(2)", {2}};
    case TensorShape::kRowsOfQ:
      return rows(p, p.packed, p.sq, p.total_q, p.hq, p.d, of_q, of_packed_q);
    case TensorShape::kRowsOfOut:
      return rows(p, p.packed, p.sq, p.total_q, p.hq, p.dv, of_q, of_packed_q);
    case TensorShape::kRowsOfK:
      return rows(p, p.packed, p.sk, p.total_k, p.hk, p.d, of_k, of_packed_k);
    case TensorShape::kRowsOfV:
      return rows(p, p.packed, p.sk, p.total_k, p.hk, p.dv, of_k, of_packed_k);
    case TensorShape::kRowStatistics:
      if (p.packed) return {"(hq, total_q)", {p.hq, p.total_q}};
      return {"(batch, hq, sq)", {p.batch, p.hq, p.sq}};
    case TensorShape::kQueries:
      if (p.packed) return {"(total_q)", {p.total_q}};
      return {"(batch, sq)", {p.batch, p.sq}};
  }
  fail(rule.name, "has a shape of its own");
}

struct Wanted {
  DType dtype;
  const char* why;
};

Wanted wanted(TensorType type, const ConstTensor& t, const Problem& p) {
  switch (type) {
    case TensorType::kInput:
      return {p.dtypes.q, "the dtype of q"};
    case TensorType::kKeyGradient:
      if (t.dtype == DType::kF32 && size_of(p.dtypes.q) == 2) return {t.dtype, ""};
      return {p.dtypes.q, size_of(p.dtypes.q) == 2 ? "the dtype of q, or f32" : "the dtype of q"};
    case TensorType::kStatistics:
      return {p.lse_dtype(), "lse and dlse are f32, f64 where q is"};
    case TensorType::kF32:
      return {DType::kF32, "slopes are f32"};
    case TensorType::kSinkType:
      if (size_of(p.dtypes.q) == 2 && t.dtype == p.dtypes.q) return {t.dtype, ""};
      return {DType::kF32,
              size_of(p.dtypes.q) == 2 ? "sinks are f32, or have the dtype of q" : "sinks are f32"};
    case TensorType::kI32:
      return {DType::kI32, "lengths and indices are int32"};
    case TensorType::kBias:  // of a shape of its own, and checked with it
    case TensorType::kDescale:
      return {t.dtype, ""};
    case TensorType::kOutput:
      if (!is_low_bit(p.dtypes.q)) return {p.dtypes.q, "the dtype of q"};
      if (size_of(t.dtype) <= 4 && is_float(t.dtype)) return {t.dtype, ""};
      return {DType::kF32, "or bf16 or f16, as q has codes"};
    case TensorType::kI64:
      break;
  }
  return {DType::kI64, "seeds and words of 64 bits are int64"};
}

/// Strides that address the same elements: those of single rows and of empty tensors do not count.
template <class Tensor>
bool same_strides(const Tensor& a, const Tensor& b) {
  if (a.strides == b.strides || a.numel() == 0) return true;
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

struct NamedTensor {
  TensorRule rule;
  ConstTensor tensor;
};

/// The tensors that a call has.
template <class Args>
void list_given(const Args& args, std::vector<NamedTensor>& to) {
  const auto add = [&](const TensorRule& rule, const auto& t) {
    if (t.given()) to.push_back({rule, t});
  };
  for_each_tensor(add, args);
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    list_given(args.append, to);
  }
  if constexpr (requires { args.tensors; }) {
    for (const TensorBinding& binding : args.tensors) {
      TensorRule rule{};
      rule.arg = Arg::kCount;  // has no row in a table
      rule.name = binding.name.c_str();
      add(rule, binding.tensor);
      rule.access = Access::kWritten;
      add(rule, binding.grad);
    }
  }
}

bool rotated_in_place(const NamedTensor& a, const NamedTensor& b) {
  return a.rule.arg == Arg::kQOut && b.rule.arg == Arg::kQ && a.tensor.data == b.tensor.data &&
         a.tensor.strides == b.tensor.strides;
}

}  // namespace

void check_by_rule(const TensorRule& rule, const ConstTensor& t, const Problem& p,
                   const char* like) {
  const Dims dims = dims_of(rule, t, p);
  check_shape(rule.name, t, dims.words, std::span(dims.sizes).first(dims.rank), rule.written());
  const auto [dtype, why] = wanted(rule.type, t, p);
  check_dtype(rule.name, t, dtype, why);
  if (rule.place == Place::kHostToo) {
    check_device_or_host(rule.name, t, p.device, like);
  } else {
    check_device(rule.name, t, p.device, like);
  }
}

int64_t count_of(const TensorRule& rule, const Problem& p) {
  if (rule.shape == TensorShape::kSlopes) return p.slopes_of_batch ? p.batch * p.hq : p.hq;
  return dims_of(rule, {}, p).sizes[0];
}

template <class Args>
void check_as_planned(const Args& planned, const Args& args) {
  const auto check = [](const TensorRule& rule, const auto& t, const auto& want) {
    if (!t.given() && !want.given()) return;
    if (t.rank == want.rank && t.dtype == want.dtype && t.device == want.device &&
        t.shape == want.shape && same_strides(t, want)) {
      return;
    }
    fail(rule.name, "got {} strides {} on {}, want {} strides {} on {} as planned", t.describe(),
         list(t, t.strides), name_of(t.device), want.describe(), list(want, want.strides),
         name_of(want.device));
  };
  for_each_tensor(check, args, planned);
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    for_each_tensor(check, args.append, planned.append);
  }
  if (!std::ranges::equal(args.tensors, planned.tensors, {}, &TensorBinding::name,
                          &TensorBinding::name)) {
    fail("tensors", "got others than planned");
  }
  for (size_t i = 0; i < args.tensors.size(); ++i) {
    const TensorBinding &binding = args.tensors[i], &want = planned.tensors[i];
    TensorRule rule{};
    rule.name = binding.name.c_str();
    check(rule, binding.tensor, want.tensor);
    check(rule, binding.grad, want.grad);
  }
}

template <class Args>
void check_memory(const Args& args) {
  std::vector<NamedTensor> all;
  all.reserve(8);  // a small block, which malloc keeps for the next run
  list_given(args, all);
  for (const NamedTensor& t : all) check_data(t.rule.name, t.tensor);
  for (const NamedTensor& t : all) {
    if (!t.rule.written()) continue;
    for (const NamedTensor& other : all) {
      if (&t == &other || rotated_in_place(t, other) || !share_memory(t.tensor, other.tensor))
        continue;
      fail(t.rule.name, "shares its memory with {}; an output needs its own", other.rule.name);
    }
  }
}

template void check_as_planned(const ForwardArgs&, const ForwardArgs&);
template void check_as_planned(const BackwardArgs&, const BackwardArgs&);
template void check_memory(const ForwardArgs&);
template void check_memory(const BackwardArgs&);
template void check_memory(const ScoresArgs&);
template void check_memory(const AppendArgs&);

}  // namespace fulgur
