"""score_mod and mask_mod of fulgur.torch: gradients against autograd in float64, compiled graphs, what is refused."""

import math
import os

import pytest
import random_mods

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import fulgur  # noqa: E402
from fulgur._expressions import FUNCTIONS  # noqa: E402
from fulgur.torch import _expressions, attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_torch")

FULGURS = {name: getattr(fulgur, name) for name in FUNCTIONS}


def _tensor(x):
    """What is no tensor of more dimensions decides no dtype."""
    return torch.as_tensor(x, dtype=torch.float64) if isinstance(x, float) else torch.as_tensor(x)


def _of_tensors(function):
    return lambda *operands: function(*map(_tensor, operands))


TORCHS = {
    name: _of_tensors(getattr(torch, name))
    for name in (
        "clip", "cos", "erf", "exp", "exp2", "floor", "log", "maximum", "minimum", "rsqrt", "sigmoid", "sin", "sqrt",
        "tanh", "where",
    )
} | {"bit": lambda x, i: ((_tensor(x) >> i) & 1) == 1}  # fmt: skip


def expected(q, k, v, score_mod, mask_mod, tensors):
    """out and lse in double precision, by functions of PyTorch."""
    (batch, sq, hq, d), (sk, hk) = q.shape, k.shape[1:3]
    k, v = (x.repeat_interleave(hq // hk, dim=2) for x in (k, v))
    S = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(d)
    places = random_mods.places(batch, hq, hk, sq, sk, torch.arange)
    known = {name: random_mods.Clamped(x, lambda i, n: _tensor(i).clip(0, n - 1)) for name, x in tensors.items()}
    S = _tensor(score_mod(score=S, **places, **known)).double().expand_as(S)
    S = S.masked_fill(~mask_mod(**places, **known), -torch.inf)
    lse = S.logsumexp(-1)
    P = torch.exp(S - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return torch.einsum("bhij,bjhd->bihd", P, v), lse


def double(x):
    return x.detach().double().requires_grad_() if x.is_floating_point() else x


@pytest.mark.parametrize("seed", range(16))
def test_random_functions(seed, one_thread):
    seed += 1000 * int(os.environ.get("FULGUR_TEST_SEED", 0))
    sources = random_mods.Sources(seed, smooth=True)
    score, mask = sources.number(1 + seed % 4), sources.condition(1 + seed % 3)
    every = random_mods.tensors(seed)
    tensors = {name: torch.from_numpy(x) for name, x in every.items() if f"{name}[" in score + mask}
    tensors = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in tensors.items()}
    q, k, v = (torch.randn(2, n, heads, 16, requires_grad=True) for n, heads in ((45, 4), (70, 2), (70, 2)))

    def functions(by):
        return (random_mods.function(score, ("score", *random_mods.PLACES, *tensors), by),
                random_mods.function(mask, (*random_mods.PLACES, *tensors), by))  # fmt: skip

    score_mod, mask_mod = functions(FULGURS)
    got = attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, tensors=tensors, return_lse=True)
    precise = [double(x) for x in (q, k, v)]
    known = {name: double(x) for name, x in tensors.items()}
    want = expected(*precise, *functions(TORCHS), known)
    seen = want[1] > -torch.inf
    dout, dlse = torch.randn_like(got[0]), torch.randn_like(got[1]).masked_fill(~seen, 0)
    floats = [name for name, x in tensors.items() if x.is_floating_point()]
    inputs = [q, k, v, *(tensors[x] for x in floats)]
    exact_inputs = [*precise, *(known[x] for x in floats)]
    loss = (want[0] * dout).sum() + (want[1].masked_fill(~seen, 0) * dlse).sum()
    gradients = torch.autograd.grad(got, inputs, (dout, dlse))
    exact = torch.autograd.grad(loss, exact_inputs, allow_unused=True, materialize_grads=True)
    for x, y in zip((*got, *gradients), (*want, *exact)):
        largest = y.masked_fill(~y.isfinite(), 0).abs().max().item()
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=5e-5 * max(1, largest))


def slopes(score, h, delta, slope):
    return score - slope[h] * abs(delta)


def qkv(dtype=torch.float32, sq=33, sk=33, grad=True):
    return tuple(torch.randn(2, n, 4, 16, dtype=dtype, requires_grad=grad) for n in (sq, sk, sk))


def test_gradcheck(one_thread):
    def call(q, k, v, slope, bias):
        return attention(
            q, k, v, score_mod=lambda score, h, delta, slope: 3 * fulgur.tanh(score / 3) - slope[h] * abs(delta),
            mask_mod="delta <= 0 || k < 2", tensors={"slope": slope}, bias=bias, return_lse=True,
        )  # fmt: skip

    q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    more = [torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((2,), (1, 2, 5, 5))]
    assert torch.autograd.gradcheck(call, (q, k, v, *more), fast_mode=True)


