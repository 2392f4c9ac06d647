"""What PyTorch builds on the operators of fulgur.torch: graphs, torch.func, opcheck, counted flops."""

import contextlib
import itertools

import numpy as np
import pytest
from numpy.testing import assert_allclose

torch = pytest.importorskip("torch")

from torch_inputs import ENDS, OPTIONS, SINKS, backward, each_option, forward, inputs, make, make_qkv  # noqa: E402

import fulgur  # noqa: E402
from fulgur.flash_attn import flash_attn_varlen_func  # noqa: E402
from fulgur.torch import attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_torch")


class TestCompile:
    @each_option
    @pytest.mark.slow
    def test_one_graph(self, options):
        q, k, v = inputs(options, grad=True)
        call = lambda *x: attention(*x, return_lse=True, **options)  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        out, want = compiled(q, k, v), call(q, k, v)
        assert all(map(torch.equal, out, want))
        results = [torch.randn_like(x) for x in out]
        for a, b in zip(*(torch.autograd.grad(x, (q, k, v), results) for x in (out, want))):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("packed", [False, True])
    def test_a_tensor_that_is_taken_twice(self, packed):
        starts = {"cu_seqlens_q": torch.tensor([0, 3, 7], dtype=torch.int32)} if packed else {}

        def call(x, starts):
            packed = starts | {"cu_seqlens_k": x for x in starts.values()}
            return attention(x, x, x, causal=True, **packed)

        x = torch.randn(*(() if packed else (2,)), 7, 2, 8, requires_grad=True)
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(x, starts)
        want = call(x, starts)
        assert torch.equal(out, want)
        dout = torch.randn_like(out)
        got, expected = (torch.autograd.grad(y, x, dout)[0] for y in (out, want))
        assert_allclose(got, expected, atol=1e-6)

    def test_numbers_that_the_graph_does_not_know(self):
        """As all are under dynamic=True, and those that changed."""
        (q,) = make((2, 7, 4, 8), grad=True)

        def call(q, scale, softcap, left):
            return attention(q, q, q, scale=scale, softcap=softcap, window=(left, 0))

        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
        for numbers in ((0.5, 2.0, 3), (0.25, 4.0, 2)):
            out, want = compiled(q, *numbers), call(q, *numbers)
            assert torch.equal(out, want)
            assert_allclose(*(torch.autograd.grad(x.sum(), q)[0] for x in (out, want)), atol=1e-6)

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_longest_lengths_that_are_computed(self, as_tensor):
        def call(q, k, v, starts):
            longest = starts.diff().max()
            return flash_attn_varlen_func(q, k, v, starts, starts, *[longest if as_tensor else longest.item()] * 2)

        starts = torch.tensor([0, 3, 7], dtype=torch.int32)
        tensors = make(*[(7, 2, 8)] * 3, grad=True)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            out = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors, starts)
        want = call(*tensors, starts)
        assert torch.equal(out, want)
        for a, b in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (out, want))):
            assert torch.equal(a, b)

    @pytest.mark.slow
    def test_inductor(self):
        """With work of the compiler's own around the operator."""
        def call(q, k, v):
            return attention(q * 2, k + 1, v, causal=True).sin()

        q, k, v = make_qkv(grad=True)
        out, want = torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v)
        assert_allclose(out.detach(), want.detach(), atol=1e-6)
        for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want))):
            assert_allclose(a, b, atol=1e-5)

    def test_dropout_under_autocast(self):
        def call(q, k, v):
            with torch.autocast("cpu"):
                return attention(q, k, v, dropout_p=0.5)

        q, k, v = make_qkv(grad=True)
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v))

    def test_lengths_that_change_compile_once_more(self):
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph

        compiled = torch.compile(attention, fullgraph=True, backend=backend)
        for length in (5, 9, 17, 33):
            q, k, v = make(*[(2, length, 2, 8)] * 3)
            assert torch.equal(compiled(q, k, v), attention(q, k, v))
        assert len(graphs) == 2

    def test_export(self):
        class Model(torch.nn.Module):
            def forward(self, q, k, v):
                return attention(q, k, v, causal=True)

        q, k, v = make_qkv()
        length = torch.export.Dim("length", min=2, max=64)
        exported = torch.export.export(
            Model(), (q, k, v), dynamic_shapes=({1: length}, {1: length + 2}, {1: length + 2})
        )
        assert "fulgur.forward" in str(exported.graph)
        q, k, v = make((2, 20, 4, 8), (2, 22, 2, 8), (2, 22, 2, 16))
        assert torch.equal(exported.module()(q, k, v), attention(q, k, v, causal=True))

    def test_meta(self):
        q, k, v = (x.to("meta") for x in make_qkv())
        out, lse = attention(q, k, v, return_lse=True)
        assert out.is_meta and out.shape == (2, 7, 4, 16) and lse.shape == (2, 4, 7)


