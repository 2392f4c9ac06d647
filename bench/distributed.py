#!/usr/bin/env python3
"""Attention over several processes, on the GPUs of a machine or on its CPU: a table for numbers of ranks.

    bench/distributed.py --ranks 1,2,4,8                    # 32k to 512k tokens, 32/8 and 64/8 heads, both passes
    bench/distributed.py --device cpu --ranks 1,2 --lengths 1k --json distributed.json
    bench/distributed.py --simulate 64 --lengths 1m         # the share of some ranks of 64, on one device

Each number of ranks is a run of as many processes, a GPU each. A row has the time of a call, its TFLOP/s a rank (a
causal call counts as half of a full one), how many times faster than one device it is, and what the model of
`fulgur explain --ranks` expects of it: the share of what one device took in the same run, and what the model says of
waiting. `invariant` calls are compared with one device's bits. A peer whose result is another one than fulgur's is not
timed.

Ways: `gather` fetches keys by heads, `heads` exchanges heads for rows (Ulysses), `2d` does both. fulgur has no ring;
`ring` is ring-flash-attention's zigzag one, on the module flash_attn that is installed, or on PyTorch's own build of
FlashAttention-2's kernels, `ring_fulgur` the same on fulgur's, and `torch` and `torch_fulgur` are PyTorch's
context_parallel likewise.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARDING = {True: "zigzag", False: "contiguous"}  # of causal calls and of full ones
# TFLOP/s of an H100, of 8, of 64 query and 8 key heads of 128 columns: MagiAttention's charts, forward and backward.
PUBLISHED = {
    "MagiAttention": (645, 529),
    "TransformerEngine, ring": (421, 432),
    "all-gather": (600, 516),
    "Ulysses": (600, 582),
    "USP": (593, 572),
}
PUBLISHED_CASE = dict(heads=64, kv_heads=8, d=128, causal=True, ranks=8)


@dataclasses.dataclass(frozen=True)
class Case:
    s: int
    heads: int
    kv_heads: int
    d: int
    causal: bool
    backward: bool

    def flops(self):
        """Of the products S and O, or of S, dP, dQ, dK and dV."""
        scores = self.heads * self.s**2 / (2 if self.causal else 1)
        return scores * self.d * (10 if self.backward else 4)

    def __str__(self):
        mask, way = "causal" if self.causal else "full", "backward" if self.backward else "forward"
        return f"{way} {mask} {self.s} tokens, {self.heads}/{self.kv_heads} heads d {self.d}"


# ------------------------------------------------------------------------------------------- a rank


class Rank:
    """What one process measures."""

    def __init__(self, args):
        self.args = args
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = args.device == "cuda"
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.cuda else "gloo", device_id=self.device if self.cuda else None)
        self.dtype = torch.bfloat16
        self.after = lambda: None  # what is called when a row is measured

    def whole(self, case, name):
        """A tensor of all rows, the same on all ranks."""
        heads = case.kv_heads if name in ("k", "v") else case.heads
        generator = torch.Generator(self.device).manual_seed(ord(name[0]))
        return torch.randn(1, case.s, heads, case.d, device=self.device, dtype=self.dtype, generator=generator)

    def own(self, case):
        """(q, k, v, dout) of the rows of this rank."""
        from fulgur.distributed import rows_of

        rows = torch.from_numpy(rows_of(SHARDING[case.causal], case.s, self.size, self.rank)).to(self.device)
        return [self.whole(case, name)[:, rows].contiguous() for name in ("q", "k", "v", "out")]

    def seconds(self, run):
        """Median of some calls, which all ranks begin together."""
        times = []
        run()
        while True:
            self.wait()
            start = time.perf_counter()
            run()
            if self.cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            # All ranks count alike: by the slowest one of each call.
            times[-1] = self.slowest(times[-1])
            if len(times) >= 20 or sum(times) >= self.args.seconds:
                return statistics.median(times)

    def slowest(self, value):
        value = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return value.item()

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def fulgur(self, case, head_ranks, **options):
        """A function that makes a call of fulgur, and what it last returned."""
        from fulgur import distributed as fd

        q, k, v, dout = self.own(case)
        how = dict(group=dist.group.WORLD, sharding=SHARDING[case.causal], head_ranks=head_ranks, causal=case.causal,
                   **options)  # fmt: skip
        if not case.backward:
            return lambda: (fd.attention(q, k, v, **how),)
        out, lse = fd.attention(q, k, v, return_lse=True, **how)
        return lambda: fd.attention_backward(dout, q, k, v, out, lse, **how)

    def one_device(self, case, **options):
        import fulgur

        q, k, v, dout = (self.whole(case, name) for name in ("q", "k", "v", "out"))
        if not case.backward:
            return lambda: (fulgur.attention(q, k, v, causal=case.causal, **options),)
        out, lse = fulgur.attention(q, k, v, causal=case.causal, return_lse=True, **options)
        return lambda: fulgur.attention_backward(dout, q, k, v, out, lse, causal=case.causal, **options)

    def ring(self, case, own_kernels=False):
        """What fails, fails on all ranks before they send anything."""
        if not case.causal:
            raise ValueError("its zigzag is for causal calls")
        if not (self.cuda or own_kernels):
            raise ValueError("FlashAttention's kernels are for GPUs")
        return self.by_autograd(case, *self.own(case), ring_attention(own_kernels))

    def ring_fulgur(self, case):
        return self.ring(case, True)

    def torch(self, case, implementation=None):
        """PyTorch's context_parallel, of SDPA."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not self.cuda:
            raise ValueError("it has no SDPA of CPUs")
        mesh = dist.device_mesh.init_device_mesh(self.args.device, (self.size,))
        # It shares out buffers of all rows; keys get as many heads as queries have.
        q, k, v, dout = (self.whole(case, name) for name in ("q", "k", "v", "out"))
        k, v = (x.repeat_interleave(case.heads // case.kv_heads, 2) for x in (k, v))
        buffers = [q, k, v, dout]
        stack = contextlib.ExitStack()
        if implementation is not None:
            import fulgur.torch  # noqa: F401

            torch.nn.attention.activate_flash_attention_impl(implementation)
            stack.callback(torch.nn.attention.restore_flash_attention_impl)
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 4))
        self.after = stack.close
        *inputs, dout = buffers

        def attention(*x):
            # By the name in its module, which context_parallel replaces: SDPA itself sees the own rows alone.
            heads = (t.transpose(1, 2) for t in x)
            return functional.scaled_dot_product_attention(*heads, is_causal=case.causal).transpose(1, 2)

        return self.by_autograd(case, *inputs, dout, attention)

    def torch_fulgur(self, case):
        """The same with fulgur as PyTorch's flash attention."""
        return self.torch(case, "fulgur")

    @staticmethod
    def by_autograd(case, q, k, v, dout, attention):
        if not case.backward:
            def forward():
                with torch.no_grad():
                    return (attention(q, k, v),)

            return forward
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)

    def same_bits(self, case, head_ranks):
        """Whether an `invariant` call has the bits of one device."""
        from fulgur.distributed import rows_of

        rows = torch.from_numpy(rows_of(SHARDING[case.causal], case.s, self.size, self.rank)).to(self.device)
        want = self.one_device(case, invariant=True)()
        got = self.fulgur(case, head_ranks, invariant=True)()
        return self.slowest(float(any(not torch.equal(x, y[:, rows]) for x, y in zip(got, want)))) == 0

    def check(self, case, run):
        """Raises where what a peer computes, out or dq, is not what fulgur does."""
        got, want = run()[0], self.fulgur(case, 1)()[0]
        off = ((got - want).abs().max() / want.abs().max()).item()
        if not self.slowest(off) <= 0.03:
            raise ValueError(f"its result is off by {off:.2f} of the largest element")

    def measure(self):
        ways = {"gather": 1, "heads": self.size, "2d": 2}
        for case in cases_of(self.args):
            for way in self.args.ways:
                head_ranks = ways.get(way)
                if self.size == 1 and way != "gather":
                    continue
                if head_ranks and (case.kv_heads % head_ranks or (way == "2d" and self.size % 4)):
                    continue
                row = dataclasses.asdict(case) | {"ranks": self.size, "way": way}
                try:
                    if self.size == 1:
                        run = self.one_device(case)
                    elif head_ranks:
                        run = self.fulgur(case, head_ranks)
                    else:
                        run = getattr(self, way)(case)
                        self.check(case, run)
                    seconds = self.seconds(run)
                    row |= {"ms": 1e3 * seconds, "tflops": case.flops() / seconds / self.size / 1e12}
                    if head_ranks and self.size > 1:
                        if self.rank == 0:  # whose rows are printed
                            row |= predicted(self.args, case, self.size, head_ranks)
                        if case.s <= self.args.check:
                            row["same_bits"] = self.same_bits(case, head_ranks)
                except (ImportError, RuntimeError, ValueError, TypeError) as error:
                    row["missing"] = (str(error) or type(error).__name__).splitlines()[0][:200]
                run = None
                self.after()
                self.after = lambda: None
                if self.cuda:
                    torch.cuda.empty_cache()
                if self.rank == 0:
                    print(json.dumps(row), flush=True)

    def simulate(self):
        """What some ranks of many compute, on this device: its own rows stand for those of the others."""
        from fulgur import distributed as fd

        def exchange(sends, receives):
            for mine, theirs in zip(sends, receives):
                if mine.size == theirs.size:
                    theirs[:] = mine

        size = self.args.simulate
        for case in cases_of(self.args):
            if case.s % (128 * size):
                print(json.dumps({"missing": f"{case}: {size} ranks want a multiple of {128 * size} tokens"}))
                continue
            for rank in sorted({0, size // 2, size - 1}):
                group = fd.Group(exchange, rank, size)
                rows = torch.from_numpy(fd.rows_of(SHARDING[case.causal], case.s, size, rank)).to(self.device)
                q, k, v, dout = (self.whole(case, name)[:, rows].contiguous() for name in ("q", "k", "v", "out"))
                how = dict(group=group, sharding=SHARDING[case.causal], causal=case.causal)
                out, lse = fd.attention(q, k, v, return_lse=True, **how)
                if case.backward:
                    run = lambda: fd.attention_backward(dout, q, k, v, out, lse, **how)  # noqa: B023, E731
                else:
                    run = lambda: fd.attention(q, k, v, **how)  # noqa: B023, E731
                row = dataclasses.asdict(case) | {"ranks": size, "rank": rank, "ms": 1e3 * self.seconds(run)}
                row["predicted_ms"] = predicted(self.args, case, size, 1).get("model_computing_ms")
                print(json.dumps(row), flush=True)


def kernels_of_pytorch():
    """FlashAttention-2's kernels as PyTorch has them, by the names and arguments of flash_attn."""
    aten = torch.ops.aten

    def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
                alibi_slopes=None, return_softmax=False):  # fmt: skip
        out, lse, seed, _, _ = aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, causal, False, scale=softmax_scale
        )
        return out, lse, None, seed

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left=-1,
                 window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
                 rng_state=None):  # fmt: skip
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradients = aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, softmax_lse.contiguous(), None, None, q.shape[1], k.shape[1], dropout_p,
            causal, none, none, scale=softmax_scale,
        )  # fmt: skip
        for to, x in zip((dq, dk, dv), gradients):
            to.copy_(x)

    return forward, backward


