"""Times calls with score_mod and mask_mod on a GPU and PyTorch's compiled flex_attention: TFLOP/s of the scores that
are seen, and with --map microseconds of the kernels that map tiles. A call has 16384 tokens, or one sequence that is
longer. Each case is a process, so that compilers run at once; they take turns at the GPU, of which the first comes when
all are ready.

    gpu_expressions.py LIBFULGUR [CASE...] [--tokens N...] [--dim D] [--deterministic] [--map]
"""

import argparse
import ctypes
import fcntl
import os
import statistics
import subprocess
import sys
import tempfile

import fulgur_c
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

ALL_TOKENS, HEADS = 16384, 16
BATCH, TOKENS, DIM = 2, 8192, 128  # of a process; the latter two unless options say otherwise
DOCUMENT, WINDOW, PREFIX = 1024, 1024, 1024
FULL, CAUSAL = -1, 0  # of window_right


def documents(ragged):
    """The document of each token."""
    generator = torch.Generator().manual_seed(1)
    if not ragged:
        return (torch.arange(TOKENS) // DOCUMENT).repeat(BATCH, 1).int()
    ends = torch.rand(BATCH, TOKENS, generator=generator) < 1 / DOCUMENT
    return ends.cumsum(1).int()


def blocks(size):
    """Which blocks of so many queries and keys are seen: a quarter of them, and those on the diagonal."""
    generator = torch.Generator().manual_seed(size)
    count = TOKENS // size
    return (torch.rand(count, count, generator=generator) < 1 / 4) | torch.eye(count, dtype=torch.bool)


def inputs(dim):
    torch.manual_seed(0)
    shape = (BATCH, TOKENS, HEADS, dim)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]


