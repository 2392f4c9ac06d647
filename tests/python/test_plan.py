"""Plans: the same results as calls, other lengths and memory from run to run, threads at once."""

import threading

import numpy as np
import pytest
import reference
from test_arrays import OnlyDLPack, OtherLibrary

import fulgur


def make(seed=0, dtype=np.float32, sq=9, sk=14):
    """q, k, v and dout of grouped heads with dv apart."""
    rng = np.random.default_rng(seed)
    shapes = (2, sq, 4, 16), (2, sk, 2, 16), (2, sk, 2, 24), (2, sq, 4, 24)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_runs_give_the_results_of_calls(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    options = dict(causal=True, softcap=3.0, threads=1)
    q, k, v, dout = make(0, dtype)
    plan = fulgur.plan(q, k, v, return_lse=True, **options)
    backward = None
    for seed in range(3):  # other data under one plan
        q, k, v, dout = make(seed, dtype)
        out, lse = plan.run(q, k, v)
        assert_equal((out, lse), fulgur.attention(q, k, v, return_lse=True, **options))
        if backward is None:
            backward = fulgur.plan_backward(dout, q, k, v, out, lse, **options)
        gradients = backward.run(dout, q, k, v, out, lse)
        assert_equal(gradients, fulgur.attention_backward(dout, q, k, v, out, lse, **options))


def test_only_shapes():
    q, k, v, dout = make()
    dtype = {np.float32: "f32", np.float64: "f64"}
    for kind in dtype:
        q, k, v, dout = (x.astype(kind) for x in (q, k, v, dout))
        plan = fulgur.plan(q.shape, k.shape, list(v.shape), dtype=dtype[kind], return_lse=True)
        out, lse = plan.run(q, k, v)
        assert_equal((out, lse), fulgur.attention(q, k, v, return_lse=True))
        shapes = [x.shape for x in (dout, q, k, v, out, lse)]
        backward = fulgur.plan_backward(*shapes, dtype=dtype[kind], deterministic=True)
        want = fulgur.attention_backward(dout, q, k, v, out, lse, deterministic=True)
        assert_equal(backward.run(dout, q, k, v, out, lse), want)


def test_lse_only_where_planned():
    q, k, v, _ = make()
    plan = fulgur.plan(q, k, v)
    assert type(plan.run(q, k, v)) is np.ndarray
    with pytest.raises(ValueError, match="^lse: got f32.*as planned"):
        plan.run(q, k, v, lse=np.empty((2, 4, 9), np.float32))


def test_packed_lengths_change():
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((40, 2, 16), dtype=np.float32) for _ in range(4))
    cu = [np.array([0, 20, 40], np.int32), np.array([0, 25, 40], np.int32)]
    lengths = dict(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    plan = fulgur.plan(q, k, v, causal=True, return_lse=True, **lengths)
    backward = fulgur.plan_backward(
        dout, q, k, v, dout, np.empty((2, 40), np.float32), causal=True, **lengths
    )
    for middle_q, end_q, middle_k, end_k in ((20, 40, 25, 40), (3, 17, 0, 25), (0, 0, 7, 30)):
        cu[0][1:], cu[1][1:] = (middle_q, end_q), (middle_k, end_k)
        out, lse = plan.run(q, k, v, **lengths)
        exact = reference.attention(q, k, v, causal=True, **lengths)
        np.testing.assert_allclose(out, exact[0], atol=1e-5)
        reference.assert_lse_close(lse, exact[1])
        gradients = backward.run(dout, q, k, v, out, lse, **lengths)
        for got, want in zip(
            gradients, reference.attention_backward(dout, q, k, v, causal=True, **lengths)
        ):
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_lengths_beyond_the_plan():
    q = np.ones((30, 2, 16), np.float32)
    short, long = np.array([0, 10, 20], np.int32), np.array([0, 10, 25], np.int32)
    plan = fulgur.plan(q, q, q, cu_seqlens_q=short, cu_seqlens_k=short)
    with pytest.raises(ValueError, match="^cu_seqlens_q: .*15.*at most 10"):
        plan.run(q, q, q, cu_seqlens_q=long, cu_seqlens_k=short)
    with pytest.raises(ValueError, match="^cu_seqlens_k: .*15.*at most 10"):
        plan.run(q, q, q, cu_seqlens_q=short, cu_seqlens_k=long)
    plan = fulgur.plan(
        q, q, q, cu_seqlens_q=short, cu_seqlens_k=short, max_seqlen_q=15, max_seqlen_k=15
    )
    np.testing.assert_allclose(plan.run(q, q, q, cu_seqlens_q=long, cu_seqlens_k=long)[:25], 1)


def test_slopes_used_keys_and_seeds_change():
    q, k, v, _ = make()
    extras = dict(
        alibi_slopes=np.zeros(4, np.float32),
        seqused_q=np.array([9, 9], np.int32),
        seqused_k=np.array([14, 14], np.int32),
    )
    plan = fulgur.plan(q, k, v, dropout_p=0.3, **extras)
    seen = []
    runs = [
        (0, 9, 14, 0, 0), (1, 9, 14, 0, 0), (1, 9, 5, 0, 0), (1, 4, 5, 0, 0), (1, 4, 5, 7, 0),
        (1, 4, 5, 7, 2**64 - 1),
    ]  # fmt: skip
    for slope, used_q, used_k, seed, offset in runs:
        extras["alibi_slopes"][:] = slope
        extras["seqused_q"][0], extras["seqused_k"][0] = used_q, used_k
        random = dict(seed=seed, offset=offset)
        seen.append(plan.run(q, k, v, **random, **extras))
        np.testing.assert_array_equal(
            seen[-1], fulgur.attention(q, k, v, dropout_p=0.3, **random, **extras)
        )
    for before, after in zip(seen, seen[1:]):
        assert (before != after).any()


def test_gradient_of_a_bias():
    q, k, v, dout = make()
    bias = np.zeros((1, 4, q.shape[1], k.shape[1]), np.float16)
    dbias = np.empty(bias.shape, np.float32)
    plan = fulgur.plan(q, k, v, bias=bias, return_lse=True)
    saved = plan.run(q, k, v, bias=bias)
    backward = fulgur.plan_backward(dout, q, k, v, *saved, bias=bias, dbias=dbias)
    assert {"bias", "dbias"} <= set(backward.details()["call"]["optional_tensors"])
    *gradients, got = backward.run(dout, q, k, v, *saved, bias=bias, dbias=dbias)
    assert got is dbias and len(gradients) == 3
    want = fulgur.attention_backward(dout, q, k, v, *saved, bias=bias, dbias=np.empty_like(dbias))
    assert_equal([*gradients, got], want)
    with pytest.raises(ValueError, match="^dbias: "):
        backward.run(dout, q, k, v, *saved, bias=bias)


def test_sinks_change():
    q, k, v, dout = make()
    sinks = np.zeros(4, np.float32)
    plan = fulgur.plan(q, k, v, sinks=sinks, return_lse=True)
    backward = fulgur.plan_backward(dout, q, k, v, *plan.run(q, k, v, sinks=sinks), sinks=sinks)
    assert {"lse", "sinks"} <= set(plan.details()["call"]["optional_tensors"])
    assert {"sinks", "dsinks"} <= set(backward.details()["call"]["optional_tensors"])
    for value in (0.0, 3.0, -np.inf):
        sinks[1:3] = value
        got = plan.run(q, k, v, sinks=sinks)
        assert_equal(got, fulgur.attention(q, k, v, sinks=sinks, return_lse=True))
        dsinks = np.empty(4, np.float32)
        gradients = backward.run(dout, q, k, v, *got, sinks=sinks, dsinks=dsinks)
        assert gradients[3] is dsinks
        assert_equal(gradients, fulgur.attention_backward(dout, q, k, v, *got, sinks=sinks))
    assert (dsinks[1:3] == 0).all() and (dsinks[[0, 3]] != 0).all()


def test_random_numbers_by_an_array():
    q, k, v, dout = make()
    state = np.zeros(2, np.int64)
    plan = fulgur.plan(q, k, v, dropout_p=0.3, rng_state=state, return_lse=True)
    backward = None
    for seed, offset in ((0, 0), (7, 0), (7, 2**64 - 1)):
        state.view(np.uint64)[:] = seed, offset
        by_number = dict(dropout_p=0.3, seed=seed, offset=offset)
        got = plan.run(q, k, v, rng_state=state)
        assert_equal(got, fulgur.attention(q, k, v, return_lse=True, **by_number))
        arguments = dout, q, k, v, *got
        if backward is None:
            backward = fulgur.plan_backward(*arguments, dropout_p=0.3, rng_state=state)
        want = fulgur.attention_backward(*arguments, deterministic=True, **by_number)
        for gradient, exact in zip(backward.run(*arguments, rng_state=state), want):
            np.testing.assert_allclose(gradient, exact, atol=1e-5)
    with pytest.raises(ValueError, match="^rng_state: got no tensor.*as planned"):
        plan.run(q, k, v)
    with pytest.raises(ValueError, match="^rng_state: given with a dropout_seed of 3"):
        plan.run(q, k, v, rng_state=state, seed=3)


def test_results_into_given_arrays():
    q, k, v, dout = make()
    want = fulgur.attention(q, k, v, return_lse=True)
    memory = np.zeros((2, 4, 9, 30), np.float32)
    out, lse = memory.transpose(0, 2, 1, 3)[..., :24], np.empty_like(want[1])
    plan = fulgur.plan(q, k, v, out=out, return_lse=True)
    got = plan.run(q, k, v, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    assert_equal(got, want)
    assert (memory[..., 24:] == 0).all()
    with pytest.raises(ValueError, match="^out: .*strides.*as planned"):
        plan.run(q, k, v)  # a fresh array has other strides

    # The gradients of q, k and v side by side in one array.
    fused = np.zeros((2, 14, 4, 40), np.float32)
    places = dict(dk=fused[:, :, :2, :16], dv=fused[:, :, :2, 16:])
    want = fulgur.attention_backward(dout, q, k, v, *want, deterministic=True)
    arguments = dout, q, k, v, out, lse
    backward = fulgur.plan_backward(*arguments, deterministic=True, **places)
    for run in (
        lambda: backward.run(*arguments, **places),
        lambda: fulgur.attention_backward(*arguments, deterministic=True, **places),
    ):
        fused[:] = 0
        dq, dk, dv = run()
        assert dk is places["dk"] and dv is places["dv"]
        assert_equal((dq, dk, dv), want)
        assert (fused[:, :, 2:] == 0).all()


def test_gradient_of_lse():
    q, k, v, dout = make()
    out, lse = fulgur.attention(q, k, v, return_lse=True)
    arguments = dout, q, k, v, out, lse
    without = fulgur.attention_backward(*arguments, deterministic=True)
    for given in (lse, lse.shape):
        plan = fulgur.plan_backward(*arguments, dlse=given, deterministic=True)
        for seed in range(2):
            dlse = np.random.default_rng(seed).standard_normal(lse.shape, dtype=np.float32)
            want = fulgur.attention_backward(*arguments, dlse=dlse, deterministic=True)
            assert_equal(plan.run(*arguments, dlse=dlse), want)
            assert (want[0] != without[0]).any()
        assert_equal(plan.run(*arguments, dlse=np.zeros_like(lse)), without)
        with pytest.raises(ValueError, match="^dlse: got no tensor.*as planned"):
            plan.run(*arguments)


def test_a_failing_run_writes_nothing():
    q, k, v, _ = make()
    out = np.full((2, 9, 4, 24), 7, np.float32)
    used = np.array([14, 15], np.int32)
    plan = fulgur.plan(q, k, v, seqused_k=used - 1)
    for changes in (dict(seqused_k=used), dict(seqused_k=None), dict(seqused_k=used[:1])):
        with pytest.raises(ValueError, match="^seqused_k: "):
            plan.run(q, k, v, out=out, **changes)
    assert (out == 7).all()


@pytest.mark.parametrize("kind", [OnlyDLPack, OtherLibrary])
def test_other_libraries(kind):
    arrays = make()[:3]
    plan = fulgur.plan(*(kind(x) for x in arrays), return_lse=True)
    results = plan.run(*(kind(x) for x in arrays))
    for got, want in zip(results, fulgur.attention(*arrays, return_lse=True)):
        assert type(got) is (OtherLibrary if kind is OtherLibrary else np.ndarray)
        np.testing.assert_array_equal(getattr(got, "array", got), want)


def make_workspace(need, bytes):
    """Exactly so many bytes at a multiple of the alignment."""
    memory = np.zeros(bytes + need.alignment, np.uint8)
    start = -memory.ctypes.data % need.alignment
    return memory[start : start + bytes]


def test_workspace():
    q, k, v, dout = make(sq=64, sk=64)
    out, lse = fulgur.attention(q, k, v, return_lse=True)
    arguments = dout, q, k, v, out, lse
    plan = fulgur.plan_backward(*arguments, deterministic=True)
    need = plan.workspace()
    assert need.bytes > 0 and need.alignment > 0 and 0 <= need.zeroed_bytes <= need.bytes
    want = plan.run(*arguments)
    workspace = make_workspace(need, need.bytes)
    for _ in range(2):
        assert_equal(plan.run(*arguments, workspace=workspace), want)
    assert workspace.any()  # it is that memory that was used
    for wrong, message in (
        (make_workspace(need, need.bytes - 1), f"^workspace: got {need.bytes - 1} bytes, want"),
        (np.zeros(0, np.uint8), "^workspace: got 0 bytes, want"),
        (make_workspace(need, need.bytes + 1)[1:], "^workspace: .*not aligned"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.run(*arguments, workspace=wrong)
    read_only = make_workspace(need, need.bytes)
    read_only.flags.writeable = False
    for wrong in (read_only, make_workspace(need, 2 * need.bytes)[::2], 5, b"x" * need.bytes):
        with pytest.raises(TypeError, match="^workspace: got .*want a writable contiguous array"):
            plan.run(*arguments, workspace=wrong)


def test_max_workspace():
    q, k, v, dout = make(sq=64, sk=64)
    out, lse = fulgur.attention(q, k, v, return_lse=True)
    arguments = dout, q, k, v, out, lse
    want = fulgur.attention_backward(*arguments, threads=2)
    need = fulgur.plan_backward(*arguments, threads=2).workspace().bytes
    plan = fulgur.plan_backward(*arguments, threads=2, max_workspace=need)
    assert plan.workspace().bytes == need
    details = plan.details()
    assert details["workspace_bytes"] == details["max_workspace"] == need
    assert_equal(plan.run(*arguments), want)
    assert_equal(fulgur.attention_backward(*arguments, threads=2, max_workspace=need), want)
    message = f"^max_workspace: got {need - 1} bytes, want at least {need}$"
    for call in (
        lambda **options: fulgur.plan_backward(*arguments, **options),
        lambda **options: fulgur.attention_backward(*arguments, **options),
        lambda **options: fulgur.explain(q, k, v, backward=True, **options),
    ):
        with pytest.raises(ValueError, match=message):
            call(threads=2, max_workspace=need - 1)


def test_wrong_kinds_of_names():
    for name in ("dtype", "device"):
        with pytest.raises(TypeError, match=f"^{name}: got <class 'numpy.float32'>, want a string"):
            fulgur.plan(*[(1, 4, 1, 8)] * 3, **{name: np.float32})


def test_one_plan_in_many_threads():
    plan = fulgur.plan(*make()[:3], causal=True, threads=1, return_lse=True)
    inputs = [make(seed)[:3] for seed in range(6)]
    want = [fulgur.attention(*x, causal=True, threads=1, return_lse=True) for x in inputs]
    wrong = []

    def work(n):
        for _ in range(50):
            got = plan.run(*inputs[n])
            if any((a != b).any() for a, b in zip(got, want[n])):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_words():
    q, k, v, dout = make()
    plan = fulgur.plan(q, k, v, window=(5, 0), return_lse=True)
    assert plan.explain() == fulgur.explain(q, k, v, window=(5, 0))
    assert repr(plan).startswith("<fulgur.Plan: forward attention, f32 on cpu: batch 2, sq 9")
    lse = np.empty((2, 4, 9), np.float32)
    backward = fulgur.plan_backward(dout, q, k, v, dout, lse)
    assert repr(backward).startswith("<fulgur.BackwardPlan: backward attention, f32 on cpu")
    assert backward.explain() == fulgur.explain(q, k, v, backward=True)
