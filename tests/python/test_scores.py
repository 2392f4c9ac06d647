"""Scores and probabilities against NumPy's formulas."""

import numpy as np
import pytest
import reference
from test_attention import CASES, DTYPES, make_case, make_dtype

import fulgur

STAGES = ("scaled", "softcap", "masked", "probabilities")


def expected(q, k, **options):
    """P of the keys and LSE of each sequence, and its score before the mask, scaled and capped."""
    exact = reference.Naive(np.float64)
    for b, (rows, keys) in enumerate(reference.sequences(q, k, **options)):
        Q, K = exact(q[rows]), reference._heads(exact(k[keys]), q.shape[-2])
        P, lse, _ = reference.probabilities(Q, K, b, exact, **options)
        scaled = options.get("scale", q.shape[-1] ** -0.5) * np.einsum("ihd,jhd->hij", Q, K)
        cap = options.get("softcap")
        yield reference.of_keys(P, options.get("sinks")), lse, scaled, cap * np.tanh(scaled / cap) if cap else scaled


def check(q, k, **options):
    got = {stage: fulgur.scores(q, k, stage=stage, **options) for stage in STAGES}
    tight = dict(rtol=1e-12, atol=1e-12) if q.dtype == np.float64 else dict(rtol=1e-5, atol=1e-5)
    for x in got.values():
        assert x.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
        assert x.shape[1] == q.shape[-2]
    for b, (P, lse, scaled, capped) in enumerate(expected(q, k, **options)):
        _, sq, sk = P.shape
        inside = (b, slice(None), slice(sq), slice(sk))
        np.testing.assert_allclose(got["scaled"][inside], scaled, **tight)
        np.testing.assert_allclose(got["softcap"][inside], capped, **tight)
        np.testing.assert_allclose(got["probabilities"][inside], P, **tight)
        with np.errstate(invalid="ignore"):
            masked = np.exp(got["masked"][inside] - lse[..., None])
        np.testing.assert_allclose(np.where(np.isneginf(lse)[..., None], 0, masked), P, **tight)
        for stage in STAGES:  # of queries and keys that do not exist
            nothing = 0 if stage == "probabilities" else -np.inf
            assert (got[stage][b, :, sq:] == nothing).all()
            assert (got[stage][b, :, :, sk:] == nothing).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_stages(name, dtype):
    (q, k, _, _), options = make_case(name, make_dtype(dtype))
    check(q, k, **options)


def test_hidden_keys_are_exact():
    """-inf where the mask hides the key, however large the scores are; what NaN a hidden key holds is not read."""
    (q, k, _, _), options = make_case("causal", np.float32)
    k[0, -1] = np.nan
    seen = np.tril(np.ones((70, 70), bool))
    masked = fulgur.scores(100 * q, k, stage="masked", **options)
    np.testing.assert_array_equal(np.isneginf(masked), np.broadcast_to(~seen, masked.shape))
    P = fulgur.scores(100 * q, k, stage="probabilities", **options)
    assert (P[..., ~seen] == 0).all() and np.isfinite(P[..., :-1, :]).all()


def test_packed_sequences():
    rng = np.random.default_rng(1)
    ends_q, ends_k = np.array([2, 7, 7, 17], np.int32), np.array([0, 9, 12, 20], np.int32)
    q, k = (rng.standard_normal((20, heads, 16), np.float32) for heads in (4, 2))
    options = dict(cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, causal=True)
    assert fulgur.scores(q, k, stage="masked", **options).shape == (3, 4, 10, 9)
    check(q, k, **options)


def test_caches():
    rng = np.random.default_rng(2)
    q, pages = rng.standard_normal((2, 3, 4, 16), np.float32), rng.standard_normal((5, 8, 2, 16), np.float32)
    table, used = np.array([[4, 0], [2, 3]], np.int32), np.array([13, 5], np.int32)
    options = dict(page_table=table, seqused_k=used, causal=True, stage="probabilities")
    whole = pages[table].reshape(2, 16, 2, 16)
    plain = fulgur.scores(q, whole, seqused_k=used, causal=True, stage="probabilities")
    np.testing.assert_array_equal(fulgur.scores(q, pages, **options), plain)
    np.testing.assert_array_equal(fulgur.scores(q, pages, max_seqlen_k=13, **options), plain[..., :13])
    # Keys count from the first one that exists.
    left = np.array([3, 0], np.int32)
    plain = fulgur.scores(q, whole, seqused_k=used, stage="masked")
    moved = fulgur.scores(q, whole, seqused_k=used, leftpad_k=left, stage="masked")
    np.testing.assert_array_equal(moved[0, ..., :10], plain[0, ..., 3:13])


@pytest.mark.parametrize(
    "rows",
    [[3], [-1, 0, 5, 5], slice(2, 9, 3), slice(None), slice(0, 0), np.array([7, 1], np.int32), np.arange(33) > 30],
)
def test_rows(rows):
    (q, k, _, _), options = make_case("full", np.float32)
    for stage in STAGES:
        whole = fulgur.scores(q, k, stage=stage, causal=True)
        np.testing.assert_array_equal(fulgur.scores(q, k, stage=stage, causal=True, rows=rows), whole[:, :, rows])


def test_threads_and_engine():
    (q, k, _, _), options = make_case("grouped heads", np.float32)
    one, two = (fulgur.scores(q, k, stage="masked", threads=n, engine="reference", **options) for n in (1, 2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(stage="raw"), ValueError, "stage: got 'raw', want one of scaled"),
        (dict(stage=None), ValueError, "stage: got None"),
        (dict(rows=[9]), ValueError, "rows: index 9"),
        (dict(rows=[0.5]), ValueError, "rows: "),
        (dict(rows=[[1]]), ValueError, "rows: got 2 dimensions"),
        (dict(k=np.zeros((2, 4, 2, 7), np.float32)), ValueError, "k: "),
        (dict(q=None), TypeError, "q: "),
        (dict(dropout_p=0.1), TypeError, "dropout_p"),
        (dict(prefix_lens=np.zeros(1, np.int32)), TypeError, "prefix_lens"),
        (dict(engine="cpu"), fulgur.Error, "no engine computes scores of f32 tensors on cpu: .*keeps no scores"),
    ],
)
def test_errors(change, error, words):
    given = dict(q=np.zeros((2, 3, 4, 8), np.float32), k=np.zeros((2, 4, 2, 8), np.float32), stage="masked")
    with pytest.raises(error, match=words):
        fulgur.scores(**{**given, **change})
