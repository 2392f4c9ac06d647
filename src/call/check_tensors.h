#pragma once

#include "base/check.h"
#include "call/problem.h"
#include "call/tensors.h"

namespace fulgur {

// The checks of a call's tensors by their rows in the table of tensors (tensors.h). `Args` is
// ForwardArgs, BackwardArgs, ScoresArgs or AppendArgs. All checks throw Error(kInvalidArgument).

/// Sets which tensors a call has, and which of them lie in the host's memory though the call's
/// device is another.
template <class Args>
void set_given(const Args& args, Problem& p) {
  const bool on_device = p.device.type != DeviceType::kCpu;
  const auto set = [&](const TensorRule& rule, const auto& t) {
    p.given.set(rule.arg, t.given());
    p.on_host.set(rule.arg, on_device && t.given() && rule.place == Place::kHostToo && on_host(t));
  };
  for_each_tensor(set, args);
}

/// Checks shape, dtype and device of a tensor that the call has, or must have. `like`: the tensor
/// whose device is the call's.
void check_by_rule(const TensorRule& rule, const ConstTensor& t, const Problem& p,
                   const char* like);

/// Which tensors a check is about.
enum class Sizes : uint8_t {
  kOfCall,  ///< the batch, heads and groups give their sizes
  kOfRows,  ///< the rows and head dims of the sequences do
};
inline Sizes sizes_of(TensorShape shape) {
  return shape >= TensorShape::kRowsOfQ ? Sizes::kOfRows : Sizes::kOfCall;
}

template <class Args>
void check_tensors(const Args& args, Sizes sizes, const Problem& p, const char* like = "q") {
  const auto check = [&](const TensorRule& rule, const auto& t) {
    if (rule.shape == TensorShape::kOwn || sizes_of(rule.shape) != sizes) return;
    if (t.given() || rule.need == Need::kRequired) check_by_rule(rule, t, p, like);
  };
  for_each_tensor(check, args);
}

/// The number of elements of a tensor in host memory that is copied to the device.
int64_t count_of(const TensorRule& rule, const Problem& p);

/// Checks that the tensors of a call have the shapes, strides, dtypes and devices of those planned
/// for.
template <class Args>
void check_as_planned(const Args& planned, const Args& args);

/// Checks that all data is there and that each output has memory of its own. Queries that append
/// rotates may stay where they are: each row is read before it is written.
template <class Args>
void check_memory(const Args& args);

}  // namespace fulgur
