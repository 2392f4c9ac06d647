/// PyTorch's operators fulgur::forward, backward and their kin: schemas and kernels.
#pragma once

#include <string>
#include <vector>

#include "fulgur/fulgur.h"

namespace fulgur::python {

/// The schema of each operator but random_numbers.
std::vector<std::string> torch_schemas();

/// Gives the operators, which have been defined by their schemas, their kernels for the CPU and for
/// CUDA. PyTorch must have been imported. Its C shim, whose ABI is promised to stay, is looked up
/// in the process: nothing of PyTorch is needed to build, and one build serves all its versions
/// from 2.11 on. Throws Error(kUnavailable) where it lacks a function.
void register_torch_ops();

/// Whether autograd records.
bool torch_grad_enabled();

/// What the operators of the forward pass compute into args.out and args.lse: with PyTorch's
/// threads, or on its current stream.
void torch_forward(ForwardArgs& args, Options& options);

}  // namespace fulgur::python
