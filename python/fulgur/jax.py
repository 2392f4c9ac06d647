"""Exact attention as an operation of JAX: under jit, grad, vmap and shard_map.

    from fulgur.jax import append, append_attention, attention, dot_product_attention

    out = attention(q, k, v, causal=True)
    grads = jax.grad(lambda q: dot_product_attention(q, k, v, is_causal=True).sum())(q)

:func:`dot_product_attention` stands in for ``jax.nn.dot_product_attention``; :func:`attention` means
what :func:`fulgur.attention` means, and so do :func:`append` and :func:`append_attention`. Arrays are
on the CPU, or on a CUDA device, where the work is put on XLA's stream. Needs JAX 0.7 or newer; nothing
of fulgur is built against it: the calls are handlers of XLA's foreign function interface,
``fulgur_forward``, ``fulgur_backward``, ``fulgur_append`` and ``fulgur_append_forward``.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fulgur import _arguments as _a
from fulgur import _fulgur

__all__ = ["append", "append_attention", "attention", "dot_product_attention"]

if jax.__version_info__ < (0, 7):
    raise ImportError(f"fulgur.jax: got JAX {jax.__version__}, want 0.7 or newer")

for _target, _platforms in _fulgur.jax_handlers().items():
    for _platform, _stages in _platforms.items():
        jax.ffi.register_ffi_target(_target, _stages, platform=_platform)

_DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float64": "f64",
    "int32": "i32",
    "int64": "i64",  # of wrong inputs, for the library to refuse
}


class _Options(NamedTuple):
    """What is fixed when a call is traced."""

    scale: float
    softcap: float
    dropout_p: float
    left: int
    right: int
    chunk: int
    max_seqlen_q: int
    max_seqlen_k: int
    deterministic: bool
    invariant: bool
    max_workspace: int
    interleaved: bool


class _Extras(NamedTuple):
    """Arrays that a call may have besides those it must, in the order of python/jax_ffi.cpp."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    rng_state: Any = None
    page_table: Any = None
    page_indptr: Any = None
    cache_batch_idx: Any = None
    leftpad_k: Any = None
    tree_mask: Any = None
    prefix_groups: Any = None
    prefix_lens: Any = None
    cu_seqlens_k_new: Any = None
    cos: Any = None
    sin: Any = None
    rotary_seqlens: Any = None


# Those of calls without a gradient.
_CACHE = (
    "page_table", "page_indptr", "cache_batch_idx", "leftpad_k", "tree_mask", "prefix_groups",
    "prefix_lens",
)  # fmt: skip
# The functions of the calls that write new rows into caches.
_APPEND, _APPEND_FORWARD = "fulgur_append", "fulgur_append_forward"
_WRITERS = {_APPEND: "append", _APPEND_FORWARD: "append_attention"}


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _call(target, results, options, operands, extras, dlse=None):
    """Runs a handler; dimensions of vmap lie in front of those of all its arrays.

    What append writes, the caches and its turned queries, lies where its first operands are.
    """
    more = [*extras, dlse]
    given = sum(1 << n for n, x in enumerate(more) if x is not None)
    in_place = {_APPEND: len(results), _APPEND_FORWARD: 2}.get(target, 0)
    call = jax.ffi.ffi_call(
        target, results, vmap_method="broadcast_all",
        input_output_aliases={n: n for n in range(in_place)},
    )  # fmt: skip
    return call(
        *operands,
        *(x for x in more if x is not None),
        reals=np.array(options[:3], np.float64),
        integers=np.array([*options[3:], given], np.int64),
    )


@_call.defjvp
def _no_derivative(target, *_):
    if target in _WRITERS:
        raise ValueError(
            f"{_WRITERS[target]}: called where a gradient is wanted, and caches have none; want "
            "jax.lax.stop_gradient of its arrays"
        )
    raise NotImplementedError("fulgur.jax: attention has a first derivative only")


