"""The example that trains, as a user runs it on a CPU."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

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
def test_wrong_arguments():
    done = run(TRAIN, "speed", "--attn", "fulgur,other")
    assert done.returncode == 2 and "--attn: got other" in done.stderr
    assert run(TABLE, "nothing.json").returncode == 77
