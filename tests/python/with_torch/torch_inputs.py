"""Inputs of the tests of fulgur.torch, and the options that they are called with."""

import pytest

torch = pytest.importorskip("torch")

import fulgur.torch  # noqa: E402, F401  defines the operators

forward = torch.ops.fulgur.forward.default
backward = torch.ops.fulgur.backward.default


def make(*shapes, dtype=torch.float32, grad=False):
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def make_qkv(dtype=torch.float32, grad=False, heads=(4, 2), b=2):
    hq, hk = heads
    return make((b, 7, hq, 8), (b, 9, hk, 8), (b, 9, hk, 16), dtype=dtype, grad=grad)


ENDS = dict(
    cu_seqlens_q=torch.tensor([0, 3, 7], dtype=torch.int32),
    cu_seqlens_k=torch.tensor([0, 5, 9], dtype=torch.int32),
)
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(3, 1)),
    "causal window": dict(window=(3, 1), causal=True),
    "causal chunks": dict(chunk=4, causal=True),
    "softcap": dict(softcap=2.0, scale=1.5),
    "slopes": dict(alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "slopes of sequences": dict(alibi_slopes=torch.rand(2, 4)),
    "sinks": dict(sinks=torch.tensor([0.5, -torch.inf, -1, 2]), causal=True),
    "keys in use": dict(seqused_k=torch.tensor([4, 0], dtype=torch.int32)),
    "queries in use": dict(seqused_q=torch.tensor([4, 0], dtype=torch.int32), causal=True),
    "packed": ENDS,
    "packed, rows in use": ENDS
    | dict(
        seqused_q=torch.tensor([1, 3], dtype=torch.int32),
        seqused_k=torch.tensor([5, 2], dtype=torch.int32),
    ),
    "packed causal": ENDS | dict(causal=True, max_seqlen_q=4, max_seqlen_k=5, max_workspace=1 << 30),
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def inputs(options, **kind):
    q, k, v = make_qkv(**kind)
    if "cu_seqlens_q" in options:
        return [x[0].detach().requires_grad_(x.requires_grad) for x in (q, k, v)]
    return [q, k, v]


def in_numpy(options):
    return {
        name: x.numpy() if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
        if not name.startswith("max_")
    }


SINKS = torch.tensor([0.5, -0.25, -1, 2])
