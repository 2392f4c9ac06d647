"""Exact attention on NumPy arrays and on anything with ``__dlpack__``.

Tensors are ``(batch, seqlen, heads, dim)``, or packed ``(total, heads, dim)`` with ``cu_seqlens_q``
and ``cu_seqlens_k``: float32, bfloat16, float16 or float64, any strides whose last one is 1. They
are read where they are, never copied. Results are fresh arrays of the kind of the first tensor:
NumPy gives NumPy, torch gives torch, another array library gets its own arrays (through its
``__array_namespace__``), and a bare DLPack object gets NumPy. NumPy's bfloat16 is that of
``ml_dtypes``. The GIL is released while computing.

A wrong argument is a ``ValueError``, a wrong kind of argument a ``TypeError``; both name the
argument, what it got and what it wants. Where an engine fails it is a ``fulgur.Error``.
"""

import numbers
import operator
import os
import sys
from typing import NamedTuple

import numpy as np

from fulgur import _fulgur
from fulgur._fulgur import Error, __version__

__all__ = [
    "Engine",
    "Error",
    "__version__",
    "attention",
    "attention_backward",
    "engines",
    "explain",
    "merge",
]


class Engine(NamedTuple):
    """An engine; ``unavailable`` says why it cannot be used here, empty where it can."""

    name: str
    description: str
    unavailable: str


def attention(
    q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, alibi_slopes=None,
    dropout_p=0.0, seed=0, offset=0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0,
    max_seqlen_k=0, seqused_k=None, deterministic=False, invariant=False, threads=0, engine="",
    return_lse=False, out=None,
):  # fmt: skip
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Scores are ``scale * q k^T``, then ``softcap * tanh(scores / softcap)``, then the ALiBi bias
    ``-slope * |i + sk - sq - j|``, then the mask, softmax, dropout. Masks are aligned bottom-right.
    A row that sees no key has out 0 and lse -inf.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``; 1 <= d <= 512.
        k: ``(batch, sk, hk, d)`` or ``(total_k, hk, d)``, dtype of q; hq is a multiple of hk.
        v: ``(batch, sk, hk, dv)`` or ``(total_k, hk, dv)``, dtype of q; 1 <= dv <= 512.
        causal: query i of sq sees keys up to i + sk - sq.
        window: ``(left, right)``: keys from i + sk - sq - left to i + sk - sq + right, -1 is
            unbounded. With ``causal`` both hold.
        scale: of the scores; default 1 / sqrt(d).
        softcap: 0 is off.
        alibi_slopes: float32 ``(hq,)`` or ``(batch, hq)``.
        dropout_p: 0 <= p < 1; what is kept depends on (seed, offset, batch, head, query, key) only.
        seed, offset: of the dropout, 0 to 2^64 - 1.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``: sequence b is the packed rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. Both or none.
        max_seqlen_q, max_seqlen_k: the longest packed sequences; 0 reads them from cu_seqlens.
        seqused_k: int32 ``(batch,)``: only the first ``seqused_k[b]`` keys of sequence b exist.
        deterministic: the backward pass gives the same bits in every run.
        invariant: a sequence's bits do not depend on its batch or on ``threads``.
        threads: 0 is OMP_NUM_THREADS or all cores.
        engine: "" picks; "cpu", "cuda" or "reference" (``fulgur.engines()``).
        return_lse: return ``(out, lse)``.
        out: where to write, ``(batch, sq, hq, dv)`` or ``(total_q, hq, dv)``, dtype of q.

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
    options = _options(
        causal, window, scale, softcap, alibi_slopes, dropout_p, seed, offset, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, deterministic, invariant, threads,
        engine,
    )  # fmt: skip
    return_lse = _flag("return_lse", return_lse)
    inputs = _view("q", q), _view("k", k), _view("v", v)
    out_view, lse_view = _planned_results(*inputs)
    if out is not None:
        out_view = _view("out", out, writable=True)
    plan = _fulgur.plan(options, *inputs, out_view, lse_view if return_lse else None)

    result, lse = out, None
    if out is None:
        result, out_view = _empty("out", out_view, q)
    if return_lse:
        lse, lse_view = _empty("lse", lse_view, q)
    plan.run(*inputs, out_view, lse_view if return_lse else None)
    if out is None:
        result = _of_kind(q, result)
    return (result, _of_kind(q, lse)) if return_lse else result