def _varying(x):
    """The axes of a mesh along which an array differs inside shard_map."""
    kind = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def _vary_alike(arrays):
    """All arrays of a tree, differing along the same axes of a mesh: what XLA's calls want."""
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))

    def vary(x):
        missing = tuple(axes - _varying(x))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)

    return jax.tree.map(vary, arrays)


def _result(shape, dtype, like):
    """The type of a result that differs along the axes of a mesh along which `like` does."""
    kind = jax.typeof(like)
    if not hasattr(kind, "manual_axis_type"):  # the name since JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, vma=kind.vma)
    mesh = kind.sharding.mesh
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    axes = kind.manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=axes)


def _placed_as(x, like):
    """An array shared out among devices as `like` is, on a mesh whose axes are a part of types."""
    sharding = jax.typeof(like).sharding
    return x if all(axes is None for axes in sharding.spec) else jax.sharding.reshard(x, sharding)


def _results(q, v, with_lse):
    """The types of out and lse."""
    lse = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    results = (
        _result((*q.shape[:-1], v.shape[-1]), q.dtype, q),
        _result((*q.shape[:-3], q.shape[-2], q.shape[-3]), lse, q),
    )
    return results[: 1 + with_lse]


def _forward(options, tensors, extras, with_lse):
    q, _, v = tensors
    return _call("fulgur_forward", _results(q, v, with_lse), options, tensors, extras)


@partial(jax.jit, static_argnums=(0, 1))  # a call that is not under jit finds it compiled
def _compiled(options, with_lse, tensors, extras):
    return _attention(options, with_lse, tensors, extras)


@partial(jax.jit, static_argnums=0)
def _append(options, operands, extras):
    """The caches, and q if it is there, as they are after the call."""
    operands = jax.tree.leaves(operands)
    results = tuple(_result(x.shape, x.dtype, x) for x in operands[:-3])
    return _call(_APPEND, results, options, operands, extras)


@partial(jax.jit, static_argnums=(0, 1))
def _append_forward(options, with_lse, operands, extras):
    """The caches as they are after the call, and the results of attention."""
    k_cache, v_cache, q = operands[:3]
    caches = tuple(_result(x.shape, x.dtype, x) for x in (k_cache, v_cache))
    results = (*caches, *_results(q, v_cache, with_lse))
    return _call(_APPEND_FORWARD, results, options, operands, extras)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(options, with_lse, tensors, extras):
    """(out,), or out and lse."""
    return _forward(options, tensors, extras, with_lse)


def _attention_fwd(options, with_lse, tensors, extras):
    slopes = extras.alibi_slopes
    if slopes is not None and slopes.perturbed:
        raise ValueError(
            "alibi_slopes: a gradient is wanted, and there is none; want "
            "jax.lax.stop_gradient(alibi_slopes)"
        )
    for name in _CACHE:
        if getattr(extras, name) is not None:
            things = "tree masks" if name == "tree_mask" else "caches"
            raise ValueError(
                f"{name}: given where a gradient is wanted, and {things} have none; want "
                "jax.lax.stop_gradient of q, k, v and sinks"
            )
    tensors, extras = jax.tree.map(
        lambda x: x.value, (tensors, extras), is_leaf=lambda x: hasattr(x, "perturbed")
    )
    results = _forward(options, tensors, extras, with_lse=True)
    return results if with_lse else results[:1], (tensors, *results, extras)


def _attention_bwd(options, with_lse, saved, gradients):
    tensors, out, lse, extras = saved
    zero = jax.custom_derivatives.SymbolicZero
    dout, dlse = gradients if with_lse else (*gradients, None)
    dout = jnp.zeros_like(out) if isinstance(dout, zero) else dout
    dlse = None if isinstance(dlse, zero) else dlse
    operands, dlse = _vary_alike(((dout, *tensors, out, lse), dlse))
    results = tuple(_result(x.shape, x.dtype, x) for x in tensors)
    if extras.sinks is not None:
        results += (_result(extras.sinks.shape, jnp.float32, tensors[0]),)
    gradients = _call("fulgur_backward", results, options, operands, extras, dlse)
    dq, dk, dv, *dsinks = map(_placed_as, gradients, (*tensors, extras.sinks))
    return (dq, dk, dv), _Extras(sinks=dsinks[0]) if dsinks else None


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)