def test_beside_other_options():
    """softcap as an expression, with sinks and a bias and their gradients, in two orders of the same tensors."""
    q, k, v = qkv()
    sinks, bias = torch.rand(4, requires_grad=True), torch.rand(1, 4, 33, 33, requires_grad=True)
    cap, one = torch.full((1,), 5.0), torch.ones(1)
    inputs = (q, k, v, sinks, bias)
    want = attention(q, k, v, softcap=5.0, causal=True, sinks=sinks, bias=bias)
    exact = torch.autograd.grad(want.square().sum(), inputs)
    for tensors in ({"cap": cap, "one": one}, {"one": one, "cap": cap}):
        mod = "cap[0] * tanh(score / cap[0]) * one[0]"
        got = attention(q, k, v, causal=True, sinks=sinks, bias=bias, score_mod=mod, tensors=tensors)
        torch.testing.assert_close(got, want)
        for x, y in zip(torch.autograd.grad(got.square().sum(), inputs), exact):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_gradients_have_the_dtype_of_their_tensors():
    q, k, v = qkv(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        slope = torch.rand(4).to(dtype).requires_grad_()
        out = attention(q, k, v, score_mod=slopes, tensors={"slope": slope})
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert slope.grad.dtype == dtype and slope.grad.abs().max() > 0
    # What needs no gradient costs none.
    slope = torch.rand(4)
    out = attention(q, k, v, score_mod=slopes, tensors={"slope": slope})
    assert torch.autograd.grad(out.float().sum(), q)[0].shape == q.shape


def _calls(how):
    by_expression = fulgur.expression(slopes, tensors={"slope": torch.rand(4)})
    mod = {"text": "score - slope[h] * abs(delta)", "function": slopes, "expression": by_expression}[how]
    return lambda q, k, v, slope: attention(q, k, v, causal=True, score_mod=mod, tensors={"slope": slope}) * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["text", "function", "expression"])
def test_compiled(how):
    call, slope = _calls(how), torch.rand(4, requires_grad=True)
    compiled = torch.compile(call, fullgraph=how != "function", dynamic=True, backend="aot_eager")
    for n in (33, 40):
        x = (*qkv(sq=n, sk=n), slope)
        want, got = call(*x), compiled(*x)
        torch.testing.assert_close(got, want)
        for a, b in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x)):
            torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["text", "function", "expression"])
def test_compiled_with_others(how):
    """A graph is that of the expression that it was made with."""
    q, k, v = qkv(grad=False)

    @torch.compile(backend="aot_eager")
    def call(q, k, v, mask_mod):
        return attention(q, k, v, mask_mod=mask_mod) + 1

    def upto(n):
        if how == "text":
            return f"k < {n}"
        return (lambda k: k < n) if how == "function" else fulgur.expression(lambda k: k < n)

    for n in (5, 9, 12, 5):
        torch.testing.assert_close(call(q, k, v, upto(n)), attention(q, k, v, mask_mod=f"k < {n}") + 1)


def test_functions_are_not_looked_at_in_a_graph():
    compiled = torch.compile(_calls("function"), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="want a text, or what fulgur.expression makes of the function outside of it"):
        compiled(*qkv(), torch.rand(4))


@pytest.mark.slow
def test_opcheck():
    slope, gate = torch.rand(4, requires_grad=True), torch.rand(33, requires_grad=True)
    q, k, v = qkv(grad=False)
    mods = ([slope.detach(), gate.detach()], ["slope", "gate"], "score - slope[h] * abs(delta) + gate[k]", "delta < 3")
    torch.library.opcheck(_expressions.expression_forward, (q, k, v, *mods), {"softcap": 2.0})
    out, lse = _expressions.expression_forward(q, k, v, *mods)
    torch.library.opcheck(
        _expressions.expression_backward, (out, q, k, v, out, lse, *mods, ["gate"]), {"deterministic": True}
    )


def test_other_transforms():
    q, k, v = qkv(grad=False)
    slope = torch.rand(4)

    def loss(slope):
        return attention(q, k, v, score_mod=slopes, tensors={"slope": slope}).square().sum()

    got = torch.func.grad(loss)(slope)
    known = slope.requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(loss(known), known)[0])
    (first,) = torch.autograd.grad(loss(known), known, create_graph=True)
    with pytest.raises(NotImplementedError, match="a first derivative only"):
        first.sum().backward()


