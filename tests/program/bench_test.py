"""`fulgur bench`."""

import json
import os
import re
import resource

import pytest

from program import fails, fulgur, listing, succeeds


@pytest.mark.slow
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


@pytest.mark.slow
def test_bench_of_ranks(tmp_path):
    only = ("forward", "f32", "d:64", "causal")
    stdout = succeeds("bench", "--ranks", "2", "--only", *only, "--json", "speed.json", cwd=tmp_path)
    report = json.loads((tmp_path / "speed.json").read_text())
    assert report["ranks"] == 2 and len(report["results"]) > 0
    for row in report["results"]:
        assert row["speedup"] == pytest.approx(row["ms_of_one"] / row["ms"]) and row["gflop_per_s"] > 0
        assert f"{row['speedup']:.2f}x" in stdout
    assert "want parts of names of the grid" in fails("bench", "--ranks", "2", "--only", "n:3")


@pytest.mark.slow
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


@pytest.mark.slow
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
