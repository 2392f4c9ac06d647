"""Autograd of fulgur.distributed.attention."""

import torch


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, sinks, q, k, v):
        arrays = dict(q=q.detach(), k=k.detach(), v=v.detach())
        out, lse = call.forward(arrays, True)
        ctx.call, ctx.has_sinks = call, sinks is not None
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
        # Rows are read at any strides but the last.
        arrays = {
            name: x if x.stride(-1) == 1 and not x.is_neg() else x.contiguous()
            for name, x in ((name, x.detach().resolve_neg()) for name, x in arrays.items())
        }
        dq, dk, dv, *dsinks = ctx.call.backward(arrays)
        return None, dsinks[0] if ctx.has_sinks else None, dq, dk, dv


@torch.compiler.disable
def attention(call, q, k, v):
    """out and lse of the rows of this process."""
    sinks = call.tensors.get("sinks")
    call.tensors = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in call.tensors.items()}
    return _Attention.apply(call, sinks, q, k, v)
