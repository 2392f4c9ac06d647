"""The rotary embedding, in PyTorch's own operations (Su et al., RoFormer, eq. 34)."""

import functools

import torch

from fulgur._drop_in import heads_of_k, want_parts, want_tensors


def rotate_half(x, interleaved=False):
    """(-x2, x1) of the halves x1, x2 of the last dimension, or of its even and odd entries."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """x ``(batch, seqlen, heads, dim)`` rotated by the angles of cos and sin, in float32 or better, and
    rounded once, as the caches' kernels rotate it.

    cos and sin are ``(seqlen, rotary_dim / 2)`` or ``(batch, seqlen, rotary_dim / 2)``; the first
    rotary_dim of dim are rotated.
    """
    dim = 2 * cos.shape[-1]
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (
        (t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1)).unsqueeze(-2).to(exact)
        for t in (cos, sin)
    )
    straight = x[..., :dim].to(exact)
    rotated = straight * cos + rotate_half(straight, interleaved) * sin
    return torch.cat((rotated.to(x.dtype), x[..., dim:]), -1)


def apply_rotary_emb(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None,
    max_seqlen=None,
):  # fmt: skip
    """x ``(batch, seqlen, heads, dim)`` or packed ``(total, heads, dim)``, each row rotated by the
    angles of its place in its sequence plus ``seqlen_offsets``, a number or int ``(batch,)``.

    cos and sin are ``(longest, rotary_dim / 2)``; places after them, which offsets in a tensor may
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
        sequence = sequence.clamp(max=len(cu_seqlens) - 2)  # rows after the last are padding
        places = rows - cu_seqlens[sequence] + (offsets[sequence] if offsets.dim() else offsets)
    places = places.clamp(max=positions - 1)
    rotated = apply_rotary_emb_torch(x, cos[places], sin[places], interleaved)
    return x.copy_(rotated) if inplace else rotated


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None
):
    """Turns q and k of qkv in place, as `apply_rotary_emb` does, and returns qkv.

    qkv is ``(batch, seqlen, 3, heads, dim)``, or ``(batch, seqlen, num_heads_q + 2 * heads of k, dim)``.
    cos_k and sin_k, where given, are those of k (XPos). ValueError names the argument that is wrong.
    """
    want_tensors(qkv=qkv)
    if qkv.dim() == 5:
        want_parts("qkv", qkv, 3)
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        heads_k = heads_of_k(qkv, num_heads_q)
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_k]
    if (cos_k is None) != (sin_k is None):
        given, lacking = ("cos_k", "sin_k") if sin_k is None else ("sin_k", "cos_k")
        raise ValueError(f"{lacking}: got None, want it with {given}")
    rotate = functools.partial(
        apply_rotary_emb, interleaved=interleaved, inplace=True, seqlen_offsets=seqlen_offsets
    )
    rotate(q, cos, sin)
    rotate(k, *((cos, sin) if cos_k is None else (cos_k, sin_k)))
    return qkv


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Turns k of kv ``(batch, seqlen, 2, heads, dim)`` in place, as `apply_rotary_emb` does, and returns kv.

    ValueError names the argument that is wrong.
    """
    want_parts("kv", kv, 2)
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """The embedding with its angles: place p rotates pair i of the first ``dim`` dims by p base^(-2i / dim)
    (Su et al., eq. 15). The tables grow with the longest sequence that was seen.

    With ``scale_base`` q grows and k shrinks with its place (XPos, Sun et al., arXiv 2212.10554): recommended
    is 512. ValueError where dim is odd or less than 2.
    """

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"dim: got {dim}, want an even number from 2 on")
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        scale = None if scale_base is None else (self._evens(device) + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._tables = None  # of cos and sin for q, and for k

    def _evens(self, device):
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _frequencies(self, device):
        return self.base ** (-self._evens(device) / self.dim)

    def _tables_of(self, seqlen, like):
        """(cos, sin) of q and of k for so many places; a tensor of offsets takes what is there."""
        exact = torch.promote_types(like.dtype, torch.float32)  # rows are rounded once, when they are rotated
        there = self._tables[0][0] if self._tables else None
        fits = there is not None and (there.device, there.dtype) == (like.device, exact)
        fits = fits and (seqlen is None or seqlen <= len(there))
        if fits and not (self.training and there.is_inference()):
            return self._tables
        if seqlen is None:
            raise ValueError("max_seqlen: got None, want the longest sequence where seqlen_offset is a tensor")
        # In float32 whatever the module was cast to: the angles of far places need their bits.
        is_exact = self.inv_freq.dtype == torch.float32
        frequencies = self.inv_freq.to(like.device) if is_exact else self._frequencies(like.device)
        places = torch.arange(seqlen, device=like.device, dtype=torch.float32)
        angles = torch.outer(places, frequencies)
        pairs = [(angles.cos(), angles.sin())] * 2
        if self.scale is not None:
            powers = (places - seqlen // 2) / self.scale_base
            growth = self.scale.to(like.device, torch.float32) ** powers[:, None]
            pairs = [tuple(t * factor for t in pairs[0]) for factor in (growth, 1 / growth)]
        self._tables = [tuple(t.to(exact) for t in pair) for pair in pairs]
        return self._tables

    def forward(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None):
        """qkv as `apply_rotary_emb_qkv_` takes it, rotated in place and returned; or q ``(batch, seqlen, heads,
        dim)`` with kv ``(batch, seqlen, 2, heads, dim)``: both, rotated in place.

        ``seqlen_offset`` is a number or int ``(batch,)``; with a tensor ``max_seqlen`` says how long the
        tables must be.
        """
        longest = max_seqlen
        if longest is None and not isinstance(seqlen_offset, torch.Tensor):
            longest = qkv.shape[1] + seqlen_offset
        of_q, of_k = self._tables_of(longest, qkv)
        options = dict(interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *of_q, *of_k, num_heads_q=num_heads_q, **options)
        q = apply_rotary_emb(qkv, *of_q, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, *of_k, **options)
