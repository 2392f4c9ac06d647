"""fulgur.torch.flex_attention against PyTorch's, and its gradients against autograd's of the formula."""

import math
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as upstream  # noqa: E402

from fulgur.torch import enable_flex, flex_attention  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fresh_torch"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated"),
]

B, H, S, D = 2, 4, 90, 16
DOC = torch.arange(S) // 30
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.01])
LENGTHS = torch.tensor([70, 90])
POINTS = torch.randn(S, 3)
LEARNED = {
    "table": torch.randn(H, 2 * S), "pair": torch.randn(B, H, S, S), "tau": torch.tensor(1.3), "cap": torch.rand(H) + 4,
}  # fmt: skip
table, pair, tau, cap = (x.requires_grad_() for x in LEARNED.values())

SCORES = {
    "alibi": lambda s, b, h, q, k: s + (k - q) * SLOPES[h],
    "relative": lambda s, b, h, q, k: s + table[h, q - k + S],
    "from the end": lambda s, b, h, q, k: s + table[h, q - k] * table[-1][k],
    "one index after another": lambda s, b, h, q, k: s + pair[b][h][q][k],
    "soft caps": lambda s, b, h, q, k: cap[h] * torch.tanh(s / cap[h]),
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "temperature": lambda s, b, h, q, k: tau * s / torch.exp(tau),
    "made inside": lambda s, b, h, q, k: s + (table[:, :S] * 2)[h, k] + torch.ones(()) * k.float().log1p(),
    "lengths": lambda s, b, h, q, k: torch.where(k < LENGTHS[b], s, -torch.inf),
    "waves": lambda s, b, h, q, k: s + torch.sin(k * 0.1) * torch.cos(torch.abs(q - k).float()) + torch.tan(b),
    "methods": lambda s, b, h, q, k: (s.abs() + 1).log().clamp(max=1.5) + (q - k).abs().float().sqrt() - h.to(s.dtype),
    "filled": lambda s, b, h, q, k: s.masked_fill((q - k).abs() > 10, float("-inf")),
    "functions": lambda s, b, h, q, k: torch.relu(s) + torch.nn.functional.silu(s) * torch.rsqrt(1 + s**2) - s**3 / 9,
    "integers": lambda s, b, h, q, k: s + ((q // 4) % 3 == (k % 3)) * 0.5 + torch.div(k, 7, rounding_mode="floor") / 9,
    "nothing of it": lambda s, b, h, q, k: torch.zeros_like(s),
}  # fmt: skip
MASKS = {
    "none": None,
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (DOC[q] == DOC[k]) & (h != 5),
    "and": upstream.and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: (q - k) <= 30),
    "or": upstream.or_masks(lambda b, h, q, k: k < 4, lambda b, h, q, k: torch.logical_and(q >= k, q - k < 30)),
    "lengths": lambda b, h, q, k: k < LENGTHS[b],
    "nothing": upstream.noop_mask,
}
# Each score with a mask, each mask with a score.
PAIRS = [(score, list(MASKS)[n % len(MASKS)]) for n, score in enumerate(SCORES)]


def block_mask(name, sq=S, sk=S):
    mask = MASKS[name]
    return mask and upstream.create_block_mask(mask, B, H, sq, sk, device="cpu", BLOCK_SIZE=16)


def qkv(heads=H, grad=True, sq=S, sk=S):
    shapes = (B, H, sq, D), (B, heads, sk, D), (B, heads, sk, D)
    return tuple(torch.randn(shape, requires_grad=grad) for shape in shapes)


def at_every_place(function, *scores):
    """What a function makes of all places, by PyTorch's vmap, as its flex_attention computes it."""
    for place in (3, 2, 1, 0):
        places = [None] * 4
        places[place] = 0
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *places))
    return function(*scores, *map(torch.arange, (B, H, S, S)))


def expected(q, k, v, score_mod, mask_mod):
    scores = at_every_place(score_mod, q @ k.mT / math.sqrt(D))
    if mask_mod is not None:
        scores = scores.masked_fill(~at_every_place(mask_mod), -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]) @ v, lse


@pytest.mark.parametrize("score, mask", PAIRS)
def test_results_and_gradients(score, mask, one_thread):
    inputs = (*qkv(), *LEARNED.values())
    q, k, v = inputs[:3]
    out, lse = flex_attention(q, k, v, SCORES[score], block_mask(mask), return_lse=True)
    want, want_lse = expected(q, k, v, SCORES[score], MASKS[mask])
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    dout = torch.randn_like(out)
    gradients = zip(*(torch.autograd.grad(x, inputs, dout, allow_unused=True) for x in (out, want)))
    for got, exact in gradients:
        got = torch.zeros(()) if got is None else got
        exact = torch.zeros_like(got) if exact is None else exact
        torch.testing.assert_close(got, exact, rtol=2e-3, atol=2e-4 * max(1, exact.abs().max().item()))


