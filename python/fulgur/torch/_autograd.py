"""The gradients of attention, as functions of autograd."""

import torch
from torch.autograd import forward_ad

from fulgur.torch import _expressions as expressions
from fulgur.torch import _operators
from fulgur.torch._tensors import whole_rows
from fulgur.torch._vmap import HEADS_OF_GRADIENTS, batched

# Functions without a jvp raise where forward mode wants a derivative; operators alone would give 0.
# A call is recorded with q, k, v, its options (numbers by name, names of further tensors, the results that are
# computed already, or None, and whether lse is one of the call's) and these tensors: each argument costs 0.15 us.


def _forward(q, k, v, options, tensors):
    numbers, names = options[:2]
    given = dict(zip(names, tensors))
    if "score_mod" in numbers:
        return expressions.forward(q, k, v, given | numbers)
    return _operators.forward(q, k, v, **given, **numbers)


def _save(ctx, tensors, options):
    ctx.save_for_backward(*tensors)
    ctx.options = options[:2]
    ctx.set_materialize_grads(False)


def gradients(saved, numbers, names, needed, dout, dlse):
    """The gradients of q, k, v and the further tensors, which are `needed` or not; None for those that have none."""
    q, k, v, out, lse, *tensors = saved
    if dout is None and dlse is None:
        return (None,) * (3 + len(names))
    q, k, v = whole_rows("q", q), whole_rows("k", k), whole_rows("v", v)
    dout = torch.zeros_like(out) if dout is None else whole_rows("dout", dout)
    given = dict(zip(names, tensors))
    if dlse is not None:
        given["dlse"] = whole_rows("dlse", dlse)
    if "bias" in given and needed[3 + names.index("bias")]:
        numbers = numbers | {"with_dbias": True}
    wanted = ()
    if "score_mod" in numbers:
        wanted = tuple(x for x, needs in zip(names, needed[3:]) if needs and x.startswith(expressions.PREFIX))
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        rows = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse} | given
        results = _Gradients.apply(numbers, tuple(rows), wanted, *rows.values())
    elif "score_mod" in numbers:
        rows = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        results = expressions.backward(rows | given | numbers, wanted)
    else:
        results = _operators.backward(dout, q, k, v, out, lse, **given, **numbers)
    dq, dk, dv, dsinks, dbias, *dtensors = results
    of_tensors = {"sinks": dsinks, "bias": dbias if numbers.get("with_dbias") else None}
    of_tensors |= dict(zip(wanted, dtensors))
    return dq, dk, dv, *[of_tensors.get(name) for name in names]


def _gradients(ctx, dout, dlse):
    needed = ctx.needs_input_grad
    dq, dk, dv, *others = gradients(ctx.saved_tensors, *ctx.options, needed[:3] + needed[4:], dout, dlse)
    return dq, dk, dv, None, *others


class _Gradients(torch.autograd.Function):
    """The gradients under ``create_graph=True``: a derivative of them raises, and is never 0."""

    @staticmethod
    def forward(numbers, names, wanted, *tensors):
        given = dict(zip(names, tensors)) | numbers
        return expressions.backward(given, wanted) if "score_mod" in numbers else _operators.backward(**given)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("fulgur.torch: attention has a first derivative only")

    @staticmethod
    def vmap(info, in_dims, numbers, names, wanted, *tensors):
        if "score_mod" in numbers:  # whose operator has a rule of its own
            results = torch.vmap(
                lambda *x: expressions.backward(dict(zip(names, x)) | numbers, wanted), tuple(in_dims[3:])
            )(*tensors)
            return results, (0,) * len(results)
        given, mapped = dict(zip(names, tensors)) | numbers, dict(zip(names, in_dims[3:]))
        return batched(_operators.backward, HEADS_OF_GRADIENTS, info.batch_size, given, mapped)


class Attention(torch.autograd.Function):
    """Records the gradient in eager mode and in ``torch.compile``."""

    @staticmethod
    def forward(ctx, q, k, v, options, *tensors):
        out, lse = results = options[2] or _forward(q, k, v, options, tensors)
        _save(ctx, (q, k, v, out, lse, *tensors), options)
        return results if options[3] else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        return _gradients(ctx, dout, dlse)


class FunctionalAttention(torch.autograd.Function):
    """Records the gradient under torch.func, which wants the saving apart; in eager mode that costs 20 us."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, options, *tensors):
        return _forward(q, k, v, options, tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, options, *tensors = inputs
        _save(ctx, (q, k, v, *output, *tensors), options)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)
