"""The fulgur program from outside: results against NumPy in float64, files, errors, exit codes.

FULGUR_PROGRAM is the path of the program.
"""

import json
import os
import pathlib
import pty
import re
import resource
import struct
import subprocess
import xml.etree.ElementTree as ET

import numpy as np
import pytest

PROGRAM = os.environ["FULGUR_PROGRAM"]
RNG = np.random.default_rng()


def fulgur(*args, cwd=None, **kwargs):
    return subprocess.run(
        [PROGRAM, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=900, **kwargs
    )


def succeeds(*args, **kwargs):
    done = fulgur(*args, **kwargs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def details(*call, **kwargs):
    """The plan of a call, as data."""
    return json.loads(succeeds("explain", "--json", *call, **kwargs))


def fails(*args, code=1, says=(), **kwargs):
    """Runs a call that fails with one line on stderr (usage: and a hint) that has all of `says`."""
    done = fulgur(*args, **kwargs)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("fulgur: ")
    assert len(lines) == (2 if code == 2 else 1), done.stderr
    for text in says:
        assert text in lines[0], (text, lines[0])
    return lines[0]


# ---------------------------------------------------------------- the reference, in float64


def visible(sq, sk, left, right, chunk=0):
    i, j = np.arange(sq)[:, None] + sk - sq, np.arange(sk)[None, :]
    one_chunk = i // chunk == j // chunk if chunk else True
    return ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right)) & one_chunk


def attention(
    q, k, v, dout=None, dlse=0, left=-1, right=-1, chunk=0, scale=None, softcap=0.0, slopes=None,
    used=None, sinks=None, words=None,
):  # fmt: skip
    """out, lse and, given dout, dq, dk, dv (dsinks) for (batch, seqlen, heads, dim) arrays."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))  # [b, h, s, d]
    (b, hq, sq, d), hk, sk = q.shape, k.shape[1], k.shape[2]
    group = hq // hk
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1 / np.sqrt(d) if scale is None else scale
    s = scale * (q @ k.transpose(0, 1, 3, 2))
    cap_slope = 1.0
    if softcap:
        t = np.tanh(s / softcap)
        s, cap_slope = softcap * t, 1 - t * t
    out, lse, p = np.zeros((b, hq, sq, v.shape[-1])), np.zeros((b, hq, sq)), np.zeros(s.shape)
    for n in range(b):
        keys = sk if used is None else used[n]
        seen = np.zeros((sq, sk), bool)
        seen[:, :keys] = visible(sq, keys, left, right, chunk)
        for i in range(sq if words is not None else 0):
            for token in range(sq):
                if keys - sq + token >= 0 and not int(words[n, i]) >> token & 1:
                    seen[i, keys - sq + token] = False
        bias = 0
        if slopes is not None:
            of_batch = np.broadcast_to(slopes, (b, hq))[n].astype(np.float64)
            bias = -of_batch[:, None, None] * np.abs(
                np.arange(sq)[:, None] + keys - sq - np.arange(sk)[None, :]
            )
        masked = np.where(seen, s[n] + bias, -np.inf)
        m = masked.max(-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            m = np.maximum(m, sinks[:, None, None])
        e = np.exp(masked - np.where(np.isinf(m), 0, m))
        total = e.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[:, None, None] - m)
        p[n] = e / np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            lse[n] = (np.log(total) + np.where(np.isinf(m), 0, m))[..., 0]
    out = p @ v
    results = {"out": out.transpose(0, 2, 1, 3), "lse": lse}
    if dout is not None:
        do = dout.astype(np.float64).transpose(0, 2, 1, 3)
        d = (do * out).sum(-1) - dlse
        ds = p * (do @ v.transpose(0, 1, 3, 2) - d[..., None])
        ds *= scale * cap_slope
        per_kv = lambda x: x.reshape(b, hk, group, *x.shape[2:]).sum(2).transpose(0, 2, 1, 3)
        if sinks is not None:
            results["dsinks"] = -(np.exp(sinks[:, None] - lse) * d).sum((0, 2))
        results["dq"] = (ds @ k).transpose(0, 2, 1, 3)
        results["dk"] = per_kv(ds.transpose(0, 1, 3, 2) @ q)
        results["dv"] = per_kv(p.transpose(0, 1, 3, 2) @ do)
    return results


TOLERANCE = {"f64": 1e-12, "f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}


def assert_close(got, want, dtype):
    assert got.shape == want.shape
    tolerance = TOLERANCE[dtype] * max(1, np.abs(want[np.isfinite(want)]).max(initial=0))
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=tolerance)


def to_bf16(x):
    """Rounds float32 to the nearest bf16, ties to even; the upper 16 bits."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---------------------------------------------------------------- files


def write_safetensors(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    types = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end], types[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (entry["dtype"], array)
    assert sum(e["data_offsets"][1] - e["data_offsets"][0] for e in header.values()) == len(data)
    return tensors


def tensors(batch=2, sq=37, sk=53, hq=4, hk=2, d=24, dv=16, dtype=np.float32):
    shapes = {
        "q": (batch, sq, hq, d),
        "k": (batch, sk, hk, d),
        "v": (batch, sk, hk, dv),
        "dout": (batch, sq, hq, dv),
    }
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def save(folder, arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


FORWARD = ["attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "out.npy"]
LSE = ["--lse", "lse.npy"]
BACKWARD = ["--dout", "dout.npy", "--dq", "dq.npy", "--dk", "dk.npy", "--dv", "dv.npy"]
ALL = FORWARD + LSE + BACKWARD


@pytest.fixture
def folder(tmp_path):
    save(tmp_path, tensors())
    return tmp_path


def listing(folder):
    return sorted(p.name for p in folder.iterdir())


def load(folder, names):
    return {name: np.load(folder / f"{name}.npy") for name in names}


# ---------------------------------------------------------------- attend


@pytest.mark.parametrize(
    "numpy_type,dtype", [("float32", "f32"), ("float16", "f16"), ("float64", "f64")]
)
def test_attend_keeps_the_dtype_of_the_inputs(tmp_path, numpy_type, dtype):
    arrays = tensors(dtype=numpy_type)
    save(tmp_path, arrays)
    stdout = succeeds(*ALL, "--causal", cwd=tmp_path)
    assert re.search(r"^forward: .* ms, .* GFLOP/s", stdout, re.M)
    assert re.search(r"^backward: .* ms, .* GFLOP/s", stdout, re.M)
    want = attention(**arrays, right=0)
    got = load(tmp_path, want)
    for name in want:
        assert_close(got[name], want[name], dtype)
        lse_type = "float64" if numpy_type == "float64" else "float32"
        assert got[name].dtype == (lse_type if name == "lse" else numpy_type)
    assert listing(tmp_path) == sorted(f"{n}.npy" for n in [*arrays, *want])


@pytest.mark.parametrize(
    "flags,reference",
    [
        ([], {}),
        (["--window", "9,3"], {"left": 9, "right": 3}),
        (["--window", "-1,2"], {"right": 2}),
        (["--chunk", "9"], {"chunk": 9}),
        (["--chunk", "12", "--causal"], {"chunk": 12, "right": 0}),
        (["--chunk", "12", "--window", "4,2"], {"chunk": 12, "left": 4, "right": 2}),
        (["--chunk", "0"], {}),
        (["--scale", "0.3"], {"scale": 0.3}),
        (["--softcap", "1.5", "--causal"], {"softcap": 1.5, "right": 0}),
        (["--threads", "1"], {}),
        (["--deterministic", "--invariant"], {}),
        (["--device", "cpu"], {}),
    ],
)
def test_attend_options(folder, flags, reference):
    succeeds(*ALL, *flags, cwd=folder)
    want = attention(**load(folder, ["q", "k", "v", "dout"]), **reference)
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "f32")


def test_rows_without_keys_are_zero(tmp_path):
    save(tmp_path, tensors(sq=9, sk=4))
    succeeds(*ALL, "--causal", cwd=tmp_path)
    got = load(tmp_path, ["out", "lse", "dq"])
    assert (got["out"][:, :5] == 0).all() and (got["dq"][:, :5] == 0).all()
    assert np.isneginf(got["lse"][:, :, :5]).all() and np.isfinite(got["lse"][:, :, 5:]).all()


def test_empty_sequences(tmp_path):
    save(tmp_path, tensors(sk=0))
    succeeds(*ALL, cwd=tmp_path)
    got = load(tmp_path, ["out", "lse", "dk"])
    assert (got["out"] == 0).all() and np.isneginf(got["lse"]).all() and got["dk"].size == 0


def test_dtype_bf16_rounds_the_inputs_and_writes_float32(folder):
    succeeds(*ALL, "--dtype", "bf16", cwd=folder)
    arrays = load(folder, ["q", "k", "v", "dout"])
    want = attention(**{name: from_bf16(to_bf16(x)) for name, x in arrays.items()})
    for name, got in load(folder, want).items():
        assert got.dtype == np.float32
        assert_close(got, want[name], "bf16")
        if name != "lse":  # its values are bf16 values
            assert (got.view(np.uint32) & 0xFFFF == 0).all()


def test_dtype_f16_converts(folder):
    succeeds(*FORWARD, "--dtype", "f16", cwd=folder)
    arrays = load(folder, ["q", "k", "v"])
    got = np.load(folder / "out.npy")
    assert got.dtype == np.float16
    assert_close(got, attention(**arrays)["out"], "f16")


def test_conversion_rounds_to_nearest_even(tmp_path):
    """One key: the output is the value itself, so it shows how float64 became f16 and bf16."""
    hard = np.array(
        [
            1 + 2**-11,
            1 + 3 * 2**-11,
            1 + 2**-8,
            1 + 3 * 2**-8,
            65519.9,
            65520,
            2**-25,
            2**-25 * 1.0001,
            3 * 2**-26,
            2**-24 * 1.5,
            1e-8,
            -0.0,
            1 + 2**-11 + 2**-40,
        ]
    )
    v = np.concatenate([hard, RNG.standard_normal(200) * 10.0 ** RNG.integers(-8, 4, 200)])
    one = np.ones((1, 1, 1, 1))
    save(tmp_path, {"q": one, "k": one, "v": v.reshape(1, 1, 1, -1)})
    succeeds(*FORWARD, "--dtype", "f16", cwd=tmp_path)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy").ravel(), v.astype(np.float16))
    save(tmp_path, {"v": v.astype(np.float32).astype(np.float64).reshape(1, 1, 1, -1)})
    succeeds(*FORWARD, "--dtype", "bf16", cwd=tmp_path)
    np.testing.assert_array_equal(
        np.load(tmp_path / "out.npy").ravel(), from_bf16(to_bf16(v.astype(np.float32)))
    )


def test_alibi_slopes(folder):
    for slopes in RNG.random(4, np.float32), RNG.random((2, 4), np.float32):
        np.save(folder / "slopes.npy", slopes)
        succeeds(*ALL, "--causal", "--alibi-slopes", "slopes.npy", cwd=folder)
        want = attention(**load(folder, ["q", "k", "v", "dout"]), right=0, slopes=slopes)
        for name, got in load(folder, want).items():
            assert_close(got, want[name], "f32")


def test_sinks(folder):
    sinks = RNG.standard_normal(4, np.float32)
    np.save(folder / "sinks.npy", sinks)
    flags = ["--causal", "--sinks", "sinks.npy", "--dsinks", "dsinks.npy"]
    succeeds(*ALL, *flags, cwd=folder)
    arrays = load(folder, ["q", "k", "v", "dout"])
    want = attention(**arrays, right=0, sinks=sinks)
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "f32")
    inputs = {name: ("F32", x) for name, x in (arrays | {"sinks": sinks}).items()}
    write_safetensors(folder / "in.safetensors", inputs)
    succeeds(
        "attend", "--input", "in.safetensors", "--output", "o.safetensors", "--causal", cwd=folder
    )
    got = read_safetensors(folder / "o.safetensors")
    assert set(got) == set(want)
    for name in want:
        assert_close(got[name][1], want[name], "f32")


def test_seqused_q(folder):
    arrays = load(folder, ["q", "k", "v", "dout"])
    rows = arrays["q"].shape[1] - 2
    np.save(folder / "used.npy", np.array([rows, 0], np.int32))
    succeeds(*ALL, "--causal", "--seqused-q", "used.npy", cwd=folder)
    part = {n: x[:1, :rows] if n in ("q", "dout") else x[:1] for n, x in arrays.items()}
    want = attention(**part, right=0)
    for name, got in load(folder, want).items():
        if name == "lse":
            assert np.isneginf(got[1]).all() and np.isneginf(got[0, :, rows:]).all()
            got = got[:, :, :rows]
        else:
            assert not got[1].any() and not (name in ("out", "dq") and got[0, rows:].any())
            got = got[:, :rows] if name in ("out", "dq") else got
        assert_close(got[:1], want[name], "f32")


def test_seqused_k(folder):
    np.save(folder / "used.npy", np.array([11, 0], np.int32))
    succeeds(*ALL, "--causal", "--seqused-k", "used.npy", cwd=folder)
    want = attention(**load(folder, ["q", "k", "v", "dout"]), right=0, used=[11, 0])
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "f32")


