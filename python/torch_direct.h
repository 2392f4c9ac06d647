/// The forward pass of PyTorch's tensors without PyTorch's dispatcher, which takes longer than a
/// small call.
#pragma once

#include <nanobind/nanobind.h>

#include "arrays.h"

namespace fulgur::python {

class TorchDirect {
 public:
  /// `seen_by`: functions that return something true where PyTorch has to see every call. `types`:
  /// of tensors that are no subclass, torch.Tensor first. `empty_like` is
  /// PyTorch's; `empty_out(q, v)` and `empty_lse(q)` make results.
  TorchDirect(nb::tuple seen_by, nb::tuple types, nb::object empty_like, nb::object empty_out,
              nb::object empty_lse);

  /// out, or (out, lse), as the operator forward computes them, of further tensors and of options
  /// by name. None where PyTorch has to see the call, where autograd has to record it, and where it
  /// fails, which the operator explains.
  nb::object forward(nb::handle q, nb::handle k, nb::handle v, const nb::dict& tensors,
                     const nb::dict& options, bool with_lse) const;

 private:
  bool has_to_be_seen() const;
  /// Whether a tensor is no subclass, and autograd does not record it.
  bool is_plain(nb::handle tensor, bool grad) const;
  /// Throws where a tensor has no rows, or others than its memory says.
  Tensor view(const char* name, nb::handle tensor) const;

  nb::tuple seen_by_, types_;
  nb::object empty_like_, empty_out_, empty_lse_;
  nb::object is_neg_, requires_grad_;  ///< names
  const ExchangeApi* exchange_;
};

}  // namespace fulgur::python
