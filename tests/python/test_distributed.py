"""fulgur.distributed: processes of their own, each of which computes the whole as well and compares its rows."""

import concurrent.futures
import doctest
import threading

import numpy as np
import pytest
from ranks import run_ranks

import fulgur.distributed

NUMPY = """
import numpy as np
import fulgur
import fulgur.distributed as fd

group = fd.Group.from_env(60)
rng = np.random.default_rng(0)
q, dout = (rng.standard_normal((2, 300, 4, 16), np.float32) for _ in range(2))
k, v = (rng.standard_normal((2, 300, 2, 16), np.float32) for _ in range(2))
sinks = rng.standard_normal(4).astype(np.float32)
options = dict(causal=True, sinks=sinks, dropout_p=0.2, seed=7, invariant=True, threads=1)
out, lse = fulgur.attention(q, k, v, return_lse=True, **options)
grads = fulgur.attention_backward(dout, q, k, v, out, lse, **options)

rows = fd.rows_of("zigzag", 300, group.size, group.rank)
q, k, v, dout = (np.ascontiguousarray(x[:, rows]) for x in (q, k, v, dout))
how = dict(group=group, sharding="zigzag", **options)
own, own_lse = fd.attention(q, k, v, return_lse=True, **how)
assert (own == out[:, rows]).all() and (own_lse == lse[:, :, rows]).all()
own_grads = fd.attention_backward(dout, q, k, v, own, own_lse, **how)
for x, whole in zip(own_grads[:3], grads):
    assert (x == whole[:, rows]).all()
assert (own_grads[3] == grads[3]).all()

# What all processes have whole: a bias, lengths, expressions and their tensors.
full = [rng.standard_normal((2, 300, n, 16), np.float32) for n in (4, 2, 2, 4)]
whole = dict(
    causal=True, invariant=True, threads=1, bias=rng.standard_normal((2, 4, 300, 300)).astype(np.float32),
    seqused_k=np.array([300, 190], np.int32), score_mod="score + table[h, q - k]", mask_mod="k > 3",
    tensors={"table": rng.standard_normal((4, 50)).astype(np.float32)},
)
asked = dict(dbias=np.empty((2, 4, 300, 300), np.float32), dtensors={"table": None})
out, lse = fulgur.attention(*full[:3], return_lse=True, **whole)
grads = fulgur.attention_backward(full[3], *full[:3], out, lse, **asked, **whole)
how = dict(group=group, sharding="zigzag", **whole)
q, k, v, dout = (np.ascontiguousarray(x[:, rows]) for x in full)
own, own_lse = fd.attention(q, k, v, return_lse=True, **how)
assert (own == out[:, rows]).all() and (own_lse == lse[:, :, rows]).all()
asked["dbias"] = np.empty_like(asked["dbias"])
own_grads = fd.attention_backward(dout, q, k, v, own, own_lse, **asked, **how)
for x, all_rows in zip(own_grads[:3], grads):
    assert (x == all_rows[:, rows]).all()
assert (own_grads[3] == grads[3]).all()
assert np.allclose(own_grads[4]["table"], grads[4]["table"], atol=1e-4)
try:
    fd.attention(q, k, v, group=group, causal=group.rank == 0)
except ValueError as error:
    print(error)
"""

def test_bits_of_one_process():
    error = "window_right: rank 1 has -1, rank 0 has 0\n"
    assert run_ranks(NUMPY, 3) == [error] * 3


def test_documented_examples():
    assert doctest.testmod(fulgur.distributed).failed == 0


def test_rows_of():
    rows_of = fulgur.distributed.rows_of
    rows = [rows_of("by_area", [3, 200, 500, 1000], 2, rank) for rank in (0, 1)]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(3, 1000))
    assert rows_of("contiguous", 100, 2, 0).dtype == np.int64
    with pytest.raises(ValueError, match='sharding: got "rings", want contiguous, zigzag, by_area or by_page'):
        rows_of("rings", 100, 2, 0)
    with pytest.raises(ValueError, match="rank: got 2, want 0 to 1"):
        rows_of("zigzag", 100, 2, 2)


def test_a_group_by_a_function():
    def exchange(sends, receives):
        assert [x.size for x in sends] == [x.size for x in receives] == [0]

    group = fulgur.distributed.Group(exchange, 0, 1)
    assert (group.rank, group.size, group.dead) == (0, 1, "")
    q = np.random.default_rng(0).standard_normal((1, 70, 2, 8), np.float32)
    assert np.array_equal(fulgur.distributed.attention(q, q, q, group=group), fulgur.attention(q, q, q))