def in_pages(x, page, rng, used=None):
    """Keys (batch, sk, heads, dim) as pages in a random order, and the table; NaN where no key is."""
    batch, sk, heads, dim = x.shape
    most = -(-sk // page)
    table = rng.permutation(batch * most + 2)[: batch * most].astype(np.int32).reshape(batch, most)
    cache = np.full((batch * most + 2, page, heads, dim), np.nan, x.dtype)
    for b in range(batch):
        for j in range(sk if used is None else used[b]):
            cache[table[b, j // page], j % page] = x[b, j]
    return cache, table


PAGED = ["--page-table", "table.npy", "--seqused-k", "used.npy"]


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pages(folder, page):
    arrays, used = load(folder, ["q", "k", "v"]), np.array([53, 11], np.int32)
    k, table = in_pages(arrays["k"], page, np.random.default_rng(1), used)
    v, _ = in_pages(arrays["v"], page, np.random.default_rng(1), used)
    save(folder, {"k": k, "v": v, "table": table, "used": used})
    succeeds(*FORWARD, *LSE, *PAGED, "--causal", cwd=folder)
    want = attention(**arrays, right=0, used=used)
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "f32")
    ends = np.array([0, table.shape[1], 2 * table.shape[1]], np.int32)
    save(folder, {"table": table.ravel(), "ends": ends})
    succeeds(*FORWARD, *LSE, *PAGED, "--page-indptr", "ends.npy", "--causal", cwd=folder)
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "f32")


PREFIXES = ["--prefix-groups", "groups.npy", "--prefix-lens", "lens.npy"]


def test_shared_prefixes(tmp_path):
    """Four sequences begin with the first one's keys, which the other pages of theirs do not have."""
    arrays, used = tensors(batch=5, sq=2, sk=320), np.array([290, 320, 258, 300, 40], np.int32)
    for name in "kv":
        arrays[name][1:4, :256] = arrays[name][0, :256]
    k, table = in_pages(arrays["k"], 16, np.random.default_rng(1), used)
    v, _ = in_pages(arrays["v"], 16, np.random.default_rng(1), used)
    for cache in (k, v):
        cache[table[1:4, :16]] = np.nan
    table = np.pad(table, [(0, 0), (0, 400)])  # of room that makes it worth while
    groups, lens = np.array([0, 4, 5], np.int32), np.array([256, 0], np.int32)
    save(tmp_path, {"q": arrays["q"], "k": k, "v": v, "table": table, "used": used, "groups": groups, "lens": lens})
    succeeds(*FORWARD, *LSE, *PAGED, *PREFIXES, "--causal", cwd=tmp_path)
    want = attention(*(arrays[name] for name in "qkv"), right=0, used=used)
    for name, got in load(tmp_path, want).items():
        assert_close(got, want[name], "f32")


def test_tree_mask(folder):
    arrays, used = load(folder, ["q", "k", "v"]), np.array([53, 11], np.int32)
    words = RNG.integers(-(2**63), 2**63 - 1, arrays["q"].shape[:2], np.int64)
    save(folder, {"words": words, "used": used})
    succeeds(*FORWARD, *LSE, "--tree-mask", "words.npy", "--seqused-k", "used.npy", cwd=folder)
    want = attention(**arrays, words=words, used=used)
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "f32")


def test_queries_packed_beside_rows_of_a_cache(folder):
    arrays = tensors(batch=3, sk=20)
    rows, used, pads = (np.array(x, np.int32) for x in ([2, 0], [20, 9], [3, 0]))
    q, ends = arrays["q"].reshape(-1, 4, 24)[:40], np.array([0, 30, 40], np.int32)
    save(folder, arrays | {"q": q, "ends": ends, "rows": rows, "used": used, "pads": pads})
    succeeds(*FORWARD, *LSE, "--causal", "--cu-seqlens-q", "ends.npy", "--cache-batch-idx", "rows.npy",
             "--leftpad-k", "pads.npy", "--seqused-k", "used.npy", cwd=folder)  # fmt: skip
    got = load(folder, ["out", "lse"])
    for b in range(2):
        at, keys = slice(*ends[b : b + 2]), slice(pads[b], used[b])
        want = attention(q[None, at], *(arrays[n][rows[b], keys][None] for n in "kv"), right=0)
        assert_close(got["out"][at], want["out"][0], "f32")
        assert_close(got["lse"][:, at], want["lse"][0], "f32")


def test_caches_of_long_work(tmp_path):
    """So much that contiguous keys are computed in steps."""
    arrays, used = tensors(batch=2, sq=6000, sk=6000, hq=2, hk=2, d=64, dv=64), np.array([6000, 16], np.int32)
    arrays["k"], table = in_pages(arrays["k"], 500, np.random.default_rng(1))
    arrays["v"], _ = in_pages(arrays["v"], 500, np.random.default_rng(1))
    save(tmp_path, arrays | {"table": table, "used": used})
    succeeds(*FORWARD, *PAGED, cwd=tmp_path)
    keys = {n: arrays[n][table].reshape(2, 6000, 2, 64) for n in "kv"}
    want = attention(arrays["q"][:, -3:], keys["k"], keys["v"], used=used)
    assert_close(np.load(tmp_path / "out.npy")[:, -3:], want["out"], "f32")


def test_gradient_of_lse(folder):
    dlse = RNG.standard_normal((2, 4, 37), np.float32)
    np.save(folder / "dlse.npy", dlse)
    inputs = load(folder, ["q", "k", "v", "dout"])
    for flags, dtype in ([], "f32"), (["--dtype", "f16"], "f16"):
        succeeds(*ALL, "--dlse", "dlse.npy", *flags, cwd=folder)
        want = attention(**inputs, dlse=dlse)
        for name, got in load(folder, want).items():
            assert_close(got, want[name], dtype)
    arrays = inputs | {"dlse": dlse}
    write_safetensors(folder / "in.safetensors", {n: ("F32", x) for n, x in arrays.items()})
    succeeds("attend", "--input", "in.safetensors", "--output", "o.safetensors", cwd=folder)
    for name, (_, got) in read_safetensors(folder / "o.safetensors").items():
        assert_close(got, want[name], "f32")
    arrays.pop("dout")
    write_safetensors(folder / "in.safetensors", {n: ("F32", x) for n, x in arrays.items()})
    fails("attend", "--input", "in.safetensors", "--output", "o.safetensors", cwd=folder,
          says=["in.safetensors", "dlse", "dout"])  # fmt: skip


