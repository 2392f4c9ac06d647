"""Exact attention as an operator of PyTorch: recorded by autograd, seen by ``torch.compile``.

    from fulgur.torch import attention

    out = attention(q, k, v, causal=True)
    out.sum().backward()

Tensors are on the CPU or on a CUDA device, where the work is put on PyTorch's current stream. Needs
PyTorch 2.11 or newer, and is not built against it; but with FULGUR_TORCH_BUILD=1 in the environment the first import
compiles what makes recorded calls faster, and ``compiled`` is True. The operators are
``torch.ops.fulgur.forward`` and ``torch.ops.fulgur.backward``: custom operators with fake kernels
and rules for vmap and for the counter of flops, so that ``torch.compile(fullgraph=True)``,
``torch.export``, ``torch.func``, activation checkpointing and CUDA graphs need nothing more.
``forward_into`` and ``backward_into`` write their results where the caller says. Caches of keys and
values are read by ``forward_cached``, which has no gradient, and written by ``append``;
``append_forward`` does both in one call.
"""

from fulgur.torch import _flops, _random, _sdpa, _vmap  # noqa: F401  which register with PyTorch
from fulgur.torch._calls import append, append_attention, attention, scores
from fulgur.torch._direct import compiled
from fulgur.torch._flex import enable_flex, flex_attention

__all__ = ["append", "append_attention", "attention", "compiled", "enable_flex", "flex_attention", "scores"]
