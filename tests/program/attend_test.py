"""`fulgur attend`: results against NumPy in float64."""

import os
import re
import struct

import numpy as np
import pytest

from attention import assert_close, attention
from program import (
    ALL, FORWARD, LSE, PAGED, PREFIXES, RNG, fails, from_bf16, in_pages, listing, load, read_safetensors,
    save, succeeds, tensors, to_bf16, write_safetensors,
)  # fmt: skip


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
        (["--causal", "--top-left"], {"right": 0, "top_left": True}),
        (["--window", "5,3", "--top-left"], {"left": 5, "right": 3, "top_left": True}),
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


@pytest.mark.parametrize(
    "bias, dtype",
    [
        (RNG.standard_normal((2, 4, 37, 53), np.float32), "F32"),
        (RNG.standard_normal((1, 4, 1, 53), np.float32).astype(np.float16), "F16"),
        (RNG.random((2, 1, 37, 53)) < 0.5, "BOOL"),
    ],
)
def test_bias(folder, bias, dtype):
    if bias.dtype != bool:
        bias[..., ::7] = -np.inf
    np.save(folder / "bias.npy", bias)
    gradient = [] if dtype == "BOOL" else ["--dbias", "dbias.npy"]
    succeeds(*ALL, "--softcap", "2", "--bias", "bias.npy", *gradient, cwd=folder)
    arrays = load(folder, ["q", "k", "v", "dout"])
    want = attention(**arrays, softcap=2, added=bias)
    for name, got in load(folder, want).items():
        assert_close(got, want[name], "f32")
    inputs = {name: ("F32", x) for name, x in arrays.items()} | {"bias": (dtype, bias)}
    write_safetensors(folder / "in.safetensors", inputs)
    files = ["--input", "in.safetensors", "--output", "o.safetensors"]
    succeeds("attend", *files, "--softcap", "2", cwd=folder)
    got = read_safetensors(folder / "o.safetensors")
    assert set(got) == set(want)
    for name in want:
        assert_close(got[name][1], want[name], "f32")


def test_dtype_of_a_bias(folder):
    """float64 goes with float64; --dtype makes float32 of it, and leaves others as they are."""
    bias = RNG.standard_normal((1, 1, 37, 53))
    arrays = load(folder, ["q", "k", "v"])
    np.save(folder / "bias.npy", bias)
    fails(*FORWARD, "--bias", "bias.npy", says=["bias", "f64", "f32"], cwd=folder)
    for dtype in ("f32", "bf16"):
        succeeds(*FORWARD, "--bias", "bias.npy", "--dtype", dtype, cwd=folder)
        assert_close(load(folder, ["out"])["out"], attention(**arrays, added=bias)["out"], dtype)
    save(folder, {name: x.astype(np.float64) for name, x in arrays.items()})
    succeeds(*FORWARD, "--bias", "bias.npy", cwd=folder)
    assert_close(load(folder, ["out"])["out"], attention(**arrays, added=bias)["out"], "f64")


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


def test_links_that_lead_nowhere_stay_links(folder):
    (folder / "out.npy").symlink_to("made.npy")
    succeeds(*FORWARD, cwd=folder)
    assert (folder / "out.npy").is_symlink()
    assert np.load(folder / "made.npy").shape == (2, 37, 4, 16)
    (folder / "lse.npy").symlink_to("no/such/folder/lse.npy")
    fails(*FORWARD, "--lse", "lse.npy", says=["No such file"], cwd=folder)
    assert (folder / "lse.npy").is_symlink()


def test_expressions(folder):
    """Masks and scores by text, as the options make them, and the gradient of a tensor of every score."""
    pair = RNG.standard_normal((4, 37, 53)).astype(np.float32)
    np.save(folder / "pair.npy", pair)
    np.save(folder / "first.npy", np.array([0, 7], np.int64))
    stdout = succeeds(
        *ALL, "--softcap", "2", "--mask-mod", "delta <= 0 && k >= first[0]", "--tensor", "first=first.npy",
        "--score-mod", "score + pair[h, q, k]", "--tensor", "pair=pair.npy", "--tensor-grad", "pair=dpair.npy",
        cwd=folder,
    )  # fmt: skip
    assert "backward: " in stdout
    want = attention(**load(folder, ["q", "k", "v", "dout"]), right=0, softcap=2, added=pair[None])
    want["dpair"] = want.pop("dbias")[0]
    for name, got in load(folder, want).items():
        assert got.dtype == np.float32
        assert_close(got, want[name], "f32")


def test_expressions_with_safetensors(folder):
    arrays = load(folder, ["q", "k", "v", "dout"])
    write_safetensors(folder / "in.safetensors", {name: ("F32", x) for name, x in arrays.items()})
    np.save(folder / "gate.npy", RNG.standard_normal(53).astype(np.float32))
    succeeds(
        "attend", "--input", "in.safetensors", "--output", "out.safetensors", "--score-mod", "score + gate[k]",
        "--tensor", "gate=gate.npy", "--tensor-grad", "gate=dgate.npy", cwd=folder,
    )  # fmt: skip
    want = attention(**arrays, added=np.load(folder / "gate.npy")[None, None, None])
    got = read_safetensors(folder / "out.safetensors")
    assert got.keys() == {"out", "lse", "dq", "dk", "dv"}
    assert_close(got["out"][1], want["out"], "f32")
    assert_close(np.load(folder / "dgate.npy"), want["dbias"][0, 0, 0], "f32")


@pytest.mark.parametrize(
    "flags, code, says",
    [
        (["--mask-mod", "delta <"], 1, ["--mask-mod: at character 8", "the end"]),
        (["--mask-mod", "delta"], 1, ["mask_mod: got a value of type int, want bool"]),
        (["--score-mod", "score + t[k]"], 1, ["--score-mod", "want a tensor that is declared"]),
        (["--tensor", "t"], 2, ["--tensor", "'t'", "NAME=F.npy"]),
        (["--tensor", "=dout.npy"], 2, ["--tensor", "NAME=F.npy"]),
        (["--tensor", "t=no.npy"], 1, ["--tensor t=no.npy", "No such file"]),
        (["--tensor", "t=q.npy"], 1, ["t: given, but no expression indexes"]),
        (["--tensor", "t=q.npy", "--tensor", "t=k.npy"], 1, ["--tensor t=k.npy", "a second time"]),
        (["--tensor-grad", "t=g.npy"], 2, ["--tensor-grad", "a name that --tensor gives"]),
        (["--score-mod", "score + t[k, 0, 0, 0]", "--tensor", "t=q.npy", "--tensor-grad", "t=dq.npy"], 2,
         ["names the same file as --dq"]),
    ],
)  # fmt: skip
def test_wrong_expressions(folder, flags, code, says):
    before = listing(folder)
    fails(*ALL, *flags, code=code, says=says, cwd=folder)
    assert listing(folder) == before


def test_gradients_of_tensors_need_the_backward_pass(folder):
    flags = ["--score-mod", "score + t[k, 0, 0, 0]", "--tensor", "t=q.npy", "--tensor-grad", "t=g.npy"]
    fails(*FORWARD, *flags, code=2, says=["--tensor-grad", "needs dout"], cwd=folder)