def test_packed_sequences(tmp_path):
    cu = {"q": np.array([0, 5, 5, 30], np.int32), "k": np.array([0, 17, 20, 40], np.int32)}
    arrays = {name: x[0] for name, x in tensors(batch=1, sq=30, sk=40).items()}
    save(tmp_path, arrays | {"cu_q": cu["q"], "cu_k": cu["k"]})
    succeeds(
        *ALL, "--causal", "--cu-seqlens-q", "cu_q.npy", "--cu-seqlens-k", "cu_k.npy", cwd=tmp_path
    )
    got = load(tmp_path, ["out", "lse", "dq", "dk", "dv"])
    for b in range(3):
        rows = {x: slice(cu[x][b], cu[x][b + 1]) for x in "qk"}
        of = {"q": "q", "dout": "q", "k": "k", "v": "k"}
        one = attention(**{n: x[rows[of[n]]][None] for n, x in arrays.items()}, right=0)
        for name in ("out", "dq"):
            assert_close(got[name][rows["q"]], one[name][0], "f32")
        for name in ("dk", "dv"):
            assert_close(got[name][rows["k"]], one[name][0], "f32")
        assert_close(got["lse"][:, rows["q"]], one["lse"][0], "f32")


def test_dropout_is_reproducible(folder):
    outs = []
    for flags in ["--seed 7", "--seed 7 --threads 1", "--seed 8"]:
        succeeds(*FORWARD, "--dropout", "0.5", *flags.split(), cwd=folder)
        outs.append(np.load(folder / "out.npy"))
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-6)
    assert np.abs(outs[0] - outs[2]).max() > 0.01


def test_inputs_of_other_layouts(tmp_path):
    """All header versions, a misaligned header, F order of one dimension."""
    arrays = tensors(batch=1, hq=1, hk=1)
    save(tmp_path, arrays)
    for name, version in [("q", (1, 0)), ("k", (2, 0)), ("v", (3, 0))]:
        with open(tmp_path / f"{name}.npy", "wb") as file:
            np.lib.format.write_array(file, arrays[name], version)
    raw = (tmp_path / "q.npy").read_bytes()
    header = raw[10:128].rstrip() + b"\n"
    (tmp_path / "q.npy").write_bytes(raw[:8] + struct.pack("<H", len(header)) + header + raw[128:])
    succeeds(*FORWARD, cwd=tmp_path)
    arrays.pop("dout")
    assert_close(np.load(tmp_path / "out.npy"), attention(**arrays)["out"], "f32")


def test_outputs_are_read_by_numpy_and_aligned(folder):
    succeeds(*FORWARD, cwd=folder)
    raw = (folder / "out.npy").read_bytes()
    assert (len(raw) - np.load(folder / "out.npy").nbytes) % 64 == 0
    assert (folder / "out.npy").stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


def test_existing_output_is_replaced_through_a_link(folder):
    (folder / "real").mkdir()
    (folder / "real" / "target.npy").write_text("old")
    (folder / "out.npy").symlink_to("real/target.npy")
    succeeds(*FORWARD, cwd=folder)
    assert (folder / "out.npy").is_symlink()
    assert np.load(folder / "real" / "target.npy").shape == (2, 37, 4, 16)
    assert listing(folder / "real") == ["target.npy"]


# ---------------------------------------------------------------- safetensors


def test_safetensors_forward_and_backward(tmp_path):
    arrays = tensors()
    write_safetensors(
        tmp_path / "in.safetensors",
        {n: ("F32", x) for n, x in arrays.items()} | {"other": ("BOOL", np.ones(3, np.uint8))},
        {"made": "by a test"},
    )
    succeeds(
        "attend", "--input", "in.safetensors", "--output", "o.safetensors", "--causal", cwd=tmp_path
    )
    want = attention(**arrays, right=0)
    got = read_safetensors(tmp_path / "o.safetensors")
    assert sorted(got) == sorted(want)
    for name, (dtype, array) in got.items():
        assert dtype == "F32"
        assert_close(array, want[name], "f32")


@pytest.mark.parametrize("dtype,numpy_type", [("F16", np.float16), ("F64", np.float64)])
def test_safetensors_dtypes(tmp_path, dtype, numpy_type):
    arrays = tensors(dtype=numpy_type)
    write_safetensors(tmp_path / "in.safetensors", {n: (dtype, arrays[n]) for n in "qkv"})
    succeeds("attend", "--input", "in.safetensors", "--output", "o.safetensors", cwd=tmp_path)
    got = read_safetensors(tmp_path / "o.safetensors")
    assert sorted(got) == ["lse", "out"] and got["out"][0] == dtype
    arrays.pop("dout")
    assert_close(got["out"][1], attention(**arrays)["out"], dtype.lower())


def test_safetensors_bf16_stays_bf16(tmp_path):
    bits = {n: to_bf16(x) for n, x in tensors(batch=1, sq=3, hq=1, hk=1, dv=5).items()}
    write_safetensors(tmp_path / "in.safetensors", {n: ("BF16", x) for n, x in bits.items()})
    succeeds("attend", "--input", "in.safetensors", "--output", "o.safetensors", cwd=tmp_path)
    got = read_safetensors(tmp_path / "o.safetensors")
    want = attention(**{n: from_bf16(x) for n, x in bits.items()})
    for name in want:
        dtype, array = got[name]
        assert dtype == ("F32" if name == "lse" else "BF16")
        assert_close(array if name == "lse" else from_bf16(array), want[name], "bf16")


# ---------------------------------------------------------------- bad input: usage


@pytest.mark.parametrize(
    "args,says",
    [
        ([], ["subcommand"]),
        (["fly"], ["fly"]),
        (["attend"], ["--q", "required"]),
        (["attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy"], ["--out", "required"]),
        (["attend", "--input", "x.safetensors"], ["--output"]),
        (["attend", "--output", "x.safetensors"], ["--input"]),
        (["attend", "--input", "a", "--output", "b", "--q", "q.npy"], ["--q", "--input"]),
        (["attend", "--input", "a", "--output", "b", "--lse", "l.npy"], ["--lse", "--input"]),
        (FORWARD + ["--dout", "dout.npy"], ["--dout", "--dq"]),
        (FORWARD + ["--dk", "dk.npy"], ["--dk", "--dout"]),
        (FORWARD + ["--dlse", "dlse.npy"], ["--dlse", "--dout"]),
        (FORWARD + ["--sinks", "sinks.npy", "--dsinks", "ds.npy"], ["--dsinks", "--dout"]),
        (ALL + ["--dsinks", "ds.npy"], ["--dsinks", "--sinks"]),
        (FORWARD + ["--lse", "./out.npy"], ["--lse", "--out"]),
        (FORWARD + ["--window", "3"], ["--window", "'3'", "L,R"]),
        (FORWARD + ["--window", "3,x"], ["--window", "3,x"]),
        (FORWARD + ["--window", "1,2,3"], ["--window", "1,2,3"]),
        (FORWARD + ["--window", "99999999999999999999,0"], ["--window"]),
        (FORWARD + ["--causal", "--window", "3,0"], ["--causal", "--window"]),
        (FORWARD + ["--chunk", "many"], ["--chunk", "many"]),
        (FORWARD + ["--dtype", "f8"], ["--dtype", "f8"]),
        (FORWARD + ["--device", "tpu"], ["--device", "tpu"]),
        (FORWARD + ["--scale", "big"], ["--scale", "got 'big', want a number"]),
        (FORWARD + ["--softcap", "3x"], ["--softcap", "got '3x', want a number"]),
        (FORWARD + ["--dropout", ""], ["--dropout", "got '', want a number"]),
        (FORWARD + ["--scale", "1e999"], ["--scale", "got '1e999', want a number"]),
        (FORWARD + ["--chunk", "9223372036854775808"], ["--chunk", "'9223372036854775808'", "9223372036854775807"]),
        (FORWARD + ["--max-workspace", "99999999999999999999"], ["--max-workspace", "'99999999999999999999'"]),
        (FORWARD + ["--threads", "0x10"], ["--threads", "'0x10'"]),
        (FORWARD + ["--seed", "1"], ["--seed", "--dropout"]),
        (FORWARD + ["--dropout", "0.5", "--seed", "-1"], ["--seed", "'-1'", "from 0 to 18446744073709551615"]),
        (FORWARD + ["--dropout", "0.5", "--seed", "18446744073709551616"], ["--seed", "'18446744073709551616'"]),
        (FORWARD + ["--cu-seqlens-k", "cu.npy"], ["--cu-seqlens-k", "--cu-seqlens-q"]),
        (FORWARD + ["--page-indptr", "p.npy"], ["--page-indptr", "--page-table"]),
        (FORWARD + ["--nonsense"], ["--nonsense"]),
        (FORWARD + ["extra"], ["extra"]),
        (["explain", "--sq", "-3"], ["--sq", "'-3'", "from 0 to 9223372036854775807"]),
        (["explain", "--sq", "9223372036854775808"], ["--sq", "'9223372036854775808'"]),
        (["explain", "--dtype", "f64"], ["--dtype", "f64"]),
        (["explain", "--device", "tpu"], ["--device", "tpu"]),
        (["explain", "--page", "0"], ["--page", "0"]),
        (["explain", "--page", "16", "--backward"], ["--page", "--backward"]),
        (["check", "--device", "tpu"], ["--device", "tpu"]),
        (["bench", "--device", "tpu"], ["--device", "tpu"]),
        (["tune", "--dtype", "f32"], ["--dtype", "f32"]),
        (["tune", "--sq", "-3"], ["--sq", "-3"]),
        (["tune", "--window", "3"], ["--window", "'3'", "L,R"]),
        (["tune", "--svg", "x.svg"], ["--svg"]),
        (["prewarm", "--dlse"], ["--dlse", "--backward"]),
        (["prewarm", "--page-indptr"], ["--page-indptr", "--page"]),
        (["prewarm", "--page", "16", "--cache-batch-idx"], ["--page", "--cache-batch-idx"]),
        (["prewarm", "--backward", "--tree-mask"], ["--backward", "--tree-mask"]),
        (["prewarm", "--hq", "0"], ["--hq", "'0'", "from 1 to"]),
        (["prewarm", "--d", "64", "0"], ["--d", "'0'", "from 1 to"]),
        (["bench", "--grid", "huge"], ["--grid", "huge"]),
        (["check", "--dtype", "f8"], ["--dtype", "f8"]),
    ],
)
def test_wrong_usage(folder, args, says):
    before = listing(folder)
    fails(*args, code=2, says=says, cwd=folder)
    assert listing(folder) == before


