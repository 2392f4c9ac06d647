/// The forward pass of PyTorch's tensors without PyTorch's dispatcher, which takes longer than a
/// small call, and runs of plans on them. What autograd records is computed first, and recorded
/// with its results.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "arrays.h"

namespace fulgur::python {

/// Views of PyTorch's tensors.
class TorchTensors {
 public:
  /// `types`: of tensors that are no subclass, torch.Tensor first.
  explicit TorchTensors(nb::tuple types);

  /// Whether an object is a tensor of no subclass, whose attributes may be anybody's.
  bool is_one(nb::handle object) const;
  bool requires_grad(nb::handle tensor) const;
  /// Throws where a tensor is of a subclass, has no rows, or has others than its memory says.
  Tensor view(const char* name, nb::handle tensor) const;
  /// PyTorch's current stream; none on the CPU.
  void* stream(Device device) const;

 private:
  nb::tuple types_;
  nb::object is_neg_, requires_grad_;      ///< names
  const ExchangeApi* exchange_ = nullptr;  ///< null where PyTorch lacks some of what is called
};

/// Runs of a plan of the forward pass.
class TorchRuns {
 public:
  /// `differentiates` has an attribute `_current_level` that is 0 or more where derivatives are
  /// computed in forward mode. `with_lse`: whether runs return lse.
  TorchRuns(nb::tuple types, nb::object differentiates, const Plan& plan, bool with_lse);

  /// What fulgur.Plan.run returns of these keyword arguments. None where an argument is of another
  /// type than most callers give or wrong, which Python's functions explain.
  nb::object run(nb::handle q, nb::handle k, nb::handle v, const nb::dict& given) const;

 private:
  Tensor view(const char* name, nb::handle tensor) const;
  /// Reads a tensor that a run has besides q, k and v; false where it has none with this name.
  bool read_tensor(std::string_view name, nb::handle tensor, ForwardArgs& args) const;

  TorchTensors tensors_;
  nb::object differentiates_;
  nb::object current_level_;  ///< a name
  Plan plan_;
  bool with_lse_;
};

class TorchDirect {
 public:
  /// `seen_by`: functions that return something true where PyTorch has to see every call. `types`:
  /// of tensors that are no subclass, torch.Tensor first. `record(q, k, v, (options, names, (out,
  /// lse), with_lse), *tensors)` records a call and returns out, or (out, lse); where
  /// `deterministic()` is true, of gradients that have the same bits in every run.
  TorchDirect(nb::tuple seen_by, nb::tuple types, nb::object record, nb::object deterministic);

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
  bool is_recorded(nb::handle object) const;
  /// Reads a tensor that a call has besides q, k and v; false where it has none with this name.
  bool read_tensor(std::string_view name, nb::handle tensor, ForwardArgs& args,
                   Others& others) const;
  /// out, or (out, lse).
  nb::object compute(ForwardArgs& args, Options& options, bool with_lse) const;

  nb::tuple seen_by_;
  TorchTensors tensors_;
  nb::object record_, deterministic_;
};

}  // namespace fulgur::python
