"""The functions of fulgur.torch."""

import torch
from torch._C._functorch import is_batchedtensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

import fulgur
from fulgur import _fulgur
from fulgur._spec import OPTIONAL, WITHOUT_GRADIENT, check, described
from fulgur.torch import _direct as direct
from fulgur.torch import _expressions as expressions
from fulgur.torch import _operators
from fulgur.torch._autograd import Attention, FunctionalAttention
from fulgur.torch._random import random_numbers
from fulgur.torch._tensors import (
    autocasts, cast_to_cache, has_codes, sides, want_constant, want_no_gradient, whole_rows,
)  # fmt: skip

_OPTIONS = frozenset(_fulgur.option_defaults())
_OPTIONS_OF_APPEND = _OPTIONS & {x.name for x in _operators.append._schema.arguments}
_CONSTANTS = {"scale", "softcap", "alibi_slopes"}
_WITH_GRADIENT = frozenset(x for x in OPTIONAL["forward"] if x not in WITHOUT_GRADIENT)
_OF_CODES = frozenset(x for x in WITHOUT_GRADIENT if x.endswith(("_descale", "_zero_point", "_mean")))
_OF_CACHES = frozenset(WITHOUT_GRADIENT) - _OF_CODES - {"tree_mask", "prefix_groups", "prefix_lens"}


def _given(names, given):
    """What a call is given of these names."""
    return {name: x for name, x in given.items() if x is not None and name in names}


def _options(given, names=_OPTIONS):
    """The options with these names that a call is given, and the sides of its window."""
    options = _given(names, given)
    if given.get("window") is not None:
        options["window_left"], options["window_right"] = sides(given["window"])
    if given.get("causal"):
        options["window_right"] = 0
    return options


