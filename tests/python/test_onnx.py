"""The node cases of ONNX by examples/onnx_attention.py."""

import collections
import dataclasses
import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")

pytestmark = pytest.mark.filterwarnings("ignore")  # about numbers of which the package makes other cases
EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/onnx_attention.py"))


def test_every_case():
    cases = EXAMPLE["cases"]()
    kinds = collections.Counter(case.model.graph.node[0].op_type for case in cases)
    assert kinds.keys() == {"Attention", "RotaryEmbedding", "TensorScatter"} and kinds["Attention"] >= 93
    failed = {}
    for case in cases:
        try:
            EXAMPLE["check"](case)
        except Exception as error:
            failed[case.name] = error
    assert not failed


def test_a_wrong_result_is_seen():
    """The comparison that the test of the cases rests on."""
    case = EXAMPLE["cases"]()[0]
    operands, (want, *_) = case.data_sets[0]
    wrong = want.copy()
    wrong.flat[3] *= 1.01
    with pytest.raises(AssertionError):
        EXAMPLE["check"](dataclasses.replace(case, data_sets=[(operands, [wrong])]))


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("left, right", [(-1, -1), (1, 2), (0, -1)])
@pytest.mark.parametrize("new", [2, 3, 5])
def test_positions_with_a_past(new, left, right, is_causal):
    """As many keys are new as queries, fewer or more: query i is at key i + past all the same."""
    rng = np.random.default_rng(new)
    q, k, v, past_k, past_v = (
        rng.standard_normal((2, 2, n, 8), dtype=np.float32) for n in (3, new, new, 4, 4)
    )
    at = np.arange(3)[:, None] + 4
    keys = np.arange(4 + new)
    seen = np.ones((3, 4 + new), bool)
    seen &= (left < 0) | (keys >= at - left)
    seen &= (right < 0) | (keys <= at + right)
    seen &= (not is_causal) | (keys <= at)
    options = dict(left_window_size=left, right_window_size=right, is_causal=is_causal, qk_matmul_output_mode=3)
    y, _, _, weights = EXAMPLE["attention"](q, k, v, None, past_k, past_v, **options)
    whole_k, whole_v = np.concatenate((past_k, k), 2), np.concatenate((past_v, v), 2)
    want, _, _, want_weights = EXAMPLE["attention"](q, whole_k, whole_v, seen, qk_matmul_output_mode=3)
    np.testing.assert_allclose(y, want, atol=1e-6)
    np.testing.assert_allclose(weights, want_weights, atol=1e-6)
    assert (weights[..., ~seen] == 0).all()
