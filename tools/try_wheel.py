"""Whether an installed fulgur computes: on NumPy's arrays, and with PyTorch and JAX where they are.

    tools/try_wheel.py                         that of this Python
    tools/try_wheel.py WHEEL --device cuda     how long it takes from a wheel to results of fulgur.torch

The second installs the wheel into a folder of its own, without the network, and compiles all
kernels that it uses. This Python has PyTorch.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time


def try_installed():
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


def timed(run):
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def first_calls(device):
    """Seconds of an import and of calls that follow, by what they are; PyTorch is there before."""
    import torch

    q = torch.ones(1, 1024, 8, 64, device=device, dtype=torch.bfloat16)
    import_s, module = timed(lambda: importlib.import_module("fulgur.torch"))

    def call():
        module.attention(q, q, q, causal=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return {"import": import_s, "first call": timed(call)[0], "second call": timed(call)[0]}


def seconds(wheel, device):
    """From a wheel to results: of the installation, and of `first_calls` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        target, cache, compiler = (os.path.join(folder, name) for name in ("target", "cache", "compiler"))
        os.mkdir(cache, 0o700)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--no-index", "--target", target, wheel]
        install, _ = timed(lambda: subprocess.run(pip, check=True))
        path = os.pathsep.join(filter(None, (target, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-B", __file__, "--first-calls", "--device", device], check=True, text=True,
            stdout=subprocess.PIPE,  # NVRTC has a cache, too
            env=os.environ | {"PYTHONPATH": path, "FULGUR_CACHE_DIR": cache, "CUDA_CACHE_PATH": compiler},
        )  # fmt: skip
    return {"install": install, **json.loads(done.stdout)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", nargs="?", type=pathlib.Path, help="a file to install and to time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="of the calls that are timed")
    parser.add_argument("--first-calls", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_calls:
        print(json.dumps(first_calls(args.device)))
    elif args.wheel:
        print(json.dumps(seconds(args.wheel, args.device)))
    else:
        try_installed()


if __name__ == "__main__":
    main()
