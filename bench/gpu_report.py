#!/usr/bin/env python3
"""Times fulgur on a GPU with PyTorch's SDPA, FlashAttention-3 and -4 where they are installed, and a
cuBLAS product, in one run, and measures the errors of gradients; decode calls with FlashAttention-3, FlashInfer and
cuDNN's frontend, those that are installed, and what calls of PyTorch cost the host.

    python3 bench/gpu_report.py --library libfulgur.so --json docs/performance/h200.json.gz

bf16, inputs from the standard normal distribution: a grid of 16k tokens with a hidden size of 2048, and
shapes off it, of the forward and of the backward pass. All candidates of a shape take turns in bursts (25 ms
a burst, 15 rounds; backward 15 ms, 9 rounds), as the card's clock moves with its load; a burst is one CUDA
graph, so that the host has no part in it, or a loop where a peer cannot be captured, which the report says.
The order is random in every round, as the load before a burst moves the clock too (by up to 5%); the median
burst counts. A peer whose results differ from fulgur's is not timed; where none agrees, the report ends.
Needs torch; fulgur is called through its C API, but for the part `host`, which imports fulgur.torch.
"""

import argparse
import datetime
import json
import pathlib
import random
import statistics
import subprocess
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
import gpu_decode  # noqa: E402
import gpu_decode_codes  # noqa: E402
import gpu_decode_peers  # noqa: E402
import gpu_errors  # noqa: E402
import gpu_host  # noqa: E402
from fulgur_c import Fulgur  # noqa: E402
from gpu_case import DEVICE, Case, inputs  # noqa: E402
from gpu_peers import in_words, peers_of  # noqa: E402
from gpu_table import KERNELS  # noqa: E402
import report_file  # noqa: E402
from kernel_hash import kernel_hash  # noqa: E402

