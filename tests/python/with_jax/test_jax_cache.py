"""Caches of K and V in fulgur.jax, with fulgur.attention of NumPy's arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_append import turned

import fulgur
from fulgur.jax import append, append_attention, attention

PAGES, PAGE, HQ, HK, D, DV = 12, 4, 4, 2, 8, 6


def int32(*values):
    return np.array(values, np.int32)


TABLE = int32([3, 9, 0], [-1, -1, -1], [7, 2, 99])
USED, LEFTPAD, ENDS = int32(11, 0, 5), int32(2, 0, 4), int32(0, 3, 3, 5)
KINDS = {
    "pages": dict(page_table=TABLE, seqused_k=USED),
    "padded pages": dict(page_table=TABLE, seqused_k=USED, leftpad_k=LEFTPAD),
    "lists": dict(page_table=int32(3, 9, 0, 7, 2), page_indptr=int32(0, 3, 3, 5), seqused_k=USED),
    "shared prefixes": dict(
        page_table=TABLE[[0, 0, 2]], seqused_k=int32(11, 9, 5), prefix_groups=int32(0, 2, 3),
        prefix_lens=int32(6, 0),
    ),
    "rows": dict(cache_batch_idx=int32(4, 0, 2)),
    "padded": dict(seqused_k=int32(4, 0, 3), leftpad_k=int32(1, 0, 3)),
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)
each_packing = pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])


def make(kind, packed, seed=0):
    """q, k, v, the arrays that say where the keys lie, and a function of all with the other options."""
    rng = np.random.default_rng(seed)
    entries = 3 if kind == "padded" else PAGES
    shapes = (5, HQ, D) if packed else (3, 2, HQ, D), (entries, PAGE, HK, D), (entries, PAGE, HK, DV)
    where = KINDS[kind] | (dict(cu_seqlens_q=ENDS) if packed else {})
    options = dict(causal=True, scale=0.7, invariant=True, return_lse=True)
    if packed and kind in ("rows", "padded"):
        options["max_seqlen_q"] = 3
    return [rng.standard_normal(shape, np.float32) for shape in shapes], where, options


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


@each_packing
@each_kind
def test_results(kind, packed):
    tensors, where, options = make(kind, packed)
    want = fulgur.attention(*tensors, **where, **options)
    assert_equal(attention(*tensors, **where, **options), want)
    compiled = jax.jit(lambda tensors, where: attention(*tensors, **where, **options))
    assert_equal(compiled(tensors, where), want)


def test_prefixes_are_read_once():
    """The other pages of a prefix are not even read."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((5, 2, 8, 64), np.float32), rng.standard_normal((40, 16, 2, 64), np.float32)
    table = np.zeros((5, 400), np.int32)  # of room that makes it worth while
    table[:, :20] = np.arange(20)
    table[:, 20:23] = 20 + np.arange(15).reshape(5, 3)
    where = dict(page_table=table, seqused_k=320 + int32(5, 16, 30, 48, 2), causal=True)
    want = fulgur.attention(q, k, k, **where)
    table[1:, :20] = 39
    k[39] = np.nan
    prefixes = dict(prefix_groups=int32(0, 5), prefix_lens=int32(320))
    np.testing.assert_allclose(attention(q, k, k, **where, **prefixes), want, atol=1e-6)


@each_kind
@pytest.mark.parametrize("mapped", ["queries", "all"])
def test_vmap(kind, mapped):
    (q, k, v), where, options = make(kind, False)
    (q2, k2, v2), _, _ = make(kind, False, seed=1)
    of_batch = kind not in ("lists", "shared prefixes")
    turned = {name: x[::-1].copy() if of_batch else x for name, x in where.items()}
    if mapped == "queries":
        k2, v2, turned = k, v, where
        got = jax.vmap(lambda q: attention(q, k, v, **where, **options))(np.stack([q, q2]))
    else:
        both = {name: np.stack([x, turned[name]]) for name, x in where.items()}
        stacks = (np.stack(x) for x in ((q, q2), (k, k2), (v, v2)))
        got = jax.vmap(lambda tensors, where: attention(*tensors, **where, **options))(tuple(stacks), both)
    assert_equal([x[0] for x in got], fulgur.attention(q, k, v, **where, **options))
    assert_equal([x[1] for x in got], fulgur.attention(q2, k2, v2, **turned, **options))