class TestOpcheck:
    def arguments(self, options):
        """q, k and v, and what the operators take besides."""
        given = {name: x for name, x in options.items() if name not in ("causal", "window")}
        if "window" in options:
            given["window_left"], given["window_right"] = options["window"]
        if "cu_seqlens_q" in options:
            given |= dict(max_seqlen_q=4, max_seqlen_k=5)
        return inputs(options), given

    @each_option
    def test_forward(self, options):
        tensors, given = self.arguments(options)
        torch.library.opcheck(forward, tensors, given)

    @each_option
    @pytest.mark.slow
    def test_backward(self, options):
        tensors, given = self.arguments(options)
        out, lse = forward(*tensors, **given)
        dout = torch.randn_like(out)
        for dlse in (None, torch.randn_like(lse)):
            more = dict(dlse=dlse, deterministic=True)
            torch.library.opcheck(backward, (dout, *tensors, out, lse), given | more)

    @each_option
    @pytest.mark.slow
    def test_results_where_the_caller_wants_them(self, options):
        tensors, given = self.arguments(options)
        want = forward(*tensors, **given)
        results = [torch.empty_like(x) for x in want]
        torch.ops.fulgur.forward_into(*tensors, *results, **given)
        assert all(map(torch.equal, results, want))
        torch.library.opcheck(torch.ops.fulgur.forward_into, (*tensors, *results), given)
        saved = (torch.randn_like(want[0]), *tensors, *want)
        *want, dsinks, _ = backward(*saved, **given)
        wider = [torch.full((*x.shape[:-1], x.shape[-1] + 8), torch.nan) for x in want]
        results = [x[..., :-8] for x in wider]
        if "sinks" in options:
            given["dsinks"] = torch.empty(4)
        torch.ops.fulgur.backward_into(*saved, *results, **given)
        assert all(map(torch.equal, results, want))
        assert "sinks" not in options or torch.equal(given["dsinks"], dsinks)
        assert all(x[..., -8:].isnan().all() for x in wider)
        torch.library.opcheck(torch.ops.fulgur.backward_into, (*saved, *results), given)

    def test_dropout(self):
        tensors = [x.bfloat16() for x in make_qkv()]
        given = dict(rng_state=torch.tensor([1, 2]), dropout_p=0.5, invariant=True)
        torch.library.opcheck(forward, tensors, given)

    def test_positional(self):
        """Every argument in the place that the schema says, with defaults and without."""
        q, k, v = make_qkv()
        used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in ([4, 7], [9, 3]))
        shared = dict(
            sinks=SINKS, seqused_q=used_q, seqused_k=used_k, alibi_slopes=torch.rand(4), chunk=4, scale=0.7,
            softcap=2.0, dropout_p=0.3, rng_state=torch.tensor([1, 2]), invariant=True, max_workspace=1 << 30,
            deterministic=True,
        )  # fmt: skip

        def by_position(op, **given):
            given |= shared | dict(window_left=5, window_right=0)
            arguments = op._schema.arguments
            assert given.keys() <= {x.name for x in arguments}
            return op(*(given.get(x.name, x.default_value) for x in arguments))

        out, lse = by_position(forward, q=q, k=k, v=v)
        want = fulgur.attention(q, k, v, return_lse=True, window=(5, 0), **shared)
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        got = by_position(backward, dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse)
        expected = fulgur.attention_backward(dout, q, k, v, out, lse, dlse=dlse, window=(5, 0), **shared)
        assert all(map(torch.equal, got, expected))


