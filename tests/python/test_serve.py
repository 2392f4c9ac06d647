"""The example that serves, as a user runs it: it compares its tokens with dense attention itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = Path(__file__).parents[2] / "examples/serve.py"


def run(*arguments):
    command = [sys.executable, "-B", *map(str, (SERVE, *arguments))]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("device", [(), ("--device", "cpu")], ids=["numpy", "torch"])
@pytest.mark.parametrize("shape", [(), ("--page", 1, "--pages", 120), ("--page", 17, "--pages", 9, "--budget", 7)])
@pytest.mark.slow
def test_tokens_are_those_of_dense_attention(shape, device):
    if device:
        pytest.importorskip("torch")
    done = run(*shape, *device)
    assert done.returncode == 0, done.stderr
    pattern = (
        r"16 requests, (\d+) tokens in (\d+) steps, (\d+) of .*; (\d+) pages were taken (\d+) times\.\n"
        r"(\d+) tokens are those of dense attention; at the other (\d+) "
    )
    numbers = re.search(pattern, done.stdout)
    tokens, steps, mixed, pages, taken, same, doubtful = map(int, numbers.groups())
    # Requests did share steps, chunks of prompts stood with decoding, and pages were used again.
    assert steps < tokens and mixed > 3 and taken > pages
    # Rounding to float16 may decide a few tokens, to float32 none of these.
    assert same + doubtful == tokens and doubtful <= (0.05 * tokens if device else 0)


def test_wrong_arguments():
    done = run("--pages", 1)
    assert done.returncode == 2 and "--pages: got 1, want at least the" in done.stderr
    done = run("--budget", 0)
    assert done.returncode == 2 and "--budget: got 0, want at least 1" in done.stderr
