#!/usr/bin/env python3
"""Attention over several processes, on the GPUs of a machine or on its CPU: a table for numbers of ranks.

    bench/distributed.py --ranks 1,2,4,8 --seconds 600 --write     # 32k to 512k tokens, 32/8 and 64/8 heads, both
                                                                   # passes: docs/performance/distributed.*
    bench/distributed.py --device cpu --ranks 1,2 --lengths 1k --json distributed.json
    bench/distributed.py --simulate 64 --lengths 1m                # the share of some ranks of 64, on one device

Of as many processes as the largest number of ranks, a GPU each, the first ones compute. A row has the time of a call,
its TFLOP/s a rank (a causal call counts as half of a full one), how many times faster than one device it is, and what
the model of `fulgur explain --ranks` expects of it: the share of what one device took in the same run, and what the
model says of waiting; of one device the estimate of its plan. `invariant` calls are compared with one device's bits. A
peer whose result is another one than fulgur's is not timed. In `--seconds` the rows that say most come first: one
device and gather, causal calls of middle lengths; those that there is no time for are named.

Ways: `gather` fetches keys by heads, `heads` exchanges heads for rows (Ulysses), `2d` does both, `turns` is fulgur's
ring, and `invariant` gather with the bits of one device. `ring` is ring-flash-attention's zigzag one, on the module
flash_attn that is installed, or on PyTorch's own build of FlashAttention-2's kernels, `ring_fulgur` the same on
fulgur's, and `torch` and `torch_fulgur` are PyTorch's context_parallel likewise.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
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
OURS = {  # of so many ranks, the options of a call
    "gather": lambda size: {}, "heads": lambda size: {"head_ranks": size}, "2d": lambda size: {"head_ranks": 2},
    "turns": lambda size: {"ring": True}, "invariant": lambda size: {"invariant": True},
}  # fmt: skip


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
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cuda = args.device == "cuda"
        self.device = torch.device("cuda", self.rank) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.cuda else "gloo", device_id=self.device if self.cuda else None)
        self.dtype = torch.bfloat16
        self.size, self.group = self.world, None  # use() narrows them
        self.groups, self.of_fulgur = {}, {}
        if not args.simulate:
            for size, port in zip(args.ranks, os.environ["PORTS"].split(",")):
                self.groups[size] = dist.new_group(range(size)), port
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

    def use(self, size):
        """The first ranks compute from now on."""
        self.size = size
        self.group, port = self.groups[size]
        if size not in self.of_fulgur:
            from fulgur import distributed as fd

            self.of_fulgur[size] = fd.Group.connect(self.rank, size, os.environ["MASTER_ADDR"], int(port))

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
            if len(times) >= 20 or sum(times) >= self.args.row_seconds:
                return statistics.median(times)

    def slowest(self, value):
        value = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return value.item()

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier(group=self.group)

    def fulgur(self, case, **options):
        """A function that makes a call of fulgur, and what it last returned."""
        from fulgur import distributed as fd

        q, k, v, dout = self.own(case)
        how = dict(group=self.of_fulgur[self.size], sharding=SHARDING[case.causal], causal=case.causal, **options)
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
        return self.by_autograd(case, *self.own(case), ring_attention(own_kernels, self.group))

    def ring_fulgur(self, case):
        return self.ring(case, True)

    def torch(self, case, implementation=None):
        """PyTorch's context_parallel, of SDPA."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn import functional
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if not self.cuda:
            raise ValueError("it has no SDPA of CPUs")
        mesh = dist.device_mesh.DeviceMesh.from_group(self.group, self.args.device)
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

    def same_bits(self, case, options):
        """Whether an `invariant` call has the bits of one device."""
        from fulgur.distributed import rows_of

        rows = torch.from_numpy(rows_of(SHARDING[case.causal], case.s, self.size, self.rank)).to(self.device)
        want = self.one_device(case, invariant=True)()
        got = self.fulgur(case, **options | {"invariant": True})()
        return self.slowest(float(any(not torch.equal(x, y[:, rows]) for x, y in zip(got, want)))) == 0

    def check(self, case, run):
        """Raises where what a peer computes, out or dq, is not what fulgur does."""
        got, want = run()[0], self.fulgur(case)()[0]
        off = ((got - want).abs().max() / want.abs().max()).item()
        if not self.slowest(off) <= 0.03:
            raise ValueError(f"its result is off by {off:.2f} of the largest element")

    def measure(self):
        self.until = time.time() + self.args.seconds
        for case, size, way in rows_of_table(self.args):
            row = dataclasses.asdict(case) | {"ranks": size, "way": way}
            if not self.has_time(case, size):
                row["missing"] = "no time"
            elif self.rank < size:
                self.use(size)
                row |= self.measured(case, way)
            if self.rank == 0:
                print(json.dumps(row), flush=True)
            dist.barrier()

    def has_time(self, case, size):
        """Whether rank 0 has, for a first call, one that is timed and some more."""
        rate = 500e12 if self.cuda else 50e9
        seconds = 3 * case.flops() / rate / size + self.args.row_seconds
        has = torch.tensor(float(time.time() + seconds < self.until), device=self.device)
        dist.broadcast(has, 0)
        return has.item() == 1

    def measured(self, case, way):
        found = {}
        try:
            if way == "one":
                run = self.one_device(case)
            else:
                ours = way in OURS
                run = self.fulgur(case, **OURS[way](self.size)) if ours else getattr(self, way)(case)
                if case.s <= self.args.check and (way == "turns" or not ours):
                    self.check(case, run)
            seconds = self.seconds(run)
            found |= {"ms": 1e3 * seconds, "tflops": case.flops() / seconds / self.size / 1e12}
            if way in OURS and way != "turns" and case.s <= self.args.check:
                found["same_bits"] = self.same_bits(case, OURS[way](self.size))
        except (ImportError, RuntimeError, ValueError, TypeError) as error:
            found["missing"] = (str(error) or type(error).__name__).splitlines()[0][:200]
        run = None
        self.after()
        self.after = lambda: None
        if self.cuda:
            torch.cuda.empty_cache()
        return found

    def simulate(self):
        """What some ranks of many compute, on this device: its own rows stand for those of the others."""
        from fulgur import distributed as fd

        size = self.args.simulate
        for case in cases_of(self.args):
            if case.s % (128 * size):
                print(json.dumps({"missing": f"{case}: {size} ranks want a multiple of {128 * size} tokens"}))
                continue
            for rank in sorted({0, size // 2, size - 1}):
                group = fd.Group.simulated(rank, size)
                rows = torch.from_numpy(fd.rows_of(SHARDING[case.causal], case.s, size, rank)).to(self.device)
                q, k, v, dout = (self.whole(case, name)[:, rows].contiguous() for name in ("q", "k", "v", "out"))
                how = dict(group=group, sharding=SHARDING[case.causal], causal=case.causal)
                out, lse = fd.attention(q, k, v, return_lse=True, **how)
                if case.backward:
                    run = lambda: fd.attention_backward(dout, q, k, v, out, lse, **how)  # noqa: B023, E731
                else:
                    run = lambda: fd.attention(q, k, v, **how)  # noqa: B023, E731
                seconds = self.seconds(run)
                row = dataclasses.asdict(case) | {"ranks": size, "rank": rank, "ms": 1e3 * seconds}
                row["tflops"] = case.flops() / seconds / size / 1e12
                row["predicted_ms"] = predicted(self.args, case, size, "gather").get("model_computing_ms")
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


def ring_attention(own_kernels, group):
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
    return lambda q, k, v: attention(q, k, v, causal=True, group=group)


def rows_of_table(args):
    """(case, ranks, way), those that say most first."""
    importance = {"one": 0, "gather": 0, "heads": 2, "2d": 2, "turns": 2, "invariant": 3, "ring": 4, "ring_fulgur": 4,
                  "torch_fulgur": 5, "torch": 6}
    middle = 1 << 17
    rows = []
    for at, case in enumerate(cases_of(args)):
        longer = case.s.bit_length() - middle.bit_length()
        rank = (3 * longer if longer > 0 else -longer) + 2 * (not case.causal)
        for size in args.ranks:
            for way in ["one"] if size == 1 else args.ways:
                head_ranks = OURS.get(way, OURS["gather"])(size).get("head_ranks", 1)
                if case.kv_heads % head_ranks == 0 and (way != "2d" or size % 4 == 0):
                    rows.append((rank + importance[way], at, case, size, way))
    return [row[2:] for row in sorted(rows, key=lambda row: row[:2])]


def predicted(args, case, ranks, way):
    """The milliseconds of a call that the model expects a rank to compute and to wait."""
    head_ranks = OURS.get(way, OURS["gather"])(ranks).get("head_ranks", 1)
    command = [sys.executable, "-m", "fulgur", "explain", "--sq", case.s, "--hq", case.heads, "--hk", case.kv_heads,
               "--d", case.d, "--dtype", "bf16", "--ranks", ranks, "--link", args.link]  # fmt: skip
    command += ["--causal"] * case.causal + ["--backward"] * case.backward + ["--invariant"] * (way == "invariant")
    if args.device == "cuda":
        command += ["--card", args.card or ("h200" if "H200" in torch.cuda.get_device_name() else "h100")]
    else:
        command += ["--threads", torch.get_num_threads()]
    if ranks == 1:
        command = command[: command.index("--ranks")] + command[command.index("--link") + 2 :] + ["--json"]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode != 0:
        return {}
    if ranks == 1:
        estimate = json.loads(done.stdout).get("estimate_us")
        return {"model_computing_ms": estimate / 1e3, "model_waiting_ms": 0} if estimate else {}
    if way in ("turns", "ring_fulgur"):
        way = "ring"
    elif head_ranks == 1:  # gather, and the same with invariant
        way = "gather"
    else:
        way = f"heads {'and gather ' if head_ranks < ranks else ''}({head_ranks} ranks)"
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


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def run_ranks(args, arguments):
    """The rows that rank 0 of the processes prints."""
    size = 1 if args.simulate else max(args.ranks)
    port, *ports = free_ports(1 + len(args.ranks))
    threads = max(1, (os.cpu_count() or 1) // size)
    processes = []
    for rank in range(size):
        given = dict(RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                     PORTS=",".join(map(str, ports)), NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1,
                     OMP_NUM_THREADS=threads)  # fmt: skip
        processes.append(subprocess.Popen(
            [sys.executable, __file__, "--worker", *arguments], env=os.environ | {k: str(v) for k, v in given.items()},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True,
        ))  # fmt: skip

    def end():
        for process in processes:
            process.kill()

    timer = threading.Timer(args.seconds + 120, end)  # and to begin with
    timer.start()
    rows = [json.loads(line) for line in processes[0].stdout if line.startswith("{")]
    if any([process.wait() for process in processes]):
        print("a process has failed, or there was no time", file=sys.stderr)
    timer.cancel()
    return rows


def case_of(row):
    return Case(*(row[f.name] for f in dataclasses.fields(Case)))


def add_model(args, rows):
    """To rows of fulgur's kernels what the model expects, to all how many times faster than one device they are."""
    one = {case_of(row): row["ms"] for row in rows if row.get("way") == "one" and "ms" in row}
    of_fulgur = [row for row in rows if row.get("way") in {"one", *OURS, "ring_fulgur"} and "ms" in row]

    def model(row):
        found = predicted(args, case_of(row), row["ranks"], row["way"])
        if row["way"] == "invariant" and found:
            fast = predicted(args, case_of(row), row["ranks"], "gather")
            found["model_slower"] = found["model_computing_ms"] / fast["model_computing_ms"]
        return found

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        for row, found in zip(of_fulgur, threads.map(model, of_fulgur)):
            row |= found
    for row in rows:
        if "ms" not in row or "rank" in row:
            continue
        case = case_of(row)
        if case in one:
            row["speedup"] = one[case] / row["ms"]
        if row.get("way") == "one" and "model_computing_ms" in row:
            row["predicted_ms"] = row["model_computing_ms"]
        elif "model_waiting_ms" in row and case in one:
            share = one[case] / row["ranks"] * row.get("model_slower", 1)
            row["predicted_ms"] = share + row["model_waiting_ms"]


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
    add("--ways", type=listed(str), default=[*OURS, "ring", "ring_fulgur", "torch", "torch_fulgur"])
    add("--check", type=number, default=number("32k"), help="the longest call whose bits are compared")
    add("--link", default=None, help="as of fulgur explain; of GPUs 386e9,14us, of processes of a CPU 5e9,50us")
    add("--card", help="that the model is of; by default the device's")
    add("--row-seconds", type=float, default=0.3, help="of calls that are timed, of a row")
    add("--seconds", type=float, default=1200, help="of all rows, once the processes have met")
    add("--simulate", type=int, help="the share of some ranks of so many, on one device")
    add("--json", type=pathlib.Path, help="the report to write, which tools/distributed_table.py --write takes, too")
    add("--write", action="store_true", help="take the report as docs/performance/distributed.*")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.link = args.link or ("386e9,14us" if args.device == "cuda" else "5e9,50us")
    if args.worker:
        rank = Rank(args)
        rank.simulate() if args.simulate else rank.measure()
        dist.destroy_process_group()
        return
    if args.device == "cuda":
        here = torch.cuda.device_count()
        for size in args.ranks:
            if size > here:
                print(f"{size} ranks: there are {here} GPUs", file=sys.stderr)
        args.ranks = [size for size in args.ranks if size <= here]
    arguments = [*sys.argv[1:], "--device", args.device, "--ranks", ",".join(map(str, args.ranks))]
    rows = run_ranks(args, arguments)
    add_model(args, rows)
    import fulgur

    sys.path.insert(0, str(ROOT / "tools"))
    import distributed_table
    import report_file

    report = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "date": datetime.date.today().isoformat(), "torch": torch.__version__, "fulgur": fulgur.__version__,
        "link": args.link, "rows": rows,
    }  # fmt: skip
    print(distributed_table.markdown(report))
    if args.json:
        report_file.write(args.json, report)
    if args.write:
        distributed_table.take(report)
    if any(row.get("same_bits") is False for row in rows):
        raise SystemExit("invariant calls have other bits than those of one device")


if __name__ == "__main__":
    main()