@each_kind
def test_there_is_no_gradient(kind):
    (q, k, v), where, options = make(kind, False)
    function = partial(attention, **where, **options | dict(return_lse=False))
    for argument in range(3):
        with pytest.raises(ValueError, match="^(page_table|cache_batch_idx|leftpad_k): given where a gradient is"):
            jax.grad(lambda *x: function(*x).sum(), argument)(q, k, v)
    stopped = jax.grad(lambda *x: (function(*map(jax.lax.stop_gradient, x)) * x[0][..., :DV]).sum())
    np.testing.assert_array_equal(stopped(q, k, v)[..., :DV], function(q, k, v))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seqused_k=None), "seqused_k: not given, want the lengths of the sequences with page_table"),
        (dict(page_table=TABLE[:2]), r"page_table: got shape \(2, 3\), want \(3, 3\)"),
        (dict(page_table=TABLE.astype(np.float32)), "page_table: got f32, want i32"),
        (dict(page_indptr=int32(0, 3, 3, 5)), "page_table: got 2 dimensions"),
        (dict(cache_batch_idx=USED), "cache_batch_idx: given with page_table, want one of both"),
        (dict(leftpad_k=USED[:2]), "leftpad_k: got shape"),
        (dict(prefix_lens=USED), "prefix_groups: not given, want it with prefix_lens"),
        (dict(prefix_groups=USED), "prefix_lens: not given, want it with prefix_groups"),
        (dict(max_seqlen_k=-1), "max_seqlen_k: got -1, want >= 0"),
    ],
)
def test_wrong_arguments(change, message):
    tensors, where, options = make("pages", False)
    with pytest.raises(ValueError, match=f"^{message}"):
        jax.jit(lambda tensors: attention(*tensors, **where | options | change))(tensors)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seqused_k=int32(11, 13, 5)), "seqused_k: got 13 at 1, want 0 to 12"),
        (dict(page_table=TABLE + 9), "page_table: got 12 as page 0 of sequence 0"),
        (dict(prefix_groups=int32(0, 4), prefix_lens=int32(0)), "prefix_groups: ends with 4, want at most 3"),
    ],
)
def test_wrong_values(change, message):
    tensors, where, options = make("pages", False)
    # JAX raises ValueError where the compiled function has run before.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"^INVALID_ARGUMENT: {message}"):
        jax.block_until_ready(attention(*tensors, **where | options | change))
    attention(*tensors, **where | options)


# Append.

OLD = int32(6, 0, 3)
GROWING = int32([3, 9, 0], [5, -1, -1], [7, 2, 99])
APPENDS = {
    "contiguous": dict(),
    "rows": dict(cache_batch_idx=int32(4, 0, 2)),
    "pages": dict(page_table=GROWING),
    "lists": dict(page_table=int32(3, 9, 5, 7, 2), page_indptr=int32(0, 2, 3, 5)),
    "ragged pages": dict(page_table=GROWING, cu_seqlens_k_new=ENDS),
}
each_append = pytest.mark.parametrize("kind", APPENDS)
TURNS = {
    "as they are": dict(),
    "turned": dict(interleaved=True),
    "turned, queries": dict(causal=True),
    "turned, queries elsewhere": dict(rotary_seqlens=int32(11, 2, 0), window=(3, -1)),
}


def make_append(kind, turns="as they are", seed=0, dtype=np.float32):
    """The arrays of a call that stand first, and its options."""
    rng = np.random.default_rng(seed)
    options = APPENDS[kind] | TURNS[turns]
    ragged = "cu_seqlens_k_new" in options
    rows = (5,) if ragged else (3, 2)
    entries = (3 if kind == "contiguous" else PAGES, PAGE if "page_table" in options else 12)
    shapes = [(*entries, HK, D), (*entries, HK, DV), (*rows, HK, D), (*rows, HK, DV)]
    tensors = [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]
    if turns != "as they are":
        theta = rng.uniform(0, 6, (20, 3))
        options |= dict(cos=np.cos(theta).astype(np.float32), sin=np.sin(theta).astype(np.float32))
    if "queries" in turns:
        options["q"] = rng.standard_normal((*rows, HQ, D), np.float32).astype(dtype)
        options |= dict(cu_seqlens_q=ENDS) if ragged else {}
    return [*tensors, OLD], options


