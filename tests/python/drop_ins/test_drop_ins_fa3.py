"""The modules that stand in for FlashAttention-3 and 4: results, as fulgur's own."""

import pytest

torch = pytest.importorskip("torch")
from drop_ins import OPTIONS, assert_same, int32, make, make_qkv, turned  # noqa: E402

import fulgur  # noqa: E402
from fulgur import flash_attn_cute as fa4  # noqa: E402
from fulgur import flash_attn_interface as fa3  # noqa: E402
from fulgur.flash_attn_cute import interface as fa4_interface  # noqa: E402
from fulgur.torch import attention  # noqa: E402


class TestFlashAttention3:
    @pytest.mark.parametrize("theirs, ours", OPTIONS)
    def test_results(self, theirs, ours):
        q, k, v = make_qkv()
        want = attention(q, k, v, return_lse=True, **ours)
        hints = dict(num_splits=3, pack_gqa=True, sm_margin=8)
        assert torch.equal(fa3.flash_attn_func(q, k, v, **theirs, **hints), want[0])
        assert_same(fa3.flash_attn_func(q, k, v, return_attn_probs=True, **theirs), want)

    @pytest.mark.parametrize("theirs, ours", OPTIONS)
    @pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_float8(self, theirs, ours, codes):
        """Codes times descales of sequences and kv heads, out in bfloat16."""
        q, k, v = (x.to(codes) for x in make_qkv())
        descales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
        names = ("q_descale", "k_descale", "v_descale")
        out, lse = fa3.flash_attn_func(
            q, k, v, **dict(zip(names, descales, strict=True)), **theirs, return_attn_probs=True)  # fmt: skip
        groups = (q.shape[2] // 2, 1, 1)
        numbers = [
            x.float() * scale.repeat_interleave(group, 1)[:, None, :, None]
            for x, scale, group in zip((q, k, v), descales, groups, strict=True)
        ]
        want = attention(*numbers, return_lse=True, **ours)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), want[0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(lse, want[1])
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        recorded = fa3.flash_attn_func(*leaves, **dict(zip(names, descales, strict=True)), **theirs)
        assert torch.equal(recorded, out) and recorded.requires_grad
        with pytest.raises(NotImplementedError, match="^q: fulgur has no gradients of float8"):
            recorded.sum().backward()
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        ends = int32(0, 5, 10), int32(0, 7, 14), 5, 7
        got = fa3.flash_attn_varlen_func(*packed, *ends, **dict(zip(names, descales, strict=True)), **theirs)
        assert torch.equal(got, out.flatten(0, 1))

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
    def test_caches_of_float8(self, dtype):
        """Of queries in float8, which are multiplied by their descales, and in 16 bits."""
        q, k, v = make_qkv()
        q, k, v = q.to(dtype), k.to(torch.float8_e4m3fn), v.to(torch.float8_e5m2)
        names = ("q_descale", "k_descale", "v_descale")
        descales = {name: torch.rand(2, 2) + 0.5 for name in names[dtype == torch.bfloat16 :]}
        numbers = [
            x.float() * descales[name].repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None] if name in descales
            else x.float()
            for name, x in zip(names, (q, k, v), strict=True)
        ]  # fmt: skip
        pages = torch.tensor([[1], [0]], dtype=torch.int32)
        caches = [x.flip(0).contiguous() for x in (k, v)]
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=int32(6, 3), page_table=pages, causal=True, return_softmax_lse=True, **descales,
        )  # fmt: skip
        want = attention(*numbers, seqused_k=int32(6, 3), causal=True, return_lse=True)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), want[0], rtol=1e-2, atol=4e-3)
        torch.testing.assert_close(lse, want[1], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("rotated", [False, True])
    def test_new_rows_of_caches_of_float8(self, rotated):
        """They go to the cache as they are, or rotated, whatever its descales, which the attention takes."""
        codes = torch.float8_e4m3fn
        q, k, v = make_qkv()
        k_cache, v_cache = k.to(codes), v.to(codes)
        k_new, v_new = (torch.randn(2, 2, 2, 8).to(codes) for _ in range(2))
        angles = torch.rand(10, 4)
        cos_sin = dict(rotary_cos=angles.cos().to(codes), rotary_sin=angles.sin().to(codes)) if rotated else {}
        lengths = int32(5, 2)
        caches = [x.clone() for x in (k_cache, v_cache)]
        descales = dict(k_descale=torch.rand(2, 2) + 0.5, v_descale=torch.rand(2, 2) + 0.5)
        out = fa3.flash_attn_with_kvcache(
            q.bfloat16(), *caches, k_new, v_new, cache_seqlens=lengths, causal=True, rotary_interleaved=False,
            **descales, **cos_sin,
        )  # fmt: skip
        want_k, want_v = k_cache.float(), v_cache.float()
        turned_q = q.bfloat16().double()
        for b, length in enumerate(lengths.tolist()):
            rows = slice(length, length + 2)
            x = k_new[b].double()
            if rotated:
                at = [t.float()[length:] for t in cos_sin.values()]
                x = turned(x, *(t[:2] for t in at), False)
                turned_q[b] = turned(turned_q[b], *(t[:5] for t in at), False)
            want_k[b, rows], want_v[b, rows] = x.to(codes).float(), v_new[b].float()
        torch.testing.assert_close(caches[0].float(), want_k, rtol=0.13 if rotated else 0, atol=0.002 if rotated else 0)
        assert torch.equal(caches[1].float(), want_v)
        numbers = [
            x.double() * descale.double()[:, None, :, None]
            for x, descale in zip((caches[0].float(), want_v), descales.values(), strict=True)
        ]
        want = attention(turned_q, *numbers, seqused_k=lengths + 2, causal=True)
        torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=8e-3)

    @pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(2, 1))])
    @pytest.mark.parametrize("chunk", [1, 3, 20])
    def test_chunks(self, options, chunk):
        """Keys from the diagonal's multiple of the chunk on, and less than a chunk after it."""
        q, k, v = make_qkv(grad=True)
        out, lse = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
        i, j = torch.arange(5)[:, None] + 2, torch.arange(7)
        first = i - i % chunk
        left, right = options.get("window_size", (7, 0 if "causal" in options else 7))
        hidden = (j < first) | (j >= first + chunk) | (j < i - left) | (j > i + right)
        keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) / 8**0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
        torch.testing.assert_close((out, lse), (want, scores.logsumexp(-1)))
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), dout)
        torch.testing.assert_close(got, torch.autograd.grad(want, (q, k, v), dout))

    def test_chunks_of_packed_sequences_and_caches(self):
        q, k, v = (x[0] for x in make_qkv())
        ours = dict(causal=True, chunk=3)
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        got = fa3.flash_attn_varlen_func(q, k, v, *ends.values(), 3, 4, attention_chunk=3, causal=True)
        assert torch.equal(got, attention(q, k, v, **ends, **ours))
        (qkv,) = make((2, 5, 3, 4, 16))
        got = fa3.flash_attn_qkvpacked_func(qkv, attention_chunk=3, causal=True)
        assert torch.equal(got, attention(*qkv.unbind(2), **ours))
        q, k_cache, v_cache = make((2, 3, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8))
        where = dict(page_table=torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32))
        used, angles = int32(7, 10), torch.rand(20, 4)
        call = lambda **more: fa3.flash_attn_with_kvcache(  # noqa: E731
            q, k_cache, v_cache, cache_seqlens=used, attention_chunk=3, **where, **more
        )
        want = attention(q, k_cache, v_cache, seqused_k=used, **where, **ours)
        assert torch.equal(call(causal=True), want)
        # Chunks bound the mask: queries turn to positions of their own.
        new = make((2, 2, 2, 8), (2, 2, 2, 8))
        rotation = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
        got = call(k=new[0], v=new[1], **rotation)
        query = torch.stack([
            turned(q[b], angles[n : n + 3].cos(), angles[n : n + 3].sin(), False).float()
            for b, n in enumerate(used.tolist())
        ])  # fmt: skip
        want = attention(query, k_cache, v_cache, seqused_k=used + 2, chunk=3, **where)
        torch.testing.assert_close(got, want)

    def test_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        lengths, used = (int32(0, 2, 5), int32(0, 4, 7), 3, 4), int32(1, 3)
        got = fa3.flash_attn_varlen_func(q, k, v, *lengths, seqused_k=used, causal=True)
        ends = dict(cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
        assert torch.equal(got, attention(q, k, v, seqused_k=used, causal=True, **ends))
        # With seqused_q each sequence is computed as if it had no other queries.
        got = fa3.flash_attn_varlen_func(
            q, k, v, *lengths, seqused_q=int32(1, 2), seqused_k=used, causal=True
        )
        for row, count, key, keys in ((0, 1, 0, 1), (2, 2, 4, 3)):
            part = (q[None, row : row + count], *(x[None, key : key + keys] for x in (k, v)))
            want = attention(*part, causal=True)[0]
            torch.testing.assert_close(got[row : row + count], want, atol=1e-6, rtol=1e-6)
        assert not got[1].any() and not got[4].any()

    OPTIONS = dict(softmax_scale=0.7, window_size_left=2, window_size_right=1, softcap=3.0)

    def test_private_names(self):
        q, k, v = make_qkv(grad=True)
        ours = dict(scale=0.7, window=(2, 1), softcap=3.0)
        want = attention(q, k, v, return_lse=True, **ours)
        hints = dict(num_splits=3, pack_gqa=True, sm_margin=8)
        out, lse, *empty = fa3._flash_attn_forward(q, k, v, **self.OPTIONS, **hints)
        assert_same((out, lse), want)
        assert [x.numel() for x in empty] == [0, 0]
        given = torch.empty_like(out)
        with torch.no_grad():
            assert fa3._flash_attn_forward(q, k, v, out_=given, **self.OPTIONS)[0] is given
        assert torch.equal(given, out)
        dout = torch.randn_like(out)
        expected = torch.autograd.grad(want[0], (q, k, v), dout)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), expected)
        q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        dq, dk, dv = gradients
        fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **self.OPTIONS)
        torch.testing.assert_close(tuple(gradients), expected)
        with pytest.raises(ValueError, match="^dk: got None, want a tensor to write"):
            fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=dq, **self.OPTIONS)
        for chunk in (0, 3):
            got = fa3._flash_attn_forward(q, k, v, causal=True, attention_chunk=chunk)[0]
            assert torch.equal(got, attention(q, k, v, causal=True, chunk=chunk))

    def test_private_names_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        used = int32(1, 3), int32(3, 3)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        want = attention(*leaves, causal=True, seqused_q=used[0], seqused_k=used[1], return_lse=True, **ends)
        for longest in ({}, dict(max_seqlen_q=3, max_seqlen_k=4)):
            out, lse, *_ = fa3._flash_attn_forward(
                q, k, v, causal=True, seqused_q=used[0], seqused_k=used[1], **ends, **longest
            )
            assert_same((out, lse), want)
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            fa3._flash_attn_backward(
                out, q, k, v, out, lse, **ends, sequed_q=used[0], sequed_k=used[1], is_causal=True,
                **dict(zip(("dq", "dk", "dv"), gradients)), **longest,
            )  # fmt: skip
            expected = torch.autograd.grad(want[0], leaves, out, retain_graph=True)
            torch.testing.assert_close(tuple(gradients), expected)

    def test_private_names_of_caches(self):
        """All that flash_attn_with_kvcache does, by other names."""
        q, k, v = make((2, 3, 4, 16), (2, 3, 2, 16), (2, 3, 2, 16))
        caches = make((6, 4, 2, 16), (6, 4, 2, 16))
        theirs = [x.clone() for x in caches]
        table = torch.tensor([[0, 0, 0], [5, 0, 2], [1, 4, 3]], dtype=torch.int32)
        angles, used, rows = torch.rand(20, 4), int32(7, 5), int32(1, 2)
        names = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), page_table=table, causal=True)
        out, lse, *_ = fa3._flash_attn_forward(
            q, *caches, k, v, seqused_k=used, kv_batch_idx=rows, leftpad_k=int32(2, 0), seqlens_rotary=int32(1, 0),
            **names,
        )  # fmt: skip
        want = fa3.flash_attn_with_kvcache(
            q, *theirs, k, v, cache_seqlens=used, cache_batch_idx=rows, cache_leftpad=int32(2, 0),
            rotary_seqlens=int32(1, 0), return_softmax_lse=True, **names,
        )  # fmt: skip
        assert_same((out, lse, *caches), (*want[:2], *theirs))
        out, *_ = fa3._flash_attn_forward(q, *caches, seqused_k=used + 3, page_table=table[1:], seqused_q=int32(3, 1))
        want = attention(q, *caches, seqused_k=used + 3, page_table=table[1:], seqused_q=int32(3, 1))
        assert torch.equal(out, want) and not out[1, 1:].any()
        with pytest.raises(RuntimeError, match="^seqused_k: got 99 at 0"):
            fa3._flash_attn_forward(q, *caches, seqused_k=used + 92, page_table=table[1:])
        with pytest.raises(ValueError, match="^seqused_k: got None, want where k_new and v_new go"):
            fa3._flash_attn_forward(q, *caches, k, v, page_table=table[1:])
        with pytest.raises(RuntimeError, match="^k_new: got f64, want f32 .the dtype of k."):
            fa3._flash_attn_forward(q, *caches, k.double(), v, seqused_k=used, page_table=table[1:])
        with pytest.raises(RuntimeError, match="^leftpad_k: got 8 at 0, want 0 to 7"):
            fa3._flash_attn_forward(q, *caches, seqused_k=used, leftpad_k=int32(8, 0), page_table=table[1:])

    def test_qkv_in_one(self):
        (qkv,) = make((2, 5, 8, 16))
        want = attention(*qkv.split([4, 2, 2], 2))
        assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4), want)
        (qkv,) = make((2, 5, 3, 4, 16))
        assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv), attention(*qkv.unbind(2)))
        with pytest.raises(ValueError, match="^num_heads_q"):
            fa3.flash_attn_qkvpacked_func(qkv[:, :, 0])

    @pytest.mark.parametrize("combine", [fa3.flash_attn_combine, fa4.flash_attn_combine])
    def test_combine(self, combine):
        q, k, v = make_qkv()
        parts = [attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(3), slice(3, 7))]
        nothing = torch.full_like(parts[0][0], torch.nan), torch.full((2, 4, 5), -torch.inf)
        outs, lses = zip(*parts, nothing)
        out, lse = combine(torch.stack(outs), torch.stack(lses).mT)
        want, want_lse = attention(q, k, v, return_lse=True)
        torch.testing.assert_close((out, lse), (want, want_lse.mT))
        out, lse = combine(torch.zeros(2, 1, 1, 1, 8), torch.full((2, 1, 1, 1), -torch.inf))
        assert (out == 0).all() and (lse == -torch.inf).all()
        given = torch.empty_like(want)
        assert combine(torch.stack(outs), torch.stack(lses).mT, given)[0] is given
        assert combine(torch.stack(outs), torch.stack(lses).mT, None, torch.bfloat16)[
            0
        ].dtype == torch.bfloat16
        for scale in (0.0, -1e5, -1e6, 1e6):  # whose LSE is rounded by more than the weights may be
            ones, equal = torch.ones(3, 1, 2, 1, 8), torch.full((3, 1, 2, 1), scale)
            torch.testing.assert_close(combine(ones, equal)[0], ones[0], atol=1e-6, rtol=0)
        exact = [torch.stack([x[i].double() for x in parts]) for i in (0, 1)]
        torch.testing.assert_close(
            combine(exact[0], exact[1].mT)[0], torch.as_tensor(fulgur.merge(*exact)[0]), atol=1e-14, rtol=0
        )
        with pytest.raises(ValueError, match="^lse_partial: got shape .3, 2, 4, 5., want .3, 2, 5, 4. as out_partial"):
            combine(torch.stack(outs), torch.stack(lses))

    def test_scheduler_metadata(self):
        metadata = fa3.get_scheduler_metadata(2, 1, 16, 4, 2, 64, int32(3, 4))
        assert metadata.numel() == 0 and metadata.dtype == torch.int32


