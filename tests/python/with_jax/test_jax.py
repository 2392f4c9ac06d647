"""fulgur.jax with NumPy in float64 and fulgur itself: attention, its transformations, its errors."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.test_util import check_grads
from jax_inputs import arrays, gradients_of, qkv, run_python

import fulgur
from fulgur.jax import append, attention, dot_product_attention

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


@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 4, 1, 9), (1, 1, 7, 9)])
def test_gradient_of_a_bias(shape):
    """Under jit, of the rows, too, and of samples; that of bools is none."""
    tensors = arrays((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    (bias,) = arrays(shape, seed=3)
    call = jax.jit(lambda b, *x: attention(*x, bias=b, softcap=2.0, return_lse=True))
    (out, lse), back = jax.vjp(call, bias, *tensors)
    (dout,), (dlse,) = arrays(out.shape, seed=1), arrays(lse.shape, seed=2)
    got = back((dout, dlse))
    dq, dk, dv, dbias = reference.attention_backward(
        np.asarray(dout), *map(np.asarray, tensors), dlse=np.asarray(dlse), bias=np.asarray(bias), softcap=2.0
    )
    for x, want in zip(got, (dbias, dq, dk, dv)):
        np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-5)
    alone = jax.grad(lambda b: (attention(*tensors, bias=b) ** 2).sum())
    samples = jnp.stack([bias, 2 * bias])
    np.testing.assert_allclose(jax.vmap(alone)(samples), jnp.stack([*map(alone, samples)]), rtol=1e-5, atol=1e-6)
    seen = bias > -1
    rows = jax.grad(lambda q: (attention(q, *tensors[1:], bias=seen) ** 2).sum())(tensors[0])
    numbers = jax.grad(lambda q: (attention(q, *tensors[1:], bias=jnp.where(seen, 0.0, -jnp.inf)) ** 2).sum())
    np.testing.assert_array_equal(rows, numbers(tensors[0]))


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
@pytest.mark.slow
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
# Sinks that devices share get the sum of the gradients of all, too.
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=np.zeros((2, 5, 3, 16))), ValueError, "q: got 3 heads, want a multiple of the 2"),
        (dict(k=np.zeros((3, 7, 2, 8))), ValueError, r"k: got shape \(3, 7, 2, 8\), want"),
        (dict(q=np.zeros((5,))), ValueError, "q: got "),
        (dict(q=np.zeros((2, 19, 4, 16), np.int32)), ValueError, "q: got "),
        (dict(q=np.zeros((2, 19, 4, 16), np.int8)), ValueError, "q: got int8, want f32"),
        (dict(v=np.zeros((2, 19, 2, 16), np.float16)), ValueError, "v: got "),
        (dict(q=np.zeros((2, 19, 4, 600)), k=np.zeros((2, 19, 2, 600))), ValueError, "576"),
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


@pytest.mark.slow
def test_old_jax():
    done = run_python("import jax; jax.__version_info__, jax.__version__ = (0, 6, 2), '0.6.2'; import fulgur.jax")
    assert done.returncode == 1 and "fulgur.jax: got JAX 0.6.2, want 0.7 or newer" in done.stderr


def coded(x, dtype, heads):
    """Codes with a scale for each sequence and kv head of (batch, rows, heads, dim), those scales, and the numbers."""
    b, rows, h, d = x.shape
    by_head = np.asarray(x, np.float64).reshape(b, rows, heads, h // heads, d)
    scale = np.abs(by_head).max((1, 3, 4)).astype(np.float32) / (448 if dtype != "int8" else 127)
    spread = scale[:, None, :, None, None]
    codes = by_head / spread
    codes = (np.rint(codes) if dtype == "int8" else codes).astype(jnp.dtype(dtype))
    return codes.reshape(x.shape), scale, (codes.astype(np.float64) * spread).reshape(x.shape)


@pytest.mark.parametrize(
    "of_q, of_k, of_v", [("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"), (None, "int8", "int8")]
)
def test_codes(of_q, of_k, of_v):
    """float8 and int8 with descales, eager, compiled and under vmap, against float64 on their numbers."""
    plain = [np.asarray(x) for x in qkv(T=11, S=15, Hv=24)]
    heads = plain[1].shape[2]
    codes, given, numbers = [], {}, []
    for name, x, dtype in zip("qkv", plain, (of_q, of_k, of_v)):
        if dtype is None:
            codes.append(x), numbers.append(x)
            continue
        one, given[f"{name}_descale"], number = coded(x, dtype, heads)
        codes.append(jnp.asarray(one)), numbers.append(number)
    exact, _ = reference.attention(*numbers, precision=np.float64, causal=True)
    call = partial(attention, causal=True)
    out = call(*codes, **given)
    assert out.dtype == (jnp.bfloat16 if of_q else jnp.float32)
    tolerance = dict(rtol=1e-2, atol=4e-3) if of_q else dict(rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, **tolerance)
    assert np.array_equal(jax.jit(call)(*codes, **given), out)
    mapped = jax.vmap(lambda rows, scales: call(*rows, **scales))
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (codes, given))
    assert np.array_equal(mapped(*twice), jnp.stack([out, out]))


def test_codes_have_no_gradient():
    q, k, v = qkv(T=11, S=15, Hv=24)
    codes = k.astype(jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="^k: got float8_e4m3fn where a gradient is wanted, and codes have none"):
        jax.grad(lambda q: attention(q, codes, v).sum())(q)
    with pytest.raises(NotImplementedError, match="^k_cache: got float8_e4m3fn, and fulgur.jax appends no codes"):
        append(codes, v, k, v, jnp.zeros(2, jnp.int32))
