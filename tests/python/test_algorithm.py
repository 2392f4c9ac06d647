"""Algorithms by name, and plans for cards that are not here."""

import numpy as np
import pytest

import fulgur


def arrays():
    rng = np.random.default_rng(7)
    return [rng.standard_normal((2, 33, 4, 16), dtype=np.float32) for _ in range(3)]


@pytest.mark.parametrize("algorithm", ["standard", "fa1", "fa2"])
def test_reference_engine_has_the_papers_algorithms(algorithm):
    q, k, v = arrays()
    want, want_lse = fulgur.attention(q, k, v, causal=True, return_lse=True)
    out, lse = fulgur.attention(q, k, v, causal=True, return_lse=True, engine="reference", algorithm=algorithm)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    dout = np.ones_like(out)
    gradients = fulgur.attention_backward(dout, q, k, v, out, lse, causal=True)
    others = fulgur.attention_backward(
        dout, q, k, v, out, lse, causal=True, engine="reference", algorithm=algorithm
    )
    for got, expected in zip(others, gradients):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_engines_refuse_algorithms_by_name():
    q, k, v = arrays()
    with pytest.raises(fulgur.Error, match="engine cpu: computes by the algorithm fa2, not by fa1"):
        fulgur.attention(q, k, v, engine="cpu", algorithm="fa1")
    with pytest.raises(fulgur.Error, match="computes by the algorithm standard, fa1, fa2, not by fa3"):
        fulgur.attention(q, k, v, engine="reference", algorithm="fa3")
    with pytest.raises(ValueError, match='algorithm: got "fa4", want one of standard, fa1, fa2, fa3'):
        fulgur.attention(q, k, v, algorithm="fa4")
    with pytest.raises(TypeError, match="algorithm: got 2, want a string"):
        fulgur.attention(q, k, v, algorithm=2)


@pytest.mark.parametrize("card", ["a100", "4090", "rtx-pro-6000", "h200"])
def test_plans_for_cards(card):
    shape = (4, 4096, 16, 128)
    plan = fulgur.plan(shape, shape, shape, dtype="bf16", causal=True, card=card)
    assert plan.details()["engine"] == "cuda" and plan.details()["estimate_us"] > 0
    assert "expects" in plan.explain()
    backward = fulgur.plan_backward(
        *[shape] * 5, (4, 16, 4096), dtype="bf16", causal=True, card=card
    )
    assert backward.details()["call"]["pass"] == "backward"
    assert "expects" in fulgur.explain(shape, shape, shape, dtype="bf16", card=card)


def test_unknown_cards():
    shape = (1, 64, 2, 64)
    with pytest.raises(ValueError, match='card: got "a1000", want one of t4'):
        fulgur.plan(shape, shape, shape, dtype="bf16", card="a1000")
    with pytest.raises(TypeError, match="card: got 3, want a string"):
        fulgur.plan(shape, shape, shape, card=3)