def _halves_of_words(words):
    """The words of a tree mask as uint32 ``(..., 2)``: JAX has no int64 unless it is asked for."""
    if not isinstance(words, jax.Array):
        words = np.asarray(words)
    if words.dtype == np.uint32 and words.shape[-1:] == (2,):
        return words
    if words.dtype != np.int64:
        raise ValueError(
            f"tree_mask: got {words.dtype.name} {words.shape}, want int64 (batch, sq) or (total_q,), or "
            "the low and the high half of each word, uint32 (batch, sq, 2) or (total_q, 2)"
        )
    if isinstance(words, np.ndarray):
        return words[..., None].view(np.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.uint32)


def _arrays(given):
    """What is given, numbers in lists too, as arrays of JAX."""
    return jax.tree.map(jnp.asarray, given, is_leaf=lambda x: isinstance(x, list))


def _planned(name, x):
    if name == "tree_mask":
        return _fulgur.planned(name, x.shape[:-1], "i64")
    if not all(isinstance(n, int) for n in x.shape):
        raise NotImplementedError(
            f"{name}: got shape {x.shape}, want sizes that are known when the call is traced"
        )
    if x.dtype.name not in _DTYPES:
        raise ValueError(
            f"{name}: got {x.dtype.name}, want float32, bfloat16, float16 or float64, or int32 for "
            "lengths"
        )
    return _fulgur.planned(name, x.shape, _DTYPES[x.dtype.name])


def _views(arrays):
    return {name: None if x is None else _planned(name, x) for name, x in arrays.items()}


def _to_check(arrays, v, options):
    """The views and options of a call of attention, as far as they are known when it is traced.

    `v`: the name of the values.
    """
    views = _views(arrays)
    results = _a.forward_results(views["q"], views[v])
    views |= _a.planned_results(results, {"out": None, "lse": None}, "cpu")
    for name in ("q", "k"):
        if views[f"cu_seqlens_{name}"] is not None:  # whose values are not there yet
            longest = options[f"max_seqlen_{name}"] or max(arrays[name].shape[0], 1)  # 0 is not given
            options = options | {f"max_seqlen_{name}": longest}
    # How much memory a plan wants depends on the device and its threads, which are not known yet.
    return views, options | {"max_workspace": min(options["max_workspace"], 0)}


def _fixed(options, interleaved=False):
    """What a handler reads of the library's options."""
    return _Options(*(options[name] for name in _Options._fields[:-1]), interleaved)


def _number(x):
    """A number that may be an array whose value is known."""
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return x.item() if concrete and x.ndim == 0 else x


def _halves(name, number):
    """The low and the high 32 bits of a seed or an offset."""
    if not isinstance(number, jax.Array):
        number = _a.integer(name, number, *_a.UINT64)
        return [jnp.uint32(number & 0xFFFFFFFF), jnp.uint32(number >> 32)]
    # Keys of jax.random.PRNGKey are the words of their implementation.
    of_words = number.dtype == jnp.uint32 and number.shape in ((2,), (4,))
    if number.ndim != 0 and not of_words:
        raise ValueError(f"{name}: got shape {number.shape}, want a scalar or one key of jax.random")
    if of_words or jnp.issubdtype(number.dtype, jax.dtypes.prng_key):
        return list(jax.random.bits(number, (2,), jnp.uint32))
    if not jnp.issubdtype(number.dtype, jnp.integer):
        raise TypeError(f"{name}: got {number.dtype.name}, want an integer or a key of jax.random")
    if number.dtype.itemsize == 8:
        return list(jax.lax.bitcast_convert_type(number, jnp.uint32))
    return [number.astype(jnp.uint32), jnp.uint32(0)]


