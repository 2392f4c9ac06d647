"""flash_attn_with_kvcache of the modules that stand in for FlashAttention's."""

import pytest

torch = pytest.importorskip("torch")
from drop_ins import assert_same, int32, make, turned  # noqa: E402

from fulgur import flash_attn as fa2  # noqa: E402
from fulgur import flash_attn_cute as fa4  # noqa: E402
from fulgur import flash_attn_interface as fa3  # noqa: E402
from fulgur.flash_attn import flash_attn_interface  # noqa: E402
from fulgur.torch import attention  # noqa: E402


class TestCaches:
    """flash_attn_with_kvcache with its own words in PyTorch, one sequence at a time."""

    PAGE, BATCH, HQ, HK, D = 4, 3, 4, 2, 16

    def caches(self, kind):
        """(k_cache, v_cache, arguments, the (entry, row) of row n of sequence b)."""
        if kind == "pages":
            k, v = make((12, self.PAGE, self.HK, self.D), (12, self.PAGE, self.HK, self.D))
            table = torch.tensor([[7, 1, 4], [0, 2, 9], [11, 3, 5]], dtype=torch.int32)
            places = lambda b, n: (table[b, n // self.PAGE], n % self.PAGE)  # noqa: E731
            return k, v, table, None, places
        k, v = make((5, 12, self.HK, self.D), (5, 12, self.HK, self.D))
        rows = int32(4, 0, 2)
        return k, v, None, rows, lambda b, n: (rows[b], n)

    @pytest.mark.parametrize("kind", ["pages", "rows"])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        "options",
        [dict(causal=True), dict(), dict(window_size=(3, 1)), dict(causal=True, softcap=2.0)],
    )
    @pytest.mark.parametrize("module", [fa2, fa3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rotation(self, module, options, interleaved, kind, dtype):
        k_cache, v_cache, table, rows, places = self.caches(kind)
        k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
        q, k, v = (
            x.to(dtype) for x in make(*((self.BATCH, 3, h, self.D) for h in (self.HQ, self.HK, self.HK)))
        )  # fmt: skip
        angles = torch.rand(20, 5) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        lengths, leftpad = int32(6, 0, 9), int32(2, 0, 5)
        before = k_cache.clone(), v_cache.clone(), q.clone()
        out, lse, *_ = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            cache_batch_idx=rows, cache_leftpad=leftpad, rotary_interleaved=interleaved,
            return_softmax_lse=True, **{"page_table" if module is fa3 else "block_table": table},
            **options,
        )  # fmt: skip
        assert torch.equal(q, before[2])
        written = set()
        for b, (old, pad) in enumerate(zip(lengths.tolist(), leftpad.tolist())):
            at = slice(old, old + 3)
            new = turned(k[b], cos[at], sin[at], interleaved)
            advance = "causal" in options or "window_size" in options
            where = at if advance else [old] * 3
            query = turned(q[b], cos[where], sin[where], interleaved).to(dtype)
            for i in range(3):
                place = places(b, old + i)
                written.add(tuple(map(int, place)))
                torch.testing.assert_close(k_cache[place], new[i].to(dtype))
                assert torch.equal(v_cache[place], v[b, i])
            keys, values = (
                torch.stack([cache[places(b, n)] for n in range(pad, old + 3)])[None]
                for cache in (k_cache, v_cache)
            )
            ours = dict(causal=options.get("causal", False), window=options.get("window_size"))
            want = attention(
                query[None], keys, values, softcap=options.get("softcap", 0.0), return_lse=True, **ours
            )
            torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), want)
        for cache, was in zip((k_cache, v_cache), before):
            same = (cache == was).flatten(2).all(-1)
            changed = {tuple(place) for place in (~same).nonzero().tolist()}
            assert changed == written

    def test_rows_of_a_page_table(self):
        k_cache, v_cache, table, rows, _ = self.caches("pages")[:3] + self.caches("rows")[3:]
        (q,) = make((self.BATCH, 2, self.HQ, self.D))
        table = torch.cat([table, table.flip(0)])
        call = lambda **where: fa3.flash_attn_with_kvcache(  # noqa: E731
            q, k_cache, v_cache, cache_seqlens=int32(5, 9, 2), causal=True, **where
        )
        got = call(page_table=table, cache_batch_idx=rows)
        assert torch.equal(got, call(page_table=table[rows.tolist()]))

    def test_places_of_a_rotation_that_is_not_given(self):
        k_cache, v_cache, _, _, _ = self.caches("rows")
        q, k, v = make((5, 1, self.HQ, self.D), (5, 1, self.HK, self.D), (5, 1, self.HK, self.D))
        call = lambda **places: fa3.flash_attn_with_kvcache(  # noqa: E731
            q, k_cache, v_cache, k, v, cache_seqlens=4, **places
        )
        assert torch.equal(call(rotary_seqlens=int32(4, 4, 4, 4, 4)), call())

    def test_lengths_in_two_places(self):
        k_cache, v_cache, _, _, _ = self.caches("rows")
        new = torch.zeros(5, self.HK, self.D)
        with pytest.raises(ValueError, match="^cu_seqlens_k_new: on meta, want cpu as cache_seqlens"):
            fa3.flash_attn_with_kvcache(
                new, k_cache, v_cache, new, new, cache_seqlens=int32(0, 0, 0), cu_seqlens_q=int32(0, 1, 2, 5),
                cu_seqlens_k_new=int32(0, 1, 2, 5).to("meta"),
            )  # fmt: skip

    def test_packed_rows(self):
        k_cache, v_cache, table, _, places = self.caches("pages")
        q, k, v = make((6, self.HQ, self.D), (5, self.HK, self.D), (5, self.HK, self.D))
        q_ends, k_ends, lengths = int32(0, 3, 4, 6), int32(0, 2, 2, 5), int32(4, 7, 1)
        angles = torch.rand(40, 8) * 6
        cos, sin, positions = angles.cos(), angles.sin(), int32(30, 2, 11)
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            page_table=table, cu_seqlens_q=q_ends, cu_seqlens_k_new=k_ends, max_seqlen_q=3,
            rotary_seqlens=positions, causal=True, return_softmax_lse=True,
        )  # fmt: skip
        for b in range(self.BATCH):
            rows, new = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
            old, first, total = int(lengths[b]), int(positions[b]), int(lengths[b]) + new.stop - new.start
            keys, values = (
                torch.stack([cache[places(b, n)] for n in range(total)])[None]
                for cache in (k_cache, v_cache)
            )
            at = slice(first, first + total - old)
            want = turned(k[new], cos[at], sin[at], True).float()
            torch.testing.assert_close(keys[0, old:], want)
            assert torch.equal(values[0, old:], v[new])
            at = slice(first, first + rows.stop - rows.start)
            query = turned(q[rows], cos[at], sin[at], True).float()
            want, want_lse = attention(query[None], keys, values, causal=True, return_lse=True)
            torch.testing.assert_close((out[rows], lse[:, rows]), (want[0], want_lse[0]))

    STEPS = {
        "no new": dict(cache_leftpad=int32(2, 0, 5)),
        "new": dict(new=True),
        "rotated": dict(new=True, rotated=True, window_size=(4, 0), softcap=2.0),
        "packed": dict(new=True, rotated=True, packed=True, rotary_seqlens=int32(8, 2, 0)),
    }

    @pytest.mark.parametrize("module, step", [
        *((module, step) for module in (fa2, fa3) for step in ("no new", "new", "rotated")), (fa3, "packed"),
    ])  # fmt: skip
    @pytest.mark.parametrize("kind, backend", [
        ("pages", "aot_eager"), ("pages", "inductor"), ("rows", "aot_eager"), ("batch", "aot_eager"),
    ])  # fmt: skip
    @pytest.mark.slow
    def test_in_one_graph(self, module, step, kind, backend):
        """The bits of eager mode, in the results and in the caches, whatever requires grad."""
        options = dict(self.STEPS[step])
        new, rotated, packed = (options.pop(name, False) for name in ("new", "rotated", "packed"))
        k_cache, v_cache, table, rows, _ = self.caches("pages" if kind == "pages" else "rows")
        if kind == "batch":
            k_cache, v_cache, rows = k_cache[:3].clone(), v_cache[:3].clone(), None
        options["page_table" if module is fa3 else "block_table"] = table
        shape = (6,) if packed else (self.BATCH, 2)
        q, k, v = make(*((*shape, h, self.D) for h in (self.HQ, self.HK, self.HK)), grad=True)
        if new:
            options.update(k=k, v=v)
        if rotated:
            angles = torch.rand(20, 5) * 6
            options.update(rotary_cos=angles.cos(), rotary_sin=angles.sin())
        if packed:
            ends = int32(0, 3, 4, 6)
            options.update(cu_seqlens_q=ends, cu_seqlens_k_new=ends, max_seqlen_q=3)

        def call(q, k_cache, v_cache, lengths, options):
            out, lse, *_ = module.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows, causal=True,
                return_softmax_lse=True, **options,
            )  # fmt: skip
            return out, lse, k_cache.sum()

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        theirs = k_cache.clone(), v_cache.clone()
        for lengths in (int32(6, 0, 9), int32(7, 3, 8)):
            before = k_cache.clone()
            want = call(q, k_cache, v_cache, lengths, options)
            got = compiled(q, *theirs, lengths, options)
            assert_same(got[:2], want[:2])
            torch.testing.assert_close(got[2], want[2])
            assert_same(theirs, (k_cache, v_cache))
            assert torch.equal(before, k_cache) != new and not got[0].requires_grad

    def test_lengths_that_are_numbers_in_one_graph(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        q, k, v = make(*((self.BATCH, 1, h, self.D) for h in (self.HQ, self.HK, self.HK)))
        theirs = k_cache.clone(), v_cache.clone()
        call = lambda *x: fa2.flash_attn_with_kvcache(*x[:-1], cache_seqlens=x[-1], block_table=table)  # noqa: E731
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for length in (4, 5, 6):
            want = call(q, k_cache, v_cache, k, v, length)
            assert torch.equal(compiled(q, *theirs, k, v, length), want)
            assert_same(theirs, (k_cache, v_cache))

    @pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(3, 1), softcap=2.0)])
    def test_pages_beside_packed_queries(self, options):
        """Of cu_seqlens_k the lengths alone count, wherever the sequences begin."""
        k_cache, v_cache, table, _, places = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        q_ends, k_ends = int32(0, 3, 3, 6), int32(40, 47, 47, 59)
        used, lengths = k_ends.diff(), (q_ends, k_ends, 3, 12)
        out, lse, _ = fa2.flash_attn_varlen_func(
            q, k_cache, v_cache, *lengths, return_attn_probs=True, block_table=table, **options
        )
        for b in (0, 2):
            rows = slice(*q_ends[b : b + 2])
            scores = torch.einsum(
                "ihd,jhd->hij", q[rows].double(),
                torch.stack([k_cache[places(b, n)] for n in range(used[b])]).double().repeat_interleave(2, 1),
            ) / self.D**0.5  # fmt: skip
            if "softcap" in options:
                scores = 2.0 * (scores / 2.0).tanh()
            left, right = (-1, 0) if "causal" in options else options.get("window_size", (-1, -1))
            distance = torch.arange(used[b]) - (torch.arange(3)[:, None] + used[b] - 3)
            hidden = (distance < -left) & (left >= 0) | (distance > right) & (right >= 0)
            scores = scores.masked_fill(hidden, -torch.inf)
            values = torch.stack([v_cache[places(b, n)] for n in range(used[b])]).double().repeat_interleave(2, 1)
            want = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
            torch.testing.assert_close(out[rows], want.float())
            torch.testing.assert_close(lse[:, rows], scores.logsumexp(-1).float())
        ours = dict(causal=options.get("causal", False), window_size=options.get("window_size", (None, None)))
        got = fa4.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q=q_ends, seqused_k=used, page_table=table, return_lse=True,
            softcap=options.get("softcap", 0.0), **ours,
        )  # fmt: skip
        assert_same(got, (out, lse))
        left, right = options.get("window_size", (-1, -1))
        got = flash_attn_interface._flash_attn_varlen_forward(
            q, k_cache, v_cache, *lengths, 0.0, self.D**-0.5, ours["causal"], left, right,
            options.get("softcap", 0.0), block_table=table,
        )  # fmt: skip
        assert_same(got[:2], (out, lse))

    def test_pages_of_a_batch(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((self.BATCH, 2, self.HQ, self.D))
        used = int32(7, 2, 12)
        out, _ = fa4.flash_attn_varlen_func(q, k_cache, v_cache, seqused_k=used, page_table=table, causal=True)
        want = fa2.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=used, block_table=table, causal=True
        )
        assert torch.equal(out, want)

    def test_pages_beside_packed_queries_under_compile(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        lengths = (int32(0, 3, 3, 6), int32(0, 7, 7, 19), 3, torch.tensor(12))
        call = lambda *x: fa2.flash_attn_varlen_func(*x, *lengths, block_table=table)  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k_cache, v_cache), call(q, k_cache, v_cache))

    def test_pages_have_no_gradient(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        sink = torch.randn(self.HQ, requires_grad=True)
        ends = dict(cu_seqlens_q=int32(0, 3, 3, 6), max_seqlen_q=3)
        paged2 = ends | dict(cu_seqlens_k=int32(0, 7, 7, 19), max_seqlen_k=12, block_table=table)
        paged4 = ends | dict(seqused_k=int32(7, 0, 12), page_table=table)
        for module, name, paged in ((fa2, "block_table", paged2), (fa4, "page_table", paged4)):

            def call(q, function=module.flash_attn_varlen_func, paged=paged, **more):
                results = function(q, k_cache, v_cache, **paged, **more)
                return results[0] if isinstance(results, tuple) else results

            want, leaf = call(q), q.clone().requires_grad_()
            got = call(leaf)
            assert torch.equal(got, want) and got.requires_grad
            with pytest.raises(NotImplementedError, match=f"^{name}: fulgur has no gradients with pages"):
                got.sum().backward()
            with torch.no_grad():
                assert not call(leaf).requires_grad
        assert call(q, learnable_sink=sink).requires_grad

    def test_errors_of_pages_beside_packed_queries(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        call, ends = fa2.flash_attn_varlen_func, (int32(0, 3, 3, 6), int32(0, 7, 7, 19))
        with pytest.raises(RuntimeError, match=r"^cu_seqlens_k.diff\(\): got 12 at 2, want 0 to 11"):
            call(q, k_cache, v_cache, *ends, 3, 11, block_table=table)
        with pytest.raises(RuntimeError, match="^block_table: got 12 as page 0 of sequence 0"):
            call(q, k_cache, v_cache, *ends, 3, 12, block_table=table + 5)

        def private(**changed):
            lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends), max_seqlen_q=3, max_seqlen_k=12)
            options = lengths | dict(dropout_p=0.0, softmax_scale=1.0, causal=False, block_table=table) | changed
            flash_attn_interface._flash_attn_varlen_forward(q, k_cache, v_cache, **options)

        with pytest.raises(RuntimeError, match="^block_table: got 12 as page 0 of sequence 0"):
            private(block_table=table + 5)
        with pytest.raises(RuntimeError, match="^seqused_k: got 13 at 1, want 0 to 12"):
            private(seqused_k=int32(7, 13, 12))
        with pytest.raises(RuntimeError, match=r"^cu_seqlens_k.diff\(\): got -7 at 1, want 0 to 12"):
            private(cu_seqlens_k=int32(0, 7, 0, 12))

    @pytest.mark.parametrize("module", [fa2, fa3])
    def test_errors(self, module):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        q, k, v = make(*((self.BATCH, 3, h, self.D) for h in (self.HQ, self.HK, self.HK)))
        paged = {"page_table" if module is fa3 else "block_table": table}
        angles = torch.rand(4, 4)
        call = module.flash_attn_with_kvcache
        with pytest.raises(ValueError, match="^rotary_cos: given without k and v"):
            call(q, k_cache, v_cache, rotary_cos=angles, rotary_sin=angles, cache_seqlens=3, **paged)
        before = k_cache.clone()
        with pytest.raises(RuntimeError, match="^rotary_cos: got 4 positions, want 6 for sequence 0"):
            call(
                q, k_cache, v_cache, k, v, rotary_cos=angles, rotary_sin=angles, cache_seqlens=3,
                **paged,
            )  # fmt: skip
        with pytest.raises(RuntimeError, match="^cache_seqlens: got 10 at 0, with 3 new rows 13"):
            call(q, k_cache, v_cache, k, v, cache_seqlens=10, **paged)
        assert torch.equal(k_cache, before)
        lengths, names = int32(3, 3, 3), ("cache_seqlens", "cache_batch_idx", "cache_leftpad", *paged)
        for name in names:
            wrong = dict(cache_seqlens=lengths) | paged | {name: torch.zeros(3, 3, dtype=torch.int64)}
            with pytest.raises(ValueError, match=f"^{name}: got int64, want int32"):
                call(q, k_cache, v_cache, **wrong)
        (table_name,) = paged
        with pytest.raises(RuntimeError, match="^cache_seqlens: got 99 at 0, want 0 to"):
            call(q, k_cache, v_cache, cache_seqlens=99, **paged)
        with pytest.raises(RuntimeError, match=f"^{table_name}: got .* as page 0 of sequence 0"):
            call(q, k_cache, v_cache, cache_seqlens=lengths, **{table_name: table + 1000})
        with pytest.raises(RuntimeError, match="^cache_leftpad: got shape .2., want"):
            call(q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=int32(0, 1))
        with pytest.raises(RuntimeError, match="^k: got shape .3, 3, 1, 16., want"):
            call(q, k_cache, v_cache, k[:, :, :1], v, cache_seqlens=lengths, **paged)
        with pytest.raises(RuntimeError, match="^v_cache: got shape .11, 4, 2, 16., want .12, 4, 2, 16."):
            call(q, k_cache, v_cache[1:], cache_seqlens=lengths, **paged)
        with pytest.raises(RuntimeError, match="^cache_batch_idx: got 12 at 2, want one of the 12 rows of k_cache"):
            call(q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=int32(0, 1, 12))
        for new in ({}, dict(k=k, v=v)):
            with pytest.raises(RuntimeError, match="^softmax_scale: got nan, want"):
                call(q, k_cache, v_cache, cache_seqlens=lengths, softmax_scale=torch.nan, **new, **paged)