# ---------------------------------------------------------------- bad input: values and files


@pytest.mark.parametrize(
    "flags,says",
    [
        (["--scale", "nan"], ["scale", "nan"]),
        (["--scale", "inf"], ["scale", "inf"]),
        (["--softcap", "-1"], ["softcap", "-1"]),
        (["--softcap", "nan"], ["softcap", "nan"]),
        (["--window", "-2,0"], ["-2"]),
        (["--window", "0,-7"], ["-7"]),
        (["--chunk", "-3"], ["chunk", "-3"]),
        (["--dropout", "1"], ["dropout", "1"]),
        (["--dropout", "-0.1"], ["dropout", "-0.1"]),
        (["--threads", "-1"], ["threads", "-1"]),
        (["--max-workspace", "-1"], ["max_workspace", "-1"]),
        (["--max-workspace", "1"], ["max_workspace", "1", "at least"]),
    ],
)
def test_bad_values(folder, flags, says):
    before = listing(folder)
    fails(*ALL, *flags, says=says, cwd=folder)
    assert listing(folder) == before


def has_cuda():
    return re.search(r"^cuda +available", fulgur("devices").stdout, re.M)


def test_cuda_that_cannot_be_used_says_why(folder):
    if has_cuda():
        pytest.skip("this machine has a usable cuda engine")
    before = listing(folder)
    fails(*FORWARD, "--device", "cuda", says=["--device cuda: "], cwd=folder)
    for command in ("explain", "check", "bench"):
        fails(command, "--device", "cuda", says=["--device cuda: "], cwd=folder)
    fails("bench", "--device", "cuda", "--json", "speed.json", says=["--device cuda: "], cwd=folder)
    fails("tune", says=["tune: "], cwd=folder)
    assert listing(folder) == before


def test_cuda_equals_the_reference(folder):
    if not has_cuda():
        pytest.skip("this machine has no usable cuda engine")
    arrays = tensors(d=64, dv=64)
    save(folder, arrays)
    arrays.pop("dout")
    succeeds(*FORWARD, *LSE, "--device", "cuda", "--dtype", "bf16", "--causal", cwd=folder)
    want = attention(**{n: from_bf16(to_bf16(x)) for n, x in arrays.items()}, right=0)
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "bf16")


@pytest.fixture
def on_gpu(tmp_path):
    """An environment with a cache folder of its own and a GPU, or the fake one of the C++ tests, whose kernels do
    nothing: a compiler that makes nothing of them does."""
    env = {**os.environ, "FULGUR_CACHE_DIR": str(tmp_path / "cache")}
    if not has_cuda():
        fake = str(pathlib.Path(PROGRAM).resolve().parents[2] / "tests/fake_cuda")
        env |= {"LD_LIBRARY_PATH": fake, "CUDA_HOME": fake}
        assert re.search(r"^cuda +available", fulgur("devices", env=env).stdout, re.M)
    return env


@pytest.fixture
def with_nvrtc(on_gpu):
    """The same with this machine's compiler of kernels."""
    env = {**on_gpu, "CUDA_HOME": os.environ.get("CUDA_HOME", "")}
    if not re.search(r"^cuda +available", fulgur("devices", env=env).stdout, re.M):
        pytest.skip("no NVRTC")
    return env


def test_explain_in_less_workspace(on_gpu):
    """What gradients want, the form that takes less, and the least there is."""
    shape = ["--device", "cuda", "--dtype", "bf16", "--backward", "--batch", "4", "--hq", "2", "--d", "128"]
    shape += ["--sq", "1000", "--sk", "1500"]
    roomy = details(*shape, env=on_gpu)
    wanted = roomy["workspace_bytes"]
    assert roomy["dq"] == "atomic" and "max_workspace" not in roomy
    assert any(what.startswith("tile sm90_backward_stored ") for what in roomy["rejected"])
    tight = details(*shape, "--max-workspace", wanted - 1, env=on_gpu)
    assert tight["dq"] == "stored" and tight["workspace_bytes"] < wanted == tight["max_workspace"] + 1
    assert any(what.startswith("tile sm90_backward_atomic ") and f"{wanted} bytes" in what for what in tight["rejected"])
    says = fails("explain", *shape, "--max-workspace", "1", env=on_gpu)
    least = int(re.search(r"want at least (\d+)$", says)[1])
    assert details(*shape, "--max-workspace", least, env=on_gpu)["workspace_bytes"] == least


TUNED = ["--sq", "700", "--hq", "4", "--hk", "2", "--d", "128", "--causal"]


def test_tune_is_seen_by_later_runs(on_gpu):
    call = ["--device", "cuda", "--dtype", "bf16", *TUNED]
    assert details(*call, env=on_gpu)["tile_from"] == "cost_model"
    lines = succeeds("tune", *TUNED, env=on_gpu).splitlines()
    assert "bf16 d 128 dv 128 sq 768 sk 768 heads 4 group 2 right 0" in lines[0]
    tile = r"tile +sm90_(?:forward|decode) (\d+) x (\d+) +([\d.]+) us +([\d.]+).*"
    tiles = [re.fullmatch(tile, line) for line in lines[1:-1]]
    assert len(tiles) >= 2 and all(tiles)
    times = [float(tile[3]) for tile in tiles]
    assert times == sorted(times) and times[0] > 0
    assert ["taken from now on" in line for line in lines[1:-1]] == [True] + [False] * (len(tiles) - 1)
    assert sum("the cost model's choice" in line for line in lines) == 1
    kept = pathlib.Path(lines[-1].removeprefix("kept in "))
    assert kept.parent == pathlib.Path(on_gpu["FULGUR_CACHE_DIR"])

    tuned = details(*call, env=on_gpu)
    assert tuned["tile_from"] == "tuning" and tuned["measured_us"] > 0
    assert (tuned["Br"], tuned["Bc"]) == (int(tiles[0][1]), int(tiles[0][2]))
    assert sum(what.startswith("tile sm90_") for what in tuned["rejected"]) == len(tiles) - 1
    assert details(*call, "--softcap", "9", env=on_gpu)["tile_from"] == "cost_model"
    invariant = details(*call, "--invariant", env=on_gpu)
    assert invariant["tile_from"] == "cost_model"
    assert any(what.startswith("tile tuned on this device: ") for what in invariant["rejected"])

    kept.write_text(kept.read_text() + "1")
    done = fulgur("explain", "--json", *call, env=on_gpu)
    assert done.returncode == 0 and json.loads(done.stdout)["tile_from"] == "cost_model"
    assert len(done.stderr.splitlines()) == 1 and f"{kept} is damaged" in done.stderr
    succeeds("tune", *TUNED, env=on_gpu)
    assert details(*call, env=on_gpu)["tile_from"] == "tuning"


def test_tune_of_packed_sequences(on_gpu):
    flags = ["--packed", "--seqused-q", "--seqused-k", "--alibi", "--softcap", "20", "--dtype", "f16"]
    flags += ["--batch", "3"]
    stdout = succeeds("tune", "--sq", "100", *flags, env=on_gpu)
    assert "f16 d 64 dv 64 sq 112 sk 112 heads 24" in stdout
    assert "transformed softcap alibi packed seqused_q seqused_k" in stdout


def test_tune_of_the_backward_pass(on_gpu):
    shape = ["--sq", "100", "--d", "16", "--batch", "2"]
    lines = succeeds("tune", "--backward", *shape, env=on_gpu).splitlines()
    assert "backward bf16 d 16 dv 16 sq 112" in lines[0]
    tiles = [re.match(r"tile +(\w+) ", line)[1] for line in lines[1:-1]]
    # Atomic additions have two tiles: of 128 keys, and of 64 for short calls.
    assert sorted(tiles) == [*["sm90_backward_atomic"] * 2, "sm90_backward_ordered", "sm90_backward_stored"]
    call = ["--device", "cuda", "--dtype", "bf16", *shape]
    assert details(*call, "--backward", env=on_gpu)["tile_from"] == "tuning"
    assert details(*call, env=on_gpu)["tile_from"] == "cost_model"
    flags = ["--packed", "--alibi", "--seqused-q", "--seqused-k", "--deterministic"]
    stdout = succeeds("tune", "--backward", *shape, *flags, env=on_gpu)
    assert "alibi packed seqused_q seqused_k deterministic" in stdout
    assert "_atomic" not in stdout and "_ordered" in stdout


