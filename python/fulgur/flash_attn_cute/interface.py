"""The functions of FlashAttention-4: each returns (out, lse), lse None unless asked for."""

from fulgur import _drop_in
from fulgur._drop_in import longest, refuse, sides
from fulgur._names import OPTIONS, named
from fulgur.torch import attention


def flash_attn_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
    aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    """(out, lse) of q ``(batch, seqlen, heads, dim)``."""
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    out, lse = named(
        OPTIONS, attention, q, k, v, scale=softmax_scale, causal=causal, window=sides(window_size),
        softcap=softcap or 0.0, sinks=None if learnable_sink is None else learnable_sink.float(),
        deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return out, lse if return_lse else None


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
    mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
):  # fmt: skip
    """(out, lse) of packed sequences, or of a batch with ``seqused_q`` and ``seqused_k``; beside
    ``page_table`` that says how many keys the pages have, and nothing has a gradient."""
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
    )  # fmt: skip
    packed = cu_seqlens_q is not None
    if page_table is None and packed != (cu_seqlens_k is not None):
        refuse(**{"cu_seqlens_q or cu_seqlens_k without the other": True})
    out, lse = named(
        OPTIONS, attention, q, k, v, scale=softmax_scale, causal=causal, window=sides(window_size),
        softcap=softcap or 0.0, sinks=None if learnable_sink is None else learnable_sink.float(),
        deterministic=deterministic, return_lse=True,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
        seqused_k=seqused_k, page_table=page_table,
        max_seqlen_q=longest(max_seqlen_q, q) if packed else 0,
        max_seqlen_k=longest(max_seqlen_k, k) if packed and page_table is None else 0,
    )  # fmt: skip
    return out, lse if return_lse else None


def flash_attn_combine(
    out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None,
    virtual_batch_idx=None, return_lse=True,
):  # fmt: skip
    """(out, lse) of parts along the first dimension over disjoint keys."""
    refuse(seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    out, lse = _drop_in.combine(out_partial, lse_partial, out, out_dtype)
    return out, lse if return_lse else None
