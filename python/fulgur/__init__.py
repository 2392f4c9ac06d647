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

import os
from typing import NamedTuple

from fulgur import _fulgur
from fulgur._calls import append, append_attention, attention, attention_backward, merge, scores
from fulgur._expressions import (
    Expression,
    bit,
    clip,
    cos,
    erf,
    exp,
    exp2,
    expand_blocks,
    expression,
    floor,
    log,
    maximum,
    minimum,
    power,
    rsqrt,
    sigmoid,
    silu,
    sin,
    sqrt,
    t5_bucket,
    tanh,
    where,
)
from fulgur._fulgur import Error, __version__
from fulgur._install import install_as
from fulgur._plans import BackwardPlan, Plan, WorkspaceNeed, explain, plan, plan_backward
from fulgur._quantize import Quantized, hadamard, quantize

__all__ = [
    "BackwardPlan",
    "Engine",
    "Error",
    "Expression",
    "Plan",
    "Quantized",
    "WorkspaceNeed",
    "__version__",
    "append",
    "append_attention",
    "attention",
    "attention_backward",
    "bit",
    "clip",
    "cos",
    "engines",
    "erf",
    "exp",
    "exp2",
    "expand_blocks",
    "explain",
    "expression",
    "floor",
    "hadamard",
    "install_as",
    "log",
    "maximum",
    "merge",
    "minimum",
    "plan",
    "plan_backward",
    "power",
    "quantize",
    "rsqrt",
    "scores",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "t5_bucket",
    "tanh",
    "where",
]


class Engine(NamedTuple):
    """An engine; ``unavailable`` says why it cannot be used here, empty where it can."""

    name: str
    description: str
    unavailable: str


def engines():
    """The engines and whether each can be used on this machine.

    >>> import fulgur
    >>> "cpu" in [engine.name for engine in fulgur.engines() if not engine.unavailable]
    True
    """
    return [Engine(*engine) for engine in _fulgur.engines()]


# A forked child has none of its parent's OpenMP threads and would wait for them forever; without
# any, the parent and the child each start their own in the next call.
os.register_at_fork(before=_fulgur.stop_threads)
