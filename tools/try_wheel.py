"""Whether an installed fulgur computes: on NumPy's arrays, and with PyTorch and JAX where they are."""

import importlib.util

import numpy as np

import fulgur

q = np.random.default_rng(0).standard_normal((1, 100, 4, 64), dtype=np.float32)
out, lse = fulgur.attention(q, q, q, causal=True, return_lse=True)
gradients = fulgur.attention_backward(out, q, q, q, out, lse, causal=True)
fulgur.explain(q, q, q)


def check(package, compute):
    """The module for a package gives the same, or says that the package is missing."""
    if importlib.util.find_spec(package):
        for got, want in zip(compute(), (out, *gradients)):
            np.testing.assert_allclose(np.asarray(got), want, atol=1e-5)
        print(f"fulgur.{package} computes")
        return
    try:
        importlib.import_module(f"fulgur.{package}")
    except ModuleNotFoundError as error:
        assert error.name == package, error
    else:
        raise SystemExit(f"fulgur.{package} does without {package}")


def with_torch():
    import torch

    from fulgur.torch import attention

    x = [torch.tensor(q, requires_grad=True) for _ in range(3)]
    result = attention(*x, causal=True)
    return result.detach(), *torch.autograd.grad(result, x, torch.tensor(out))


def with_jax():
    import jax

    from fulgur.jax import attention

    result, back = jax.vjp(lambda *x: attention(*x, causal=True), q, q, q)
    return result, *back(jax.numpy.asarray(out))


check("torch", with_torch)
check("jax", with_jax)
print(fulgur.__version__, "computes:", fulgur.engines()[0].description)
