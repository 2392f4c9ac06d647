"""The forward pass without PyTorch's dispatcher, which takes longer than a small call."""

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fulgur import _fulgur
from fulgur.torch import _native
from fulgur.torch._autograd import Attention

_functions = _native.load()
compiled = _functions is not None

# attention(q, k, v, given): what fulgur.torch.attention returns of its keyword arguments; None where the operators have
# to compute the call, or to say why they cannot.
attention = _fulgur.TorchDirect(
    seen_by=(  # modes, transforms, traces, autocast and profilers see every call
        is_in_torch_dispatch_mode,
        torch._C._len_torch_dispatch_stack,  # has modes that are pushed without being entered, too
        torch._C._len_torch_function_stack,
        torch._C._are_functorch_transforms_active,
        torch._C._get_tracing_state,
        torch._C._is_any_autocast_enabled,
        torch.autograd._profiler_enabled,
    ),
    types=(torch.Tensor, torch.nn.Parameter),
    # That of Function looks for transforms again.
    record=_functions.record if compiled else super(torch.autograd.Function, Attention).apply,
    deterministic=torch.are_deterministic_algorithms_enabled,
).attention