@pytest.mark.parametrize("score, mask", PAIRS[::3])
def test_as_upstream(score, mask, one_thread):
    q, k, v = (x.to(torch.float64) for x in qkv(grad=False))
    with torch.no_grad():
        want = upstream.flex_attention(q, k, v, SCORES[score], block_mask(mask))
        got = flex_attention(q, k, v, SCORES[score], block_mask(mask))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_other_arguments(one_thread):
    q, k, v = qkv(heads=2, grad=False)
    want, want_lse = upstream.flex_attention(
        q, k, v, SCORES["alibi"], block_mask("causal"), scale=0.3, enable_gqa=True, return_lse=True
    )
    got, lse = flex_attention(
        q, k, v, score_mod=SCORES["alibi"], block_mask=block_mask("causal"), scale=0.3, enable_gqa=True,
        return_lse=True, kernel_options={"BLOCK_M": 64},
    )  # fmt: skip
    aux = flex_attention(q, k, v, SCORES["alibi"], return_aux=upstream.AuxRequest(lse=True), enable_gqa=True)[1]
    assert aux.max_scores is None and aux.lse.shape == lse.shape
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5)
    one = [x[:1] for x in qkv(grad=False)[1:]]
    torch.testing.assert_close(flex_attention(q, *one), flex_attention(q, *(x.expand(B, -1, -1, -1) for x in one)))
    q, k, v = qkv(grad=False, sq=33, sk=70)
    mask = block_mask("causal", 33, 70)
    want = upstream.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), want)


def test_lists_of_blocks(one_thread):
    """A block mask of lists alone shows their blocks, whole."""
    counts = torch.tensor([[[1, 2, 0, 3]]], dtype=torch.int32)
    lists = torch.tensor([[[[2, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0], [1, 2, 3, 0]]]], dtype=torch.int32)
    mask = upstream.BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=16)
    q, k, v = qkv(grad=False, sq=64, sk=64)
    shown = torch.zeros(4, 4, dtype=torch.bool)
    for row, keys in enumerate([[2], [0, 3], [], [1, 2, 3]]):
        shown[row, keys] = True
    shown = shown.repeat_interleave(16, 0).repeat_interleave(16, 1)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)
    want[:, :, 32:48] = 0  # queries that see nothing
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), want, rtol=1e-4, atol=1e-5)


def test_lists_and_a_function(one_thread):
    """The function decides in the blocks of a list, those of the other one are seen whole, and no others at all."""
    counts = torch.tensor([[[1, 1, 0, 2]]], dtype=torch.int32)
    lists = torch.tensor([[[[0, 2, 3, 1], [1, 0, 2, 3], [0, 1, 2, 3], [3, 0, 1, 2]]]], dtype=torch.int32)
    whole = torch.tensor([[[1, 0, 1, 1]]], dtype=torch.int32), lists.flip(-1)
    q, k, v = qkv(grad=False, sq=64, sk=64)
    for full in ((None, None), whole):
        mask = upstream.BlockMask.from_kv_blocks(counts, lists, *full, BLOCK_SIZE=16, mask_mod=MASKS["causal"])
        shown = torch.zeros(64, 64, dtype=torch.bool)
        for row, keys in enumerate(([0], [1], [], [3, 0])):
            for key in keys:
                shown[16 * row : 16 * row + 16, 16 * key : 16 * key + 16] = True
        shown &= torch.arange(64)[:, None] >= torch.arange(64)
        for row, key in enumerate((1, None, 3, 2) if full[0] is not None else ()):
            if key is not None:
                shown[16 * row : 16 * row + 16, 16 * key : 16 * key + 16] = True
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown).nan_to_num(0)
        want = want * shown.any(-1)[:, None]
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), want, rtol=1e-4, atol=1e-5)


def test_vmap(one_thread):
    given = [torch.randn(3, B, H, S, D) for _ in range(3)]
    slopes = torch.rand(3, H)

    def call(q, k, v, slope):
        return flex_attention(q, k, v, lambda s, b, h, q, k: s * slope[h] + DOC[k], block_mask("documents"))

    want = torch.stack([call(*x) for x in zip(*given, slopes)])
    torch.testing.assert_close(torch.vmap(call)(*given, slopes), want, rtol=0, atol=0)


