"""The functions of fulgur.jax that mean what those of fulgur mean."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from fulgur import _arguments as _a
from fulgur import _expressions as _e
from fulgur import _fulgur
from fulgur._spec import OPTIONAL, check, described
from fulgur.jax import _handlers

_DTYPES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float64": "f64",
    "bool": "bool",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "int8": "int8",
    "int32": "i32",
    "int64": "i64",  # of wrong inputs, for the library to refuse
}


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
    """The arrays of a call by name, as those of JAX; None stays, for the library to refuse."""
    return {name: None if x is None else jnp.asarray(x) for name, x in given.items()}


def _want_no_codes(tensors):
    for name in ("k_cache", "v_cache"):
        if tensors[name] is not None and _handlers.has_codes(tensors[name]):
            raise NotImplementedError(f"{name}: got {tensors[name].dtype}, and fulgur.jax appends no codes")


def _planned(name, x):
    if name == "tree_mask":
        return _fulgur.planned(name, x.shape[:-1], "i64")
    if not all(isinstance(n, int) for n in x.shape):
        raise NotImplementedError(
            f"{name}: got shape {x.shape}, want sizes that are known when the call is traced"
        )
    if x.dtype.name not in _DTYPES:
        raise ValueError(
            f"{name}: got {x.dtype.name}, want float32, bfloat16, float16, float64, a float8 or int8, int32 for "
            "lengths, or bool for a bias"
        )
    return _fulgur.planned(name, x.shape, _DTYPES[x.dtype.name])


def _indexable(arrays):
    """Arrays that expressions index; integers of 32 bits count."""
    if not isinstance(arrays, dict):
        raise TypeError(f"tensors: got {type(arrays).__name__}, want a dict of arrays by name")

    def one(x):
        x = jnp.asarray(x)
        return x.astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.integer) else x

    return {name: one(x) for name, x in arrays.items()}


def _expressions(given):
    """The expressions of a call, as options and as texts, and the arrays that they index, as views and by the names
    that they have among those of the call."""
    if given.get("tensors") is not None:
        given = given | {"tensors": _indexable(given["tensors"])}
    options, views = _e.of_call(given, view=lambda name, x, stream: _planned(name, x))
    texts = tuple(options[x].text() if x in options else "" for x in ("score_mod", "mask_mod"))
    arrays = {_handlers.PREFIX + name: x for name, x in (given.get("tensors") or {}).items()}
    return options, texts, views, arrays


def _views(arrays):
    return {name: _planned(name, x) for name, x in arrays.items() if x is not None}


def _to_check(arrays, v, options):
    """The views and options of a call of attention, as far as they are known when it is traced.

    `v`: the name of the values.
    """
    views = _views(arrays)
    results = _a.forward_results(views["q"], views[v], True)
    views |= _a.planned_results(results, {}, "cpu")
    for name in ("q", "k"):
        if f"cu_seqlens_{name}" in views:  # whose values are not there yet
            longest = options[f"max_seqlen_{name}"] or max(arrays[name].shape[0], 1)  # 0 is not given
            options = options | {f"max_seqlen_{name}": longest}
    # How much memory a plan wants depends on the device and its threads, which are not known yet.
    return views, options | {"max_workspace": min(options["max_workspace"], 0)}


def number(x):
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


def _options(given):
    """The options of a call; numbers may be arrays whose values are known."""
    numbers = {x: number(given[x]) for x in ("scale", "softcap", "dropout_p") if x in given}
    return _a.options(given | numbers)


def _optional(call, given):
    """The arrays that a call may have and is given, by name."""
    return {x: given[x] for x in OPTIONAL[call] if given.get(x) is not None}


@described("jax.attention")
def attention(q, k, v, **given):
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Means the same as :func:`fulgur.attention`, on arrays of JAX, and has gradients to q, k, v, sinks,
    bias and the tensors of score_mod; caches, tree masks and codes (float8 and int8, with descales) have
    none. Under vmap the mapped dimension
    becomes a part of the batch; packed sequences and calls with dropout, sinks, a bias, expressions or
    tables of a cache are computed one after the other.

    Args:
        {arguments}

    Returns:
        out; with ``return_lse`` also lse, float32 (float64 where q is), ``(batch, hq, sq)`` or packed
        ``(hq, total_q)``, natural log. Gradients flow through both.

    Raises:
        ValueError, TypeError: an argument is wrong.
        jax.errors.JaxRuntimeError: values of lengths or tables are wrong, max_workspace is too small,
            or no engine computes this there; where the compiled function has run before, ValueError.
    """
    check("jax.attention", given)
    rows = {"q": jnp.asarray(q), "k": jnp.asarray(k), "v": jnp.asarray(v)}
    tensors = rows | _optional("forward", given)
    if "tree_mask" in tensors:
        tensors["tree_mask"] = _halves_of_words(tensors["tree_mask"])
    tensors = _arrays(tensors)
    q, options, return_lse = tensors["q"], _options(given), _a.return_lse(given)
    mods, texts, indexed, arrays = _expressions(given)
    views, planned = _to_check(tensors, "v", options)
    _fulgur.plan_forward(views | indexed, planned | mods)
    for name in ("k", "v"):
        if tensors[name].dtype != q.dtype and not _handlers.has_codes(tensors[name], q):
            raise ValueError(f"{name}: got {tensors[name].dtype}, want {q.dtype} (the dtype of q)")
    if "alibi_slopes" in tensors and q.ndim == 4:
        tensors["alibi_slopes"] = jnp.broadcast_to(tensors["alibi_slopes"], (q.shape[0], q.shape[2]))
    if options["dropout_p"] > 0:
        halves = (_halves(name, given.get(name, 0)) for name in ("seed", "offset"))
        tensors["rng_state"] = jnp.stack(sum(halves, [])).reshape(2, 2)
    if options["scale"] is None:
        options["scale"] = 1 / math.sqrt(q.shape[-1])
    results = _handlers.attention(
        _handlers.fixed(options, mods=texts), return_lse, _handlers.vary_alike(tensors | arrays)
    )
    return results if return_lse else results[0]


