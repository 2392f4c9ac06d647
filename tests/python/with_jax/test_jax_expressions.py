"""score_mod and mask_mod of fulgur.jax: gradients against JAX's own in float64, transformations, what is refused."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_mods
from jax_inputs import arrays

import fulgur
from fulgur._expressions import FUNCTIONS
from fulgur.jax import attention

FULGURS = {name: getattr(fulgur, name) for name in FUNCTIONS}
JAXS = {
    name: getattr(jnp, name)
    for name in ("cos", "exp", "exp2", "floor", "log", "maximum", "minimum", "sin", "sqrt", "tanh", "where", "clip")
} | {
    "erf": jax.scipy.special.erf, "sigmoid": jax.nn.sigmoid, "rsqrt": jax.lax.rsqrt,
    "bit": lambda x, i: ((jnp.asarray(x) >> i) & 1) == 1,
}  # fmt: skip


def qkv(dtype="float32"):
    return arrays((2, 37, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16), dtype=dtype)


def expected(q, k, v, score_mod, mask_mod, tensors):
    """out and lse by functions of JAX."""
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    S = jnp.einsum("bihd,bjhd->bhij", q, k) / 4
    places = random_mods.places(2, 4, 2, 37, 40, jnp.arange)
    known = {x: random_mods.Clamped(y, lambda i, n: jnp.clip(i, 0, n - 1)) for x, y in tensors.items()}
    S = jnp.broadcast_to(score_mod(score=S, **places, **known), S.shape)
    S = jnp.where(mask_mod(**places, **known), S, -jnp.inf)
    lse = jax.scipy.special.logsumexp(S, -1)
    P = jnp.exp(S - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    return jnp.einsum("bhij,bjhd->bihd", P, v), lse


def loss(out, lse):
    return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_functions(seed):
    seed += 1000 * int(os.environ.get("FULGUR_TEST_SEED", 0))
    sources = random_mods.Sources(seed, smooth=True)
    score, mask = sources.number(1 + seed % 3), sources.condition(1 + seed % 3) + " | (k < 2)"
    every = random_mods.tensors(seed)
    tensors = {name: x for name, x in every.items() if f"{name}[" in score + mask}
    floats = {name: x for name, x in tensors.items() if x.dtype == np.float32}
    others = {name: x for name, x in tensors.items() if name not in floats}

    def functions(by):
        return (random_mods.function(score, ("score", *random_mods.PLACES, *tensors), by),
                random_mods.function(mask, (*random_mods.PLACES, *tensors), by))  # fmt: skip

    def value(compute, q, k, v, floats):
        return loss(*compute(q, k, v, others | floats))

    def ours(q, k, v, tensors):
        score_mod, mask_mod = functions(FULGURS)
        return attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, tensors=tensors, return_lse=True)

    got = jax.jit(jax.value_and_grad(lambda *x: value(ours, *x), argnums=(0, 1, 2, 3)))(*qkv(), floats)
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in qkv()]
        known = {name: jnp.asarray(x, jnp.float64) for name, x in floats.items()}
        want = jax.value_and_grad(
            lambda *x: value(lambda q, k, v, y: expected(q, k, v, *functions(JAXS), y), *x), argnums=(0, 1, 2, 3)
        )(*exact, known)
        want = jax.tree.map(np.asarray, want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * max(1, np.abs(y).max()))


def relative(q, k, v, table, doc, **more):
    return attention(
        q, k, v, score_mod=lambda score, h, delta, table: 5 * np.tanh(score / 5) + table[h, delta + 40],
        mask_mod="doc[q] == doc[k] || k < 3", tensors={"table": table, "doc": doc}, **more,
    )  # fmt: skip


def test_transformations():
    """Under vmap b is the sequence of each call; what is not mapped is the same in all."""
    q, k, v = qkv()
    (table,), doc = arrays((3, 4, 80), seed=2), jnp.arange(40) // 9
    queries = jnp.stack([q, 2 * q, q + 1])
    got = jax.vmap(relative, in_axes=(0, None, None, 0, None))(queries, k, v, table, doc)
    np.testing.assert_array_equal(got, jnp.stack([relative(x, k, v, y, doc) for x, y in zip(queries, table)]))
    gradient = jax.grad(lambda *x: loss(*relative(*x, doc, return_lse=True)), argnums=(0, 1, 2, 3))
    each = [gradient(x, k, v, y) for x, y in zip(queries, table)]
    for x, *y in zip(jax.vmap(gradient, in_axes=(0, None, None, 0))(queries, k, v, table), *each):
        np.testing.assert_array_equal(x, jnp.stack(y))
    assert gradient(q, k, v, table[0].astype(jnp.bfloat16))[3].dtype == jnp.bfloat16
    # No gradient is computed for a table that is not differentiated.
    text = str(jax.make_jaxpr(jax.grad(lambda q: relative(q, k, v, table[0], doc).sum()))(q))
    assert "dtensors=" not in text and "fulgur_backward" in text


def test_an_expression_beside_other_options():
    q, k, v = qkv()
    slopes, lengths = np.array([0.5, 0.25, 1, 0.1], np.float32), np.array([40, 7], np.int32)
    others = dict(sinks=slopes, seqused_k=lengths, return_lse=True)
    want = attention(q, k, v, alibi_slopes=slopes, causal=True, **others)
    mod = fulgur.expression("score - slope[h] * abs(delta)", tensors={"slope": slopes})
    got = attention(q, k, v, score_mod=mod, mask_mod=lambda delta: delta <= 0, tensors={"slope": slopes}, **others)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(score_mod=lambda score, x: score), TypeError, "score_mod: got a function of x, want parameters of"),
        (dict(score_mod=3), TypeError, "score_mod: got int, want a text, a function or an Expression"),
        (dict(mask_mod="k +"), ValueError, "mask_mod: at character 4, got the end"),
        (dict(mask_mod=lambda q, k: q > k and k > 3), TypeError, "mask_mod: an expression has no value"),
        (dict(score_mod="score + t[q]"), ValueError, 'got "t\\[q\\]", want a tensor that is declared'),
        (dict(score_mod="score", tensors=3), TypeError, "tensors: got int, want a dict of arrays by name"),
        (dict(score_mod="score + t[q]", tensors={"t": np.zeros(3, np.complex64)}), ValueError, "t: got complex64"),
        (dict(score_mod="score + t[q]", tensors={"t": np.zeros((3, 3))}), ValueError, "t: got 1 indices, want 2"),
    ],
)  # fmt: skip
def test_errors(change, error, words):
    with pytest.raises(error, match=words):
        attention(*qkv(), **change)
