from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from torch import Tensor

from fulgur import _Expression, _Indices, _Stage

__all__ = [
    "append",
    "append_attention",
    "attention",
    "compiled",
    "enable_flex",
    "flex_attention",
    "scores",
]

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix_groups: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    k_zero_point: Tensor | None = None,
    v_zero_point: Tensor | None = None,
    k_mean: Tensor | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[False] = False,
) -> Tensor:
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Means the same as :func:`fulgur.attention`, on tensors of PyTorch, and records gradients to q,
    k, v, bias, sinks and the tensors of score_mod; caches, tree masks and low-bit tensors (float8 and int8, with
    descales) have none. Under autocast q, k and v are cast to its dtype, float64 apart; with a cache, q alone is
    cast, to the dtype of the cache, and with low-bit tensors nothing is.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``; 1 <= d <= 576.
        k: ``(batch, sk, hk, d)`` or ``(total_k, hk, d)``, dtype of q; hq is a multiple of hk.
        v: ``(batch, sk, hk, dv)`` or ``(total_k, hk, dv)``, dtype of q; 1 <= dv <= 512.
        causal: query i of sq sees keys up to i + sk - sq.
        window: ``(left, right)``: keys from i + sk - sq - left to i + sk - sq + right, -1 is unbounded.
            With ``causal`` both hold.
        chunk: of these keys j, those with j // chunk == (i + sk - sq) // chunk; 0 is off (the local
            layers of Llama 4).
        top_left: query i is at key i instead of key i + sk - sq, for the mask and ALiBi: the first
            query is at the first key of its sequence. Not with ``tree_mask`` or rotary embeddings.
        scale: of the scores; default 1 / sqrt(d).
        softcap: 0 is off.
        alibi_slopes: float32 ``(hq,)`` or ``(batch, hq)``; gets no gradient.
        bias: ``(batch, hq, sq, sk)``, each of them may be 1: float32, bfloat16, float16 (float64 where
            q is) added to the scores, after softcap and ALiBi, where -inf, or less than -2**115, hides
            the key; or bool, True where the query sees the key. Packed sequences and caches count
            queries and keys in each sequence, and may have a bias of more of both.
        sinks: float32 or the 16-bit dtype of q ``(hq,)``: a score of each head that joins the softmax
            of every row, without a value: lse is log(exp(sink) + sum of exp(scores)). Not scaled,
            capped or masked; -inf is none (attention sinks, as gpt-oss learns them; StreamingLLM, arXiv
            2309.17453).
        score_mod: what becomes of each score, after softcap and ALiBi and before the bias: a text, as
            in docs/expressions.md, a function, or an :class:`Expression`. Parameters of a function are
            named after what it needs: of score, b (sequence), h (q head), hk (kv head), q, k (query and
            key of the sequence), sq, sk (its lengths), q0 (its first packed query), delta (k - q - (sk
            - sq)), and of the tensors. On the CPU.
        mask_mod: likewise whether a query sees a key, of those that the other masks show; not of score.
        tensors: arrays that score_mod and mask_mod index, by name: float32, bfloat16, float16, float64,
            int32, int64 or bool, of 1 to 4 dimensions, any strides.
        dropout_p: 0 <= p < 1; the random numbers come from PyTorch's generator of q's device.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``: sequence b is the packed rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``, rows around these are padding. Both or none,
            or ``cu_seqlens_q`` alone with a cache, whose k and v have four dimensions.
        max_seqlen_q, max_seqlen_k: the longest packed sequences; 0 reads them from cu_seqlens, in host
            memory only. With a page_table max_seqlen_k bounds seqused_k; 0 is what the table has room
            for.
        seqused_q: int32 ``(batch,)``: only the first ``seqused_q[b]`` queries of sequence b exist: the
            rows after are padding, with out 0, lse -inf and gradients 0.
        seqused_k: int32 ``(batch,)``: only the first ``seqused_k[b]`` keys of sequence b exist.
        page_table: int32 ``(batch, max_pages)``: k is ``(pages, page, hk, d)``, v ``(pages, page, hk,
            dv)``, and key j of sequence b is row ``j % page`` of page ``page_table[b, j // page]``.
            seqused_k must be given.
        page_indptr: int32 ``(batch + 1,)``: page_table is ``(ids,)``, and the pages of sequence b are
            ``page_table[page_indptr[b]:page_indptr[b + 1]]``.
        cache_batch_idx: int32 ``(batch,)``: sequence b is row ``cache_batch_idx[b]`` of k and v.
        leftpad_k: int32 ``(batch,)``: the first ``leftpad_k[b]`` keys of sequence b do not exist.
        tree_mask: int64 ``(batch, sq)`` or packed ``(total_q,)``, sq <= 64: a word of bits for each
            query. The last sq keys of a sequence are the tokens of its queries, and bit j says whether
            a query sees the jth of them, where the mask shows it, too (drafts of speculative decoding).
            Earlier keys are as without it. It has no gradient.
        prefix_groups, prefix_lens: int32 ``(groups + 1,)`` and ``(groups,)``, with a page_table:
            sequences ``prefix_groups[g]`` to ``prefix_groups[g + 1] - 1`` have the same first
            ``prefix_lens[g]`` keys and values, all of them in front of the queries' own, which are read
            once, through the pages of the first sequence, where that pays. Both or none.
        q_descale, k_descale, v_descale: float32 or float16: what codes of q, k and v are multiplied by,
            default 1. ``(1,)``, ``(batch, hk)``, each of which may be 1, or the shape of q, k or v but
            for the last dimension: a number of groups of columns. On the CPU k and v may be float8,
            int8, or a :class:`Quantized`, which brings its own, or other floats than q; on GPUs they
            may be float8, int8 or int4 with a q of bf16, f16 or float8, whose descale then has one
            group.
        k_zero_point, v_zero_point: of int8 and int4, which is taken from the codes first, in the shape
            of the descale; default 0.
        k_mean: float32 ``(batch, hk, d)``, of which batch may be 1: what the rows of codes of k have
            besides, which lse says, too. Not with both softcap and alibi_slopes.
        hadamard: k holds codes of rows that :func:`hadamard` has rotated, and a q of floats is rotated
            likewise; a Quantized k says it itself.
        deterministic: the backward pass gives the same bits in every run; so it does under
            ``torch.use_deterministic_algorithms(True)``.
        invariant: a sequence's bits do not depend on its batch or on the number of threads.
        fast_codes: P V of float8_e4m3fn arrays in e4m3, too, on Hopper GPUs: faster, and off by what
            e4m3 rounds of P and of V less its mean.
        max_workspace: the bytes that the call may want besides its arrays at most; 0 is any number.
            Gradients on a GPU then take a slower form that fits; where none does, an error says the
            minimum.
        return_lse: return ``(out, lse)``.

    Returns:
        out, contiguous, or with score_mod or mask_mod in the layout of q; with ``return_lse`` also lse,
        float32 (float64 where q is), ``(batch, hq, sq)`` or packed ``(hq, total_q)``, natural log.
        Gradients flow through both.

    Raises:
        RuntimeError, TypeError, ValueError: an argument is wrong, or no engine computes this here.
        NotImplementedError: another derivative than the first, or one in forward mode, is wanted.
    """
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix_groups: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    k_zero_point: Tensor | None = None,
    v_zero_point: Tensor | None = None,
    k_mean: Tensor | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix_groups: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    k_zero_point: Tensor | None = None,
    v_zero_point: Tensor | None = None,
    k_mean: Tensor | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    q: None = None,
    q_out: None = None,
    cu_seqlens_q: None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
) -> None:
    """Writes new keys and values into caches, in place, and rotates them and q to their positions.

    Means the same as :func:`fulgur.append`, as an operator that ``torch.compile`` sees. Nothing is
    recorded: tensors that require grad are refused but under ``torch.no_grad()``. Under autocast q,
    k_new and v_new are cast to the dtype of the caches.

    Args:
        k_cache, v_cache, k_new, v_new, cache_seqlens, cu_seqlens_k_new, page_table, page_indptr,
            cache_batch_idx, cos, sin, interleaved, rotary_seqlens, q, q_out, cu_seqlens_q, causal,
            window, chunk, top_left: as for :func:`fulgur.append`.

    Returns:
        The rotated queries, fresh or the very ``q_out`` given; None without q. Packed rows after
        the last sequence are not written.

    Raises:
        RuntimeError: an argument is wrong, and nothing was written; or the tensors are where no
            engine appends.
    """
@overload
def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    q: Tensor,
    q_out: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
) -> Tensor: ...
@overload
def append_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix_groups: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[False] = False,
) -> Tensor:
    """:func:`append` and the :func:`attention` that follows, in one call.

    Means the same as :func:`fulgur.append_attention`, as an operator that ``torch.compile`` sees.
    Nothing is recorded: tensors that require grad are refused but under ``torch.no_grad()``. Under
    autocast q, k_new and v_new are cast to the dtype of the caches.

    Args:
        q, k_cache, v_cache, k_new, v_new, cache_seqlens, cu_seqlens_k_new, cos, sin, interleaved,
            rotary_seqlens, causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks,
            cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_q, page_table, page_indptr,
            cache_batch_idx, leftpad_k, tree_mask, prefix_groups, prefix_lens, invariant, fast_codes,
            max_workspace, return_lse: as for :func:`fulgur.append_attention`.

    Returns:
        As :func:`attention`.

    Raises:
        RuntimeError: an argument is wrong, and nothing was written; or no engine computes this.
    """
@overload
def append_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix_groups: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def append_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    rotary_seqlens: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
    prefix_groups: Tensor | None = None,
    prefix_lens: Tensor | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def scores(
    q: Tensor,
    k: Tensor,
    *,
    stage: _Stage,
    rows: _Indices | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: _Expression | None = None,
    mask_mod: _Expression | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """The scores of attention, or its probabilities: what :func:`attention` makes and never keeps.

    Means the same as :func:`fulgur.scores`, on tensors of PyTorch. Nothing is recorded: tensors that require grad are
    refused but under ``torch.no_grad()``. ``torch.compile`` leaves its graph for it.

    Args:
        q, k, stage, rows, causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks,
            score_mod, mask_mod, tensors, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            seqused_q, seqused_k, page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask: as for
            :func:`fulgur.scores`.

    Returns:
        A fresh tensor, float32 (float64 where q is), ``(batch, hq, sq, sk)``, or with ``rows`` of so many queries.

    Raises:
        ValueError, TypeError: an argument is wrong.
        NotImplementedError: a derivative is wanted.
        fulgur.Error: the tensors are of float64 on a GPU.
    """
compiled: bool

def enable_flex(enabled: bool = True) -> None: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[[Any, Any, Any, Any, Any], Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any: ...
