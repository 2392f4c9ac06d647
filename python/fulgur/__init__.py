"""Exact attention on NumPy arrays and on anything with ``__dlpack__``.

Tensors are ``(batch, seqlen, heads, dim)``, or packed ``(total, heads, dim)`` with ``cu_seqlens_q``
and ``cu_seqlens_k``: float32, bfloat16, float16 or float64, any strides whose last one is 1. They
are read where they are, never copied. Results are fresh arrays of the kind of the first tensor:
NumPy gives NumPy, torch gives torch, another array library gets its own arrays (through its
``__array_namespace__``), and a bare DLPack object gets NumPy. NumPy's bfloat16 is that of
``ml_dtypes``. The GIL is released while computing.

A call is computed where its arrays lie. On a CUDA device it is put on a stream and returns: on
``stream``, a handle or an object with ``__cuda_stream__``, or else on the stream that the library
of the first array works on now (PyTorch, CuPy), or on the default one. Gradients are not recorded;
:mod:`fulgur.torch` does that.

The first call of a shape plans: it checks, chooses the engine and its tiles. Later calls of that
shape find its plan; :func:`plan` gives it to you.

A wrong argument is a ``ValueError``, a wrong kind of argument a ``TypeError``; both name the
argument, what it got and what it wants. Where an engine fails it is a ``fulgur.Error``.
"""

import json
import os
from types import GenericAlias
from typing import NamedTuple

from fulgur import _arguments as _a
from fulgur import _fulgur
from fulgur._fulgur import Error, __version__

__all__ = [
    "BackwardPlan",
    "Engine",
    "Error",
    "Plan",
    "WorkspaceNeed",
    "__version__",
    "append",
    "append_attention",
    "attention",
    "attention_backward",
    "engines",
    "explain",
    "install_as",
    "merge",
    "plan",
    "plan_backward",
]


class Engine(NamedTuple):
    """An engine; ``unavailable`` says why it cannot be used here, empty where it can."""

    name: str
    description: str
    unavailable: str


class WorkspaceNeed(NamedTuple):
    """What a run needs besides its arrays: at least ``bytes``, the first at a multiple of
    ``alignment``; ``zeroed_bytes`` at the beginning are 0 before the first run, and every run leaves
    them 0."""

    bytes: int
    alignment: int
    zeroed_bytes: int


