"""The rotary embedding, in PyTorch's own operations (Su et al., RoFormer, eq. 34)."""

import torch


def rotate_half(x, interleaved=False):
    """(-x2, x1) of the halves x1, x2 of the last dimension, or of its even and odd entries."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x ``(batch, seqlen, heads, dim)`` turned by the angles of cos and sin, in float32 or better, and
    rounded once, as the caches' kernels turn it.

    cos and sin are ``(seqlen, rotary_dim / 2)`` or ``(batch, seqlen, rotary_dim / 2)``; the first
    rotary_dim of dim are turned.
    """
    dim = 2 * cos.shape[-1]
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)).unsqueeze(-2).to(exact)
        for t in (cos, sin)
    )
    straight = x[..., :dim].to(exact)
    turned = straight * cos + rotate_half(straight, interleaved) * sin
    return torch.cat((turned.to(x.dtype), x[..., dim:]), -1)


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None,
    max_seqlen=None,
):  # fmt: skip
    """x ``(batch, seqlen, heads, dim)`` or packed ``(total, heads, dim)``, each row turned by the
    angles of its place in its sequence plus ``seqlen_offsets``, a number or int ``(batch,)``.

    cos and sin are ``(longest, rotary_dim / 2)``; places behind them, which offsets in a tensor may
    have, turn as the last. ``inplace`` writes to x and returns it.
    """
    positions, columns = cos.shape
    if sin.shape != cos.shape:
        raise ValueError(f"sin: got shape {tuple(sin.shape)}, want {tuple(cos.shape)} as cos")
    if 2 * columns > x.shape[-1]:
        raise ValueError(f"cos: got {columns} columns, want at most half of the {x.shape[-1]} of x")
    longest = 0 if max_seqlen is None else max_seqlen
    longest = x.shape[1] if cu_seqlens is None else longest
    on_host = not any(isinstance(n, torch.Tensor) for n in (longest, seqlen_offsets))
    if on_host and longest + seqlen_offsets > positions:
        raise ValueError(f"cos: got {positions} positions, want {longest + seqlen_offsets}")
    offsets = torch.as_tensor(seqlen_offsets, device=x.device)
    if cu_seqlens is None:
        places = torch.arange(x.shape[1], device=x.device) + offsets[..., None]
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens, rows, right=True) - 1
        sequence = sequence.clamp(max=len(cu_seqlens) - 2)  # rows behind the last are padding
        places = rows - cu_seqlens[sequence] + (offsets[sequence] if offsets.dim() else offsets)
    places = places.clamp(max=positions - 1)
    turned = apply_rotary_emb_torch(x, cos[places], sin[places], interleaved)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb
