"""Plans: every decision about one shape of a call, made once, in words and as data."""

import json
import sys
from types import GenericAlias
from typing import NamedTuple

from fulgur import _arguments as _a
from fulgur import _expressions as _e
from fulgur import _fulgur
from fulgur._calls import gradients
from fulgur._spec import OPTIONAL, WITHOUT_GRADIENT, check, described


class WorkspaceNeed(NamedTuple):
    """What a run needs besides its arrays: at least ``bytes``, the first at a multiple of
    ``alignment``; ``zeroed_bytes`` at the beginning are 0 before the first run, and every run leaves
    them 0."""

    bytes: int
    alignment: int
    zeroed_bytes: int


@described("plan")
def plan(q, k, v, **given):
    """Every decision about one shape of :func:`attention`, made once, to be run many times.

    Args:
        {arguments}

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
    check("plan", given)
    options, return_lse = _a.of_rotated_keys(_a.options(given), q, k=k, v=v), _a.return_lse(given)
    mods, tensors = _e.of_call(given)
    views = _a.with_given(_a.planned_views(given, q=q, k=k, v=v), 0, OPTIONAL["forward"], given) | tensors
    results = _a.forward_results(views["q"], views["v"], return_lse)
    views |= _a.planned_results(results, given, views["q"].device)
    return Plan(_fulgur.plan_forward(views, options | mods, _a.card(given)), results, options["hadamard"])


@described("plan_backward")
def plan_backward(dout, q, k, v, out, lse, **given):
    """Every decision about one shape of :func:`attention_backward`, made once.

    Args:
        {arguments}

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
    check("plan_backward", given)
    options, dlse = _a.options(given), given.get("dlse")
    views = _a.planned_views(given, dout=dout, q=q, k=k, v=v, out=out)
    of_lse = {"lse": lse} if dlse is None else {"lse": lse, "dlse": dlse}
    views |= _a.planned_views(given | {"dtype": _a.lse_dtype(views["q"].dtype)}, **of_lse)
    extras = (name for name in OPTIONAL["backward"] if name != "dlse")
    mods, tensors = _e.of_call(given)
    views |= _a.given_views(0, extras, given) | tensors
    of_tensors = _e.Gradients(given, views)
    results = _a.backward_results(views, given) | of_tensors.results
    written = _a.planned_results(results, given | of_tensors.arrays, views["q"].device)
    return BackwardPlan(
        _fulgur.plan_backward(views | of_tensors.views(written), options | mods, _a.card(given))
    )


class _AnyPlan:
    """What the plans of both passes have."""

    __slots__ = ("_plan",)

    def __init__(self, plan):
        self._plan = plan

    def explain(self, *, bias=None, tensors=None):
        """The plan in words: engine, tiles, splits, bytes, flops, what was rejected and why; on the
        CPU also how long a call is expected to take, by peaks measured when first asked for.

        With the ``tensors`` that ``mask_mod`` indexes, an empty dict where it indexes none, or a
        ``bias`` of bools also how many tiles these hide, show in full, and in part.
        """
        if bias is None and tensors is None:
            return self._plan.explain()

        def view(name, array, **at):
            return _a.view(name, _a.in_host_memory(array), **at)

        values = {} if bias is None else {"bias": view("bias", bias)}
        return self._plan.explain_tiles(values | _e.of_call({"tensors": tensors}, view=view)[1].get("tensors", {}))

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


def _runs_of_torch(plan):
    """What runs a plan on tensors of PyTorch, and returns None where they are none; None before PyTorch is imported."""
    torch = sys.modules.get("torch")
    if torch is not None:
        of = (torch.Tensor,), torch.autograd.forward_ad
        plan._torch = _fulgur.TorchRuns(*of, plan._plan, "lse" in plan._results).run
    return plan._torch