def attention(
    q, k, v, *, causal=False, window=None, chunk=0, scale=None, softcap=0.0, alibi_slopes=None,
    sinks=None, dropout_p=0.0, seed=0, offset=0, rng_state=None, cu_seqlens_q=None,
    cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, seqused_q=None, seqused_k=None,
    page_table=None, page_indptr=None, cache_batch_idx=None, leftpad_k=None, tree_mask=None,
    prefix_groups=None, prefix_lens=None, deterministic=False, invariant=False, max_workspace=0,
    threads=0, engine="", return_lse=False, out=None, stream=None,
):  # fmt: skip
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Scores are ``scale * q k^T``, then ``softcap * tanh(scores / softcap)``, then the ALiBi bias
    ``-slope * |i + sk - sq - j|``, then the mask, softmax, dropout. Masks are aligned bottom-right.
    A row that sees no key has out 0 and lse -inf, with a sink that of the sink.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``; 1 <= d <= 512.
        k: ``(batch, sk, hk, d)`` or ``(total_k, hk, d)``, dtype of q; hq is a multiple of hk.
        v: ``(batch, sk, hk, dv)`` or ``(total_k, hk, dv)``, dtype of q; 1 <= dv <= 512.
        causal: query i of sq sees keys up to i + sk - sq.
        window: ``(left, right)``: keys from i + sk - sq - left to i + sk - sq + right, -1 is
            unbounded. With ``causal`` both hold.
        chunk: of these keys j, those with j // chunk == (i + sk - sq) // chunk; 0 is off (the local
            layers of Llama 4).
        scale: of the scores; default 1 / sqrt(d).
        softcap: 0 is off.
        alibi_slopes: float32 ``(hq,)`` or ``(batch, hq)``.
        sinks: float32 ``(hq,)``: a score of each head that joins the softmax of every row, without
            a value: lse is log(exp(sink) + sum of exp(scores)). Not scaled, capped or masked; -inf
            is none (attention sinks, as gpt-oss learns them; StreamingLLM, arXiv 2309.17453).
        dropout_p: 0 <= p < 1; what is kept depends on (seed, offset, batch, head, query, key) only.
        seed, offset: of the dropout, 0 to 2^64 - 1.
        rng_state: int64 ``(2,)``: seed and offset as an array, read when the call computes; instead
            of both numbers.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``: sequence b is the packed rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``, rows around these are padding. Both or
            none, or ``cu_seqlens_q`` alone with a cache, whose k and v have four dimensions.
        max_seqlen_q, max_seqlen_k: the longest packed sequences; 0 reads them from cu_seqlens.
            With a page_table max_seqlen_k bounds seqused_k; 0 is what the table has room for.
        seqused_q: int32 ``(batch,)``: only the first ``seqused_q[b]`` queries of sequence b exist:
            the rows after are padding, with out 0, lse -inf and gradients 0.
        seqused_k: int32 ``(batch,)``: only the first ``seqused_k[b]`` keys of sequence b exist.
            With arrays on a GPU lengths (leftpad_k, prefix_groups and prefix_lens, too),
            alibi_slopes and sinks may lie on the CPU.
        page_table: int32 ``(batch, max_pages)``: k is ``(pages, page, hk, d)``, v ``(pages, page,
            hk, dv)``, and key j of sequence b is row ``j % page`` of page ``page_table[b, j //
            page]``. seqused_k must be given.
        page_indptr: int32 ``(batch + 1,)``: page_table is ``(ids,)``, and the pages of sequence b
            are ``page_table[page_indptr[b]:page_indptr[b + 1]]``.
        cache_batch_idx: int32 ``(batch,)``: sequence b is row ``cache_batch_idx[b]`` of k and v.
        leftpad_k: int32 ``(batch,)``: the first ``leftpad_k[b]`` keys of sequence b do not exist.
        tree_mask: int64 ``(batch, sq)`` or packed ``(total_q,)``, sq <= 64: a word of bits for each
            query. The last sq keys of a sequence are the tokens of its queries, and bit j says
            whether a query sees the jth of them, where the mask shows it, too (drafts of
            speculative decoding). Earlier keys are as without it. It has no gradient.
        prefix_groups, prefix_lens: int32 ``(groups + 1,)`` and ``(groups,)``, with a page_table:
            sequences ``prefix_groups[g]`` to ``prefix_groups[g + 1] - 1`` have the same first
            ``prefix_lens[g]`` keys and values, all of them in front of the queries' own, which are
            read once, through the pages of the first sequence, where that pays. Both or none.
        deterministic: the backward pass gives the same bits in every run.
        invariant: a sequence's bits do not depend on its batch or on ``threads``.
        max_workspace: the most bytes that the call may want besides its arrays; 0 is any number.
            Gradients on a GPU then take a slower form that fits; where none does, ValueError says
            the least.
        threads: 0 is OMP_NUM_THREADS or all cores.
        engine: "" picks; "cpu", "cuda" or "reference" (``fulgur.engines()``).
        return_lse: return ``(out, lse)``.
        out: where to write, ``(batch, sq, hq, dv)`` or ``(total_q, hq, dv)``, dtype of q.
        stream: on CUDA, where to put the work; default the current stream of q's library.

    Returns:
        out, fresh or the very ``out`` given; with ``return_lse`` also lse: float32 (float64 where q
        is), ``(batch, hq, sq)`` or packed ``(hq, total_q)``, natural log.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was written.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> q = k = np.zeros((1, 2, 4, 16), np.float32)
    >>> v = np.arange(1 * 2 * 4 * 1, dtype=np.float32).reshape(1, 2, 4, 1)
    >>> out, lse = fulgur.attention(q, k, v, causal=True, return_lse=True)
    >>> out[0, :, 0, 0]  # the first query sees the first key, the second one averages both
    array([0., 2.], dtype=float32)
    >>> np.exp(lse[0, 0]).round(3)
    array([1., 2.], dtype=float32)
    """
    options = _a.options(
        causal, window, chunk, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic,
        invariant, threads, engine, max_workspace,
    )  # fmt: skip
    random = _a.random_numbers(seed, offset)
    return_lse, stream = _a.flag("return_lse", return_lse), _a.run_stream(q, stream)
    views = _a.views(stream, q=q, k=k, v=v) | _a.extras(
        stream, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, rng_state,
        page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask, prefix_groups, prefix_lens,
    )  # fmt: skip
    results = _a.forward_results(views["q"], views["v"])
    if not return_lse:
        del results["lse"]
    arrays = _a.filled(
        results, {"out": out, "lse": None}, q,
        lambda written: _fulgur.forward(views | written, options, stream, *random),
        stream,
    )  # fmt: skip
    return arrays if return_lse else arrays[0]


def attention_backward(
    dout, q, k, v, out, lse, *, causal=False, window=None, chunk=0, scale=None, softcap=0.0,
    alibi_slopes=None, sinks=None, dropout_p=0.0, seed=0, offset=0, rng_state=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, seqused_q=None,
    seqused_k=None, deterministic=False, invariant=False, max_workspace=0, threads=0, engine="",
    dlse=None, dq=None, dk=None, dv=None, dsinks=None, stream=None,
):  # fmt: skip
    """The gradients of attention to q, k and v, and to the sinks, if there are any.

    Args:
        dout: the gradient of out, shape and dtype of out.
        q, k, v: as given to :func:`attention`.
        out, lse: as :func:`attention` returned them with ``return_lse=True``.
        causal, ..., engine: as given to :func:`attention`.
        dlse: the gradient of lse, shape and dtype of lse; default 0.
        dq, dk, dv: where to write, with the shapes and the dtype of q, k and v.
        dsinks: where to write, float32 ``(hq,)``; with sinks alone.
        stream: as for :func:`attention`.

    Returns:
        (dq, dk, dv), with sinks (dq, dk, dv, dsinks), each fresh or the very one given.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> q = k = np.zeros((1, 2, 1, 8), np.float32)
    >>> v = np.array([1, 3], np.float32).reshape(1, 2, 1, 1)
    >>> out, lse = fulgur.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = fulgur.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True)
    >>> dv.ravel()  # the first key counts in both rows
    array([1.5, 0.5], dtype=float32)
    """
    options = _a.options(
        causal, window, chunk, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic,
        invariant, threads, engine, max_workspace,
    )  # fmt: skip
    random, stream = _a.random_numbers(seed, offset), _a.run_stream(q, stream)
    extras = _a.extras(
        stream, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, rng_state,
    )  # fmt: skip
    return _backward(
        lambda views: _fulgur.backward(views, options, stream, *random),
        dout, q, k, v, out, lse, dlse, dq, dk, dv, dsinks, extras, stream,
    )  # fmt: skip


def plan(
    q, k, v, *, dtype="f32", device="cpu", causal=False, window=None, chunk=0, scale=None,
    softcap=0.0, alibi_slopes=None, sinks=None, dropout_p=0.0, rng_state=None, cu_seqlens_q=None,
    cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, seqused_q=None, seqused_k=None,
    page_table=None, page_indptr=None, cache_batch_idx=None, leftpad_k=None, tree_mask=None,
    prefix_groups=None, prefix_lens=None, deterministic=False, invariant=False, max_workspace=0,
    threads=0, engine="", return_lse=False, out=None,
):  # fmt: skip
    """Every decision about one shape of :func:`attention`, made once, to be run many times.

    Args:
        q, k, v: arrays as for :func:`attention`, or only their shapes; nothing is computed. Their
            shapes, strides and dtypes are what is planned for.
        dtype: where shapes are given: "f32", "bf16", "f16" or "f64".
        device: where shapes are given: "cpu", "cuda" or "cuda:0".
        causal, ..., engine: as for :func:`attention`.
        alibi_slopes, sinks, seqused_q, seqused_k, rng_state: given if runs will give them; the
            values may change.
        page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask, prefix_groups, prefix_lens:
            likewise.
        cu_seqlens_q, cu_seqlens_k: given if runs will give them; the values may change, up to the
            longest sequence of these or to ``max_seqlen_q`` and ``max_seqlen_k``.
        return_lse: runs return ``(out, lse)``.
        out: given if runs will give one with other strides than a fresh array has.

    Returns:
        A :class:`Plan`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> rows, kv = (6, 2, 8), np.ones((10, 2, 8), np.float32)
    >>> lengths = [np.array(x, np.int32) for x in ([0, 2, 6], [0, 5, 10])]
    >>> plan = fulgur.plan(rows, kv, kv, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
    >>> q = np.ones(rows, np.float32)
    >>> for ends in ([0, 2, 6], [0, 4, 5]):  # other lengths under one plan
    ...     lengths[0][:] = ends
    ...     out = plan.run(q, kv, kv, cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
    >>> out[:, 0, 0]  # the last row is padding
    array([1., 1., 1., 1., 1., 0.], dtype=float32)
    """
    options = _a.options(
        causal, window, chunk, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic,
        invariant, threads, engine, max_workspace,
    )  # fmt: skip
    return_lse = _a.flag("return_lse", return_lse)
    views = _a.planned_views(dtype, device, q=q, k=k, v=v)
    views |= _a.extras(
        0, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, rng_state,
        page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask, prefix_groups, prefix_lens,
    )  # fmt: skip
    results = _a.forward_results(views["q"], views["v"])
    views |= _a.planned_results(results, {"out": out, "lse": None}, views["q"].device)
    if not return_lse:
        del results["lse"], views["lse"]
    return Plan(_fulgur.plan_forward(views, options), results)


def plan_backward(
    dout, q, k, v, out, lse, *, dtype="f32", device="cpu", causal=False, window=None, chunk=0,
    scale=None, softcap=0.0, alibi_slopes=None, sinks=None, dropout_p=0.0, rng_state=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0, seqused_q=None,
    seqused_k=None, deterministic=False, invariant=False, max_workspace=0, threads=0, engine="",
    dlse=None, dq=None, dk=None, dv=None, dsinks=None,
):  # fmt: skip
    """Every decision about one shape of :func:`attention_backward`, made once.

    Args:
        dout, q, k, v, out, lse: arrays as for :func:`attention_backward`, or only their shapes;
            nothing is computed. Their shapes, strides and dtypes are what is planned for.
        dtype: where shapes are given: "f32", "bf16", "f16" or "f64"; that of lse follows.
        device: where shapes are given: "cpu", "cuda" or "cuda:0".
        causal, ..., engine: as for :func:`plan`.
        dlse: given, an array or its shape, if runs will give one.
        dq, dk, dv, dsinks: given if runs will give ones with other strides than fresh arrays have;
            dsinks with sinks alone.

    Returns:
        A :class:`BackwardPlan`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> x = np.ones((1, 4, 2, 8), np.float32)
    >>> plan = fulgur.plan(x, x, x, causal=True, return_lse=True)
    >>> backward = fulgur.plan_backward(*[x.shape] * 5, (1, 2, 4), causal=True)
    >>> out, lse = plan.run(x, x, x)
    >>> dq, dk, dv = backward.run(np.ones_like(out), x, x, x, out, lse)
    >>> dv[0, :, 0, 0].round(3)
    array([2.083, 1.083, 0.583, 0.25 ], dtype=float32)
    """
    options = _a.options(
        causal, window, chunk, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic,
        invariant, threads, engine, max_workspace,
    )  # fmt: skip
    views = _a.planned_views(dtype, device, dout=dout, q=q, k=k, v=v, out=out)
    views |= _a.planned_views(_a.lse_dtype(views["q"].dtype), device, lse=lse)
    if dlse is not None:
        views |= _a.planned_views(_a.lse_dtype(views["q"].dtype), device, dlse=dlse)
    views |= _a.extras(
        0, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, rng_state,
    )  # fmt: skip
    given = {"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}
    results = _backward_results(views, given)
    views |= _a.planned_results(results, given, views["q"].device)
    return BackwardPlan(_fulgur.plan_backward(views, options))


class _AnyPlan:
    """What the plans of both passes have."""

    __slots__ = ("_plan",)

    def __init__(self, plan):
        self._plan = plan

    def explain(self):
        """The plan in words: engine, tiles, splits, bytes, flops, what was rejected and why; on the
        CPU also how long a call is expected to take, by peaks measured when first asked for."""
        return self._plan.explain()

    def details(self):
        """The plan as a dict: what :meth:`explain` says, as data.

        Of every plan: ``engine``; ``call`` (pass, dtype, device, sizes, options); ``bytes`` and,
        where the host knows the lengths, ``flops``; ``workspace_bytes``; ``rejected``, a list of
        texts. The kernel's part is ``kernel``, its tile ``Br`` and ``Bc``, and what it decides
        besides; where prefixes are read once there are two of them, ``prefix`` and ``rest``.
        ``estimate_us`` (microseconds) and what limits it, ``bound``, where they are known.
        """
        return json.loads(self._plan.details())

    def workspace(self):
        """What a run needs besides its arrays, a :class:`WorkspaceNeed`."""
        return WorkspaceNeed(*self._plan.workspace())

    def __repr__(self):
        return f"<fulgur.{type(self).__name__}: {self.explain().splitlines()[0]}>"


class Plan(_AnyPlan):
    """Every decision about one shape of :func:`attention`; made by :func:`plan`.

    A plan holds no memory of a run. Runs of one plan may overlap in threads, as long as they do not
    write to each other's arrays.
    """

    __slots__ = ("_results",)  # (shape, dtype) of what a run returns, by name
    __class_getitem__ = classmethod(GenericAlias)  # the stubs' Plan[Literal[True]]: with return_lse

    def __init__(self, plan, results):
        super().__init__(plan)
        self._results = results

    def run(
        self, q, k, v, *, alibi_slopes=None, sinks=None, seed=0, offset=0, rng_state=None,
        cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, page_table=None,
        page_indptr=None, cache_batch_idx=None, leftpad_k=None, tree_mask=None, prefix_groups=None,
        prefix_lens=None, out=None, lse=None, workspace=None, stream=None,
    ):  # fmt: skip
        """Computes :func:`attention` of arrays of the shapes, strides and dtypes planned for.

        Args:
            q, k, v: as planned; the values may be others.
            alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as planned, each
                given if it was; the values may be others.
            page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask, prefix_groups,
                prefix_lens: likewise.
            seed, offset: of the dropout, 0 to 2^64 - 1.
            rng_state: the same as an array, given if it was planned.
            out, lse: where to write; lse only where the plan has ``return_lse``.
            workspace: a writable contiguous array as :meth:`workspace` wants it, on the device that
                computes, for one run at a time; default the library's own memory.
            stream: as for :func:`attention`.

        Returns:
            out, fresh or the very one given; ``(out, lse)`` where the plan has ``return_lse``.

        Raises:
            ValueError, TypeError: an argument is wrong or not as planned; nothing was written.
            fulgur.Error: the engine failed.
        """
        random, stream = _a.random_numbers(seed, offset), _a.run_stream(q, stream)
        views = _a.views(stream, q=q, k=k, v=v) | _a.extras(
            stream, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            rng_state, page_table, page_indptr, cache_batch_idx, leftpad_k, tree_mask,
            prefix_groups, prefix_lens,
        )  # fmt: skip
        if lse is not None and "lse" not in self._results:  # for the plan to refuse
            views["lse"] = _a.view("lse", lse, True, stream)
        arrays = _a.filled(
            self._results, {"out": out, "lse": lse}, q,
            lambda written: self._plan.run_forward(views | written, stream, *random, workspace),
            stream,
        )  # fmt: skip
        return arrays if len(arrays) > 1 else arrays[0]


class BackwardPlan(_AnyPlan):
    """Every decision about one shape of :func:`attention_backward`; made by :func:`plan_backward`.

    A plan holds no memory of a run. Runs of one plan may overlap in threads, as long as they do not
    write to each other's arrays.
    """

    __slots__ = ()

    def run(
        self, dout, q, k, v, out, lse, *, alibi_slopes=None, sinks=None, seed=0, offset=0,
        rng_state=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        dlse=None, dq=None, dk=None, dv=None, dsinks=None, workspace=None, stream=None,
    ):  # fmt: skip
        """Computes :func:`attention_backward` of arrays of the shapes, strides and dtypes planned
        for.

        Args:
            dout, q, k, v, out, lse: as planned; the values may be others.
            alibi_slopes, ..., seqused_k: as for :meth:`Plan.run`, and as they were there.
            dlse: the gradient of lse; as planned, given if it was.
            dq, dk, dv, dsinks: where to write; dsinks with sinks alone.
            workspace, stream: as for :meth:`Plan.run`.

        Returns:
            (dq, dk, dv), with sinks (dq, dk, dv, dsinks), each fresh or the very one given.

        Raises:
            ValueError, TypeError: an argument is wrong or not as planned; nothing was written.
            fulgur.Error: the engine failed.
        """
        random, stream = _a.random_numbers(seed, offset), _a.run_stream(q, stream)
        extras = _a.extras(
            stream, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            rng_state,
        )  # fmt: skip
        return _backward(
            lambda views: self._plan.run_backward(views, stream, *random, workspace),
            dout, q, k, v, out, lse, dlse, dq, dk, dv, dsinks, extras, stream,
        )  # fmt: skip


def append(
    k_cache, v_cache, k_new, v_new, cache_seqlens, *, cu_seqlens_k_new=None, page_table=None,
    page_indptr=None, cache_batch_idx=None, cos=None, sin=None, interleaved=False,
    rotary_seqlens=None, q=None, q_out=None, cu_seqlens_q=None, causal=False, window=None, chunk=0,
    threads=0, stream=None,
):  # fmt: skip
    """Writes new keys and values into caches, in place.

    Token i of sequence b goes to row ``cache_seqlens[b] + i`` of its cache. The call of
    :func:`attention` that follows takes ``cache_seqlens`` plus the new rows as ``seqused_k``, and
    reads what was stored, after rounding.

    Args:
        k_cache, v_cache: written in place: ``(batch, sk, hk, dim)`` or ``(pages, page, hk, dim)``,
            as :func:`attention` takes them. Rows that take no token keep their bits.
        k_new, v_new: ``(batch, s_new, hk, dim)``, or packed ``(total, hk, dim)`` with
            cu_seqlens_k_new; dtype of the caches.
        cache_seqlens: int32 ``(batch,)``: the old lengths, counted from the first row of each
            sequence, left padding included.
        cu_seqlens_k_new: int32 ``(batch + 1,)``: where the new rows of each sequence begin.
        page_table, page_indptr, cache_batch_idx: as for :func:`attention`. No row may take two
            tokens.
        cos, sin: ``(positions, rotary_dim / 2)``, dtype of the caches or float32: rotary position
            embedding of the first rotary_dim columns of new keys, computed in float32 (float64 for
            float64) and rounded once. Values never turn.
        interleaved: columns 2 i and 2 i + 1 are a pair, or else i and i + rotary_dim / 2.
        rotary_seqlens: int32 ``(batch,)``: the position of each sequence's first new token; default
            cache_seqlens.
        q: queries to turn with, ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)`` with
            cu_seqlens_q. As FlashAttention has it, query i turns to the position of the first new
            token + i if ``causal``, ``window`` or ``chunk`` hides keys, else all to that of the
            first.
        q_out: where the turned queries go; may be q itself.
        cu_seqlens_q: int32 ``(batch + 1,)``.
        causal, window, chunk: of the attention that follows.
        threads: 0 is OMP_NUM_THREADS or all cores.
        stream: on CUDA, where to put the work; default the current stream of k_cache's library.
            Lengths may be on the CPU, where they are checked. Those on a GPU, and tables, are not:
            tokens without a place there are not written.

    Returns:
        The turned queries, fresh or the very ``q_out`` given; None without q. Packed rows after
        the last sequence are not written.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was written.
        fulgur.Error: float64 arrays are on a GPU, or it cannot be used.

    >>> import numpy as np, fulgur
    >>> k_cache, v_cache = np.zeros((2, 3, 4, 1, 2), np.float32)  # 3 pages of 4 rows
    >>> new, lengths = np.ones((1, 2, 1, 2), np.float32), np.array([3], np.int32)
    >>> page_table = np.array([[2, 0]], np.int32)
    >>> fulgur.append(k_cache, v_cache, new, new, lengths, page_table=page_table)
    >>> k_cache[..., 0, 0]  # the last row of page 2, and the first of page 0
    array([[1., 0., 0., 0.],
           [0., 0., 0., 0.],
           [0., 0., 0., 1.]], dtype=float32)
    """
    options = _a.options(causal, window, chunk, None, 0.0, 0.0, 0, 0, False, False, threads, "")
    interleaved, stream = _a.flag("interleaved", interleaved), _a.run_stream(k_cache, stream)
    views = _append_views(
        stream, k_cache, v_cache, k_new, v_new, cache_seqlens, page_table, page_indptr,
        cache_batch_idx, cu_seqlens_k_new=cu_seqlens_k_new, cos=cos, sin=sin,
        rotary_seqlens=rotary_seqlens, q=q, cu_seqlens_q=cu_seqlens_q,
    )  # fmt: skip
    if q is None:
        if q_out is not None:
            views["q_out"] = _a.view("q_out", q_out, True, stream)
        _fulgur.append(views, options, interleaved, stream)
        return None
    (turned,) = _a.filled(
        {"q_out": (views["q"].shape, views["q"].dtype)},
        {"q_out": q_out},
        q,
        lambda written: _fulgur.append(views | written, options, interleaved, stream),
        stream,
    )
    return turned


def append_attention(
    q, k_cache, v_cache, k_new, v_new, cache_seqlens, *, cu_seqlens_k_new=None, cos=None, sin=None,
    interleaved=False, rotary_seqlens=None, causal=False, window=None, chunk=0, scale=None,
    softcap=0.0, alibi_slopes=None, sinks=None, cu_seqlens_q=None, max_seqlen_q=0, max_seqlen_k=0,
    seqused_q=None, page_table=None, page_indptr=None, cache_batch_idx=None, leftpad_k=None,
    tree_mask=None, prefix_groups=None, prefix_lens=None, invariant=False, max_workspace=0,
    threads=0, engine="", return_lse=False, out=None, stream=None,
):  # fmt: skip
    """:func:`append` and the :func:`attention` that follows, in one call: its bits are those of both.

    Sequence b attends its ``cache_seqlens[b]`` rows and the new ones. With cos and sin the queries
    turn, too, and q keeps its values. On a GPU the kernel that attends appends few new rows itself,
    and lengths may change from replay to replay of a graph.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)`` with cu_seqlens_q.
        k_cache, v_cache, k_new, v_new, cache_seqlens, ..., rotary_seqlens: as for :func:`append`.
        causal, ..., stream: as for :func:`attention`.

    Returns:
        As :func:`attention`.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was written.
        fulgur.Error: no engine computes this here.

    >>> import numpy as np, fulgur
    >>> k_cache, v_cache = np.zeros((2, 1, 4, 1, 2), np.float32)
    >>> q, lengths = np.ones((1, 1, 1, 2), np.float32), np.array([3], np.int32)
    >>> out = fulgur.append_attention(q, k_cache, v_cache, 0 * q, 8 * q, lengths, causal=True)
    >>> out.ravel(), v_cache[0, :, 0, 0]  # three values of 0, and the new one
    (array([2., 2.], dtype=float32), array([0., 0., 0., 8.], dtype=float32))
    """
    options = _a.options(
        causal, window, chunk, scale, softcap, 0.0, max_seqlen_q, max_seqlen_k, False, invariant,
        threads, engine, max_workspace,
    )  # fmt: skip
    return_lse, stream = _a.flag("return_lse", return_lse), _a.run_stream(q, stream)
    interleaved = _a.flag("interleaved", interleaved)
    views = _append_views(
        stream, k_cache, v_cache, k_new, v_new, cache_seqlens, page_table, page_indptr,
        cache_batch_idx, cu_seqlens_k_new=cu_seqlens_k_new, cos=cos, sin=sin,
        rotary_seqlens=rotary_seqlens, q=q, cu_seqlens_q=cu_seqlens_q, alibi_slopes=alibi_slopes,
        sinks=sinks, seqused_q=seqused_q, leftpad_k=leftpad_k, tree_mask=tree_mask,
        prefix_groups=prefix_groups, prefix_lens=prefix_lens,
    )  # fmt: skip
    if q is None:
        raise TypeError("q: got None, want an array")
    results = _a.forward_results(views["q"], views["v_cache"])
    if not return_lse:
        del results["lse"]
    arrays = _a.filled(
        results, {"out": out, "lse": None}, q,
        lambda written: _fulgur.append_forward(views | written, options, interleaved, stream),
        stream,
    )  # fmt: skip
    return arrays if return_lse else arrays[0]


def _append_views(
    stream, k_cache, v_cache, k_new, v_new, cache_seqlens, page_table, page_indptr, cache_batch_idx,
    **optional,
):  # fmt: skip
    """Views of what append takes, and of further arrays, by name."""
    return {
        "k_cache": _a.view("k_cache", k_cache, True, stream),
        "v_cache": _a.view("v_cache", v_cache, True, stream),
        **_a.views(stream, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens),
        **_a.given_views(
            stream, page_table=page_table, page_indptr=page_indptr, cache_batch_idx=cache_batch_idx,
            **optional,
        ),
    }


def merge(outs, lses, *, stream=None):
    """Combines attention over disjoint sets of keys into attention over all of them.

    Args:
        outs: a sequence of arrays ``(batch, sq, hq, dv)`` or packed ``(total_q, hq, dv)``.
        lses: for each the log-sum-exp ``(batch, hq, sq)`` or packed ``(hq, total_q)``.
        stream: on CUDA, where to put the work; default the current stream of the library of
            ``outs[0]``. There are at most 64 parts there, and no float64.

    Returns:
        (out, lse), fresh, with the shapes and dtypes of ``outs[0]`` and ``lses[0]``. Parts with lse
        -inf count nothing; where all are, out is 0 and lse -inf.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: a GPU does not take these arrays, or cannot be used.

    >>> import numpy as np, fulgur
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 8, 2, 4), np.float32) for _ in range(3))
    >>> halves = [fulgur.attention(q, k[:, s], v[:, s], return_lse=True)
    ...           for s in (slice(0, 4), slice(4, 8))]
    >>> out, lse = fulgur.merge(*zip(*halves))
    >>> np.allclose(out, fulgur.attention(q, k, v), atol=1e-6)
    True
    """
    outs, lses = _a.array_list("outs", outs), _a.array_list("lses", lses)
    if not outs:
        raise ValueError("outs: got no array, want at least 1")
    if len(lses) != len(outs):
        raise ValueError(f"lses: got {len(lses)} arrays, want {len(outs)}, one for each of outs")
    stream = _a.run_stream(outs[0], stream)
    out_views = [_a.view(f"outs[{i}]", out, stream=stream) for i, out in enumerate(outs)]
    lse_views = [_a.view(f"lses[{i}]", lse, stream=stream) for i, lse in enumerate(lses)]
    first = {"out": out_views[0], "lse": lse_views[0]}
    return _a.filled(
        {name: (view.shape, view.dtype) for name, view in first.items()},
        dict.fromkeys(first),
        outs[0],
        lambda views: _fulgur.merge(out_views, lse_views, views["out"], views["lse"], stream),
        stream,
    )


def explain(
    q, k, v, *, backward=False, dtype="f32", device="cpu", causal=False, window=None, chunk=0,
    scale=None, softcap=0.0, alibi_slopes=None, sinks=None, dropout_p=0.0, seed=0, offset=0,
    rng_state=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
    seqused_q=None, seqused_k=None, page_table=None, page_indptr=None, cache_batch_idx=None,
    leftpad_k=None, tree_mask=None, prefix_groups=None, prefix_lens=None, deterministic=False,
    invariant=False, max_workspace=0, threads=0, engine="",
):  # fmt: skip
    """The plan of a call in words: engine, tiles, splits, bytes, flops, what was rejected and why.

    On the CPU also how long a call of these lengths is expected to take and what binds it. The
    first such call of a process measures the peaks of the machine, in some 10 to 40 ms.

    Args:
        q, k, v: arrays as for :func:`attention`, or only their shapes; nothing is computed.
        backward: the plan of :func:`attention_backward`.
        dtype: where shapes are given: "f32", "bf16", "f16" or "f64".
        device: where shapes are given: "cpu", "cuda" or "cuda:0".
        causal, ..., engine: as for :func:`attention`. The backward pass takes neither a
            cache nor a tree_mask.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import fulgur
    >>> shape = (2, 4096, 8, 64)
    >>> "cpu" in fulgur.explain(shape, shape, shape, dtype="bf16", causal=True)
    True
    """
    options = dict(
        dtype=dtype, device=device, causal=causal, window=window, chunk=chunk, scale=scale,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p,
        rng_state=rng_state,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
        deterministic=deterministic, invariant=invariant, max_workspace=max_workspace,
        threads=threads, engine=engine,
    )  # fmt: skip
    forward = dict(
        page_table=page_table, page_indptr=page_indptr, cache_batch_idx=cache_batch_idx,
        leftpad_k=leftpad_k, tree_mask=tree_mask, prefix_groups=prefix_groups,
        prefix_lens=prefix_lens,
    )  # fmt: skip
    _a.random_numbers(seed, offset)
    if not _a.flag("backward", backward):
        return plan(q, k, v, return_lse=True, **options, **forward).explain()
    for name, array in forward.items():
        if array is not None:
            things = "tree masks" if name == "tree_mask" else "caches"
            raise ValueError(f"{name}: given with backward, want None: {things} have no gradients")
    views = _a.planned_views(dtype, device, q=q, k=k, v=v)
    (out, dtype), (lse, _) = _a.forward_results(views["q"], views["v"]).values()
    return plan_backward(out, q, k, v, out, lse, **options | {"dtype": dtype}).explain()


def engines():
    """The engines and whether each can be used on this machine.

    >>> import fulgur
    >>> "cpu" in [engine.name for engine in fulgur.engines() if not engine.unavailable]
    True
    """
    return [Engine(*engine) for engine in _fulgur.engines()]


def install_as(name):
    """Lets ``import`` find fulgur where programs look for FlashAttention, in this process.

    Args:
        name: "flash_attn" (flash-attn 2: :mod:`fulgur.flash_attn`), "flash_attn_interface"
            (FlashAttention-3: :mod:`fulgur.flash_attn_interface`) or "flash_attn.cute"
            (FlashAttention-4: :mod:`fulgur.flash_attn_cute`).

    Returns:
        A function of no arguments that takes it back. Calls may be nested: the name is fulgur's until
        each of them is taken back, in any order; taking one back twice changes nothing.

    Raises:
        ValueError: another name.
        RuntimeError: a module of that name is imported already.

    >>> import fulgur
    >>> undo = fulgur.install_as("flash_attn")
    >>> import flash_attn
    >>> flash_attn.flash_attn_func.__module__
    'fulgur.flash_attn.flash_attn_interface'
    >>> undo()
    """
    from fulgur import _drop_in  # which imports PyTorch

    return _drop_in.install_as(name)


def _backward(compute, dout, q, k, v, out, lse, dlse, dq, dk, dv, dsinks, extras, stream):
    """The results of ``compute``, which takes all views by name."""
    views = _a.views(stream, dout=dout, q=q, k=k, v=v, out=out, lse=lse) | extras
    if dlse is not None:
        views["dlse"] = _a.view("dlse", dlse, stream=stream)
    given = {"dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks}
    results = _backward_results(views, given)
    return _a.filled(results, given, q, lambda written: compute(views | written), stream)


def _backward_results(views, given):
    """(shape, dtype) of every gradient by name."""
    sinks = views.get("sinks")
    if sinks is None and given["dsinks"] is not None:
        raise ValueError("dsinks: given without sinks")
    return _a.backward_results(views["q"], views["k"], views["v"], sinks)


# A forked child has none of its parent's OpenMP threads and would wait for them forever; without
# any, the parent and the child each start their own in the next call.
os.register_at_fork(before=_fulgur.stop_threads)
