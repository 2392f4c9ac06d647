/// PyTorch's operators fulgur::forward, backward and their kin: schemas and kernels.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "fulgur/fulgur.h"

namespace fulgur::python {

/// The schema of each operator but random_numbers.
std::vector<std::string> torch_schemas();

/// Looks PyTorch's functions up, which must have been imported, before anything below is called.
/// They are those of its C shim, whose ABI is promised to stay: nothing of PyTorch is needed to
/// build, and one build serves all its versions from 2.11 on. Throws Error(kUnavailable) where it
/// lacks one.
void find_torch();

/// Gives the operators, which have been defined by their schemas, their kernels for the CPU and for
/// CUDA.
void register_torch_ops();

/// Whether autograd records.
bool torch_grad_enabled();

struct OpaqueTensor;
struct DeleteTensor {
  void operator()(OpaqueTensor* tensor) const;
};
/// A tensor of PyTorch, by its C shim.
using TorchTensor = std::unique_ptr<OpaqueTensor, DeleteTensor>;

/// Fresh memory for the results of a forward pass of args.q, which args.out and args.lse view. `v`:
/// the values that the call reads, which errors call by `name`.
TorchTensor torch_out(ForwardArgs& args, const char* name, const ConstTensor& v);
TorchTensor torch_lse(ForwardArgs& args);

/// Whether torch_object() makes objects. That PyTorch has none of what it calls is no error.
bool makes_torch_objects();
/// A tensor as Python's object.
nanobind::object torch_object(const TorchTensor& tensor);

/// What the operators of the forward pass compute into args.out and args.lse: with PyTorch's
/// threads, or on its current stream.
void torch_forward(ForwardArgs& args, Options& options);

}  // namespace fulgur::python