def test_calls_keep_their_plans():
    """A plan is agreed about by all ranks, in exchanges that a later call like an earlier one need not make."""
    together, sent, counts = threading.Barrier(2, timeout=60), [None, None], []

    def rank_of_two(rank):
        exchanges = 0

        def exchange(sends, receives):
            nonlocal exchanges
            exchanges += 1
            sent[rank] = sends
            together.wait()
            receives[1 - rank][:] = sent[1 - rank][rank]
            together.wait()

        group = fulgur.distributed.Group(exchange, rank, 2)
        q = np.random.default_rng(rank).standard_normal((1, 64, 2, 8), np.float32)
        before = exchanges
        for _ in range(4):
            out, lse = fulgur.distributed.attention(q, q, q, group=group, return_lse=True)
            fulgur.distributed.attention_backward(q, q, q, q, out, lse, group=group)
            if rank == 0:
                counts.append(exchanges - before)
            before = exchanges

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(rank_of_two, range(2)))
    # Memory for what ranks send, of two exchanges in turn, is new in the second call, too.
    assert counts[0] > counts[2] == counts[3]


def test_a_simulated_rank():
    rows = [fulgur.distributed.rows_of("zigzag", 512, 4, rank) for rank in range(4)]
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 128, 2, 16), np.float32) for _ in range(3))
    whole = [np.empty((1, 512, 2, 16), np.float32) for _ in range(3)]
    for to, own in zip(whole, (q, k, v)):
        for of_rank in rows:
            to[:, of_rank] = own
    options = dict(causal=True, invariant=True, threads=1)
    got = fulgur.distributed.attention(
        q, k, v, group=fulgur.distributed.Group.simulated(2, 4), sharding="zigzag", **options
    )
    assert np.array_equal(got, fulgur.attention(*whole, **options)[:, rows[2]])


def test_pages():
    """Of a process alone: the bits of no other call, but its numbers."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 16), np.float32)
    cache = rng.standard_normal((9, 16, 2, 16), np.float32)
    options = dict(page_table=np.array([[3, 1, 8], [0, 7, 5]], np.int32), seqused_k=np.array([40, 21], np.int32))
    group = fulgur.distributed.Group.from_env()
    for more in ({"causal": True}, {"window": (9, 0), "alibi_slopes": np.ones(4, np.float32)}):
        out, lse = fulgur.attention(q, cache, cache, return_lse=True, **options, **more)
        got = fulgur.distributed.attention(
            q, cache, cache, group=group, sharding="by_page", return_lse=True, **options, **more
        )
        assert np.allclose(got[0], out, atol=1e-5) and np.allclose(got[1], lse, atol=1e-5)
    codes = fulgur.quantize(cache, "int8")
    want = fulgur.attention(q, codes, codes, causal=True, **options)
    got = fulgur.distributed.attention(
        q, codes, codes, group=group, sharding="by_page", causal=True, **options
    )
    assert np.allclose(got, want, atol=1e-5)


def test_a_function_that_fails():
    def exchange(sends, receives):
        raise ConnectionError("rank 1 left")

    group = fulgur.distributed.Group(exchange, 0, 2)
    q = np.zeros((1, 64, 1, 8), np.float32)
    with pytest.raises(fulgur.Error, match="rank 1 left"):
        fulgur.distributed.attention(q, q, q, group=group)
    assert group.dead == "rank 1 left"
    with pytest.raises(fulgur.Error, match="group: it is dead, as rank 1 left; make a new one"):
        fulgur.distributed.attention(q, q, q, group=group)


def test_errors():
    group = fulgur.distributed.Group.from_env()
    q = np.zeros((1, 64, 1, 8), np.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'tree_mask'"):
        fulgur.distributed.attention(q, q, q, group=group, tree_mask=q)
    with pytest.raises(TypeError, match="sharding: got 3, want a string"):
        fulgur.distributed.attention(q, q, q, group=group, sharding=3)
    with pytest.raises(ValueError, match="comm: got None, want the address of an ncclComm_t"):
        fulgur.distributed.Group.from_nccl(None)
    with pytest.raises(ValueError, match="comm: got null, want a communicator of NCCL"):
        fulgur.distributed.Group.from_nccl(0)
    with pytest.raises(ValueError, match="rank: got 4, want 0 to 3"):
        fulgur.distributed.Group.simulated(4, 4)
    with pytest.raises(ValueError, match="head_ranks: got 2, want a divisor of the 1 ranks"):
        fulgur.distributed.attention(q, q, q, group=group, head_ranks=2)
