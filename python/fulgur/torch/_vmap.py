"""The rules of the operators under ``torch.func.vmap``: the mapped dimension becomes a part of the batch, or
of the heads."""

import torch

from fulgur.torch._operators import backward, by_name, forward, library

# Tensors with a batch in front, and heads as the last dimension but one.
_ROWS = ("dout", "q", "k", "v", "out", "lse", "dlse")


def _fold(size, given, mapped):
    """Arguments of a batched call with the mapped dimension as a part of the batch."""

    def front(name):
        x, dim = given[name], mapped[name]
        return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    batch = given["q"].shape[1 if mapped["q"] == 0 else 0]
    folded = {name: front(name).flatten(0, 1) for name in _ROWS if name in given}
    for name in ("seqused_q", "seqused_k"):
        if name in given:
            folded[name] = front(name).flatten(0, 1).contiguous()
    if "alibi_slopes" in given:
        slopes = given["alibi_slopes"]
        if mapped["alibi_slopes"] is not None or slopes.dim() == 2:
            slopes = front("alibi_slopes")
            if slopes.dim() == 2:
                slopes = slopes.unsqueeze(1).expand(-1, batch, -1)
            folded["alibi_slopes"] = slopes.flatten(0, 1).contiguous()
    if "rng_state" in given:
        if mapped["rng_state"] is None:
            raise NotImplementedError("dropout_p: vmap(randomness='same'); want 'different'")
        # What is kept depends on the place in the batch, too.
        folded["rng_state"] = given["rng_state"].select(mapped["rng_state"], 0)
    return given | folded


def _fold_heads(size, given, mapped):
    """Arguments of a batched call with the mapped dimension as a part of the heads: each has a sink, whose gradient is
    wanted for each call."""
    for name, refused in (
        ("dropout_p", "rng_state" in given),
        ("seqused_q, mapped", mapped.get("seqused_q") is not None),
        ("seqused_k, mapped", mapped.get("seqused_k") is not None),
    ):
        if refused:
            raise NotImplementedError(f"{name}: with sinks under vmap; want it left out")

    def fold(name, heads):
        x, dim = given[name], mapped[name]
        heads %= x.dim() - (dim is not None)
        if dim is None:
            x = x.unsqueeze(heads).expand(*x.shape[:heads], size, *x.shape[heads:])
        else:
            x = x.movedim(dim, heads)
        return x.flatten(heads, heads + 1)

    rows = {name: fold(name, -2) for name in _ROWS if name in given}
    of_heads = ("alibi_slopes", "sinks")
    return given | rows | {name: fold(name, -1).contiguous() for name in of_heads if name in given}


def _fold_bias(size, given, mapped, at, count):
    """The bias with the mapped dimension as a part of its dimension `at`, the batch or the heads, of which a call
    has `count`. One that is the same in all calls stays as it is, unless the gradient of each is wanted."""
    x, dim = given["bias"], mapped["bias"]
    if dim is None and x.shape[at] == 1 and not given.get("with_dbias"):
        return x
    x = x.unsqueeze(at).expand(*x.shape[:at], size, *x.shape[at:]) if dim is None else x.movedim(dim, at)
    return x.expand(*x.shape[: at + 1], count, *x.shape[at + 2 :]).flatten(at, at + 1)


def _unfold_dbias(size, given, mapped, at, dbias):
    """The gradients of the bias of each call, whose number is in front of the dimension `at`."""
    dims = list(given["bias"].shape)
    if mapped["bias"] is not None:
        del dims[mapped["bias"]]
    dbias = dbias.unflatten(at, (size, -1))
    return dbias.sum(at + 1, keepdim=True) if dims[at] == 1 else dbias


def batched(op, heads, size, given, mapped):
    """Results of a call under vmap, and where the mapped dimension is in them; their heads are in
    these dimensions. Of `given` by name, those in `mapped` are tensors."""
    given = {name: x for name, x in given.items() if x is not None}
    if "cu_seqlens_q" in given:
        raise NotImplementedError(
            "cu_seqlens_q: packed sequences under vmap; want a batch of sequences of one length"
        )
    of_heads = "sinks" in given
    folded = (_fold_heads if of_heads else _fold)(size, given, mapped)
    at = 1 if of_heads else 0
    if "bias" in given:
        batch, _, hq, _ = folded["q"].shape
        folded["bias"] = _fold_bias(size, given, mapped, at, (hq if of_heads else batch) // size)
    results = op(**folded)
    of_bias = results[-1:] if given.get("with_dbias") else ()
    results = results[: len(results) - len(of_bias)]
    dims = heads[: len(results)] if of_heads else (0,) * len(results)
    results = tuple(x.unflatten(dim, (size, -1)) for x, dim in zip(results, dims))
    dims = tuple(dim and x.dim() - 1 + dim for x, dim in zip(results, dims))
    of_bias = tuple(_unfold_dbias(size, given, mapped, at, x) for x in of_bias)
    return results + of_bias, dims + (at,) * len(of_bias)


HEADS_OF_RESULTS, HEADS_OF_GRADIENTS = (-2, -2), (-2, -2, -2, -1, -1)


@torch.library.register_vmap("fulgur::forward", lib=library)
def _vmap_forward(info, in_dims, *args):
    given, mapped = (by_name(forward, x) for x in (args, in_dims))
    for name in ("q", "k", "v", "sinks"):
        if torch.is_grad_enabled() and getattr(given.get(name), "requires_grad", False):
            raise NotImplementedError(
                f"{name}: requires grad outside of vmap, where a compiled graph or a call of the "
                "operator records none; want fulgur.torch.attention outside of torch.compile"
            )
    return batched(forward, HEADS_OF_RESULTS, info.batch_size, given, mapped)


@torch.library.register_vmap("fulgur::backward", lib=library)
def _vmap_backward(info, in_dims, *args):
    given, mapped = (by_name(backward, x) for x in (args, in_dims))
    return batched(backward, HEADS_OF_GRADIENTS, info.batch_size, given, mapped)
