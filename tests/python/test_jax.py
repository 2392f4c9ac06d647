"""fulgur.jax with jax.nn, NumPy in float64 and fulgur itself; its handlers without a GPU."""

import ctypes
import inspect
import itertools
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads

import fulgur
from fulgur import _fulgur
from fulgur.jax import append, append_attention, attention, dot_product_attention

jax.config.update("jax_disable_most_optimizations", True)  # most of the time would go there
jax.config.update("jax_numpy_rank_promotion", "raise")  # as some callers set it
ROOT = Path(__file__).parents[2]
DTYPES = ["float32", "bfloat16", "float16"]


def arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=240,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )  # fmt: skip


def qkv(B=2, T=19, S=19, N=4, K=2, H=16, Hv=None, **options):
    return arrays((B, T, N, H), (B, S, K, H), (B, S, K, Hv or H), **options)


def dense(q, k, v, seen, scale, dout):
    """out, lse, dq, dk, dv in float64 with any mask (batch, queries, keys)."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group = q.shape[2] // k.shape[2]
    K, V = (np.repeat(x, group, axis=2) for x in (k, v))
    S = np.where(seen[:, None], scale * np.einsum("bihd,bjhd->bhij", q, K), -np.inf)
    top = S.max(axis=-1, keepdims=True, initial=-np.inf)
    E = np.exp(S - np.where(np.isinf(top), 0, top))
    total = E.sum(axis=-1, keepdims=True)
    P = E / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isinf(top), -np.inf, top + np.log(total))[..., 0]
    out = np.einsum("bhij,bjhd->bihd", P, V)
    dP = np.einsum("bihd,bjhd->bhij", dout, V)
    dS = scale * P * (dP - (P * dP).sum(axis=-1, keepdims=True))
    dK, dV = np.einsum("bhij,bihd->bjhd", dS, q), np.einsum("bhij,bihd->bjhd", P, dout)
    dk, dv = (x.reshape(*k.shape[:3], group, -1).sum(axis=3) for x in (dK, dV))
    return out, lse, np.einsum("bhij,bjhd->bihd", dS, K), dk, dv


def band(T, S, left=None, right=None):
    i, j = np.arange(T)[:, None], np.arange(S)
    seen = np.ones((T, S), bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen[None]


@partial(jax.jit, static_argnums=0)
def gradients_of(function, tensors, dout):
    return gradients(function, tensors, dout)


def gradients(function, tensors, dout, **options):
    out, back = jax.vjp(lambda *x: function(*x, **options), *tensors)
    return out, *back(dout.astype(out.dtype))


@partial(jax.jit, static_argnames="scale")
def naive(tensors, dout, seen, scale):
    """What jax.nn computes with a mask of every score."""
    dtype = tensors[0].dtype
    if dtype == jnp.float16:  # which jax.nn does not have on CPUs: the results are rounded
        tensors = [x.astype(jnp.float32) for x in tensors]
    results = gradients(
        jax.nn.dot_product_attention, tensors, dout, mask=seen[:, None], scale=scale
    )
    return [x.astype(dtype) for x in results]


def check_dot_product(tensors, seen, **options):
    """No further from float64 than jax.nn is, twice for the result and three times for gradients."""
    q = tensors[0]
    dout = arrays(q.shape, seed=1)[0]
    scale = options.get("scale", q.shape[-1] ** -0.5)
    exact_out, exact_lse, *exact = dense(*tensors, seen, scale, dout)

    @jax.jit
    def compute(tensors, dout):
        call = partial(dot_product_attention, **options, return_residual=True)
        (out, lse), back = jax.vjp(call, *tensors)
        return lse, out, *back((dout.astype(out.dtype), jnp.zeros_like(lse)))

    lse, *got = compute(tensors, dout)
    rows = seen.any(axis=-1)[:, :, None, None]  # jax.nn averages all values where a row sees none
    theirs = naive(tensors, jnp.where(rows, dout, 0), seen, scale)
    for name, a, b, want, factor in zip(
        ("out", "dq", "dk", "dv"), got, theirs, (exact_out, *exact), (2, 3, 3, 3)
    ):
        assert a.dtype == q.dtype
        b = np.where(rows, b, 0) if name == "out" else np.asarray(b, np.float64)
        reference.assert_close(name, np.asarray(a, np.float32), want, b, factor)
    assert lse.dtype == q.dtype and lse.shape == q.shape[:3]
    small = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 4e-3}[q.dtype.name]
    exact_lse = np.swapaxes(exact_lse, 1, 2)
    np.testing.assert_allclose(np.asarray(lse, np.float64), exact_lse, rtol=small, atol=small)


LENGTHS = dict(query_seq_lengths=jnp.array([9, 4]), key_value_seq_lengths=jnp.array([6, 9]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, dict(is_causal=True), dict(local_window_size=(2, 1)), LENGTHS, dict(is_causal=True, **LENGTHS)],
    ids=["full", "causal", "window", "lengths", "causal, lengths"],
)
def test_options_mean_what_they_mean_in_jax(options, dtype):
    tensors = qkv(T=9, S=9, H=32, dtype=dtype)
    got = jax.jit(partial(dot_product_attention, **options))(*tensors)
    if dtype == "float16":  # which jax.nn does not have on CPUs
        tensors = [x.astype(jnp.float32) for x in tensors]
    want = jax.jit(partial(jax.nn.dot_product_attention, **options))(*tensors)
    assert got.dtype == dtype
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    tensors = qkv(T=33, S=33, H=32, dtype=dtype)
    check_dot_product(tensors, np.repeat(band(33, 33, right=0), 2, axis=0), is_causal=True)


BANDS = [
    *((*shape, causal, window) for shape in [(5, 12), (12, 5)] for causal in (False, True)
      for window in (None, (0, 0), (3, 1))),
    (7, 7, False, 2), (7, 7, True, (1, 20)), (1, 9, True, None), (9, 1, False, (0, 3)),
    (4, 9, False, (-1, 2)), (9, 4, False, (3, -2)), (7, 7, True, (3, -1)), (7, 7, False, (-3, 3)),
    (7, 7, False, (20, -8)), (9, 4, False, (-5, 20)),
]  # fmt: skip


@pytest.mark.parametrize("T, S, causal, window", BANDS)
def test_bands_start_top_left(T, S, causal, window):
    left, right = (window, window) if isinstance(window, int) else window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    seen = np.repeat(band(T, S, left, right), 2, axis=0)
    check_dot_product(qkv(T=T, S=S, H=8), seen, is_causal=causal, local_window_size=window)


@pytest.mark.parametrize(
    "dtype, options, which",
    [
        *(("float32", options, which)
          for options in ({}, {"is_causal": True}, {"local_window_size": (4, 2), "scale": -0.3})
          for which in ("q", "k", "m", "qkm")),
        ("bfloat16", {"is_causal": True}, "qkm"),
        ("float16", {"is_causal": True}, "qkm"),
    ],
)  # fmt: skip
def test_lengths_and_masks_of_keys(dtype, options, which):
    B, T, S = 4, 11, 13
    q_lengths, k_lengths = jnp.array([11, 4, 0, 7]), jnp.array([5, 13, 3, 0])
    keys = np.random.default_rng(3).random((B, S)) < 0.6
    left, right = options.get("local_window_size", (None, None))
    right = 0 if "is_causal" in options else right
    seen = np.repeat(band(T, S, left, right), B, axis=0)
    if "q" in which:
        options = options | {"query_seq_lengths": q_lengths}
        seen &= np.arange(T)[:, None] < np.asarray(q_lengths)[:, None, None]
    if "k" in which:
        options = options | {"key_value_seq_lengths": k_lengths}
        seen &= np.arange(S) < np.asarray(k_lengths)[:, None, None]
    if "m" in which:
        options = options | {"mask": jnp.asarray(keys)[:, None, None]}
        seen &= keys[:, None]
    check_dot_product(qkv(B=B, T=T, S=S, H=8, dtype=dtype), seen, **options)


def test_scale_of_zero_beside_hidden_keys():
    seen = np.broadcast_to(np.arange(9) < 4, (1, 9, 9)) & band(9, 9, right=0)
    options = dict(scale=0.0, is_causal=True, key_value_seq_lengths=jnp.array([4]))
    check_dot_product(qkv(B=1, T=9, S=9), seen, **options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}])
def test_what_padding_holds_reaches_nothing(options):
    lengths = jnp.array([5, 3])
    clean = qkv(T=8, S=8, H=8)
    padding = (jnp.arange(8)[None] >= lengths[:, None])[:, :, None, None]
    dirty = [jnp.where(padding, jnp.nan, x) for x in clean]
    options = options | dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    function = partial(dot_product_attention, **options)
    (dout,) = arrays(clean[0].shape, seed=1)
    for a, b in zip(*(gradients_of(function, x, dout) for x in (clean, dirty))):
        np.testing.assert_array_equal(a, b)


def test_three_dimensions_and_key_mask_for_all():
    q, k, v = qkv(B=1, T=6, S=6)
    mask = jnp.array([True, False, True, True, False, True])[None, None, None]
    options = dict(mask=mask, is_causal=True, return_residual=True)
    function = jax.jit(partial(dot_product_attention, **options))
    got, want = function(q[0], k[0], v[0]), function(q, k, v)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b[0])
    theirs = jax.jit(partial(jax.nn.dot_product_attention, mask=mask, is_causal=True))(q, k, v)
    np.testing.assert_allclose(want[0], theirs, atol=1e-5)


def test_no_gradient_of_the_residual():
    tensors = qkv(T=6, S=6)
    given = arrays((2, 6, 4, 16), (2, 6, 4), seed=1)
    ours, theirs = (
        jax.vjp(partial(function, is_causal=True, return_residual=True), *tensors)[1](tuple(given))
        for function in (dot_product_attention, jax.nn.dot_product_attention)
    )
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_signature_is_that_of_jax():
    ours, theirs = (
        inspect.signature(module.dot_product_attention).parameters
        for module in (sys.modules["fulgur.jax"], jax.nn)
    )
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind and ours[name].default == parameter.default
    assert set(ours) - set(theirs) <= {"return_residual"}  # which JAX has not always had


# The contract's attention.

SLOPES = np.array([0.5, 0.25, 1.0, 0.1], np.float32)
PACKED = dict(
    cu_seqlens_q=np.array([0, 4, 4, 11], np.int32), cu_seqlens_k=np.array([0, 9, 12, 15], np.int32)
)
CASES = {
    "causal": dict(causal=True),
    "window": dict(window=(3, 1)),
    "chunks": dict(chunk=6, causal=True),
    "softcap": dict(softcap=2.0, causal=True),
    "slopes": dict(alibi_slopes=SLOPES, scale=0.4),
    "slopes of each": dict(alibi_slopes=np.stack([SLOPES, 2 * SLOPES]), causal=True),
    "sinks": dict(sinks=SLOPES, causal=True),
    "used": dict(seqused_k=np.array([15, 0], np.int32), causal=True),
    "used queries": dict(seqused_q=np.array([4, 11], np.int32), causal=True),
    "packed, used": PACKED
    | dict(seqused_q=np.array([3, 0, 5], np.int32), seqused_k=np.array([2, 3, 1], np.int32)),
    "packed": PACKED | dict(causal=True),
    "packed, bounds": PACKED | dict(max_seqlen_q=8, max_seqlen_k=10, alibi_slopes=SLOPES),
}


def contract_tensors(options, dtype="float32"):
    q, k, v = qkv(T=11, S=15, Hv=24, dtype=dtype)
    packed = "cu_seqlens_q" in options
    return [x[0] if packed else x for x in (q, k, v)]


@pytest.mark.parametrize(
    "case, dtype",
    [*((case, "float32") for case in CASES), ("softcap", "bfloat16"), ("packed", "float16")],
)
def test_contract(case, dtype):
    options = CASES[case]
    tensors = contract_tensors(options, dtype)
    plain = [np.asarray(x) for x in tensors]
    means = {name: x for name, x in options.items() if not name.startswith("max_seqlen")}
    precisions = np.float64, plain[0].dtype
    exact, naive = (reference.attention(*plain, precision=p, **means) for p in precisions)
    (out, lse), back = jax.vjp(lambda *x: attention(*x, **options, return_lse=True), *tensors)
    reference.assert_close("out", np.asarray(out), exact[0], naive[0], 2)
    reference.assert_lse_close(np.asarray(lse), exact[1])
    (dout,), (dlse,) = arrays(out.shape, dtype=dtype, seed=1), arrays(lse.shape, seed=2)
    for given in (dlse, jnp.zeros_like(dlse)):
        exact, naive = (
            reference.attention_backward(
                np.asarray(dout), *plain, dlse=np.asarray(given), precision=p, **means
            )
            for p in precisions
        )
        for name, *x in zip(("dq", "dk", "dv"), back((dout, given)), exact, naive):
            reference.assert_close(name, np.asarray(x[0]), *x[1:], 3)
    alone = jax.vjp(lambda *x: attention(*x, **options), *tensors)[1](dout)
    for a, b in zip(alone, back((dout, jnp.zeros_like(dlse)))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rows", [0, 3])
def test_packed_sequences_that_are_all_empty(rows):
    ends = jnp.zeros(3, jnp.int32)
    call = partial(attention, cu_seqlens_q=ends, cu_seqlens_k=ends)
    (x,) = arrays((rows, 2, 8))
    (dx,) = jax.jit(lambda x: jax.vjp(lambda x: call(x, x, x), x)[1](x))(x)
    assert call(x, x, x).shape == dx.shape == x.shape and not dx.any()


@pytest.mark.parametrize("case", ["causal", "slopes of each", "used", "packed"])
def test_gradient_of_sinks(case):
    options, sinks = CASES[case], jnp.asarray([0.5, -1.0, 2.0, -jnp.inf], jnp.float32)
    tensors = contract_tensors(options)
    call = jax.jit(lambda s: attention(*tensors, sinks=s, return_lse=True, **options))
    (out, lse), back = jax.vjp(call, sinks)
    (dout,), (dlse,) = arrays(out.shape, seed=1), arrays(lse.shape, seed=2)
    (got,) = back((dout, dlse))
    want = reference.attention_backward(
        np.asarray(dout), *map(np.asarray, tensors), dlse=np.asarray(dlse), sinks=np.asarray(sinks),
        **options,
    )  # fmt: skip
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want[3], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [None, 1])
def test_vmap_of_sinks(axis):
    """Of the results, and of the gradient of each sample."""
    tensors = arrays((3, 2, 7, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 8))
    (sinks,) = arrays((4,)) if axis is None else arrays((4, 3))
    loss = lambda s, *x: (attention(*x, sinks=s, causal=True) ** 2).sum()  # noqa: E731
    gradients = jax.value_and_grad(loss, (0, 1, 2, 3))
    got = jax.tree.leaves(jax.vmap(gradients, (axis, 0, 0, 0))(sinks, *tensors))
    for i in range(3):
        one = gradients(sinks if axis is None else sinks[:, i], *(x[i] for x in tensors))
        for a, b in zip(got, jax.tree.leaves(one)):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5)


def test_gradient_of_lse_alone():
    q, k, v = qkv()
    keys = jnp.repeat(k, 2, axis=2)
    lse = lambda q: jax.nn.logsumexp(jnp.einsum("bihd,bjhd->bhij", q, keys) / 4, -1).sum()  # noqa: E731
    got = jax.grad(lambda q: attention(q, k, v, return_lse=True)[1].sum())(q)
    np.testing.assert_allclose(got, jax.jit(jax.grad(lse))(q), atol=1e-5)


def test_check_grads():
    tensors = qkv(B=1, T=5, S=7, N=2, K=1, H=8)
    function = lambda *x: attention(*x, causal=True, softcap=3.0, return_lse=True)  # noqa: E731
    check_grads(function, tensors, order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
    with jax.enable_x64(True):
        tensors = [jnp.asarray(np.asarray(x), jnp.float64) for x in tensors]
        check_grads(function, tensors, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
        assert function(*tensors)[1].dtype == jnp.float64


def test_merged_parts_are_trained_as_the_whole():
    q, k, v = qkv()

    def parts(q, k, v):
        outs, lses = zip(*(attention(q, k[:, s], v[:, s], return_lse=True) for s in (np.s_[:7], np.s_[7:])))
        weights = jax.nn.softmax(jnp.stack(lses), axis=0)
        return sum(o * jnp.swapaxes(w, 1, 2)[..., None] for o, w in zip(outs, weights))

    (dout,) = arrays(q.shape, seed=1)
    for a, b in zip(*(gradients_of(function, (q, k, v), dout) for function in (parts, attention))):
        np.testing.assert_allclose(a, b, atol=1e-5)


def tree_words(*shape):
    return np.random.default_rng(4).integers(-(2**63), 2**63 - 1, shape, np.int64)


def halves(words):
    return jnp.asarray(words[..., None].view(np.uint32))


@pytest.mark.parametrize("case", ["causal", "softcap", "used", "packed"])
def test_tree_mask(case):
    """Words of NumPy's and JAX's int64, and their halves."""
    options = CASES[case] | dict(return_lse=True, invariant=True)
    tensors = contract_tensors(options)
    words = tree_words(*tensors[0].shape[:-2])
    plain = [np.asarray(x) for x in tensors]
    want = fulgur.attention(*plain, **options, tree_mask=words)
    exact, _ = reference.attention(*plain, **CASES[case], tree_mask=words)
    np.testing.assert_allclose(want[0], exact, atol=1e-5)
    assert (np.asarray(attention(*tensors, **options)[0]) != want[0]).any()
    compiled = jax.jit(lambda words: attention(*tensors, **options, tree_mask=words))
    with jax.enable_x64(True):
        of_int64 = compiled(jnp.asarray(words))
    for got in (attention(*tensors, **options, tree_mask=words), compiled(halves(words)), of_int64):
        for a, b in zip(got, want):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("case", ["causal", "sinks", "packed"])
def test_vmap_of_tree_mask(case, mapped):
    options = CASES[case]
    q, k, v = contract_tensors(options)
    words = tree_words(3, *q.shape[:-2]) if mapped else np.repeat(tree_words(*q.shape[:-2])[None], 3, axis=0)
    call = lambda q, words: attention(q, k, v, **options, tree_mask=words, invariant=True)  # noqa: E731
    qs, of_words = jnp.stack([q, 2 * q, -q]), halves(words if mapped else words[0])
    got = jax.jit(jax.vmap(call, (0, 0 if mapped else None)))(qs, of_words)
    for n in range(3):
        np.testing.assert_array_equal(got[n], call(qs[n], words[n]))


SEED, OFFSET = 2**63 + 12345, 2**40 + 3


@pytest.mark.parametrize("traced", [False, True])
def test_dropout_is_that_of_fulgur(traced):
    tensors = qkv()
    plain, numbers = [np.asarray(x) for x in tensors], dict(dropout_p=0.4, seed=7, offset=9)
    if not traced:
        numbers |= dict(seed=SEED, offset=OFFSET)
    want, lse = fulgur.attention(*plain, return_lse=True, invariant=True, **numbers)
    (dout,) = arrays(want.shape, seed=1)
    grads = fulgur.attention_backward(np.asarray(dout), *plain, want, lse, invariant=True, **numbers)

    def function(q, k, v, seed, offset):
        return attention(q, k, v, dropout_p=0.4, seed=seed, offset=offset, invariant=True)

    if traced:
        function, numbers = jax.jit(function), {"seed": jnp.uint32(7), "offset": jnp.int32(9)}
    out, back = jax.vjp(lambda *x: function(*x, numbers["seed"], numbers["offset"]), *tensors)
    np.testing.assert_array_equal(out, want)
    for a, b in zip(back(dout), grads):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_seeds():
    tensors = qkv()
    draw = jax.jit(lambda seed: attention(*tensors, dropout_p=0.5, seed=seed))
    keys = [draw(jax.random.key(n)) for n in (0, 0, 1)]
    np.testing.assert_array_equal(keys[0], keys[1])
    assert (keys[0] != keys[2]).any()
    np.testing.assert_array_equal(draw(jax.random.PRNGKey(0)), keys[0])
    mapped = jax.vmap(draw)(jax.random.split(jax.random.PRNGKey(0)))
    np.testing.assert_array_equal(mapped, jax.vmap(draw)(jax.random.split(jax.random.key(0))))
    np.testing.assert_array_equal(draw(jnp.int32(-1)), draw(jnp.uint32(2**32 - 1)))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(
            draw(jnp.uint64(SEED)), attention(*tensors, dropout_p=0.5, seed=SEED)
        )


# Transformations.


def test_jit_and_checkpoint():
    q, k, v = qkv()
    loss = lambda *x: (attention(*x, causal=True) ** 2).sum()  # noqa: E731
    want = jax.grad(loss, (0, 1, 2))(q, k, v)
    for function in (jax.jit(loss), jax.checkpoint(loss), jax.jit(jax.checkpoint(loss))):
        for a, b in zip(jax.grad(function, (0, 1, 2))(q, k, v), want):
            np.testing.assert_array_equal(a, b)
    steps = jax.lax.scan(lambda x, _: (attention(x, k, v), None), q, None, length=3)[0]
    np.testing.assert_array_equal(steps, attention(attention(attention(q, k, v), k, v), k, v))


@pytest.mark.parametrize(
    "case, mapped",
    [*((case, "qkv") for case in CASES), ("used", "q"), ("packed", "kv"), ("dropout", "qkv"), ("dropout", "k")],
)
def test_vmap(case, mapped):
    options = CASES.get(case, dict(dropout_p=0.5, seed=3))

    def function(q, k, v):
        out, lse = attention(q, k, v, **options, invariant=True, return_lse=True)
        return out, jnp.where(jnp.isinf(lse), 0, lse)

    tensors = contract_tensors(options)
    axes = tuple(1 if name in mapped else None for name in "qkv")
    stacked = [jnp.stack([x, 2 * x, -x], 1) if a else x for x, a in zip(tensors, axes)]
    each = [[x[:, n] if a else x for x, a in zip(stacked, axes)] for n in range(3)]
    @jax.jit
    def gradients(*x):
        results, back = jax.vjp(function, *x)
        return *results, *back(results)

    want = zip(*(gradients(*x) for x in each))
    for n, (a, b) in enumerate(zip(jax.jit(jax.vmap(gradients, axes))(*stacked), want)):
        tolerance = 0 if n < 2 else 2e-5
        np.testing.assert_allclose(a, jnp.stack(b), atol=tolerance, rtol=tolerance)


def test_vmap_folds_into_the_batch_and_nests():
    q, k, v = arrays((2, 3, 1, 6, 2, 8), (2, 1, 5, 2, 8), (3, 1, 5, 2, 8))
    used, slopes = jnp.array([[5, 2, 0], [1, 4, 3]], jnp.int32), jnp.array([[0.1, 1], [0.7, 0.3]])

    def function(q, k, v, used, slopes):
        lengths = dict(seqused_q=6 - used[None], seqused_k=used[None])
        return attention(q, k, v, **lengths, alibi_slopes=slopes, invariant=True)

    inner = jax.vmap(function, (0, None, 0, 0, None))
    got = jax.vmap(inner, (0, 0, None, 0, 0))(q, k, v, used, slopes)
    for i in range(2):
        for j in range(3):
            want = function(q[i, j], k[i], v[j], used[i, j], slopes[i])
            np.testing.assert_array_equal(got[i, j], want)
    assert jax.vmap(attention)(*(x[:0] for x in arrays(*[(4, 1, 6, 2, 8)] * 3))).shape == (0, 1, 6, 2, 8)


@pytest.mark.parametrize("H", [2, 8, 96, 128])
def test_default_scale_is_that_of_the_library(H):
    """To the last bit: float64 would show another rounding of 1 / sqrt(d)."""
    with jax.enable_x64(True):
        q, k, v = qkv(H=H, dtype="float64")
        want = fulgur.attention(*map(np.asarray, (q, k, v)), causal=True)
        np.testing.assert_array_equal(attention(q, k, v, causal=True), want)
        np.testing.assert_array_equal(dot_product_attention(q, k, v, is_causal=True), want)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
from jax.sharding import PartitionSpec as P
from fulgur.jax import append, append_attention, attention, dot_product_attention

assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((2, 9, h, 8)), jnp.float32) for h in (4, 2, 2))
slopes, used = jnp.array([0.1, 0.5, 1, 2]), jnp.array([9, 4], jnp.int32)
sinks = jnp.array([0.5, -1, 2, 0])

def function(q, k, v, slopes, used):
    out, lse = attention(
        q, k, v, alibi_slopes=slopes, seqused_k=used, window=(5, -1), return_lse=True, invariant=True
    )
    return out, jnp.where(jnp.isinf(lse), 0, lse)

def check(function, specs, results, *arrays):
    def gradients(function):
        def both(*tensors):
            out, back = jax.vjp(lambda *x: function(*x, *arrays[3:]), *tensors)
            return *out, *back(out)
        return jax.jit(both)(*arrays[:3])
    want = gradients(function)
    for checked in (True, False):
        got = gradients(jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=checked
        ))
        for a, b in zip(got[:2], want[:2]):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(got[2:], want[2:]):
            np.testing.assert_allclose(a, b, atol=1e-5)

batch, heads, whole = P("x"), P(None, None, "x"), P()
check(function, (batch, batch, batch, whole, batch), (batch, batch), q, k, v, slopes, used)
check(function, (heads, heads, heads, batch, whole), (heads, P(None, "x")), q, k, v, slopes, used)
# Keys that all devices share get the sum of the gradients of all.
one = (q, k[:1, :, :1], v[:1, :, :1])
check(
    lambda q, k, v: attention(q, *(jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v)),
                              return_lse=True, invariant=True),
    (batch, whole, whole), (batch, batch), *one,
)
check(
    lambda q, k, v: dot_product_attention(
        q, k, v, is_causal=True, key_value_seq_lengths=jnp.full(q.shape[:1], 7), return_residual=True
    ),
    (heads, heads, heads), (heads, heads), q, k, v,
)
# So do sinks that they share.
for specs in ((whole, batch, batch), (batch, heads, heads)):
    of_rows = specs[1]
    check(
        lambda s, q, k: attention(q, k, k, sinks=s, return_lse=True, invariant=True), specs,
        (of_rows, batch if of_rows == batch else P(None, "x")), sinks, q, k,
    )
# Sequences of a cache that all devices have.
k_cache, v_cache = (jnp.asarray(rng.standard_normal((5, 3, 2, 8)), jnp.float32) for _ in range(2))
table, used = jnp.array([[4, 0, 2], [1, 3, 0]], jnp.int32), jnp.array([9, 5], jnp.int32)
paged = lambda q, table, used, k, v: attention(q, k, v, page_table=table, seqused_k=used, invariant=True)
specs = (batch, batch, batch, whole, whole)
got = jax.shard_map(paged, mesh=mesh, in_specs=specs, out_specs=batch)(q, table, used, k_cache, v_cache)
np.testing.assert_array_equal(got, paged(q, table, used, k_cache, v_cache))
# A step of decoding, with each device's own sequences or heads, or pages that each changes for itself.
def step(q, k, v, lengths, k_cache, v_cache):
    k_cache, v_cache = append(k_cache, v_cache, k, v, lengths)
    words = jnp.full((*q.shape[:2], 2), 5, jnp.uint32)
    return attention(q, k_cache, v_cache, seqused_k=lengths + 3, tree_mask=words, invariant=True), k_cache, v_cache
k_cache, v_cache = (jnp.asarray(rng.standard_normal((2, 9, 2, 8)), jnp.float32) for _ in range(2))
q, k, v = (jnp.asarray(rng.standard_normal((2, 3, h, 8)), jnp.float32) for h in (4, 2, 2))
lengths = jnp.array([6, 1], jnp.int32)
want = step(q, k, v, lengths, k_cache, v_cache)
for rows, numbers in ((batch, batch), (heads, whole)):
    specs = (rows, rows, rows, numbers, rows, rows)
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(rows,) * 3))
    for a, b in zip(sharded(q, k, v, lengths, k_cache, v_cache), want):
        np.testing.assert_array_equal(a, b)
    def at_once(q, k, v, lengths, k_cache, v_cache):
        words = jnp.full((*q.shape[:2], 2), 5, jnp.uint32)
        *caches, out = append_attention(q, k_cache, v_cache, k, v, lengths, tree_mask=words, invariant=True)
        return out, *caches
    sharded = jax.jit(jax.shard_map(at_once, mesh=mesh, in_specs=specs, out_specs=(rows,) * 3))
    for a, b in zip(sharded(q, k, v, lengths, k_cache, v_cache), want):
        np.testing.assert_array_equal(a, b)
table = jnp.array([[1], [0]], jnp.int32)
paged = lambda k, lengths, table, cache: append(cache, cache, k, k, lengths, page_table=table)[0]
sharded = jax.shard_map(paged, mesh=mesh, in_specs=(batch, batch, batch, whole), out_specs=batch)
got = sharded(k, lengths, table, k_cache)
for n in range(2):
    one = paged(k[n : n + 1], lengths[n : n + 1], table[n : n + 1], k_cache)
    np.testing.assert_array_equal(got[2 * n : 2 * n + 2], one)
# Gradients on a mesh whose axes are a part of types are shared out as what they are of.
explicit = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
loss = lambda q, k, v, s: jnp.sin(attention(q, k, v, sinks=s)).sum()
with jax.set_mesh(explicit):
    sharded = [jax.device_put(x, jax.sharding.NamedSharding(explicit, batch)) for x in (q, k, v, sinks)]
    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*sharded)
for a, b, x in zip(got, jax.grad(loss, (0, 1, 2, 3))(q, k, v, sinks), sharded):
    assert a.sharding.is_equivalent_to(x.sharding, x.ndim)
    np.testing.assert_allclose(a, b, atol=1e-5)
print("sharded")
"""


