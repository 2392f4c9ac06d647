"""fulgur.jax.dot_product_attention with jax.nn's and with NumPy in float64."""

import inspect
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax_inputs import DTYPES, LENGTH, arrays, band, gradients, gradients_of, qkv

from fulgur.jax import dot_product_attention


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
@pytest.mark.slow
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
@pytest.mark.slow
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
@pytest.mark.slow
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
@pytest.mark.slow
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


@pytest.mark.parametrize("given", ["bias", "mask", "both"])
@pytest.mark.parametrize("shape", [(1, 1, 19, 23), (2, 4, 1, 23), (2, 1, 19, 1), (4, 19, 23)])
@pytest.mark.parametrize(
    "options",
    [{}, dict(is_causal=True), dict(local_window_size=(-2, 5)), dict(key_value_seq_lengths=jnp.array([23, 7]))],
    ids=["full", "causal", "band", "lengths"],
)
def test_biases_and_masks_of_queries_and_heads(options, shape, given):
    q, k, v = qkv(T=19, S=23)
    dout, bias = arrays(q.shape, shape, seed=1)
    mask = np.random.default_rng(5).random(shape) < 0.5
    mask[..., ::3] = True  # jax.nn averages all values where a row sees none
    masks = {} if given == "bias" else dict(mask=jnp.asarray(mask))

    def gradients_by(function):
        call = lambda q, k, v, b: function(q, k, v, None if given == "mask" else b, **masks, **options)  # noqa: E731
        out, back = jax.vjp(jax.jit(call), q, k, v, bias)
        return out, *back(dout)

    for a, b in zip(gradients_by(dot_product_attention), gradients_by(jax.nn.dot_product_attention)):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(bias=jnp.zeros((1, 1, 19, 18))), ValueError, r"bias: got shape \(1, 1, 19, 18\), want \(2, 4, 19, 19\)"),
        (dict(mask=jnp.ones((2, 3, 1, 19), bool)), ValueError, "mask: got shape"),
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


@pytest.mark.slow
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
