#!/usr/bin/env python3
"""Times fulgur's forward pass on a GPU beside PyTorch's SDPA, FlashAttention-3 where its Python
package is installed, and a cuBLAS product, in one run.

    python3 bench/gpu_report.py --library libfulgur.so --json docs/performance/h200.json

bf16, inputs from the standard normal distribution: a grid of 16k tokens with a hidden size of 2048, and
shapes off it: too few heads for every multiprocessor, value heads of another size. All candidates of a
shape take turns in bursts (25 ms a burst, 15 rounds), as the card's clock moves with its load; a burst
is one CUDA graph, so that the host has no part in it. The order of every round is drawn anew, as the
load before a burst moves it too (by up to 5%); the median burst counts. Results of fulgur are compared
with cuDNN's before they are timed. Needs torch; fulgur is called through its C API.
"""

import argparse
import ctypes
import datetime
import importlib
import json
import pathlib
import random
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))
from kernel_hash import kernel_hash  # noqa: E402

TOKENS, HIDDEN = 16384, 2048
DIMS, LENGTHS = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384)
SHAPES = (  # batch, S, heads, d, dv
    (1, 4096, 4, 128, 128), (1, 8192, 4, 128, 128), (1, 8192, 2, 128, 128), (1, 2048, 8, 128, 128),
    (1, 4096, 4, 64, 64), (1, 8192, 2, 64, 64), (2, 8192, 16, 192, 128),
)
GEMM = 8192
BURST_MS, ROUNDS = 25, 15
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
FLASH3 = ("flash_attn_interface", "fa3_fwd_interface")  # modules: built from its sources, from PyPI


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


def dl(t):
    """A DLTensor of a CUDA tensor; it refers to the tensor's memory."""
    codes = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32)}
    dims = ctypes.c_int64 * t.dim()
    return DLTensor(t.data_ptr(), 2, t.device.index, t.dim(), *codes[t.dtype], 1, dims(*t.shape),
                    dims(*t.stride()), 0)


class Struct(ctypes.Structure):
    """A struct of include/fulgur/c.h: its size first, then all 0 but what is given."""

    def __init__(self, **given):
        super().__init__(struct_size=ctypes.sizeof(self), **given)


def fields(*names, of=ctypes.c_void_p):
    return [(name, of) for name in names]


class Options(Struct):
    _fields_ = [
        *fields("struct_size", of=ctypes.c_size_t),
        *fields("window_left", "window_right", of=ctypes.c_int64), *fields("scale"),
        *fields("softcap", "dropout_p", of=ctypes.c_double), *fields("max_seqlen_q", "max_seqlen_k", of=ctypes.c_int64),
        *fields("deterministic", "invariant", "threads", of=ctypes.c_int), *fields("engine", of=ctypes.c_char_p),
    ]


class ForwardArgs(Struct):
    _fields_ = [
        *fields("struct_size", of=ctypes.c_size_t), *fields("q", "k", "v", "out", "lse"),
        *fields("alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"),
    ]


class Run(Struct):
    _fields_ = [
        *fields("struct_size", of=ctypes.c_size_t), *fields("stream", "workspace"),
        *fields("workspace_bytes", of=ctypes.c_int64), *fields("dropout_seed", "dropout_offset", of=ctypes.c_uint64),
    ]


class Fulgur:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.fulgur_last_error.restype = ctypes.c_char_p
        self.lib.fulgur_version.restype = ctypes.c_char_p

    def version(self):
        return self.lib.fulgur_version().decode()

    def forward(self, q, k, v, causal):
        """A function that computes into the tensors (out, lse), which it returns."""
        out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), device=q.device, dtype=q.dtype)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), device=q.device)
        tensors = [dl(t) for t in (q, k, v, out, lse)]
        names = ("q", "k", "v", "out", "lse")
        args = ForwardArgs(**{name: ctypes.addressof(t) for name, t in zip(names, tensors)})
        options = Options(window_left=-1, window_right=0 if causal else -1, engine=b"cuda")
        stream = Run()
        arguments = [ctypes.byref(s) for s in (args, options, stream)]

        def run():
            stream.stream = torch.cuda.current_stream().cuda_stream
            if self.lib.fulgur_forward(*arguments) != 0:
                sys.exit(f"gpu_report.py: {self.lib.fulgur_last_error().decode()}")
            return out, lse

        run.keep = (tensors, args, options, stream)
        return run


