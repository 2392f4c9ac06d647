"""What a call from Python costs the host, in microseconds: medians of calls of one query and one key, in turns.

One thread of the CPU computes, in a time that is next to nothing. PyTorch's SDPA gets equal tensors.
"""

import statistics
import time

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import fulgur
import fulgur.torch

SHAPE = (1, 1, 1, 16)  # in fulgur's order of dimensions and in PyTorch's
CALLS, ROUNDS = 200, 100


def calls():
    arrays = [np.ones(SHAPE, np.float32) for _ in range(3)]
    tensors = [torch.ones(SHAPE) for _ in range(3)]
    leaves = [torch.ones(SHAPE, requires_grad=True) for _ in range(3)]
    plan = fulgur.plan(*arrays, threads=1)
    out, tensors_out = np.empty(SHAPE, np.float32), torch.empty(SHAPE)
    return {
        "Plan.run, NumPy": lambda: plan.run(*arrays),
        "Plan.run, NumPy, out given": lambda: plan.run(*arrays, out=out),
        "Plan.run, PyTorch": lambda: plan.run(*tensors),
        "Plan.run, PyTorch, out given": lambda: plan.run(*tensors, out=tensors_out),
        "fulgur.attention, NumPy": lambda: fulgur.attention(*arrays, threads=1),
        "fulgur.attention, PyTorch": lambda: fulgur.attention(*tensors, threads=1),
        "fulgur.torch.attention": lambda: fulgur.torch.attention(*tensors),
        "SDPA": lambda: scaled_dot_product_attention(*tensors),
        "fulgur.torch.attention, recorded": lambda: fulgur.torch.attention(*leaves),
        "SDPA, recorded": lambda: scaled_dot_product_attention(*leaves),
    }


def micros(call):
    """Of one of CALLS calls."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - start) / CALLS


def main():
    torch.set_num_threads(1)
    print(f"PyTorch {torch.__version__}, compiled for it: {fulgur.torch.compiled}")
    every = calls()
    times = {name: [] for name in every}
    for _ in range(ROUNDS):
        for name, call in every.items():
            times[name].append(micros(call))
    for name, spent in times.items():
        print(f"{name:34} {statistics.median(spent):6.2f} us, at least {min(spent):6.2f}")


if __name__ == "__main__":
    main()