def test_prewarm_of_the_backward_pass(on_gpu, tmp_path):
    command = ["prewarm", "--backward", "--d", "16", "--dtype", "bf16", "--folder", str(tmp_path / "there")]
    done = re.fullmatch(r"(\d+) kernels compiled, 0 were there", succeeds(*command, env=on_gpu).splitlines()[-1])
    assert int(done[1]) >= 3  # rows prepared, by keys, dQ
    again = succeeds(*command, env=on_gpu).splitlines()[-1]
    assert again == f"0 kernels compiled, {done[1]} were there"
    assert not succeeds(*command, "--dlse", env=on_gpu).splitlines()[-1].startswith("0 kernels compiled")
    assert not succeeds(*command, "--dropout", "0.5", env=on_gpu).splitlines()[-1].startswith("0 kernels compiled")


@pytest.mark.parametrize(
    "flags",
    [
        ["--page", "16", "--packed", "--page-indptr"],
        ["--page", "3", "--leftpad-k", "--sinks"],
        ["--page", "16", "--prefix-groups"],
        ["--cache-batch-idx", "--seqused-k"],
        ["--tree-mask"],
    ],
    ids=" ".join,
)
def test_prewarm_of_caches(on_gpu, tmp_path, flags):
    heads = ["--hq", "8", "--hk", "2"]
    command = ["prewarm", "--d", "64", "--dtype", "bf16", "--causal", "--folder", str(tmp_path / "there")]
    counts = []
    for more in (heads, heads + flags, heads + flags):
        last = succeeds(*command, *more, env=on_gpu).splitlines()[-1]
        counts.append([int(n) for n in re.fullmatch(r"(\d+) kernels compiled, (\d+) were there", last).groups()])
    (_, none), (compiled, there), (again, all_of_them) = counts
    assert compiled > 0 and again == 0 and all_of_them == compiled + there
    fails(*command, "--hq", "3", "--hk", "2", *flags, says=["q: got 3 heads", "2 heads of k"], env=on_gpu)


@pytest.mark.parametrize(
    "flags,says",
    [
        (["--invariant"], ["invariant: got true"]),
        (["--sq", "0"], ["q: got no row"]),
        (["--batch", "0"], ["q: got no row"]),
        (["--d", "512"], ["computes d and dv up to 256, got 512"]),
        (["--d", "0"], ["head dim 0"]),
        (["--hq", "3", "--hk", "2"], ["3 heads"]),
        (["--softcap", "-1"], ["softcap", "-1"]),
        (["--batch", "1000000000", "--sq", "1000000000"], ["q: shape"]),
        (["--batch", "4294967296", "--sq", "4294967296", "--packed"], ["q: shape"]),
    ],
)
def test_tune_refuses_what_it_cannot_measure(on_gpu, flags, says):
    fails("tune", *flags, says=says, env=on_gpu)
    assert not list(pathlib.Path(on_gpu["FULGUR_CACHE_DIR"]).glob("*.tuning"))


def test_tune_needs_its_cache_folder(on_gpu, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file/cache", "/proc/cache"):
        fails("tune", says=[str(folder)], env={**on_gpu, "FULGUR_CACHE_DIR": str(folder)})


def npy(descr, shape, data=b"", version=1, order=False, header=None):
    text = (header or repr({"descr": descr, "fortran_order": order, "shape": shape})).encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


@pytest.mark.parametrize(
    "raw,says",
    [
        (b"", ["magic"]),
        (b"hello", ["magic"]),
        (b"\x93NUMPY", ["truncated"]),
        (b"\x93NUMPY\x01\x00", ["truncated"]),
        (b"\x93NUMPY\x01\x00\xff\xff{}", ["truncated", "65535"]),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", ["truncated", "4294967295"]),
        (npy("<f4", (1,), version=9), ["version", "9"]),
        (npy(">f4", (1, 1, 1, 1), bytes(4)), [">f4"]),
        (npy("<u8", (1, 1, 1, 1), bytes(8)), ["<u8"]),
        (npy("|O", (1,), bytes(8)), ["|O"]),
        (npy("<f4", (1, 2, 2, 1), bytes(16), order=True), ["Fortran"]),
        (npy("<f4", (1, 1, 1, 2), bytes(4)), ["4 bytes", "want 8"]),
        (npy("<f4", (1, 1, 1, 2), bytes(9)), ["9 bytes", "want 8"]),
        (npy("<f4", ()), ["0 dimensions"]),
        (npy("<f4", (1,) * 5, bytes(4)), ["5 dimensions"]),
        (npy("<f4", (-1, -1, 1, 1), bytes(4)), ["negative"]),
        (npy("<f4", (2**40, 2**40, 1, 1), bytes(4)), ["2^63"]),
        (npy("<f4", (10**9, 10**5, 1, 1), bytes(4)), ["4 bytes"]),
        (
            npy("", (), header="{'descr': '<f4', 'fortran_order': False, 'shape': (1, }"),
            ["malformed"],
        ),
        (npy("", (), header="{'descr': '<f4', 'shape': (1,)}"), ["fortran_order"]),
        (npy("", (), header="{'descr': '<f4', 'descr': '<f4'}"), ["twice"]),
        (npy("", (), header="{'a': '<f4'}"), ["'a'"]),
        (npy("", (), header="{'descr': [('x', '<f4')], 'shape': (1,)}"), ["malformed"]),
        (npy("", (), header="{'shape': (99999999999999999999,)}"), ["malformed"]),
    ],
    ids=str,
)
def test_malformed_npy(folder, raw, says):
    (folder / "k.npy").write_bytes(raw)
    before = listing(folder)
    fails(*ALL, says=["--k k.npy", *says], cwd=folder)
    assert listing(folder) == before


def test_a_huge_file_of_nothing_is_not_read(folder):
    """A sparse terabyte whose header does not fit it."""
    with open(folder / "k.npy", "wb") as file:
        file.write(npy("<f4", (1, 1, 1, 1)))
        file.truncate(1 << 40)
    fails(*FORWARD, says=["--k k.npy", "bytes of data"], cwd=folder)


def test_missing_and_unreadable_inputs(folder):
    (folder / "v.npy").unlink()
    before = listing(folder)
    fails(*ALL, says=["--v v.npy", "No such file"], cwd=folder)
    (folder / "v.npy").mkdir()
    fails(*ALL, says=["--v v.npy", "not a regular file"], cwd=folder)
    (folder / "v.npy").rmdir()
    os.mkfifo(folder / "v.npy")
    fails(*ALL, says=["--v v.npy", "not a regular file"], cwd=folder)
    (folder / "v.npy").unlink()
    assert listing(folder) == before


@pytest.mark.parametrize(
    "change,says",
    [
        ({"q": (2, 37, 4)}, ["q", "3 dimensions", "(batch, seqlen, heads, dim)"]),
        ({"q": (37,)}, ["q", "1 dimensions"]),
        ({"k": (2, 53)}, ["k", "2 dimensions"]),
        ({"k": (3, 53, 2, 24)}, ["k", "(3, 53, 2, 24)", "(2, 53, 2, 24)"]),
        ({"k": (2, 53, 2, 25)}, ["k", "25"]),
        ({"v": (2, 52, 2, 16)}, ["v", "(2, 52, 2, 16)"]),
        ({"v": (2, 53, 1, 16)}, ["v", "(2, 53, 1, 16)"]),
        ({"q": (2, 37, 3, 24)}, ["q", "3 heads", "2 heads"]),
        ({"q": (2, 37, 4, 0), "k": (2, 53, 2, 0)}, ["head dim 0"]),
        ({"q": (2, 3, 4, 513), "k": (2, 5, 2, 513)}, ["513", "512"]),
        ({"dout": (2, 37, 4, 17)}, ["dout", "17"]),
        ({"k": (2, 53, 0, 24), "v": (2, 53, 0, 16)}, ["k", "0 heads"]),
    ],
)
def test_mismatched_shapes(folder, change, says):
    save(folder, {name: np.zeros(shape, np.float32) for name, shape in change.items()})
    before = listing(folder)
    fails(*ALL, says=says, cwd=folder)
    assert listing(folder) == before


def test_wrong_dtypes(folder):
    arrays = load(folder, ["q", "k"])
    np.save(folder / "k.npy", arrays["k"].astype(np.float16))
    fails(*ALL, says=["k", "f16", "f32"], cwd=folder)
    succeeds(*FORWARD, "--dtype", "f32", cwd=folder)
    (folder / "out.npy").unlink()
    np.save(folder / "k.npy", arrays["k"].astype(np.int32))
    fails(*ALL, says=["k", "i32"], cwd=folder)
    fails(*ALL, "--dtype", "f16", says=["k", "i32"], cwd=folder)
    assert listing(folder) == ["dout.npy", "k.npy", "q.npy", "v.npy"]


@pytest.mark.parametrize(
    "flag,array,says",
    [
        ("--alibi-slopes", np.ones(3, np.float32), ["alibi_slopes", "3"]),
        ("--alibi-slopes", np.ones(4, np.float64), ["alibi_slopes", "f64", "f32"]),
        ("--sinks", np.ones(3, np.float32), ["sinks", "3", "4"]),
        ("--sinks", np.ones(4, np.float64), ["sinks", "f64", "f32"]),
        ("--seqused-q", np.array([1, 99], np.int32), ["seqused_q", "99"]),
        ("--seqused-q", np.array([1, -1], np.int32), ["seqused_q", "-1"]),
        ("--seqused-q", np.array([1, 2, 3], np.int32), ["seqused_q", "3"]),
        ("--seqused-k", np.array([1, 99], np.int32), ["seqused_k", "99"]),
        ("--seqused-k", np.array([1, -1], np.int32), ["seqused_k", "-1"]),
        ("--seqused-k", np.array([1.0, 2.0], np.float32), ["seqused_k", "f32", "i32"]),
        ("--seqused-k", np.array([1, 2, 3], np.int32), ["seqused_k", "3"]),
    ],
)
def test_bad_extras(folder, flag, array, says):
    np.save(folder / "extra.npy", array)
    before = listing(folder)
    fails(*ALL, flag, "extra.npy", says=says, cwd=folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"table": np.full((2, 4), 9, np.int32)}, ["page_table", "got 9 as page 0 of sequence 0"]),
        ({"table": np.zeros((2, 4), np.float32)}, ["page_table", "f32", "i32"]),
        ({"table": np.zeros(4, np.int32)}, ["page_table", "1 dimensions"]),
        ({"used": np.array([65, 0], np.int32)}, ["seqused_k", "65"]),
        ({"k": np.zeros((9, 8, 2, 24), np.float32)}, ["v", "(9, 8, 2, 16)"]),
    ],
)
def test_bad_pages(folder, changes, says):
    cache = {"k": np.zeros((9, 16, 2, 24), np.float32), "v": np.zeros((9, 16, 2, 16), np.float32)}
    save(folder, cache | {"table": np.zeros((2, 4), np.int32), "used": np.array([3, 2], np.int32)} | changes)
    before = listing(folder)
    fails(*FORWARD, *PAGED, says=says, cwd=folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"groups": np.array([0, 1], np.int32)}, ["prefix_groups", "ends with 1, want 2"]),
        ({"groups": np.array([0, 1, 2], np.int32)}, ["prefix_lens", "got shape (1), want (2)"]),
        ({"lens": np.array([2], np.int32)}, ["prefix_lens", "got 2 at 0"]),
        ({"lens": np.array([2], np.int64)}, ["prefix_lens", "i64", "i32"]),
    ],
)
def test_bad_prefixes(tmp_path, changes, says):
    cache = {"q": np.zeros((2, 1, 4, 24), np.float32), "k": np.zeros((9, 16, 2, 24), np.float32)}
    cache |= {"v": np.zeros((9, 16, 2, 16), np.float32), "table": np.zeros((2, 4), np.int32)}
    prefixes = {"groups": np.array([0, 2], np.int32), "lens": np.array([1], np.int32)}
    save(tmp_path, cache | {"used": np.array([3, 2], np.int32)} | prefixes | changes)
    before = listing(tmp_path)
    fails(*FORWARD, *PAGED, *PREFIXES, says=says, cwd=tmp_path)
    for given in (PREFIXES[:2], PREFIXES[2:]):
        fails(*FORWARD, *PAGED, *given, code=2, says=["--prefix-groups", "--prefix-lens"], cwd=tmp_path)
    fails(*FORWARD, *PREFIXES, code=2, says=["--prefix-groups", "--page-table"], cwd=tmp_path)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "words,says",
    [
        (np.ones((2, 3), np.int64), ["tree_mask", "(2, 3)", "2, 37"]),
        (np.ones((2, 37), np.int32), ["tree_mask", "i32", "i64"]),
    ],
)
def test_bad_tree_mask(folder, words, says):
    np.save(folder / "words.npy", words)
    before = listing(folder)
    fails(*FORWARD, "--tree-mask", "words.npy", says=says, cwd=folder)
    assert listing(folder) == before