def test_captured_tensors_of_other_dtypes(one_thread):
    q, k, v = qkv(grad=False)
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float64):
        values = (torch.arange(S) % 2).to(dtype)
        got = flex_attention(q, k, v, lambda s, b, h, q, k: s + values[k])
        want = flex_attention(q, k, v, lambda s, b, h, q, k: s + k % 2)
        torch.testing.assert_close(got, want)


# In graphs: masks, captured tensors of every kind, and what is not the same in the next call.
COMPILED = [("relative", "documents"), ("temperature", "lengths"), ("one index after another", "none"), ("lengths", "or")]


def _results(function, captured, *given):
    """out, lse, and gradients of all that has one."""
    results = function(*given)
    douts = [torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape) for x in results]
    gradients = torch.autograd.grad(results, (*given, *captured), douts, allow_unused=True)
    return *results, *(torch.zeros(()) if x is None else x for x in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("score, mask, backend", [(*x, "aot_eager") for x in COMPILED] + [(*COMPILED[0], "inductor")])
def test_compiled(score, mask, backend, one_thread):
    shown = block_mask(mask)

    def call(q, k, v):
        return flex_attention(q * 2, k, v, SCORES[score], shown, return_lse=True)

    given = qkv()
    want = _results(call, LEARNED.values(), *given)
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    for x, y in zip(_results(compiled, LEARNED.values(), *given), want):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), want[:2])


def test_compiled_in_inference_mode(one_thread):
    shown, given = block_mask("causal"), qkv(grad=False)

    def call(q, k, v):
        return flex_attention(q, k, v, SCORES["alibi"], shown)

    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))


def test_numbers_of_a_graph_are_looked_at_again(one_thread):
    """Lengths and numbers that a function has from around it, which other calls change."""
    call = torch.compile(
        lambda q, k, v, n: flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(k - q < n, s, s - n)),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    counters = torch._dynamo.utils.counters
    counters.clear()
    for n, length in ((3, 33), (5, 40), (9, 60), (11, 33)):
        q, k, v = qkv(grad=False, sq=length, sk=length)
        want = flex_attention(q, k, v, lambda s, b, h, q, k: torch.where(k - q < n, s, s - n))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "flex_attention: PyTorch computes this call")
            torch.testing.assert_close(call(q, k, v, n), want)
    assert counters["stats"]["unique_graphs"] == 1


def test_lists_of_more_blocks():
    """A block mask of longer sequences, whose lists name blocks that these do not have, and a list of no block."""
    q, k, v = qkv(grad=False)
    want = flex_attention(q, k, v, block_mask=block_mask("causal"))
    longer = block_mask("causal", 2 * S, 2 * S)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=longer), want)
    last = longer.kv_indices.clone()
    last[..., -1] = -1
    counts = torch.full_like(longer.kv_num_blocks, last.shape[-1])
    every = upstream.BlockMask.from_kv_blocks(counts, last, BLOCK_SIZE=16, mask_mod=MASKS["causal"])
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=every), want)


def test_block_masks_of_any_length(one_thread):
    """In a graph of any length; the sizes of blocks, which are divisors, are those that it is made with."""
    call = torch.compile(flex_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    for length in (65, 80, 90):
        q, k, v = qkv(grad=False, sq=length, sk=length)
        shown = block_mask("documents", length, length)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "flex_attention: PyTorch computes this call")
            torch.testing.assert_close(call(q, k, v, None, shown), flex_attention(q, k, v, None, shown))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.fixture
def enabled():
    enable_flex()
    yield
    enable_flex(False)


@pytest.mark.parametrize("compiled", [True, False])
def test_upstreams_own(compiled, enabled, one_thread):
    """PyTorch's flex_attention, which has no gradient on CPUs."""
    given = qkv()
    own = torch.compile(upstream.flex_attention, fullgraph=True, backend="aot_eager") if compiled else None

    shown = block_mask("documents")

    def call(function):
        return lambda *given: function(*given, SCORES["relative"], shown, return_lse=True)

    want = _results(call(flex_attention), LEARNED.values(), *given)
    got = _results(call(own or upstream.flex_attention), LEARNED.values(), *given)
    for x, y in zip(got, want):
        torch.testing.assert_close(x, y)
    assert got[0].stride() == given[0].stride()