@described("jax.append")
def append(k_cache, v_cache, k_new, v_new, cache_seqlens, **given):
    """Caches with new keys and values written into them, and queries rotated to their positions.

    Means the same as :func:`fulgur.append`, on arrays of JAX, which do not change. Where a compiled
    function has no other use of caches, which are donated to it (``donate_argnums`` of ``jax.jit``)
    or its own, as in ``jax.lax.scan``, the new ones take their memory; anywhere else they are copied
    first. There is no gradient. Under vmap calls are computed one after the other.

    Args:
        {arguments}

    Returns:
        (k_cache, v_cache), with q (k_cache, v_cache, q), the rotated queries. Rows that take no token
        are as they were, and so are packed queries of no sequence.

    Raises:
        ValueError, TypeError: an argument is wrong.
        jax.errors.JaxRuntimeError: values of lengths or tables are wrong, or no engine appends there;
            where the compiled function has run before, ValueError. On a CUDA device values are not
            checked: tokens without a place there are not written.
    """
    check("jax.append", given)
    rows = dict(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens)
    tensors = _arrays(rows | _optional("append", given))
    _want_no_codes(tensors)
    options, interleaved = _options(given) | {"scale": 1.0}, _a.interleaved(given)
    views = _views(tensors)
    _fulgur.check_append(views | {"q_out": views.get("q")}, options, interleaved)
    return _handlers.append(_handlers.fixed(options, interleaved), _handlers.vary_alike(tensors))


@described("jax.append_attention")
def append_attention(q, k_cache, v_cache, k_new, v_new, cache_seqlens, **given):
    """:func:`append` and the :func:`attention` that follows, in one call: its bits are those of both.

    Means the same as :func:`fulgur.append_attention`, on arrays of JAX. The caches are written as
    :func:`append` writes them: in their own memory where they are donated. There is no gradient.
    Under vmap calls are computed one after the other.

    Args:
        {arguments}

    Returns:
        (k_cache, v_cache, out), with ``return_lse`` (k_cache, v_cache, out, lse); out and lse are as
        :func:`attention` has them.

    Raises:
        As :func:`append`, also where no engine computes this.
    """
    check("jax.append_attention", given)
    tensors = dict(
        q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens
    )
    for name, x in tensors.items():
        if x is None:
            raise TypeError(f"{name}: got None, want an array")
    tensors |= _optional("append", given) | _optional("forward", given)
    if "tree_mask" in tensors:
        tensors["tree_mask"] = _halves_of_words(tensors["tree_mask"])
    tensors = _arrays(tensors)
    _want_no_codes(tensors)
    options, interleaved = _options(given), _a.interleaved(given)
    return_lse = _a.return_lse(given)
    _fulgur.check_append_forward(*_to_check(tensors, "v_cache", options), interleaved)
    if options["scale"] is None:
        options["scale"] = 1 / math.sqrt(tensors["q"].shape[-1])
    return _handlers.append_forward(
        _handlers.fixed(options, interleaved), return_lse, _handlers.vary_alike(tensors)
    )