TOKENS, HIDDEN = 16384, 2048
DIMS, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
MASKS = (False, True)  # causal
SHAPES = (  # forward, off the grid: batch, S, heads, d, dv
    (1, 4096, 4, 128, 128), (1, 8192, 4, 128, 128), (1, 8192, 2, 128, 128), (1, 2048, 8, 128, 128),
    (1, 4096, 4, 64, 64), (1, 8192, 2, 64, 64), (2, 8192, 16, 192, 128),
)
PACKED = {"packed, 512 to 8k": (8192, 4096, 2048, 1024, 512, 512), "packed, 16 of 896, 16 of 128": (896, 128) * 16}
BACKWARD_SHAPES = {  # likewise, by what is special about them
    "grouped heads": [Case(1, s, heads, 128, 128, causal, kv_heads=8)
                      for heads in (64, 32) for s in (4096, 8192) for causal in MASKS],
    **{what: [Case(1, max(lengths), HIDDEN // d, d, d, causal, lengths=lengths) for d in (64, 128) for causal in MASKS]
       for what, lengths in PACKED.items()},
    "other dims": [Case(2, 8192, heads, d, dv, causal)
                   for heads, d, dv in ((25, 80, 80), (21, 96, 96), (16, 192, 128)) for causal in MASKS],
    "window": [Case(1, 16384, 16, 128, 128, True, window=4096)],
    "deterministic": [*(Case(2, 8192, HIDDEN // d, d, d, causal, deterministic=True) for d in DIMS for causal in MASKS),
                      *(Case(1, 8192, heads, 128, 128, True, kv_heads=8, deterministic=True) for heads in (64, 32))],
    "few heads": [Case(1, s, heads, 128, 128, causal) for s, heads in ((4096, 4), (8192, 2)) for causal in MASKS],
    "one head of k and v": [Case(1, s, heads, 128, 128, causal, kv_heads=1)
                            for s, heads in ((4096, 8), (8192, 8), (8192, 64)) for causal in MASKS],
}
PARTS = tuple(KERNELS)
GEMM = 8192
BURSTS = {"forward": (25, 15), "backward": (15, 9)}  # milliseconds, rounds
MOST_DIFFERENCE = {"forward": 0.02, "backward": 0.03}  # from a peer, of the norm of what it gives


def milliseconds(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def graph_of(run, count):
    """A function that launches `count` runs, recorded as one CUDA graph: the host has no part in their time."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # The outer one: a capture that fails may leave another stream current.
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            run()
    return graph.replay


def loop_of(run, count):
    def loop():
        for _ in range(count):
            run()

    return loop


def turns(candidates, burst_ms, rounds):
    """Median milliseconds of each candidate, and why some could not be captured. Each has run before."""
    bursts, counts, loops = {}, {}, {}
    for name, run in candidates.items():
        burst_of = graph_of
        try:
            once = burst_of(run, 3)
        except RuntimeError as error:
            if name == "fulgur":
                raise  # ours can be
            loops[name] = in_words(error)
            burst_of = loop_of
            once = burst_of(run, 3)
        once()
        counts[name] = max(1, round(3 * burst_ms / milliseconds(once)))
        bursts[name] = burst_of(run, counts[name])
        bursts[name]()
    times = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in random.sample(list(candidates), len(candidates)):
            times[name].append(milliseconds(bursts[name]) / counts[name])
    return {name: statistics.median(t) for name, t in times.items()}, loops


def difference(ours, theirs):
    """The largest |ours - theirs| / |theirs| (2-norms) of some pairs of tensors."""
    pairs = [(x.float(), y.float()) for x, y in zip(ours, theirs)]
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


def as_tuple(results):
    return results if isinstance(results, (tuple, list)) else (results,)


class Bench:
    """Measures cases of a pass."""

    def __init__(self, fulgur, which, generator, others):
        self.fulgur, self.which, self.generator = fulgur, which, generator
        self.peers, self.installed = peers_of(which)
        self.others = others  # what is no attention, by name: function and flops

    def ours(self, case, tensors):
        """Our pass, and its results as tensors."""
        run, results = self.fulgur.prepared("forward", case, tensors)
        run()
        if self.which == "forward":
            return run, (results["out"],)
        run, grads = self.fulgur.prepared("backward", case, tensors | results)
        run()
        return run, tuple(grads.values())

    def row(self, case):
        tensors = inputs(case, self.generator)
        run, results = self.ours(case, tensors)
        candidates, lacking, differences = {"fulgur": run}, {}, {}
        for name, peer in self.peers.items():
            try:
                other = peer(case, tensors)
                differences[name] = difference(results, as_tuple(other()))
            except (RuntimeError, ValueError) as error:
                lacking[name] = in_words(error)
                continue
            if differences[name] < MOST_DIFFERENCE[self.which]:
                candidates[name] = other
            else:
                lacking[name] = f"differs by {differences[name]}"
        if differences and len(candidates) == 1:
            sys.exit(f"gpu_report.py: {self.which}, {case}: no peer agrees: {differences}")
        row = {**case.row(), "difference_from": differences, "lacking": lacking}
        flops = dict.fromkeys(candidates, case.flops(self.which == "backward"))
        for name, (run, count) in self.others.items():
            candidates[name], flops[name] = run, count
        times, row["not_captured"] = turns(candidates, *BURSTS[self.which])
        for name, ms in times.items():
            row[f"{name}_tflops"] = flops[name] / ms / 1e9
        row["sm_mhz"] = int(smi("clocks.sm"))
        speeds = ", ".join(f"{k[:-7]} {v:.0f}" for k, v in row.items() if k.endswith("_tflops"))
        words = [f"{name}: {why}" for name, why in {**lacking, **row["not_captured"]}.items()]
        print("; ".join([f"{self.which}, {case}: {speeds}", *words]), flush=True)
        return row

    def rows(self, cases):
        return [self.row(case) for case in cases]


def smi(field):
    return subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"], check=True,
                          capture_output=True, text=True).stdout.splitlines()[0].strip()


def forward_report(fulgur, grid, generator):
    a, b = (torch.randn(GEMM, GEMM, device=DEVICE, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    a @ b  # cuBLAS allocates, which a capture does not allow
    bench = Bench(fulgur, "forward", generator, {"gemm": (lambda: a @ b, 2.0 * GEMM**3)})
    shapes = [Case(*shape, causal) for shape in SHAPES for causal in MASKS]
    fulgur.compile(("forward", case) for case in [*grid, *shapes])
    return {"peers": bench.installed, "results": bench.rows(grid),
            "shapes": bench.rows(shapes)}


def backward_report(fulgur, grid, generator):
    bench = Bench(fulgur, "backward", generator, {})
    every = [*grid, *(case for cases in BACKWARD_SHAPES.values() for case in cases)]
    fulgur.compile((which, case) for case in every for which in ("forward", "backward"))
    return {"peers": bench.installed, "results": bench.rows(grid),
            "shapes": [{"what": what, **row} for what, cases in BACKWARD_SHAPES.items() for row in bench.rows(cases)]}


def errors_report(fulgur, generator):
    fulgur.compile((which, case) for case in gpu_errors.cases() for which in ("forward", "backward"))
    return gpu_errors.error_rows(fulgur, peers_of("backward")[0].get("flash3"), generator)


def decode_report(fulgur, generator):
    return [gpu_decode.row(fulgur, case, generator, difference, turns) for case in gpu_decode.CASES]


def decode_codes_report(fulgur, generator):
    return [gpu_decode_codes.row(fulgur, case, generator, difference, turns) for case in gpu_decode_codes.CASES]


def decode_grid_report(fulgur, generator, seed, seconds):
    return gpu_decode.grid_rows(fulgur, seed, seconds, generator, difference, turns)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfulgur.so")
    parser.add_argument("--json", required=True, help="the report to write")
    parser.add_argument("--d", type=int, nargs="+", default=DIMS)
    parser.add_argument("--s", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "decode_grid"])
    parser.add_argument("--seed", type=int, default=0, help="of the order of decode_grid")
    parser.add_argument("--seconds", type=float, default=480, help="that decode_grid may take")
    parser.add_argument("--add", action="store_true", help="to the report that is there")
    parser.add_argument("--wheel", help="for the part host: fulgur's, of which the seconds to a result are measured")
    parser.add_argument("--checks", help="a file of `name: result` lines to keep in the report: tests, sanitizers")
    args = parser.parse_args()
    fulgur, generator = Fulgur(args.library), torch.Generator(DEVICE)
    grid = [Case(TOKENS // s, s, HIDDEN // d, d, d, causal) for d in args.d for s in args.s for causal in MASKS]
    report = {
        "dates": {},  # of each part
        "gpu": torch.cuda.get_device_name(),
        "driver": smi("driver_version"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fulgur": fulgur.version(),
        "kernels": {},  # of each part, their hash
        "checks": pathlib.Path(args.checks).read_text().splitlines() if args.checks else [],
    }
    if args.add:
        there = report_file.read(args.json)
        if there["gpu"] != report["gpu"]:
            sys.exit(f"gpu_report.py: --json: got a report of {there['gpu']} to add to, want one of {report['gpu']}")
        report = there | {"checks": report["checks"] or there["checks"]}
    report["kernels"] |= {part: kernel_hash(*KERNELS[part]) for part in args.parts}
    report["dates"] |= dict.fromkeys(args.parts, datetime.date.today().isoformat())
    if args.checks:
        report["checks_of"] = kernel_hash()
    # One stream for all: PyTorch computes gradients on the stream of the forward pass, which is to be captured.
    with torch.cuda.stream(torch.cuda.Stream()):
        if "host" in args.parts:  # the first, as the package may be missing
            report["host"] = gpu_host.report(DEVICE, args.wheel)
        if "forward" in args.parts:
            report |= forward_report(fulgur, grid, generator)
        if "backward" in args.parts:
            report["backward"] = backward_report(fulgur, grid, generator)
        if "errors" in args.parts:
            report["errors"] = errors_report(fulgur, generator)
        if "decode" in args.parts:
            report["decode"] = decode_report(fulgur, generator)
            report["decode_peers"] = gpu_decode_peers.versions()
        if "decode_codes" in args.parts:
            report["decode_codes"] = decode_codes_report(fulgur, generator)
        if "decode_grid" in args.parts:
            report["decode_grid"] = decode_grid_report(fulgur, generator, args.seed, args.seconds)
    report_file.write(args.json, report)


if __name__ == "__main__":
    main()
