"""tools/upstream_suite.py on suites of our own, laid out as FlashAttention's, PyTorch's and JAX's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

TOOL = Path(__file__).parents[3] / "tools/upstream_suite.py"

SUITE = """
import pytest, torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input

calls = []

@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [8, pytest.param(16)])
@pytest.mark.parametrize("sq,sk", [(3, 5), (4, 4), (1, 7)])
def test_output(sq, sk, d, causal):
    if sq == 1 and causal:
        pytest.skip("of no interest")
    q, k = torch.randn(1, sq, 2, d), torch.randn(1, sk, 2, d)
    assert flash_attn_func(q, k, k, causal=causal).shape == q.shape
    calls.append((sq, d, causal))

@pytest.mark.parametrize("p", [0.5, 0.0])
def test_packed(p):
    q, ends = torch.randn(1, 2, 8), torch.tensor([0, 1], dtype=torch.int32)
    flash_attn_varlen_func(q, q, q, ends, ends, 1, 1, dropout_p=p, return_attn_probs=True)

def test_pairs():
    assert {c[:2] for c in calls} >= {(3, 8), (3, 16), (4, 8), (4, 16)}
    assert BROKEN == 0
"""


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.slow
def test_counts(tmp_path, broken):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_flash_attn.py").write_text(f"BROKEN = {broken}\n" + SUITE)
    to = tmp_path / "result.json"
    command = [sys.executable, "-B", TOOL, "fa2", tmp_path, "--draws", "60", "--seed", "3", "--json", to]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == broken, done.stdout + done.stderr
    result = json.loads(to.read_text())
    counts = result["counts"]
    assert sum(counts.values()) == 41 and counts["skipped"] > 0 and counts.get("failed", 0) == broken
    assert result["missing"] == {"return_attn_probs with dropout_p": counts["missing"]}
    assert counts["missing"] > 0 and counts["passed"] > 10
    if broken:
        (failure,) = result["failures"]
        assert failure["test"] == "test_pairs" and "AssertionError" in failure["why"]


@pytest.mark.slow
def test_no_such_test(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_flash_attn.py").write_text(SUITE)
    command = [sys.executable, "-B", TOOL, "fa2", tmp_path, "--only", "nothing"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 2 and "--only: got 'nothing'" in done.stderr


FLEX = """
import unittest, torch
from torch.nn.attention import flex_attention as upstream
from torch.nn.attention.flex_attention import flex_attention

compiled = torch.compile(flex_attention, backend="aot_eager")

def is_ours():
    return upstream._validate_device.__module__.startswith("fulgur")

class TestFlex(unittest.TestCase):
    def compare(self, score_mod, off=0, requires_grad=True):
        q, k, v = (torch.randn(1, 2, n, 8, requires_grad=requires_grad) for n in (9, 20, 20))
        want, got = flex_attention(q, k, v, score_mod), compiled(q, k, v, score_mod)
        torch.testing.assert_close(got + off, want)

    def _check_equal(self, golden, reference, compiled, factor, tensor_name=None):
        self.assertEqual(factor, {"Grad_Query": 1.1 * 1.25, "Grad_Key": 10}.get(tensor_name, 1.1))

    def test_bias(self):
        bias = torch.randn(20)
        self.compare(lambda score, b, h, q, k: score + bias[k])
        self._check_equal(0, 0, 0, 1.1, "Grad_Query")
        self._check_equal(0, 0, 0, 10, "Grad_Key")
        self._check_equal(0, 0, 0, 1.1)

    def test_fails(self):
        self.compare(lambda score, b, h, q, k: 2 * score, off=is_ours())

    def test_fails_always(self):  # PyTorch's own has no gradients on CPUs
        self.compare(lambda score, b, h, q, k: 2 * score, off=1, requires_grad=False)

    def test_lacks(self):
        self.compare(lambda score, b, h, q, k: score + torch.lgamma(k + 1.0))

    def test_eager_alone(self):
        flex_attention(*(torch.randn(1, 1, 4, 8) for _ in range(3)))

    @unittest.skip("of no interest")
    def test_skipped(self):
        raise AssertionError
