"""The calls that compute: attention, its gradients, its scores, append and merge."""

import numpy as np

from fulgur import _arguments as _a
from fulgur import _expressions as _e
from fulgur import _fulgur
from fulgur._spec import OPTIONAL, check, described


@described("attention")
def attention(q, k, v, **given):
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Scores are ``scale * q k^T``, then ``softcap * tanh(scores / softcap)``, then the ALiBi bias
    ``-slope * |i + sk - sq - j|``, then the mask, softmax, dropout. Masks are aligned bottom-right.
    A row that sees no key has out 0 and lse -inf, with a sink that of the sink.

    Args:
        {arguments}

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
    check("attention", given)
    options, random = _a.of_rotated_keys(_a.options(given), q, k=k, v=v), _a.random_numbers(given)
    return_lse, stream = _a.return_lse(given), _a.run_stream(q, given)
    mods, tensors = _e.of_call(given, stream)
    views = _a.with_given(_a.views(stream, q=q, k=k, v=v), stream, OPTIONAL["forward"], given) | tensors
    results = _a.forward_results(views["q"], views["v"], return_lse)
    arrays = _a.filled(
        results, given, q,
        lambda written: _fulgur.forward(views | written, options | mods, stream, *random),
        stream,
    )  # fmt: skip
    return arrays if return_lse else arrays[0]


@described("attention_backward")
def attention_backward(dout, q, k, v, out, lse, **given):
    """The gradients of attention to q, k and v, to the sinks, if there are any, and to the bias.

    Args:
        {arguments}

    Returns:
        (dq, dk, dv), after them dsinks with sinks, then dbias where it is given; each fresh or the
        very one given. With dtensors a dict of these is the last one.

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
    check("attention_backward", given)
    options, random, stream = _a.options(given), _a.random_numbers(given), _a.run_stream(q, given)
    mods, tensors = _e.of_call(given, stream)
    return gradients(
        lambda views: _fulgur.backward(views, options | mods, stream, *random),
        dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse), tensors, given, stream,
    )  # fmt: skip


def gradients(compute, arrays, tensors, given, stream):
    """The results of a backward pass that `compute` makes of all views by name; `tensors`: those of its expressions."""
    views = _a.views(stream, **arrays) | _a.given_views(stream, OPTIONAL["backward"], given) | tensors
    of_tensors = _e.Gradients(given, views)
    results = _a.backward_results(views, given) | of_tensors.results
    return of_tensors.split(
        _a.filled(
            results, given | of_tensors.arrays, arrays["q"],
            lambda written: compute(views | of_tensors.views(written)),
            stream,
        )
    )  # fmt: skip


STAGES = ("scaled", "softcap", "masked", "probabilities")


@described("scores")
def scores(q, k, **given):
    """The scores of attention, or its probabilities: what :func:`attention` makes and never keeps.

    To look at, to align words by, for interfaces that return them. Computed a row at a time, on the CPU in double
    precision, on a GPU in float32: it needs no memory but for its result, and is no fast path.

    Args:
        {arguments}

    Returns:
        A fresh array, float32 (float64 where q is), ``(batch, hq, sq, sk)``, or with ``rows`` of so many queries.
        Packed sequences and caches have the sq and the sk of the longest one. Queries and keys count from the
        first one of their sequence that exists; scores of others are -inf and their probabilities 0.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: the arrays are of float64 on a GPU.

    >>> import numpy as np, fulgur
    >>> q = k = np.zeros((1, 3, 1, 4), np.float32)
    >>> fulgur.scores(q, k, stage="probabilities", causal=True)[0, 0].round(2)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.33, 0.33, 0.33]], dtype=float32)
    >>> fulgur.scores(q, k, stage="masked", causal=True, rows=[1])[0, 0]
    array([[  0.,   0., -inf]], dtype=float32)
    """
    check("scores", given)
    stage, rows = given.get("stage"), given.get("rows")
    if stage not in STAGES:
        raise ValueError(f"stage: got {stage!r}, want one of {', '.join(STAGES)}")
    options, stream = _a.options(given), _a.run_stream(q, given)
    mods, bound = _e.of_call(given, stream)
    options |= mods
    tensors = [name for name in OPTIONAL["scores"] if name != "rows"]
    views = _a.views(stream, q=q, k=k) | _a.given_views(stream, tensors, given) | bound
    batch, heads, sq, sk = _fulgur.scores_shape(views, options)
    if rows is not None:
        chosen = _chosen(rows, sq)
        views["rows"], sq = _a.view("rows", chosen), len(chosen)
    (result,) = _a.filled(
        {"scores": ((batch, heads, sq, sk), _a.lse_dtype(views["q"].dtype))}, {}, q,
        lambda written: _fulgur.scores(views | written, options, STAGES.index(stage), stream),
        stream,
    )  # fmt: skip
    return result


def _chosen(rows, sq):
    """The numbers of those of `sq` queries that `rows` are."""
    try:
        chosen = np.arange(sq)[rows if isinstance(rows, slice) else np.asarray(rows)]
    except IndexError as error:
        raise ValueError(f"rows: {error}; want numbers of queries, or a slice") from None
    if chosen.ndim != 1:
        raise ValueError(f"rows: got {chosen.ndim} dimensions, want 1")
    return np.ascontiguousarray(chosen)


@described("append")
def append(k_cache, v_cache, k_new, v_new, cache_seqlens, **given):
    """Writes new keys and values into caches, in place.

    Token i of sequence b goes to row ``cache_seqlens[b] + i`` of its cache. The call of
    :func:`attention` that follows takes ``cache_seqlens`` plus the new rows as ``seqused_k``, and
    reads what was stored, after rounding.

    Args:
        {arguments}

    Returns:
        The rotated queries, fresh or the very ``q_out`` given; None without q. Packed rows after
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
    check("append", given)
    options = _a.of_rotated_keys(_a.options(given), k_cache=k_cache, v_cache=v_cache)
    interleaved = _a.interleaved(given)
    q, stream = given.get("q"), _a.run_stream(k_cache, given)
    rows = dict(k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens)
    views = _append_views(stream, k_cache, v_cache, rows, OPTIONAL["append"], given)
    if q is None:
        if given.get("q_out") is not None:
            views["q_out"] = _a.view("q_out", given["q_out"], True, stream)
        _fulgur.append(views, options, interleaved, stream)
        return None
    (rotated,) = _a.filled(
        {"q_out": (views["q"].shape, views["q"].dtype)}, given, q,
        lambda written: _fulgur.append(views | written, options, interleaved, stream),
        stream,
    )  # fmt: skip
    return rotated