def ring_attention(own_kernels):
    """ring-flash-attention's zigzag, on fulgur's kernels or on FlashAttention's."""
    import fulgur
    from fulgur.flash_attn import flash_attn_interface as ours

    sys.path.insert(0, str(ROOT / "tools"))
    from context_parallel_suite import ring_flash_attention

    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward

        theirs = _flash_attn_forward, _flash_attn_backward
    except ImportError:
        fulgur.install_as("flash_attn")  # which the module wants
    if "theirs" not in locals() or theirs[0] is ours._flash_attn_forward:
        theirs = kernels_of_pytorch()
    attention = ring_flash_attention().zigzag_ring_flash_attn_func
    module = sys.modules[attention.__module__]
    kernels = (ours._flash_attn_forward, ours._flash_attn_backward) if own_kernels else theirs
    module._flash_attn_forward, module._flash_attn_backward = kernels
    return lambda q, k, v: attention(q, k, v, causal=True)


def predicted(args, case, ranks, head_ranks):
    """The milliseconds of a call that the model expects a rank to compute and to wait."""
    command = [sys.executable, "-m", "fulgur", "explain", "--sq", case.s, "--hq", case.heads, "--hk", case.kv_heads,
               "--d", case.d, "--dtype", "bf16", "--ranks", ranks, "--link", args.link]  # fmt: skip
    command += ["--causal"] * case.causal + ["--backward"] * case.backward
    if args.device == "cuda":
        command += ["--card", args.card or ("h200" if "H200" in torch.cuda.get_device_name() else "h100")]
    else:
        command += ["--threads", torch.get_num_threads()]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode != 0:
        return {}
    way = "gather" if head_ranks == 1 else f"heads {'and gather ' if head_ranks < ranks else ''}({head_ranks} ranks)"
    line = next((x for x in done.stdout.splitlines() if x.startswith(f"  {way} ")), None)
    if line is None:
        return {}
    _, _, compute, waiting, _ = line.removeprefix(f"  {way}").split()
    return {"model_computing_ms": float(compute), "model_waiting_ms": float(waiting)}


