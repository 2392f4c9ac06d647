"""fulgur.torch on CPU tensors: the operators, their gradients, and what PyTorch builds on them."""

import contextlib
import itertools
import subprocess
import sys

import numpy as np
import pytest
import reference
from numpy.testing import assert_allclose

torch = pytest.importorskip("torch")

from torch._functorch import config as functorch_config  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import fulgur  # noqa: E402
from fulgur.flash_attn import flash_attn_varlen_func  # noqa: E402
from fulgur.torch import _operators, attention  # noqa: E402

forward = torch.ops.fulgur.forward.default
backward = torch.ops.fulgur.backward.default


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch.compiler.reset()


@pytest.fixture
def one_thread():
    """Waking a second one takes longer than small work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
def test_views_that_stand_for_other_values(grad):
    """Negated ones, and those whose rows are not in one piece."""
    z = torch.randn(2, 7, 4, 8, dtype=torch.complex64)
    negated = z.conj().imag
    turned = torch.randn(2, 7, 8, 4).transpose(2, 3)
    assert negated.is_neg() and turned.stride(-1) != 1
    for x in (negated, turned):
        plain = x.resolve_neg().contiguous().detach()
        same = [y.detach().requires_grad_(grad) for y in (x, plain)]
        outs = [attention(y, plain, y) for y in same]
        assert torch.equal(*outs)
        if grad:
            assert torch.equal(*(torch.autograd.grad(out.sum(), y)[0] for out, y in zip(outs, same)))


@each_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_results_and_gradients(options, dtype):
    q, k, v = inputs(options, dtype=dtype, grad=True)
    out, lse = attention(q, k, v, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), retain_graph=True)
    plain_gradients = torch.autograd.grad(out, (q, k, v), dout)
    plain = [x.detach().float().numpy() for x in (q, k, v)]
    known = in_numpy(options)
    exact, exact_lse = reference.attention(*plain, **known)
    dout = dout.float().numpy()
    exact_gradients = [
        *reference.attention_backward(dout, *plain, dlse=dlse.numpy(), **known),
        *reference.attention_backward(dout, *plain, **known),
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert out.dtype == dtype and out.is_contiguous()
    assert_allclose(out.detach().float(), exact, atol=tolerance)
    reference.assert_lse_close(lse.detach().numpy(), exact_lse)
    if "sinks" in options:  # whose gradients are another test's
        exact_gradients = [*exact_gradients[:3], *exact_gradients[4:7]]
    for got, want, x in zip(gradients + plain_gradients, exact_gradients, (q, k, v) * 2):
        assert got.dtype == dtype and got.shape == x.shape
        assert_allclose(got.float(), want, atol=4 * tolerance)


@each_option
def test_gradcheck(options, one_thread):
    def call(*x):
        out, lse = attention(*x, return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0)  # of rows that see no key

    tensors = inputs(options, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


SINKS = torch.tensor([0.5, -0.25, -1, 2])


@pytest.mark.parametrize("name", ["causal", "window", "slopes of sequences", "keys in use", "packed"])
def test_gradient_of_sinks(name):
    """That of the definition, by PyTorch, and that of finite differences in float64."""
    options = OPTIONS[name]
    q, k, v = inputs(options, dtype=torch.float64)
    sinks = SINKS.clone().requires_grad_()
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    (got,) = torch.autograd.grad((out, lse), sinks, (dout, dlse))
    assert got.dtype == torch.float32 and got.shape == (4,)
    plain = [x.numpy() for x in (dout, q, k, v)]
    exact = reference.attention_backward(
        *plain, dlse=dlse.numpy(), sinks=SINKS.numpy(), **in_numpy(options)
    )
    assert_allclose(got, exact[3], rtol=1e-5, atol=1e-6)

    def loss(h, step):
        moved = SINKS.clone()
        moved[h] += step
        out, lse = attention(q, k, v, sinks=moved, return_lse=True, **options)
        return (out * dout).sum() + (lse * dlse).sum()

    step = 2**-10  # which float32 holds
    differences = [(loss(h, step) - loss(h, -step)) / (2 * step) for h in range(4)]
    assert_allclose(got, differences, rtol=1e-5, atol=1e-5)


def test_sinks_alone_may_want_a_gradient():
    q, k, v = make_qkv()
    sinks = SINKS.clone().requires_grad_()
    (attention(q, k, v, sinks=sinks) ** 2).sum().backward()
    assert sinks.grad.abs().min() > 0
    compiled = torch.compile(attention, fullgraph=True)
    again = SINKS.clone().requires_grad_()
    (compiled(q, k, v, sinks=again) ** 2).sum().backward()
    assert_allclose(again.grad, sinks.grad, rtol=1e-5)


def test_the_same_as_fulgur_attention():
    q, k, v = make_qkv()
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    want, want_lse = fulgur.attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(attention(q, k, v, causal=True), want)


def test_some_inputs_without_gradient():
    q, k, v = make_qkv()
    k.requires_grad_()
    attention(q, k, v).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


def test_strides():
    q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in make_qkv())
    assert q.stride(-1) != 1
    whole = [x.contiguous() for x in (q, k, v)]
    assert torch.equal(attention(q, k, v), attention(*whole))
    for x in (q, k, v):
        x.requires_grad_()
    attention(q, k, v).sum().backward()  # the gradient of a sum has strides 0
    same = [x.detach().requires_grad_() for x in whole]
    attention(*same).backward(torch.ones(2, 7, 4, 16))
    for x, y in zip((q, k, v), same):
        assert torch.equal(x.grad, y.grad)


def test_a_second_derivative_raises():
    q, k, v = make_qkv(grad=True)
    (dq,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        torch.autograd.grad(dq.sum(), q)
    loss = torch.func.grad(lambda q: attention(q, k, v).square().sum())
    with pytest.raises(NotImplementedError, match="first derivative only"):
        torch.func.grad(lambda q: loss(q).sum())(q)


def test_forward_mode_raises():
    """And is never 0, whichever way tangents come, while what has none is computed."""
    from torch.autograd import forward_ad

    q, k, v = make_qkv()
    one = torch.ones_like(q)
    message = "^You must implement the jvp function for custom autograd.Function"  # PyTorch's words
    inner = lambda q: torch.func.jvp(lambda x: attention(q, k, v).sum() + x, (v,), (v,))[1]  # noqa: E731
    for call in (
        lambda: torch.func.jvp(lambda q: attention(q, k, v), (q,), (one,)),
        lambda: torch.func.jacfwd(lambda q: attention(q, k, v).sum())(q),
        lambda: torch.func.hessian(lambda q: attention(q, k, v).sum())(q),
        lambda: torch.func.jvp(inner, (q,), (one,)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    recorded = q.clone().requires_grad_()
    out = attention(recorded, k, v)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=message):
            attention(q, forward_ad.make_dual(k, torch.ones_like(k)), v)
        with pytest.raises(NotImplementedError, match=message):
            out.backward(forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
        with pytest.raises(NotImplementedError, match="^q: has a tangent, and tree masks have no gradient"):
            attention(forward_ad.make_dual(q, one), k, v, tree_mask=torch.ones(2, 7, dtype=torch.int64))
        assert torch.equal(attention(q, k, v), out)


def test_only_the_lse_is_used():
    q, k, v = make_qkv(grad=True)
    _, lse = attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5
    for a, b in zip(got, torch.autograd.grad(scores.logsumexp(-1).sum(), (q, k))):
        assert_allclose(a, b, atol=1e-5)
    assert (got[2] == 0).all()


def test_no_memory_is_kept(one_thread):
    """Neither tensors, 128 KiB each, nor the values of optional arguments."""
    import resource

    q, k, v = make(*[(1, 64, 8, 64)] * 3, grad=True)
    used = torch.tensor([64], dtype=torch.int32)

    def work(count):
        for _ in range(count):
            attention(q, k, v, seqused_k=used).sum().backward()
            with pytest.raises(RuntimeError):
                attention(q, k, v[:, :1], seqused_k=used)

    work(50)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(400)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 * 1024  # KiB


class TestDropout:
    def test_is_that_of_the_library(self):
        q, k, v = make_qkv(grad=True)
        torch.manual_seed(5)
        out = attention(q, k, v, dropout_p=0.4)
        torch.manual_seed(5)
        seed, offset = torch.randint(-(2**63), 2**63 - 1, (2,)).tolist()
        random = dict(dropout_p=0.4, seed=seed % 2**64, offset=offset % 2**64)
        plain = [x.detach() for x in (q, k, v)]
        want, lse = fulgur.attention(*plain, return_lse=True, **random)
        assert torch.equal(out, want)
        got = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        expected = fulgur.attention_backward(torch.ones_like(out), *plain, want, lse, **random)
        for a, b in zip(got, expected):
            assert_allclose(a, b, atol=1e-6)

    def test_follows_the_generator(self):
        q, k, v = make_qkv()
        torch.manual_seed(1)
        first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(1)
        assert torch.equal(attention(q, k, v, dropout_p=0.5), first)
        assert not torch.equal(first, second)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_under_checkpointing(self, reentrant):
        gradients = []
        for wrap in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=reentrant)):
            torch.manual_seed(2)
            q, k, v = make_qkv(grad=True)
            wrap(lambda *x: attention(*x, dropout_p=0.5), q, k, v).sum().backward()
            gradients.append([x.grad for x in (q, k, v)])
        for a, b in zip(*gradients):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("budget", [0.0, 0.1, 0.5, 1.0])
    def test_is_not_drawn_again_under_a_memory_budget(self, budget):
        compiled = torch.compile(_of_dropout, backend="aot_eager", fullgraph=True)
        with functorch_config.patch(activation_memory_budget=budget):
            assert all(map(torch.equal, _gradients(compiled), _gradients(_of_dropout)))

    @pytest.mark.parametrize("policy", [None, "MUST_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE"])
    def test_is_not_drawn_again_under_compiled_checkpointing(self, policy):
        options = {}
        if policy is not None:
            policy = CheckpointPolicy[policy]
            options["context_fn"] = lambda: create_selective_checkpoint_contexts(lambda *_, **__: policy)

        def wrapped(*x):
            return checkpoint(_of_dropout, *x, use_reentrant=False, **options)

        compiled = torch.compile(wrapped, backend="aot_eager")
        assert all(map(torch.equal, _gradients(compiled), _gradients(_of_dropout)))

    def test_in_an_exported_program(self):
        inputs = tuple(make_qkv())

        class Module(torch.nn.Module):
            forward = staticmethod(_of_dropout)

        program = torch.export.export(Module(), inputs).module()
        torch.manual_seed(3)
        first, second = program(*inputs), program(*inputs)
        torch.manual_seed(3)
        assert torch.equal(first, _of_dropout(*inputs)) and not torch.equal(first, second)


def _of_dropout(q, k, v):
    return attention(q * 1.1, k.sin(), v * 2, dropout_p=0.4).cos()


def _gradients(function):
    """The result of a function of q, k and v and its gradients, of the same random numbers each time."""
    torch._dynamo.reset()
    torch.manual_seed(2)
    inputs = make_qkv(grad=True)
    out = function(*inputs)
    out.sum().backward()
    return out, *(x.grad for x in inputs)


def test_selective_checkpointing_sees_the_operator():
    seen = []

    def policy(_, op, *args, **kwargs):
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op is forward else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = make_qkv(grad=True)
    context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    out = checkpoint(attention, q, k, v, use_reentrant=False, context_fn=context)
    out.sum().backward()
    assert forward in seen


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_casts(self, dtype):
        q, k, v = make_qkv(grad=True)
        with torch.autocast("cpu", dtype=dtype):
            out = attention(q, k, v)
        assert out.dtype == dtype
        assert torch.equal(out, attention(*(x.detach().to(dtype) for x in (q, k, v))))
        out.sum().backward()
        assert q.grad.dtype == torch.float32

    def test_leaves_float64_alone(self):
        with torch.autocast("cpu"):
            assert attention(*make_qkv(dtype=torch.float64)).dtype == torch.float64

    def test_off(self):
        with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
            assert attention(*make_qkv()).dtype == torch.float32


class TestCompile:
    @each_option
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
    def test_backward(self, options):
        tensors, given = self.arguments(options)
        out, lse = forward(*tensors, **given)
        dout = torch.randn_like(out)
        for dlse in (None, torch.randn_like(lse)):
            more = dict(dlse=dlse, deterministic=True)
            torch.library.opcheck(backward, (dout, *tensors, out, lse), given | more)

    @each_option
    def test_results_where_the_caller_wants_them(self, options):
        tensors, given = self.arguments(options)
        want = forward(*tensors, **given)
        results = [torch.empty_like(x) for x in want]
        torch.ops.fulgur.forward_into(*tensors, *results, **given)
        assert all(map(torch.equal, results, want))
        torch.library.opcheck(torch.ops.fulgur.forward_into, (*tensors, *results), given)
        saved = (torch.randn_like(want[0]), *tensors, *want)
        *want, dsinks = backward(*saved, **given)
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


class TestDeterministic:
    def test_flag_of_torch(self, monkeypatch):
        seen = []

        def spy(*tensors, **options):
            seen.append(options.get("deterministic", False))
            return backward(*tensors, **options)

        monkeypatch.setattr(_operators, "backward", spy)
        torch.use_deterministic_algorithms(True)
        try:
            q, k, v = make_qkv(grad=True)
            attention(q, k, v).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        attention(q, k, v).sum().backward()
        attention(q, k, v, deterministic=True).sum().backward()
        assert seen == [True, False, True]


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
    places, keys = np.arange(sq)[:, None] + sk - sq, np.arange(sk)
    for left, right, chunk in itertools.product([-1, 0, 1, 3, 9], [-1, 0, 2, 9], [0, 1, 2, 3, 9]):
        seen = (left < 0) | (keys >= places - left)
        seen = seen & ((right < 0) | (keys <= places + right))
        if chunk > 0:
            seen = seen & (keys // chunk == places // chunk)
        with FlopCounterMode(display=False) as counter:
            attention(q, k, k, window=(left, right), chunk=chunk)
        assert counter.get_total_flops() == 4 * seen.sum(), (left, right, chunk)


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


def test_max_workspace(one_thread):
    q, k, v = make(*[(1, 64, 2, 8)] * 3, grad=True)
    plain = [x.detach() for x in (q, k, v)]
    out, lse = fulgur.attention(*plain, return_lse=True)
    saved = (torch.ones_like(out), *plain, out, lse)
    need = fulgur.plan(*plain, return_lse=True, threads=1).workspace().bytes
    need_backward = fulgur.plan_backward(*saved, threads=1).workspace().bytes
    assert 1 < need < need_backward
    with pytest.raises(RuntimeError, match=f"^max_workspace: got {need - 1} bytes, want at least {need}$"):
        attention(*plain, max_workspace=need - 1)
    assert torch.equal(attention(*plain, max_workspace=need), out)
    message = f"^max_workspace: got {need_backward - 1} bytes, want at least {need_backward}$"
    with pytest.raises(RuntimeError, match=message):
        attention(q, k, v, max_workspace=need_backward - 1).sum().backward()
    attention(q, k, v, max_workspace=need_backward).sum().backward()
    for x, want in zip((q, k, v), fulgur.attention_backward(*saved)):
        assert_allclose(x.grad, want, atol=1e-6)


class TestWrongArguments:
    """The library's own messages, as RuntimeError."""

    @pytest.mark.parametrize(
        "change, message",
        [
            (dict(k=torch.zeros(2, 9, 3, 8)), "k|q: got 4 heads"),
            (dict(k=torch.zeros(2, 9, 2, 8).half()), "^k: "),
            (dict(v=torch.zeros(3, 9, 2, 16)), "^v: "),
            (dict(q=torch.zeros(7)), "^q: got f32 .7., want .batch"),
            (dict(q=torch.zeros(1, 1, 1, 1, 8)), "^q: got 5 dimensions"),
            (dict(q=torch.zeros(2, 7, 4, 8, dtype=torch.int8)), "^q: got another dtype"),
            (dict(q=torch.zeros(2, 7, 4, 8, dtype=torch.int32)), "^q: "),
            (dict(softcap=-1.0), "^softcap: "),
            (dict(dropout_p=1.0), "^dropout_p: "),
            (dict(window=(-2, 0)), "^window_left: got -2, want -1"),
            (dict(chunk=-1), "^chunk: got -1, want 0"),
            (dict(alibi_slopes=torch.zeros(3)), "^alibi_slopes: "),
            (dict(sinks=torch.zeros(3)), "^sinks: got shape .3., want .4."),
            (dict(sinks=torch.zeros(4).bfloat16()), "^sinks: got bf16, want f32"),
            (dict(sinks=torch.zeros(8)[::2]), "^sinks: last stride is 2, want 1"),
            (dict(seqused_q=torch.zeros(2)), "^seqused_q: "),
            (dict(seqused_q=torch.tensor([8, 0], dtype=torch.int32)), "^seqused_q: got 8 at 0"),
            (dict(seqused_k=torch.zeros(2)), "^seqused_k: "),
            (dict(cu_seqlens_q=torch.zeros(3, dtype=torch.int32)), "^q: .*want 3 .total, heads, dim"),
            (dict(max_seqlen_q=-1), "^max_seqlen_q"),
            (dict(max_workspace=-1), "^max_workspace: got -1 bytes, want >= 0"),
            (dict(max_workspace=1, seqused_k=torch.tensor([9, 9], dtype=torch.int32)), "^max_workspace: got 1 b"),
        ],
    )
    def test_message(self, change, message):
        q, k, v = make_qkv()
        with pytest.raises(RuntimeError, match=message):
            attention(**{**dict(q=q, k=k, v=v), **change})

    @pytest.mark.parametrize(
        "change, error, message",
        [
            (dict(q=np.zeros((2, 7, 4, 8))), TypeError, "^q: got ndarray, want a tensor"),
            (dict(k=None), TypeError, "^k: got NoneType, want a tensor"),
            (dict(v=torch.tensor(1.0)), ValueError, "^v: got a tensor of no dimensions"),
            (dict(window=3), TypeError, "^window: got 3, want None or .left, right."),
            (dict(window=(1, 2, 3)), TypeError, "^window: got .1, 2, 3., want None or .left, right."),
            (dict(window=(1.5, 2)), RuntimeError, "for argument 'window_left'"),
            (dict(scale="1"), RuntimeError, "for argument 'scale'"),
            (dict(dropout_p="1"), RuntimeError, "for argument 'dropout_p'"),
            (dict(seqused_k=[3, 4]), RuntimeError, "for argument 'seqused_k'"),
            (dict(alibi_slopes=[1.0] * 4), RuntimeError, "for argument 'alibi_slopes'"),
            (dict(sinks=[1.0] * 4), RuntimeError, "for argument 'sinks'"),
            (dict(k=torch.zeros(2, 9, 2, 8, device="meta")), ValueError, "^k: got a tensor on meta, want cpu as q"),
        ],
    )
    @pytest.mark.parametrize("dropout_p", [0.0, 0.5])
    def test_wrong_kinds(self, change, error, message, dropout_p):
        q, k, v = make_qkv()
        with pytest.raises(error, match=message):
            attention(**{**dict(q=q, k=k, v=v, dropout_p=dropout_p), **change})

    @pytest.mark.parametrize("name", ["q", "v", "alibi_slopes", "sinks"])
    @pytest.mark.parametrize("kind, message", [
        (lambda x: x.to_sparse(), "got a tensor of layout torch.sparse_coo, want a dense one"),
        (lambda x: x.to_mkldnn(), "got a tensor of layout torch._mkldnn, want a dense one"),
        (lambda x: torch.nested.nested_tensor(list(x)), "got a nested tensor, want a dense one"),
        (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "got a nested tensor, want a dense one"),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "got a quantized tensor, want {}.dequantize"),
    ], ids=["sparse", "mkldnn", "nested", "jagged", "quantized"])  # fmt: skip
    @pytest.mark.filterwarnings("ignore")
    def test_tensors_without_rows(self, kind, message, name):
        given = dict(zip(("q", "k", "v"), make_qkv()))
        for grad in (False, True):
            given["k"].requires_grad_(grad)
            with pytest.raises(TypeError, match=f"^{name}: {message.format(name)}"):
                attention(**given | {name: kind(torch.zeros(2, 9, 2, 8))}, dropout_p=0.5 if grad else 0.0)

    @pytest.mark.parametrize("name", ["alibi_slopes", "sinks", "seqused_k", "leftpad_k", "tree_mask"])
    def test_one_tensor_on_meta(self, name):
        """Results would be there, too."""
        tensors = make_qkv()
        with pytest.raises(ValueError, match=f"^{name}: got a tensor on meta, want cpu as q"):
            attention(*tensors, **{name: torch.zeros(4, device="meta")})
        tensors = [x.to("meta") for x in tensors]
        assert attention(*tensors, **{name: torch.zeros(4)}).is_meta  # which may be on the CPU with a GPU

    @pytest.mark.parametrize(
        "name, x", [("alibi_slopes", torch.zeros(4)), ("scale", torch.tensor(0.5)), ("softcap", torch.tensor(2.0))]
    )
    def test_what_gets_no_gradient(self, name, x):
        given = {name: x.clone().requires_grad_()}
        tensors = make_qkv()
        with pytest.raises(ValueError, match=f"^{name}: requires grad, and gets none; want {name}.detach"):
            attention(*tensors, **given)
        with torch.no_grad():
            assert torch.equal(attention(*tensors, **given), attention(*tensors, **{name: x}))

    def test_sinks_that_require_grad_on_another_device(self):
        q, k, v = (x.to("meta") for x in make_qkv())
        with pytest.raises(ValueError, match="^sinks: requires grad on cpu, want meta as q"):
            attention(q, k, v, sinks=SINKS.clone().requires_grad_())

    def test_random_numbers(self):
        q, k, v = make_qkv()
        for rng in (None, torch.zeros(2), torch.zeros(3, dtype=torch.int64)):
            with pytest.raises(RuntimeError, match="^rng_state: "):
                forward(q, k, v, dropout_p=0.5, rng_state=rng)


