"""AppendThenAttend to caches of K and V in Python, with the same in NumPy."""

import numpy as np
import pytest

import fulgur

PAGES, PAGE, HQ, HK, D, DV = 9, 4, 4, 2, 10, 6
OLD, NEW = (6, 0, 3), (3, 0, 5)
TABLE = np.array([[3, 8, 0], [-1, -1, -1], [7, 2, 99]], np.int32)
ENDS = np.array([0, 3, 3, 8], np.int32)


def int32(*values):
    return np.array(values, np.int32)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def random(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def caches(rng, dtype=np.float32):
    return random(rng, PAGES, PAGE, HK, D, dtype=dtype), random(rng, PAGES, PAGE, HK, DV, dtype=dtype)


def angles(rng, pairs, dtype=np.float32):
    theta = rng.uniform(0, 6, (20, pairs))
    return np.cos(theta).astype(dtype), np.sin(theta).astype(dtype)


def turned(x, cos, sin, interleaved):
    """Rows (n, heads, dim) by rows (n, pairs), in float64."""
    n = cos.shape[-1]
    x, cos, sin = x.astype(np.float64), cos.astype(np.float64)[:, None], sin.astype(np.float64)[:, None]
    a, b = (np.s_[..., 0 : 2 * n : 2], np.s_[..., 1 : 2 * n : 2]) if interleaved else (
        np.s_[..., :n], np.s_[..., n : 2 * n])  # fmt: skip
    y = x.copy()
    y[a], y[b] = x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos
    return y


def place(b, n):
    return TABLE[b, n // PAGE], n % PAGE


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_ragged_rows_in_pages(rng, dtype, interleaved):
    dtype = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    k_cache, v_cache = caches(rng, dtype)
    before = k_cache.copy(), v_cache.copy()
    k, v, q = (random(rng, 8, h, d, dtype=dtype) for h, d in ((HK, D), (HK, DV), (HQ, D)))
    cos, sin = angles(rng, 4)
    got = fulgur.append(
        k_cache, v_cache, k, v, int32(*OLD), cu_seqlens_k_new=ENDS, page_table=TABLE, cos=cos,
        sin=sin, interleaved=interleaved, q=q, cu_seqlens_q=ENDS, causal=True,
    )  # fmt: skip
    unit = {2: 2e-3 if dtype == np.float16 else 1.6e-2, 4: 1e-6, 8: 1e-14}[np.dtype(dtype).itemsize]
    for b in range(3):
        rows, at = slice(*ENDS[b : b + 2]), slice(OLD[b], OLD[b] + NEW[b])
        want_k, want_q = (turned(x[rows], cos[at], sin[at], interleaved) for x in (k, q))
        assert np.abs(got[rows].astype(float) - want_q).max(initial=0) < unit
        for i in range(NEW[b]):
            where = place(b, OLD[b] + i)
            assert np.abs(k_cache[where].astype(float) - want_k[i]).max() < unit
            assert np.array_equal(v_cache[where], v[rows][i])
            for cache, was in zip((k_cache, v_cache), before):
                cache[where] = was[where]
    assert np.array_equal(k_cache, before[0]) and np.array_equal(v_cache, before[1])


def test_rows_of_the_batch_and_lists(rng):
    """Rows that nothing turns keep their bits, wherever they go."""
    k, v = random(rng, 2, 3, HK, D), random(rng, 2, 3, HK, DV)
    k_cache, v_cache = random(rng, 4, 8, HK, D), random(rng, 4, 8, HK, DV)
    assert fulgur.append(k_cache, v_cache, k, v, int32(5, 0), cache_batch_idx=int32(3, 1)) is None
    assert np.array_equal(k_cache[3, 5:], k[0]) and np.array_equal(v_cache[1, :3], v[1])
    k_cache, v_cache = caches(rng)
    fulgur.append(
        k_cache, v_cache, k, v, int32(2, 1), page_table=int32(5, 6, 0), page_indptr=int32(0, 2, 3)
    )
    assert np.array_equal(k_cache[5, 2:], k[0, :2]) and np.array_equal(k_cache[6, 0], k[0, 2])
    assert np.array_equal(v_cache[0, 1:], v[1])


def test_positions_of_queries(rng):
    """Without a bound all queries stand where the first does; rotary_seqlens says where."""
    cos, sin = angles(rng, 5)
    k, v, q = random(rng, 2, 2, HK, D), random(rng, 2, 2, HK, DV), random(rng, 2, 3, HQ, D)
    old = int32(4, 1)
    for options, first, step in (
        (dict(causal=True), (4, 1), 1),
        (dict(window=(2, -1)), (4, 1), 1),
        (dict(chunk=3), (4, 1), 1),
        (dict(), (4, 1), 0),
        (dict(rotary_seqlens=int32(11, 9)), (11, 9), 0),
        (dict(rotary_seqlens=int32(11, 9), causal=True), (11, 9), 1),
    ):
        k_cache, v_cache = random(rng, 2, 8, HK, D), random(rng, 2, 8, HK, DV)
        got = fulgur.append(k_cache, v_cache, k, v, old, cos=cos, sin=sin, q=q, **options)
        for b in range(2):
            at = first[b] + step * np.arange(3)
            assert np.allclose(got[b], turned(q[b], cos[at], sin[at], False), atol=1e-6)
            at = first[b] + np.arange(2)
            stored = k_cache[b, old[b] : old[b] + 2]
            assert np.allclose(stored, turned(k[b], cos[at], sin[at], False), atol=1e-6)
        out = np.empty_like(q)
        assert fulgur.append(k_cache, v_cache, k, v, old, cos=cos, sin=sin, q=q, q_out=out, **options) is out
        assert np.array_equal(out, got)
        mine = q.copy()
        fulgur.append(k_cache, v_cache, k, v, old, cos=cos, sin=sin, q=mine, q_out=mine, **options)
        assert np.array_equal(mine, got)


def test_torch(rng):
    torch = pytest.importorskip("torch")
    k_cache, v_cache = (torch.zeros(2, 8, HK, d) for d in (D, DV))
    k, v = (torch.from_numpy(random(rng, 2, 1, HK, d)) for d in (D, DV))
    q, (cos, sin) = torch.ones(2, 1, HQ, D), map(torch.from_numpy, angles(rng, 5))
    old = torch.tensor([7, 2], dtype=torch.int32)
    got = fulgur.append(k_cache, v_cache, k, v, old, cos=cos, sin=sin, q=q, causal=True)
    assert isinstance(got, torch.Tensor) and got.shape == q.shape
    assert torch.equal(v_cache[0, 7], v[0, 0]) and torch.equal(v_cache[1, 2], v[1, 0])
    assert v_cache.count_nonzero() == v.numel()
    with pytest.raises(ValueError, match="^k_cache: requires grad"):
        fulgur.append(k_cache.requires_grad_(), v_cache, k, v, old)


def test_steps_are_the_whole(rng):
    """A prompt in chunks, each attended as it comes, gives what one causal call on all gives."""
    tokens = 11
    q, k, v = random(rng, 1, tokens, HQ, D), random(rng, 1, tokens, HK, D), random(rng, 1, tokens, HK, DV)
    cos, sin = angles(rng, 5)
    table, outs = int32(4, 1, 7)[None], []
    k_cache, v_cache = (np.full((PAGES, PAGE, HK, d), np.nan, np.float32) for d in (D, DV))
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 11)):
        step = np.s_[:, begin:end]
        turned_q = fulgur.append(
            k_cache, v_cache, k[step], v[step], int32(begin), page_table=table, cos=cos, sin=sin,
            q=q[step], causal=True,
        )  # fmt: skip
        outs.append(
            fulgur.attention(
                turned_q, k_cache, v_cache, page_table=table, seqused_k=int32(end), causal=True,
                invariant=True,
            )  # fmt: skip
        )
    whole_q, whole_k = (turned(x[0], cos[:tokens], sin[:tokens], False)[None] for x in (q, k))
    want = fulgur.attention(whole_q.astype(np.float32), whole_k.astype(np.float32), v, causal=True)
    assert np.allclose(np.concatenate(outs, 1), want, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_with_attention(rng, packed, rotated):
    """In one call: the bits of both, in the caches and in the results, and q keeps its values."""
    cos, sin = angles(rng, 5)
    lead, ends = ((8,), dict(cu_seqlens_k_new=ENDS)) if packed else ((3, 2), {})
    q, k, v = (random(rng, *lead, h, d) for h, d in ((HQ, D), (HK, D), (HK, DV)))
    table = np.array([[3, 8, 0], [1, 4, 4], [7, 2, 5]], np.int32)
    rows = ends | dict(page_table=table)
    if rotated:
        rows |= dict(cos=cos, sin=sin, rotary_seqlens=int32(11, 0, 7), interleaved=True)
    queries = dict(cu_seqlens_q=ENDS) if packed else {}
    options = dict(causal=True, leftpad_k=int32(2, 0, 1), sinks=random(rng, HQ), scale=0.5)
    one, old, before = caches(rng), int32(*OLD), q.copy()
    two = [x.copy() for x in one]
    got = fulgur.append_attention(
        q, *one, k, v, old, return_lse=True, **rows, **queries, **options
    )  # fmt: skip
    turned_q = fulgur.append(
        *two, k, v, old, causal=True, **rows, **(dict(q=q) | queries if rotated else {})
    )  # fmt: skip
    used = old + (np.diff(ENDS) if packed else 2)
    want = fulgur.attention(
        q if turned_q is None else turned_q, *two, page_table=table, seqused_k=used,
        return_lse=True, **queries, **options,
    )  # fmt: skip
    assert all(map(np.array_equal, got, want)) and all(map(np.array_equal, one, two))
    assert np.array_equal(q, before)
    out = np.empty_like(got[0])
    result = fulgur.append_attention(q, *one, k, v, old, out=out, **rows, **queries, **options)
    assert result is out and np.array_equal(out, want[0])
    with pytest.raises(ValueError, match="^q: got head dim 4, want 10, that of k_cache"):
        fulgur.append_attention(q[..., :4], *one, k, v, old, **{x: y for x, y in rows.items() if x in (
            "page_table", "cu_seqlens_k_new")}, **queries)  # fmt: skip


def test_errors(rng):
    k_cache, v_cache = caches(rng)
    before = k_cache.copy(), v_cache.copy()
    k, v, old = random(rng, 3, 1, HK, D), random(rng, 3, 1, HK, DV), int32(*OLD)
    cos, sin = angles(rng, 5)
    paged = dict(page_table=int32([3, 8], [1, 1], [7, 2]))

    def fails(message, *arguments, error=ValueError, **options):
        with pytest.raises(error, match=message):
            fulgur.append(*arguments, **options)

    call = (k_cache, v_cache, k, v, old)
    fails("^page_table: got 9 as page 0 of sequence 1, want one of the 9 pages of k_cache",
          *call, page_table=int32([3, 8], [9, 9], [7, 2]))  # fmt: skip
    fails("^page_table: row 3 of page 7 would take a new row of sequence 0 and one of sequence 2",
          k_cache, v_cache, k, v, int32(3, 0, 3), page_table=int32([7], [1], [7]))  # fmt: skip
    fails("^cache_seqlens: got 8 at 0, with 1 new rows 9, want at most the 8",
          k_cache, v_cache, k, v, int32(8, 0, 0), **paged)  # fmt: skip
    fails("^cos: got 5 positions, want 7", *call, cos=cos[:5], sin=sin[:5], **paged)
    fails("^sin: not given", *call, cos=cos, **paged)
    fails("^q: given without cos", *call, q=k, **paged)
    fails("^q: not given, want what goes to q_out", *call, cos=cos, sin=sin, q_out=k.copy(), **paged)
    fails("^k_new: got shape", k_cache, v_cache, k[:, :, :1], v, old, **paged)
    fails("^v_new: got f64", k_cache, v_cache, k, v.astype(float), old, **paged)
    fails("^k_cache: shares its memory with k_new", k_cache, v_cache, k_cache[:3, :1], v, old, **paged)
    fails("^interleaved: got 1", *call, interleaved=1, error=TypeError, **paged)
    fails("^threads: got -1", *call, threads=-1, **paged)
    fails("^k_new: ", k_cache, v_cache, None, v, old, error=TypeError, **paged)
    k_cache.flags.writeable = False
    fails("^k_cache: ", *call, error=(TypeError, ValueError), **paged)
    assert np.array_equal(k_cache, before[0]) and np.array_equal(v_cache, before[1])
