"""Caches of K and V in Python: pages, rows of the batch, left padding, for every way to call."""

import numpy as np
import pytest

import fulgur

PAGES, PAGE, HQ, HK, D, DV = 12, 4, 4, 2, 8, 6
LENGTHS, LEFTPAD = (11, 0, 5), (2, 0, 5)


def int32(values):
    return np.array(values, np.int32)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def random(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def caches(rng):
    return random(rng, PAGES, PAGE, HK, D), random(rng, PAGES, PAGE, HK, DV)


TABLE = int32([[3, 9, 0], [-1, -1, -1], [7, 2, 99]])


def keys_of(cache, b, leftpad=0):
    """The keys of sequence b side by side, (1, sk, heads, dim)."""
    ids = TABLE[b, : -(-LENGTHS[b] // PAGE)]
    return cache[ids].reshape(1, -1, *cache.shape[2:])[:, leftpad : LENGTHS[b]]


def expect(got, q, k_cache, v_cache, leftpad=(0, 0, 0), **options):
    for b in range(3):
        k, v = (keys_of(cache, b, leftpad[b]) for cache in (k_cache, v_cache))
        want = fulgur.attention(q[b : b + 1], k, v, invariant=True, **options)
        assert np.array_equal(got[b : b + 1], want), b


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("padded", [False, True])
def test_table(rng, engine, padded):
    q, (k, v) = random(rng, 3, 2, HQ, D), caches(rng)
    where = dict(page_table=TABLE, seqused_k=int32(LENGTHS), causal=True, engine=engine)
    pads = dict(leftpad_k=int32(LEFTPAD)) if padded else {}
    got = fulgur.attention(q, k, v, invariant=True, **where, **pads)
    expect(got, q, k, v, LEFTPAD if padded else (0, 0, 0), causal=True, engine=engine)


def test_lists(rng):
    q, (k, v) = random(rng, 3, 2, HQ, D), caches(rng)
    got = fulgur.attention(
        q, k, v, page_table=int32([3, 9, 0, 7, 2]), page_indptr=int32([0, 3, 3, 5]),
        seqused_k=int32(LENGTHS), invariant=True,
    )  # fmt: skip
    expect(got, q, k, v)


def test_packed_queries(rng):
    q, (k, v) = random(rng, 6, HQ, D), caches(rng)
    out, lse = fulgur.attention(
        q, k, v, cu_seqlens_q=int32([0, 3, 3, 6]), page_table=TABLE, seqused_k=int32(LENGTHS),
        causal=True, return_lse=True, invariant=True,
    )  # fmt: skip
    assert out.shape == (6, HQ, DV) and lse.shape == (HQ, 6)
    for b, begin in ((0, 0), (2, 3)):
        rows = slice(begin, begin + 3)
        one = fulgur.attention(
            q[None, rows], keys_of(k, b), keys_of(v, b), causal=True, return_lse=True,
            invariant=True,
        )  # fmt: skip
        assert np.array_equal(out[rows], one[0][0]) and np.array_equal(lse[:, rows], one[1][0])


def test_rows_of_the_batch(rng):
    q, k, v = random(rng, 2, 1, HQ, D), random(rng, 5, 9, HK, D), random(rng, 5, 9, HK, DV)
    got = fulgur.attention(q, k, v, cache_batch_idx=int32([4, 1]), invariant=True)
    assert np.array_equal(got, fulgur.attention(q, k[[4, 1]], v[[4, 1]], invariant=True))


def test_layouts_are_views(rng):
    q, both = random(rng, 3, 1, HQ, D), random(rng, PAGES, 2, PAGE, HK, D)
    where = dict(page_table=TABLE, seqused_k=int32(LENGTHS), invariant=True)
    want = fulgur.attention(q, both[:, 0].copy(), both[:, 1].copy(), **where)
    assert np.array_equal(fulgur.attention(q, both[:, 0], both[:, 1], **where), want)
    heads_first = np.ascontiguousarray(both.transpose(1, 0, 3, 2, 4))
    k, v = (x.transpose(0, 2, 1, 3) for x in heads_first)
    assert np.array_equal(fulgur.attention(q, k, v, **where), want)
    for table in (np.asfortranarray(TABLE), np.repeat(TABLE, 2, axis=1)[:, ::2], TABLE[:, ::-1].copy()[:, ::-1]):
        assert not table.flags.c_contiguous
        assert np.array_equal(fulgur.attention(q, k, v, **where | dict(page_table=table)), want)


def test_plan_takes_other_tables(rng):
    q, (k, v) = random(rng, 3, 2, HQ, D), caches(rng)
    empty = int32(np.full_like(TABLE, -1))
    plan = fulgur.plan(q.shape, k.shape, v.shape, page_table=empty, seqused_k=int32([0, 0, 0]),
                       invariant=True)  # fmt: skip
    assert not plan.run(q, k, v, page_table=empty, seqused_k=int32([0, 0, 0])).any()
    expect(plan.run(q, k, v, page_table=TABLE, seqused_k=int32(LENGTHS)), q, k, v)


def test_details():
    where = dict(page_table=TABLE, seqused_k=int32(LENGTHS))
    shapes = (3, 1, HQ, D), (PAGES, PAGE, HK, D), (PAGES, PAGE, HK, DV)
    call = fulgur.plan(*shapes, leftpad_k=int32(LEFTPAD), **where).details()["call"]
    assert call["pages"] == PAGES and call["page"] == PAGE
    assert {"page_table", "seqused_k", "leftpad_k"} <= set(call["optional_tensors"])
    with pytest.raises(ValueError, match="^page_table: given with backward, want None"):
        fulgur.explain(*shapes, backward=True, **where)


def good(rng):
    q, (k, v) = random(rng, 3, 2, HQ, D), caches(rng)
    return dict(q=q, k=k, v=v, page_table=TABLE, seqused_k=int32(LENGTHS))


WRONG = [
    (dict(seqused_k=None), "seqused_k: not given"),
    (dict(page_table=TABLE.astype(np.int64)), "page_table: got i64, want i32"),
    (dict(page_table=TABLE[0]), "page_table: got 1 dimensions .*want 2"),
    (dict(page_table=TABLE - 4), "page_table: got -1 as page 0 of sequence 0"),
    (dict(page_table=TABLE + 5), "page_table: got 14 as page 1 of sequence 0, want one of the 12"),
    (dict(seqused_k=int32([13, 0, 0])), "seqused_k: got 13 at 0, want 0 to 12"),
    (dict(max_seqlen_k=10), "seqused_k: got 11 at 0, want 0 to 10"),
    (dict(page_indptr=int32([0, 1, 2, 3])), "page_table: got 2 dimensions .*want 1"),
    (dict(page_table=int32([3, 9]), page_indptr=int32([0, 1, 1, 3])), "page_indptr: ends with 3"),
    (dict(page_table=None, page_indptr=int32([0, 1, 2, 3])), "page_table: not given"),
    (dict(cache_batch_idx=int32([0, 1, 2])), "cache_batch_idx: given with page_table"),
    (dict(page_table=None, seqused_k=None, cache_batch_idx=int32([0, 12, 2])),
     "cache_batch_idx: got 12 at 1, want one of the 12 rows of k"),
    (dict(leftpad_k=int32([12, 0, 0])), "leftpad_k: got 12 at 0, want 0 to 11"),
    (dict(cu_seqlens_k=int32([0, 1, 2, 3])), "cu_seqlens_k: given with page_table"),
]  # fmt: skip


@pytest.mark.parametrize("changes,message", WRONG)
def test_wrong_arguments_are_named(rng, changes, message):
    arguments = good(rng) | changes
    out = np.full((3, 2, HQ, DV), 7, np.float32)
    with pytest.raises(ValueError, match="^" + message):
        fulgur.attention(**arguments, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("name", ["page_table", "page_indptr", "cache_batch_idx", "leftpad_k"])
def test_kinds_of_arguments_are_named(rng, name):
    with pytest.raises(TypeError, match=f"^{name}: "):
        fulgur.attention(**good(rng) | {name: [1, 2]})


def test_a_plan_wants_what_was_planned(rng):
    arguments = good(rng)
    plan = fulgur.plan(**arguments)
    with pytest.raises(ValueError, match="^page_table: got no tensor"):
        plan.run(**arguments | dict(page_table=None))
    with pytest.raises(ValueError, match="^leftpad_k: got i32 "):
        plan.run(**arguments, leftpad_k=int32(LEFTPAD))