def test_shard_map_over_batch_and_heads():
    done = run_python(SHARDED, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0 and "sharded" in done.stdout, done.stderr


# Errors.


def test_gradients_that_there_are_not():
    q, k, v = qkv()
    slopes = jnp.asarray(SLOPES)
    with pytest.raises(ValueError, match="alibi_slopes: a gradient is wanted.*stop_gradient"):
        jax.grad(lambda s: attention(q, k, v, alibi_slopes=s).sum())(slopes)
    stopped = jax.grad(lambda s: attention(q, k, v, alibi_slopes=jax.lax.stop_gradient(s)).sum())
    np.testing.assert_array_equal(stopped(slopes), 0)
    loss = lambda q: (attention(q, k, v) ** 2).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="first derivative only"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(q)
    tree = dict(tree_mask=np.ones((2, 19), np.int64))
    with pytest.raises(ValueError, match="^tree_mask: given where a gradient is wanted, and tree masks have none"):
        jax.grad(lambda q: attention(q, k, v, **tree).sum())(q)
    through = jax.grad(lambda q: (attention(*map(jax.lax.stop_gradient, (q, k, v)), **tree) * q).sum())(q)
    np.testing.assert_array_equal(through, attention(q, k, v, **tree))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (q,), (q,))


def test_sizes_that_are_not_known():
    (batch,) = jax.export.symbolic_shape("batch")
    tensors = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in qkv()]
    with pytest.raises(NotImplementedError, match=r"^q: got shape \(batch, 19, 4, 16\), want sizes that are known"):
        jax.export.export(jax.jit(attention))(*tensors)


