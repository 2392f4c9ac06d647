#!/usr/bin/env python3
"""Adds PyTorch's attentions to the papers' tables, and where they are installed Triton (triton_flash2.py) and xFormers.

`fulgur bench --device cuda --reproduce fa3 --json F` makes the file; the same shapes are measured here, with standard
attention as PyTorch's three calls, in bf16. What the file has already stays, so that `--seconds` at a time lead to all.
tools/papers_table.py shows it.
"""

import argparse
import functools
import importlib.util
import json
import math
import pathlib
import time

import torch
from gpu_case import Case
from gpu_peers import gradients, leaves, sdpa
from torch.nn.attention import SDPBackend

SECONDS = 0.05


def three_calls(case, q, k, v):
    """S, P and O one after the other in memory."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    S = q @ k.transpose(-1, -2) / math.sqrt(case.d)
    if case.causal:
        S = S + torch.full((case.s, case.s), -math.inf, device=S.device, dtype=S.dtype).triu(1)
    return (S.softmax(-1) @ v).transpose(1, 2)


def xformers(case, q, k, v):
    from xformers import ops

    mask = ops.LowerTriangularMask() if case.causal else None
    return ops.memory_efficient_attention(q, k, v, attn_bias=mask)


def triton_flash2(case, q, k, v):
    from triton_flash2 import flash2

    return flash2(q, k, v, case.causal)


PEERS = {
    "torch_three_calls": three_calls,
    "torch_flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "torch_efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "torch_cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "triton_flash2": triton_flash2,
    "xformers": xformers,
}
MODULES = {"triton_flash2": "triton", "xformers": "xformers"}  # that a peer needs besides PyTorch


def milliseconds(run):
    """Of a call among others, after one to warm up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(count):
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    run()
    return timed(max(1, min(200, int(1e3 * SECONDS / timed(1)))))


def measure(row, name):
    """The row of a peer for the same shape; None where it does not compute it."""
    case = Case(row["batch"], row["sq"], row["hq"], row["d"], row["d"], row["causal"])
    make = functools.partial(torch.randn, case.batch, case.s, case.heads, case.d, device="cuda", dtype=torch.bfloat16)
    tensors = {tensor: make() for tensor in ("q", "k", "v", "dout")}
    attend = functools.partial(PEERS[name], case)
    try:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if row["pass"] == "forward":
            ms = milliseconds(lambda: attend(*(tensors[x] for x in ("q", "k", "v"))))
        else:
            inputs = leaves(tensors)
            ms = milliseconds(gradients(attend(*inputs), inputs, tensors["dout"]))
        extra = torch.cuda.max_memory_allocated() - before
    except (RuntimeError, ValueError, NotImplementedError):  # of memory, too
        torch.cuda.empty_cache()
        return None
    work = row["gflop_per_s"] * row["ms"]
    return row | {"algorithm": name, "ms": ms, "gflop_per_s": work / ms, "extra_bytes": extra}


def shape(row):
    return tuple(row[name] for name in ("pass", "sk", "d", "causal"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further shape after so many")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    report = json.loads(args.json.read_text())
    rows = [r for r in report["results"] if r["algorithm"] == "fa2"]
    names = [n for n in PEERS if n not in MODULES or importlib.util.find_spec(MODULES[n])]
    for name in names:
        there = {shape(r) for r in report["results"] if r["algorithm"] == name}
        for row in rows:
            if shape(row) not in there and time.monotonic() < end:
                report["results"] += [made for made in (measure(row, name),) if made]
        print(name, sum(r["algorithm"] == name for r in report["results"]), "of", len(rows), flush=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