def test_caches_have_no_gradient(folder):
    np.save(folder / "extra.npy", np.zeros(2, np.int32))
    before = listing(folder)
    for flag in ("--page-table", "--cache-batch-idx", "--leftpad-k", "--tree-mask"):
        fails(*ALL, flag, "extra.npy", code=2, says=[flag, "no gradient"], cwd=folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "cu,says",
    [
        ([0, 20, 10, 30], ["cu_seqlens_k", "decreases", "10 after 20"]),
        ([-1, 5, 10, 30], ["cu_seqlens_k", "starts with -1"]),
        ([0, 5, 10, 31], ["cu_seqlens_k", "31"]),
        ([0, 5, 30], ["cu_seqlens_k", "3"]),
    ],
)
def test_bad_cu_seqlens(tmp_path, cu, says):
    save(tmp_path, {name: x[0] for name, x in tensors(batch=1, sq=30, sk=30).items()})
    save(tmp_path, {"cu_q": np.array([0, 10, 20, 30], np.int32), "cu_k": np.array(cu, np.int32)})
    before = listing(tmp_path)
    fails(*ALL, "--cu-seqlens-q", "cu_q.npy", "--cu-seqlens-k", "cu_k.npy", says=says, cwd=tmp_path)
    assert listing(tmp_path) == before


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed_json(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


F4 = tensor("F32", [1, 1, 1, 1], 0, 4)


@pytest.mark.parametrize("where", ["dtype", "shape", "data_offsets"])
def test_safetensors_nested_deeper_than_any_stack(tmp_path, where):
    fields = tensor("F32", [1, 1, 1, 1], 0, 4) | {where: "DEEP"}
    text = json.dumps({"q": fields}).encode().replace(b'"DEEP"', b"[" * 200_000 + b"]" * 200_000)
    (tmp_path / "in.safetensors").write_bytes(packed_json(text, bytes(4)))
    fails(
        "attend", "--input", "in.safetensors", "--output", "o.safetensors",
        says=["--input in.safetensors", "more than 16 deep"], cwd=tmp_path,
    )
    assert listing(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize(
    "raw,says",
    [
        (b"", ["truncated"]),
        (b"\2\0\0\0\0\0\0\0{", ["truncated"]),
        (struct.pack("<Q", 2**63) + b"{}", ["header"]),
        (struct.pack("<Q", 100_000_001) + b"{}", ["100000000"]),
        (packed_json(b"{nonsense"), ["not JSON"]),
        (packed_json(b"\xff\xfe"), ["not JSON"]),
        (packed_json(b'{"q":1E9999}'), ["range"]),
        (packed_json(b"[]"), ["object"]),
        (packed_json(b"[" * 100000), ["more than 16 deep"]),
        (packed_json(b'{"q":' + b"[" * 16 + b"]" * 16 + b"}"), ["more than 16 deep"]),
        (packed_json(b'{"q":' + b"[" * 15 + b"]" * 15 + b"}"), ['"q"', "dtype"]),
        (packed_json(b'{"__metadata__":' + b'{"q":' * 15 + b"1" + b"}" * 16, bytes(4)), ["4 bytes of data"]),
        (packed_json({"q": 1}), ['"q"', "dtype"]),
        (packed_json({"q": {"dtype": "F32", "shape": [1]}}), ['"q"', "data_offsets"]),
        (
            packed_json({"q": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
            ["-1"],
        ),
        (packed_json({"q": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}), ["1.5"]),
        (packed_json({"q": {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 4]}}), ["2^63"]),
        (
            packed_json({"q": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}),
            ["3 entries"],
        ),
        (packed_json(b'{"q":{},"q":{}}'), ["twice"]),
        (packed_json({"q": F4}, bytes(3)), ["[0, 4]", "3 bytes"]),
        (packed_json({"q": tensor("F32", [1], 8, 4)}, bytes(8)), ["[8, 4]"]),
        (packed_json({"q": F4, "k": F4}, bytes(4)), ["overlap"]),
        (packed_json({"q": F4, "k": tensor("F32", [1], 2, 6)}, bytes(6)), ["overlap"]),
        (packed_json({"q": F4, "k": tensor("F32", [1], 8, 12)}, bytes(12)), ["gaps"]),
        (packed_json({"q": F4}, bytes(8)), ["8 bytes", "4"]),
        (packed_json({"q": tensor("F32", [3], 0, 4)}, bytes(4)), ['"q"', "want 12"]),
        (packed_json({"q": tensor("F32", [2**62, 2**62], 0, 4)}, bytes(4)), ['"q"', "2^63"]),
        (packed_json({"q": tensor("I64", [1], 0, 8)}, bytes(8)), ['"q"', "I64"]),
        (packed_json({"q": tensor("F32", [], 0, 4)}, bytes(4)), ['"q"', "0 dimensions"]),
        (packed_json({"q": F4}, bytes(4)), ["lacks the tensor 'k'"]),
    ],
    ids=str,
)
def test_malformed_safetensors(tmp_path, raw, says):
    (tmp_path / "in.safetensors").write_bytes(raw)
    fails(
        "attend",
        "--input",
        "in.safetensors",
        "--output",
        "out.safetensors",
        says=["--input in.safetensors", *says],
        cwd=tmp_path,
    )
    assert listing(tmp_path) == ["in.safetensors"]


# ---------------------------------------------------------------- outputs: all or none


def test_unwritable_outputs(folder):
    before = listing(folder)
    (folder / "folder").mkdir()
    (folder / "loop.npy").symlink_to("loop.npy")
    for bad, says in [
        ("no/such/dir.npy", "No such file"),
        ("folder", "not a regular file"),
        ("/dev/null", "not a regular file"),
        ("/dev/stdout", "/dev/stdout: exists and is not a regular file"),  # a pipe, which has no path
        ("loop.npy", "loop.npy: cannot be written: Too many levels of symbolic links"),
        ("q.npy/x.npy", "Not a directory"),
        ("x" * 300 + ".npy", "too long"),
    ]:
        fails(*FORWARD, *LSE[:1], bad, says=[bad, says], cwd=folder)
    (folder / "folder").rmdir()
    (folder / "loop.npy").unlink()
    assert listing(folder) == before


def test_read_only_outputs(folder):
    (folder / "out.npy").write_text("precious")
    (folder / "out.npy").chmod(0o444)
    # Root without its capabilities is held by file modes, as everybody is.
    as_anybody = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*as_anybody, PROGRAM, *FORWARD], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "fulgur: out.npy: cannot be written: Permission denied\n"
    assert (folder / "out.npy").read_text() == "precious"
    assert "out.npy" in listing(folder) and len(listing(folder)) == 5


def test_a_full_disk_leaves_nothing(folder):
    """A limit on the size of files stands for the full disk: the small lse fits, out does not."""
    before = listing(folder)

    def limit():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    fails(
        *FORWARD,
        *LSE,
        says=["out.npy", "cannot be written", "File too large"],
        cwd=folder,
        preexec_fn=limit,
    )
    assert listing(folder) == before


def test_a_failed_call_keeps_the_old_output(folder):
    (folder / "out.npy").write_text("precious")
    np.save(folder / "k.npy", np.zeros((1, 2), np.float32))
    fails(*FORWARD, cwd=folder)
    assert (folder / "out.npy").read_text() == "precious"


def test_an_output_may_replace_an_input(folder):
    arrays = load(folder, ["q", "k", "v"])
    succeeds("attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "v.npy", cwd=folder)
    assert_close(np.load(folder / "v.npy"), attention(**arrays)["out"], "f32")


def test_an_output_is_complete_whenever_it_can_be_seen(tmp_path):
    """While calls replace it, a reader finds a whole file each time."""
    save(tmp_path, tensors(sq=2000, sk=3, hq=4, hk=1, d=8, dv=64))
    succeeds(*FORWARD, cwd=tmp_path)
    size = (tmp_path / "out.npy").stat().st_size
    with subprocess.Popen(
        ["sh", "-c", 'for i in 1 2 3 4 5; do "$@"; done', "sh", PROGRAM, *FORWARD],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    ) as writer:
        while writer.poll() is None:
            assert len((tmp_path / "out.npy").read_bytes()) == size
    assert writer.returncode == 0


def test_stdout_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "devices"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith("fulgur: ")


# ---------------------------------------------------------------- the other subcommands


def test_help_and_version():
    assert re.fullmatch(r"fulgur \d+\.\d+\.\d+\n", succeeds("--version"))
    assert "Examples" in succeeds("--help")
    for command in ("attend", "check", "bench", "explain", "devices", "prewarm", "tune"):
        assert command in succeeds("--help")
        assert "Example" in succeeds(command, "--help")


PEAKS = r"^ +f32 FMA [1-9][\d.]* GFLOP/s a thread, memory read [1-9][\d.]* GB/s in all, measured now$"


def test_devices_lists_the_engines():
    stdout = succeeds("devices")
    assert re.search(r"^cpu +available +\S", stdout, re.M)
    assert re.search(r"^reference +available +\S", stdout, re.M)
    assert len(re.findall(PEAKS, stdout, re.M)) == 1


def test_check_passes_for_every_dtype():
    stdout = succeeds("check")
    assert "FAIL" not in stdout
    for dtype in ("f32", "bf16", "f16"):
        assert len(re.findall(rf" {dtype} .* ok$", stdout, re.M)) == 15
    assert stdout.endswith("\n45 forward and 45 backward checks passed\n")
    assert "not computed" not in stdout


def test_check_can_be_repeated():
    runs = {succeeds("check", "--dtype", "f32", "--seed", "5", "--threads", "1") for _ in range(2)}
    assert len(runs) == 1


def check_on_gpu(env, *flags):
    """The exit status; the words at the ends of the lines by (case, dtype); the number of checks
    that were not computed, by reason; the last line."""
    done = fulgur("check", "--device", "cuda", *flags, env=env)
    rows = re.findall(r"^(\S.*?) +(f32|bf16|f16) .*  (ok|FAIL|not computed)$", done.stdout, re.M)
    reasons = re.findall(r"^not computed, (\d+) checks: (.*)$", done.stdout, re.M)
    last = (done.stdout + done.stderr).splitlines()[-1]
    ends = {(case, dtype): end for case, dtype, end in rows}
    return done.returncode, ends, {why: int(count) for count, why in reasons}, last


def test_check_on_a_gpu(on_gpu):
    """Each check is computed, or has its reason; the fake GPU's kernels compute nothing, and no
    check lets that pass."""
    code, ends, reasons, last = check_on_gpu(on_gpu)
    assert len(ends) == 45
    assert all("engine cuda: " in why for why in reasons)
    computed = set(ends.values()) - {"not computed"}
    counted = sum(map(int, re.findall(r"(\d+) (?:forward|backward)", last)))
    assert counted + sum(reasons.values()) == 2 * len(ends)
    assert all(end == "not computed" for (case, dtype), end in ends.items() if dtype == "f32")
    assert any("f32" in why and "computes bf16 and f16" in why for why in reasons)
    if has_cuda():
        assert (code, computed) == (0, {"ok"}) and last.endswith("checks passed")
    else:
        assert (code, computed) == (1, {"FAIL"}) and last.endswith("checks failed, none passed")


@pytest.mark.parametrize("name", ["gpu_attention", "c_gpu_attention"])
def test_the_gpu_examples_compare_with_the_cpu(with_nvrtc, name):
    """They end with 0 on a GPU, with 1 on the fake one, whose kernels compute nothing, and with 77
    without any."""
    example = pathlib.Path(PROGRAM).resolve().parents[2] / "examples" / name
    done = subprocess.run([example], env=with_nvrtc, capture_output=True, text=True, timeout=300)
    assert done.returncode == (0 if has_cuda() else 1) and done.stderr == ""
    assert re.search(r"^(\d+) of 2048000 elements differ from those of the CPU$", done.stdout, re.M)
    if not has_cuda():
        done = subprocess.run([example], capture_output=True, text=True, timeout=300)
        assert done.returncode == 77 and done.stderr.startswith(f"{name}: no ")


def test_check_of_what_a_gpu_does_not_compute_is_no_success(on_gpu):
    code, ends, reasons, last = check_on_gpu(on_gpu, "--dtype", "f32")
    assert code == 1 and set(ends.values()) == {"not computed"} and sum(reasons.values()) == 30
    assert last.startswith("fulgur: nothing was checked: ")


def test_explain():
    sizes = dict(batch=2, sq=300, sk=500, hq=8, hk=2, d=96, dv=80)
    shape = [x for name, size in sizes.items() for x in (f"--{name}", size)]
    shape += ["--dtype", "bf16", "--causal"]
    stdout = succeeds("explain", *shape)
    for text in ("bf16", "300", "500", "96", "80", "cpu", "causal"):
        assert text in stdout
    forward = details(*shape)
    assert forward["engine"] == "cpu"
    call = forward["call"]
    assert call.items() >= {**sizes, "pass": "forward", "dtype": "bf16", "device": "cpu", "right": 0}.items()
    backward = details("--sq", "300", "--backward")
    assert backward["call"]["pass"] == "backward"
    paged = details("--sq", "1", "--sk", "300", "--batch", "2", "--page", "16")
    assert (paged["call"]["pages"], paged["call"]["page"]) == (38, 16)
    assert {"page_table", "seqused_k"} <= set(paged["call"]["optional_tensors"])
    for plan in (forward, backward, paged):
        assert plan["estimate_us"] > 0 and plan["bound"] in ("products", "memory")
    fails("explain", "--sk", "3000000000", "--page", "16", says=["--page", "3000000000"])
    fails("explain", "--sk", "2000000000", "--batch", "9000000000000000000", "--page", "1", says=["page_table"])
    causal, chunks = (details("--sq", "4096", "--causal", *chunk) for chunk in ((), ("--chunk", "64")))
    assert chunks["call"]["chunk"] == 64 and chunks["flops"] < causal["flops"]
    fails("explain", "--d", "1000", says=["1000"])
    fails("explain", "--hq", "3", "--hk", "2", says=["3 heads"])


def rectangles(path, colour):
    """Areas of the rectangles of a colour, legend apart."""
    root = ET.parse(path).getroot()
    cells = root.find("{http://www.w3.org/2000/svg}g")
    return [
        float(r.get("width")) * float(r.get("height")) for r in cells if r.get("fill") == colour
    ]


def test_explain_draws_the_tile_map(tmp_path):
    svg = tmp_path / "tiles.svg"
    succeeds("explain", "--sq", "12288", "--causal", "--svg", svg)  # a multiple of every Br
    text = svg.read_text()
    legend = dict(re.findall(r">(empty|partial|full)[^(]*\(([\d.]+)%\)", text))
    colours = dict(zip(legend, re.findall(r'height="14" fill="(#\w+)"', text)))
    areas = {name: sum(rectangles(svg, colours[name])) for name in legend}
    for name, percent in legend.items():
        assert float(percent) > 0
        assert abs(areas[name] / sum(areas.values()) - float(percent) / 100) < 0.03
    assert "sq = 12288" in text and "Br = " in text and "Bc = " in text
    assert listing(tmp_path) == ["tiles.svg"]
    succeeds("explain", "--sq", "12288", "--causal", "--chunk", "1024", "--svg", svg)
    assert sum(rectangles(svg, colours["empty"])) > 0.85 * sum(areas.values())


def test_the_tile_map_of_a_long_sequence_stays_small(tmp_path):
    for flags in (["--sq", "100000", "--causal"], ["--sq", "1", "--sk", "90000"], ["--sk", "0"]):
        succeeds("explain", *flags, "--svg", tmp_path / "t.svg")
        ET.parse(tmp_path / "t.svg")
        assert (tmp_path / "t.svg").stat().st_size < 200_000
    fails("explain", "--svg", tmp_path / "no" / "t.svg", says=["No such file"])
    fails("explain", "--sq", "0", "--svg", tmp_path / "u.svg", says=["--svg", "no tiles"])


def on_a_terminal(*args, cwd):
    """Runs with stderr on a pseudo-terminal; what it showed there."""
    master, slave = pty.openpty()
    with subprocess.Popen([PROGRAM, *args], cwd=cwd, stdout=subprocess.DEVNULL, stderr=slave) as p:
        os.close(slave)
        shown = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # the terminal is closed
                break
            if not chunk:
                break
            shown += chunk
    os.close(master)
    assert p.returncode == 0
    return shown.decode()


def test_long_work_shows_a_bar_and_is_right(tmp_path):
    """Beyond 2e11 flops the work is done in steps over batches and kv heads. The gradient comes
    from the last rows alone, which makes the float64 reference small."""
    rows = 5
    arrays = tensors(batch=2, sq=6000, sk=6100, hq=4, hk=2, d=192, dv=192)
    arrays["dout"][:, :-rows] = 0
    slopes, used = RNG.random((2, 4), np.float32) * 0.01, np.array([6100, 6003], np.int32)
    sinks = np.array([0.5, 3, 9, -1], np.float32)
    save(tmp_path, arrays | {"slopes": slopes, "used": used, "sinks": sinks})
    shown = on_a_terminal(
        *ALL, "--alibi-slopes", "slopes.npy", "--seqused-k", "used.npy", "--sinks", "sinks.npy",
        "--dsinks", "dsinks.npy", cwd=tmp_path,
    )  # fmt: skip
    for text in ("forward [", "backward [", "25%", " s left"):
        assert text in shown
    assert shown.endswith("\r\x1b[K")  # wiped
    last = {n: x[:, -rows:] if n in ("q", "dout") else x for n, x in arrays.items()}
    want = attention(**last, slopes=slopes, used=used, sinks=sinks)
    got = load(tmp_path, want)
    for name in ("out", "dq"):
        got[name] = got[name][:, -rows:]
    got["lse"] = got["lse"][:, :, -rows:]
    for name in want:
        assert_close(got[name], want[name], "f32")


def test_short_work_shows_no_bar(folder):
    assert on_a_terminal(*FORWARD, cwd=folder) == ""


def test_bench_quick(tmp_path):
    stdout = succeeds("bench", "--json", "speed.json", cwd=tmp_path)
    report = json.loads((tmp_path / "speed.json").read_text())
    assert {"cpu", "simd", "threads", "compiler", "fulgur", "load_before", "time"} <= set(report["machine"])
    peaks = report["peaks"]
    assert all(value > 0 for value in peaks.values())
    for row in report["results"]:
        assert row["ms"] > 0
        if row["pass"] == "decode":
            assert row["sq"] == 1 and row["gbytes_per_s"] > 0
            continue
        visible_scores = row["sq"] * row["sk"]
        if row["causal"]:
            visible_scores = row["sq"] * (row["sq"] + 1) / 2
        per_score = 4 if row["pass"] == "forward" else 10
        flops = per_score * row["batch"] * row["hq"] * visible_scores * row["d"]
        assert row["gflop_per_s"] == pytest.approx(flops / row["ms"] * 1e-6, rel=1e-3)
        peak = peaks["fma_gflop_per_s_" + ("1_thread" if row["threads"] == 1 else "all_threads")]
        assert row["percent_of_fma_peak"] == pytest.approx(100 * row["gflop_per_s"] / peak)
    assert {row["pass"] for row in report["results"]} == {"forward", "backward", "decode"}
    for name in ("forward", "backward"):
        assert {row["dtype"] for row in report["results"] if row["pass"] == name} == {"f32", "bf16", "f16"}
    assert len(re.findall(r"% of (?:FMA peak|read bandwidth)$", stdout, re.M)) == len(
        report["results"]
    )
    assert "as fast when causal" in stdout


def test_bench_on_a_gpu(on_gpu, tmp_path):
    stdout = succeeds("bench", "--device", "cuda", "--json", "speed.json", env=on_gpu, cwd=tmp_path)
    report = json.loads((tmp_path / "speed.json").read_text())
    assert report["machine"]["device"] in fulgur("devices", env=on_gpu).stdout
    assert "cuda:0" in report["machine"]["device"]
    assert list(report["peaks"]) == ["copy_gbytes_per_s"] and report["peaks"]["copy_gbytes_per_s"] > 0
    for row in report["results"]:
        assert row["ms"] > 0 and row["device"] == "cuda:0" and row["dtype"] == "bf16"
        assert not any("fma" in name or "threads" in name for name in row)
    for which in ("forward", "backward"):
        rows = [row for row in report["results"] if row["pass"] == which]
        assert {(row["d"], row["causal"]) for row in rows} == {(d, c) for d in (64, 128, 256) for c in (0, 1)}
    decode = [row for row in report["results"] if row["pass"] == "decode"]
    assert len(decode) == 1 and decode[0]["percent_of_copy_bandwidth"] > 0
    assert len(re.findall(r" ms +[\d.]+ (?:TFLOP/s|GB/s)", stdout)) == len(report["results"])
    assert len(report["results"]) == 13 and report["not_computed"] == []


def decode_rows(folder, *only, device="cpu", **kwargs):
    """The report of those shapes, and what was printed."""
    command = ["bench", "--grid", "decode", "--device", device, "--json", "speed.json", "--only", *only]
    stdout = succeeds(*command, cwd=folder, **kwargs)
    return json.loads((folder / "speed.json").read_text()), stdout


def check_decode(row):
    keys = [row["sk"] // 8 if b and row["uneven"] else row["sk"] for b in range(row["batch"])]
    shared = (row["batch"] - 1) * row["prefix"]
    rows = 2 * row["batch"] * row["sq"] * row["hq"] + 2 * (sum(keys) - shared) * row["hk"]
    assert row["gbytes_per_s"] == pytest.approx(2 * rows * row["d"] / row["ms"] * 1e-6)
    assert row["dtype"] == "bf16" and row["causal"] == (row["sq"] > 1)


def test_bench_decode(tmp_path):
    report, stdout = decode_rows(tmp_path, "batch:1", "batch:4", "keys:1024", "hq:32", "hk:8", "hk:32", "page:16",
                                 "page:none")
    rows, peak = report["results"], report["peaks"]["read_gbytes_per_s_all_threads"]
    kinds = ("batch", "hk", "sq", "page", "prefix", "uneven")
    assert sorted(tuple(row[kind] for kind in kinds) for row in rows) == sorted(
        [(b, 8, sq, page, 0, False) for b in (1, 4) for sq in (1, 2, 4, 16) for page in (0, 16)]
        + [(b, 32, 1, page, 0, False) for b in (1, 4) for page in (0, 16)]
        + [(4, 8, 1, page, 0, True) for page in (0, 16)]
        + [(4, 8, 1, 16, 768, False)]
    )
    for row in rows:
        check_decode(row)
        assert row["percent_of_read_bandwidth"] == pytest.approx(100 * row["gbytes_per_s"] / peak)
        name = "decode/bf16/batch:{batch}/keys:1024/hq:32/hk:{hk}/d:128/tokens:{sq}/".format(**row)
        name += f"page:{row['page'] or 'none'}/prefix:{row['prefix'] or 'none'}"
        assert f"{name}/{'uneven' if row['uneven'] else 'even'}/" in stdout
    assert len(re.findall(r"% of read bandwidth$", stdout, re.M)) == len(rows)
    assert report["grid"] == "decode" and report["not_computed"] == []


def test_bench_leaves_out_what_does_not_fit_memory(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    only = ("batch:1", "batch:64", "keys:1024", "keys:32768", "hq:64", "d:128", "page:none")
    report, stdout = decode_rows(tmp_path, *only, preexec_fn=limit, env=env)
    sizes = [(row["batch"], row["sk"]) for row in report["results"]]
    assert sizes == [(1, 1024), (1, 32768), (64, 1024)]
    (left_out,) = report["not_computed"]
    assert "memory" in left_out["why"]
    assert left_out["shapes"] == [
        "decode/bf16/batch:64/keys:32768/hq:64/hk:8/d:128/tokens:1/page:none/prefix:none/even/threads:1"
    ]
    assert left_out["shapes"][0] in stdout and left_out["why"] in stdout


def test_bench_decode_on_a_gpu(on_gpu, tmp_path):
    report, stdout = decode_rows(
        tmp_path, "batch:4", "keys:1024", "hq:64", "hk:8", "d:128", "page:none", "page:64", device="cuda", env=on_gpu
    )
    for row in report["results"]:
        check_decode(row)
        assert row["device"] == "cuda:0" and row["percent_of_copy_bandwidth"] > 0
    names = [name for left_out in report["not_computed"] for name in left_out["shapes"]]
    assert len(report["results"]) + len(names) == 2 and report["results"]
    assert all("/page:64/" in name for name in names)
    assert len(re.findall(r"% of copies$", stdout, re.M)) == len(report["results"])


@pytest.mark.parametrize(
    "grid,only,says",
    [
        ("decode", ["batch:9"], ["only", "batch:9", "batch:128"]),
        ("quick", ["page:16"], ["only", "page:16", "backward"]),
        ("decode", ["hq:28", "hk:8"], ["only", "hq:28 and hk:8"]),
    ],
)
def test_bench_has_no_such_shape(tmp_path, grid, only, says):
    fails("bench", "--grid", grid, "--only", *only, "--json", "speed.json", says=says, cwd=tmp_path)
    assert listing(tmp_path) == []


def test_bench_needs_its_json_file(tmp_path):
    fails("bench", "--json", "no/speed.json", says=["no/speed.json", "No such file"], cwd=tmp_path)
