"""Caches of K and V in fulgur.jax, beside fulgur.attention of NumPy's arrays."""

from functools import partial

import jax
import numpy as np
import pytest

import fulgur
from fulgur.jax import attention

PAGES, PAGE, HQ, HK, D, DV = 12, 4, 4, 2, 8, 6


def int32(*values):
    return np.array(values, np.int32)


TABLE = int32([3, 9, 0], [-1, -1, -1], [7, 2, 99])
USED, LEFTPAD, ENDS = int32(11, 0, 5), int32(2, 0, 4), int32(0, 3, 3, 5)
KINDS = {
    "pages": dict(page_table=TABLE, seqused_k=USED),
    "padded pages": dict(page_table=TABLE, seqused_k=USED, leftpad_k=LEFTPAD),
    "lists": dict(page_table=int32(3, 9, 0, 7, 2), page_indptr=int32(0, 3, 3, 5), seqused_k=USED),
    "shared prefixes": dict(
        page_table=TABLE[[0, 0, 2]], seqused_k=int32(11, 9, 5), prefix_groups=int32(0, 2, 3),
        prefix_lens=int32(6, 0),
    ),
    "rows": dict(cache_batch_idx=int32(4, 0, 2)),
    "padded": dict(seqused_k=int32(4, 0, 3), leftpad_k=int32(1, 0, 3)),
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)
each_packing = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


def make(kind, packed, seed=0):
    """q, k, v, the arrays that say where the keys lie, and a function of all with the other options."""
    rng = np.random.default_rng(seed)
    entries = 3 if kind == "padded" else PAGES
    shapes = (5, HQ, D) if packed else (3, 2, HQ, D), (entries, PAGE, HK, D), (entries, PAGE, HK, DV)
    where = KINDS[kind] | (dict(cu_seqlens_q=ENDS) if packed else {})
    options = dict(causal=True, scale=0.7, invariant=True, return_lse=True)
    if packed and kind in ("rows", "padded"):
        options["max_seqlen_q"] = 3
    return [rng.standard_normal(shape, np.float32) for shape in shapes], where, options


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


@each_packing
@each_kind
def test_results(kind, packed):
    tensors, where, options = make(kind, packed)
    want = fulgur.attention(*tensors, **where, **options)
    assert_equal(attention(*tensors, **where, **options), want)
    compiled = jax.jit(lambda tensors, where: attention(*tensors, **where, **options))
    assert_equal(compiled(tensors, where), want)


def test_prefixes_are_read_once():
    """The other pages of a prefix are not even read."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((5, 2, 8, 64), np.float32), rng.standard_normal((40, 16, 2, 64), np.float32)
    table = np.zeros((5, 400), np.int32)  # of room that makes it worth while
    table[:, :20] = np.arange(20)
    table[:, 20:23] = 20 + np.arange(15).reshape(5, 3)
    where = dict(page_table=table, seqused_k=320 + int32(5, 16, 30, 48, 2), causal=True)
    want = fulgur.attention(q, k, k, **where)
    table[1:, :20] = 39
    k[39] = np.nan
    prefixes = dict(prefix_groups=int32(0, 5), prefix_lens=int32(320))
    np.testing.assert_allclose(attention(q, k, k, **where, **prefixes), want, atol=1e-6)


@each_kind
@pytest.mark.parametrize("mapped", ["queries", "all"])
def test_vmap(kind, mapped):
    (q, k, v), where, options = make(kind, False)
    (q2, k2, v2), _, _ = make(kind, False, seed=1)
    of_batch = kind not in ("lists", "shared prefixes")
    turned = {name: x[::-1].copy() if of_batch else x for name, x in where.items()}
    if mapped == "queries":
        k2, v2, turned = k, v, where
        got = jax.vmap(lambda q: attention(q, k, v, **where, **options))(np.stack([q, q2]))
    else:
        both = {name: np.stack([x, turned[name]]) for name, x in where.items()}
        stacks = (np.stack(x) for x in ((q, q2), (k, k2), (v, v2)))
        got = jax.vmap(lambda tensors, where: attention(*tensors, **where, **options))(tuple(stacks), both)
    assert_equal([x[0] for x in got], fulgur.attention(q, k, v, **where, **options))
    assert_equal([x[1] for x in got], fulgur.attention(q2, k2, v2, **turned, **options))


@each_kind
def test_there_is_no_gradient(kind):
    (q, k, v), where, options = make(kind, False)
    function = partial(attention, **where, **options | dict(return_lse=False))
    for argument in range(3):
        with pytest.raises(ValueError, match="^(page_table|cache_batch_idx|leftpad_k): given where a gradient is"):
            jax.grad(lambda *x: function(*x).sum(), argument)(q, k, v)
    stopped = jax.grad(lambda *x: (function(*map(jax.lax.stop_gradient, x)) * x[0][..., :DV]).sum())
    np.testing.assert_array_equal(stopped(q, k, v)[..., :DV], function(q, k, v))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seqused_k=None), "seqused_k: not given, want the lengths of the sequences beside page_table"),
        (dict(page_table=TABLE[:2]), r"page_table: got shape \(2, 3\), want \(3, 3\)"),
        (dict(page_table=TABLE.astype(np.float32)), "page_table: got f32, want i32"),
        (dict(page_indptr=int32(0, 3, 3, 5)), "page_table: got 2 dimensions"),
        (dict(cache_batch_idx=USED), "cache_batch_idx: given beside page_table, want one of both"),
        (dict(leftpad_k=USED[:2]), "leftpad_k: got shape"),
        (dict(prefix_lens=USED), "prefix_groups: not given, want it beside prefix_lens"),
        (dict(prefix_groups=USED), "prefix_lens: not given, want it beside prefix_groups"),
        (dict(max_seqlen_k=-1), "max_seqlen_k: got -1, want >= 0"),
    ],
)
def test_wrong_arguments(change, message):
    tensors, where, options = make("pages", False)
    with pytest.raises(ValueError, match=f"^{message}"):
        jax.jit(lambda tensors: attention(*tensors, **where | options | change))(tensors)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seqused_k=int32(11, 13, 5)), "seqused_k: got 13 at 1, want 0 to 12"),
        (dict(page_table=TABLE + 9), "page_table: got 12 as page 0 of sequence 0"),
        (dict(prefix_groups=int32(0, 4), prefix_lens=int32(0)), "prefix_groups: ends with 4, want at most 3"),
    ],
)
def test_wrong_values(change, message):
    tensors, where, options = make("pages", False)
    # JAX raises ValueError where the compiled function has run before.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"^INVALID_ARGUMENT: {message}"):
        jax.block_until_ready(attention(*tensors, **where | options | change))
    attention(*tensors, **where | options)
