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


@pytest.mark.parametrize("shape", [(), ("--page", 1, "--pages", 120), ("--page", 17, "--pages", 9, "--budget", 7)])
def test_tokens_are_those_of_dense_attention(shape):
    done = run(*shape)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    pattern = r"16 requests, (\d+) tokens in (\d+) steps, (\d+) of .*; (\d+) pages were taken (\d+) times"
    numbers = re.match(pattern, last)
    tokens, steps, mixed, pages, taken = map(int, numbers.groups())
    # Requests did share steps, chunks of prompts stood beside decoding, and pages were used again.
    assert steps < tokens and mixed > 3 and taken > pages


def test_wrong_arguments():
    done = run("--pages", 1)
    assert done.returncode == 2 and "--pages: got 1, want at least the" in done.stderr
    done = run("--budget", 0)
    assert done.returncode == 2 and "--budget: got 0, want at least 1" in done.stderr
