"""The module that stands in for FlashAttention-2: results, as fulgur's own."""

import pytest

torch = pytest.importorskip("torch")
from drop_ins import OPTIONS, assert_same, int32, make, make_qkv  # noqa: E402

from fulgur import flash_attn as fa2  # noqa: E402
from fulgur import flash_attn_interface as fa3  # noqa: E402
from fulgur.flash_attn import flash_attn_interface  # noqa: E402
from fulgur.torch import attention  # noqa: E402


class TestFlashAttention2:
    @pytest.mark.parametrize("theirs, ours", [*OPTIONS, (dict(alibi_slopes=torch.rand(2, 4)),) * 2])
    def test_results(self, theirs, ours):
        q, k, v = make_qkv()
        out, lse = attention(q, k, v, return_lse=True, **ours)
        assert torch.equal(fa2.flash_attn_func(q, k, v, **theirs), out)
        *got, probabilities = fa2.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
        assert_same(got, (out, lse))
        assert probabilities.shape == (0,)
        kv = torch.stack([k, v], 2)
        assert torch.equal(fa2.flash_attn_kvpacked_func(q, kv, **theirs), out)

    @pytest.mark.parametrize("theirs, ours", OPTIONS)
    def test_packed(self, theirs, ours):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        want = attention(q, k, v, **ends, **ours)
        lengths = (*ends.values(), 3, 4)
        assert torch.equal(fa2.flash_attn_varlen_func(q, k, v, *lengths, **theirs), want)
        kv = torch.stack([k, v], 1)
        assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **theirs), want)
        tensors = (*ends.values(), torch.tensor(3), torch.tensor(4))
        assert torch.equal(fa2.flash_attn_varlen_func(q, k, v, *tensors, **theirs), want)

    def test_qkv_in_one(self):
        (qkv,) = make((2, 5, 3, 4, 8), grad=True)
        out = fa2.flash_attn_qkvpacked_func(qkv, causal=True)
        (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
        parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
        want = attention(*parts, causal=True)
        assert torch.equal(out, want)
        expected = torch.stack(torch.autograd.grad(want.square().sum(), parts), 2)
        torch.testing.assert_close(gradient, expected)
        rows, ends = qkv.detach()[0], int32(0, 2, 5)
        got = fa2.flash_attn_varlen_qkvpacked_func(rows, ends, 3, causal=True)
        want = attention(*rows.unbind(1), cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
        assert torch.equal(got, want)

    def test_dropout(self):
        q, k, v = make_qkv()
        torch.manual_seed(3)
        want = attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(3)
        assert torch.equal(fa2.flash_attn_func(q, k, v, 0.5), want)

    def test_under_compile(self):
        q, k, v = make_qkv(grad=True)
        call = lambda *x: fa2.flash_attn_func(*x, causal=True, window_size=(3, 0))  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v), call(q, k, v))

    @pytest.mark.parametrize("dropout_p", [0.0, 0.5])
    def test_private_names(self, dropout_p):
        q, k, v = make_qkv(grad=True)
        torch.manual_seed(4)
        want, want_lse = attention(q, k, v, causal=True, dropout_p=dropout_p, return_lse=True)
        dout = torch.randn_like(want)
        expected = torch.autograd.grad(want, (q, k, v), dout)
        q, k, v = (x.detach() for x in (q, k, v))
        options = (dropout_p, 8**-0.5, True, -1, -1, 0.0, None)
        torch.manual_seed(4)
        out, lse, empty, rng = flash_attn_interface._flash_attn_forward(q, k, v, *options, False)
        assert_same((out, lse), (want, want_lse))
        assert empty.numel() == 0
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        flash_attn_interface._flash_attn_backward(
            dout, q, k, v, out, lse, *gradients, *options, False, rng
        )
        for a, b in zip(gradients, expected):
            torch.testing.assert_close(a, b)

    def test_private_names_draw_for_dropout_alone(self):
        """As upstream's: what is drawn later does not depend on how often they were called."""
        q, k, v = make_qkv()
        options = (0.5, False, -1, -1, 0.0, None, False)
        lengths = (int32(0, 2, 5), int32(0, 4, 7), 3, 4)
        for call in (
            lambda p: flash_attn_interface._flash_attn_forward(q, k, v, p, *options),
            lambda p: flash_attn_interface._flash_attn_varlen_forward(q[0], k[0], v[0], *lengths, p, *options),
        ):
            before = torch.get_rng_state()
            *_, rng = call(0.0)
            assert rng.shape == (2,) and rng.dtype == torch.int64
            assert torch.equal(torch.get_rng_state(), before)
            call(0.5)
            assert not torch.equal(torch.get_rng_state(), before)

    def test_private_names_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        lengths = (int32(0, 2, 5), int32(0, 4, 7), 3, 4)
        out, lse, _, rng = flash_attn_interface._flash_attn_varlen_forward(
            q, k, v, *lengths, 0.0, 0.5, False, seqused_k=int32(2, 3)
        )
        ends = dict(cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], scale=0.5)
        want = attention(q, k, v, seqused_k=int32(2, 3), return_lse=True, **ends)
        assert_same((out, lse), want)
        out, lse, _, rng = flash_attn_interface._flash_attn_varlen_forward(
            q, k, v, *lengths, 0.0, 0.5, False
        )
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        flash_attn_interface._flash_attn_varlen_backward(
            out, q, k, v, out, lse, *gradients, *lengths, 0.0, 0.5, False, -1, -1, 0.0, None, True
        )
        whole = [x.requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(attention(*whole, **ends), whole, out)
        for a, b in zip(gradients, expected):
            torch.testing.assert_close(a, b)

    def test_private_names_take_any_strides(self):
        """Gradients of sums have strides of 0, and rows may have gaps."""
        q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in make_qkv())
        assert q.stride(-1) != 1
        options = (0.0, 0.5, True, -1, -1, 0.0, None)
        out, lse, _, rng = flash_attn_interface._flash_attn_forward(q, k, v, *options, False)
        leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
        want = attention(*leaves, causal=True, scale=0.5)
        assert torch.equal(out, want)
        dout = torch.ones(()).expand(out.shape)
        expected = torch.autograd.grad(want, leaves, dout)
        for backward in (
            lambda *x: flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, *x, *options, True, rng),
            lambda dq, dk, dv: fa3._flash_attn_backward(
                dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=0.5, is_causal=True,
            ),
        ):  # fmt: skip
            gradients = [torch.empty(x.shape) for x in (q, k, v)]
            backward(*gradients)
            torch.testing.assert_close(tuple(gradients), expected)

    @pytest.mark.parametrize("module", [fa2, fa3])
    def test_cache(self, module):
        q, k_cache, v_cache = make((2, 3, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8))
        new_k, new_v = make((2, 3, 2, 8), (2, 3, 2, 8))
        lengths = int32(4, 9)
        before = k_cache.clone()
        out, lse, *rest = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, new_k, new_v, cache_seqlens=lengths, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        assert rest == ([None, None] if module is fa3 else [])
        assert lengths.tolist() == [4, 9]
        for b, n in enumerate((4, 9)):
            assert torch.equal(k_cache[b, n : n + 3], new_k[b])
            assert torch.equal(v_cache[b, n : n + 3], new_v[b])
            assert torch.equal(k_cache[b, :n], before[b, :n])
            assert torch.equal(k_cache[b, n + 3 :], before[b, n + 3 :])
            one = slice(b, b + 1), slice(0, n + 3)
            want = attention(q[b : b + 1], k_cache[one], v_cache[one], causal=True, return_lse=True)
            torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), want)
        got = module.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)
        torch.testing.assert_close(got, attention(q, k_cache[:, :7], v_cache[:, :7]))
        got = module.flash_attn_with_kvcache(q, k_cache, v_cache)
        torch.testing.assert_close(got, attention(q, k_cache, v_cache))
        with pytest.raises(ValueError, match="^cache_seqlens: got None"):
            module.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v)
        with pytest.raises(ValueError, match="^k, v: got only one"):
            module.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, cache_seqlens=7)
