/// What PyTorch's operators and JAX's handlers take of a call: its tensors, as their table has them
/// (call/tensors.h), and these options. From both come the schemas, the order of operands and what
/// reads them.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "call/tensors.h"
#include "fulgur/error.h"

namespace fulgur::python {

/// Calls visit(name in Python, member) for each option that says which keys a query sees.
template <class Visit>
void for_each_mask_option(Visit&& visit, Options& options) {
  visit("window_left", options.mask.left);
  visit("window_right", options.mask.right);
  visit("chunk", options.mask.chunk);
  visit("top_left", options.mask.top_left);
}

/// Calls visit(name in Python, member) for each option but `threads` and `engine`, which PyTorch
/// and XLA decide.
template <class Visit>
void for_each_option(Visit&& visit, Options& options) {
  visit("max_seqlen_q", options.max_seqlen_q);
  visit("max_seqlen_k", options.max_seqlen_k);
  for_each_mask_option(visit, options);
  visit("scale", options.scale);
  visit("softcap", options.softcap);
  visit("dropout_p", options.dropout_p);
  visit("invariant", options.invariant);
  visit("fast_codes", options.fast_codes);
  visit("hadamard", options.hadamard);
  visit("max_workspace", options.max_workspace);
  visit("deterministic", options.deterministic);
}

/// k and v have the dtype of q, as their gradients and PyTorch and JAX themselves want it, or
/// codes. Throws Error(kInvalidArgument). What q may be, and which codes, the call says.
inline void check_one_dtype(const ForwardArgs& args) {
  if (args.q.dtype > DType::kF64) return;
  for (const auto& [name, t] : {std::pair{"k", &args.k}, std::pair{"v", &args.v}}) {
    if (!t->given() || t->dtype == args.q.dtype || t->dtype >= DType::kE4M3) continue;
    throw Error(Status::kInvalidArgument, fmt::format("{}: got {}, want {} (the dtype of q)", name,
                                                      name_of(t->dtype), name_of(args.q.dtype)));
  }
}

// Which tensors of a table an operator or a call takes: but for one none of codes, and so no
// descales.

inline bool every(const TensorRule& rule) { return rule.type != TensorType::kDescale; }
inline bool inputs(const TensorRule& rule) { return every(rule) && !rule.written(); }
inline bool inputs_and_descales(const TensorRule& rule) { return !rule.written(); }
inline bool outputs(const TensorRule& rule) { return every(rule) && rule.written(); }
/// The forward pass has a gradient where it takes no others than the backward pass.
inline bool with_gradient(const TensorRule& rule) {
#define FULGUR_IS(member, of, ...) || rule.arg == Arg::of
  return false FULGUR_BACKWARD_TENSORS(FULGUR_IS) FULGUR_VAR_LEN_TENSORS(FULGUR_IS);
#undef FULGUR_IS
}
/// A call that appends reads k and v from its caches, which are tensors of NewRows.
inline bool inputs_but_keys(const TensorRule& rule) {
  return inputs(rule) && rule.need != Need::kUnlessAppend;
}

}  // namespace fulgur::python
