"""Inputs of the tests of fulgur.jax."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_disable_most_optimizations", True)  # most of the time would go there
jax.config.update("jax_numpy_rank_promotion", "raise")  # as some callers set it

ROOT = Path(__file__).parents[3]
DTYPES = ["float32", "bfloat16", "float16"]


def arrays(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, timeout=240,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )  # fmt: skip


def qkv(B=2, T=19, S=19, N=4, K=2, H=16, Hv=None, **options):
    return arrays((B, T, N, H), (B, S, K, H), (B, S, K, Hv or H), **options)


def band(T, S, left=None, right=None):
    i, j = np.arange(T)[:, None], np.arange(S)
    seen = np.ones((T, S), bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen[None]


@partial(jax.jit, static_argnums=0)
def gradients_of(function, tensors, dout):
    return gradients(function, tensors, dout)


def gradients(function, tensors, dout, **options):
    out, back = jax.vjp(lambda *x: function(*x, **options), *tensors)
    return out, *back(dout.astype(out.dtype))


LENGTH = jnp.array([3, 3], jnp.int32)