@described("torch.attention")
def attention(q, k, v, **given):
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Means the same as :func:`fulgur.attention`, on tensors of PyTorch, and records gradients to q,
    k, v, bias, sinks and the tensors of score_mod; caches, tree masks and low-bit tensors (float8 and int8, with
    descales) have none. Under autocast q, k and v are cast to its dtype, float64 apart; with a cache, q alone is
    cast, to the dtype of the cache, and with low-bit tensors nothing is.

    Args:
        {arguments}

    Returns:
        out, contiguous, or with score_mod or mask_mod in the layout of q; with ``return_lse`` also lse,
        float32 (float64 where q is), ``(batch, hq, sq)`` or packed ``(hq, total_q)``, natural log.
        Gradients flow through both.

    Raises:
        RuntimeError, TypeError, ValueError: an argument is wrong, or no engine computes this here.
        NotImplementedError: another derivative than the first, or one in forward mode, is wanted.
    """
    if not (is_dynamo_compiling() or forward_ad._current_level >= 0):
        results = direct.attention(q, k, v, given)
        if results is not None:
            return results
    numbers, tensors, cache, return_lse = _arguments(given)
    sinks, bias = tensors.get("sinks"), tensors.get("bias")
    mods = expressions.tensors_of(given)
    if given.get("score_mod") is not None or given.get("mask_mod") is not None or mods:
        numbers |= expressions.texts(given, mods)
    cached, codes = not _OF_CACHES.isdisjoint(cache), has_codes(q, k, v)
    if cache or codes:
        of = "caches" if cached else "low-bit tensors" if codes else "tree masks"
        want_no_gradient(of, q=q, k=k, v=v, sinks=sinks, bias=bias, **_given(_OF_CODES, cache), **mods)
    if autocasts(q) and not codes:
        dtype = k.dtype if cached else torch.get_autocast_dtype(q.device.type)
        q = q.to(dtype)
        if not cached:
            k, v = k.to(dtype), v.to(dtype)
    q = whole_rows("q", q)
    if numbers.get("dropout_p"):
        tensors["rng_state"] = random_numbers(q)
    if not cached:
        k, v = whole_rows("k", k), whole_rows("v", v)
    tensors |= {expressions.PREFIX + name: x for name, x in mods.items()}
    functional, dynamo = torch._C._are_functorch_transforms_active(), is_dynamo_compiling()
    # What vmap maps may require grad outside of it, and does not say so inside. In a graph the operator's rule
    # under vmap refuses it: PyTorch 2.11 does not trace the Function there.
    mapped = functional and not dynamo and any(map(is_batchedtensor, (q, k, v, *tensors.values())))
    if (cache or codes) and "score_mod" in numbers:
        out, lse = expressions.forward(q, k, v, tensors | numbers | cache)
    elif cache or codes:
        out, lse = _operators.forward_cached(q, k, v, **tensors, **numbers, **cache)
    elif mapped or forward_ad._current_level >= 0 or torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
        or getattr(sinks, "requires_grad", False) or getattr(bias, "requires_grad", False)
        or any([x.requires_grad for x in mods.values()])
    ):  # fmt: skip
        if getattr(sinks, "requires_grad", False) and sinks.device != q.device:
            raise ValueError(
                f"sinks: requires grad on {sinks.device}, want {q.device} as q, where dsinks lies"
            )
        if torch.are_deterministic_algorithms_enabled():
            numbers["deterministic"] = True
        function = FunctionalAttention if functional else Attention
        inputs = (q, k, v, *tensors.values())
        if dynamo:
            inputs = _apart(inputs)
        out, lse = function.apply(*inputs[:3], (numbers, tuple(tensors), None, True), *inputs[3:])
    elif "score_mod" in numbers:
        out, lse = expressions.forward(q, k, v, tensors | numbers)
    else:
        out, lse = _operators.forward(q, k, v, **tensors, **numbers)
    return (out, lse) if return_lse else out


@described("torch.scores")
@_disable_dynamo
def scores(q, k, **given):
    """The scores of attention, or its probabilities: what :func:`attention` makes and never keeps.

    Means the same as :func:`fulgur.scores`, on tensors of PyTorch. Nothing is recorded: tensors that require grad are
    refused but under ``torch.no_grad()``. ``torch.compile`` leaves its graph for it.

    Args:
        {arguments}

    Returns:
        A fresh tensor, float32 (float64 where q is), ``(batch, hq, sq, sk)``, or with ``rows`` of so many queries.

    Raises:
        ValueError, TypeError: an argument is wrong.
        NotImplementedError: a derivative is wanted.
        fulgur.Error: the tensors are of float64 on a GPU.
    """
    check("torch.scores", given)
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    tensors |= {"q": whole_rows("q", q), "k": whole_rows("k", k)}
    want_no_gradient("scores", **tensors)
    return fulgur.scores(**{**given, **{name: x.detach() for name, x in tensors.items()}})


def _arguments(given):
    """What a call of attention gives: options and tensors by name, those without a gradient apart, and whether lse is
    returned."""
    check("torch.attention", given)
    for name in _CONSTANTS:
        if name in given:
            want_constant(name, given[name])
    tensors, cache = _given(_WITH_GRADIENT, given), _given(WITHOUT_GRADIENT, given)
    return _options(given), tensors, cache, given.get("return_lse", False)


def _apart(tensors):
    """Views of those that come again: Dynamo lets a Function take no tensor twice."""
    return [x.view_as(x) if any(x is y for y in tensors[:i]) else x for i, x in enumerate(tensors)]


@described("torch.append")
def append(k_cache, v_cache, k_new, v_new, cache_seqlens, **given):
    """Writes new keys and values into caches, in place, and rotates them and q to their positions.

    Means the same as :func:`fulgur.append`, as an operator that ``torch.compile`` sees. Nothing is
    recorded: tensors that require grad are refused but under ``torch.no_grad()``. Under autocast q,
    k_new and v_new are cast to the dtype of the caches.

    Args:
        {arguments}

    Returns:
        The rotated queries, fresh or the very ``q_out`` given; None without q. Packed rows after
        the last sequence are not written.

    Raises:
        RuntimeError: an argument is wrong, and nothing was written; or the tensors are where no
            engine appends.
    """
    check("torch.append", given)
    q, q_out = given.get("q"), given.get("q_out")
    want_no_gradient(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, q=q, q_out=q_out)
    q, k_new, v_new = cast_to_cache(k_cache, q, k_new, v_new)
    k_new, v_new = whole_rows("k_new", k_new), whole_rows("v_new", v_new)
    tensors = _given(OPTIONAL["append"], given)
    if q is not None:
        tensors["q"] = q = whole_rows("q", q)
        if q_out is None:
            q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _operators.append(
        k_cache, v_cache, k_new, v_new, cache_seqlens, q_out=q_out,
        interleaved=given.get("interleaved", False), **tensors, **_options(given, _OPTIONS_OF_APPEND),
    )  # fmt: skip
    return q_out


@described("torch.append_attention")
def append_attention(q, k_cache, v_cache, k_new, v_new, cache_seqlens, **given):
    """:func:`append` and the :func:`attention` that follows, in one call.

    Means the same as :func:`fulgur.append_attention`, as an operator that ``torch.compile`` sees.
    Nothing is recorded: tensors that require grad are refused but under ``torch.no_grad()``. Under
    autocast q, k_new and v_new are cast to the dtype of the caches.

    Args:
        {arguments}

    Returns:
        As :func:`attention`.

    Raises:
        RuntimeError: an argument is wrong, and nothing was written; or no engine computes this.
    """
    check("torch.append_attention", given)
    want_no_gradient(
        q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, sinks=given.get("sinks"),
    )  # fmt: skip
    q, k_new, v_new = cast_to_cache(k_cache, q, k_new, v_new)
    tensors = _given(OPTIONAL["append"] + OPTIONAL["forward"], given)
    out, lse = _operators.append_forward(
        whole_rows("q", q), k_cache, v_cache, whole_rows("k_new", k_new), whole_rows("v_new", v_new),
        cache_seqlens, interleaved=given.get("interleaved", False), **tensors, **_options(given),
    )  # fmt: skip
    return (out, lse) if given.get("return_lse") else out