class TestFunc:
    DIMS = [(0, 0, 0), (1, 0, None), (None, None, 2), (0, None, None)]

    def batched(self, dims, size=3, **kind):
        tensors = make_qkv(**kind)
        return [
            x if dim is None else torch.stack([x * (i + 1) for i in range(size)], dim)
            for x, dim in zip(tensors, dims)
        ]

    @pytest.mark.parametrize("dims", DIMS)
    @pytest.mark.parametrize(
        "name",
        ["causal", "slopes", "slopes of sequences", "sinks", "keys in use", "queries in use"],
    )
    def test_vmap(self, dims, name):
        options, tensors = OPTIONS[name], self.batched(dims)
        got = torch.vmap(lambda *x: attention(*x, **options), in_dims=dims)(*tensors)
        for i in range(3):
            part = [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]
            assert torch.equal(got[i], attention(*part, **options))

    @pytest.mark.parametrize("name", ["slopes", "sinks", "seqused_q", "seqused_k"])
    def test_vmap_of_one_sequence_of_one_head(self, name):
        """What is not mapped has one element, and is repeated."""
        q, k, v = make((3, 1, 7, 1, 8), (1, 9, 1, 8), (1, 9, 1, 16))
        options = {
            "slopes": dict(alibi_slopes=torch.ones(1), sinks=torch.ones(1)),
            "sinks": dict(sinks=torch.ones(1)),
        }.get(name, {name: torch.tensor([5], dtype=torch.int32)})
        got = torch.vmap(lambda q: attention(q, k, v, **options))(q)
        for i in range(3):
            assert torch.equal(got[i], attention(q[i], k, v, **options))

    def test_vmap_over_slopes_and_lengths(self):
        q, k, v = make_qkv()
        slopes, used_k = torch.rand(3, 4), torch.randint(0, 10, (3, 2), dtype=torch.int32)
        used_q = torch.randint(0, 8, (3, 2), dtype=torch.int32)
        call = lambda s, m, n: attention(q, k, v, alibi_slopes=s, seqused_q=m, seqused_k=n)  # noqa: E731
        got = torch.vmap(call)(slopes, used_q, used_k)
        for i in range(3):
            assert torch.equal(got[i], call(slopes[i], used_q[i], used_k[i]))

    def test_vmap_over_the_last_dimension_of_slopes(self):
        q, k, v = make_qkv(b=1)
        slopes, used_k = torch.rand(4, 3), torch.randint(0, 10, (1, 3), dtype=torch.int32)
        call = lambda s, n: attention(q, k, v, alibi_slopes=s, seqused_k=n)  # noqa: E731
        got = torch.vmap(call, in_dims=1)(slopes, used_k)
        for i in range(3):
            assert torch.equal(got[i], call(slopes[:, i].contiguous(), used_k[:, i].contiguous()))

    @pytest.mark.parametrize("slopes", [None, torch.rand(4), torch.rand(2, 4)])
    def test_vmap_over_sinks(self, slopes):
        q, k, v = make_qkv()
        sinks = torch.randn(4, 3)
        call = lambda s, q: attention(q, k, v, sinks=s, alibi_slopes=slopes, return_lse=True)  # noqa: E731
        got = torch.vmap(call, in_dims=(1, None))(sinks, q)
        for i in range(3):
            assert all(torch.equal(x[i], y) for x, y in zip(got, call(sinks[:, i].contiguous(), q)))

    @pytest.mark.parametrize("dim", [None, 0])
    def test_gradients_of_sinks_of_samples(self, dim):
        q, k, v = self.batched((0, None, 1))
        sinks = SINKS if dim is None else torch.stack([SINKS, 2 * SINKS, -SINKS])
        loss = lambda s, q, v: attention(q, k, v, sinks=s, causal=True).square().sum()  # noqa: E731
        gradients = torch.func.grad(loss, (0, 1, 2))
        got = torch.vmap(gradients, in_dims=(dim, 0, 1))(sinks, q, v)
        for i in range(3):
            one = gradients(sinks if dim is None else sinks[i], q[i], v[:, i])
            for a, b in zip(got, one):
                assert_allclose(a[i], b, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
    @pytest.mark.parametrize("dim", [None, 0, 2, 4])
    @pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 1, 7, 9), (2, 1, 1, 9), (1, 4, 7, 1)])
    def test_biases(self, shape, dim, sinks):
        """Results, gradients of samples, and those outside of vmap."""
        q, k, v = self.batched((0, None, 1))
        each = [torch.randn(shape) for _ in range(3)] if dim is not None else [torch.randn(shape)] * 3
        bias = torch.stack(each, dim) if dim is not None else each[0]
        call = lambda b, q, v: attention(q, k, v, bias=b, sinks=sinks, causal=True)  # noqa: E731
        loss = lambda *x: call(*x).square().sum()  # noqa: E731
        dims = (dim, 0, 1)
        got = torch.vmap(call, in_dims=dims)(bias, q, v)
        gradients = torch.vmap(torch.func.grad(loss, (0, 1, 2)), in_dims=dims)(bias, q, v)
        outside = torch.func.grad(lambda b: torch.vmap(loss, in_dims=dims)(b, q, v).sum())(bias)
        wanted = [torch.func.grad(loss, (0, 1, 2))(each[i], q[i], v[:, i]) for i in range(3)]
        for i in range(3):
            assert_allclose(got[i], call(each[i], q[i], v[:, i]), atol=1e-6)
            for a, b in zip(gradients, wanted[i]):
                assert_allclose(a[i], b, rtol=1e-4, atol=1e-4)
        dbiases = [x[0] for x in wanted]
        want = sum(dbiases) if dim is None else torch.stack(dbiases, dim)
        assert_allclose(outside, want, rtol=1e-4, atol=1e-4)

    def test_biases_of_bools(self):
        q, k, v = make_qkv()
        seen = torch.rand(3, 1, 1, 7, 9) < 0.7
        got = torch.vmap(lambda m: attention(q, k, v, bias=m))(seen)
        for i in range(3):
            assert torch.equal(got[i], attention(q, k, v, bias=seen[i]))

    @pytest.mark.parametrize(
        "options, name",
        [
            (dict(dropout_p=0.5), "dropout_p"),
            (dict(seqused_q=True), "seqused_q, mapped"),
            (dict(seqused_k=True), "seqused_k, mapped"),
        ],
    )
    def test_what_sinks_do_not_go_with(self, options, name):
        q, k, v = make_qkv()
        used = torch.tensor([[4, 0], [7, 7]], dtype=torch.int32)

        def call(q, used):
            given = {name: used if x is True else x for name, x in options.items()}
            return attention(q, k, v, sinks=SINKS, **given)

        with pytest.raises(NotImplementedError, match=f"^{name}: with sinks under vmap"):
            torch.vmap(call, randomness="different")(torch.stack([q, q]), used)

    def test_grad(self):
        q, k, v = make_qkv(grad=True)
        loss = lambda *x: attention(*x, causal=True).square().sum()  # noqa: E731
        got = torch.func.grad(loss, (0, 1, 2))(*(x.detach() for x in (q, k, v)))
        for a, b in zip(got, torch.autograd.grad(loss(q, k, v), (q, k, v))):
            assert_allclose(a, b, atol=1e-6)

    @pytest.mark.parametrize("dims", DIMS)
    def test_gradients_of_samples(self, dims):
        tensors = self.batched(dims)
        def loss(*x):
            out, lse = attention(*x, return_lse=True)
            return out.square().sum() + lse.sum()

        gradients = torch.func.grad(loss, (0, 1, 2))
        got = torch.vmap(gradients, in_dims=dims)(*tensors)
        for i in range(3):
            part = [x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]
            for a, b in zip(got, gradients(*part)):
                assert_allclose(a[i], b, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("dims", DIMS)
    @pytest.mark.parametrize("name", ["causal", "sinks"])
    @pytest.mark.parametrize("by", ["backward", "torch.func.grad"])
    def test_gradients_outside_of_vmap(self, dims, name, by):
        tensors = self.batched(dims)

        def loss(*x, vmap):
            call = lambda *x: attention(*x, **OPTIONS[name])  # noqa: E731
            return vmap(call, in_dims=dims)(*x).sin().sum()

        def one_by_one(call, in_dims):
            def calls(*x):
                each = [[y] * 3 if dim is None else y.unbind(dim) for y, dim in zip(x, in_dims)]
                return torch.stack([call(*one) for one in zip(*each)])

            return calls

        if by == "backward":
            leaves = [x.requires_grad_() for x in tensors]
            got = torch.autograd.grad(loss(*leaves, vmap=torch.vmap), leaves)
        else:
            got = torch.func.grad(lambda *x: loss(*x, vmap=torch.vmap), (0, 1, 2))(*tensors)
        leaves = [x.detach().requires_grad_() for x in tensors]
        for a, b in zip(got, torch.autograd.grad(loss(*leaves, vmap=one_by_one), leaves)):
            assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_gradients_outside_of_vmap_are_not_lost_beside_tree_masks(self):
        q, k, v = make(*[(2, 4, 2, 8)] * 3)
        tree_mask = torch.full((2, 4), 15)
        call = torch.vmap(lambda q: attention(q, k, v, tree_mask=tree_mask))
        assert torch.equal(call(torch.stack([q, q]))[1], attention(q, k, v, tree_mask=tree_mask))
        with pytest.raises(ValueError, match="^q: requires grad, and tree masks have no gradient"):
            call(torch.stack([q, q]).requires_grad_())

    def test_gradients_outside_of_vmap_are_not_lost_in_a_graph(self):
        q, k, v = make_qkv()
        compiled = torch.compile(torch.vmap(lambda q: attention(q, k, v)), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(torch.stack([q, q]))[1], attention(q, k, v))
        with pytest.raises(Exception, match="q: requires grad outside of vmap"):
            compiled(torch.stack([q, q]).requires_grad_())

    @pytest.mark.parametrize("name", ["q", "k", "v", None])
    def test_dropout(self, name):
        """What is mapped, if anything, makes no difference."""
        given = dict(zip("qkv", make_qkv()))
        x = given.get(name, given["q"])

        def call(x):
            return attention(**given | ({} if name is None else {name: x}), dropout_p=0.5)

        out = torch.vmap(call, randomness="different")(torch.stack([x, x]))
        assert not torch.equal(out[0], out[1])
        with pytest.raises(RuntimeError, match=r"^dropout_p: vmap\(randomness='error'\)"):
            torch.vmap(call)(torch.stack([x, x]))
        if name is None:
            out = torch.vmap(call, randomness="same")(torch.stack([x, x]))
            assert torch.equal(out[0], out[1])
        else:
            with pytest.raises(NotImplementedError, match=r"^dropout_p: vmap\(randomness='same'\)"):
                torch.vmap(call, randomness="same")(torch.stack([x, x]))

    def test_dropout_of_nested_calls(self):
        q, k, v = make_qkv()
        x = torch.stack([q, q])
        call = lambda q: attention(q, k, v, dropout_p=0.5)  # noqa: E731
        inner = torch.vmap(call, randomness="different")
        flat = torch.vmap(inner, randomness="different")(torch.stack([x, x])).flatten(0, 1)
        assert len({tuple(each.flatten().tolist()) for each in flat}) == 4

    def test_dropout_is_compiled(self):
        q, k, v = make_qkv()
        call = torch.vmap(lambda k: attention(q, k, v, dropout_p=0.5), randomness="different")
        results = []
        for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(3)
            results.append(function(torch.stack([k, k])))
        assert torch.equal(*results)

    def test_packed_sequences_are_refused(self):
        q, k, v = inputs(ENDS)
        with pytest.raises(NotImplementedError, match="^cu_seqlens_q: packed sequences under vmap"):
            torch.vmap(lambda q: attention(q, k, v, **ENDS))(torch.stack([q, q]))


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    def count(options):
        q, k, v = inputs(options, grad=True)
        with FlopCounterMode(display=False) as counter:
            attention(q, k, v, **options).sum().backward()
        return counter.get_total_flops()

    of_pair = 4 * (2 * (8 + 16) + 6 * 8 + 4 * 16)  # heads, and both passes
    assert count({}) == 2 * 7 * 9 * of_pair
    assert count(dict(causal=True)) == 2 * sum(range(3, 10)) * of_pair
    assert count(dict(window=(1, 1))) == 2 * (6 * 3 + 2) * of_pair
    assert count(dict(chunk=4)) == 2 * (2 * 4 + 4 * 4 + 1) * of_pair  # 9 keys, the last alone
    assert count(dict(chunk=4, causal=True)) == 2 * (3 + 4 + 1 + 2 + 3 + 4 + 1) * of_pair
    assert count(ENDS) == (3 * 5 + 4 * 4) * of_pair
    assert count(ENDS | dict(causal=True)) == (3 + 4 + 5 + 1 + 2 + 3 + 4) * of_pair


@pytest.mark.parametrize("sq, sk", [(0, 4), (1, 6), (6, 1), (4, 7), (7, 4), (5, 5)])
def test_flops_of_bands_are_counted(sq, sk):
    from torch.utils.flop_counter import FlopCounterMode

    q, k = torch.empty(1, sq, 1, 1, device="meta"), torch.empty(1, sk, 1, 1, device="meta")
    keys = np.arange(sk)
    bounds = [-1, 0, 1, 3, 9], [-1, 0, 2, 9], [0, 1, 2, 3, 9], [False, True]
    for left, right, chunk, top_left in itertools.product(*bounds):
        places = np.arange(sq)[:, None] + (0 if top_left else sk - sq)
        seen = (left < 0) | (keys >= places - left)
        seen = seen & ((right < 0) | (keys <= places + right))
        if chunk > 0:
            seen = seen & (keys // chunk == places // chunk)
        with FlopCounterMode(display=False) as counter:
            attention(q, k, k, window=(left, right), chunk=chunk, top_left=top_left)
        assert counter.get_total_flops() == 4 * seen.sum(), (left, right, chunk, top_left)


@pytest.mark.parametrize("packed", [False, True])
def test_flops_of_symbolic_sizes_are_counted(packed):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.utils.flop_counter import FlopCounterMode

    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env)
    tensors = [*(x.requires_grad_() for x in inputs(ENDS if packed else {})), *(ENDS.values() if packed else ())]
    q, k, v, *ends = (
        fake.from_tensor(x, symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * x.dim()))
        for x in tensors
    )
    options = dict(zip(ENDS, ends)) | (dict(max_seqlen_q=4, max_seqlen_k=5) if packed else {})
    with fake, FlopCounterMode(display=False) as counter:
        attention(q, k, v, causal=True, **options)
    guards = len(env.guards)
    scores = 2 * (2 + 3 + 4) if packed else 2 * sum(range(3, 10))  # packed: of 3 queries and 4 keys each
    assert counter.get_total_flops() == scores * 4 * 2 * (8 + 16)
    assert guards == 0


@pytest.mark.parametrize(
    "options", [ENDS, dict(seqused_k=torch.tensor([5, 4], dtype=torch.int32))], ids=["packed", "used"]
)
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_flops_of_unknown_lengths_are_counted(options, kind):
    """Packed sequences count as equally long, lengths in use as the longest that there may be."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    tensors = [*inputs(options), *options.values()]
    fake = FakeTensorMode()
    mode = fake if kind == "fake" else contextlib.nullcontext()
    q, k, v, *lengths = (fake.from_tensor(x) if kind == "fake" else x.to("meta") for x in tensors)
    lengths = dict(zip(options, lengths))
    if "cu_seqlens_q" in lengths:
        lengths |= dict(max_seqlen_q=4, max_seqlen_k=5)
    with mode, FlopCounterMode(display=False) as counter:
        attention(q, k, v, **lengths)
    scores = 2 * 3 * 4 if "cu_seqlens_q" in lengths else 2 * 7 * 9
    assert counter.get_total_flops() == scores * 4 * 2 * (8 + 16)
