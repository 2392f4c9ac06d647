"""Autograd of fulgur.distributed.attention."""

import torch

from fulgur.torch._expressions import PREFIX
from fulgur.torch._tensors import whole_rows


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, names, q, k, v, *whole):
        out, lse = call.forward(dict(q=q.detach(), k=k.detach(), v=v.detach()), True)
        ctx.call, ctx.names = call, names
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        # All processes take part, whether their rows have a gradient or not.
        dout = torch.zeros_like(out) if dout is None else dout
        dlse = torch.zeros_like(lse) if dlse is None else dlse
        arrays = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout, dlse=dlse)
        arrays = {name: whole_rows(name, x.detach()) for name, x in arrays.items()}
        given = {"dlse": arrays.pop("dlse")}
        wanted = [name for name, needs in zip(ctx.names, ctx.needs_input_grad[5:]) if needs]
        tensors = [name.removeprefix(PREFIX) for name in wanted if name.startswith(PREFIX)]
        if "bias" in wanted:
            given["dbias"] = ctx.call.tensors["bias"].new_empty(ctx.call.tensors["bias"].shape)
        if tensors:
            given["dtensors"] = dict.fromkeys(tensors)
        dq, dk, dv, *more = ctx.call.backward(arrays, given)
        gradients = {PREFIX + name: x for name, x in more.pop().items()} if tensors else {}
        if "bias" in wanted:
            gradients["bias"] = more.pop()
        if "sinks" in wanted:
            gradients["sinks"] = more.pop()
        return None, None, dq, dk, dv, *[gradients.get(name) for name in ctx.names]


def _detached(tensors):
    return {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in tensors.items()}


@torch.compiler.disable
def attention(call, q, k, v):
    """out and lse of the rows of this process."""
    bound = dict(call.expressions.get("tensors", {}))
    whole = {name: call.tensors.get(name) for name in ("sinks", "bias")}
    whole |= {PREFIX + name: x for name, x in bound.items()}
    whole = {name: x for name, x in whole.items() if isinstance(x, torch.Tensor)}
    call.tensors = _detached(call.tensors)
    if bound:
        call.expressions["tensors"] = _detached(bound)
    return _Attention.apply(call, tuple(whole), q, k, v, *whole.values())