def attention_backward(
    dout, q, k, v, out, lse, *, causal=False, window=None, scale=None, softcap=0.0,
    alibi_slopes=None, dropout_p=0.0, seed=0, offset=0, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=0, max_seqlen_k=0, seqused_k=None, deterministic=False, invariant=False,
    threads=0, engine="",
):  # fmt: skip
    """The gradients of attention to q, k and v.

    Args:
        dout: the gradient of out, shape and dtype of out.
        q, k, v: as given to :func:`attention`.
        out, lse: as :func:`attention` returned them with ``return_lse=True``.
        causal, ..., engine: as given to :func:`attention`.

    Returns:
        (dq, dk, dv), fresh, with the shapes and the dtype of q, k and v.

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
    options = _options(
        causal, window, scale, softcap, alibi_slopes, dropout_p, seed, offset, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, deterministic, invariant, threads,
        engine,
    )  # fmt: skip
    inputs = [
        _view(name, array)
        for name, array in zip(("dout", *_QKV, "out", "lse"), (dout, q, k, v, out, lse))
    ]
    gradients = _planned_gradients(*inputs[1:4])
    plan = _fulgur.plan(options, *inputs, *gradients)
    arrays, views = zip(*(_empty("d" + n, g, q) for n, g in zip(_QKV, gradients)))
    plan.run(*inputs, *views)
    return tuple(_of_kind(q, array) for array in arrays)


def merge(outs, lses):
    """Combines attention over disjoint sets of keys into attention over all of them.

    Args:
        outs: a sequence of arrays ``(batch, sq, hq, dv)`` or packed ``(total_q, hq, dv)``.
        lses: for each the log-sum-exp ``(batch, hq, sq)`` or packed ``(hq, total_q)``.

    Returns:
        (out, lse), fresh, with the shapes and dtypes of ``outs[0]`` and ``lses[0]``. Parts with lse
        -inf count nothing; where all are, out is 0 and lse -inf.

    Raises:
        ValueError, TypeError: an argument is wrong.

    >>> import numpy as np, fulgur
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 8, 2, 4), np.float32) for _ in range(3))
    >>> halves = [fulgur.attention(q, k[:, s], v[:, s], return_lse=True)
    ...           for s in (slice(0, 4), slice(4, 8))]
    >>> out, lse = fulgur.merge(*zip(*halves))
    >>> np.allclose(out, fulgur.attention(q, k, v), atol=1e-6)
    True
    """
    outs, lses = _list("outs", outs), _list("lses", lses)
    if not outs:
        raise ValueError("outs: got no array, want at least 1")
    if len(lses) != len(outs):
        raise ValueError(f"lses: got {len(lses)} arrays, want {len(outs)}, one for each of outs")
    out_views = [_view(f"outs[{i}]", out) for i, out in enumerate(outs)]
    lse_views = [_view(f"lses[{i}]", lse) for i, lse in enumerate(lses)]
    out, out_view = _empty("out", out_views[0], outs[0])
    lse, lse_view = _empty("lse", lse_views[0], outs[0])
    _fulgur.merge(out_views, lse_views, out_view, lse_view)
    return _of_kind(outs[0], out), _of_kind(outs[0], lse)


def explain(
    q, k, v, *, backward=False, dtype="f32", causal=False, window=None, scale=None, softcap=0.0,
    alibi_slopes=None, dropout_p=0.0, seed=0, offset=0, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=0, max_seqlen_k=0, seqused_k=None, deterministic=False, invariant=False,
    threads=0, engine="",
):  # fmt: skip
    """The plan of a call in words: engine, tiles, splits, bytes, flops, what was rejected and why.

    Args:
        q, k, v: arrays as for :func:`attention`, or only their shapes; nothing is computed.
        backward: the plan of :func:`attention_backward`.
        dtype: where shapes are given: "f32", "bf16", "f16" or "f64".
        causal, ..., engine: as for :func:`attention`.

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import fulgur
    >>> shape = (2, 4096, 8, 64)
    >>> "cpu" in fulgur.explain(shape, shape, shape, dtype="bf16", causal=True)
    True
    """
    options = _options(
        causal, window, scale, softcap, alibi_slopes, dropout_p, seed, offset, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, deterministic, invariant, threads,
        engine,
    )  # fmt: skip
    inputs = [
        (
            _fulgur.planned(name, [_integer(name, n, *_INT64) for n in given], dtype)
            if isinstance(given, (tuple, list))
            else _view(name, given)
        )
        for name, given in zip(_QKV, (q, k, v))
    ]
    out, lse = _planned_results(*inputs)
    if _flag("backward", backward):
        plan = _fulgur.plan(options, out, *inputs, out, lse, *_planned_gradients(*inputs))
    else:
        plan = _fulgur.plan(options, *inputs, out, lse)
    return plan.explain()


def engines():
    """The engines and whether each can be used on this machine.

    >>> import fulgur
    >>> "cpu" in [engine.name for engine in fulgur.engines() if not engine.unavailable]
    True
    """
    return [Engine(*engine) for engine in _fulgur.engines()]


_QKV = ("q", "k", "v")
_INT32, _INT64, _UINT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1), (0, 2**64 - 1)
_DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",  # of wrong parts of a merge, for the library to refuse
}


def _options(
    causal, window, scale, softcap, alibi_slopes, dropout_p, seed, offset, cu_seqlens_q,
    cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, deterministic, invariant, threads, engine,
):  # fmt: skip
    """The options as _fulgur.plan reads them: right types, integers in range, tensors as views."""
    if window is None:
        window = (-1, -1)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: got {window!r}, want None or (left, right)")
    left, right = (_integer("window", side, -1, _INT64[1]) for side in window)
    if _flag("causal", causal):
        right = 0
    if not isinstance(engine, str):
        raise TypeError(f"engine: got {type(engine).__name__}, want a string")
    return {
        "left": left,
        "right": right,
        "scale": None if scale is None else _real("scale", scale),
        "softcap": _real("softcap", softcap),
        "alibi_slopes": _optional_view("alibi_slopes", alibi_slopes),
        "dropout_p": _real("dropout_p", dropout_p),
        "seed": _integer("seed", seed, *_UINT64),
        "offset": _integer("offset", offset, *_UINT64),
        "cu_seqlens_q": _optional_view("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": _optional_view("cu_seqlens_k", cu_seqlens_k),
        "max_seqlen_q": _integer("max_seqlen_q", max_seqlen_q, *_INT64),
        "max_seqlen_k": _integer("max_seqlen_k", max_seqlen_k, *_INT64),
        "seqused_k": _optional_view("seqused_k", seqused_k),
        "deterministic": _flag("deterministic", deterministic),
        "invariant": _flag("invariant", invariant),
        "threads": _integer("threads", threads, *_INT32),
        "engine": engine,
    }


def _flag(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {value!r}, want True or False")
    return bool(value)


def _real(name, value):
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {value!r}, want a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: got {value}, want a finite number") from None


def _integer(name, value, low, high):
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, want an integer") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, want {low} to {high}")
    return value


def _list(name, arrays):
    try:
        return list(arrays)
    except TypeError:
        raise TypeError(f"{name}: got {type(arrays).__name__}, want a sequence of arrays") from None


def _is_torch(array):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _view(name, array, writable=False):
    """A view of the array's memory for _fulgur."""
    if _is_torch(array) and array.requires_grad:
        raise ValueError(f"{name}: requires grad, which is not recorded here; want {name}.detach()")
    bf16 = isinstance(array, np.ndarray) and array.dtype.name == "bfloat16"
    return _fulgur.view(name, array.view(np.int16) if bf16 else array, writable, bf16)