@pytest.mark.slow
def test_what_stays_upstreams(enabled, one_thread):
    given = qkv(grad=False)
    compiled = torch.compile(upstream.flex_attention, backend="aot_eager")
    for mod, words in (
        (lambda s, b, h, q, k: torch.atan(s), "has no torch.atan, want one of"),
        (lambda s, b, h, q, k: s + SLOPES.sum() * SLOPES[h], None),
        (lambda s, b, h, q, k: s + torch.cumsum(SLOPES, 0)[h] * (SLOPES @ SLOPES), None),
    ):
        want = torch.softmax(at_every_place(mod, given[0] @ given[1].mT / math.sqrt(D)), -1) @ given[2]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = compiled(*given, mod)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        said = [str(x.message) for x in caught if "PyTorch computes this call, not fulgur" in str(x.message)]
        assert all(words in x for x in said) and said if words else not said, said
    enable_flex(False)
    torch.compiler.reset()
    with pytest.raises(Exception, match="does not support backward on CPU"):
        compiled(*qkv())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("mod", [None, lambda s, b, h, q, k: s + SLOPES[h]])
def test_what_no_engine_computes_stays_upstreams(mod, backend, enabled, one_thread):
    """This is checked before a graph is made, as its calls come too late to choose upstream's function."""
    q, k, v = (torch.randn(B, H, S, 600) for _ in range(3))
    own = torch.compile(upstream.flex_attention, backend=backend)
    with pytest.warns(UserWarning, match="PyTorch computes this call, not fulgur: q: got head dim 600, want 1 to 576"):
        got = own(q, k, v, mod)
    score = q @ k.mT / math.sqrt(600)
    score = score if mod is None else at_every_place(mod, score)
    torch.testing.assert_close(got, torch.softmax(score, -1) @ v, rtol=1e-4, atol=1e-4)


def with_branch(s, b, h, q, k):
    return s if q > k else s + 1


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(score_mod=with_branch), TypeError, "score_mod: has no value .* want torch.where"),
        (dict(score_mod=lambda s, b, h, q, k: s + math.exp(k)), TypeError, "score_mod: has no value"),
        (dict(score_mod=lambda s, b, h, q, k: s + k.item()), TypeError, "score_mod: has no value"),
        (dict(score_mod=lambda s, b, h, q, k: torch.cumsum(s, 0)), TypeError,
         "score_mod: has no torch.cumsum, want one of"),
        (dict(score_mod=lambda s, b, h, q, k: s + SLOPES), TypeError,
         r"score_mod: got a tensor of shape \(4,\) for an operand, want one of its elements, as tensor\[h, q_idx\]"),
        *(
            (dict(score_mod=mod), TypeError, r"score_mod: got a tensor of shape \(3,\) for an operand, want one of its")
            for mod in (
                lambda s, b, h, q, k: s * (POINTS[q] - POINTS[k]).sum(-1), lambda s, b, h, q, k: s + POINTS[q],
                lambda s, b, h, q, k: 2 - POINTS[q], lambda s, b, h, q, k: torch.exp(POINTS[q]),
                lambda s, b, h, q, k: s if POINTS[q] == POINTS[k] else 0 * s,
            )
        ),
        (dict(score_mod=lambda s, b, h, q, k: s + DOC[q, k]), IndexError,
         "score_mod: captured0: got more indices than 1"),
        (dict(score_mod=lambda s, b, h, q, k: s + DOC[s]), TypeError, "score_mod: got floats for an index"),
        (dict(score_mod=lambda s, b, h, q, k: s + torch.zeros(3, dtype=torch.complex64)[k]), TypeError,
         "score_mod: got a tensor of torch.complex64, want torch.float32"),
        (dict(score_mod=lambda s, b, h, q, k: q // k), ValueError,
         "score_mod: floor_div: want a divisor that is a literal"),
        (dict(score_mod=lambda s, b, h, q, k: "s"), TypeError, "score_mod: got str for an operand"),
        (dict(score_mod=lambda s, b, h, q, k: q > k), ValueError, "score_mod: got a bool, want a number"),
        (dict(score_mod=lambda s, b, h, q, k: sum((torch.rand(S)[k] for _ in range(9)), s)), ValueError,
         "got 9 tensors, want at most 8"),
        (dict(block_mask=lambda b, h, q, k: q > k), TypeError, "block_mask: got function, want a BlockMask"),
        (dict(block_mask=block_mask("causal", 16, 16)), ValueError,
         "block_mask: got one of 16 queries and 16 keys, want 90"),
        (dict(key=torch.rand(B, 2, S, D)), ValueError, "key: got 2 heads, want 4 as query, or enable_gqa=True"),
        (dict(query=torch.rand(H, S, D)), ValueError, "query: got 3 dimensions, want a tensor"),
        (dict(value=3), ValueError, "value: got int"),
        (dict(return_aux=upstream.AuxRequest(max_scores=True)), NotImplementedError, "return_aux: got max_scores=True"),
    ],
)  # fmt: skip
def test_errors(change, error, words):
    given = dict(zip(("query", "key", "value"), qkv(grad=False)))
    with pytest.raises(error, match=words):
        flex_attention(**given | change)
