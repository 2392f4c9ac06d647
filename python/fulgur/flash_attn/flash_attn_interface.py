"""The functions of flash-attn 2.8, of q ``(batch, seqlen, heads, dim)`` or packed ``(total, heads,
dim)``."""

import torch

from fulgur._drop_in import (
    PARTS_OF_KV, PARTS_OF_QKV, with_pages, keys_of_packed_queries, longest, refuse, sides, want_int32,
    want_parts, with_kvcache,
)  # fmt: skip
from fulgur._names import OPTIONS, PRIVATE, named
from fulgur.torch import attention
from fulgur.torch._random import rng_state_of
from fulgur.torch._tensors import whole_rows

USE_TRITON_ROCM = False
_NAMES = OPTIONS | {"page_table": "block_table"}
_LENGTHS_OF_PAGES = {"seqused_k": "cu_seqlens_k.diff()"}
_LENGTHS_OF_QKV = {
    "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}  # fmt: skip
_PRIVATE_NAMES = PRIVATE | {"page_table": "block_table", "lse": "softmax_lse"}

_backward_into = torch.ops.fulgur.backward_into.default
_forward = torch.ops.fulgur.forward.default
_forward_cached = torch.ops.fulgur.forward_cached.default


def _get_block_size_n(device, head_dim, is_dropout, is_causal):
    """Probabilities are not scaled by blocks: there is one."""
    return 2**30


def _results(results, q, return_attn_probs, dropout_p):
    if not return_attn_probs:
        return results[0]
    refuse(**{"return_attn_probs with dropout_p": dropout_p > 0})
    return *results, q.new_empty(0)


def _attention(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
    return_attn_probs, names=_NAMES, **packed,
):  # fmt: skip
    call = lambda: named(  # noqa: E731
        names, attention, q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal,
        window=sides(window_size), softcap=softcap, alibi_slopes=alibi_slopes,
        deterministic=deterministic, return_lse=True, **packed,
    )  # fmt: skip
    results = with_pages("block_table", packed.get("page_table"), (q, k, v), call)
    return _results(results, q, return_attn_probs, dropout_p)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """out, or (out, softmax_lse, an empty tensor) with ``return_attn_probs``."""
    return _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """The same of kv ``(batch, seqlen, 2, heads, dim)``."""
    want_parts("kv", kv, 2)
    return named(
        PARTS_OF_KV, _attention, q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """The same of qkv ``(batch, seqlen, 3, heads, dim)``."""
    want_parts("qkv", qkv, 3)
    return named(
        PARTS_OF_QKV, _attention, *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """The same of packed sequences. With block_table, k and v are pages ``(num_blocks,
    page_block_size, heads, dim)``, cu_seqlens_k has only their lengths, and the backward pass raises."""
    return _attention(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=longest("max_seqlen_q", max_seqlen_q, q),
        names=_NAMES if block_table is None else _NAMES | _LENGTHS_OF_PAGES,
        **keys_of_packed_queries(k, cu_seqlens_k, max_seqlen_k, block_table),
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """The same of kv ``(total, 2, heads, dim)``."""
    want_parts("kv", kv, 2, "total")
    return named(
        PARTS_OF_KV, flash_attn_varlen_func, q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """The same of qkv ``(total, 3, heads, dim)``."""
    want_parts("qkv", qkv, 3, "total")
    return named(
        PARTS_OF_QKV | _LENGTHS_OF_QKV, flash_attn_varlen_func, *qkv.unbind(1), cu_seqlens, cu_seqlens,
        max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """out, or (out, softmax_lse): attention over a cache, to which k and v are added in place.

    rotary_cos and rotary_sin rotate k to cache_seqlens + its row, and q likewise if ``causal`` or a
    window bounds it, else all of q to cache_seqlens.
    """
    want_int32(
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        block_table=block_table,
    )  # fmt: skip
    results = named(
        _NAMES, with_kvcache, q, k_cache, v_cache, k, v, cache_seqlens, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved,
        cache_batch_idx=cache_batch_idx, page_table=block_table, cache_leftpad=cache_leftpad,
        scale=softmax_scale, causal=causal, window=sides(window_size), softcap=softcap,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return results if return_softmax_lse else results[0]


# The private names that ring attention and Megatron call: no gradient is recorded.


def _shared(
    softmax_scale, causal, left, right, softcap, alibi_slopes, dropout_p, rng_state, **where
):
    """The options of both operators; `where` the sequences lie."""
    return dict(
        scale=softmax_scale, window_left=left, window_right=0 if causal else right, softcap=softcap,
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, rng_state=rng_state, **where,
    )  # fmt: skip


def _whole(**tensors):
    return tuple(whole_rows(name, x) for name, x in tensors.items())


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, return_softmax,
):  # fmt: skip
    """out, softmax_lse, an empty tensor, and the random numbers for the backward pass."""
    refuse(return_softmax=return_softmax)
    q, k, v = _whole(q=q, k=k, v=v)
    rng_state = rng_state_of(q, dropout_p)
    shared = _shared(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        dropout_p, rng_state,
    )  # fmt: skip
    results = named(_PRIVATE_NAMES, _forward, q, k, v, **shared)
    return *results, q.new_empty(0), rng_state


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    num_splits=0,
):  # fmt: skip
    """The same of packed sequences, or of queries packed with the pages of a block_table."""
    refuse(return_softmax=return_softmax, leftpad_k=leftpad_k)
    if block_table is not None and num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported with a block_table; want 0 or 1")
    q = whole_rows("q", q)
    rng_state = rng_state_of(q, dropout_p)
    where = keys_of_packed_queries(k, cu_seqlens_k, max_seqlen_k, block_table)
    names = _PRIVATE_NAMES
    if seqused_k is not None:
        where["seqused_k"] = seqused_k
    elif block_table is not None:
        names = names | _LENGTHS_OF_PAGES
    shared = _shared(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        dropout_p, rng_state, cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=longest("max_seqlen_q", max_seqlen_q, q), **where,
    )  # fmt: skip
    if block_table is None:
        results = named(names, _forward, q, *_whole(k=k, v=v), **shared)
    else:
        results = named(names, _forward_cached, q, k, v, **shared)
    return *results, q.new_empty(0), rng_state


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Writes dq, dk and dv."""
    shared = _shared(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        dropout_p, rng_state,
    )  # fmt: skip
    named(
        _PRIVATE_NAMES, _backward_into, *_whole(dout=dout, q=q, k=k, v=v, out=out), softmax_lse, dq, dk,
        dv, **shared, deterministic=deterministic,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
):  # fmt: skip
    """Writes dq, dk and dv of packed sequences."""
    shared = _shared(
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        dropout_p, rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest("max_seqlen_q", max_seqlen_q, q),
        max_seqlen_k=longest("max_seqlen_k", max_seqlen_k, k),
    )  # fmt: skip
    named(
        _PRIVATE_NAMES, _backward_into, *_whole(dout=dout, q=q, k=k, v=v, out=out), softmax_lse, dq, dk,
        dv, **shared, deterministic=deterministic,
    )  # fmt: skip