def _optional_view(name, array):
    return None if array is None else _view(name, array)


def _planned_results(q, k, v):
    """Views without memory of out and lse."""
    out = q.shape[:-1] + v.shape[-1:]
    lse = (*out[:-3], out[-2], out[-3]) if len(out) >= 3 else out
    return (
        _fulgur.planned("out", out, q.dtype, q),
        _fulgur.planned("lse", lse, "f64" if q.dtype == "f64" else "f32", q),
    )


def _planned_gradients(*inputs):
    """Views without memory of dq, dk and dv."""
    return [_fulgur.planned("d" + n, x.shape, x.dtype, x) for n, x in zip(_QKV, inputs)]


def _empty(name, planned, like):
    """Fresh memory for what was planned, in a torch tensor if `like` is one, else in NumPy."""
    dtype = _DTYPES[planned.dtype]
    if _is_torch(like):
        array = like.new_empty(planned.shape, dtype=getattr(sys.modules["torch"], dtype))
    else:
        if dtype == "bfloat16":
            from ml_dtypes import bfloat16 as dtype
        array = np.empty(planned.shape, dtype)
    return array, _fulgur.placed(planned, _view(name, array, writable=True))


def _of_kind(like, array):
    """The result in the array library of `like`, if it is one."""
    namespace = getattr(like, "__array_namespace__", None)
    return array if namespace is None else namespace().asarray(array)


# A forked child has none of its parent's OpenMP threads and would wait for them forever; without
# any, the parent and the child each start their own in the next call.
os.register_at_fork(before=_fulgur.stop_threads)