def test_arrays_of_jax_are_not_written():
    q, k, v = qkv()
    out = jnp.zeros(q.shape)
    with pytest.raises(ValueError, match="^out: got an array of JAX, which never changes"):
        fulgur.attention(q, k, v, out=out)
    with pytest.raises(ValueError, match="^k_cache: got an array of JAX, which never changes"):
        fulgur.append(k, v, k[:, :1], v[:, :1], np.zeros(2, np.int32))
    np.testing.assert_array_equal(out, 0)


LENGTH = jnp.array([3, 3], jnp.int32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=np.zeros((2, 5, 3, 16))), ValueError, "q: got 3 heads, want a multiple of the 2"),
        (dict(k=np.zeros((3, 7, 2, 8))), ValueError, r"k: got shape \(3, 7, 2, 8\), want"),
        (dict(q=np.zeros((5,))), ValueError, "q: got "),
        (dict(q=np.zeros((2, 19, 4, 16), np.int32)), ValueError, "q: got "),
        (dict(q=np.zeros((2, 19, 4, 16), np.int8)), ValueError, "q: got int8, want float32"),
        (dict(v=np.zeros((2, 19, 2, 16), np.float16)), ValueError, "v: got "),
        (dict(q=np.zeros((2, 19, 4, 600)), k=np.zeros((2, 19, 2, 600))), ValueError, "512"),
        (dict(causal=1), TypeError, "causal: got 1, want True or False"),
        (dict(window=3), TypeError, "window: got 3"),
        (dict(chunk=-1), ValueError, "chunk: got -1"),
        (dict(scale="1"), TypeError, "scale: got '1', want a number"),
        (dict(softcap=-1.0), ValueError, "softcap: got -1"),
        (dict(dropout_p=1.0), ValueError, "dropout_p: got 1"),
        (dict(dropout_p=0.1, seed=-1), ValueError, "seed: got -1"),
        (dict(dropout_p=0.1, seed=jnp.zeros(2, jnp.int32)), ValueError, r"seed: got shape \(2,\)"),
        (dict(dropout_p=0.1, offset=jnp.float32(1)), TypeError, "offset: got float32"),
        (dict(seqused_q=jnp.zeros(3, jnp.int32)), ValueError, "seqused_q: got "),
        (dict(seqused_k=jnp.zeros(3, jnp.int32)), ValueError, "seqused_k: got "),
        (dict(seqused_k=jnp.zeros(2)), ValueError, "seqused_k: got "),
        (dict(alibi_slopes=jnp.zeros(3)), ValueError, "alibi_slopes: got "),
        (dict(sinks=jnp.zeros(3)), ValueError, "sinks: got "),
        (dict(sinks=jnp.zeros(4, jnp.bfloat16)), ValueError, "sinks: got bf16"),
        (dict(cu_seqlens_q=jnp.zeros(3, jnp.int32)), ValueError, "q: got 4 dimensions"),
        (dict(tree_mask=jnp.zeros((2, 19))), ValueError, r"tree_mask: got float32 \(2, 19\), want int64 \(batch, sq\)"),
        (dict(tree_mask=jnp.zeros((2, 19), jnp.int32)), ValueError, r"tree_mask: got int32 \(2, 19\), want int64"),
        (dict(tree_mask=jnp.zeros((2, 19), jnp.uint32)), ValueError, r"tree_mask: got uint32 \(2, 19\), want int64"),
        (dict(tree_mask=np.zeros((2, 18), np.int64)), ValueError, r"tree_mask: got shape \(2, 18\), want \(2, 19\)"),
        (dict(tree_mask=np.int64(1)), ValueError, "tree_mask: got 0 dimensions"),
        (dict(tree_mask=np.zeros((2, 65), np.int64), q=np.zeros((2, 65, 4, 16), np.float32)), ValueError, "65.*64"),
        (dict(max_workspace=-1), ValueError, "max_workspace: got -1 bytes, want >= 0"),
        (dict(max_workspace=1.5), TypeError, "max_workspace: got 1.5, want an integer"),
        (dict(return_lse=None), TypeError, "return_lse: got None"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("traced", [False, True])
def test_wrong_arguments(change, error, message, traced):
    tensors = dict(zip("qkv", qkv())) | {n: jnp.asarray(x) for n, x in change.items() if n in "qkv"}
    options = {name: x for name, x in change.items() if name not in "qkv"}
    function = partial(attention, **options)
    with pytest.raises(error, match=message):
        (jax.jit(function) if traced else function)(*tensors.values())


def test_wrong_values_of_lengths_reach_python():
    q, k, v = qkv()
    function = jax.jit(lambda used: attention(q, k, v, seqused_k=used))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"seqused_k: got 20.*want 0 to 19"):
        function(jnp.array([3, 20])).block_until_ready()
    function(jnp.array([3, 19])).block_until_ready()
    with pytest.raises(TypeError, match="scale: got .*, want a number"):
        jax.jit(lambda scale: attention(q, k, v, scale=scale))(1.0)
    np.testing.assert_array_equal(attention(q, k, v, scale=jnp.float32(0.5)), attention(q, k, v, scale=0.5))


