"""What the modules that stand in for FlashAttention's share: their arguments in the words of
fulgur.torch, and install_as()."""

import importlib
import sys

import torch

from fulgur.torch import attention

# The modules of this package by the names that they stand in for, parents first.
_STANDS_IN = {
    "flash_attn": {
        "flash_attn": "fulgur.flash_attn",
        "flash_attn.flash_attn_interface": "fulgur.flash_attn.flash_attn_interface",
        "flash_attn.bert_padding": "fulgur.flash_attn.bert_padding",
        "flash_attn.layers": "fulgur.flash_attn.layers",
        "flash_attn.layers.rotary": "fulgur.flash_attn.layers.rotary",
    },
    "flash_attn_interface": {"flash_attn_interface": "fulgur.flash_attn_interface"},
    "flash_attn.cute": {
        "flash_attn.cute": "fulgur.flash_attn_cute",
        "flash_attn.cute.interface": "fulgur.flash_attn_cute.interface",
    },
}


def install_as(name):
    """See fulgur.install_as."""
    if name not in _STANDS_IN:
        raise ValueError(f"name: got {name!r}, want one of {', '.join(map(repr, _STANDS_IN))}")
    modules = {
        alias: importlib.import_module(module) for alias, module in _STANDS_IN[name].items()
    }
    if name == "flash_attn.cute":  # its parent, without which it cannot be imported
        modules = {"flash_attn": importlib.import_module("fulgur.flash_attn"), **modules}
    taken = [x for x, module in modules.items() if sys.modules.get(x, module) is not module]
    if taken:
        raise RuntimeError(
            f"name: {taken[0]} is imported already ({sys.modules[taken[0]]}); "
            "want fulgur.install_as() to be called before"
        )
    added = {x: module for x, module in modules.items() if x not in sys.modules}
    sys.modules.update(added)
    parent = modules["flash_attn"] if name == "flash_attn.cute" else None
    if parent is not None:
        parent.cute = modules[name]

    def undo():
        for alias, module in added.items():
            if sys.modules.get(alias) is module:
                del sys.modules[alias]
        if parent is not None and hasattr(parent, "cute"):
            del parent.cute

    return undo


def refuse(**arguments):
    """Raises for the first argument that asks for what fulgur does not have yet."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: fulgur does not have this yet; want it left out")


def sides(window_size):
    """(left, right) of a pair, a tensor of two, or FlashAttention-4's None for unbounded."""
    left, right = window_size
    return -1 if left is None else int(left), -1 if right is None else int(right)


def longest(max_seqlen, packed):
    """A length; where it is a tensor on a device, the rows there are, instead of a wait for it."""
    if max_seqlen is None:
        return packed.shape[0]
    if not isinstance(max_seqlen, torch.Tensor):
        return max_seqlen
    return int(max_seqlen) if max_seqlen.device.type == "cpu" else packed.shape[0]


def with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens, **options):
    """(out, lse) of queries and a cache, to which new keys and values are added first."""
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(
            (q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device
        )
    if (k is None) != (v is None):
        raise ValueError("k, v: got only one of them, want both or none")
    with torch.no_grad():
        if k is not None:
            if cache_seqlens is None:
                raise ValueError("cache_seqlens: got None, want where k and v go")
            places = cache_seqlens[:, None] + torch.arange(k.shape[1], device=q.device)
            sequences = torch.arange(q.shape[0], device=q.device)[:, None]
            k_cache[sequences, places] = k
            v_cache[sequences, places] = v
            cache_seqlens = cache_seqlens + k.shape[1]
        return attention(q, k_cache, v_cache, seqused_k=cache_seqlens, return_lse=True, **options)


def combine(out_partial, lse_partial, out=None, out_dtype=None):
    """out and lse of parts along the first dimension; lse_partial is out_partial's shape less its
    last dimension, and so is lse."""
    lse = torch.logsumexp(lse_partial.float(), 0)
    weights = (lse_partial - lse).exp().masked_fill(lse_partial.isneginf(), 0)[..., None]
    result = (weights * out_partial).masked_fill(weights == 0, 0).sum(0)
    result = result.to(out_dtype or (out_partial.dtype if out is None else out.dtype))
    return (result if out is None else out.copy_(result)), lse