def appended(tensors, options):
    """What fulgur.append gives, as fulgur.jax.append does."""
    k_cache, v_cache, *rows = (x.copy() for x in tensors)
    q = fulgur.append(k_cache, v_cache, *rows, **options)
    return (k_cache, v_cache) if q is None else (k_cache, v_cache, q)


@pytest.mark.parametrize("turns", TURNS)
@each_append
def test_append(kind, turns):
    tensors, options = make_append(kind, turns)
    want, before = appended(tensors, options), [x.copy() for x in tensors]
    assert_equal(append(*tensors, **options), want)
    compiled = jax.jit(lambda tensors, q: append(*tensors, **options | dict(q=q)))
    assert_equal(compiled(tensors, options.get("q")), want)
    assert_equal(tensors, before)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_append_of_other_dtypes(dtype):
    tensors, options = make_append("pages", "turned, queries", dtype=dtype)
    assert_equal(append(*tensors, **options), appended(tensors, options))


def test_append_of_float64():
    with jax.enable_x64(True):
        tensors, options = make_append("rows", "turned", dtype=np.float64)
        assert_equal(append(*tensors, **options), appended(tensors, options))


def test_lists_of_numbers():
    (*caches, k, v, old), where = make_append("pages")
    lists = dict(page_table=GROWING.tolist())
    assert_equal(append(*caches, k, v, old.tolist(), **lists), appended([*caches, k, v, old], where))
    q = np.ones((3, 1, HQ, D), np.float32)
    got = attention(q, *caches, seqused_k=old.tolist(), **lists)
    assert_equal(got, fulgur.attention(q, *caches, seqused_k=old, **where))


def test_packed_queries_behind_the_last_sequence_stay():
    tensors, options = make_append("ragged pages", "turned, queries")
    q = np.concatenate([options["q"], np.full((2, HQ, D), 7, np.float32)])
    *_, got = append(*tensors, **options | dict(q=q))
    assert_equal(got, [*appended(tensors, options)[2], *q[5:]])


def addresses(arrays):
    return [x.unsafe_buffer_pointer() for x in arrays]


def test_donated_caches_are_written_in_place():
    tensors, options = make_append("pages", "turned, queries")
    want = appended(tensors, options)
    *rows, q = tensors[2:], options.pop("q")
    step = jax.jit(lambda k, v, q, rows: append(k, v, *rows, q=q, **options), donate_argnums=(0, 1, 2))
    written = [jnp.array(x, copy=True) for x in (*tensors[:2], q)]
    where = addresses(written)
    got = step(*written, *rows)
    assert addresses(got) == where and all(x.is_deleted() for x in written)
    assert_equal(got, want)


def test_caches_that_are_used_later_are_copied():
    tensors, options = make_append("pages")

    def both(k_cache, v_cache, *rows):
        return append(k_cache, v_cache, *rows, **options), k_cache + 0, v_cache + 0

    written = [jnp.array(x, copy=True) for x in tensors[:2]]
    got, *old = jax.jit(both, donate_argnums=(0, 1))(*written, *tensors[2:])
    assert_equal(got, appended(tensors, options))
    assert_equal(old, tensors[:2])


@pytest.mark.parametrize("donated", [(), (0,)])
def test_one_array_in_all_places(donated):
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 8), np.float32)
    options = dict(cos=np.full((3, 2), 0.6, np.float32), sin=np.full((3, 2), 0.8, np.float32), causal=True)
    call = jax.jit(lambda x: append(x, x, x, x, int32(0), q=x, **options), donate_argnums=donated)
    assert_equal(call(jnp.array(x, copy=True)), appended([x, x, x, x, int32(0)], options | dict(q=x)))


