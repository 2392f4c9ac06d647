"""The interface of FlashAttention-3 (``flash_attn_interface``), computed by fulgur.

Functions, arguments, defaults and results are upstream's; what fulgur does not have raises
NotImplementedError. ``num_splits``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are
hints about upstream's kernels, and taken whatever they say. :func:`fulgur.install_as` lets ``import
flash_attn_interface`` find this module. q, k and v may be float8, with descales ``(batch, hk)``: out is
bfloat16 then, as upstream's, and has no gradient.
"""

import torch

from fulgur import _drop_in
from fulgur._drop_in import longest, refuse, sides, want_int32, want_parts, without_gradient
from fulgur._names import OPTIONS, PRIVATE, named
from fulgur.torch import attention
from fulgur.torch._tensors import has_codes, whole_rows

_backward_into = torch.ops.fulgur.backward_into.default


def _attention(
    q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic,
    return_attn_probs, qv, descales, **packed,
):  # fmt: skip
    refuse(qv=qv)
    options = dict(
        scale=softmax_scale, causal=causal, window=sides(window_size), chunk=attention_chunk,
        softcap=softcap, return_lse=True, **packed,
    )  # fmt: skip
    if has_codes(q):
        options |= descales
    else:
        _want_no_descales("q", q, descales)

    def call():
        return named(OPTIONS, attention, q, k, v, deterministic=deterministic, **options)

    results = without_gradient("q: fulgur has no gradients of float8", (q, k, v), call) if has_codes(q) else call()
    return results if return_attn_probs else results[0]


def _want_no_descales(of, tensor, descales):
    for name, descale in descales.items():
        if descale is not None:
            raise ValueError(f"{name}: given with a {of} of {_dtype_of(tensor)}, want it with float8")


