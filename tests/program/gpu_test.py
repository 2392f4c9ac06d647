"""The program with a GPU, or the fake one: tune, prewarm, check."""

import json
import pathlib
import re
import subprocess

import pytest

from attention import assert_close, attention
from program import (
    FORWARD, LSE, PROGRAM, details, fails, from_bf16, fulgur, has_cuda, listing, load, save, succeeds,
    tensors, to_bf16,
)  # fmt: skip


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


def test_bench_prints_the_counts_of_a_paper(on_gpu, tmp_path):
    """Those that explain has of each pass."""
    command = ["bench", "--device", "cuda", "--reproduce", "fa2", "--only", "fa2", "n:512", "d:64", "full"]
    stdout = succeeds(*command, "--json", "fa2.json", env=on_gpu, cwd=tmp_path)
    rows = {row["pass"]: row["counts"] for row in json.loads((tmp_path / "fa2.json").read_text())["results"]}
    shape = ["--batch", "32", "--hq", "32", "--hk", "32", "--sq", "512", "--sk", "512", "--d", "64", "--dtype", "bf16"]
    call = ["--device", "cuda", "--algorithm", "fa2", *shape]
    assert rows["forward"] == details(*call, env=on_gpu)["counts"]
    assert rows["backward"] == details(*call, "--backward", env=on_gpu)["counts"]
    products = sum(counts["products"] for counts in rows.values())
    assert re.search(rf"^products, G +fa2 +{products * 1e-9:.0f}$", stdout, re.M)
    assert not re.search("^rescales", stdout, re.M)  # they depend on the scores


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
@pytest.mark.slow
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
        (["--d", "512", "--backward", "--dtype", "f32"], ["computes d and dv up to 256, got 512"]),
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
    assert len(ends) == 66
    assert all("engine cuda: " in why for why in reasons)
    computed = set(ends.values()) - {"not computed"}
    counted = sum(map(int, re.findall(r"(\d+) (?:forward|backward)", last)))
    of_codes = [case for case, dtype in ends if case.endswith("cache") or case == "e4m3"]  # forward alone
    assert len(of_codes) == 18 and counted + sum(reasons.values()) == 2 * len(ends) - len(of_codes)
    of_f32 = {case: end for (case, dtype), end in ends.items() if dtype == "f32"}
    assert {case for case, end in of_f32.items() if end == "not computed"} == {"wide heads", "e4m3"}
    assert any("f32" in why and "computes d and dv up to 256" in why for why in reasons)
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