def test_decoding_under_scan():
    """Tokens one by one, in place, as one causal call on all of them gives."""
    tokens, batch = 7, 2
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((batch, tokens, h, d), np.float32) for h, d in ((HQ, D), (HK, D), (HK, DV)))
    theta = rng.uniform(0, 6, (tokens, D // 2))
    cos, sin = (f(theta).astype(np.float32) for f in (np.cos, np.sin))
    table = int32([3, 8], [7, 2])

    @partial(jax.jit, donate_argnums=0)
    def decode(caches, q, k, v):
        def step(carry, rows):
            caches, lengths = carry
            q, k, v = (x[:, None] for x in rows)
            *caches, q = append(*caches, k, v, lengths, page_table=table, cos=cos, sin=sin, q=q, causal=True)
            lengths += 1
            return (caches, lengths), attention(q, *caches, page_table=table, seqused_k=lengths, causal=True)

        rows = [jnp.swapaxes(x, 0, 1) for x in (q, k, v)]
        (caches, lengths), outs = jax.lax.scan(step, (caches, jnp.zeros(batch, jnp.int32)), rows)
        return caches, lengths, jnp.swapaxes(outs[:, :, 0], 0, 1)

    caches = [jnp.full((PAGES, PAGE, HK, d), jnp.nan) for d in (D, DV)]
    where = addresses(caches)
    text = decode.lower(caches, q, k, v).compile().as_text()
    assert "fulgur_append" in text and f" f32[{PAGES},{PAGE},{HK},{D}]{{3,2,1,0}} copy(" not in text
    caches, lengths, out = decode(caches, q, k, v)
    assert addresses(caches) == where
    assert_equal(lengths, [tokens] * batch)
    np.testing.assert_array_equal(np.asarray(caches[1])[table].reshape(batch, -1, HK, DV)[:, :tokens], v)
    q, k = (np.stack([turned(x, cos, sin, False) for x in rows]) for rows in (q, k))
    scores = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, HQ // HK, 2)) / D**0.5
    P = np.exp(np.where(np.tri(tokens, dtype=bool), scores, -np.inf))
    want = np.einsum("bhij,bjhd->bihd", P / P.sum(-1, keepdims=True), np.repeat(v, HQ // HK, 2))
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_shapes_that_change_are_traced_again():
    step = jax.jit(lambda caches, rows, old: append(*caches, *rows, old))
    for batch, new in ((3, 2), (3, 1), (1, 4), (2, 0), (3, 2)):
        tensors, _ = make_append("contiguous")
        tensors = [x[:batch] for x in tensors]
        tensors[2:4] = (np.resize(x, (batch, new, *x.shape[2:])) for x in tensors[2:4])
        assert_equal(step(tensors[:2], tensors[2:4], tensors[4]), appended(tensors, {}))


@pytest.mark.parametrize("turns", ["as they are", "turned, queries"])
@pytest.mark.parametrize("mapped", ["rows", "all"])
@each_append
def test_vmap_of_append(kind, mapped, turns):
    calls = [make_append(kind, turns, seed) for seed in (0, 1)]
    if mapped == "rows":  # new ones, into copies of one cache
        (*caches, k, v, _), options = calls[0]
        k2, v2 = calls[1][0][2:4]
        calls[1] = [*caches, k2, v2, OLD], options
        got = jax.vmap(lambda k, v: append(*caches, k, v, OLD, **options))(np.stack([k, k2]), np.stack([v, v2]))
    else:
        fixed = ("causal", "interleaved", "window")
        known = {name: x for name, x in calls[0][1].items() if name in fixed}
        arrays = [(tensors, {n: x for n, x in options.items() if n not in fixed}) for tensors, options in calls]
        stacked = jax.tree.map(lambda *x: np.stack(x), *arrays)
        got = jax.vmap(lambda tensors, options: append(*tensors, **options, **known))(*stacked)
    for n, (tensors, options) in enumerate(calls):
        assert_equal([x[n] for x in got], appended(tensors, options))


def test_there_is_no_gradient_of_append():
    (*caches, k, v, old), options = make_append("pages")
    function = lambda k: append(*caches, k, v, old, **options)[0]  # noqa: E731
    for call in (function, jax.jit(function)):
        with pytest.raises(ValueError, match="^append: called where a gradient is wanted"):
            jax.grad(lambda k: call(k).sum())(k)
    stopped = jax.grad(lambda k: (k * function(jax.lax.stop_gradient(k)).sum()).sum())(k)
    np.testing.assert_allclose(stopped, function(k).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(k_cache=None), ValueError, "k_cache: not given"),
        (dict(k_new=None), ValueError, "k_new: not given"),
        (dict(v_cache=np.zeros((PAGES, PAGE, HK, DV), np.float16)), ValueError, "v_cache: got f16, want f32"),
        (dict(k_cache=np.zeros((PAGES, PAGE, HK, D), np.int32)), ValueError, "k_cache: got i32, want f32"),
        (dict(k_new=np.zeros((3, 2, HK, D + 1), np.float32)), ValueError, "k_new: got shape"),
        (dict(v_new=np.zeros((3, 2, HK, DV), np.int8)), ValueError, "v_new: got int8, want f32"),
        (dict(cache_seqlens=None), ValueError, "cache_seqlens: got no tensor"),
        (dict(cache_seqlens=np.zeros(3, np.float32)), ValueError, "cache_seqlens: got f32, want i32"),
        (dict(page_table=GROWING[:2]), ValueError, r"page_table: got shape \(2, 3\), want \(3, 3\)"),
        (dict(page_indptr=int32(0, 3, 3, 5)), ValueError, "page_table: got 2 dimensions"),
        (dict(cache_batch_idx=OLD), ValueError, "cache_batch_idx: given with page_table"),
        (dict(cu_seqlens_k_new=ENDS), ValueError, "k_new: got 4 dimensions"),
        (dict(sin=None), ValueError, "sin: not given"),
        (dict(cos=None, sin=None), ValueError, "q: given without cos and sin"),
        (dict(cos=np.zeros((20, 9), np.float32), sin=np.zeros((20, 9), np.float32)), ValueError, "cos: got 9 columns"),
        (dict(q=np.zeros((3, 2, HQ, D + 2), np.float32)), ValueError, "q: got shape"),
        (dict(q=None, cu_seqlens_q=ENDS), ValueError, "cu_seqlens_q: given without q"),
        (dict(rotary_seqlens=OLD[:2]), ValueError, "rotary_seqlens: got shape"),
        (dict(interleaved=1), TypeError, "interleaved: got 1, want True or False"),
        (dict(window=3), TypeError, "window: got 3"),
        (dict(chunk=-1), ValueError, "chunk: got -1"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_append(change, error, message):
    tensors, options = make_append("pages", "turned, queries")
    call = dict(zip(("k_cache", "v_cache", "k_new", "v_new", "cache_seqlens"), tensors)) | options | change
    fixed = {name: call.pop(name) for name in ("causal", "interleaved", "window", "chunk") if name in call}
    for function in (append, jax.jit(lambda **arrays: append(**arrays, **fixed))):
        with pytest.raises(error, match=f"^{message}"):
            function(**call, **(fixed if function is append else {}))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(page_table=TABLE), "page_table: got -1 as page 0 of sequence 1, want one of the 12 pages"),
        (dict(cache_seqlens=int32(6, 0, 11)), "cache_seqlens: got 11 at 2, with 2 new rows 13, want at most the 12"),
        (dict(cache_seqlens=int32(-1, 0, 3)), "cache_seqlens: got -1 at 0"),
        (dict(rotary_seqlens=int32(19, 0, 0)), "cos: got 20 positions, want 21"),
    ],
)
def test_wrong_values_of_append(change, message):
    tensors, options = make_append("pages", "turned")
    options |= dict(cache_seqlens=tensors.pop()) | change
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"^INVALID_ARGUMENT: {message}"):
        jax.block_until_ready(append(*tensors, **options))


# Append and attention in one call.

BESIDES = {
    "alone": dict(),
    "sinks and slopes": dict(
        sinks=np.linspace(-1, 2, HQ, dtype=np.float32), alibi_slopes=np.linspace(0.1, 1, HQ, dtype=np.float32)
    ),
    "a tree": dict(tree_mask=np.array([[1, 3], [1, 2], [1, 3]])),
    "fewer queries": dict(seqused_q=int32(2, 0, 1), softcap=3.0, scale=0.4),
}
NUMBERS = ("causal", "interleaved", "window", "scale", "softcap", "invariant", "return_lse")


def make_both(kind, turns="as they are", besides="alone", seed=0, dtype=np.float32):
    """The arrays of a call that stand first, further ones by name, and its numbers."""
    tensors, options = make_append(kind, turns, seed, dtype)
    q = np.random.default_rng(seed + 9).standard_normal((*tensors[2].shape[:-2], HQ, D), np.float32)
    options |= BESIDES[besides] | dict(invariant=True, return_lse=True)
    options.pop("q", None)
    if "cu_seqlens_k_new" in options:
        options["cu_seqlens_q"] = ENDS
        if "tree_mask" in options:
            options["tree_mask"] = np.array([1, 3, 5, 1, 3])
    numbers = {name: options.pop(name) for name in NUMBERS if name in options}
    return [q.astype(dtype), *tensors], options, numbers


def both(tensors, options, numbers):
    """What fulgur.append_attention gives, as fulgur.jax.append_attention does."""
    q, k_cache, v_cache, *rows = (x.copy() for x in tensors)
    return k_cache, v_cache, *fulgur.append_attention(q, k_cache, v_cache, *rows, **options, **numbers)


@pytest.mark.parametrize("besides", BESIDES)
@pytest.mark.parametrize("turns", TURNS)
@each_append
def test_append_attention(kind, turns, besides):
    tensors, options, numbers = make_both(kind, turns, besides)
    want, before = both(tensors, options, numbers), [x.copy() for x in tensors]
    assert_equal(append_attention(*tensors, **options, **numbers), want)
    compiled = jax.jit(lambda tensors, options: append_attention(*tensors, **options, **numbers))
    if "tree_mask" in options:
        options["tree_mask"] = options["tree_mask"][..., None].view(np.uint32)
    assert_equal(compiled(tensors, options), want)
    assert_equal(tensors, before)
    without = append_attention(*tensors, **options, **numbers | dict(return_lse=False))
    assert_equal(without, want[:3])


@pytest.mark.parametrize("turns", TURNS)
@each_append
def test_append_attention_is_append_and_attention(kind, turns):
    tensors, options, numbers = make_both(kind, turns)
    places = ("cos", "sin", "rotary_seqlens", "interleaved", "cu_seqlens_k_new")
    given = options | numbers
    writing = {name: given[name] for name in places if name in given}
    reading = {name: x for name, x in given.items() if name not in places}
    shared = {name: x for name, x in reading.items() if name not in ("invariant", "return_lse")}

    @jax.jit
    def two(q, k_cache, v_cache, k, v, old):
        if "cos" in writing:
            *caches, q = append(k_cache, v_cache, k, v, old, q=q, **writing, **shared)
        else:
            caches = append(k_cache, v_cache, k, v, old, **writing, **shared)
        used = old + (np.diff(ENDS) if "cu_seqlens_k_new" in writing else 2)
        return *caches, *attention(q, *caches, seqused_k=used, **reading)

    if "cos" not in writing:
        shared.pop("cu_seqlens_q", None)
    assert_equal(append_attention(*tensors, **options, **numbers), map(np.asarray, two(*tensors)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_append_attention_of_other_dtypes(dtype):
    tensors, options, numbers = make_both("pages", "turned, queries", dtype=dtype)
    assert_equal(append_attention(*tensors, **options, **numbers), both(tensors, options, numbers))


def test_append_attention_of_float64():
    with jax.enable_x64(True):
        tensors, options, numbers = make_both("rows", "turned, queries", dtype=np.float64)
        got = append_attention(*tensors, **options, **numbers)
        assert all(x.dtype == np.float64 for x in got)
        assert_equal(got, both(tensors, options, numbers))


def test_append_attention_to_padded_and_shared_pages():
    """Padded on the left, and with a prefix that two sequences have."""
    tensors, options, numbers = make_both("pages", "turned, queries")
    padded = options | dict(leftpad_k=int32(2, 0, 1))
    assert_equal(append_attention(*tensors, **padded, **numbers), both(tensors, padded, numbers))
    tensors[-1] = int32(6, 5, 3)
    prefixes = options | dict(page_table=int32([3, 9, 0], [3, 5, 0], [7, 2, 99]))
    prefixes |= dict(prefix_groups=int32(0, 2, 3), prefix_lens=int32(4, 0))
    assert_equal(append_attention(*tensors, **prefixes, **numbers), both(tensors, prefixes, numbers))


def test_append_attention_in_donated_caches():
    """Under scan, too, and as long as nothing else has a use of them."""
    (q, *caches, k, v, old), options, numbers = make_both("pages", "turned, queries")

    @partial(jax.jit, donate_argnums=0)
    def steps(caches, q, k, v):
        def step(carry, rows):
            caches, lengths = carry
            q, k, v = (x[:, None] for x in rows)
            *caches, out, lse = append_attention(q, *caches, k, v, lengths, **options, **numbers)
            return (caches, lengths + 1), (out[:, 0], lse[..., 0])

        rows = [jnp.swapaxes(x, 0, 1) for x in (q, k, v)]
        (caches, _), results = jax.lax.scan(step, (caches, jnp.asarray(old)), rows)
        return caches, results

    k_cache, v_cache = (x.copy() for x in caches)
    wanted = []
    for n in range(2):
        rows = [x[:, n : n + 1] for x in (q, k, v)]
        lengths = old + np.int32(n)
        wanted.append(fulgur.append_attention(rows[0], k_cache, v_cache, *rows[1:], lengths, **options, **numbers))
    written = [jnp.array(x, copy=True) for x in caches]
    where = addresses(written)
    got, (outs, lses) = steps(written, q, k, v)
    assert addresses(got) == where and all(x.is_deleted() for x in written)
    assert_equal(got, [k_cache, v_cache])
    assert_equal(outs, [out[:, 0] for out, _ in wanted])
    assert_equal(lses, [lse[..., 0] for _, lse in wanted])


@pytest.mark.parametrize("turns", ["as they are", "turned, queries"])
@pytest.mark.parametrize("mapped", ["rows", "all"])
@each_append
def test_vmap_of_append_attention(kind, mapped, turns):
    calls = [make_both(kind, turns, "a tree", seed) for seed in (0, 1)]
    tensors, options, numbers = calls[0]
    if mapped == "rows":  # new ones, into copies of one cache
        (q2, _, _, *rows2, _), (_, *caches, _, _, old) = calls[1][0], tensors
        calls[1] = [q2, *caches, *rows2, old], options, numbers
        rows = [np.stack(x) for x in zip((tensors[0], *tensors[3:5]), (q2, *rows2))]
        got = jax.vmap(lambda q, k, v: append_attention(q, *caches, k, v, old, **options, **numbers))(*rows)
    else:
        stacked = jax.tree.map(lambda *x: np.stack(x), *(call[:2] for call in calls))
        stacked[1]["tree_mask"] = stacked[1]["tree_mask"][..., None].view(np.uint32)
        got = jax.vmap(lambda tensors, options: append_attention(*tensors, **options, **numbers))(*stacked)
    for n, call in enumerate(calls):
        assert_equal([x[n] for x in got], both(*call))


def test_there_is_no_gradient_of_append_attention():
    (q, *rest), options, numbers = make_both("pages")
    function = lambda q: append_attention(q, *rest, **options, **numbers)[2]  # noqa: E731
    for call in (function, jax.jit(function)):
        with pytest.raises(ValueError, match="^append_attention: called where a gradient is wanted"):
            jax.grad(lambda q: call(q).sum())(q)
    stopped = jax.grad(lambda q: (q * function(jax.lax.stop_gradient(q)).sum()).sum())(q)
    np.testing.assert_allclose(stopped, function(q).sum(), rtol=1e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        *((dict([(name, None)]), TypeError, f"{name}: got None, want an array")
          for name in ("q", "k_cache", "v_cache", "k_new", "v_new", "cache_seqlens")),
        (dict(q=np.zeros((3, 2, HQ, D + 1), np.float32)), ValueError, "q: got shape"),
        (dict(q=np.zeros((3, 2, HK + 1, D), np.float32)), ValueError, "q: got 3 heads"),
        (dict(q=np.zeros((2, 2, HQ, D), np.float32)), ValueError, "q: got"),
        (dict(q=np.zeros((3, 2, HQ, D), np.float16)), ValueError, "q: got f16, want f32"),
        (dict(k_new=np.zeros((3, 2, HK, D + 1), np.float32)), ValueError, "k_new: got shape"),
        (dict(v_cache=np.zeros((PAGES, PAGE, HK, DV), np.float16)), ValueError, "v_cache: got f16, want f32"),
        (dict(cache_seqlens=np.zeros(3, np.float32)), ValueError, "cache_seqlens: got f32, want i32"),
        (dict(page_table=GROWING[:2]), ValueError, r"page_table: got shape \(2, 3\), want \(3, 3\)"),
        (dict(cache_batch_idx=OLD), ValueError, "cache_batch_idx: given with page_table"),
        (dict(cu_seqlens_k_new=ENDS), ValueError, "k_new: got 4 dimensions"),
        (dict(cu_seqlens_q=ENDS), ValueError, "q: got 4 dimensions"),
        (dict(sin=None), ValueError, "sin: not given"),
        (dict(sinks=np.zeros(HQ + 1, np.float32)), ValueError, "sinks: got shape"),
        (dict(leftpad_k=OLD[:2]), ValueError, "leftpad_k: got shape"),
        (dict(tree_mask=np.zeros((3, 2), np.int32)), ValueError, "tree_mask: got int32"),
        (dict(prefix_lens=OLD), ValueError, "prefix_groups: not given"),
        (dict(seqused_q=OLD[:2]), ValueError, "seqused_q: got shape"),
        (dict(interleaved=1), TypeError, "interleaved: got 1, want True or False"),
        (dict(return_lse=1), TypeError, "return_lse: got 1, want True or False"),
        (dict(window=3), TypeError, "window: got 3"),
        (dict(softcap=-1.0), ValueError, "softcap: got -1"),
        (dict(max_workspace=-1), ValueError, "max_workspace: got -1"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_append_attention(change, error, message):
    tensors, options, numbers = make_both("pages", "turned, queries")
    names = "q", "k_cache", "v_cache", "k_new", "v_new", "cache_seqlens"
    call = dict(zip(names, tensors)) | options | numbers | change
    known = {name: x for name, x in call.items() if not isinstance(x, np.ndarray)}
    arrays = {name: x for name, x in call.items() if name not in known}
    for function in (append_attention, jax.jit(lambda **arrays: append_attention(**arrays, **known))):
        with pytest.raises(error, match=f"^{message}"):
            function(**arrays, **(known if function is append_attention else {}))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(page_table=TABLE), "page_table: got -1 as page 0 of sequence 1, want one of the 12 pages"),
        (dict(cache_seqlens=int32(6, 0, 11)), "cache_seqlens: got 11 at 2, with 2 new rows 13, want at most the 12"),
        (dict(leftpad_k=int32(9, 0, 0)), "leftpad_k: got 9 at 0, want 0 to 8"),
        (dict(rotary_seqlens=int32(19, 0, 0)), "cos: got 20 positions, want 21"),
        (dict(max_workspace=1), "max_workspace: got 1 bytes, want at least"),
    ],
)
def test_wrong_values_of_append_attention(change, message):
    tensors, options, numbers = make_both("pages", "turned, queries")
    call = options | dict(cache_seqlens=tensors.pop()) | numbers | change
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"^INVALID_ARGUMENT: {message}"):
        jax.block_until_ready(append_attention(*tensors, **call))