def test_max_workspace():
    """What each pass wants is said where it has less, and is enough."""
    q, k, v = (jnp.asarray(x) for x in qkv())

    def wanted(call, bytes):
        with pytest.raises(jax.errors.JaxRuntimeError) as failed:
            jax.block_until_ready(call(bytes))
        (want,) = re.findall(rf"max_workspace: got {bytes} bytes, want at least (\d+)", str(failed.value))
        return int(want)

    def forward(bytes):
        return attention(q, k, v, max_workspace=bytes)

    def gradient(bytes):
        return jax.grad(lambda q: attention(q, k, v, max_workspace=bytes).sum())(q)

    want = wanted(forward, 1)
    assert wanted(forward, want - 1) == want
    np.testing.assert_array_equal(forward(want), forward(0))
    more = wanted(gradient, want)
    assert wanted(gradient, more - 1) == more > want
    np.testing.assert_allclose(gradient(more), gradient(0), atol=1e-6)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(bias=jnp.zeros((1, 1, 19, 19))), NotImplementedError, "bias: "),
        (dict(mask=jnp.ones((1, 1, 19, 19), bool)), NotImplementedError, "mask: got shape"),
        (dict(mask=jnp.ones((2, 4, 1, 19), bool)), NotImplementedError, "mask: got shape"),
        (dict(mask=jnp.ones((3, 1, 1, 19), bool)), ValueError, "mask: got shape"),
        (dict(mask=jnp.ones((1, 1, 1, 19))), ValueError, "mask: got float32, want bool"),
        (dict(implementation="cudnn"), NotImplementedError, "implementation: got 'cudnn'"),
        (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size: got"),
        (dict(local_window_size=2**31), ValueError, "local_window_size: got 2147483648"),
        (dict(local_window_size=1.5), TypeError, "local_window_size: got 1.5"),
        (dict(query_seq_lengths=jnp.zeros(3, jnp.int32)), ValueError, "query_seq_lengths: got int32"),
        (dict(key_value_seq_lengths=jnp.zeros(2)), ValueError, "key_value_seq_lengths: got float32"),
        (dict(scale=None, is_causal="yes"), TypeError, "is_causal: got 'yes'"),
        (dict(key=jnp.zeros((2, 19, 2, 8))), ValueError, r"key: got float32 \(2, 19, 2, 8\), want"),
        (dict(value=jnp.zeros((2, 19, 2, 16), jnp.bfloat16)), ValueError, "value: got bfloat16"),
        (dict(query=jnp.zeros(3)), ValueError, "query: got shape"),
        (dict(zip(("query", "key", "value"), qkv(H=0))), ValueError, "query: got head dim 0, want 1 to 512"),
        (dict(query=jnp.zeros((2, 19, 3, 16))), ValueError, "query: got 3 heads, want a multiple"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_dot_product_attention(options, error, message):
    options = dict(zip(("query", "key", "value"), qkv())) | options
    with pytest.raises(error, match=message):
        dot_product_attention(**options)


def test_limits_beside_hidden_keys():
    with pytest.raises(NotImplementedError, match="query: got head dim 509 .* want 508 at most"):
        dot_product_attention(*qkv(H=509), is_causal=True, key_value_seq_lengths=LENGTH)
    tensors = qkv(dtype="float16")
    options = dict(is_causal=True, key_value_seq_lengths=LENGTH)
    with pytest.raises(NotImplementedError, match="scale: got 1e-06 in float16"):
        dot_product_attention(*tensors, scale=1e-6, **options)
    seen = np.repeat(band(19, 19, right=0) & (np.arange(19) < 3), 2, axis=0)
    check_dot_product(tensors, seen, scale=2e-5, **options)
    check_dot_product(qkv(), seen, scale=1e-20, **options)


def test_old_jax():
    done = run_python("import jax; jax.__version_info__, jax.__version__ = (0, 6, 2), '0.6.2'; import fulgur.jax")
    assert done.returncode == 1 and "fulgur.jax: got JAX 0.6.2, want 0.7 or newer" in done.stderr


# The handlers, as XLA sees them.


def test_structs_are_those_of_jaxlib(tmp_path):
    """The layout of python/xla_ffi.h against jaxlib's header, compiled."""
    code = """
        #include <cstddef>
        #include "xla/ffi/api/c_api.h"
        #include "xla_ffi.h"
        namespace ours = fulgur::python::xla;
        #define SAME_PLACE(a, x, b, y) static_assert(offsetof(ours::a, x) == offsetof(b, y) && \\
            sizeof(ours::a::x) == sizeof(b::y))
        #define SAME_SIZE(a, b) static_assert(sizeof(ours::a) == sizeof(b))
        #define SAME(a, b) static_assert(static_cast<long>(ours::a) == static_cast<long>(b))
    """
    fields = {
        "Extension XLA_FFI_Metadata_Extension": "",
        "ApiVersion XLA_FFI_Api_Version": "struct_size extensions:extension_start major:major_version "
        "minor:minor_version",
        "Metadata XLA_FFI_Metadata": "struct_size api_version traits",
        "MetadataExtension XLA_FFI_Metadata_Extension": "base:extension_base metadata",
        "Buffer XLA_FFI_Buffer": "struct_size extensions:extension_start dtype data rank dims",
        "Buffers XLA_FFI_Args": "struct_size extensions:extension_start size types items:args",
        "Buffers XLA_FFI_Rets": "struct_size extensions:extension_start size types items:rets",
        "Span XLA_FFI_ByteSpan": "data:ptr size:len",
        "Attributes XLA_FFI_Attrs": "struct_size extensions:extension_start size types names items:attrs",
        "Array XLA_FFI_Array": "dtype size data",
        "CallFrame XLA_FFI_CallFrame": "struct_size extensions:extension_start api context:ctx stage "
        "operands:args results:rets attributes:attrs",
        "MakeError XLA_FFI_Error_Create_Args": "struct_size extensions:extension_start message code:errc",
        "DestroyError XLA_FFI_Error_Destroy_Args": "struct_size extensions:extension_start error",
        "GetStream XLA_FFI_Stream_Get_Args": "struct_size extensions:extension_start context:ctx stream",
        "GetThreads XLA_FFI_ThreadPool_NumThreads_Args": "struct_size extensions:extension_start "
        "context:ctx threads:num_threads",
        "GetDevice XLA_FFI_DeviceOrdinal_Get_Args": "struct_size extensions:extension_start "
        "context:ctx device:device_ordinal",
        "Api XLA_FFI_Api": "struct_size extensions:extension_start version:api_version "
        "internal:internal_api make_error:XLA_FFI_Error_Create destroy_error:XLA_FFI_Error_Destroy "
        "get_stream:XLA_FFI_Stream_Get get_threads:XLA_FFI_ThreadPool_NumThreads "
        "get_device:XLA_FFI_DeviceOrdinal_Get",
    }  # fmt: skip
    sizes = "ApiVersion Buffer Buffers Span Attributes Array MetadataExtension MakeError GetStream GetThreads GetDevice"
    lines = []
    for names, pairs in fields.items():
        ours, theirs = names.split()
        for pair in pairs.split():
            a, _, b = pair.partition(":")
            lines.append(f"SAME_PLACE({ours}, {a}, {theirs}, {b or a});")
        if ours in sizes.split():
            lines.append(f"SAME_SIZE({ours}, {theirs});")
    lines.append("static_assert(offsetof(ours::MetadataExtension, metadata) == sizeof(ours::Extension));")
    constants = {
        "kMetadataExtension": "Extension_Metadata", "kMajorVersion": "API_MAJOR", "kBuffer": "ArgType_BUFFER",
        "kArray": "AttrType_ARRAY", "kCommandBufferCompatible": "HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
        "Stage::kInitialize": "ExecutionStage_INITIALIZE", "Stage::kExecute": "ExecutionStage_EXECUTE",
        **{f"DataType::k{x}": f"DataType_{x}" for x in ("S32", "U32", "F16", "BF16", "F32", "F64")},
        **{f"ErrorCode::k{x.title().replace('_', '')}": f"Error_Code_{x}" for x in
           ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE")},
    }  # fmt: skip
    lines += [f"SAME({a}, XLA_FFI_{b});" for a, b in constants.items()]
    lines.append("static_assert(ours::kBuffer == XLA_FFI_RetType_BUFFER);")
    lines.append("static_assert(ours::kMinorVersion <= XLA_FFI_API_MINOR);")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join([*(line.strip() for line in code.splitlines()), *lines]) + "\n")
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", f"-I{ROOT / 'python'}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(lines) > 80 and "\\" in source.read_text()
    source.write_text(source.read_text() + "SAME_PLACE(Buffer, data, XLA_FFI_Buffer, rank);\n")
    assert subprocess.run(command, capture_output=True).returncode != 0  # the comparison compares


def handler(call, platform, stage="execute"):
    capsule = _fulgur.jax_handlers()[call][platform][stage]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(pointer(capsule, None))


SIZE, POINTER, INT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32


def struct(*values):
    """A struct of ctypes values, which are kept."""
    fields = [(f"f{n}", type(value)) for n, value in enumerate(values)]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})(*values)