def find_flash3():
    """The first of FLASH3 that is installed; None, and a word about it, if none is."""
    for name in FLASH3:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    print(f"no FlashAttention-3: python3 has none of {', '.join(FLASH3)}", flush=True)
    return None


def milliseconds(run):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def graph_of(run, count):
    """A function that launches `count` runs, recorded as one CUDA graph: the host has no part in their time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph.replay


def turns(candidates):
    """Median milliseconds of each candidate."""
    bursts, counts = {}, {}
    for name, run in candidates.items():
        run()
        once = graph_of(run, 3)
        once()
        counts[name] = max(2, round(3 * BURST_MS / milliseconds(once)))
        bursts[name] = graph_of(run, counts[name])
        bursts[name]()
    times = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name in random.sample(list(candidates), len(candidates)):
            times[name].append(milliseconds(bursts[name]) / counts[name])
    return {name: statistics.median(t) for name, t in times.items()}


def cell(fulgur, flash3, shape, causal, gemm):
    batch, s, heads, d, dv = shape
    q, k, v = (torch.randn(batch, s, heads, width, device="cuda", dtype=torch.bfloat16) for width in (d, d, dv))
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]

    def peer(backend):
        def run():
            with sdpa_kernel(backend):
                return sdpa(*heads_first, is_causal=causal)

        return run

    ours = fulgur.forward(q, k, v, causal)
    candidates = {"fulgur": ours, **{name: peer(b) for name, b in PEERS.items()}, "gemm": gemm}
    if d != dv:
        del candidates["flash2"]  # PyTorch's takes one head size
    if flash3:
        candidates["flash3"] = lambda: flash3.flash_attn_func(q, k, v, causal=causal)
    difference = (ours()[0].float() - candidates["cudnn"]().transpose(1, 2).float()).abs().max().item()
    if not difference < 0.05:
        sys.exit(f"gpu_report.py: {name(shape, causal)}: differs from cuDNN by {difference}")
    flops = 2.0 * batch * heads * s * s * (d + dv) / (2 if causal else 1)
    row = {"batch": batch, "s": s, "heads": heads, "d": d, "dv": dv, "causal": causal,
           "difference_from_cudnn": difference}
    for candidate, ms in turns(candidates).items():
        row[f"{candidate}_tflops"] = (2.0 * GEMM**3 if candidate == "gemm" else flops) / ms / 1e9
    row["sm_mhz"] = int(smi("clocks.sm"))
    speeds = ", ".join(f"{k[:-7]} {v:.0f}" for k, v in row.items() if k.endswith("_tflops"))
    print(f"{name(shape, causal)}: {speeds}", flush=True)
    return row


def name(shape, causal):
    batch, s, heads, d, dv = shape
    return f"batch {batch} S {s} heads {heads} d {d} dv {dv} {'causal' if causal else 'full'}"


def smi(field):
    return subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"], check=True,
                          capture_output=True, text=True).stdout.splitlines()[0].strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfulgur.so")
    parser.add_argument("--json", required=True, help="the report to write")
    parser.add_argument("--d", type=int, nargs="+", default=DIMS)
    parser.add_argument("--s", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--checks", help="a file of `name: result` lines to keep in the report: tests, sanitizers")
    args = parser.parse_args()
    fulgur, flash3 = Fulgur(args.library), find_flash3()
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def gemm():
        return a @ b

    def cells(shapes):
        return [cell(fulgur, flash3, shape, causal, gemm) for shape in shapes for causal in (False, True)]

    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": smi("driver_version"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flash3": flash3.__name__ if flash3 else None,
        "fulgur": fulgur.version(),
        "kernels_sha256": kernel_hash(),
        "checks": pathlib.Path(args.checks).read_text().splitlines() if args.checks else [],
        "results": cells((TOKENS // s, s, HIDDEN // d, d, d) for d in args.d for s in args.s),
        "shapes": cells(SHAPES),
    }
    pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
