"""Low-bit tensors of PyTorch: float8 and int8 with descales, in eager mode and in torch.compile."""

import pytest
import torch

import fulgur
from fulgur.torch import attention

forward_cached = torch.ops.fulgur.forward_cached.default


def codes(format, *shape, scale="head"):
    """Codes, what they are multiplied by, and the numbers that they stand for."""
    y = fulgur.quantize(torch.randn(shape), format, scale=scale)
    return y.codes, y.scale, y.dequantize()


@pytest.fixture(params=["float8", "int8 and float8 with a q of bfloat16"])
def call(request):
    torch.manual_seed(0)
    if request.param == "float8":
        (q, q_descale, q_numbers), (k, k_descale, k_numbers), (v, v_descale, v_numbers) = (
            codes("e4m3", 2, n, h, 64) for n, h in ((5, 2), (9, 2), (9, 2))
        )
        descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    else:
        q = torch.randn(2, 5, 4, 64).bfloat16()
        q_numbers = q.float()
        (k, k_descale, k_numbers), (v, v_descale, v_numbers) = (
            codes("int8", 2, 9, 2, 64, scale="token"), codes("e5m2", 2, 9, 2, 64, scale=32),
        )  # fmt: skip
        descales = dict(k_descale=k_descale, v_descale=v_descale)
    want = attention(q_numbers, k_numbers, v_numbers, causal=True, return_lse=True)
    return (q, k, v), descales, want


def test_attention_is_that_of_the_numbers(call):
    tensors, descales, (want, want_lse) = call
    for f in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        out, lse = f(*tensors, causal=True, return_lse=True, **descales)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        assert torch.allclose(out.float(), want, atol=2e-2)
        assert torch.allclose(lse, want_lse, atol=1e-2)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(attention(*tensors, causal=True, **descales), out)


def test_opcheck(call):
    tensors, descales, _ = call
    # The others multiply float8, which PyTorch does not.
    torch.library.opcheck(
        forward_cached, tensors, dict(descales, window_right=0), test_utils=("test_faketensor",)
    )  # fmt: skip


def test_score_mod(call):
    tensors, descales, _ = call
    biased = attention(*tensors, score_mod=lambda score, k: score + 0.5 * k, **descales)
    slopes = torch.full((tensors[0].shape[2],), 0.5)  # of ALiBi, which moves each row by a constant
    want = attention(*tensors, alibi_slopes=slopes, window=(-1, 0), **descales)
    last = biased[:, -1], want[:, -1]
    assert torch.allclose(last[0].float(), last[1].float(), atol=2e-2)


def test_errors(call):
    (q, k, v), descales, _ = call
    by = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="^q: requires grad, and low-bit tensors have no gradient"):
        attention(q.detach().requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match="^k_descale: got"):
        attention(q, k, v, **(descales | {"k_descale": torch.ones(3)}))
    with pytest.raises(RuntimeError, match="^k_descale: given with"):
        attention(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8), k_descale=torch.ones(1))
    with pytest.raises(ValueError, match="^k_descale: requires grad, and low-bit tensors have no gradient"):
        attention(q, k, v, **(descales | {"k_descale": by}))
