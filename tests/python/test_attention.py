"""Results against the NumPy reference: masks, groups, dtypes, layouts, packed lengths, dropout."""

import sys
import threading

import numpy as np
import pytest
import reference

import fulgur

DTYPES = ["float32", "float16", "bfloat16", "float64"]

# name: (q (batch, sq, hq, d), sk, hk, dv, options)
CASES = {
    "full": ((2, 33, 2, 16), 33, 2, 16, {}),
    "causal": ((1, 70, 2, 64), 70, 2, 64, dict(causal=True)),
    "causal, more keys": ((2, 5, 2, 8), 37, 2, 8, dict(causal=True)),
    "causal, more queries": ((1, 37, 2, 8), 5, 2, 8, dict(causal=True)),
    "window": ((1, 65, 2, 32), 65, 2, 32, dict(window=(7, 3))),
    "causal window": ((1, 65, 2, 32), 80, 2, 32, dict(window=(9, -1), causal=True)),
    "chunks": ((1, 65, 2, 32), 65, 2, 32, dict(chunk=20)),
    "chunks, more queries": ((2, 37, 2, 8), 15, 2, 8, dict(chunk=6)),
    "causal chunks": ((2, 40, 4, 24), 70, 2, 24, dict(chunk=16, causal=True)),
    "chunks and window": ((1, 33, 2, 16), 50, 2, 16, dict(chunk=9, window=(4, 2))),
    "top left": ((2, 33, 4, 16), 70, 2, 24, dict(causal=True, top_left=True)),
    "top left, more queries": ((1, 90, 2, 16), 37, 2, 16, dict(window=(20, 3), top_left=True)),
    "chunks, top left, keys in use": ((2, 50, 4, 16), 99, 2, 16, dict(chunk=17, top_left=True, seqused_k=[99, 30])),
    "chunks of keys in use": ((2, 3, 4, 16), 99, 2, 16, dict(chunk=40, causal=True, seqused_k=[99, 42])),
    "grouped heads": ((2, 19, 6, 24), 29, 2, 24, dict(causal=True)),
    "one kv head": ((1, 9, 4, 16), 64, 1, 16, {}),
    "dv apart": ((1, 20, 2, 40), 31, 2, 17, {}),
    "head dim 1": ((1, 12, 1, 1), 12, 1, 1, {}),
    "scale": ((1, 16, 2, 16), 16, 2, 16, dict(scale=0.7)),
    "softcap": ((1, 24, 2, 16), 24, 2, 16, dict(softcap=1.5, scale=1.0, causal=True)),
    "ALiBi by head": ((2, 21, 4, 16), 30, 2, 16, dict(alibi_slopes=(4,), causal=True)),
    "ALiBi by batch": ((2, 21, 4, 16), 21, 4, 16, dict(alibi_slopes=(2, 4))),
    "bias": ((2, 21, 4, 16), 30, 2, 16, dict(bias=(2, 4, 21, 30), causal=True)),
    "bias of each head": ((2, 70, 4, 16), 65, 2, 24, dict(bias=(1, 4, 70, 65), softcap=1.5, sinks=(4,))),
    "bias of keys": ((2, 1, 8, 64), 99, 2, 64, dict(bias=(2, 1, 1, 99))),
    "bias of keys in use": ((3, 10, 2, 16), 40, 2, 16, dict(bias=(1, 1, 12, 48), seqused_k=[40, 0, 13])),
    "sinks": ((2, 21, 4, 16), 30, 2, 16, dict(sinks=(4,), causal=True)),
    "sinks of rows without keys": ((1, 37, 4, 8), 5, 2, 8, dict(sinks=(4,), causal=True)),
    "sinks of a decode": ((2, 1, 8, 64), 777, 2, 64, dict(sinks=(8,), seqused_k=[777, 0])),
    "seqused_k": ((3, 10, 2, 16), 40, 2, 16, dict(seqused_k=[40, 0, 13], causal=True)),
    "seqused_q": ((3, 10, 4, 16), 40, 2, 16, dict(seqused_q=[10, 0, 7], causal=True)),
    "seqused_q and seqused_k": (
        (3, 37, 2, 16), 40, 1, 16, dict(seqused_q=[20, 37, 1], seqused_k=[40, 9, 13], window=(6, 2))),
    "decode": ((2, 1, 8, 64), 777, 2, 64, dict(seqused_k=[777, 500])),
    "no query": ((2, 0, 2, 8), 5, 2, 8, {}),
    "no key": ((2, 5, 2, 8), 0, 2, 8, {}),
    "no batch": ((0, 5, 2, 8), 5, 2, 8, {}),
}  # fmt: skip