# ---------------------------------------------------------------------------------------- the table


def cases_of(args):
    return [
        Case(s, heads, kv_heads, args.d, mask == "causal", each == "backward")
        for s in args.lengths
        for heads, kv_heads in args.heads
        for mask in args.masks
        for each in args.passes
    ]


def run_ranks(size, arguments, timeout):
    """The rows that rank 0 of so many processes prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    threads = max(1, (os.cpu_count() or 1) // size)
    processes = []
    for rank in range(size):
        given = dict(RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NCCL_NVLS_ENABLE=0,
                     TORCH_SYMM_MEM_DISABLE_MULTICAST=1, OMP_NUM_THREADS=threads)  # fmt: skip
        processes.append(subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments], env=os.environ | {k: str(v) for k, v in given.items()},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True,
        ))  # fmt: skip

    def end():
        for process in processes:
            process.kill()

    timer = threading.Timer(timeout, end)
    timer.start()
    rows = [json.loads(line) for line in processes[0].stdout if line.startswith("{")]
    if any([process.wait() for process in processes]):
        print(f"{size} ranks: a process has failed, or there was no time", file=sys.stderr)
    timer.cancel()
    return rows


def add_speedups(rows):
    key = lambda row: tuple(row[f.name] for f in dataclasses.fields(Case))  # noqa: E731
    one = {key(row): row["ms"] for row in rows if row.get("ranks") == 1 and "ms" in row}
    for row in rows:
        if "ms" not in row or "rank" in row:
            continue
        if key(row) in one:
            row["speedup"] = one[key(row)] / row["ms"]
        if "model_waiting_ms" in row:
            computing = one[key(row)] / row["ranks"] if key(row) in one else row["model_computing_ms"]
            row["predicted_ms"] = computing + row["model_waiting_ms"]


def table(rows):
    """The lines of the table, with published figures where they are of the same call."""
    lines = ["| call | ranks | way | ms | TFLOP/s a rank | times one | model, ms | off | bits |",
             "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in rows:
        if "s" not in row:
            lines.append(f"| {row['missing']} | | | | | | | | |")
            continue
        case = Case(*(row[f.name] for f in dataclasses.fields(Case)))
        way = row.get("way", f"rank {row.get('rank')} alone")
        if "missing" in row:
            lines.append(f"| {case} | {row['ranks']} | {way} | {row['missing']} | | | | | |")
            continue
        model, off, bits = row.get("predicted_ms"), "", {True: "same", False: "OTHER"}.get(row.get("same_bits"), "")
        if model:
            off = f"{row['ms'] / model - 1:+.0%}"
        numbers = [f"{row['ms']:.3f}", f"{row['tflops']:.1f}" if "tflops" in row else "",
                   f"{row['speedup']:.2f}" if "speedup" in row else "", f"{model:.3f}" if model else ""]  # fmt: skip
        lines.append(f"| {case} | {row['ranks']} | {way} | {' | '.join(numbers)} | {off} | {bits} |")
    lines += ["", "Published, of 8 H100, causal, 64/8 heads d 128, TFLOP/s a GPU, forward and backward: "
              + "; ".join(f"{who} {a}, {b}" for who, (a, b) in PUBLISHED.items()) + "."]  # fmt: skip
    return "\n".join(lines)


def number(text):
    """4096, 32k, 1m."""
    found = re.fullmatch(r"(\d+)([km]?)", text.lower())
    if not found:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a number such as 32k")
    return int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2]]


def listed(of):
    return lambda text: [of(x) for x in text.split(",")]


def heads(text):
    numbers = [int(x) for x in text.split("/")]
    return numbers[0], numbers[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--ranks", type=listed(int), default=[1, 2, 4, 8])
    add("--lengths", type=listed(number), default=[number(x) for x in ("32k", "64k", "128k", "256k", "512k")])
    add("--heads", type=listed(heads), default=[(32, 8), (64, 8)], help="of q and k: 32/8,64/8")
    add("--d", type=int, default=128)
    add("--masks", type=listed(str), default=["causal", "full"])
    add("--passes", type=listed(str), default=["forward", "backward"])
    add("--ways", type=listed(str), default=["gather", "heads", "2d", "ring", "ring_fulgur", "torch", "torch_fulgur"])
    add("--check", type=number, default=number("32k"), help="the longest call whose bits are compared")
    add("--link", default=None, help="as of fulgur explain; of GPUs 386e9,14us, of processes of a CPU 5e9,50us")
    add("--card", help="that the model is of; by default the device's")
    add("--seconds", type=float, default=0.5, help="of calls that are timed, of a row")
    add("--timeout", type=float, default=1200, help="seconds of a number of ranks")
    add("--simulate", type=int, help="the share of some ranks of so many, on one device")
    add("--json", type=pathlib.Path)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.link = args.link or ("386e9,14us" if args.device == "cuda" else "5e9,50us")
    if args.worker:
        rank = Rank(args)
        rank.simulate() if args.simulate else rank.measure()
        dist.destroy_process_group()
        return
    arguments = [x for x in sys.argv[1:] if x != "--worker"]
    if "--device" not in arguments:
        arguments += ["--device", args.device]
    rows = []
    for size in [1] if args.simulate else args.ranks:
        if args.device == "cuda" and size > torch.cuda.device_count():
            print(f"{size} ranks: there are {torch.cuda.device_count()} GPUs", file=sys.stderr)
            continue
        rows += run_ranks(size, arguments, args.timeout)
    add_speedups(rows)
    print(table(rows))
    errors = [abs(math.log(r["ms"] / r["predicted_ms"])) for r in rows if r.get("predicted_ms") and "ms" in r]
    if errors:
        worst, middle = (math.exp(x) - 1 for x in (max(errors), statistics.median(errors)))
        print(f"\nThe model is off by {middle:.0%} in the median, by {worst:.0%} at most.")
    if args.json:
        sys.path.insert(0, str(ROOT / "tools"))
        import report_file

        device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        report_file.write(args.json, {"device": device, "link": args.link, "rows": rows})
    if any(row.get("same_bits") is False for row in rows):
        raise SystemExit("invariant calls have other bits than those of one device")


if __name__ == "__main__":
    main()