def address(value):
    return POINTER(ctypes.addressof(value))


@pytest.mark.parametrize("call", ["fulgur_forward", "fulgur_backward", "fulgur_append", "fulgur_append_forward"])
@pytest.mark.parametrize("platform, stage", [("cpu", "execute"), ("CUDA", "execute"), ("CUDA", "initialize")])
def test_handlers_say_what_they_are(call, platform, stage):
    metadata = struct(SIZE(56), struct(SIZE(24), POINTER(), INT(-1), INT(-1)), ctypes.c_uint32(77), ctypes.c_int64())
    extension = struct(struct(SIZE(24), INT(1), POINTER()), address(metadata))
    frame = struct(SIZE(144), address(extension))
    assert handler(call, platform, stage)(address(frame)) is None
    version = metadata.f1
    assert (version.f2, version.f3) == (0, 1)
    assert metadata.f2 == (1 if platform == "CUDA" else 0)  # COMMAND_BUFFER_COMPATIBLE


class Frame:
    """XLA's call of a handler, on a device that there need not be. `given`: the names of tensors that
    such a call may lack, and this one has."""

    def __init__(self, stage, operands, results, given=()):
        self.asked, self.errors = [], []
        given = sum(1 << BITS[name] for name in given)
        options = _fulgur.option_defaults() | dict(scale=0.25, window_right=0)
        reals, integers = ([x for x in options.values() if isinstance(x, float) == real] for real in (True, False))
        numbers = [np.array(x) for x in (reals, [*integers, 0, given])]
        self.kept = [numbers]
        arrays = [self.keep(struct(INT(12 if x.dtype.kind == "f" else 5), SIZE(x.size), POINTER(x.ctypes.data)))
                  for x in numbers]  # fmt: skip
        names = [ctypes.create_string_buffer(x) for x in (b"reals", b"integers")]
        self.kept += names
        spans = [self.keep(struct(address(x), SIZE(len(x) - 1))) for x in names]
        stop = POINTER()
        attributes = struct(
            SIZE(48), stop, ctypes.c_int64(2), self.list(INT, [1, 1]), self.list(POINTER, map(address, spans)),
            self.list(POINTER, map(address, arrays)),
        )  # fmt: skip
        # Memory of the device, which the host does not look at, and none before the execution.
        memory = ((n << 20) * (stage == 3) for n in itertools.count(1))
        frame = struct(SIZE(144), stop, address(self.api()), POINTER(4321), INT(stage),
                       self.buffers(operands, memory), self.buffers(results, memory), attributes, stop)  # fmt: skip
        self.address = address(self.keep(frame))

    def keep(self, value):
        self.kept.append(value)
        return value

    def list(self, kind, values):
        values = list(values)
        return address(self.keep((kind * len(values))(*(getattr(x, "value", x) for x in values))))

    def buffers(self, shapes, memory):
        """Buffers of float32; vectors are of int32."""
        items = [
            self.keep(struct(SIZE(48), POINTER(), INT(4 if len(x) == 1 else 11), POINTER(data),
                             ctypes.c_int64(len(x)), self.list(ctypes.c_int64, x)))
            for x, data in zip(shapes, memory)
        ]  # fmt: skip
        return struct(SIZE(40), POINTER(), ctypes.c_int64(len(items)), self.list(INT, [1] * len(items)),
                      self.list(POINTER, map(address, items)))  # fmt: skip

    def api(self):
        kind = ctypes.CFUNCTYPE(POINTER, POINTER)

        def make_error(arguments):
            fields = struct(SIZE(), POINTER(), ctypes.c_char_p(), INT())
            fields = type(fields).from_address(arguments)
            self.errors.append((fields.f3, fields.f2.decode()))
            return 99

        def get_stream(arguments):
            fields = type(struct(SIZE(), POINTER(), POINTER(), POINTER())).from_address(arguments)
            self.asked.append(("stream", fields.f2))
            fields.f3 = 1234
            return None

        def get_device(arguments):
            fields = type(struct(SIZE(), POINTER(), POINTER(), INT())).from_address(arguments)
            self.asked.append(("device", fields.f2))
            fields.f3 = 4095  # no machine has that many
            return None

        makers = {0: make_error, 4: get_stream, 17: get_device}
        functions = [self.keep(kind(makers[n])) if n in makers else None for n in range(18)]
        table = [POINTER(ctypes.cast(f, POINTER).value if f else None) for f in functions]
        return self.keep(struct(SIZE(), POINTER(), struct(SIZE(), POINTER(), INT(), INT()), POINTER(), *table))


