"""The part of GPU reports about the host's time: as it is measured, here on the CPU, and as it is told."""

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


STAND_IN = """
import time
calls = []
def attention(q, k, v, causal):
    time.sleep(0 if calls else 0.3)
    calls.append(q)
time.sleep(0.2)
"""


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
