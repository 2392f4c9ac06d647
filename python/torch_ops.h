/// The kernels of PyTorch's operators fulgur::forward, backward, forward_into
/// and backward_into.
#pragma once

namespace fulgur::python {

/// Gives the operators, which fulgur/torch.py has defined, their kernels for the CPU and for CUDA.
/// PyTorch must have been imported. Its C shim, whose ABI is promised to stay, is looked up in the
/// process: nothing of PyTorch is needed to build, and one build serves all its versions from 2.11
/// on. Throws Error(kUnavailable) where it lacks a function.
void register_torch_ops();

}  // namespace fulgur::python