BITS = {tensor.name: tensor.number for tensors in _fulgur.tensors().values() for tensor in tensors}
ROWS, LSE = (1, 5, 2, 16), (1, 2, 5)
CALLS = {
    "fulgur_forward": ([ROWS] * 3, [ROWS, LSE], ["lse"]),
    "fulgur_backward": ([ROWS] * 5 + [LSE], [ROWS] * 3),
    "fulgur_append": ([ROWS] * 4 + [(1,)], [ROWS] * 2),
    "fulgur_append_forward": ([ROWS] * 4 + [(1,), ROWS], [ROWS] * 3 + [LSE], ["lse"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stage, number", [("initialize", 2), ("execute", 3)])
def test_cuda_handlers_ask_for_device_and_stream(call, stage, number):
    """float32, or a device that is not there: the engine's answer is an error, whatever the machine."""
    frame = Frame(number, *CALLS[call])
    assert handler(call, "CUDA", stage)(frame.address) == 99
    assert sorted(frame.asked) == [("device", 4321), ("stream", 4321)]
    ((code, message),) = frame.errors
    assert code in (12, 14) and "cuda" in message.lower(), (code, message)


@pytest.mark.parametrize(
    "operands, results, given, message",
    [
        ([ROWS], [ROWS], [], "got 1 operands, want more"),
        ([], [ROWS], [], "got 0 operands, want more"),
        ([ROWS] * 3, [], [], "got 0 results, want more"),
        ([ROWS] * 4, [ROWS], [], "got 4 operands, want 3"),
        ([ROWS] * 3, [ROWS, LSE, LSE], ["lse"], "got 3 results, want 2"),
        ([ROWS] * 3, [ROWS], ["sinks"], "got 3 operands, want more"),
        ([ROWS, (5, 2, 16), ROWS], [ROWS], [], "k: got 3 dimensions"),
        ([(2, *ROWS), (2,), (2, *ROWS)], [ROWS], [], "k: got 0 dimensions"),
        ([(1, 5, 2, 16), (1, 5, 3, 16), ROWS], [ROWS], [], "q: got 2 heads"),
    ],
)  # fmt: skip
def test_wrong_calls_of_handlers(operands, results, given, message):
    frame = Frame(3, operands, results, given)
    assert handler("fulgur_forward", "CUDA")(frame.address) == 99
    ((code, got),) = frame.errors
    assert code == 3 and re.search(message, got), got


def test_calls_are_lowered_for_cuda():
    q, k, v = qkv(dtype="bfloat16")
    loss = jax.jit(jax.grad(lambda q: attention(q, k, v, causal=True).astype(jnp.float32).sum()))
    text = loss.trace(q).lower(lowering_platforms=("cuda",)).as_text()
    step = jax.jit(lambda k, v: append(k, v, k[:, :1], v[:, :1], LENGTH))
    text += step.trace(k, v).lower(lowering_platforms=("cuda",)).as_text()
    step = jax.jit(lambda q, k, v: append_attention(q[:, :1], k, v, k[:, :1], v[:, :1], LENGTH))
    text += step.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    for call in CALLS:
        assert f"@{call}(" in text
    assert text.count("output_operand_alias<") == 4