class TestFlashAttention4:
    def test_results(self):
        q, k, v = make_qkv()
        want = attention(q, k, v, causal=True, window=(2, -1), return_lse=True)
        options = dict(causal=True, window_size=(2, None))
        out, lse = fa4.flash_attn_func(q, k, v, **options)
        assert torch.equal(out, want[0]) and lse is None
        assert_same(fa4.flash_attn_func(q, k, v, return_lse=True, **options), want)

    def test_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        out, lse = fa4.flash_attn_varlen_func(q, k, v, **ends, max_seqlen_q=3, causal=True)
        assert torch.equal(out, attention(q, k, v, causal=True, **ends)) and lse is None
        q, k, v = make_qkv()
        out, _ = fa4.flash_attn_varlen_func(q, k, v, seqused_k=int32(3, 7))
        assert torch.equal(out, attention(q, k, v, seqused_k=int32(3, 7)))

    def test_used_queries(self):
        q, k, v = (x.requires_grad_() for x in make_qkv())
        used = dict(seqused_q=int32(4, 0), seqused_k=int32(3, 7))
        out, lse = fa4.flash_attn_varlen_func(q, k, v, causal=True, return_lse=True, **used)
        part = [q[:1, :4], k[:1, :3], v[:1, :3]]
        want = attention(*part, causal=True)
        torch.testing.assert_close(out[:1, :4], want, atol=1e-6, rtol=1e-6)
        assert not out[0, 4:].any() and not out[1].any() and lse[1].isneginf().all()
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), dout)
        for x, y in zip(got, torch.autograd.grad(want, part, dout[:1, :4])):
            torch.testing.assert_close(x[:1, : y.shape[1]], y, atol=1e-6, rtol=1e-6)
            assert not x[:1, y.shape[1] :].any() and not x[1].any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_learnable_sink(self, dtype):
        q, k, v = make_qkv()
        sinks = torch.randn(q.shape[2], dtype=dtype, requires_grad=True)
        out, lse = fa4.flash_attn_func(q, k, v, learnable_sink=sinks, return_lse=True)
        assert_same((out, lse), attention(q, k, v, sinks=sinks.float(), return_lse=True))
        (got,) = torch.autograd.grad(out.square().sum(), sinks)
        assert got.dtype == dtype and got.abs().min() > 0
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        q, k, v = (x[0] for x in (q, k, v))
        out, _ = fa4.flash_attn_varlen_func(q, k, v, **ends, max_seqlen_q=3, learnable_sink=sinks)
        assert torch.equal(out, attention(q, k, v, sinks=sinks.float(), **ends))

    OPTIONS = dict(softmax_scale=0.7, softcap=3.0, window_size_left=2)
    HINTS = dict(num_threads=128, pack_gqa=True)

    @pytest.mark.parametrize("sink", [False, True])
    def test_private_names(self, sink):
        q, k, v = make_qkv(grad=True)
        sinks = torch.randn(4, dtype=torch.bfloat16, requires_grad=True) if sink else None
        more = dict(self.OPTIONS, learnable_sink=sinks, **self.HINTS)
        ours = dict(scale=0.7, softcap=3.0, window=(2, -1), return_lse=True)
        want = attention(q, k, v, sinks=sinks.float() if sink else None, **ours)
        out, lse, *nothing = fa4_interface._flash_attn_fwd(q, k, v, tile_mn=(64, 64), **more)
        assert_same((out, lse), want)
        assert nothing == [None] * 3 and not out.requires_grad
        leaves = [q, k, v, *([sinks] if sink else [])]
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        expected = torch.autograd.grad(want, leaves, (dout, dlse))
        arguments = [x.detach() for x in (q, k, v)] + [out, dout, lse]
        got = fa4_interface._flash_attn_bwd(*arguments, dlse=dlse, deterministic=True, **more)
        torch.testing.assert_close(got, expected)
        given = [torch.full_like(x, torch.nan) for x in arguments[:3]]
        got = fa4_interface._flash_attn_bwd(
            *arguments, dlse=dlse, **dict(zip(("dq", "dk", "dv"), given)), **more
        )
        assert all(x is y for x, y in zip(got, given))
        torch.testing.assert_close(got, expected)

    def test_private_names_write_where_they_are_told(self):
        q, k, v = make_qkv()
        want = attention(q, k, v, causal=True, return_lse=True)
        assert fa4_interface._flash_attn_fwd(q, k, v, causal=True)[1] is None
        assert_same(fa4_interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2], want)
        given = [torch.full_like(x, torch.nan) for x in want]
        got = fa4_interface._flash_attn_fwd(q, k, v, causal=True, out=given[0], lse=given[1])
        assert got[0] is given[0] and got[1] is given[1]
        assert_same(given, want)

    def test_private_names_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        used = dict(seqused_q=int32(1, 3), seqused_k=int32(3, 3))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        want = attention(*leaves, causal=True, return_lse=True, **ends, **used)
        out, lse, *_ = fa4_interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True, **ends, **used)
        assert_same((out, lse), want)
        got = fa4_interface._flash_attn_bwd(
            q, k, v, out, out, lse, causal=True, max_seqlen_q=3, max_seqlen_k=4, **ends, **used
        )
        torch.testing.assert_close(got, torch.autograd.grad(want[0], leaves, out))

    def test_private_names_of_pages(self):
        q, k, v = make((2, 3, 4, 16), (6, 4, 2, 16), (6, 4, 2, 16))
        where = dict(page_table=torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32), seqused_k=int32(7, 12))
        out, lse, *_ = fa4_interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True, **where)
        assert_same((out, lse), attention(q, k, v, causal=True, return_lse=True, **where))
        q = q.requires_grad_()  # nothing is recorded
        assert torch.equal(fa4_interface._flash_attn_fwd(q, k, v, causal=True, **where)[0], out)

    def test_private_combine(self):
        outs, lses = torch.randn(2, 1, 3, 4, 8), torch.randn(2, 1, 3, 4)
        out, lse = torch.full((1, 3, 4, 8), torch.nan), torch.full((1, 4, 3), torch.nan)
        assert fa4_interface._flash_attn_fwd_combine(outs, lses, out, lse.mT) is None
        assert_same((out, lse.mT), fa4.flash_attn_combine(outs, lses))

    def test_scheduler_metadata(self):
        (q,) = make((5, 4, 8))
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 2, 5))
        metadata = fa4_interface.get_scheduler_metadata(3, 3, 4, 4, 8, 1, **ends)
        out, _ = fa4.flash_attn_varlen_func(q, q, q, **ends, scheduler_metadata=metadata)
        assert torch.equal(out, attention(q, q, q, **ends))
