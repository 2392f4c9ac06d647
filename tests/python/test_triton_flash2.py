"""FlashAttention-2 in Triton (bench/triton_flash2.py), a peer in the papers' tables, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
# Errors of out, dq, dk and dv against float64, for each mask.
SCRIPT = """
import json, math, sys
sys.path.insert(0, sys.argv[1])
import torch
from triton_flash2 import flash2

def standard(q, k, v, causal):
    S = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if causal:
        S = S.masked_fill(torch.ones(S.shape[-2:]).triu(1).bool(), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", S.softmax(-1), v)

def results(attend, dtype, tensors, causal):
    q, k, v, dout = (t.to(dtype) for t in tensors)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*inputs, causal)
    return [t.double() for t in (out, *torch.autograd.grad(out, inputs, dout))]

torch.manual_seed(1)
errors = []
for causal in (False, True):
    tensors = [torch.randn(1, 256, 2, 64, dtype=torch.float16) for _ in range(4)]
    pairs = zip(results(flash2, torch.float16, tensors, causal), results(standard, torch.float64, tensors, causal))
    errors.append([float((got - want).abs().max() / want.abs().max()) for got, want in pairs])
print(json.dumps(errors))
"""


def interpreted(script, check):
    return subprocess.run([sys.executable, "-c", script, str(ROOT / "bench")], check=check, capture_output=True,
                          text=True, env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"})


@pytest.mark.slow
def test_follows_float64():
    for errors in json.loads(interpreted(SCRIPT, check=True).stdout):
        assert len(errors) == 4 and max(errors) < 2e-3


def test_refuses_other_shapes():
    script = ("import sys, torch; sys.path.insert(0, sys.argv[1]); from triton_flash2 import flash2\n"
              "x = torch.zeros(1, 200, 2, 64, dtype=torch.float16); flash2(x, x, x, False)")
    run = interpreted(script, check=False)
    assert run.returncode != 0
    assert "computes as many queries as keys, multiples of 128, with d 64 and 128, got (1, 200, 2, 64)" in run.stderr