def attention(
    q, k, v, *, causal=False, window=None, chunk=0, scale=None, softcap=0.0, alibi_slopes=None,
    sinks=None, dropout_p=0.0, seed=0, offset=0, cu_seqlens_q=None, cu_seqlens_k=None,
    max_seqlen_q=0, max_seqlen_k=0, seqused_q=None, seqused_k=None, page_table=None,
    page_indptr=None, cache_batch_idx=None, leftpad_k=None, tree_mask=None, prefix_groups=None,
    prefix_lens=None, deterministic=False, invariant=False, max_workspace=0, return_lse=False,
):  # fmt: skip
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Means the same as :func:`fulgur.attention`, on arrays of JAX, and has gradients to q, k, v and
    sinks; caches and tree masks have none. Under vmap the mapped dimension becomes a part of the
    batch; packed sequences and calls with dropout, sinks or tables of a cache are computed one after
    the other.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``; 1 <= d <= 512.
        k: ``(batch, sk, hk, d)`` or ``(total_k, hk, d)``, dtype of q; hq is a multiple of hk.
        v: ``(batch, sk, hk, dv)`` or ``(total_k, hk, dv)``, dtype of q; 1 <= dv <= 512.
        causal: query i of sq sees keys up to i + sk - sq.
        window: ``(left, right)``: keys from i + sk - sq - left to i + sk - sq + right, -1 is
            unbounded. With ``causal`` both hold.
        chunk: of these keys j, those with j // chunk == (i + sk - sq) // chunk; 0 is off.
        scale: of the scores; default 1 / sqrt(d). Known when the call is traced, as are all numbers
            but for seed and offset.
        softcap: 0 is off.
        alibi_slopes: float32 ``(hq,)`` or ``(batch, hq)``; gets no gradient.
        sinks: float32 ``(hq,)``: a score of each head that joins the softmax of every row, without
            a value (attention sinks, as gpt-oss learns them).
        dropout_p: 0 <= p < 1; what is kept depends on (seed, offset, batch, head, query, key) only.
        seed, offset: of the dropout: 0 to 2^64 - 1, a scalar array of integers, whose bits count, or
            a key of ``jax.random``, of ``key`` or of ``PRNGKey``.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``: sequence b is the packed rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. Both or none.
        max_seqlen_q, max_seqlen_k: the longest packed sequences; 0 reads them from cu_seqlens, on
            the CPU only.
        seqused_q: int32 ``(batch,)``: only the first ``seqused_q[b]`` queries of sequence b exist:
            the rows after are padding, with out 0, lse -inf and gradients 0.
        seqused_k: int32 ``(batch,)``: only the first ``seqused_k[b]`` keys of sequence b exist.
        page_table, page_indptr, cache_batch_idx, leftpad_k: where the sequences of a cache lie, as
            :func:`fulgur.attention` has it; q may be packed by cu_seqlens_q alone there.
        tree_mask: int64 ``(batch, sq)`` or packed ``(total_q,)``, sq <= 64: bit j says whether a
            query sees the jth of the last sq keys, the drafted tokens. NumPy has int64, JAX under
            ``jax_enable_x64`` alone, and may give the low and the high half of each word instead:
            uint32 ``(batch, sq, 2)`` or ``(total_q, 2)``.
        prefix_groups, prefix_lens: sequences that share their first keys, with a page_table, as
            :func:`fulgur.attention` has it.
        deterministic: the backward pass gives the same bits in every run.
        invariant: a sequence's bits do not depend on its batch or on the number of threads.
        max_workspace: the most bytes that a pass may want besides its arrays; 0 is any number.
        return_lse: return ``(out, lse)``.

    Returns:
        out; with ``return_lse`` also lse, float32 (float64 where q is), ``(batch, hq, sq)`` or packed
        ``(hq, total_q)``, natural log. Gradients flow through both.

    Raises:
        ValueError, TypeError: an argument is wrong.
        jax.errors.JaxRuntimeError: values of lengths or tables are wrong, max_workspace is too small,
            or no engine computes this there; where the compiled function has run before, ValueError.
    """
    tensors = tuple(map(jnp.asarray, (q, k, v)))
    q, k, v = tensors
    extras = _Extras(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, sinks, None, page_table,
        page_indptr, cache_batch_idx, leftpad_k,
        None if tree_mask is None else _halves_of_words(tree_mask), prefix_groups, prefix_lens,
    )  # fmt: skip
    extras = _arrays(extras)
    options = _a.options(
        causal, window, chunk, _number(scale), _number(softcap), _number(dropout_p),
        max_seqlen_q, max_seqlen_k, deterministic, invariant, 0, "", max_workspace,
    )  # fmt: skip
    return_lse = _a.flag("return_lse", return_lse)
    _fulgur.plan_forward(*_to_check({"q": q, "k": k, "v": v} | extras._asdict(), "v", options))
    if extras.alibi_slopes is not None and q.ndim == 4:
        slopes = jnp.broadcast_to(extras.alibi_slopes, (q.shape[0], q.shape[2]))
        extras = extras._replace(alibi_slopes=slopes)
    if options["dropout_p"] > 0:
        numbers = jnp.stack([*_halves("seed", seed), *_halves("offset", offset)])
        extras = extras._replace(rng_state=numbers.reshape(2, 2))
    if scale is None:
        options["scale"] = 1 / math.sqrt(q.shape[-1])
    results = _compiled(_fixed(options), return_lse, *_vary_alike((tensors, extras)))
    return results if return_lse else results[0]


def append(
    k_cache, v_cache, k_new, v_new, cache_seqlens, *, cu_seqlens_k_new=None, page_table=None,
    page_indptr=None, cache_batch_idx=None, cos=None, sin=None, interleaved=False,
    rotary_seqlens=None, q=None, cu_seqlens_q=None, causal=False, window=None, chunk=0,
):  # fmt: skip
    """Caches with new keys and values written into them, and queries rotated to their positions.

    Means the same as :func:`fulgur.append`, on arrays of JAX, which do not change. Where a compiled
    function has no other use of caches, which are donated to it (``donate_argnums`` of ``jax.jit``)
    or its own, as in ``jax.lax.scan``, the new ones take their memory; anywhere else they are copied
    first. There is no gradient. Under vmap calls are computed one after the other.

    Args:
        k_cache, v_cache: ``(batch, sk, hk, dim)`` or ``(pages, page, hk, dim)``, as
            :func:`attention` takes them.
        k_new, v_new, cache_seqlens, ..., chunk: as :func:`fulgur.append` has them.

    Returns:
        (k_cache, v_cache), with q (k_cache, v_cache, q), the turned queries. Rows that take no token
        are as they were, and so are packed queries of no sequence.

    Raises:
        ValueError, TypeError: an argument is wrong.
        jax.errors.JaxRuntimeError: values of lengths or tables are wrong, or no engine appends there;
            where the compiled function has run before, ValueError. On a CUDA device values are not
            checked: tokens without a place there are not written.
    """
    names = "k_cache", "v_cache", "q", "k_new", "v_new", "cache_seqlens"
    operands = k_cache, v_cache, q, k_new, v_new, cache_seqlens
    extras = _Extras(
        cu_seqlens_q=cu_seqlens_q, page_table=page_table, page_indptr=page_indptr,
        cache_batch_idx=cache_batch_idx, cu_seqlens_k_new=cu_seqlens_k_new, cos=cos, sin=sin,
        rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    operands, extras = _arrays((operands, extras))
    options = _a.options(causal, window, chunk, 1.0, 0.0, 0.0, 0, 0, False, False, 0, "")
    interleaved = _a.flag("interleaved", interleaved)
    views = _views(dict(zip(names, operands)) | extras._asdict())
    _fulgur.check_append(views | {"q_out": views["q"]}, options, interleaved)
    return _append(_fixed(options, interleaved), *_vary_alike((operands, extras)))


def append_attention(
    q, k_cache, v_cache, k_new, v_new, cache_seqlens, *, cu_seqlens_k_new=None, cos=None, sin=None,
    interleaved=False, rotary_seqlens=None, causal=False, window=None, chunk=0, scale=None,
    softcap=0.0, alibi_slopes=None, sinks=None, cu_seqlens_q=None, max_seqlen_q=0, max_seqlen_k=0,
    seqused_q=None, page_table=None, page_indptr=None, cache_batch_idx=None, leftpad_k=None,
    tree_mask=None, prefix_groups=None, prefix_lens=None, invariant=False, max_workspace=0,
    return_lse=False,
):  # fmt: skip
    """:func:`append` and the :func:`attention` that follows, in one call: its bits are those of both.

    Means the same as :func:`fulgur.append_attention`, on arrays of JAX. The caches are written as
    :func:`append` writes them: in their own memory where they are donated. There is no gradient.
    Under vmap calls are computed one after the other.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)`` with cu_seqlens_q.
        k_cache, v_cache, k_new, v_new, cache_seqlens, ..., rotary_seqlens: as for :func:`append`.
        causal, ..., return_lse: as for :func:`attention`.

    Returns:
        (k_cache, v_cache, out), with ``return_lse`` (k_cache, v_cache, out, lse); out and lse are as
        :func:`attention` has them.

    Raises:
        As :func:`append`, also where no engine computes this.
    """
    names = "k_cache", "v_cache", "q", "k_new", "v_new", "cache_seqlens"
    operands = k_cache, v_cache, q, k_new, v_new, cache_seqlens
    for name, x in zip(names, operands):
        if x is None:
            raise TypeError(f"{name}: got None, want an array")
    extras = _Extras(
        cu_seqlens_q=cu_seqlens_q, seqused_q=seqused_q, alibi_slopes=alibi_slopes, sinks=sinks,
        page_table=page_table, page_indptr=page_indptr, cache_batch_idx=cache_batch_idx,
        leftpad_k=leftpad_k, tree_mask=None if tree_mask is None else _halves_of_words(tree_mask),
        prefix_groups=prefix_groups, prefix_lens=prefix_lens, cu_seqlens_k_new=cu_seqlens_k_new,
        cos=cos, sin=sin, rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    operands, extras = _arrays((operands, extras))
    options = _a.options(
        causal, window, chunk, _number(scale), _number(softcap), 0.0, max_seqlen_q, max_seqlen_k,
        False, invariant, 0, "", max_workspace,
    )  # fmt: skip
    interleaved = _a.flag("interleaved", interleaved)
    return_lse = _a.flag("return_lse", return_lse)
    given = dict(zip(names, operands)) | extras._asdict()
    views, to_check = _to_check(given, "v_cache", options)
    _fulgur.check_append_forward(views | {"q_out": None}, to_check, interleaved)
    if scale is None:
        options["scale"] = 1 / math.sqrt(given["q"].shape[-1])
    arrays = _vary_alike((operands, extras))
    return _append_forward(_fixed(options, interleaved), return_lse, *arrays)


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
    implementation=None, return_residual=False,
):  # fmt: skip
    """``jax.nn.dot_product_attention``, computed by fulgur.

    Args:
        query: ``(B, T, N, H)`` or ``(T, N, H)``.
        key: ``(B, S, K, H)`` or ``(S, K, H)``, dtype of query; N is a multiple of K.
        value: shape and dtype of key.
        bias: None: there is none here.
        mask: boolean, of shape ``(B, 1, 1, S)`` or ``(1, 1, 1, S)``: the keys that take part. Masks
            that differ between queries or heads are not there.
        scale: of the scores; default 1 / sqrt(H). Known when the call is traced.
        is_causal: query i sees keys up to i, whatever T and S are.
        query_seq_lengths: int32 ``(B,)``: later rows of the result are 0.
        key_value_seq_lengths: int32 ``(B,)``: later keys are not there.
        local_window_size: ``(left, right)`` or one number for both: query i sees the keys from
            i - left to i + right. As in jax.nn either may be negative, and -1 does not mean that a
            side is unbounded: a number that is at least max(T, S) does.
        implementation: None.
        return_residual: return ``(out, lse)``.

    Returns:
        An array of the shape of query; with ``return_residual`` also the log-sum-exp of each row,
        ``(B, T, N)`` or ``(T, N)``, in the dtype of key; as in jax.nn, no gradient flows through
        that (through that of :func:`attention` it does). A row that sees no key has out 0 and
        lse -inf; jax.nn averages all values there.

    Raises:
        NotImplementedError: bias, mask or implementation says what fulgur does not have.
        ValueError, TypeError: an argument is wrong.
    """
    if bias is not None:
        raise NotImplementedError("bias: got an array, want None: fulgur has none")
    if implementation is not None:
        raise NotImplementedError(
            f"implementation: got {implementation!r}, want None: fulgur computes this"
        )
    shape = jnp.shape(query)
    q, k, v = (
        x[None] if x.ndim == 3 else x for x in map(jnp.asarray, (query, key, value))
    )
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}, want (batch, length, heads, dim)")
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    for name, x, want in (("key", k, (B, S, K, H)), ("value", v, (B, S, K, H))):
        if x.shape != want or x.dtype != q.dtype:
            raise ValueError(
                f"{name}: got {x.dtype.name} {x.shape}, want {q.dtype.name} {want}"
            )
    if H == 0:
        raise ValueError("query: got head dim 0, want 1 to 512")
    if K == 0 or N % K != 0:
        raise ValueError(f"query: got {N} heads, want a multiple of the {K} heads of key")
    scale = 1 / math.sqrt(H) if scale is None else _a.real("scale", _number(scale))
    left, right = _band(local_window_size, _a.flag("is_causal", is_causal))
    rows = _before("query_seq_lengths", query_seq_lengths, B, T)
    keys = _before("key_value_seq_lengths", key_value_seq_lengths, B, S)
    hidden = _key_mask(mask, B, S)

    options = {"scale": scale, "return_lse": True}
    if hidden is None and keys is not None and left is None and right is None:
        options["seqused_k"] = jnp.clip(jnp.asarray(key_value_seq_lengths), 0, S)
        keys = None
    keys = keys if hidden is None else hidden if keys is None else keys & hidden
    if rows is not None:  # what padding holds reaches no gradient, NaN included
        q = jnp.where(rows[:, :, None, None], q, 0)
    if keys is not None:
        q, k, v, options["scale"] = _push_away(q, k, v, keys, scale)

    # Keys that no query sees, and queries that see no key, are cut off. What is left has a band
    # that can be said from the other corner, where fulgur's masks are aligned.
    first_seen, first_seeing = max(0, -(left or 0)), max(0, -(right or 0))
    seen = S if right is None else min(S, T + right)
    seeing = T if left is None else min(T, seen + left)
    window = (
        -1 if left is None else left + seen - seeing, -1 if right is None else right - seen + seeing
    )  # fmt: skip
    if first_seen >= seen or first_seeing >= seeing or None not in (left, right) and left < -right:
        first_seen = seen = first_seeing = seeing = 0
        window = (-1, -1)
    q, k, v = q[:, first_seeing:seeing], k[:, first_seen:seen], v[:, first_seen:seen]
    out, lse = attention(q, k, v, window=window, **options)
    lse = jnp.swapaxes(lse, 1, 2)
    missing = [(0, 0), (first_seeing, T - seeing), (0, 0)]
    out, lse = jnp.pad(out, [*missing, (0, 0)]), jnp.pad(lse, missing, constant_values=-jnp.inf)
    if keys is not None:
        some = _sees_a_key(keys, T, left, right)
        rows = some if rows is None else rows & some
    if rows is not None:
        out = jnp.where(rows[:, :, None, None], out, 0)
        lse = jnp.where(rows[:, :, None], lse, -jnp.inf)
    out = out.reshape(shape)
    if not return_residual:
        return out
    return out, jax.lax.stop_gradient(lse.astype(k.dtype).reshape(shape[:-1]))


def _band(local_window_size, is_causal):
    """How many keys are seen to the left and to the right of a query's own; None is all."""
    left = right = None
    if local_window_size is not None:
        sides = local_window_size
        if not isinstance(sides, (tuple, list)):
            sides = (sides, sides)
        if len(sides) != 2:
            raise ValueError(f"local_window_size: got {sides!r}, want (left, right) or a number")
        left, right = (_a.integer("local_window_size", n, *_a.INT32) for n in sides)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _before(name, lengths, batch, most):
    """Which of `most` rows each sequence has; None where all have all."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"{name}: got {lengths.dtype.name} {lengths.shape}, want int32 ({batch},)")
    return jnp.arange(most)[None] < lengths[:, None]


def _key_mask(mask, batch, keys):
    """A mask of keys (batch, keys), or None."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {mask.dtype.name}, want bool")
    shape = (1,) * (4 - mask.ndim) + mask.shape
    if len(shape) > 4 or shape[0] not in (1, batch) or shape[3] not in (1, keys):
        raise ValueError(f"mask: got shape {mask.shape}, want ({batch} or 1, 1, 1, {keys})")
    if shape[1:3] != (1, 1):
        raise NotImplementedError(
            f"mask: got shape {mask.shape}, want ({batch} or 1, 1, 1, {keys}): fulgur has no masks "
            "that differ between heads or queries but for is_causal and local_window_size"
        )
    return jnp.broadcast_to(mask.reshape(shape[0], shape[3]), (batch, keys))