def test_vmap(one_thread):
    """One call after another: b is the sequence of each."""
    given = (*(torch.randn(3, *x.shape) for x in qkv(grad=False)), torch.rand(3, 4))

    def call(q, k, v, slope):
        mods = dict(score_mod=slopes, mask_mod="b == 0 || k < 20", tensors={"slope": slope})
        return attention(q, k, v, return_lse=True, **mods)

    def each(function, *given):
        return [torch.stack(x) for x in zip(*(function(*x) for x in zip(*given)))]

    for got, want in zip(torch.vmap(call)(*given), each(call, *given)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    columns = given[0].movedim(0, 4), *given[1:3], given[3][0]  # rows that are not in one piece
    want = each(call, *given[:3], [given[3][0]] * 3)
    torch.testing.assert_close(torch.vmap(call, in_dims=(4, 0, 0, None))(*columns)[0], want[0], rtol=0, atol=0)
    gradients = torch.func.grad(lambda *x: call(*x)[0].square().sum(), argnums=(0, 1, 2, 3))
    exact = each(gradients, *given)
    for got, want in zip(torch.vmap(gradients)(*given), exact):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    known = given[3].clone().requires_grad_()
    torch.vmap(call)(*given[:3], known)[0].square().sum().backward()
    torch.testing.assert_close(known.grad, exact[3])


def test_autocast_and_dropout():
    q, k, v = qkv()
    slope = torch.rand(4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v, score_mod=slopes, tensors={"slope": slope})
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32 and slope.grad.abs().max() > 0

    def dropped():
        torch.manual_seed(3)
        return attention(q, k, v, score_mod=slopes, tensors={"slope": slope}, dropout_p=0.5)

    torch.testing.assert_close(dropped(), dropped(), rtol=0, atol=0)
    plain = attention(q, k, v, score_mod=slopes, tensors={"slope": slope})
    assert not torch.allclose(dropped(), plain)


def test_packed_and_cached():
    ends = torch.tensor([0, 10, 33], dtype=torch.int32)
    q, k, v = (x.detach()[0] for x in qkv())
    packed = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=23, max_seqlen_k=23)
    got = attention(q, k, v, mask_mod="delta <= 0 && q0 + q >= 0", **packed)
    torch.testing.assert_close(got, attention(q, k, v, causal=True, **packed))
    with torch.no_grad():
        q, k, v = qkv()
        index = torch.tensor([1, 0], dtype=torch.int32)
        options = dict(cache_batch_idx=index, seqused_k=torch.tensor([30, 20], dtype=torch.int32))
        gate = torch.rand(2, 33, requires_grad=True)
        got = attention(q, k, v, score_mod="score + gate[b, k]", tensors={"gate": gate}, **options)
        want = attention(q, k, v, bias=gate[:, None, None], **options)
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="gate: requires grad, and caches have no gradient"):
        attention(
            *(x.detach() for x in (q, k, v)), score_mod="score + gate[b, k]", tensors={"gate": gate}, **options
        )


def test_flops_are_those_of_the_mask():
    q, k, v = qkv()
    counts = []
    for mods in ({}, dict(score_mod="2 * score")):
        with FlopCounterMode(display=False) as counter:
            attention(q, k, v, causal=True, **mods).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_negative_indices():
    q, k, v = qkv(grad=False)
    gate = torch.rand(4)
    got = attention(q, k, v, score_mod=lambda score, gate: score * gate[-1], tensors={"gate": gate})
    torch.testing.assert_close(got, attention(q, k, v, scale=gate[3].item() / 4))


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(tensors=[torch.rand(4)]), TypeError, "tensors: got list, want a dict of tensors by name"),
        (dict(tensors={"t": 3}), TypeError, "tensors: t: got int, want a tensor"),
        (dict(tensors={"t": torch.zeros(3, dtype=torch.uint8)}), TypeError, "tensors: t: got torch.uint8, want"),
        (dict(tensors={"t": torch.rand(3)}), ValueError, "t: given, but no expression indexes"),
        (dict(mask_mod=lambda q: q), ValueError, "mask_mod: got a value of type int, want bool"),
        (dict(mask_mod=lambda q, k: q < k and k < 3), TypeError, "mask_mod: an expression has no value"),
        (dict(mask_mod="q <"), ValueError, "mask_mod: at character 4, got the end"),
        (dict(mask_mod=3), TypeError, "mask_mod: got int, want a text, a function or an Expression"),
        (dict(score_mod="score + t[k]", tensors={"t": torch.rand(3, 3)}), ValueError, "score_mod: t: got 1 indices"),
        (dict(score_mod="score + t[k]", tensors={"t": torch.rand(())}), ValueError, "t: got 0 dimensions"),
        (dict(score_mod=lambda score, t: score + t[q_of_nobody]), NameError, "q_of_nobody"),
    ],
)  # fmt: skip
def test_errors(change, error, words):
    q, k, v = qkv(grad=False)
    if "t[q_of" in words or error is NameError:
        change = dict(change, tensors={"t": torch.rand(3)})
    with pytest.raises(error, match=words):
        attention(q, k, v, **change)


def test_lists_of_blocks():
    offsets = torch.tensor([[0, 2, 3, 5], [5, 6, 6, 8]], dtype=torch.int32)
    blocks = fulgur.expand_blocks(offsets, torch.tensor([0, 3, 1, 0, 2, 1, 2, 3]), 4)
    want = [[[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0]], [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]]
    assert torch.equal(blocks, torch.tensor(want, dtype=torch.bool))
    q, k, v = (torch.randn(1, n, 2, 8, requires_grad=True) for n in (90, 128, 128))
    out = attention(q, k, v, mask_mod="blocks[h, q // 32, k // 32]", tensors={"blocks": blocks})
    shown = blocks.repeat_interleave(32, 1).repeat_interleave(32, 2)[:, :90]
    dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=shown)
    dense = dense.transpose(1, 2).nan_to_num()  # rows that see nothing
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    got, expected = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, dense))
    for x, y in zip(got, expected):
        torch.testing.assert_close(x, y.nan_to_num(), rtol=1e-4, atol=1e-5)
