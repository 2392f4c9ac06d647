"""fulgur.torch on CPU tensors: results, gradients, dropout, errors."""

import subprocess
import sys

import numpy as np
import pytest
import reference
from numpy.testing import assert_allclose

torch = pytest.importorskip("torch")

from torch._functorch import config as functorch_config  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch_inputs import OPTIONS, SINKS, backward, each_option, forward, in_numpy, inputs, make, make_qkv  # noqa: E402

import fulgur  # noqa: E402
from fulgur.torch import _operators, attention, scores  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_torch")


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


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (2, 1, 5, 7), (1, 1, 1, 7), (1, 1, 5, 1)])
def test_gradient_of_a_bias(shape):
    """That of finite differences in float64."""
    q, k, v = (torch.randn(2, n, h, 8, dtype=torch.float64, requires_grad=True) for n, h in ((5, 4), (7, 2), (7, 2)))
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    call = lambda b, *x: attention(*x, bias=b, causal=True, softcap=3.0, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, (bias, q, k, v), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_of_a_bias_alone(dtype):
    """It has the dtype of the bias, of whatever strides, and -inf gets 0."""
    q, k, v = make_qkv(dtype=torch.bfloat16)
    sq, sk = q.shape[1], k.shape[1]
    bias = torch.randn(sk, sq, dtype=dtype).masked_fill(torch.rand(sk, sq) < 0.3, -torch.inf).requires_grad_()
    loss = lambda x: (attention(q, k, v, bias=x.mT[None, None]) ** 2).sum()  # noqa: E731
    (got,) = torch.autograd.grad(loss(bias), bias)
    assert got.dtype == dtype and (got[bias == -torch.inf] == 0).all()
    exact = bias.detach().double().requires_grad_()
    q, k, v = (x.detach().double() for x in (q, k, v))
    torch.testing.assert_close(got.double(), torch.autograd.grad(loss(exact), exact)[0], atol=0.05, rtol=0.05)


@pytest.mark.slow
def test_gradient_of_a_bias_under_compile():
    q, k, v = make_qkv(grad=True)
    bias = torch.randn(1, 4, q.shape[1], k.shape[1], requires_grad=True)
    results = []
    for call in (attention, torch.compile(attention, fullgraph=True)):
        for tensors in ((bias,), (bias, q)):  # whose gradients are wanted
            loss = (call(q, k, v, bias=bias) ** 2).sum()
            results.append(torch.autograd.grad(loss, tensors)[0])
    assert results[0].abs().min() > 0
    for got in results[1:]:
        assert_allclose(got, results[0], rtol=1e-5, atol=1e-7)
    func = torch.func.grad(lambda b: (attention(q.detach(), k.detach(), v.detach(), bias=b) ** 2).sum())
    assert_allclose(func(bias.detach()), results[0], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
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
            (dict(q=torch.zeros(2, 7, 4, 8, dtype=torch.uint8)), "^q: got another dtype"),
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
        "name, x",
        [("alibi_slopes", torch.zeros(4)), ("scale", torch.tensor(0.5)), ("softcap", torch.tensor(2.0))],
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_end_of_a_process_says_nothing():
    code = "import torch, fulgur.torch; fulgur.torch.attention(*[torch.ones(1, 2, 1, 8, requires_grad=True)] * 3)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
def test_scores(dtype):
    """Of views whose rows are not in one piece, too: softmax and values make attention of them."""
    q, k, v = make_qkv(dtype=dtype)
    bias = torch.randn(1, q.shape[2], q.shape[1], k.shape[1])
    P = scores(q.mT.contiguous().mT, k, stage="probabilities", causal=True, bias=bias)
    assert P.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    values = v.repeat_interleave(q.shape[2] // v.shape[2], 2).to(P.dtype)
    out = attention(q, k, v, causal=True, bias=bias)
    tolerance = 5e-2 if dtype.itemsize == 2 else 1e-5
    assert_allclose(out.to(P.dtype), torch.einsum("bhij,bjhd->bihd", P, values), atol=tolerance)
    S = scores(q, k, stage="masked", causal=True, bias=bias, rows=torch.tensor([1, 3]))
    assert_allclose(S.softmax(-1), P[:, :, [1, 3]], atol=1e-6)


def test_scores_have_no_gradient():
    q, k, _ = make_qkv()
    sinks = torch.zeros(q.shape[2], requires_grad=True)
    with pytest.raises(ValueError, match="sinks: requires grad, and scores have no gradient"):
        scores(q, k, stage="masked", sinks=sinks)
    with torch.no_grad():
        assert torch.equal(scores(q, k, stage="masked", sinks=sinks), scores(q, k, stage="masked"))
    with pytest.raises(TypeError, match="q: got ndarray"):
        scores(q.numpy(), k, stage="masked")


def test_scores_in_a_compiled_function():
    q, k, v = make_qkv()

    @torch.compile(backend="aot_eager")
    def both(q, k, v):
        return attention(q + 1, k, v), scores(q + 1, k, stage="scaled") + 1

    for got, want in zip(both(q, k, v), (attention(q + 1, k, v), scores(q + 1, k, stage="scaled") + 1)):
        assert_allclose(got, want, atol=1e-6)
