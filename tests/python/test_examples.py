"""The example that trains, as a user runs it on a CPU."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from ranks import run_ranks

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples/train_gpt.py"
TABLE = ROOT / "tools/training_table.py"


def run(*arguments):
    command = [sys.executable, "-B", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_the_losses_are_those_of_math(tmp_path):
    to = tmp_path / "training.json"
    shape = ("--seqlen", 64, "--batch", 4, "--steps", 25, "--attn", "fulgur,math,fa3")
    done = run(TRAIN, "curves", *shape, "--json", to)
    assert done.returncode == 0, done.stderr
    ours, math, missing = json.loads(to.read_text())["curves"]
    assert len(ours["losses"]) == 25 and missing["missing"] == "not installed"
    assert max(abs(a - b) for a, b in zip(ours["losses"], math["losses"])) < 2e-3
    assert ours["losses"][-1] < ours["losses"][0] - 1
    assert run(TABLE, to).returncode == 0
    assert "| FlashAttention-3 | not installed |" in to.with_suffix(".md").read_text()
    ET.parse(to.with_suffix(".svg"))
    to.with_suffix(".md").write_text("of another report")
    assert run(TABLE, to).returncode == 1


@pytest.mark.slow
def test_speed_in_turns(tmp_path):
    to = tmp_path / "training.json"
    shape = ("--seqlen", 32, "--batch", 1, "--steps", 1, "--turns", 2, "--attn", "fulgur,sdpa")
    done = run(TRAIN, "speed", *shape, "--json", to)
    assert done.returncode == 0, done.stderr
    for entry in json.loads(to.read_text())["speed"]:
        assert entry["tokens_per_second"] == pytest.approx(32e3 / entry["ms"])
        assert entry["mfu"] is None
    assert "tokens/s" in done.stdout
    ET.parse(to.with_suffix(".svg"))


@pytest.mark.slow
def test_context_parallel(tmp_path):
    """Two processes, each with a part of the tokens, have the losses of one."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    shape = ["--seqlen", "192", "--batch", "2", "--steps", "5", "--attn", "fulgur"]
    done = run(TRAIN, "curves", *shape, "--json", one)
    assert done.returncode == 0, done.stderr
    arguments = [str(TRAIN), "curves", *shape, "--context-parallel", "--json", str(two)]
    script = f"import runpy, sys\nsys.argv = {arguments}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    first, second = run_ranks(script, 2)
    assert "loss" in first and second == ""
    (alone,), (shared,) = (json.loads(x.read_text())["curves"] for x in (one, two))
    assert alone["losses"] == pytest.approx(shared["losses"], abs=2e-4)
    done = run(TRAIN, "curves", "--context-parallel")
    assert done.returncode == 2 and "want curves or speed with --attn fulgur" in done.stderr


@pytest.mark.slow
def test_bench_of_ranks(tmp_path):
    """The table of several processes, of a call so small that it says nothing of speed."""
    to = tmp_path / "distributed.json"
    shape = ("--lengths", 256, "--heads", "4/2", "--d", 32, "--row-seconds", 0.01, "--masks", "causal")
    ways = ("--ways", "gather,heads,ring")
    done = run(ROOT / "bench/distributed.py", "--device", "cpu", "--ranks", "1,2", *shape, *ways, "--json", to)
    assert done.returncode == 0, done.stderr
    rows = json.loads(to.read_text())["rows"]
    # The most informative ways come first.
    ways = ["one", "gather", "one", "gather", "heads", "heads", "ring", "ring"]
    assert [(row["ranks"], row["way"]) for row in rows] == [(1 if way == "one" else 2, way) for way in ways]
    for row in rows:
        if row["way"] == "ring":
            assert row["missing"] == "FlashAttention's kernels are for GPUs"
        elif row["ranks"] == 2:
            assert row["same_bits"] and row["predicted_ms"] > 0
            one = next(r["ms"] for r in rows if r["backward"] == row["backward"])
            assert row["speedup"] == pytest.approx(one / row["ms"])
    assert "MagiAttention 645, 529" in done.stdout and "The model is off by" in done.stdout
    done = run(ROOT / "bench/distributed.py", "--device", "cpu", "--ranks", "1,2", *shape, "--seconds", 0)
    assert done.returncode == 0 and "There was no time for 18 more:\n" in done.stdout
    assert "- forward causal 256, 4/2 heads d 32: one device, gather of 2" in done.stdout
    shape = ("--lengths", 512, *shape[2:])
    done = run(ROOT / "bench/distributed.py", "--device", "cpu", "--simulate", 4, *shape, "--json", to)
    assert done.returncode == 0, done.stderr
    rows = json.loads(to.read_text())["rows"]
    assert [(row["rank"], row["backward"]) for row in rows] == [(r, b) for b in (False, True) for r in (0, 2, 3)]
    assert all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in rows) and "rank 3 alone" in done.stdout


@pytest.mark.slow
def test_wrong_arguments():
    done = run(TRAIN, "speed", "--attn", "fulgur,other")
    assert done.returncode == 2 and "--attn: got other" in done.stderr
    assert run(TABLE, "nothing.json").returncode == 77
