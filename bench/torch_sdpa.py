#!/usr/bin/env python3
"""Times torch's CPU scaled_dot_product_attention on the shapes of `fulgur bench --json F`.

    fulgur bench --grid standard --json speed.json
    python3 bench/torch_sdpa.py speed.json

Adds torch_ms and the ratio fulgur_speedup to every result of the file and prints both side by side.
Threads, dtype, mask and layout (batch, seqlen, heads, dim) are those of the result; times are
medians over rounds in which the shapes take turns.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

ROUNDS = 5


def burst_ms(run):
    """Median of a tenth of a second or one run, after one to warm up, as fulgur bench does; where
    that takes longer than a second, it is the one."""

    def once():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    seconds = [once()]
    if seconds[0] < 1:
        seconds = [once()]
        while sum(seconds) < 0.1 and len(seconds) < 1000:
            seconds.append(once())
    return 1e3 * statistics.median(seconds)


def workload(row):
    """What computes the row's attention once."""

    def random(rows, heads):
        x = torch.randn(row["batch"], rows, heads, row["d"], dtype=DTYPES[row["dtype"]])
        return x.transpose(1, 2)  # torch wants (batch, heads, seqlen, dim); strides may be any

    k, v = random(row["sk"], row["hk"]), random(row["sk"], row["hk"])
    if row["sq"] == 1:
        # The q heads of a kv head as query rows: the same attention, and no copies of k and v.
        q = random(row["hq"] // row["hk"], row["hk"])
    elif row["hq"] == row["hk"]:
        q = random(row["sq"], row["hq"])
    else:
        sys.exit("torch_sdpa.py: grouped heads with several queries are not in the grid")
    if row["pass"] != "backward":
        return lambda: sdpa(q, k, v, is_causal=row["causal"])
    for x in (q, k, v):
        x.requires_grad_(True)
    out = sdpa(q, k, v, is_causal=row["causal"])
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def measure(rows):
    """Median ms of each row; the rows take turns."""
    runs = [workload(row) for row in rows]
    times = [[] for _ in rows]
    for _ in range(ROUNDS):
        for row, run, ms in zip(rows, runs, times):
            torch.set_num_threads(row["threads"])
            ms.append(burst_ms(run))
    return [statistics.median(ms) for ms in times]


def replace(path, text):
    """Writes with the file, then renames: it is never half there."""
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", help="a file that `fulgur bench --json` wrote")
    path = parser.parse_args().json
    try:
        with open(path) as file:
            report = json.load(file)
        rows = report["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"torch_sdpa.py: {path}: {error!r}; want a file of `fulgur bench --json`")
    report["machine"]["torch"] = torch.__version__
    print(f"torch {torch.__version__}\n{'':<52} {'fulgur ms':>10} {'torch ms':>10}")
    for row, row["torch_ms"] in zip(rows, measure(rows)):
        row["fulgur_speedup"] = row["torch_ms"] / row["ms"]
        mask = "causal" if row["causal"] else "full"
        name = (
            f"{row['pass']} {row['dtype']} {row['sq']}x{row['sk']} heads {row['hq']}/{row['hk']}"
            f" d {row['d']} {mask} threads {row['threads']}"
        )
        print(
            f"{name:<52} {row['ms']:>10.3f} {row['torch_ms']:>10.3f}"
            f" {row['fulgur_speedup']:>6.2f}x",
            flush=True,
        )
    replace(path, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
