/// The structs of the C API as those of C++.
#pragma once

#include <cstddef>
#include <vector>

#include "api/c_struct.h"
#include "fulgur/append.h"
#include "fulgur/attention.h"
#include "fulgur/c.h"
#include "fulgur/distributed/plan.h"
#include "fulgur/scores.h"

namespace fulgur::c_api {

/// The size of the options in version 0.1.0, the first: no caller has shorter ones.
constexpr size_t kMinOptions = offsetof(fulgur_options, engine) + sizeof(const char*);

/// A tensor of the caller. Without one, throws Error(kInvalidArgument) if there `must` be one.
template <class T>
T read_tensor(const DLTensor* given, const char* name, bool must) {
  if (given != nullptr) return T::from_dlpack(*given, name);
  if (must) fail(name, "got null, want a tensor");
  return T{};
}

AppendArgs convert(const fulgur_append_args* given);
ForwardArgs convert(const fulgur_forward_args* given);
BackwardArgs convert(const fulgur_backward_args* given);
ScoresArgs convert(const fulgur_scores_args* given);

fulgur_options default_options();
/// `tensors`: those that expressions index; without them a call has no expressions.
Options convert(const fulgur_options* given, const std::vector<TensorBinding>* tensors = nullptr);
Run convert(const fulgur_run* given);
Distribution convert(const fulgur_distribution* given);
Sharding sharding_of(int number);

/// The tensors of a call that quantizes, or of the inverse.
struct Quantization {
  fulgur_quantize_args from;
  Tensor x, codes, scale, zero_point, mean;

  explicit Quantization(const fulgur_quantize_args* given);
};

}  // namespace fulgur::c_api