def _dtype_of(tensor):
    return str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """out, or (out, softmax_lse) with ``return_attn_probs``."""
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return _attention(
        q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic,
        return_attn_probs, qv, descales,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None,
    sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """The same of qkv ``(batch, seqlen, 3, heads, dim)``, or ``(batch, seqlen, num_heads_q + 2 hk,
    dim)``."""
    _drop_in.want_tensors(qkv=qkv)
    if qkv.dim() == 5:
        want_parts("qkv", qkv, 3)
        q, k, v = qkv.unbind(-3)
    else:
        heads_k = _drop_in.heads_of_k(qkv, num_heads_q)
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], -2)
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return named(
        _drop_in.PARTS_OF_QKV, _attention, q, k, v, softmax_scale, causal, window_size,
        attention_chunk, softcap, deterministic, return_attn_probs, None, descales,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """The same of packed sequences."""
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return _attention(
        q, k, v, softmax_scale, causal, window_size, attention_chunk, softcap, deterministic,
        return_attn_probs, qv, descales, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest("max_seqlen_q", max_seqlen_q, q),
        max_seqlen_k=longest("max_seqlen_k", max_seqlen_k, k),
        seqused_q=seqused_q, seqused_k=seqused_k,
    )  # fmt: skip


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """(out, softmax_lse) of parts ``(parts, batch, seqlen, heads, dim)`` and ``(parts, batch,
    seqlen, heads)`` over disjoint keys."""
    return _drop_in.combine(out_partial, lse_partial, out, out_dtype)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """out, or (out, softmax_lse, None, None): attention over a cache, to which k and v are added in
    place.

    rotary_cos and rotary_sin rotate k to cache_seqlens + its row, and q likewise if ``causal``,
    a window or chunks bound it, else all of q to cache_seqlens; rotary_seqlens stands in for
    cache_seqlens there. With page_table, cache_batch_idx names its rows. Caches of float8 take new
    rows of their dtype, as they are where they are not rotated, and a q of float8, bfloat16 or float16.
    """
    refuse(qv=qv)
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if has_codes(k_cache):
        if not has_codes(q):
            _want_no_descales("q", q, {"q_descale": q_descale})
        elif rotary_cos is not None:
            q, descales = _as_bfloat16(q, **descales)
        k, v = _rows_as_bfloat16("k", k, k_cache), _rows_as_bfloat16("v", v, v_cache)
        rotary_cos, rotary_sin = (x.to(torch.bfloat16) if has_codes(x) else x for x in (rotary_cos, rotary_sin))
    else:
        _want_no_descales("k_cache", k_cache, descales)
        descales = {}
    want_int32(
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        page_table=page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    out, lse = _with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens,
        cache_batch_idx=cache_batch_idx, page_table=page_table, cache_leftpad=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        scale=softmax_scale, causal=causal, window=sides(window_size), chunk=attention_chunk,
        softcap=softcap, **descales,
    )  # fmt: skip
    return (out, lse, None, None) if return_softmax_lse else out


def _as_bfloat16(q, q_descale, k_descale, v_descale):
    """A q of float8 that is rotated, in bfloat16, which has its numbers; what they are multiplied by goes to those of
    k."""
    if q_descale is not None:
        k_descale = q_descale if k_descale is None else k_descale * q_descale
    return q.to(torch.bfloat16), {"k_descale": k_descale, "v_descale": v_descale}


def _rows_as_bfloat16(name, rows, cache):
    """New rows of a cache of float8 in bfloat16, of whose numbers that cache has each."""
    if rows is None:
        return None
    _drop_in.want_tensors(**{name: rows})
    if rows.dtype != cache.dtype:
        raise ValueError(
            f"{name}: got {_dtype_of(rows)}, want {_dtype_of(cache)} as the cache;"
            " fulgur.append_attention quantizes new rows"
        )
    return rows.to(torch.bfloat16)


def _with_kvcache(*args, page_table, cache_batch_idx, **options):
    if page_table is not None and cache_batch_idx is not None:  # rows of the table
        page_table, cache_batch_idx = page_table[cache_batch_idx], None
    return _drop_in.with_kvcache(
        *args, page_table=page_table, cache_batch_idx=cache_batch_idx, **options
    )


# The private names that ring attention and Megatron call.

# By what flash_attn_with_kvcache calls arguments.
_PRIVATE_CACHES = {
    "k_cache": "k", "v_cache": "v", "k": "k_new", "v": "v_new", "cache_seqlens": "seqused_k",
    "cache_batch_idx": "kv_batch_idx", "cache_leftpad": "leftpad_k", "rotary_seqlens": "seqlens_rotary",
    "window_size": "window_size_left and window_size_right",
}  # fmt: skip


def _flash_attn_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
    cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
    seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0,
    rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """out, softmax_lse and two empty tensors, of rows or of a cache, to which k_new and v_new are
    added in place; out_ takes out."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = dict(
        scale=softmax_scale, causal=causal, window=(window_size_left, window_size_right),
        chunk=attention_chunk, softcap=softcap, cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q,
    )  # fmt: skip
    if any(x is not None for x in (k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos)):
        out, lse = named(
            _PRIVATE_CACHES, _with_kvcache, q, k, v, k_new, v_new, seqused_k, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved, rotary_seqlens=seqlens_rotary,
            cache_batch_idx=kv_batch_idx, page_table=page_table, cache_leftpad=leftpad_k,
            cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, **options,
        )  # fmt: skip
    else:
        out, lse = named(
            PRIVATE, attention, q, k, v, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, return_lse=True,
            **_lengths(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k), **options,
        )  # fmt: skip
    out = out if out_ is None else out_.copy_(out)
    return out, lse, out.new_empty(0), lse.new_empty(0)


def _lengths(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k):
    if cu_seqlens_q is None:
        return {}
    return dict(
        max_seqlen_q=longest("max_seqlen_q", max_seqlen_q, q),
        max_seqlen_k=longest("max_seqlen_k", max_seqlen_k, k),
    )  # fmt: skip


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
    sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
    softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    deterministic=False, sm_margin=0,
):  # fmt: skip
    """Writes dq, dk and dv, which must be given."""
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        if x is None:
            raise ValueError(f"{name}: got None, want a tensor to write the gradient to")
    rows = dict(dout=dout, q=q, k=k, v=v, out=out)
    named(
        PRIVATE | {"lse": "softmax_lse", "seqused_q": "sequed_q", "seqused_k": "sequed_k"}, _backward_into,
        *(whole_rows(name, x) for name, x in rows.items()), softmax_lse, dq, dk, dv,
        scale=softmax_scale, window_left=window_size_left,
        window_right=0 if is_causal else window_size_right, softcap=softcap,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=sequed_q,
        seqused_k=sequed_k, **_lengths(q, k, cu_seqlens_q, max_seqlen_q, max_seqlen_k),
        deterministic=deterministic,
    )  # fmt: skip


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
    qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
    attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """An empty tensor: fulgur's kernels want no such thing."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
