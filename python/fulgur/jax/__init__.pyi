from typing import Any, Literal, overload

from jax import Array
from jax.typing import ArrayLike

__all__ = [
    "append",
    "append_attention",
    "attention",
    "dot_product_attention",
]

@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_mod: expression = None,
    mask_mod: expression = None,
    tensors: tensors = None,
    dropout_p: float = 0.0,
    seed: int | ArrayLike = 0,
    offset: int | ArrayLike = 0,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    leftpad_k: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    prefix_groups: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    q_descale: ArrayLike | None = None,
    k_descale: ArrayLike | None = None,
    v_descale: ArrayLike | None = None,
    k_zero_point: ArrayLike | None = None,
    v_zero_point: ArrayLike | None = None,
    k_mean: ArrayLike | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[False] = False,
) -> Array:
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Means the same as :func:`fulgur.attention`, on arrays of JAX, and has gradients to q, k, v, sinks,
    bias and the tensors of score_mod; caches, tree masks and codes (float8 and int8, with descales) have
    none. Under vmap the mapped dimension
    becomes a part of the batch; packed sequences and calls with dropout, sinks, a bias, expressions or
    tables of a cache are computed one after the other.

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
        scale: of the scores; default 1 / sqrt(d). Known when the call is traced, as are all numbers but
            for seed and offset.
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
        dropout_p: 0 <= p < 1; what is kept depends on (seed, offset, batch, head, query, key) only.
        seed, offset: of the dropout: 0 to 2^64 - 1, a scalar array of integers, whose bits count, or a
            key of ``jax.random``, of ``key`` or of ``PRNGKey``.
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
        tree_mask: int64 ``(batch, sq)`` or packed ``(total_q,)``, sq <= 64: bit j says whether a query
            sees the jth of the last sq keys, the drafted tokens. NumPy has int64, JAX under
            ``jax_enable_x64`` alone, and may give the low and the high half of each word instead:
            uint32 ``(batch, sq, 2)`` or ``(total_q, 2)``.
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
        deterministic: the backward pass gives the same bits in every run.
        invariant: a sequence's bits do not depend on its batch or on the number of threads.
        fast_codes: P V of float8_e4m3fn arrays in e4m3, too, on Hopper GPUs: faster, and off by what
            e4m3 rounds of P and of V less its mean.
        max_workspace: the bytes that the call may want besides its arrays at most; 0 is any number.
            Gradients on a GPU then take a slower form that fits; where none does, an error says the
            minimum.
        return_lse: return ``(out, lse)``.

    Returns:
        out; with ``return_lse`` also lse, float32 (float64 where q is), ``(batch, hq, sq)`` or packed
        ``(hq, total_q)``, natural log. Gradients flow through both.

    Raises:
        ValueError, TypeError: an argument is wrong.
        jax.errors.JaxRuntimeError: values of lengths or tables are wrong, max_workspace is too small,
            or no engine computes this there; where the compiled function has run before, ValueError.
    """
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_mod: expression = None,
    mask_mod: expression = None,
    tensors: tensors = None,
    dropout_p: float = 0.0,
    seed: int | ArrayLike = 0,
    offset: int | ArrayLike = 0,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    leftpad_k: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    prefix_groups: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    q_descale: ArrayLike | None = None,
    k_descale: ArrayLike | None = None,
    v_descale: ArrayLike | None = None,
    k_zero_point: ArrayLike | None = None,
    v_zero_point: ArrayLike | None = None,
    k_mean: ArrayLike | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    score_mod: expression = None,
    mask_mod: expression = None,
    tensors: tensors = None,
    dropout_p: float = 0.0,
    seed: int | ArrayLike = 0,
    offset: int | ArrayLike = 0,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    leftpad_k: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    prefix_groups: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    q_descale: ArrayLike | None = None,
    k_descale: ArrayLike | None = None,
    v_descale: ArrayLike | None = None,
    k_zero_point: ArrayLike | None = None,
    v_zero_point: ArrayLike | None = None,
    k_mean: ArrayLike | None = None,
    hadamard: bool = False,
    deterministic: bool = False,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: bool,
) -> Array | tuple[Array, Array]: ...
@overload
def append(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    cache_seqlens: ArrayLike,
    *,
    cu_seqlens_k_new: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cos: ArrayLike | None = None,
    sin: ArrayLike | None = None,
    interleaved: bool = False,
    rotary_seqlens: ArrayLike | None = None,
    q: None = None,
    cu_seqlens_q: None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
) -> tuple[Array, Array]:
    """Caches with new keys and values written into them, and queries rotated to their positions.

    Means the same as :func:`fulgur.append`, on arrays of JAX, which do not change. Where a compiled
    function has no other use of caches, which are donated to it (``donate_argnums`` of ``jax.jit``)
    or its own, as in ``jax.lax.scan``, the new ones take their memory; anywhere else they are copied
    first. There is no gradient. Under vmap calls are computed one after the other.

    Args:
        k_cache, v_cache, k_new, v_new, cache_seqlens, cu_seqlens_k_new, page_table, page_indptr,
            cache_batch_idx, cos, sin, interleaved, rotary_seqlens, q, cu_seqlens_q, causal, window,
            chunk, top_left: as for :func:`fulgur.append`.

    Returns:
        (k_cache, v_cache), with q (k_cache, v_cache, q), the rotated queries. Rows that take no token
        are as they were, and so are packed queries of no sequence.

    Raises:
        ValueError, TypeError: an argument is wrong.
        jax.errors.JaxRuntimeError: values of lengths or tables are wrong, or no engine appends there;
            where the compiled function has run before, ValueError. On a CUDA device values are not
            checked: tokens without a place there are not written.
    """
@overload
def append(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    cache_seqlens: ArrayLike,
    *,
    cu_seqlens_k_new: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    cos: ArrayLike,
    sin: ArrayLike,
    interleaved: bool = False,
    rotary_seqlens: ArrayLike | None = None,
    q: ArrayLike,
    cu_seqlens_q: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
) -> tuple[Array, Array, Array]: ...
@overload
def append_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    cache_seqlens: ArrayLike,
    *,
    cu_seqlens_k_new: ArrayLike | None = None,
    cos: ArrayLike | None = None,
    sin: ArrayLike | None = None,
    interleaved: bool = False,
    rotary_seqlens: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    leftpad_k: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    prefix_groups: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[False] = False,
) -> tuple[Array, Array, Array]:
    """:func:`append` and the :func:`attention` that follows, in one call: its bits are those of both.

    Means the same as :func:`fulgur.append_attention`, on arrays of JAX. The caches are written as
    :func:`append` writes them: in their own memory where they are donated. There is no gradient.
    Under vmap calls are computed one after the other.

    Args:
        q, k_cache, v_cache, k_new, v_new, cache_seqlens, cu_seqlens_k_new, cos, sin, interleaved,
            rotary_seqlens, causal, window, chunk, top_left, scale, softcap, alibi_slopes, bias, sinks,
            cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_q, page_table, page_indptr,
            cache_batch_idx, leftpad_k, tree_mask, prefix_groups, prefix_lens, invariant, fast_codes,
            max_workspace, return_lse: as for :func:`fulgur.append_attention`.

    Returns:
        (k_cache, v_cache, out), with ``return_lse`` (k_cache, v_cache, out, lse); out and lse are as
        :func:`attention` has them.

    Raises:
        As :func:`append`, also where no engine computes this.
    """
@overload
def append_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    cache_seqlens: ArrayLike,
    *,
    cu_seqlens_k_new: ArrayLike | None = None,
    cos: ArrayLike | None = None,
    sin: ArrayLike | None = None,
    interleaved: bool = False,
    rotary_seqlens: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    leftpad_k: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    prefix_groups: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: Literal[True],
) -> tuple[Array, Array, Array, Array]: ...
@overload
def append_attention(
    q: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    k_new: ArrayLike,
    v_new: ArrayLike,
    cache_seqlens: ArrayLike,
    *,
    cu_seqlens_k_new: ArrayLike | None = None,
    cos: ArrayLike | None = None,
    sin: ArrayLike | None = None,
    interleaved: bool = False,
    rotary_seqlens: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    chunk: int = 0,
    top_left: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    page_indptr: ArrayLike | None = None,
    cache_batch_idx: ArrayLike | None = None,
    leftpad_k: ArrayLike | None = None,
    tree_mask: ArrayLike | None = None,
    prefix_groups: ArrayLike | None = None,
    prefix_lens: ArrayLike | None = None,
    invariant: bool = False,
    fast_codes: bool = False,
    max_workspace: int = 0,
    return_lse: bool,
) -> tuple[Array, ...]: ...
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any: ...
