"""Exact attention as an operation of JAX: under jit, grad, vmap and shard_map.

    from fulgur.jax import append, append_attention, attention, dot_product_attention

    out = attention(q, k, v, causal=True)
    grads = jax.grad(lambda q: dot_product_attention(q, k, v, is_causal=True).sum())(q)

:func:`dot_product_attention` stands in for ``jax.nn.dot_product_attention``; :func:`attention` means
what :func:`fulgur.attention` means, and so do :func:`append` and :func:`append_attention`. Arrays are
on the CPU, or on a CUDA device, where the work is put on XLA's stream. Needs JAX 0.7 or newer; nothing
of fulgur is built against it: the calls are handlers of XLA's foreign function interface,
``fulgur_forward``, ``fulgur_backward``, ``fulgur_append`` and ``fulgur_append_forward``.
"""

from fulgur.jax._calls import append, append_attention, attention
from fulgur.jax._dot_product import dot_product_attention

__all__ = ["append", "append_attention", "attention", "dot_product_attention"]