@described("append_attention")
def append_attention(q, k_cache, v_cache, k_new, v_new, cache_seqlens, **given):
    """:func:`append` and the :func:`attention` that follows, in one call: its bits are those of both.

    Sequence b attends its ``cache_seqlens[b]`` rows and the new ones. With cos and sin the queries
    are rotated, too, and q keeps its values. On a GPU the kernel that attends appends few new rows
    itself, and lengths may change from replay to replay of a graph.

    Args:
        {arguments}

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
    check("append_attention", given)
    options = _a.of_rotated_keys(_a.options(given), q, k_cache=k_cache, v_cache=v_cache)
    interleaved = _a.interleaved(given)
    return_lse, stream = _a.return_lse(given), _a.run_stream(q, given)
    if q is None:
        raise TypeError("q: got None, want an array")
    rows = dict(q=q, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens)
    optional = OPTIONAL["append"] + OPTIONAL["forward"]
    mods, tensors = _e.of_call(given, stream)
    options |= mods
    views = _append_views(stream, k_cache, v_cache, rows, optional, given) | tensors
    results = _a.forward_results(views["q"], views["v_cache"], return_lse)
    arrays = _a.filled(
        results, given, q,
        lambda written: _fulgur.append_forward(views | written, options, interleaved, stream),
        stream,
    )  # fmt: skip
    return arrays if return_lse else arrays[0]


def _append_views(stream, k_cache, v_cache, rows, optional, given):
    """Views of what a call takes that appends, by name."""
    return {
        **_a.written("k_cache", k_cache, stream),
        **_a.written("v_cache", v_cache, stream),
        **_a.views(stream, **rows),
        **_a.given_views(stream, optional, given),
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
    stream = _a.run_stream(outs[0], {"stream": stream})
    out_views = [_a.view(f"outs[{i}]", out, stream=stream) for i, out in enumerate(outs)]
    lse_views = [_a.view(f"lses[{i}]", lse, stream=stream) for i, lse in enumerate(lses)]
    first = {"out": out_views[0], "lse": lse_views[0]}
    return _a.filled(
        {name: (view.shape, view.dtype) for name, view in first.items()}, {}, outs[0],
        lambda views: _fulgur.merge(out_views, lse_views, views["out"], views["lse"], stream),
        stream,
    )
