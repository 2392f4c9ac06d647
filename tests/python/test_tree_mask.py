"""Tree masks of every kind of array: a word of bits for each query over the last keys."""

import numpy as np
import pytest
import reference

import fulgur

HQ, HK, D, DV = 4, 2, 16, 24


def make(sq, sk, dtype=np.float32, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (batch, sq, HQ, D), (batch, sk, HK, D), (batch, sk, HK, DV)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v, rng.integers(-(2**63), 2**63 - 1, (batch, sq), np.int64)


def check(q, k, v, tree_mask, **options):
    out, lse = fulgur.attention(q, k, v, tree_mask=tree_mask, return_lse=True, **options)
    options["tree_mask"] = tree_mask
    exact, exact_lse = reference.attention(q, k, v, **options)
    naive, _ = reference.attention(q, k, v, precision=q.dtype, **options)
    reference.assert_close("out", out, exact, naive, 2)
    reference.assert_lse_close(lse, exact_lse)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("sq, sk", [(1, 40), (5, 5), (7, 100), (64, 64), (64, 90), (30, 8), (3, 0)])
def test_follows_the_definition(sq, sk, dtype):
    q, k, v, words = make(sq, sk, dtype)
    check(q, k, v, words)
    check(q, k, v, words, window=(20, 2), softcap=2.0)


def test_packed_sequences():
    q, k, v, words = make(60, 90, batch=1)
    lengths = dict(
        cu_seqlens_q=np.array([0, 9, 9, 60], np.int32),
        cu_seqlens_k=np.array([0, 40, 50, 90], np.int32),
    )
    check(q[0], k[0], v[0], words[0], seqused_k=np.array([31, 10, 40], np.int32), **lengths)


def test_siblings_do_not_see_each_other():
    """A token with two children that are the same token at the same place: equal rows."""
    q, k, v, _ = make(3, 10, batch=1)
    for x, at in ((q, 0), (k, 7), (v, 7)):
        x[:, at + 2] = x[:, at + 1]
    out = fulgur.attention(q, k, v, tree_mask=np.array([[0b001, 0b011, 0b101]]))
    np.testing.assert_allclose(out[:, 1], out[:, 2], rtol=1e-6, atol=1e-6)
    chain = fulgur.attention(q[:, :2], k[:, :9], v[:, :9], causal=True)
    np.testing.assert_allclose(out[:, :2], chain, rtol=1e-6, atol=1e-6)


def test_words_change_between_runs_of_a_plan():
    q, k, v, words = make(5, 40)
    plan = fulgur.plan(q, k, v, tree_mask=words)
    assert "tree_mask" in plan.details()["call"]["optional_tensors"]
    results = []
    for _ in range(3):
        results.append(plan.run(q, k, v, tree_mask=words))
        np.testing.assert_array_equal(results[-1], fulgur.attention(q, k, v, tree_mask=words))
        words *= 3
    assert (results[0] != results[1]).any() and (results[1] != results[2]).any()


def test_arrays_of_other_libraries():
    q, k, v, words = make(6, 30)
    want = fulgur.attention(q, k, v, tree_mask=words)
    torch = pytest.importorskip("torch")
    out = fulgur.attention(*map(torch.from_numpy, (q, k, v)), tree_mask=torch.from_numpy(words))
    np.testing.assert_array_equal(out.numpy(), want)
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        out = fulgur.attention(*map(jax.numpy.asarray, (q, k, v)), tree_mask=jax.numpy.asarray(words))
    np.testing.assert_array_equal(np.asarray(out), want)


def test_there_is_no_gradient():
    shape = (2, 5, 4, 8)
    with pytest.raises(ValueError, match="^tree_mask: given with backward, want None: tree masks"):
        fulgur.explain(shape, shape, shape, backward=True, tree_mask=np.zeros((2, 5), np.int64))
