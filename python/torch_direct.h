/// The forward pass of PyTorch's tensors without PyTorch's dispatcher, which takes longer than a
/// small call. What autograd records is computed first, and recorded with its results.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "arrays.h"

namespace fulgur::python {

class TorchDirect {
 public:
  /// `seen_by`: functions that return something true where PyTorch has to see every call. `types`:
  /// of tensors that are no subclass, torch.Tensor first. `empty_like` and `float32` are
  /// PyTorch's; `empty_out(q, v)` makes a result. `record(q, k, v, (options, names, (out, lse)),
  /// *tensors)` records a call and returns its results; where `deterministic()` is true, of
  /// gradients that have the same bits in every run.
  TorchDirect(nb::tuple seen_by, nb::tuple types, nb::object empty_like, nb::object empty_out,
              nb::object float32, nb::object record, nb::object deterministic);

  /// What fulgur.torch.attention returns of these keyword arguments: out, or (out, lse). None where
  /// PyTorch has to see the call, where it draws random numbers, and where an argument is of
  /// another type than most callers give or wrong, which the operators and what calls them explain.
  nb::object attention(nb::handle q, nb::handle k, nb::handle v, const nb::dict& given) const;

 private:
  /// Tensors of a call besides q, k and v.
  struct Others {
    nb::list names, tensors;
    bool have_gradients = true;  ///< the backward pass takes all of them
    bool recorded = false;
  };
  bool has_to_be_seen() const;
  /// Whether an object is a tensor of no subclass, whose attributes may be anybody's.
  bool is_tensor(nb::handle object) const;
  bool is_recorded(nb::handle object) const;
  /// Throws where a tensor is of a subclass, has no rows, or has others than its memory says.
  Tensor view(const char* name, nb::handle tensor) const;
  /// Reads a tensor that a call has besides q, k and v; false where it has none with this name.
  bool read_tensor(std::string_view name, nb::handle tensor, ForwardArgs& args,
                   Others& others) const;
  nb::object empty_lse(nb::handle q, const ConstTensor& view) const;
  /// out, or (out, lse).
  nb::object compute(nb::handle q, nb::handle v, ForwardArgs& args, Options& options,
                     bool with_lse) const;

  nb::tuple seen_by_, types_;
  nb::object empty_like_, empty_out_, float32_, record_, deterministic_;
  nb::object is_neg_, requires_grad_, new_empty_;  ///< names
  const ExchangeApi* exchange_;
};

}  // namespace fulgur::python
