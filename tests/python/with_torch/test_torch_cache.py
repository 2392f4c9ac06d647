"""Caches of K and V in fulgur.torch: the operators that read and write them, in eager mode and in
graphs, with dense attention of each sequence."""

import pytest

torch = pytest.importorskip("torch")

import fulgur  # noqa: E402
from fulgur.torch import append, append_attention, attention  # noqa: E402

forward_cached = torch.ops.fulgur.forward_cached.default
append_op = torch.ops.fulgur.append.default
append_forward = torch.ops.fulgur.append_forward.default

PAGES, PAGE, HQ, HK, D, DV = 12, 4, 4, 2, 8, 6


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


TABLE = int32([3, 9, 0], [-1, -1, -1], [7, 2, 99])
USED, LEFTPAD, ENDS = int32(11, 0, 5), int32(2, 0, 4), int32(0, 3, 3, 5)


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch.compiler.reset()


def caches(entries=PAGES, rows=PAGE):
    return torch.randn(entries, rows, HK, D), torch.randn(entries, rows, HK, DV)


# Caches by kind: the arguments that say where the keys lie, and those of sequence b.
def paged(cache, b):
    ids = TABLE[b, : -(-int(USED[b]) // PAGE)].long()
    return cache[ids].flatten(0, 1)[: USED[b]]


KINDS = {
    "pages": (dict(page_table=TABLE, seqused_k=USED), paged),
    "padded pages": (
        dict(page_table=TABLE, seqused_k=USED, leftpad_k=LEFTPAD),
        lambda cache, b: paged(cache, b)[LEFTPAD[b] :],
    ),
    "lists": (
        dict(page_table=int32(3, 9, 0, 7, 2), page_indptr=int32(0, 3, 3, 5), seqused_k=USED),
        paged,
    ),
    "rows": (dict(cache_batch_idx=int32(4, 0, 2)), lambda cache, b: cache[(4, 0, 2)[b]]),
    "padded": (
        dict(seqused_k=int32(4, 0, 3), leftpad_k=int32(1, 0, 3)),
        lambda cache, b: cache[b, (1, 0, 3)[b] : (4, 0, 3)[b]],
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_packing = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


def make(kind, packed):
    """q, k, v, options, and the rows of q and keys of each sequence."""
    where, keys = KINDS[kind]
    k, v = caches(3 if kind == "padded" else PAGES)
    options = dict(where, causal=True, scale=0.7)
    if packed:
        q = torch.randn(5, HQ, D)
        options["cu_seqlens_q"] = ENDS
        rows = [slice(*ENDS[b : b + 2]) for b in range(3)]
    else:
        q = torch.randn(3, 2, HQ, D)
        rows = range(3)
    return q, k, v, options, [(rows[b], keys(k, b), keys(v, b)) for b in range(3)]


@each_packing
@each_kind
def test_results(kind, packed):
    q, k, v, options, sequences = make(kind, packed)
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert torch.equal(attention(q, k, v, **options), out)
    assert out.shape == (*q.shape[:-1], DV)
    for rows, keys, values in sequences:
        want = attention(q[rows][None], keys[None], values[None], causal=True, scale=0.7, return_lse=True)
        got = out[rows][None], (lse[:, rows] if packed else lse[rows])[None]
        torch.testing.assert_close(got, want)


@each_packing
@each_kind
def test_in_one_graph(kind, packed):
    q, k, v, options, _ = make(kind, packed)
    call = lambda *x: attention(*x, return_lse=True, **options)  # noqa: E731
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    assert all(map(torch.equal, got, call(q, k, v)))


@each_packing
@each_kind
def test_opcheck(kind, packed):
    q, k, v, options, _ = make(kind, packed)
    names = ("cu_seqlens_q", "seqused_k", "page_table", "page_indptr", "cache_batch_idx", "leftpad_k")
    given = {name: options[name] for name in names if name in options}
    given |= dict(window_right=0, chunk=3, scale=0.7, sinks=torch.zeros(HQ))
    given["tree_mask"] = torch.full(q.shape[:-2], -1)
    if "page_table" in given:
        given |= dict(prefix_groups=int32(0, 3), prefix_lens=int32(0))
    torch.library.opcheck(forward_cached, (q, k, v), given)


@each_packing
@each_kind
def test_flops(kind, packed):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, options, sequences = make(kind, packed)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, **options)
    visible = 0
    for rows, keys, _ in sequences:
        sq, sk = len(q[rows]), len(keys)
        visible += sum(max(0, i + sk - sq + 1) for i in range(sq))
    assert counter.get_total_flops() == visible * HQ * 2 * (D + DV)


@each_packing
@each_kind
def test_flops_of_unknown_lengths(kind, packed):
    """Sequences have all the keys that there is room for, or an equal share of it."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v, options, _ = make(kind, packed)
    q, k, v = (x.to("meta") for x in (q, k, v))
    options = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, **options)
    sq, sk = 1 if packed else 2, 3 * PAGE if "pages" in kind else PAGE
    visible = 3 * sum(i + sk - sq + 1 for i in range(sq))
    assert counter.get_total_flops() == visible * HQ * 2 * (D + DV)


@each_packing
@each_kind
def test_chunks(kind, packed):
    q, k, v, options, sequences = make(kind, packed)
    out = attention(q, k, v, chunk=3, **options)
    for rows, keys, values in sequences:
        alone = attention(q[rows][None], keys[None], values[None], chunk=3, causal=True, scale=0.7)
        torch.testing.assert_close(out[rows], alone[0])


@each_packing
@each_kind
def test_sinks(kind, packed):
    q, k, v, options, sequences = make(kind, packed)
    sinks = torch.randn(HQ)
    out = attention(q, k, v, sinks=sinks, **options)
    for rows, keys, values in sequences:
        alone = attention(
            q[rows][None], keys[None], values[None], sinks=sinks, causal=True, scale=0.7
        )
        torch.testing.assert_close(out[rows], alone[0])
    with pytest.raises(ValueError, match="^sinks: requires grad, and caches have no gradient"):
        attention(q, k, v, sinks=sinks.requires_grad_(), **options)


@each_packing
@each_kind
def test_tree_masks(kind, packed):
    q, k, v, options, sequences = make(kind, packed)
    options["causal"] = False
    words = torch.randint(0, 8, q.shape[:-2])
    out = attention(q, k, v, tree_mask=words, **options)
    call = lambda *x: attention(*x, tree_mask=words, **options)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), out)
    for rows, keys, values in sequences:
        alone = attention(
            q[rows][None], keys[None], values[None], tree_mask=words[rows][None], scale=0.7
        )
        torch.testing.assert_close(out[rows], alone[0])


def test_tree_masks_without_a_cache():
    q, k, v = torch.randn(2, 3, HQ, D), torch.randn(2, 9, HK, D), torch.randn(2, 9, HK, DV)
    chain = torch.tensor([1, 3, 7]).expand(2, 3).contiguous()
    want = attention(q, k, v, causal=True, return_lse=True)
    assert all(map(torch.equal, attention(q, k, v, tree_mask=chain, return_lse=True), want))
    with torch.autocast("cpu"):
        out = attention(q, k, v, tree_mask=chain)
    assert torch.equal(out, attention(*(x.bfloat16() for x in (q, k, v)), tree_mask=chain))
    turned = k.transpose(-1, -2).contiguous().transpose(-1, -2)  # rows that are copied
    assert torch.equal(attention(q, turned, v, tree_mask=chain), want[0])
    with pytest.raises(ValueError, match="^v: requires grad, and tree masks have no gradient"):
        attention(q, k, v.requires_grad_(), tree_mask=chain)
    with pytest.raises(RuntimeError, match="^tree_mask: got i32, want i64"):
        attention(q, k, v.detach(), tree_mask=chain.int())


def test_autocast_casts_queries_alone():
    q, k, v, options, _ = make("pages", False)
    k, v = k.bfloat16(), v.bfloat16()
    with torch.autocast("cpu"):
        out = attention(q, k, v, **options)
    assert torch.equal(out, attention(q.bfloat16(), k, v, **options))
    # The cache's dtype decides, not autocast's.
    with torch.autocast("cpu"):
        out = attention(q.bfloat16(), k.float(), v.float(), **options)
    assert torch.equal(out, attention(q.bfloat16().float(), k.float(), v.float(), **options))


@pytest.mark.parametrize("with_q", [False, True])
def test_autocast_casts_new_rows_to_the_cache(with_q):
    q, rows = torch.randn(2, 1, HQ, D), [torch.randn(2, 1, HK, n) for n in (D, DV)]
    lengths = torch.tensor([3, 5], dtype=torch.int32)

    def results(*x):
        caches = [torch.zeros(2, 8, HK, n, dtype=torch.bfloat16) for n in (D, DV)]
        if with_q:
            return append_attention(x[0], *caches, *x[1:], lengths), *caches
        return append(*caches, *x[1:], lengths), *caches

    with torch.autocast("cpu"):
        got = results(q, *rows)
    want = results(*(x.bfloat16() for x in (q, *rows)))
    assert all(torch.equal(a, b) for a, b in zip(got, want) if b is not None)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused(name):
    q, k, v, options, _ = make("pages", False)
    tensors = dict(q=q, k=k, v=v)
    tensors[name].requires_grad_()
    with pytest.raises(ValueError, match=f"^{name}: requires grad, and caches have no gradient"):
        attention(**tensors, **options)
    with torch.no_grad():
        assert not attention(**tensors, **options).requires_grad


@pytest.mark.parametrize("changes, message", [
    (dict(page_table=TABLE + 5), "page_table: got 14 as page 1 of sequence 0"),
    (dict(page_table=TABLE.long()), "page_table: got i64, want i32"),
    (dict(seqused_k=None), "seqused_k: not given"),
    (dict(cache_batch_idx=int32(0, 1, 2)), "cache_batch_idx: given with page_table"),
    (dict(page_table=None, page_indptr=int32(0, 1, 2, 3)), "page_table: not given"),
    (dict(leftpad_k=int32(12, 0, 0)), "leftpad_k: got 12 at 0, want 0 to 11"),
])  # fmt: skip
def test_wrong_arguments_are_named(changes, message):
    q, k, v, options, _ = make("pages", False)
    with pytest.raises(RuntimeError, match="^" + message):
        attention(q, k, v, **options | changes)


def test_dropout_follows_the_generator():
    q, k, v, options, _ = make("pages", False)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attention(q, k, v, dropout_p=0.5, **options))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


BOTH = [(packed, rotated) for packed in (False, True) for rotated in (False, True)]


class TestAppend:
    OLD = int32(6, 1, 3)
    TABLE = int32([3, 8, 0], [1, -1, -1], [7, 2, 99])

    def arguments(self, packed, rotated):
        """Those of append but for the caches."""
        lead = (5,) if packed else (3, 2)
        cos, sin = (f(torch.rand(20, 3) * 6) for f in (torch.cos, torch.sin))
        given = (*(torch.randn(*lead, HK, d) for d in (D, DV)), self.OLD)
        options = dict(page_table=self.TABLE)
        if packed:
            options["cu_seqlens_k_new"] = ENDS
        if rotated:
            options.update(cos=cos, sin=sin, interleaved=True, causal=True, q=torch.randn(*lead, HQ, D))
            if packed:
                options["cu_seqlens_q"] = ENDS
        return given, options

    @pytest.mark.parametrize("packed, rotated", BOTH)
    def test_is_that_of_the_library(self, packed, rotated):
        given, options = self.arguments(packed, rotated)
        got, want = caches(), None
        want = [x.clone() for x in got]
        turned = append(*got, *given, **options)
        expected = fulgur.append(*want, *given, **options)
        assert all(map(torch.equal, got, want))
        assert torch.equal(turned, expected) if rotated else turned is expected is None

    @pytest.mark.parametrize("packed, rotated", BOTH)
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    @pytest.mark.slow
    def test_step_in_one_graph(self, packed, rotated, backend):
        """Rows are written before the attention after them reads."""
        def step(k_cache, v_cache, q, *given):
            turned = append(k_cache, v_cache, *given, **options)
            new = ENDS.diff() if packed else 2
            return attention(
                q if turned is None else turned, k_cache, v_cache, page_table=self.TABLE,
                seqused_k=self.OLD + new, causal=True, cu_seqlens_q=ENDS if packed else None,
            ) + k_cache.sum()  # fmt: skip

        given, options = self.arguments(packed, rotated)
        q = options.get("q", torch.randn(*given[0].shape[:-2], HQ, D))
        got = caches()
        want = [x.clone() for x in got]
        before = got[0].clone()
        out = torch.compile(step, fullgraph=True, backend=backend)(*got, q, *given)
        torch.testing.assert_close(out, step(*want, q, *given))
        assert all(map(torch.equal, got, want)) and not torch.equal(got[0], before)

    @pytest.mark.parametrize("packed, rotated", BOTH)
    def test_opcheck(self, packed, rotated):
        given, options = self.arguments(packed, rotated)
        options |= dict(window_right=0 if options.pop("causal", False) else -1, chunk=3)
        if rotated:
            options["q_out"] = torch.zeros_like(options["q"])
        torch.library.opcheck(append_op, (*caches(), *given), options)

    def test_other_places_and_positions(self):
        (k, v, old), options = self.arguments(False, True)
        del options["page_table"]
        rows = dict(cache_batch_idx=int32(5, 0, 3), rotary_seqlens=int32(9, 2, 11))
        lists = dict(page_table=int32(3, 9, 0, 7, 2), page_indptr=int32(0, 2, 3, 5))
        for where, shape in ((rows, (6, 9)), (lists, (PAGES, PAGE))):
            got = caches(*shape)
            want = [x.clone() for x in got]
            mine = options["q"].clone()
            result = append(*got, k, v, old, **where, **options | dict(q=mine, q_out=mine, window=(2, -1)))
            expected = fulgur.append(*want, k, v, old, **where, **options)
            assert result is mine and torch.equal(mine, expected)
            assert all(map(torch.equal, got, want))

    def test_strides(self):
        (k, v, old), options = self.arguments(False, True)
        got, want = caches(), caches()
        for x, y in zip(got, want):
            x.copy_(y)
        columns = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (k, v, options["q"])]
        assert columns[0].stride(-1) != 1
        turned = append(*got, *columns[:2], old, **options | dict(q=columns[2]))
        assert torch.equal(turned, append(*want, k, v, old, **options)) and turned.is_contiguous()
        assert all(map(torch.equal, got, want))

    @pytest.mark.parametrize("name", ["k_cache", "v_cache", "k_new", "v_new", "q"])
    def test_gradients_are_refused(self, name):
        (k, v, old), options = self.arguments(False, True)
        tensors = dict(zip(("k_cache", "v_cache"), caches()), k_new=k, v_new=v, q=options.pop("q"))
        tensors[name].requires_grad_()
        with pytest.raises(ValueError, match=f"^{name}: requires grad"):
            append(cache_seqlens=old, **tensors, **options)
        with torch.no_grad():
            append(cache_seqlens=old, **tensors, **options)

    @pytest.mark.parametrize("changes, message", [
        (dict(page_table=int32([3, 12], [1, 1], [7, 2])), "page_table: got 12 as page 1 of sequence 0"),
        (dict(cos=None), "cos: not given"),
        (dict(q_out=torch.zeros(3, 2, HQ, D + 1)), "q_out: got shape"),
        (dict(q=None, q_out=torch.zeros(3, 2, HQ, D)), "q: not given, want what goes to q_out"),
        (dict(rotary_seqlens=int32(19, 0, 0)), "cos: got 20 positions, want 21"),
    ])  # fmt: skip
    def test_wrong_arguments_are_named(self, changes, message):
        given, options = self.arguments(False, True)
        tensors = caches()
        before = [x.clone() for x in tensors]
        with pytest.raises(RuntimeError, match="^" + message):
            append(*tensors, *given, **options | changes)
        assert all(map(torch.equal, tensors, before))

    @pytest.mark.parametrize("name", ["v_cache", "k_new", "cache_seqlens", "cos"])
    def test_one_tensor_on_meta(self, name):
        """Nothing would be written."""
        (k, v, old), options = self.arguments(False, True)
        tensors = dict(zip(("k_cache", "v_cache"), caches()), k_new=k, v_new=v, cache_seqlens=old, **options)
        tensors[name] = tensors[name].to("meta")
        with pytest.raises(ValueError, match=f"^{name}: got a tensor on meta, want cpu as k_cache"):
            append(**tensors)

    def call(self, packed, rotated):
        """Arguments of append_attention but for the caches: q, rows and lengths, and options."""
        given, options = self.arguments(packed, rotated)
        q = options.pop("q", torch.randn(*given[0].shape[:-2], HQ, D))
        options |= dict(causal=True, sinks=torch.randn(HQ))
        if packed:
            options["cu_seqlens_q"] = ENDS
        return q, given, options

    def test_a_cache_without_rows_is_named(self):
        q, (k, v, old), options = self.call(False, False)
        k_cache, _ = caches()
        with pytest.raises(RuntimeError, match=r"^v_cache: got f32 \(2, 3\), want \(batch, seqlen, heads, dim\)"):
            append_attention(q, k_cache, torch.zeros(2, 3), k, v, old, **options)

    @pytest.mark.parametrize("packed, rotated", BOTH)
    def test_with_attention(self, packed, rotated):
        q, given, options = self.call(packed, rotated)
        got, before = caches(), q.clone()
        want = [x.clone() for x in got]
        results = append_attention(q, *got, *given, return_lse=True, **options)
        expected = fulgur.append_attention(q, *want, *given, return_lse=True, **options)
        assert all(map(torch.equal, results, expected)) and all(map(torch.equal, got, want))
        assert torch.equal(q, before)

    @pytest.mark.parametrize("packed, rotated", BOTH)
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    @pytest.mark.slow
    def test_with_attention_in_one_graph(self, packed, rotated, backend):
        def step(k_cache, v_cache, q, *given):
            return append_attention(q, k_cache, v_cache, *given, **options) + k_cache.sum()

        q, given, options = self.call(packed, rotated)
        got = caches()
        want = [x.clone() for x in got]
        out = torch.compile(step, fullgraph=True, backend=backend)(*got, q, *given)
        torch.testing.assert_close(out, step(*want, q, *given))
        assert all(map(torch.equal, got, want))

    @pytest.mark.parametrize("packed, rotated", BOTH)
    @pytest.mark.slow
    def test_opcheck_with_attention(self, packed, rotated):
        q, given, options = self.call(packed, rotated)
        options["window_right"] = 0 if options.pop("causal") else -1
        torch.library.opcheck(append_forward, (q, *caches(), *given), options)

    def test_flops_with_attention(self):
        from torch.utils.flop_counter import FlopCounterMode

        q, given, options = self.call(False, True)
        with FlopCounterMode(display=False) as counter:
            append_attention(q, *caches(), *given, **options)
        visible = sum(2 * (int(old) + 2) - 1 for old in self.OLD)  # of two queries
        assert counter.get_total_flops() == visible * HQ * 2 * (D + DV)

    @pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k_new", "v_new", "sinks"])
    def test_gradients_are_refused_with_attention(self, name):
        q, (k, v, old), options = self.call(False, True)
        tensors = dict(zip(("k_cache", "v_cache"), caches()), q=q, k_new=k, v_new=v)
        tensors["sinks"] = options.pop("sinks")
        tensors[name].requires_grad_()
        with pytest.raises(ValueError, match=f"^{name}: requires grad"):
            append_attention(cache_seqlens=old, **tensors, **options)
        with torch.no_grad():
            append_attention(cache_seqlens=old, **tensors, **options)

    def test_wrong_arguments_with_attention(self):
        q, given, options = self.call(False, True)
        tensors = caches()
        before = [x.clone() for x in tensors]
        for changes, message in (
            (dict(page_table=int32([3, 12], [1, 1], [7, 2])), "page_table: got 12 as page 1"),
            (dict(leftpad_k=int32(9, 0, 0)), "leftpad_k: got 9 at 0, want 0 to 8"),
            (dict(cos=None), "cos: not given"),
        ):
            with pytest.raises(RuntimeError, match="^" + message):
                append_attention(q, *tensors, *given, **options | changes)
        assert all(map(torch.equal, tensors, before))

    @pytest.mark.parametrize("name", ["k_new", "v_new", "q"])
    def test_what_is_no_tensor(self, name):
        q, (k, v, old), options = self.call(False, True)
        call = dict(q=q, k_new=k, v_new=v) | {name: old.numpy()}
        for function in (append, append_attention):
            options.pop("sinks", None)
            with pytest.raises(TypeError, match=f"^{name}: got ndarray, want a tensor"):
                function(k_cache=caches()[0], v_cache=caches()[1], cache_seqlens=old, **options, **call)

    def test_tangents_are_refused(self):
        from torch.autograd import forward_ad

        q, given, options = self.call(False, True)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="^q: has a tangent, and caches have"):
            append_attention(forward_ad.make_dual(q, q), *caches(), *given, **options)
