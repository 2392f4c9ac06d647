#include "distributed/group/call_plans.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "call/tensors.h"

namespace fulgur::distributed {
namespace {

constexpr size_t kMaxPlans = 32;

class Key {
 public:
  template <class T>
  void add(const T& value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void add(const std::string& text) {
    add(text.size());
    bytes_ += text;
  }
  void add_layout(const ConstTensor& t) {
    add(t.given());
    if (!t.given()) return;
    add(t.dtype);
    add(t.device.type);
    add(t.device.index);
    add(t.rank);
    for (int i = 0; i < std::min(t.rank, int{ConstTensor::kMaxRank}); ++i) {
      add(t.shape[i]);
      add(t.strides[i]);
    }
  }
  /// The values of lengths belong to the key, because a plan is made for them.
  void add_lengths(const ConstTensor& t) {
    if (t.data == nullptr || !on_host(t) || t.dtype != DType::kI32 || t.rank != 1) return;
    const auto* const values = static_cast<const int32_t*>(t.data);
    for (int64_t i = 0; i < t.shape[0]; ++i) add(values[i * t.strides[0]]);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

template <class Args>
std::string bytes_of(const Args& args, const Options& options, const Distribution& distribution) {
  Key key;
  key.add(std::is_same_v<Args, BackwardArgs>);
  key.add(distribution.sharding);
  key.add(distribution.head_ranks);
  key.add(distribution.ring);
  const auto& [mask, scale, softcap, score_mod, mask_mod, dropout_p, max_seqlen_q, max_seqlen_k,
               deterministic, invariant, fast_codes, hadamard, max_workspace, threads, engine,
               algorithm, origin] = options;
  key.add(mask.left);
  key.add(mask.right);
  key.add(mask.chunk);
  key.add(mask.top_left);
  key.add(scale.has_value());
  key.add(scale.value_or(0));
  key.add(softcap);
  for (const Expr* expression : {&score_mod, &mask_mod}) {
    key.add(expression->given() ? expression->text() : std::string());
  }
  key.add(dropout_p);
  key.add(max_seqlen_q);
  key.add(max_seqlen_k);
  key.add(deterministic);
  key.add(invariant);
  key.add(fast_codes);
  key.add(hadamard);
  key.add(max_workspace);
  key.add(threads);
  key.add(engine);
  key.add(algorithm);
  key.add(origin != Origin{});  // such calls are rejected
  const auto add = [&](const TensorRule&, const auto& t) { key.add_layout(t); };
  for_each_tensor(add, args);
  if constexpr (std::is_same_v<Args, ForwardArgs>) for_each_tensor(add, args.append);
  for (const ConstTensor* lengths : {&args.lengths.cu_seqlens_q, &args.lengths.cu_seqlens_k,
                                     &args.lengths.seqused_q, &args.lengths.seqused_k}) {
    key.add_lengths(*lengths);
  }
  for (const TensorBinding& t : args.tensors) {
    key.add(t.name);
    key.add_layout(t.tensor);
    key.add_layout(t.grad);
  }
  return key.take();
}

}  // namespace

template <class Args>
std::string key_of(const Args& args, const Options& options, const Distribution& distribution) {
  return bytes_of(args, options, distribution);
}

template std::string key_of(const ForwardArgs&, const Options&, const Distribution&);
template std::string key_of(const BackwardArgs&, const Options&, const Distribution&);

std::optional<NumberedPlan> CallPlans::find(const std::string& key) {
  const auto found = std::ranges::find(entries_, key, &Entry::key);
  if (found == entries_.end()) return std::nullopt;
  entries_.splice(entries_.begin(), entries_, found);
  return found->plan;
}

void CallPlans::keep(std::string key, NumberedPlan plan) {
  std::erase_if(entries_, [&](const Entry& entry) { return entry.key == key; });
  entries_.push_front({std::move(key), std::move(plan)});
  if (entries_.size() > kMaxPlans) entries_.pop_back();
}

}  // namespace fulgur::distributed
