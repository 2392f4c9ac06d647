"""Shared prefixes in Python: the same results, read through the pages of a group's first sequence."""

import numpy as np
import pytest

import fulgur

PAGES, PAGE, HQ, HK, D = 40, 16, 8, 2, 64
SHARED, OWN = 20, 3  # pages of the prefix, and of each of five sequences after it


def int32(*values):
    return np.array(values, np.int32)


@pytest.fixture
def call():
    """q, k, v and the tables of a call whose sequences begin with the same pages."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((5, 2, HQ, D), np.float32)
    k, v = (rng.standard_normal((PAGES, PAGE, HK, D), np.float32) for _ in range(2))
    table = np.zeros((5, 400), np.int32)  # of room that makes it worth while
    table[:, :SHARED] = np.arange(SHARED)
    table[:, SHARED : SHARED + OWN] = SHARED + np.arange(5 * OWN).reshape(5, OWN)
    used = SHARED * PAGE + int32(5, 16, 30, 48, 2)
    return (q, k, v), dict(page_table=table, seqused_k=used, causal=True)


def test_the_same_results(call):
    arrays, where = call
    want, want_lse = fulgur.attention(*arrays, **where, return_lse=True)
    where["page_table"][1:, : SHARED - 1] = PAGES - 1  # poison
    poisoned = [x.copy() for x in arrays[1:]]
    for x in poisoned:
        x[PAGES - 1] = np.nan
    prefixes = dict(prefix_groups=int32(0, 5), prefix_lens=int32((SHARED - 1) * PAGE))
    got, lse = fulgur.attention(arrays[0], *poisoned, **where, **prefixes, return_lse=True)
    np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_groups_change_between_runs_of_a_plan(call):
    arrays, where = call
    want = fulgur.attention(*arrays, **where)
    causal = dict(causal=where.pop("causal"))
    prefixes = dict(prefix_groups=int32(0, 5, 5), prefix_lens=int32(320, 0))
    plan = fulgur.plan(*arrays, **causal, **where, **prefixes)
    details = plan.details()
    assert details["call"]["prefix_groups"] == 2
    assert details["prefix"]["kernel"] and details["rest"]["kernel"]
    for groups, lens in (((0, 5, 5), (320, 0)), ((0, 1, 5), (9, 200)), ((0, 5, 5), (0, 0))):
        prefixes["prefix_groups"][:], prefixes["prefix_lens"][:] = groups, lens
        np.testing.assert_allclose(plan.run(*arrays, **where, **prefixes), want, atol=1e-6)


def test_tensors_of_torch(call):
    torch = pytest.importorskip("torch")
    from fulgur.torch import attention

    arrays, where = call
    want = fulgur.attention(*arrays, **where)
    where |= dict(prefix_groups=int32(0, 3, 5), prefix_lens=int32(300, 320))
    tensors = [torch.from_numpy(x) for x in arrays]
    given = {name: torch.from_numpy(x) for name, x in where.items() if name != "causal"}
    for function in (attention, fulgur.attention):
        got = function(*tensors, causal=True, **given)
        np.testing.assert_allclose(np.asarray(got), want, atol=1e-6)
    with pytest.raises(ValueError, match="^q: requires grad, and caches have no gradient"):
        attention(tensors[0].requires_grad_(), *tensors[1:], causal=True, **given)


@pytest.mark.parametrize(
    "prefixes, message",
    [
        (dict(prefix_groups=int32(0, 5)), "prefix_lens: not given, want it with prefix_groups"),
        (dict(prefix_groups=int32(0, 4), prefix_lens=int32(1)), "prefix_groups: ends with 4, want 5"),
        (dict(prefix_groups=int32(0, 5), prefix_lens=int32(321)), "prefix_lens: got 321 at 0, want 0 to 320"),
    ],
)
def test_errors(call, prefixes, message):
    arrays, where = call
    with pytest.raises(ValueError, match=f"^{message}"):
        fulgur.attention(*arrays, **where, **prefixes)
    backward = dict(prefixes, backward=True)
    if "prefix_lens" in prefixes:
        with pytest.raises(ValueError, match="^prefix_groups: given with backward"):
            fulgur.explain(*arrays, **backward)
