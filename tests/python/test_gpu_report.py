"""GPU reports: the host's time, measured here on the CPU, in the tables; decode calls in the tables."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
MEASURED = ["fulgur", "flash2", "zeros"]  # on a CPU


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    for folder in ("bench", "tools"):
        monkeypatch.syspath_prepend(ROOT / folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.fixture
def part():
    import gpu_host

    return gpu_host.report("cpu", calls=3, lengths=range(30, 34))


def test_measures_what_runs_here(part):
    assert part["device"] == "cpu" and part["cpu"]
    assert set(part["lacking"]) == {"cudnn"} and part["lacking"]["cudnn"]
    assert list(part["calls"]) == ["a call", "a call, recorded", "backward"]
    for by_name in part["calls"].values():
        assert list(by_name) == MEASURED and all(us > 0 for us in by_name.values())
    assert list(part["lengths"]) == MEASURED
    for passes in part["lengths"].values():
        assert {which: len(us) for which, us in passes.items()} == {"forward": 3, "backward": 3}
        assert all(us > 0 for times in passes.values() for us in times)
    assert json.loads(json.dumps(part)) == part and "seconds" not in part


def test_counts_calls_and_waits(monkeypatch):
    """So many calls as it says in each of the rounds, after one burst to warm up."""
    import gpu_host

    waits, calls = [], []
    monkeypatch.setattr(gpu_host, "wait", waits.append)
    every = {"fulgur": gpu_host.Caller(None), "flash2": gpu_host.Caller(None)}
    runs = {name: {"a call": lambda name=name: calls.append(name)} for name in every}
    got = gpu_host.of_calls(runs, every, "cuda", gpu_host.BURST + gpu_host.GROUP)
    assert calls.count("fulgur") == calls.count("flash2") == (gpu_host.ROUNDS + 1) * (gpu_host.BURST + gpu_host.GROUP)
    assert len(waits) == 2 * (gpu_host.ROUNDS + 1) * 3  # of two callers: at the start, after BURST, at the end
    assert set(got["a call"]) == set(every)


def test_table(part):
    import gpu_table

    part["lengths"]["fulgur"] = {"forward": [20.04, 30, 2000.4], "backward": [5, 6, 7]}
    part["calls"]["a call"] = {"fulgur": 6.54, "flash2": 1234.5, "zeros": 0.5}
    with pytest.raises(ValueError, match="^host: measured on cpu, want cuda"):
        gpu_table.host({"host": part})
    on_gpu = part | {"device": "cuda", "seconds": {"install": 1.25, "second call": 0.0123}}
    text = gpu_table.host({"host": on_gpu})
    assert "| what | fulgur | FlashAttention-2 | zeros |" in text and "| --- | ---: | ---: | ---: |" in text
    assert "| a call | **6.5** | 1234 | 0.5 |" in text
    lines = [line.split(" | ")[:2] for line in text if line.startswith("| a new length")]
    assert lines == [
        ["| a new length, forward", "**30.0**"], ["| a new length, forward, the slowest", "**2000**"],
        ["| a new length, backward", "**6.0**"], ["| a new length, backward, the slowest", "**7.0**"],
    ]  # fmt: skip
    assert text[-1].endswith("install 1.2 s, second call 12.3 ms.")
    report = {"gpu": "a GPU", "driver": "1", "torch": "2", "cudnn": 3, "checks": [], "dates": {"host": "today"},
              "kernels": {"host": "0123456789abcdef"}, "host": on_gpu}  # fmt: skip
    whole = gpu_table.markdown(report)
    assert "0123456789ab (host, today)" in whole and "\n".join(text) in whole


def decode_row(**us):
    case = {"batch": 64, "keys": 8192, "heads": 32, "kv_heads": 8, "d": 128, "queries": 1, "page": 0, "lengths": []}
    return {**case, "bytes": 2e9, "fulgur_us": 800.0, **us}


def test_decode_table():
    """A peer has a column where some call was measured with it, and an entry where that call was."""
    import gpu_table

    alone = gpu_table.decode({"decode": [decode_row(flash3_us=1000.0)]})
    assert alone[2].endswith(" fulgur is faster than FlashAttention-3 in 1 of the 1 lines.")
    assert alone[4].endswith("| TB/s | FlashAttention-3, us | its time / ours |") and len(alone) == 7
    assert alone[6].endswith("| 1 |  | **800.0** | 2.50 | 1000.0 | 1.25 |")
    rows = [decode_row(flash3_us=1000.0, cudnn_us=900.0), decode_row(page=16, flashinfer_us=790.0, cudnn_us=790.5)]
    rows[1]["not_captured"] = {"flashinfer": "why"}
    text = gpu_table.decode({"decode": rows, "decode_peers": {"FlashInfer": "0.7", "cuDNN's frontend": "1.3"}})
    assert text[2].endswith(" in 1 of the 1 lines, FlashInfer in 0 of the 1 lines, cuDNN in 1 of the 2 lines.")
    assert text[4].startswith("Also with FlashInfer 0.7, cuDNN's frontend 1.3.")
    assert text[6].endswith("| its time / ours | FlashInfer, us | cuDNN, us |")
    assert text[8].endswith("| 1000.0 | 1.25 |  | 900.0 |") and text[9].endswith("|  |  | 790.0 | 790.5 |")
    assert text[-1] == "Timed as loops of launches, as no graph could be captured: FlashInfer."


def test_decode_table_of_codes():
    import gpu_table

    row = decode_row(us={"bf16": 480.0, "q8_0": 300.0, "int4, f16 tokens": 160.0})
    text = gpu_table.decode_codes({"decode_codes": [row]})
    assert text[4].endswith("| page | bf16 | q8_0 | int4, f16 tokens |")
    assert text[6] == "| 64 | 8k | 32/8 | 128 | 1 |  | 480.0 | 300.0 (1.60) | 160.0 (3.00) |"


def test_caches_of_codes_stand_for_what_fulgur_says():
    import gpu_decode_codes

    import fulgur

    case = gpu_decode_codes.DecodeCase(2, 40, 4, 3, d=64)
    generator = torch.Generator("cpu").manual_seed(0)
    for codes in gpu_decode_codes.FORMATS:
        of = gpu_decode_codes.random_codes(codes, (2, 40), case, generator)
        got = gpu_decode_codes.numbers(codes, *of, 64, torch.arange(2))
        want = fulgur.Quantized(codes.format, *of).dequantize("f32")
        torch.testing.assert_close(got, torch.from_dlpack(want), rtol=1e-6, atol=1e-6)


def test_decode_peers_that_are_not_installed(monkeypatch):
    import gpu_decode
    import gpu_decode_peers

    monkeypatch.setattr(gpu_decode_peers, "installed", lambda name: None)
    assert gpu_decode_peers.versions() == {}
    for case in gpu_decode.CASES:
        assert not any(peer(case, []) for peer in gpu_decode.PEERS.values())


STAND_IN = """
import time
calls = []
def attention(q, k, v, causal):
    time.sleep(0 if calls else 0.3)
    calls.append(q)
time.sleep(0.2)
"""


@pytest.mark.slow
def test_seconds_from_a_wheel(tmp_path):
    """Of a wheel that stands in for ours, although another fulgur is installed."""
    wheel = tmp_path / "fulgur-0.0.0-py3-none-any.whl"
    about = "fulgur-0.0.0.dist-info"
    files = {
        "fulgur/__init__.py": "", "fulgur/torch.py": STAND_IN,
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: fulgur\nVersion: 0.0.0\nRequires-Dist: nothing-like-it\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    command = [sys.executable, "-B", ROOT / "tools/try_wheel.py", wheel, "--device", "cpu"]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    seconds = json.loads(done.stdout)
    assert list(seconds) == ["install", "import", "first call", "second call"]
    assert seconds["install"] > 0 and seconds["import"] > 0.2
    assert seconds["first call"] > 0.3 > seconds["second call"] > 0
