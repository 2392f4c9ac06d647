"""Low-bit formats in Python: quantize, Quantized, and attention and append over them."""

import copy
import pickle

import numpy as np
import pytest

import fulgur

FORMATS = ("e4m3", "e5m2", "int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
GGML = FORMATS[4:]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def numbers(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def scales(format):
    return (None,) if format in GGML else ("tensor", "head", "token", 32)


@pytest.mark.parametrize("format", FORMATS)
def test_attention_is_that_of_the_numbers(rng, format):
    if format in ("e4m3", "e5m2"):
        pytest.importorskip("ml_dtypes")
    q, k, v = numbers(rng, 2, 3, 8, 64), numbers(rng, 2, 40, 2, 64), numbers(rng, 2, 40, 2, 96)
    for scale in scales(format):
        zero = format in ("int8", "int4") and scale != "head"
        y = [fulgur.quantize(x, format, scale=scale, zero_point=zero or None) for x in (k, v)]
        assert all(a.shape == b.shape and a.format == format for a, b in zip(y, (k, v)))
        got = fulgur.attention(q, *y, causal=True)
        want = fulgur.attention(q, *(x.dequantize() for x in y), causal=True)
        assert np.allclose(got, want, atol=1e-5)
        plan = fulgur.plan(q, *y, causal=True)
        assert np.array_equal(plan.run(q, *y), got)
        coarse = format in ("int4", "e5m2", "q4_0", "q4_1", "iq4_nl")
        assert np.abs(y[0].dequantize() - k).max() < (0.7 if coarse else 0.2)
        with pytest.raises(ValueError, match="^k_descale: given with"):
            fulgur.attention(q, *y, k_descale=np.ones(1, np.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 0, 2, 64), (0, 5, 2, 64), (0, 2, 64)])
def test_no_rows(format, shape):
    if format in ("e4m3", "e5m2"):
        pytest.importorskip("ml_dtypes")
    y = fulgur.quantize(np.empty(shape, np.float32), format)
    assert y.shape == shape and y.dequantize().shape == shape


def test_attention_over_codes_of_no_keys(rng):
    k = fulgur.quantize(numbers(rng, 2, 0, 2, 64), "q4_0")
    out, lse = fulgur.attention(numbers(rng, 2, 3, 4, 64), k, k, return_lse=True)
    assert np.all(out == 0) and np.all(lse == -np.inf)


@pytest.mark.parametrize("format", FORMATS)
def test_copies_and_pickles(rng, format):
    if format in ("e4m3", "e5m2"):
        pytest.importorskip("ml_dtypes")
    q, k, v = numbers(rng, 1, 3, 2, 64), numbers(rng, 1, 40, 2, 64), numbers(rng, 1, 40, 2, 64)
    zero = True if format in ("int8", "int4") else None
    x = fulgur.quantize(k, format, zero_point=zero, rotate=True, mean=True)
    want, numbers_of_x = fulgur.attention(q, x, v, return_lse=True), x.dequantize()
    for y in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
        assert (y.format, y.shape, y.dtype, y.rotated) == (x.format, x.shape, x.dtype, x.rotated)
        assert np.array_equal(y.dequantize(), numbers_of_x)
        assert all(map(np.array_equal, fulgur.attention(q, y, v, return_lse=True), want))
    assert copy.copy(x).codes is x.codes and copy.deepcopy(x).codes is not x.codes
    x.codes.view(np.uint8)[:] = 0  # copies have memory of their own
    assert np.array_equal(copy.deepcopy(x).dequantize(), x.dequantize())


def test_one_may_be_quantized_and_floats_may_differ(rng):
    q, k, v = numbers(rng, 1, 5, 4, 32), numbers(rng, 1, 20, 4, 32), numbers(rng, 1, 20, 4, 32)
    half = v.astype(np.float16)
    y = fulgur.quantize(k, "q8_0")
    want = fulgur.attention(q, y.dequantize(), half.astype(np.float32))
    assert np.allclose(fulgur.attention(q, y, half), want, atol=1e-5)


def test_float8_queries(rng):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (fulgur.quantize(numbers(rng, 1, 6, 2, 32), "e4m3", scale="head") for _ in range(3))
    assert q.codes.dtype == ml_dtypes.float8_e4m3fn
    out = fulgur.attention(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    want = fulgur.attention(*(x.dequantize() for x in (q, k, v)))
    assert np.allclose(out.astype(np.float32), want, atol=1e-2)
    # Arrays that are there, by FlashAttention-3's names.
    descales = dict(q_descale=q.scale, k_descale=k.scale, v_descale=v.scale)
    result = np.empty((1, 6, 2, 32), np.float32)
    assert fulgur.attention(q.codes, k.codes, v.codes, out=result, **descales) is result
    assert np.allclose(result, want, atol=1e-5)


def with_outliers(rng, *shape):
    return numbers(rng, *shape) + rng.normal(scale=10, size=shape).astype(np.float32) * (rng.random(shape) < 0.001)


def reference(q, k, v):
    """In double precision, of (batch, rows, heads, dim)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)


def test_rotated_codes_of_outliers(rng):
    """FlashAttention-3's test of FP8: rotated q and k leave less than half of the error."""
    q, k, v = with_outliers(rng, 1, 64, 2, 128), *(with_outliers(rng, 1, 2000, 2, 128) for _ in range(2))
    want, errors = reference(q, k, v), {}
    for rotate in (False, True):
        codes = [fulgur.quantize(x, "e4m3", scale="head", rotate=rotate) for x in (q, k)]
        out = fulgur.attention(*codes, fulgur.quantize(v, "e4m3", scale="head"), out=np.empty_like(q))
        errors[rotate] = np.sqrt(np.mean((out - want) ** 2))
        assert codes[0].rotated == rotate and np.abs(codes[0].dequantize() - q).max() < 0.1 * np.abs(q).max()
    assert errors[True] < 0.6 * errors[False] and errors[True] < 1.6e-2
    # q of floats is rotated by the call.
    y = fulgur.quantize(k, "int8", rotate=True)
    assert np.allclose(fulgur.attention(q, y, v), fulgur.attention(q, y.dequantize(), v), atol=1e-3)


def test_positions_come_before_the_rotation(rng):
    """append turns new keys to their positions, rotates them by hadamard and quantizes; queries likewise."""
    k, v, q = (numbers(rng, 2, 3, heads, 64) for heads in (2, 2, 4))
    angles = rng.uniform(0, 6, (9, 16)).astype(np.float32)
    rotary, lengths = dict(cos=np.cos(angles), sin=np.sin(angles), causal=True), np.array([2, 4], np.int32)
    plain = [np.zeros((2, 9, 2, 64), np.float32) for _ in range(2)]
    turned = fulgur.append(*plain, k, v, lengths, q=q, **rotary)
    cache = [fulgur.quantize(np.zeros_like(x), "int8", rotate=rotate) for x, rotate in zip(plain, (True, False))]
    out = fulgur.append_attention(q, *cache, k, v, lengths, **rotary)
    want = fulgur.quantize(plain[0], "int8", rotate=True)
    assert np.array_equal(cache[0].codes, want.codes) and np.array_equal(cache[0].scale, want.scale)
    again = [fulgur.quantize(np.zeros_like(x), "int8", rotate=rotate) for x, rotate in zip(plain, (True, False))]
    assert np.array_equal(fulgur.append(*again, k, v, lengths, q=q, **rotary), turned)
    assert np.array_equal(again[0].codes, want.codes)
    assert np.array_equal(fulgur.attention(turned, *again, seqused_k=lengths + 3, causal=True), out)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("format", ["e4m3", "int8", "int4", "q4_0"])
def test_keys_less_their_means(rng, format, rotate):
    """Means are taken from codes and given back: out and lse are those of the numbers."""
    if format == "e4m3":
        pytest.importorskip("ml_dtypes")
    q, k, v = numbers(rng, 2, 5, 4, 64), numbers(rng, 2, 50, 2, 64), numbers(rng, 2, 50, 2, 64)
    k += 6 * numbers(rng, 2, 1, 2, 64)
    plain, less = (fulgur.quantize(k, format, mean=mean, rotate=rotate) for mean in (None, True))
    assert less.mean.shape == (2, 2, 64) and plain.mean is None
    if not rotate:
        assert np.allclose(less.mean, k.mean(1), atol=1e-5)
    error = [np.sqrt(np.mean((x.dequantize() - k) ** 2)) for x in (plain, less)]
    assert error[1] < 0.5 * error[0]
    got, lse = fulgur.attention(q, less, v, causal=True, return_lse=True)
    want, want_lse = fulgur.attention(q, less.dequantize(), v, causal=True, return_lse=True)
    assert np.allclose(got, want, atol=1e-3) and np.allclose(lse, want_lse, atol=1e-3)
    if format == "e4m3":  # of q, too, which is of rotated rows where k is
        codes = fulgur.quantize(q, format, scale="head", rotate=rotate)
        codes = fulgur.Quantized(format, codes.codes, np.ones(1, np.float32), rotated=rotate)
        got, lse = fulgur.attention(codes, less, v, out=np.empty_like(q), return_lse=True)
        want, want_lse = fulgur.attention(codes.dequantize(), less.dequantize(), v, return_lse=True)
        assert np.allclose(got, want, atol=1e-2) and np.allclose(lse, want_lse, atol=1e-2, rtol=1e-4)
    # A cache keeps its means.
    cache = fulgur.quantize(np.zeros_like(k), format, mean=less.mean, rotate=rotate)
    fulgur.append(cache, fulgur.quantize(v, "q8_0"), k, v, np.zeros(2, np.int32))
    assert np.array_equal(cache.codes, less.codes) and cache.mean is less.mean
    # What sees scores themselves sees those of the numbers; a tensor of an expression may have any name.
    sinks = 4 * numbers(rng, 4)
    table = {"k_mean": numbers(rng, 4), "k_mean_": numbers(rng, 4)}
    for options in (
        {"softcap": 5.0},
        {"sinks": sinks},
        {"score_mod": "0.3 * score * score + k_mean[h] * k_mean_[q % 4]", "tensors": table, "softcap": 9.0},
        {"score_mod": "select(score > 9, score - 1, -inf)", "sinks": sinks},
    ):
        got, lse = fulgur.attention(q, less, v, causal=True, return_lse=True, **options)
        want, want_lse = fulgur.attention(q, less.dequantize(), v, causal=True, return_lse=True, **options)
        assert np.allclose(got, want, atol=2e-3) and np.allclose(lse, want_lse, atol=2e-3, rtol=1e-4)
    with pytest.raises(fulgur.Error, match="^k_mean: given with softcap and alibi_slopes"):
        fulgur.attention(q, less, v, softcap=5.0, alibi_slopes=np.ones(4, np.float32))
    with pytest.raises(ValueError, match="^v: got codes less their mean, want those of k alone"):
        fulgur.attention(q, k, fulgur.quantize(v, format, mean=True))


@pytest.mark.parametrize("format", ["int8", "q4_0"])
def test_rotated_caches_take_rows(rng, format):
    """New keys are rotated as those that are there, and so are the queries that follow."""
    k, v, q = with_outliers(rng, 2, 9, 2, 64), numbers(rng, 2, 9, 2, 64), numbers(rng, 2, 2, 4, 64)
    whole = fulgur.quantize(k, format, rotate=True), fulgur.quantize(v, format)
    lengths = np.array([7, 5], np.int32)

    def begun():  # without the rows that come
        caches = [fulgur.quantize(x, format, rotate=rotate) for x, rotate in ((k, True), (v, False))]
        for cache in caches:
            for b, n in enumerate(lengths):
                cache.codes[b, n:] = 0
                if cache.scale is not None:
                    cache.scale[b, n:] = 0
        return caches

    new = [np.stack([x[b, n : n + 2] for b, n in enumerate(lengths)]) for x in (k, v)]
    caches = begun()
    fulgur.append(*caches, *new, lengths)
    for got, want in zip(caches, whole):
        for b, n in enumerate(lengths):
            assert np.array_equal(got.codes[b, : n + 2], want.codes[b, : n + 2])
    want = fulgur.attention(q, *whole, causal=True, seqused_k=lengths + 2)
    caches = begun()
    assert np.array_equal(fulgur.append_attention(q, *caches, *new, lengths, causal=True), want)


def test_rotation_is_of_q_and_k(rng):
    x = numbers(rng, 1, 4, 2, 64)
    plain, turned = (fulgur.quantize(x, "e4m3", rotate=rotate) for rotate in (False, True))
    with pytest.raises(ValueError, match="^q: got rows that are not rotated, want fulgur.quantize"):
        fulgur.attention(plain, turned, x)
    with pytest.raises(ValueError, match="^k: got rows that are not rotated, want fulgur.quantize"):
        fulgur.attention(turned, plain, x)
    with pytest.raises(ValueError, match="^v: got rotated codes"):
        fulgur.attention(turned, turned, turned)
    with pytest.raises(ValueError, match="^v_cache: got rotated codes"):
        fulgur.append(turned, turned, x, x, np.zeros(1, np.int32))
    with pytest.raises(ValueError, match="^hadamard: given with codes in k that are not rotated, want rotated=True"):
        fulgur.attention(x, plain, x, hadamard=True)
    with pytest.raises(ValueError, match="^hadamard: given with k of f32, want codes of a low-bit format"):
        fulgur.attention(x, x, x, hadamard=True)
    plan = fulgur.plan(x, plain, x)
    with pytest.raises(ValueError, match="^k: got rotated codes, want those that are not, as planned"):
        plan.run(x, turned, x)
    plan = fulgur.plan(x, turned, x)
    assert np.array_equal(plan.run(x, turned, x), fulgur.attention(x, turned, x))
    by_name = fulgur.attention(x, turned.codes, x, k_descale=turned.scale, hadamard=True)
    assert np.array_equal(by_name, fulgur.attention(x, turned, x))
    assert np.allclose(fulgur.hadamard(fulgur.hadamard(x), inverse=True), x, atol=1e-6)
    with pytest.raises(ValueError, match="^y: got f16, want f32 or bf16 as x|^y: got f16, want f32$|^y: got f16"):
        fulgur.hadamard(x, dtype="f16")


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(numbers(rng, 1, 7, 2, 32)) for _ in range(3))
    for format in ("int8", "q4_0"):
        y = [fulgur.quantize(x, format) for x in (k, v)]
        assert isinstance(y[0].codes, torch.Tensor)
        want = fulgur.attention(q, *(x.dequantize() for x in y))
        assert torch.allclose(fulgur.attention(q, *y), want, atol=1e-5)


def test_static_scales_and_bytes(rng):
    x = numbers(rng, 4, 2, 64)
    first = fulgur.quantize(x, "int4", scale="head", zero_point=True, scale_dtype="f16")
    again = fulgur.quantize(x, "int4", scale=first.scale, zero_point=first.zero_point)
    assert first.scale.dtype == np.float16 and first.codes.shape == (4, 2, 32)
    assert np.array_equal(first.codes, again.codes)
    same = fulgur.Quantized("int4", first.codes, first.scale, first.zero_point)
    assert np.array_equal(same.dequantize(), first.dequantize())
    assert first.dequantize("f64").dtype == np.float64


@pytest.mark.parametrize("format", ["int8", "q4_0"])
def test_append_to_codes_in_pages(rng, format):
    k, v = (fulgur.quantize(np.zeros((6, 4, 2, 32), np.float32), format) for _ in range(2))
    table, lengths = np.array([[3, 1], [5, 0]], np.int32), np.array([2, 3], np.int32)
    k_new, v_new, q = numbers(rng, 2, 2, 2, 32), numbers(rng, 2, 2, 2, 32), numbers(rng, 2, 2, 4, 32)
    out = fulgur.append_attention(q, k, v, k_new, v_new, lengths, page_table=table, causal=True)
    want = fulgur.quantize(k_new, format)
    for b, n in ((0, 0), (0, 1), (1, 0), (1, 1)):
        row = lengths[b] + n
        assert np.array_equal(k.codes[table[b, row // 4], row % 4], want.codes[b, n])
    again = fulgur.attention(q, k, v, page_table=table, seqused_k=lengths + 2, causal=True)
    assert np.array_equal(out, again)


def test_errors(rng):
    x = numbers(rng, 1, 4, 2, 48)
    with pytest.raises(ValueError, match="^format: got .q3., want one of e4m3, .*iq4_nl"):
        fulgur.quantize(x, "q3")
    with pytest.raises(ValueError, match="^x: got head dim 48, want a multiple of 32, the block of q8_0"):
        fulgur.quantize(x, "q8_0")
    with pytest.raises(ValueError, match="^x: got 2 dimensions"):
        fulgur.quantize(x[0, 0], "int8")
    with pytest.raises(ValueError, match="^scale: given with q4_0"):
        fulgur.quantize(numbers(rng, 1, 4, 2, 64), "q4_0", scale="token")
    with pytest.raises(TypeError, match="^scale: got 'row', want"):
        fulgur.quantize(x, "int8", scale="row")
    with pytest.raises(ValueError, match="^zero_point: given with"):
        fulgur.quantize(x, "e4m3", zero_point=True)
    with pytest.raises(ValueError, match="^codes: got rows of 33, want a multiple of the 34 bytes"):
        fulgur.Quantized("q8_0", np.zeros((1, 1, 33), np.uint8))
    y = fulgur.quantize(x, "int8")
    with pytest.raises((ValueError, TypeError)):
        fulgur.attention_backward(x, x, y, x, x, numbers(rng, 1, 2, 4))
