"""The functions of FlashAttention-4: each returns (out, lse), lse None unless asked for. The private
ones are those that rings and PyTorch call."""

import torch

from fulgur import _drop_in
from fulgur._drop_in import with_pages, longest, refuse, sides, want_tensors
from fulgur._names import OPTIONS, PRIVATE, named
from fulgur.torch import attention
from fulgur.torch._tensors import whole_rows

_backward_into = torch.ops.fulgur.backward_into.default


def _as_float32(learnable_sink):
    if learnable_sink is None:
        return None
    want_tensors(learnable_sink=learnable_sink)
    return learnable_sink.float()


_WINDOW = "window_size_left, window_size_right"


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
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    out, lse = named(
        OPTIONS, attention, q, k, v, scale=softmax_scale, causal=causal, window=sides(window_size),
        softcap=softcap or 0.0, sinks=_as_float32(learnable_sink), deterministic=deterministic,
        return_lse=True,
    )  # fmt: skip
    return out, lse if return_lse else None


def flash_attn_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
    mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False,
    scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    """(out, lse) of packed sequences, or of a batch with ``seqused_q`` and ``seqused_k``; with
    ``page_table`` that says how many keys the pages have, and the backward pass raises."""
    refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    call = lambda: named(  # noqa: E731
        OPTIONS, attention, q, k, v, scale=softmax_scale, causal=causal, window=sides(window_size),
        softcap=softcap or 0.0, sinks=_as_float32(learnable_sink), deterministic=deterministic,
        return_lse=True, seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table,
        **_packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table),
    )  # fmt: skip
    out, lse = with_pages("page_table", page_table, (q, k, v, learnable_sink), call)
    return out, lse if return_lse else None


def _packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table=None):
    """Arguments of sequences that are packed; none where they are not."""
    want_tensors(q=q, k=k)
    if page_table is None and (cu_seqlens_q is None) != (cu_seqlens_k is None):
        refuse(**{"cu_seqlens_q or cu_seqlens_k without the other": True})
    packed = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if cu_seqlens_q is not None:
        packed["max_seqlen_q"] = longest("max_seqlen_q", max_seqlen_q, q)
        if page_table is None:
            packed["max_seqlen_k"] = longest("max_seqlen_k", max_seqlen_k, k)
    return packed


def flash_attn_combine(
    out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None,
    virtual_batch_idx=None, return_lse=True,
):  # fmt: skip
    """(out, lse) of parts along the first dimension over disjoint keys."""
    refuse(seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    out, lse = _drop_in.combine(out_partial, lse_partial, out, out_dtype)
    return out, lse if return_lse else None


# The private names: no gradient is recorded.


@torch.no_grad()
def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
    tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1,
    pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None,
    return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None,
    k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
    seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
):  # fmt: skip
    """out, lse, and None for each of the three that upstream keeps for `qv`; `out` and `lse` take the
    results. lse is None unless it is given, asked for, or an input requires grad."""
    refuse(
        qv=qv, score_mod=score_mod, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, gather_kv_indices=gather_kv_indices,
        gather_bwd_recompute_p=gather_bwd_recompute_p,
    )  # fmt: skip
    results = named(
        PRIVATE, attention, q, k, v, scale=softmax_scale, causal=causal, softcap=softcap or 0.0,
        window=sides((window_size_left, window_size_right), _WINDOW), sinks=_as_float32(learnable_sink),
        seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table, return_lse=True,
        **_packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table),
    )  # fmt: skip
    out = results[0] if out is None else out.copy_(results[0])
    if lse is not None:
        lse.copy_(results[1])
    elif return_lse or any(x is not None and x.requires_grad for x in (q, k, v, learnable_sink)):
        lse = results[1]
    return out, lse, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
    num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False,
    AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None,
    cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None,
    aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None,
):  # fmt: skip
    """dq, dk and dv, written where they are given, and with learnable_sink its gradient."""
    refuse(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    rows = dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    rows = [whole_rows(name, x) for name, x in rows.items()]
    gradients = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if given is None else given
        for x, given in ((q, dq), (k, dk), (v, dv))
    ]
    sinks = _as_float32(learnable_sink)
    dsinks = None if sinks is None else torch.empty_like(sinks)
    left, right = sides((window_size_left, window_size_right), _WINDOW)
    named(
        PRIVATE, _backward_into, *rows, *gradients,
        dlse=None if dlse is None else whole_rows("dlse", dlse), sinks=sinks, scale=softmax_scale,
        softcap=softcap or 0.0, window_left=left, window_right=0 if causal else right,
        seqused_q=seqused_q, seqused_k=seqused_k, deterministic=deterministic, dsinks=dsinks,
        **_packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
    )  # fmt: skip
    return (*gradients, *(() if sinks is None else (dsinks.to(learnable_sink.dtype),)))


def _flash_attn_fwd_combine(
    out_partial, lse_partial, out, lse=None, cu_seqlens=None, seqused=None,
    num_splits_dynamic_ptr=None, virtual_batch_idx=None, semaphore_to_reset=None, *, _arch=None,
):  # fmt: skip
    """Writes what flash_attn_combine returns to out and lse."""
    refuse(
        seqused=seqused, num_splits_dynamic_ptr=num_splits_dynamic_ptr,
        virtual_batch_idx=virtual_batch_idx, semaphore_to_reset=semaphore_to_reset,
    )  # fmt: skip
    _, got = _drop_in.combine(out_partial, lse_partial, out)
    if lse is not None:
        lse.copy_(got)


def get_scheduler_metadata(
    max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, pack_gqa=None,
    causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None,
    cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None,
    seqlen_k_per_split=None, _arch=None,
):  # fmt: skip
    """None, for ``scheduler_metadata``: fulgur's kernels want no such thing."""
