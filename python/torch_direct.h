/// The forward pass of PyTorch's tensors without PyTorch's dispatcher, which takes longer than a
/// small call.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "arrays.h"

namespace fulgur::python {

class TorchDirect {
 public:
  /// `seen_by`: functions that return something true where PyTorch has to see every call. `types`:
  /// of tensors that are no subclass, torch.Tensor first. `empty_like` is
  /// PyTorch's; `empty_out(q, v)` and `empty_lse(q)` make results.
  TorchDirect(nb::tuple seen_by, nb::tuple types, nb::object empty_like, nb::object empty_out,
              nb::object empty_lse);

  /// What fulgur.torch.attention returns of these keyword arguments: out, or (out, lse). None where
  /// PyTorch has to see the call, where autograd has to record it, where it draws random numbers,
  /// and where an argument is of another type than most callers give or wrong, which the operators
  /// and what calls them explain.
  nb::object attention(nb::handle q, nb::handle k, nb::handle v, const nb::dict& given) const;

  /// (out, lse) as the operator forward computes them, of further tensors and of options by name;
  /// None as for attention.
  nb::object forward(nb::handle q, nb::handle k, nb::handle v, const nb::dict& tensors,
                     const nb::dict& options) const;

 private:
  bool has_to_be_seen() const;
  /// Whether an object is a tensor of no subclass, whose attributes may be anybody's.
  bool is_tensor(nb::handle object) const;
  bool is_recorded(nb::handle object) const;
  /// Throws where a tensor is of a subclass, is recorded by autograd, has no rows, or has others
  /// than its memory says.
  Tensor view(const char* name, nb::handle tensor) const;
  /// Reads a tensor that a call has besides q, k and v; false where it has none with this name.
  bool read_tensor(std::string_view name, nb::handle tensor, ForwardArgs& args) const;
  nb::object compute(nb::handle q, nb::handle k, nb::handle v, ForwardArgs& args, Options& options,
                     bool with_lse) const;

  nb::tuple seen_by_, types_;
  nb::object empty_like_, empty_out_, empty_lse_;
  nb::object is_neg_, requires_grad_;  ///< names
  const ExchangeApi* exchange_;
};

}  // namespace fulgur::python