"""


@pytest.mark.slow
def test_counts_of_flex_attention(tmp_path):
    file, to = tmp_path / "test/inductor/test_flex_attention.py", tmp_path / "result.json"
    file.parent.mkdir(parents=True)
    file.write_text(FLEX)
    done = subprocess.run([sys.executable, "-B", str(TOOL), "flex", str(tmp_path), "--json", str(to)],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(to.read_text())
    assert result["counts"] == {"passed": 1, "failed": 1, "missing": 1, "skipped": 3}, done.stdout
    (failure,) = result["failures"]
    assert failure["test"] == "test_fails"
    (missing,) = result["missing"]
    assert "lgamma" in missing


SDPA = """
import unittest, torch
from torch.nn.attention import SDPBackend, current_flash_attention_impl, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.testing._internal import common_utils
from beside import ROWS

class TestSDPA(common_utils.TestCase):
    def compare(self, attn_mask=None, off=0, **options):
        q, k, v = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (ROWS, 20, 20))
        results = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, attn_mask, **options)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
        torch.testing.assert_close([x + off for x in results[0]], results[1])

    @common_utils.parametrize("seed", list(range(40)))
    def test_masks(self, seed):
        self.compare(torch.rand(2, 1, 9, 20) > 0.5 if seed % 2 else torch.randn(9, 1))

    def test_causal(self):
        self.compare(is_causal=True)

    def test_fails(self):
        self.compare(off=current_flash_attention_impl() == "fulgur")

    def test_fails_always(self):
        self.compare(off=1)

    def test_of_the_formula_alone(self):
        with sdpa_kernel(SDPBackend.MATH):
            scaled_dot_product_attention(*[torch.randn(1, 2, 4, 8)] * 3)

    def test_fused_sdp_priority_order(self):
        self.compare(off=current_flash_attention_impl() == "fulgur")

    @unittest.expectedFailure
    def test_expected_to_fail(self):
        self.compare(off=1)

    def test_dropout(self):
        q = torch.randn(1, 2, 4, 8)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)

common_utils.instantiate_parametrized_tests(TestSDPA)
"""


@pytest.mark.slow
def test_counts_of_sdpa(tmp_path):
    file, to = tmp_path / "test/test_transformers.py", tmp_path / "result.json"
    file.parent.mkdir()
    file.write_text(SDPA)
    (file.parent / "beside.py").write_text("ROWS = 9\n")
    done = subprocess.run([sys.executable, "-B", str(TOOL), "sdpa", str(tmp_path), "--draws", "12", "--json", str(to)],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(to.read_text())
    # Every test is drawn once; all other draws are of the test with parameters.
    assert result["counts"] == {"passed": 6, "failed": 1, "missing": 2, "skipped": 3}, done.stdout
    (failure,) = result["failures"]
    assert failure["test"] == "test_fails" and result["missing"] == {"dropout_p": 1, "times": 1}


JAX = """
import unittest, jax, numpy
from jax import nn
import jax.numpy as jnp

class NNFunctionsTest(unittest.TestCase):
    def compare(self, off=0, **options):
        q, k, v = (jax.random.normal(jax.random.key(n), (2, n, 4, 8)) for n in (9, 20, 20))
        want = nn.dot_product_attention(q, k, v, implementation=None, **options)
        got = nn.dot_product_attention(q, k, v, implementation="xla", **options)
        numpy.testing.assert_allclose(got + off, want, atol=1e-5)

    def test_causal(self):
        self.compare(is_causal=True)

    def test_fails(self):
        self.compare(off=not nn.dot_product_attention.__module__.startswith("jax"))

    def test_fails_always(self):
        self.compare(off=1)

    def test_lacks(self):
        raise NotImplementedError("implementation: got 'cudnn'")

    def test_of_jax_alone(self):
        nn.dot_product_attention(*[jnp.zeros((1, 4, 2, 8))] * 3, implementation=None)
"""


@pytest.mark.slow
def test_counts_of_jax(tmp_path):
    pytest.importorskip("jax")
    file, to = tmp_path / "tests/nn_test.py", tmp_path / "result.json"
    file.parent.mkdir()
    file.write_text(JAX)
    done = subprocess.run([sys.executable, "-B", str(TOOL), "jax", str(tmp_path), "--json", str(to)],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(to.read_text())
    assert result["counts"] == {"passed": 1, "failed": 1, "missing": 1, "skipped": 2}, done.stdout
    (failure,) = result["failures"]
    assert failure["test"] == "test_fails" and result["missing"] == {"implementation": 1}
