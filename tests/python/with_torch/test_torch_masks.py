"""Masks aligned top-left against PyTorch's own, and sinks in the dtype of q."""

import pytest

torch = pytest.importorskip("torch")

from fulgur.torch import attention  # noqa: E402


def tensors(*shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gradients(out, inputs, dout):
    return torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize("sq, sk", [(33, 70), (70, 33), (40, 40)])
@pytest.mark.parametrize("compiled", [False, True])
def test_top_left_is_causal_of_sdpa(sq, sk, compiled):
    """PyTorch's is_causal is aligned top-left."""
    q, k, v = tensors((2, sq, 4, 16), (2, sk, 4, 16), (2, sk, 4, 16))
    ours = torch.compile(attention, backend="aot_eager") if compiled else attention
    got = ours(q, k, v, causal=True, top_left=True)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    dout = torch.randn_like(got)
    for x, y in zip(gradients(got, (q, k, v), dout), gradients(want, (q, k, v), dout)):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_top_left_of_packed_sequences():
    """One call computes what a call for each sequence does, whatever their lengths are."""
    ends_q, ends_k = torch.tensor([0, 5, 30, 30], dtype=torch.int32), torch.tensor([0, 20, 29, 33], dtype=torch.int32)
    q, k, v = tensors((30, 4, 16), (33, 4, 16), (33, 4, 16))
    out = attention(q, k, v, causal=True, top_left=True, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    for b in range(2):
        rows, keys = (slice(ends[b], ends[b + 1]) for ends in (ends_q, ends_k))
        want = attention(q[None, rows], k[None, keys], v[None, keys], causal=True, top_left=True)[0]
        torch.testing.assert_close(out[rows], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sinks_in_the_dtype_of_q(dtype):
    """They mean what their values mean in float32, and their gradient has their dtype."""
    q, k, v, sinks = tensors((2, 40, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16), (4,), dtype=dtype)
    wide = sinks.detach().float().requires_grad_()
    got, want = (attention(q, k, v, sinks=x, causal=True) for x in (sinks, wide))
    assert torch.equal(got, want)
    dout = torch.randn_like(got)
    (narrow,), (exact,) = gradients(got, (sinks,), dout), gradients(want, (wide,), dout)
    assert narrow.dtype == dtype and exact.dtype == torch.float32
    assert torch.equal(narrow, exact.to(dtype))


def test_errors():
    q = torch.zeros(1, 3, 2, 8)
    words = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="^top_left: given with a tree_mask, want a mask aligned bottom-right"):
        attention(q, q, q, top_left=True, tree_mask=words)
