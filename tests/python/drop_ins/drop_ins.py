"""Inputs and comparisons of the tests of the modules that stand in for FlashAttention's."""

import pytest

torch = pytest.importorskip("torch")



def make(*shapes, grad=False):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def make_qkv(grad=False):
    return make((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), grad=grad)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


OPTIONS = [
    ({}, {}),
    (dict(causal=True), dict(causal=True)),
    (dict(window_size=torch.tensor([2, 1])), dict(window=(2, 1))),
    (dict(softmax_scale=0.7, softcap=3.0), dict(scale=0.7, softcap=3.0)),
]


def turned(x, cos, sin, interleaved):
    """Rows (n, heads, dim), each at the position of its row of cos and sin, in float64."""
    n = cos.shape[-1]
    x, (cos, sin) = x.double(), (y.double()[:, None] for y in (cos, sin))
    pairs = x[..., : 2 * n].unflatten(-1, (n, 2) if interleaved else (2, n))
    a, b = pairs.unbind(-1 if interleaved else -2)
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2)
    return torch.cat((both.flatten(-2), x[..., 2 * n :]), -1)


def results_of(returned):
    """out, which FlashAttention-4 returns with lse."""
    return returned[0] if isinstance(returned, tuple) else returned
