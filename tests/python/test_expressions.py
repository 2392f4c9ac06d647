"""score_mod and mask_mod: functions and texts against the formula written out, and what they refuse."""

import functools
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import random_mods

import fulgur
from fulgur._expressions import FUNCTIONS

BATCH, HQ, HK, SQ, SK, DIM = 2, 4, 2, 45, 70, 16
FULGURS = {name: getattr(fulgur, name) for name in FUNCTIONS}
NUMPYS = {
    "bit": lambda x, i: ((x >> i) & 1) == 1, "clip": np.clip, "cos": np.cos, "erf": np.vectorize(math.erf),
    "exp": np.exp, "exp2": np.exp2, "floor": np.floor, "log": np.log, "maximum": np.maximum, "minimum": np.minimum,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sin": np.sin, "sqrt": np.sqrt,
    "tanh": np.tanh, "where": np.where,
}  # fmt: skip


def arrays(seed, dtype=np.float32, sq=SQ, sk=SK):
    rng = np.random.default_rng(seed)
    shapes = (BATCH, sq, HQ, DIM), (BATCH, sk, HK, DIM), (BATCH, sk, HK, DIM)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def expected(q, k, v, score_mod, mask_mod, tensors):
    """out and lse in double precision, by functions of NumPy."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, HQ // HK, axis=2) for x in (k, v))
    S = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(DIM)
    places = random_mods.places(BATCH, HQ, HK, q.shape[1], k.shape[1], np.arange)
    tensors = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in tensors.items()}
    known = {name: random_mods.Clamped(x, lambda i, n: np.clip(i, 0, n - 1)) for name, x in tensors.items()}
    if score_mod is not None:
        S = np.broadcast_to(score_mod(score=S, **places, **known), S.shape)
    if mask_mod is not None:
        S = np.where(mask_mod(**places, **known), S, -np.inf)
    top = S.max(-1, keepdims=True)
    E = np.exp(S - np.where(np.isinf(top), 0, top))
    total = E.sum(-1)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isinf(top), 0, top)[..., 0] + np.log(total)
    P = E / np.where(total == 0, 1, total)[..., None]
    return np.einsum("bhij,bjhd->bihd", P, v), lse


def random_call(seed, smooth):
    """Sources of both, and the tensors that they index."""
    sources = random_mods.Sources(seed, smooth)
    score, mask = sources.number(1 + seed % 4), sources.condition(1 + seed % 3)
    every = random_mods.tensors(seed)
    return score, mask, {name: x for name, x in every.items() if f"{name}[" in score + mask}


def functions(score, mask, names, by):
    places = random_mods.PLACES
    return (random_mods.function(score, ("score", *places, *names), by),
            random_mods.function(mask, (*places, *names), by))  # fmt: skip


@pytest.mark.parametrize("engine, dtype", [("cpu", "float32"), ("reference", "float64")])
@pytest.mark.parametrize("seed", range(20))
def test_random_functions(seed, engine, dtype):
    seed += 1000 * int(os.environ.get("FULGUR_TEST_SEED", 0))
    score, mask, tensors = random_call(seed, smooth=engine == "cpu")
    q, k, v = arrays(seed, dtype)
    want = expected(q, k, v, *functions(score, mask, tensors, NUMPYS), tensors)
    score_mod, mask_mod = functions(score, mask, tensors, FULGURS)
    got = fulgur.attention(
        q, k, v, score_mod=score_mod, mask_mod=mask_mod, tensors=tensors, return_lse=True, engine=engine
    )
    close = dict(rtol=2e-5, atol=2e-5) if engine == "cpu" else dict(rtol=1e-9, atol=1e-9)
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, **close, err_msg=f"{score}\n{mask}")
    # What is printed is read, and is the same.
    made = [fulgur.expression(x, tensors=tensors) for x in (score_mod, mask_mod)]
    texts = [str(fulgur.expression(str(x), tensors=tensors)) for x in made]
    assert texts == [str(x) for x in made]
    for mods in (made, texts):
        again = fulgur.attention(q, k, v, score_mod=mods[0], mask_mod=mods[1], tensors=tensors, engine=engine)
        np.testing.assert_array_equal(again, got[0])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sse4", "avx2"])
def test_random_functions_on_older_cpus(target):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_random_functions"]
    done = subprocess.run(command, env={**os.environ, "FULGUR_CPU_TARGET": target}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_documents_and_other_masks():
    """Masks that hide whole tiles, with the other options and alone."""
    q, k, v = arrays(1, sq=300, sk=300)
    doc = np.repeat(np.arange(5, dtype=np.int32), 60)[None].repeat(2, 0)
    for mask_mod in (
        "doc[b, q] == doc[b, k]",
        lambda b, q, k, doc: doc[b, q] == doc[b, k],
        lambda *, doc, k, b, q, unused=3: doc[b][q] == doc[b][k],
    ):
        got = fulgur.attention(q, k, v, causal=True, mask_mod=mask_mod, tensors={"doc": doc})
        ends = np.arange(0, 301, 60, dtype=np.int32)
        ends = np.concatenate([ends, 300 + ends[1:]]).astype(np.int32)
        packed = [x.reshape(600, -1, DIM) for x in (q, k, v)]
        want = fulgur.attention(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
        np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-5, atol=1e-5)
    sinks = fulgur.attention(q, k, v, mask_mod=lambda k, delta: (delta <= 0) & ((k < 4) | (delta > -32)))
    i, j = np.arange(300)[:, None], np.arange(300)
    bias = ((j <= i) & ((j < 4) | (j > i - 32)))[None, None]
    np.testing.assert_allclose(sinks, fulgur.attention(q, k, v, bias=bias), rtol=1e-5, atol=1e-5)


def test_options_as_expressions():
    q, k, v = arrays(2)
    slopes = np.array([0.5, 0.25, 0.1, 0.0], np.float32)
    options = dict(softcap=5.0, alibi_slopes=slopes, causal=True)
    same = dict(
        score_mod=lambda score, h, delta, slope: 5 * np.tanh(score / 5) - slope[h] * abs(delta),
        mask_mod=lambda q, k, sq, sk: k <= q + sk - sq,
        tensors={"slope": slopes},
    )
    want, lse = fulgur.attention(q, k, v, return_lse=True, **options)
    got, other = fulgur.attention(q, k, v, return_lse=True, **same)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(other, lse, rtol=1e-5, atol=1e-5)
    dout = np.random.default_rng(3).standard_normal(got.shape, np.float32)
    for x, y in zip(fulgur.attention_backward(dout, q, k, v, want, lse, **options),
                    fulgur.attention_backward(dout, q, k, v, want, lse, **same)):  # fmt: skip
        np.testing.assert_allclose(y, x, rtol=1e-4, atol=1e-5)
    for stage in ("masked", "probabilities"):
        np.testing.assert_allclose(
            fulgur.scores(q, k, stage=stage, **same), fulgur.scores(q, k, stage=stage, **options),
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip


def test_gradients_of_tensors():
    """By finite differences in double precision, in fresh arrays and in given ones; without dtensors there are none."""
    rng = np.random.default_rng(4)
    q, k, v = arrays(4, np.float64, 9, 11)
    tensors = {"cap": rng.uniform(1, 2, 4), "gate": rng.standard_normal((2, 11)), "n": np.array([3, 1], np.int64)}
    mods = dict(
        score_mod=lambda score, b, h, k, cap, gate: cap[h] * np.tanh(score / cap[h]) + gate[b, k],
        mask_mod="k >= n[b]",
    )
    dout = rng.standard_normal(q.shape)

    def loss(**changed):
        return (fulgur.attention(q, k, v, tensors={**tensors, **changed}, **mods) * dout).sum()

    out, lse = fulgur.attention(q, k, v, return_lse=True, tensors=tensors, **mods)
    into = np.full((2, 22), np.nan)[:, ::2]
    dq, dk, dv, dtensors = fulgur.attention_backward(
        dout, q, k, v, out, lse, tensors=tensors, dtensors={"gate": into, "cap": None}, **mods
    )
    assert list(dtensors) == ["gate", "cap"] and dtensors["gate"] is into and dtensors["cap"].dtype == np.float64
    for name, gradient in dtensors.items():
        for index in [(0,) * gradient.ndim, tuple(n - 1 for n in gradient.shape)]:
            change = np.zeros(gradient.shape)
            change[index] = 1e-6
            slope = (loss(**{name: tensors[name] + change}) - loss(**{name: tensors[name] - change})) / 2e-6
            np.testing.assert_allclose(gradient[index], slope, rtol=1e-5, atol=1e-7)
    assert len(fulgur.attention_backward(dout, q, k, v, out, lse, tensors=tensors, **mods)) == 3


def test_plans():
    q, k, v = arrays(5)
    table, other = (np.random.default_rng(n).standard_normal((4, 32), np.float32) for n in range(2))
    score_mod = "score + table[h, t5_bucket(delta, 32, 128)] * scale[0]"
    tensors = {"table": table, "scale": np.ones(1, np.float32)}
    plan = fulgur.plan(q, k, v, score_mod=score_mod, tensors=tensors, return_lse=True)
    assert "table[h" in plan.details()["call"]["score_mod"] and "table[h" in plan.explain()
    assert "table[h" in fulgur.explain(q, k, v, score_mod=score_mod, tensors=tensors)
    shape, doc = (2, 1024, 8, 64), np.repeat(np.arange(4, dtype=np.int32), 256)
    for backward in (False, True):
        text = fulgur.explain(
            shape, shape, shape, mask_mod="doc[q] == doc[k]", tensors={"doc": doc}, backward=backward
        )
        assert re.search(r"^tiles +of q head 0: \d+ hidden, \d+ shown in full, \d+ in part$", text, re.M)
    mask = (doc[:, None] == doc)[None, None]
    counts = [
        re.search(r"^tiles .*$", fulgur.explain(shape, shape, shape, **of), re.M)[0]
        for of in (
            dict(bias=mask), dict(mask_mod="doc[q] == doc[k]", tensors={"doc": doc}),
            dict(bias=mask, backward=True), dict(mask_mod="doc[q] == doc[k]", tensors={"doc": doc}, backward=True),
        )
    ]  # fmt: skip
    assert counts[:3:2] == counts[1::2]
    numbers = np.zeros(mask.shape, np.float32)
    assert "tiles  " not in fulgur.explain(shape, shape, shape, bias=numbers)
    assert "tiles  " not in fulgur.explain(shape, shape, shape, score_mod="score + doc[k]", tensors={"doc": doc})
    planned = fulgur.plan(shape, shape, shape, bias=mask)
    assert "tiles  " not in planned.explain() and counts[0] in planned.explain(bias=mask)
    planned = fulgur.plan(shape, shape, shape, mask_mod="k < 4 || delta <= 0")
    assert "tiles  " not in planned.explain() and "tiles  " in planned.explain(tensors={})
    with pytest.raises(ValueError, match="^bias: got .* as planned$"):
        fulgur.plan(shape, shape, shape, bias=mask).explain(bias=mask[..., 1:])
    for array in (table, other):
        given = {"scale": np.full(1, 0.5, np.float32), "table": array}  # in another order
        out, lse = plan.run(q, k, v, tensors=given)
        want = fulgur.attention(q, k, v, score_mod=score_mod, tensors=given)
        np.testing.assert_array_equal(out, want)
    backward = fulgur.plan_backward(
        out, q, k, v, out, lse, score_mod=score_mod, tensors=tensors, dtensors={"table": None}
    )
    results = backward.run(out, q, k, v, out, lse, tensors=given, dtensors={"table": None})
    want = fulgur.attention_backward(
        out, q, k, v, out, lse, score_mod=score_mod, tensors=given, dtensors={"table": np.empty_like(table)}
    )
    np.testing.assert_array_equal(results[0], want[0])
    np.testing.assert_array_equal(results[3]["table"], want[3]["table"])
    with pytest.raises(ValueError, match="tensors: got others than planned"):
        plan.run(q, k, v)
    with pytest.raises(ValueError, match=r"table: got f32 \(4, 31\).* as planned"):
        plan.run(q, k, v, tensors={**tensors, "table": table[:, 1:]})
    with pytest.raises(ValueError, match="gradient of table|table: got"):
        backward.run(out, q, k, v, out, lse, tensors=tensors)


def test_caches_and_appending():
    """Places count from the first key of a sequence that exists, whatever page it lies in."""
    rng = np.random.default_rng(6)
    q = rng.standard_normal((2, 3, 4, 16), np.float32)
    pages = rng.standard_normal((2, 6, 8, 2, 16), np.float32)
    table, used = np.array([[4, 0, 1], [2, 3, 5]], np.int32), np.array([13, 20], np.int32)
    gate = rng.standard_normal((2, 24), np.float32)
    mods = dict(score_mod="score + gate[b, k]", mask_mod="k < 2 || delta > -6", tensors={"gate": gate})
    k, v = (x[table].reshape(2, 24, 2, 16) for x in pages)
    want = fulgur.attention(q, k, v, seqused_k=used, causal=True, **mods)
    got = fulgur.attention(q, *pages, seqused_k=used, page_table=table, causal=True, **mods)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    new = [np.stack([x[b, n - 3 : n] for b, n in enumerate(used)]) for x in (k, v)]
    got = fulgur.append_attention(q, *pages, *new, used - 3, page_table=table, causal=True, **mods)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_language_of_python():
    table = np.zeros((3, 4), np.int32)

    def text(function):
        return str(fulgur.expression(function, tensors={"t": table}))

    assert text(lambda score: np.where(np.tanh(np.float32(2) * score) > 0, score, -np.inf)) == (
        "select(0.0 < tanh(2.0 * score), score, -inf)"
    )
    assert text(lambda q, k: ~(q // 64 == k // 64) & (k % 7 >= 3)) == "!(q // 64 == k // 64) && 3 <= k % 7"
    assert text(lambda q: ~q & np.int64(15)) == "(q ^ -1) & 15"
    assert text(lambda score: score**2) == "score * score"
    assert text(lambda score: 2**score + score**0.5) == "pow(2.0, score) + pow(score, 0.5)"
    assert text(lambda q, t: t[q][-1] + t[-3, q].astype(float).astype(int)) == "t[q, 3] + to_int(to_float(t[0, q]))"
    assert text(lambda q, k: np.minimum(q, k) + np.clip(k, 0, 9)) == "min(q, k) + min(max(k, 0), 9)"
    assert text(lambda q, k, *_, **__: 1.5 - abs(q - k) / 2) == "1.5 - to_float(abs(q - k)) / 2.0"
    assert text(lambda: True) == "true"
    made = fulgur.expression("k < q")
    assert made.type == "bool" and repr(made) == "Expression('k < q')"
    assert (made | fulgur.expression("k < 4")).type == "bool"


@pytest.mark.parametrize(
    "function, error, words",
    [
        (lambda q, k: q < k and k < 3, TypeError, "mask_mod: an expression has no value .* fulgur.where.* &, | and ~"),
        (lambda q: 1 if q < 3 else 0, TypeError, "mask_mod: an expression has no value"),
        (lambda q: 0 < q < 4, TypeError, "mask_mod: an expression has no value"),
        (lambda q: np.ones(3)[q], TypeError, "mask_mod: is no array: want tensors that the call is given by name"),
        (lambda q: np.ones(3) * q, TypeError, "mask_mod: got an array of shape \\(3,\\) for an operand"),
        (lambda q: math.exp(q), TypeError, "mask_mod: is no number while it is made: want functions of fulgur"),
        (lambda q: range(q), TypeError, "mask_mod: is no number"),
        (lambda q: list(q), TypeError, "mask_mod: has no elements"),
        (lambda q: np.cumsum(q), TypeError, "mask_mod: np.cumsum is no function of expressions, want one of absolute"),
        (lambda x: x < 3, TypeError, "mask_mod: got a function of x, want parameters of b, h, hk, q, k, .*delta, t"),
        (lambda score: score < 3, TypeError, "mask_mod: got a function of score"),
        (lambda q, /: q < 3, TypeError, "mask_mod: got a function of q"),
        (lambda: "q", TypeError, "mask_mod: got str for an operand"),
        (lambda q: q // q, ValueError, "mask_mod: floor_div: want a divisor that is a literal of at least 1"),
        (lambda q: q & 2.0, ValueError, "mask_mod: &: got float, want bools or integers"),
        (lambda q: q < 2**31, ValueError, "mask_mod: got 2147483648, want -2147483648 to 2147483647"),
        (lambda q: q.astype("U1"), TypeError, "mask_mod: got the dtype 'U1', want bool, int or float"),
        (lambda q: q, ValueError, "mask_mod: got a value of type int, want bool"),
        (lambda t: t[9], IndexError, "t: got the index 9 of dimension 0, which has 3"),
        (lambda t, q: t[q, q, q], IndexError, "t: got more indices than 2"),
        (lambda t: t[:, 1], TypeError, "t: got the index slice.*, want an integer or an expression"),
        (lambda t: t[0], TypeError, "mask_mod: got an array of shape \\(3, 4\\) for an operand"),
        (lambda t, q: t[q, q] / 1.0, ValueError, "mask_mod: got a value of type float, want bool"),
        (3, TypeError, "mask_mod: got int, want a text, a function or an Expression"),
        ("q <", ValueError, 'mask_mod: at character 4, got the end, want a number, a name or "\\("'),
        ("qq < 3", ValueError, 'mask_mod: there is no symbol "qq"'),
        ("gelu(q) < 3", ValueError, 'mask_mod: there is no operation "gelu"'),
        ("score < 3", ValueError, "mask_mod: depends on the score"),
        ("u[q] < 3", ValueError, "mask_mod: at character 1, .* want a tensor that is declared"),
        ("t[q] < 3", ValueError, "mask_mod: t: got 1 indices, want 2"),
        ("q < 3", ValueError, "t: given, but no expression indexes a tensor of that name"),
    ],
)
def test_errors_of_masks(function, error, words):
    q = np.zeros((1, 3, 2, 8), np.float32)
    with pytest.raises(error, match=words):
        fulgur.attention(q, q, q, mask_mod=function, tensors={"t": np.zeros((3, 4), np.int32)})


def many(count, of):
    """`of` this of the last one, so many times."""
    return lambda score: functools.reduce(of, range(count), score)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(score_mod="q < k"), ValueError, "score_mod: got a bool, want a number"),
        (dict(score_mod=many(33, lambda x, i: x + (i + 0.5))), ValueError, "got 33 literals, want at most 32"),
        (dict(score_mod=many(256, lambda x, _: np.tanh(x))), ValueError,
         "got 257 operations, symbols and literals, want at most 256"),
        (dict(score_mod=" + ".join(f"t{i}[q]" for i in range(9)),
              tensors={f"t{i}": np.zeros(3, np.float32) for i in range(9)}),
         ValueError, "got 9 tensors, want at most 8"),
        (dict(tensors={"t": np.zeros(3)}), ValueError, "t: given, but no expression indexes"),
        (dict(tensors={"q": np.zeros(3)}), ValueError, "tensors: got the name 'q', which is a place of scores"),
        (dict(tensors={3: np.zeros(3)}), TypeError, "tensors: got the name 3, want a string"),
        (dict(tensors=3), TypeError, "tensors: got int, want a dict of arrays by name"),
        (dict(tensors={"T": np.zeros(3)}), ValueError, 'tensors: got the name "T"'),
        (dict(tensors={"t": np.zeros(3, np.uint8)}), ValueError, "tensors: t: got u8, want f32, bf16, f16, f64, i32"),
        (dict(tensors={"t": np.zeros(())}), ValueError, "t: got rank 0|t: got 0"),
        (dict(tensors={"t": "x"}), TypeError, "t: got str"),
        (dict(dtensors={}), TypeError, "dtensors"),
    ],
)  # fmt: skip
def test_errors_of_calls(change, error, words):
    q = np.zeros((1, 3, 2, 8), np.float32)
    with pytest.raises(error, match=words):
        fulgur.attention(q, q, q, **change)


@pytest.mark.parametrize(
    "dtensors, error, words",
    [
        ({"u": None}, ValueError, r"dtensors: got 'u', want names of tensors \(t, n\)"),
        (7, TypeError, "dtensors: got int, want a dict of arrays or None by name"),
        ({"n": None}, ValueError, "gradient of n: given, but the elements of the tensor are i32"),
        ({"t": np.zeros(3, np.float32)}, ValueError, r"gradient of t: got f32 \(3\), want the shape \(4\)"),
        ({"t": np.zeros(4, np.float16)}, ValueError, "gradient of t: got f16"),
        ({"t": np.broadcast_to(np.float32(0), 4)}, ValueError, "gradient of t: got a read-only array"),
    ],
)
def test_errors_of_gradients(dtensors, error, words):
    q = np.zeros((1, 3, 2, 8), np.float32)
    mods = dict(score_mod="score + t[k] * n[q]", tensors={"t": np.zeros(4, np.float32), "n": np.zeros(4, np.int32)})
    out, lse = fulgur.attention(q, q, q, return_lse=True, **mods)
    with pytest.raises(error, match=words):
        fulgur.attention_backward(out, q, q, q, out, lse, dtensors=dtensors, **mods)


def test_lists_of_blocks():
    rng = np.random.default_rng(3)
    want = rng.random((HQ, 3, 5)) < 0.5  # blocks of 16 queries and of 16 keys
    indices = np.nonzero(want)[2]
    ends = want.sum(-1).reshape(-1).cumsum()
    offsets = np.stack([np.r_[([0, *ends])[3 * h : 3 * h + 4]] for h in range(HQ)])
    for dtype in (np.int32, np.int64):
        blocks = fulgur.expand_blocks(offsets.astype(dtype), indices.astype(dtype), 5)
        assert isinstance(blocks, np.ndarray) and blocks.dtype == bool and np.array_equal(blocks, want)
    q, k, v = arrays(3)
    got = fulgur.attention(
        q, k, v, mask_mod=lambda h, q, k, blocks: blocks[h, q // 16, k // 16], tensors={"blocks": blocks}
    )
    out, _ = expected(q, k, v, None, lambda h, q, k, **_: want[h, q // 16, k // 16], {})
    np.testing.assert_allclose(got, out, rtol=2e-5, atol=2e-5)

    with pytest.raises(ValueError, match="indices: got 4 at .*, want blocks of keys from 0 to 3"):
        fulgur.expand_blocks(offsets, np.where(indices == 3, 4, indices), 4)
    with pytest.raises(ValueError, match="offsets: got f64, want i32 or i64"):
        fulgur.expand_blocks(offsets.astype(float), indices, 5)
    with pytest.raises(ValueError, match="key_blocks: got -1"):
        fulgur.expand_blocks(offsets, indices, -1)
    with pytest.raises(TypeError, match="key_blocks: got 5.0"):
        fulgur.expand_blocks(offsets, indices, 5.0)