# Name: right bound, score_mod, mask_mod as text, and Flex's mods of (tensors) as functions.
CASES = {
    "full": (FULL, None, None, None, None),
    "causal": (CAUSAL, None, None, None, lambda t: lambda b, h, q, k: q >= k),
    "causal by mask_mod": (FULL, None, "delta <= 0", None, lambda t: lambda b, h, q, k: q >= k),
    "documents": (FULL, None, "doc[b, q] == doc[b, k]", None,
                  lambda t: lambda b, h, q, k: t["doc"][b, q] == t["doc"][b, k]),
    "ragged documents": (FULL, None, "doc[b, q] == doc[b, k]", None,
                         lambda t: lambda b, h, q, k: t["doc"][b, q] == t["doc"][b, k]),
    "causal documents": (CAUSAL, None, "doc[b, q] == doc[b, k]", None,
                         lambda t: lambda b, h, q, k: (t["doc"][b, q] == t["doc"][b, k]) & (q >= k)),
    "window": (FULL, None, f"delta <= 0 && delta > -{WINDOW}", None,
               lambda t: lambda b, h, q, k: (q >= k) & (q - k < WINDOW)),
    "prefix": (FULL, None, f"k < {PREFIX} || delta <= 0", None,
               lambda t: lambda b, h, q, k: (k < PREFIX) | (q >= k)),
    "ALiBi": (CAUSAL, "score - slope[h] * abs(delta)", None,
              lambda t: lambda s, b, h, q, k: s - t["slope"][h] * (q - k).abs(),
              lambda t: lambda b, h, q, k: q >= k),
    "softcap": (CAUSAL, "30.0 * tanh(score / 30.0)", None,
                lambda t: lambda s, b, h, q, k: 30 * torch.tanh(s / 30), lambda t: lambda b, h, q, k: q >= k),
    "softcap documents": (FULL, "30.0 * tanh(score / 30.0)", "doc[b, q] == doc[b, k]",
                          lambda t: lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
                          lambda t: lambda b, h, q, k: t["doc"][b, q] == t["doc"][b, k]),
} | {
    f"blocks of {size}": (FULL, None, f"blocks{size}[q // {size}, k // {size}]", None,
                          lambda t, n=size: lambda b, h, q, k: t[f"blocks{n}"][q // n, k // n])
    for size in (64, 128, 256)
}


class Binding(fulgur_c.Struct):
    _fields_ = [*fulgur_c.SIZE, ("name", ctypes.c_char_p), *fulgur_c.fields("tensor", "grad")]


def prepared(lib, which, tensors, bound, options):
    """A function that runs a pass of a plan of its own."""
    used = {name: fulgur_c.described(t.shape, t.dtype, t.data_ptr()) for name, t in tensors.items()}
    of_bound = {name: fulgur_c.described(t.shape, t.dtype, t.data_ptr()) for name, t in bound.items()}
    bindings = (Binding * max(len(bound), 1))(*[
        Binding(name=name.encode(), tensor=ctypes.addressof(t)) for name, t in of_bound.items()])
    args, kept = fulgur_c.filled(fulgur_c.ARGS[which], {name: ctypes.addressof(t) for name, t in used.items()})
    args.tensors, args.tensor_count = ctypes.addressof(bindings), len(bound)
    plan, need = ctypes.c_void_p(), fulgur_c.WorkspaceNeed()
    lib.call(f"fulgur_plan_{which}", ctypes.byref(args), ctypes.byref(options), ctypes.byref(plan))
    lib.call("fulgur_plan_workspace", plan, ctypes.byref(need))
    workspace = torch.zeros(need.bytes, dtype=torch.uint8, device="cuda")
    settings = fulgur_c.Run(workspace=workspace.data_ptr(), workspace_bytes=need.bytes,
                            stream=torch.cuda.current_stream().cuda_stream)

    def run():
        lib.call(f"fulgur_plan_run_{which}", plan, ctypes.byref(args), ctypes.byref(settings))

    run.keep = (workspace, used, of_bound, bindings, kept, tensors, bound)
    return run


def milliseconds(run):
    for _ in range(3):
        run()
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 5)
    return statistics.median(times)


def map_microseconds(run):
    """From the begin of the first kernel that maps tiles to the end of the last one, as they start before each other's
    ends: the least of some runs, which are launched while others run."""
    runs = 8
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    ranges = sorted((e.time_range for e in profile.events()
                     if any(name in e.name for name in ("fused_map", "node_hulls", "tile_map", "map_of_rows"))),
                    key=lambda r: r.start)
    count = len(ranges) // runs
    return min((ranges[i + count - 1].end - ranges[i].start for i in range(0, len(ranges), count or 1)), default=0)


def measure(library, name, lock, deterministic, maps):
    """Of one case, when no process uses the GPU any more to prepare its own."""
    with open(lock, "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)
        case = prepare(library, name, deterministic)
        torch.cuda.synchronize()
        fcntl.flock(turn, fcntl.LOCK_EX)
        report(name, maps, *case)


def block_mask_of(mask, size):
    """Flex's lists of blocks, and how many scores are seen, without a tensor of all scores."""
    keys, some, whole, seen = torch.arange(TOKENS, device="cuda"), [], [], 0
    for first in range(0, TOKENS, size):
        rows = torch.arange(first, first + size, device="cuda")[:, None]
        shown = torch.stack([mask(b, 0, rows, keys[None]).expand(size, TOKENS) for b in range(BATCH)])
        blocks = shown.view(BATCH, size, TOKENS // size, size)
        some.append(blocks.any(3).any(1))
        whole.append(blocks.all(3).all(1))
        seen += shown.sum()
    some, whole = torch.stack(some, 1)[:, None], torch.stack(whole, 1)[:, None]
    lists = []
    for blocks in (some & ~whole, whole):
        lists += [blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=mask), seen.item()


def prepare(library, name, deterministic):
    """What report() takes: our passes, out, gradients, those of Flex, and how many scores are seen."""
    right, score_mod, mask_mod, flex_score, flex_mask = CASES[name]
    q, k, v, dout = inputs(DIM)
    known = {"doc": documents("ragged" in name).cuda(),
             "slope": torch.exp2(-torch.arange(1, HEADS + 1, device="cuda") / 2).float(),
             **{f"blocks{size}": blocks(size).cuda() for size in (64, 128, 256)}}
    bound = {n: t for n, t in known.items() if any(n + "[" in (text or "") for text in (score_mod, mask_mod))}
    out, lse = torch.empty_like(q), torch.empty(BATCH, HEADS, TOKENS, device="cuda")
    grads = {n: torch.empty_like(q) for n in ("dq", "dk", "dv")}
    options = fulgur_c.Options(window_left=-1, window_right=right, engine=b"cuda", deterministic=deterministic,
                               score_mod=score_mod and score_mod.encode(), mask_mod=mask_mod and mask_mod.encode())
    lib = fulgur_c.Fulgur(library)
    qkv = {"q": q, "k": k, "v": v}
    ours = {"forward": prepared(lib, "forward", qkv | {"out": out, "lse": lse}, bound, options),
            "backward": prepared(lib, "backward", qkv | {"dout": dout, "out": out, "lse": lse} | grads, bound, options)}
    size = int(name.split()[-1]) if name.startswith("blocks") else 128
    block_mask, seen = block_mask_of(flex_mask(known), size) if flex_mask else (None, BATCH * TOKENS**2)
    heads_first = [x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(flex_attention, dynamic=False)
    scored = flex_score and flex_score(known)
    flex = lambda: compiled(*heads_first, score_mod=scored, block_mask=block_mask)  # noqa: E731
    with torch.no_grad():
        flex()  # which is another graph
    y = flex()
    torch.autograd.grad(y, heads_first, dout.transpose(1, 2), retain_graph=True)
    backward = lambda: torch.autograd.grad(y, heads_first, dout.transpose(1, 2), retain_graph=True)  # noqa: E731
    return ours, (out, grads), (flex, y, backward), seen


def report(name, maps, ours, results, peer, seen):
    (out, grads), (flex, y, backward) = results, peer
    cells = []
    for which, run in ours.items():
        flops = seen * HEADS * DIM * {"forward": 4, "backward": 10}[which]
        mine = milliseconds(run)
        with torch.no_grad() if which == "forward" else torch.enable_grad():
            theirs = milliseconds(flex if which == "forward" else backward)
        cells.append(f"{flops / mine / 1e9:.0f} | {flops / theirs / 1e9:.0f} | {theirs / mine:.2f}")
        if maps:
            cells.append(f"{map_microseconds(run):.1f} of {1e3 * mine:.0f} us")
    pairs = [(out, y), *zip(grads.values(), backward())]
    worst = max(((a.float() - b.transpose(1, 2).float()).norm() / b.float().norm()).item() for a, b in pairs)
    print(f"| {name} | {BATCH} x {TOKENS} | {' | '.join(cells)} | {worst:.4f} |", flush=True)


def main():
    global BATCH, TOKENS, DIM
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--tokens", type=int, nargs="+", default=[TOKENS])
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--map", action="store_true")
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()
    if args.lock:
        TOKENS, DIM = args.tokens[0], args.dim
        BATCH = max(1, ALL_TOKENS // TOKENS)
        return measure(args.library, args.cases[0], args.lock, args.deterministic, args.map)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: {HEADS} heads, d {args.dim}, bf16"
          f"{', deterministic' * args.deterministic}")
    of_map = " | map" * args.map
    of_pass = f"Flex | ratio{of_map}"
    print(f"| case | tokens | forward | {of_pass} | backward | {of_pass} | difference from Flex |", flush=True)
    with tempfile.NamedTemporaryFile() as lock:
        jobs = [subprocess.Popen([sys.executable, __file__, args.library, "--tokens", str(tokens), "--dim",
                                  str(args.dim), *["--deterministic"] * args.deterministic, *["--map"] * args.map,
                                  "--lock", lock.name, name],
                                 env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"})
                for tokens in args.tokens for name in args.cases or CASES]
        return max(job.wait() for job in jobs)


if __name__ == "__main__":
    sys.exit(main())