def _push_away(q, k, v, keys, scale):
    """q, k, v and scale with which keys that are not in `keys` get no weight.

    They are told by dimensions after the others, in which the product with every query is so far
    below 0 that exp gives 0; so the band is not moved as seqused_k would move it, and keys may lack
    anywhere. A power of two, the product is exact in every dtype.
    """
    keys = keys[:, :, None, None]
    k, v = jnp.where(keys, k, 0), jnp.where(keys, v, 0)
    if scale == 0:  # the scores are 0 whatever q is
        q, scale = jnp.zeros_like(q), 1.0
    # 2^30 and less for float16, whose numbers end at 65504.
    exponent = min(20 - math.floor(math.log2(abs(scale)) / 2), 15 if q.dtype == jnp.float16 else 60)
    far = 2.0**exponent
    if abs(scale) * far * far < 2**14:
        raise NotImplementedError(
            f"scale: got {scale} in {q.dtype.name} with keys that are hidden, want 2e-5 at least"
        )
    more = 16 // q.dtype.itemsize  # rows stay at multiples of 16 bytes
    if q.shape[3] + more > 512:
        raise NotImplementedError(
            f"query: got head dim {q.shape[3]} with keys that are hidden, want {512 - more} at most"
        )
    ends = [(0, 0)] * 3 + [(0, more)]
    q = jnp.pad(q, ends).at[..., -more].set(far)
    k = jnp.pad(k, ends).at[..., -more].set(
        jnp.where(keys, 0, -math.copysign(far, scale))[..., 0].astype(k.dtype)
    )
    return q, k, v, scale


def _sees_a_key(keys, queries, left, right):
    """Whether a query sees one of `keys` (batch, keys) in its band: (batch, queries)."""
    S = keys.shape[1]
    i = jnp.arange(queries)
    begin = jnp.zeros_like(i) if left is None else jnp.clip(i - left, 0, S)
    end = jnp.full_like(i, S) if right is None else jnp.clip(i + right + 1, 0, S)
    before = jnp.pad(jnp.cumsum(keys, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])
    return before[:, end] > before[:, begin]
