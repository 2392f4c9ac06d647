"""Runs of plans on PyTorch's tensors: around Python's functions, and what they have to compute or to explain."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch_inputs import make, make_qkv  # noqa: E402

import fulgur  # noqa: E402
from fulgur import _fulgur, _plans  # noqa: E402


@pytest.fixture
def computed(monkeypatch):
    """Whether the runs since went around Python's functions, in their order."""
    found = []
    runs_of_torch = _plans._runs_of_torch

    def spied(plan):
        run = runs_of_torch(plan)
        plan._torch = None  # the next run asks again

        def spy(*arguments):
            arrays = run(*arguments)
            found.append(arrays is not None)
            return arrays

        return spy

    monkeypatch.setattr(_plans, "_runs_of_torch", spied)
    return found


def both(plan, *tensors, **given):
    """The results of both ways, which are equal; the stream of a CPU is one that Python's functions read."""
    results = plan.run(*tensors, **given), plan.run(*tensors, **given, stream=0)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in results), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride() and type(a) is type(b)
    return results[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
def test_the_same_results(dtype, lse, computed):
    q, k, v = (x.to(dtype) for x in make_qkv())
    out = both(fulgur.plan(q, k, v, causal=True, return_lse=lse), q, k, v)
    assert computed == [True, False] and isinstance(out, tuple) == lse
    want = fulgur.attention(*(x.double().numpy() for x in (q, k, v)), causal=True)
    np.testing.assert_allclose((out[0] if lse else out).double().numpy(), want, atol=2e-2)


def test_layouts(computed):
    """Results are contiguous whatever the strides of q and the dims of v are."""
    q, k, v = make((2, 4, 7, 16), (2, 9, 2, 16), (2, 9, 2, 24))
    q = q.transpose(1, 2)
    out = both(fulgur.plan(q, k, v), q, k, v)
    assert out.is_contiguous() and out.shape == (2, 7, 4, 24) and computed == [True, False]


def test_results_given(computed):
    q, k, v = make_qkv()
    plan = fulgur.plan(q, k, v, return_lse=True)
    want = plan.run(q, k, v)
    out, lse = torch.empty_like(want[0]), torch.empty_like(want[1])
    got = plan.run(q, k, v, out=out, lse=lse)
    assert got[0] is out and got[1] is lse and all(map(torch.equal, got, want)) and computed == [True, True]


def test_what_changes_from_run_to_run(computed):
    q, k, v = make_qkv()
    used = torch.tensor([9, 9], dtype=torch.int32)
    plan = fulgur.plan(q, k, v, seqused_k=used, dropout_p=0.5)
    results = []
    for seed, offset, last in (0, 0, 9), (2**64 - 1, 0, 9), (0, 7, 9), (0, 0, 3):
        used[1] = last
        results.append(both(plan, q, k, v, seqused_k=used, seed=seed, offset=offset))
    assert computed == [True, False] * 4
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize(
    "given",
    [
        {"seqused_k": np.array([9, 8], np.int32)}, {"seed": np.int64(1)},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_what_few_callers_give(given, computed):
    q, k, v = make_qkv()
    tensors = {name: x for name, x in given.items() if name == "seqused_k"}
    plan = fulgur.plan(q, k, v, dropout_p=0.5, **tensors)
    plain = {name: torch.from_numpy(x) for name, x in tensors.items()} or {"seed": 1}
    want = plan.run(q, k, v, **plain)
    assert torch.equal(plan.run(q, k, v, **given), want) and computed == [True, False]


def wrong_runs():
    q, k, v = make_qkv()
    yield "q: requires grad", (q.clone().requires_grad_(), k, v), {}
    yield "out: requires grad", (q, k, v), {"out": torch.empty_like(q).requires_grad_()}
    yield "k: is a negated view", (q, torch.complex(k, -k).conj().imag, v), {}
    yield "k: got .*as planned", (q, k[:, :5], v), {}
    yield "lse: ", (q, k, v), {"lse": torch.empty(2, 4, 7)}
    yield "seed: got -1", (q, k, v), {"seed": -1}
    yield "got an unexpected keyword argument 'causal'", (q, k, v), {"causal": True}


@pytest.mark.parametrize("words, tensors, given", list(wrong_runs()), ids=lambda x: x if isinstance(x, str) else "")
def test_errors_are_those_of_python(words, tensors, given, computed):
    plan = fulgur.plan(*make_qkv())
    with pytest.raises((ValueError, TypeError), match=words):
        plan.run(*tensors, **given)
    assert computed == [False]


def test_tangents_are_refused(computed):
    q, k, v = make_qkv()
    plan = fulgur.plan(q, k, v)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="q: has a tangent"):
            plan.run(forward_ad.make_dual(q, q), k, v)
        assert torch.equal(plan.run(q, k, v), plan.run(q, k, v))
    assert not any(computed)


def test_a_pytorch_without_the_exchange_of_dlpack():
    """The views are Python's then."""

    class Old:
        pass

    q, k, v = make_qkv()
    plan = fulgur.plan(q, k, v)
    runs = _fulgur.TorchRuns((Old,), forward_ad, plan._plan, False)
    assert runs.run(Old(), k, v, {}) is None