class Plan(_AnyPlan):
    """Every decision about one shape of :func:`attention`; made by :func:`plan`.

    A plan holds no memory of a run. Runs of one plan may overlap in threads, as long as they do not
    write to each other's arrays.
    """

    # (shape, dtype) of what a run returns, by name; whether keys are codes of rotated rows; _runs_of_torch().
    __slots__ = ("_results", "_rotated", "_torch")
    __class_getitem__ = classmethod(GenericAlias)  # the stubs' Plan[Literal[True]]: with return_lse

    def __init__(self, plan, results, rotated):
        super().__init__(plan)
        self._results, self._rotated = results, rotated
        self._torch = None

    @described("Plan.run")
    def run(self, q, k, v, **given):
        """Computes :func:`attention` of arrays of the shapes, strides and dtypes planned for.

        Args:
            {arguments}

        Returns:
            out, fresh or the very one given; ``(out, lse)`` where the plan has ``return_lse``.

        Raises:
            ValueError, TypeError: an argument is wrong or not as planned; nothing was written.
            fulgur.Error: the engine failed.
        """
        run = self._torch or _runs_of_torch(self)
        if run is not None:
            arrays = run(q, k, v, given)
            if arrays is not None:
                return arrays
        check("Plan.run", given)
        random, stream = _a.random_numbers(given), _a.run_stream(q, given)
        if _a.of_rotated_keys({"hadamard": self._rotated}, q, k=k, v=v)["hadamard"] != self._rotated:
            raise ValueError("k: got rotated codes, want those that are not, as planned")
        views = _a.with_given(_a.views(stream, q=q, k=k, v=v), stream, OPTIONAL["forward"], given)
        views |= _e.of_call(given, stream)[1]
        if given.get("lse") is not None and "lse" not in self._results:  # for the plan to refuse
            views["lse"] = _a.view("lse", given["lse"], True, stream)
        workspace = given.get("workspace")
        arrays = _a.filled(
            self._results, given, q,
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

    @described("BackwardPlan.run")
    def run(self, dout, q, k, v, out, lse, **given):
        """Computes :func:`attention_backward` of arrays of the shapes, strides and dtypes planned
        for.

        Args:
            {arguments}

        Returns:
            (dq, dk, dv), after them dsinks with sinks, then dbias where it is given; each fresh or the
            very one given. With dtensors a dict of these is the last one.

        Raises:
            ValueError, TypeError: an argument is wrong or not as planned; nothing was written.
            fulgur.Error: the engine failed.
        """
        check("BackwardPlan.run", given)
        random, stream = _a.random_numbers(given), _a.run_stream(q, given)
        workspace = given.get("workspace")
        return gradients(
            lambda views: self._plan.run_backward(views, stream, *random, workspace),
            dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse), _e.of_call(given, stream)[1], given, stream,
        )  # fmt: skip


@described("explain")
def explain(q, k, v, **given):
    """The plan of a call in words: engine, tiles, splits, bytes, flops, what was rejected and why.

    On the CPU also how long a call of these lengths is expected to take and what binds it. The
    first such call of a process measures the peaks of the machine, in some 10 to 40 ms. With
    ``mask_mod`` or a ``bias`` of bools also how many tiles that hides, shows in full, and in part.

    Args:
        {arguments}

    Raises:
        ValueError, TypeError: an argument is wrong.
        fulgur.Error: no engine computes this here.

    >>> import fulgur
    >>> shape = (2, 4096, 8, 64)
    >>> "cpu" in fulgur.explain(shape, shape, shape, dtype="bf16", causal=True)
    True
    """
    check("explain", given)
    _a.random_numbers(given)
    options = {x: y for x, y in given.items() if x not in ("backward", "seed", "offset")}
    if not _a.flag("backward", given.get("backward", False)):
        return _explained(plan(q, k, v, return_lse=True, **options), given)
    for name in WITHOUT_GRADIENT:
        if options.pop(name, None) is not None:
            things = "tree masks" if name == "tree_mask" else "caches"
            raise ValueError(f"{name}: given with backward, want None: {things} have no gradients")
    views = _a.planned_views(given, q=q, k=k, v=v)
    (out, dtype), (lse, _) = _a.forward_results(views["q"], views["v"], True).values()
    return _explained(plan_backward(out, q, k, v, out, lse, **options | {"dtype": dtype}), given)


def _explained(plan, given):
    """What a plan says, with the tiles of a mask."""
    bias, tensors = given.get("bias"), given.get("tensors")
    if bias is not None and _a.view("bias", bias).dtype != "bool":
        bias = None
    if given.get("mask_mod") is not None and tensors is None:
        tensors = {}
    return plan.explain(bias=bias, tensors=tensors)