def make_dtype(name):
    if name == "bfloat16":
        return pytest.importorskip("ml_dtypes").bfloat16
    return np.dtype(name)


def make_case(name, dtype, seed=0):
    rng = np.random.default_rng(seed)
    (batch, sq, hq, d), sk, hk, dv, options = CASES[name]
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = rng.random(options["alibi_slopes"], dtype=np.float32)
    if "bias" in options:
        bias = rng.standard_normal(options["bias"], dtype=np.float32)
        bias[rng.random(bias.shape) < 0.2] = -np.inf
        options["bias"] = bias if len(name) % 2 else bias.astype(np.float16)
    if "sinks" in options:
        options["sinks"] = rng.standard_normal(options["sinks"], dtype=np.float32)
    for name in options.keys() & {"seqused_q", "seqused_k"}:
        options[name] = np.array(options[name], np.int32)
    shapes = (batch, sq, hq, d), (batch, sk, hk, d), (batch, sk, hk, dv), (batch, sq, hq, dv)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes], options


def written_gradients(options):
    """Where that of a bias of numbers goes."""
    bias = options.get("bias")
    return {} if bias is None or bias.dtype == bool else {"dbias": np.full(bias.shape, np.nan, np.float32)}


def names_of_gradients(options):
    extras = [name for name in ("sinks", "bias") if name in options and options[name].dtype != bool]
    return [f"d{name}" for name in ("q", "k", "v", *extras)]


def check(q, k, v, dout, **options):
    """Forward and backward of one call against the reference."""
    out, lse = fulgur.attention(q, k, v, return_lse=True, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    exact_out, exact_lse = reference.attention(q, k, v, **options)
    naive_out, _ = reference.attention(q, k, v, precision=q.dtype, **options)
    reference.assert_close("out", out, exact_out, naive_out, 2)
    reference.assert_lse_close(lse, exact_lse)

    written = written_gradients(options)
    gradients = fulgur.attention_backward(dout, q, k, v, out, lse, **options, **written)
    exact = reference.attention_backward(dout, q, k, v, **options)
    naive = reference.attention_backward(dout, q, k, v, precision=q.dtype, **options)
    names = names_of_gradients(options)
    assert len(gradients) == len(names)
    for name, got, want, yardstick in zip(names, gradients, exact, naive):
        assert got.dtype == (np.float32 if name in ("dsinks", "dbias") else q.dtype)
        assert name not in written or got is written[name]
        reference.assert_close(name, got, want, yardstick, 3)
    return out, lse, gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_results(name, dtype):
    (q, k, v, dout), options = make_case(name, make_dtype(dtype))
    check(q, k, v, dout, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_lse(name, dtype):
    (q, k, v, dout), options = make_case(name, make_dtype(dtype))
    out, lse = fulgur.attention(q, k, v, return_lse=True, **options)
    dlse = np.random.default_rng(1).standard_normal(lse.shape).astype(lse.dtype)
    dlse[np.isneginf(lse)] = np.nan  # of rows that see no key
    got = fulgur.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, **options, **written_gradients(options)
    )
    exact = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    naive = reference.attention_backward(dout, q, k, v, dlse=dlse, precision=q.dtype, **options)
    for name, gradient, want, yardstick in zip(names_of_gradients(options), got, exact, naive):
        reference.assert_close(name, gradient, want, yardstick, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_of_bools(dtype):
    """A query sees the keys where the mask is True; of a transposed view, too."""
    (q, k, v, dout), _ = make_case("grouped heads", make_dtype(dtype))
    seen = np.random.default_rng(4).random((29, 19)) < 0.5
    seen[:, 3] = False  # a row without keys
    check(q, k, v, dout, bias=seen.T[None, None])


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_named_engine(engine):
    (q, k, v, dout), options = make_case("grouped heads", np.float32)
    out, lse = fulgur.attention(q, k, v, return_lse=True, engine=engine, **options)
    exact_out, exact_lse = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out, exact_out, atol=1e-5)
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_views(dtype):
    """(batch, heads, seqlen, dim) memory, every other row, a slice of a fused qkv, reversed rows."""
    dtype = make_dtype(dtype)
    rng = np.random.default_rng(1)
    fused = rng.standard_normal((2, 24, 3, 4, 16)).astype(dtype)
    q, k, v = (fused[:, :, n] for n in range(3))
    plain = check(*(np.ascontiguousarray(x) for x in (q, k, v, v)), causal=True)

    by_heads = np.ascontiguousarray(k.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    sparse = np.zeros((2, 48, 4, 40), dtype)[:, ::2, :, :16]
    sparse[:] = v
    backwards = np.ascontiguousarray(v[:, ::-1])[:, ::-1]
    strided = check(q, by_heads, sparse, backwards, causal=True)
    for got, want in zip((*strided[:2], *strided[2]), (*plain[:2], *plain[2])):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), atol=1e-6)