def test_threads_are_those_of_torch(one_thread):
    """One thread of torch is one of fulgur: no second one works while a call computes."""
    import time

    q, k, v = make(*[(1, 512, 4, 64)] * 3)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(20):
        attention(q, k, v)
    assert (time.process_time() - cpu) / (time.perf_counter() - start) < 1.3


def test_another_thread_computes_gradients():
    """Autograd of several threads at once, one plan for all."""
    import threading

    want, errors = [], []
    for _ in range(2):
        q, k, v = make_qkv(grad=True)
        want.append((q, k, v, torch.autograd.grad(attention(q, k, v).sum(), q)[0]))

    def work(q, k, v, expected):
        for _ in range(50):
            (got,) = torch.autograd.grad(attention(q, k, v).sum(), q)
            if not np.allclose(got, expected, atol=1e-6):
                errors.append(got)

    threads = [threading.Thread(target=work, args=case) for case in want * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_an_old_torch_is_refused():
    import subprocess
    import sys

    code = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.10.1+cpu")
import fulgur.torch
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: fulgur.torch: got PyTorch 2.10.1+cpu, want 2.11 or newer" in done.stderr


def test_workers_of_a_loader_compute():
    """They are forked from a process that has computed on several threads, and have several of their own."""
    code = """
import numpy as np, torch, fulgur
q = np.ones((1, 300, 4, 32), np.float32)
fulgur.attention(q, q, q, threads=2)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return fulgur.attention(q, q, i * q, threads=2)
loader = torch.utils.data.DataLoader(Data(), num_workers=2, timeout=60, multiprocessing_context="fork")
for i, out in enumerate(loader):
    torch.testing.assert_close(out[0], i * torch.from_numpy(q))
assert i == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True)