def test_out_may_be_strided():
    (q, k, v, _), options = make_case("causal", np.float32)
    memory = np.full((1, 2, 70, 80), 7, np.float32)
    out = memory.transpose(0, 2, 1, 3)[..., :64]
    assert fulgur.attention(q, k, v, out=out, **options) is out
    np.testing.assert_allclose(out, fulgur.attention(q, k, v, **options), atol=1e-6)
    assert (memory[..., 64:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "used", [{}, dict(seqused_k=[0, 3, 0, 9]), dict(seqused_q=[2, 0, 16, 5], seqused_k=[0, 3, 22, 9])]
)
def test_packed(dtype, used):
    dtype = make_dtype(dtype)
    rng = np.random.default_rng(2)
    cu_q = np.array([0, 5, 5, 21, 30], np.int32)
    cu_k = np.array([0, 0, 8, 30, 50], np.int32)
    shapes = (30, 4, 16), (50, 2, 16), (50, 2, 24), (30, 4, 24)
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    options = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    options |= {name: np.array(lengths, np.int32) for name, lengths in used.items()}
    _, lse, _ = check(q, k, v, dout, **options)
    assert lse.shape == (4, 30)


def test_dropout():
    rng = np.random.default_rng(3)
    n, p = 64, 0.25
    q, k, dout = (rng.standard_normal((2, n, 2, 32), dtype=np.float32) for _ in range(3))
    eye = np.broadcast_to(np.eye(n, dtype=np.float32)[:, None], (2, n, 2, n))
    options = dict(dropout_p=p, seed=2**64 - 1, offset=5)
    # With v = I, out is P after dropout: it shows which entries were kept.
    P = fulgur.attention(q, k, eye)
    dropped = fulgur.attention(q, k, eye, **options)
    keep = dropped != 0
    np.testing.assert_allclose(dropped, np.where(keep, P / (1 - p), 0), rtol=1e-5)
    assert abs(keep.mean() - (1 - p)) < 0.02

    np.testing.assert_array_equal(dropped, fulgur.attention(q, k, eye, **options))
    np.testing.assert_array_equal(keep, fulgur.attention(q, k, eye, threads=1, **options) != 0)
    for other in (dict(seed=0), dict(offset=6)):
        assert (keep != (fulgur.attention(q, k, eye, **{**options, **other}) != 0)).any()

    # The backward pass drops the same entries.
    v = rng.standard_normal((2, n, 2, 32), dtype=np.float32)
    out, lse = fulgur.attention(q, k, v, return_lse=True, **options)
    got = fulgur.attention_backward(dout, q, k, v, out, lse, **options)
    mask = keep.transpose(0, 2, 1, 3) / (1 - p)
    exact = reference.attention_backward(dout, q, k, v, keep=mask)
    naive = reference.attention_backward(dout, q, k, v, keep=mask, precision=np.float32)
    for name, gradient, want, yardstick in zip(("dq", "dk", "dv"), got, exact, naive):
        reference.assert_close(name, gradient, want, yardstick, 3)


def test_deterministic_and_invariant():
    (q, k, v, dout), options = make_case("grouped heads", np.float32)
    options.update(deterministic=True, invariant=True)
    first = fulgur.attention(q, k, v, return_lse=True, **options)
    alone = fulgur.attention(q[1:], k[1:], v[1:], return_lse=True, threads=1, **options)
    for whole, part in zip(first, alone):
        np.testing.assert_array_equal(whole[1:], part)
    runs = [fulgur.attention_backward(dout, q, k, v, *first, **options) for _ in range(3)]
    for run in runs[1:]:
        for a, b in zip(runs[0], run):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_merge(dtype):
    (q, k, v, _), _ = make_case("one kv head", make_dtype(dtype))
    whole = fulgur.attention(q, k, v, return_lse=True)
    cuts = [slice(0, 1), slice(1, 40), slice(40, 40), slice(40, 64)]
    parts = [fulgur.attention(q, k[:, c], v[:, c], return_lse=True) for c in cuts]
    out, lse = fulgur.merge(*zip(*parts))
    assert out.dtype == q.dtype and lse.dtype == whole[1].dtype
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float64": 1e-14}[dtype]
    np.testing.assert_allclose(
        out.astype(np.float64), whole[0].astype(np.float64), atol=tolerance, rtol=0
    )
    np.testing.assert_allclose(lse, whole[1], rtol=1e-5)


def test_merge_of_nothing_seen():
    out = np.full((1, 3, 2, 4), np.nan, np.float32)
    lse = np.full((1, 2, 3), -np.inf, np.float32)
    got_out, got_lse = fulgur.merge([out, out], [lse, lse])
    assert (got_out == 0).all() and np.isneginf(got_lse).all()


def test_merge_of_packed():
    out = np.stack([np.ones((5, 2, 4), np.float32), 3 * np.ones((5, 2, 4), np.float32)])
    got_out, got_lse = fulgur.merge(out, np.zeros((2, 2, 5), np.float32))
    np.testing.assert_allclose(got_out, 2, rtol=1e-6)
    np.testing.assert_allclose(got_lse, np.log(2), rtol=1e-6)


@pytest.mark.parametrize("call", ["attention", "attention_backward", "merge"])
def test_other_threads_run_meanwhile(call):
    """Computing holds no lock of the interpreter: a thread runs that the caller would never make way for."""
    q = np.random.default_rng(1).standard_normal((2, 300, 4, 64), dtype=np.float32)
    out, lse = fulgur.attention(q, q, q, return_lse=True)
    calls = {
        "attention": lambda: fulgur.attention(q, q, q),
        "attention_backward": lambda: fulgur.attention_backward(out, q, q, q, out, lse),
        "merge": lambda: fulgur.merge([out, out], [lse, lse]),
    }
    go, ran = threading.Event(), []

    def run():
        go.wait()
        ran.append(True)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()
    sys.setswitchinterval(1000)  # seconds
    try:
        go.set()
        assert not ran
        for _ in range(200):
            calls[call]()
            if ran:
                break
        else:
            pytest.fail("the thread had to wait for the end of all calls")
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)
