#!/usr/bin/env python3
"""Trains a GPT on the Python standard library's source, with one attention or several in turns.

    examples/train_gpt.py curves --size tiny --seqlen 128 --batch 8 --steps 60   # minutes on a CPU
    examples/train_gpt.py curves --size 124M --seqlen 1024 --batch 16 --steps 300 --attn fulgur,math
    examples/train_gpt.py speed --size 1.3B --seqlen 8192 --batch 1
    torchrun --nproc-per-node 2 examples/train_gpt.py curves --attn fulgur --seqlen 1024 --context-parallel
    examples/train_gpt.py report

`curves` trains one model after the other, from the same weights on the same batches, and prints
their losses side by side. `speed` trains one model whose attention changes every few steps, so that
all are measured on the same clock, and prints tokens per second, TFLOP/s and MFU. `report` makes
docs/performance/training.json.gz of both, for an H100 or H200, and its table and pictures; shapes that
are in the file already are kept, so that it may be stopped and started again.

With --context-parallel every process of torchrun has a part of each sequence, and all have the whole
model: only attention, the loss and the gradients of the weights go from one to another.

Model FLOPs are those of FlashAttention-2's paper (section 4.2): 6 s N + 12 L h s^2 for a sequence
of s tokens, N parameters, L layers and a hidden size of h; a causal mask does not halve them.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import sysconfig
import time

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZES = {  # layers, hidden size, heads, vocabulary
    "tiny": (2, 128, 4, 256),
    "124M": (12, 768, 12, 50304),  # GPT-2's and GPT-3's shapes; of the vocabulary 256 are used
    "1.3B": (24, 2048, 16, 50304),
    "2.7B": (32, 2560, 32, 50304),
    "2.7B-d128": (32, 2560, 20, 50304),
}
PEAK_TFLOPS = 989  # of H100 and H200 in bf16


# Attention: q, k, v (batch, seqlen, heads, dim) -> out, causal.


def with_fulgur():
    from fulgur.torch import attention

    return lambda q, k, v: attention(q, k, v, causal=True)


def with_ranks():
    from fulgur.distributed import attention

    group = distributed.group.WORLD
    return lambda q, k, v: attention(q, k, v, group=group, sharding="zigzag", causal=True)


def with_sdpa(*backends):
    def attend(q, k, v):
        choice = sdpa_kernel(list(backends)) if backends else contextlib.nullcontext()
        with choice:
            heads = (x.transpose(1, 2) for x in (q, k, v))
            out = functional.scaled_dot_product_attention(*heads, is_causal=True)
            return out.transpose(1, 2)

    return attend


def with_flash(module):
    function = importlib.import_module(module).flash_attn_func
    return lambda q, k, v: function(q, k, v, causal=True)


ATTENTION = {
    "fulgur": with_fulgur,
    "sdpa": with_sdpa,  # what PyTorch chooses
    "cudnn": lambda: with_sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: (
        with_flash("flash_attn")
        if importlib.util.find_spec("flash_attn")
        else with_sdpa(SDPBackend.FLASH_ATTENTION)  # PyTorch's own build of it
    ),
    "fa3": lambda: with_flash("flash_attn_interface"),
    "math": lambda: with_sdpa(SDPBackend.MATH),
}


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.proj(attend(q, k, v).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size, seqlen):
        super().__init__()
        self.layers, self.hidden, heads, vocabulary = SIZES[size]
        self.tokens = nn.Embedding(vocabulary, self.hidden)
        self.places = nn.Embedding(seqlen, self.hidden)
        self.blocks = nn.ModuleList(Block(self.hidden, heads) for _ in range(self.layers))
        self.norm = nn.LayerNorm(self.hidden)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text, run, rows):
        """What these rows of each sequence add to the mean loss of the next token; `run` calls a block."""
        x = self.tokens(text[:, :-1][:, rows]) + self.places.weight[rows]
        for block in self.blocks:
            x = run(block, x)
        logits = self.norm(x) @ self.tokens.weight.T
        targets = text[:, 1:]
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets[:, rows].flatten(), reduction="sum")
        return losses / targets.numel()

    def flops(self, seqlen):
        """Of a training step on one sequence."""
        parameters = sum(p.numel() for p in self.parameters())
        return 6 * seqlen * parameters + 12 * self.layers * self.hidden * seqlen**2


def standard_library():
    """The bytes of Python's own modules."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


class Training:
    """A model, its optimizer and its batches: the same for every attention."""

    def __init__(self, args):
        torch.manual_seed(1)
        self.args, self.text = args, standard_library()
        with torch.device(args.device):
            self.model = GPT(args.size, args.seqlen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=args.device == "cuda")
        self.places = torch.Generator().manual_seed(2)
        self.runs = {}  # for each attention, how it calls a block
        self.rows = slice(None)
        if args.context_parallel:
            from fulgur.distributed import rows_of

            ranks, rank = distributed.get_world_size(), distributed.get_rank()
            self.rows = torch.from_numpy(rows_of("zigzag", args.seqlen, ranks, rank)).to(args.device)

    def batch(self):
        high = len(self.text) - self.args.seqlen - 1
        starts = torch.randint(high, (self.args.batch,), generator=self.places).tolist()
        rows = [self.text[i : i + self.args.seqlen + 1] for i in starts]
        return torch.stack(rows).long().to(self.args.device)

    def run_of(self, name):
        if name not in self.runs:
            attend = with_ranks() if self.args.context_parallel else ATTENTION[name]()
            run = lambda block, x: block(x, attend)  # noqa: E731
            self.runs[name] = torch.compile(run) if self.args.compile else run  # once for all blocks
        return self.runs[name]

    def step(self, name):
        with torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.bf16):
            loss = self.model(self.batch(), self.run_of(name), self.rows)
        loss.backward()
        loss = loss.detach()
        if self.args.context_parallel:
            for x in (loss, *(p.grad for p in self.model.parameters())):
                distributed.all_reduce(x)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


def wait(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def free(args):
    torch.compiler.reset()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def memory(args):
    return torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None


def shape_of(args):
    return {"size": args.size, "seqlen": args.seqlen, "batch": args.batch}


def curves(args):
    """Losses of each attention, from the same start."""
    results = []
    for name in args.attn:
        free(args)
        entry = {**shape_of(args), "attn": name}
        try:
            training, losses = Training(args), []
            losses.append(training.step(name))  # which compiles
            wait(args)
            start = time.perf_counter()
            for _ in range(args.steps - 1):
                losses.append(training.step(name))
            wait(args)
            seconds = (time.perf_counter() - start) / max(1, args.steps - 1)
            losses = [round(x, 5) for x in torch.stack(losses).tolist()]
            entry |= {"ms": 1e3 * seconds, "memory_gib": memory(args), "losses": losses}
            print(f"{name:7} {1e3 * seconds:8.1f} ms a step, loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
        except (torch.OutOfMemoryError, ImportError) as error:
            entry["missing"] = "out of memory" if isinstance(error, torch.OutOfMemoryError) else "not installed"
            print(f"{name:7} {entry['missing']}", flush=True)
        training = None
        results.append(entry)
    return results


def speed(args):
    """Times of each attention, in turns."""
    free(args)
    training, times, missing, most = Training(args), {name: [] for name in args.attn}, {}, {}
    for turn in range(args.turns + 1):  # the first one compiles
        for name in args.attn:
            if name in missing:
                continue
            try:
                if args.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                training.step(name)
                wait(args)
                start = time.perf_counter()
                for _ in range(args.steps):
                    training.step(name)
                wait(args)
                if turn > 0:
                    times[name].append((time.perf_counter() - start) / args.steps)
                most[name] = memory(args)
            except (torch.OutOfMemoryError, ImportError) as error:
                out = isinstance(error, torch.OutOfMemoryError)
                missing[name] = "out of memory" if out else "not installed"
                training.optimizer.zero_grad(set_to_none=True)
                if out:
                    torch.cuda.empty_cache()
    results = []
    for name in args.attn:
        entry = {**shape_of(args), "attn": name}
        if name in missing:
            entry["missing"] = missing[name]
            print(f"{name:7} {missing[name]}", flush=True)
        else:
            seconds = statistics.median(times[name])
            tflops = args.batch * training.model.flops(args.seqlen) / seconds / 1e12
            entry |= {
                "ms": 1e3 * seconds, "tokens_per_second": args.batch * args.seqlen / seconds,
                "tflops": tflops, "mfu": tflops / PEAK_TFLOPS if args.device == "cuda" else None,
                "memory_gib": most[name],
            }  # fmt: skip
            mfu = f", MFU {entry['mfu']:.1%}" if entry["mfu"] else ""
            print(f"{name:7} {entry['ms']:8.1f} ms a step, {entry['tokens_per_second']:9.0f} tokens/s, "
                  f"{tflops:7.3f} TFLOP/s{mfu}", flush=True)
        results.append(entry)
    return results


def report(args, result, keep):
    """Both, of the shapes that the page shows; `keep` is called after each."""

    def add(kind, measure, size, seqlen, batch, steps, attn, lr=2e-4):
        shape = {"size": size, "seqlen": seqlen, "batch": batch}
        if any(shape.items() <= entry.items() for entry in result[kind]):
            return
        print(f"\n{kind}: {size}, {seqlen} tokens, batch {batch}", flush=True)
        changes = shape | {"steps": steps, "attn": attn, "lr": lr}
        result[kind] += measure(argparse.Namespace(**{**vars(args), **changes}))
        keep()

    every = ["fulgur", "fa3", "cudnn", "fa2", "math"]
    for size, seqlen, batch in (
        ("1.3B", 2048, 4), ("1.3B", 8192, 1), ("1.3B", 8192, 2), ("2.7B", 2048, 4), ("2.7B", 8192, 1),
        ("124M", 32768, 1)
    ):  # fmt: skip
        add("speed", speed, size, seqlen, batch, 4, every)
    for seqlen, batch, steps in ((1024, 32, 300), (8192, 2, 150)):
        add("curves", curves, "124M", seqlen, batch, steps, ["fulgur", "math"], 6e-4)
    for seqlen, batch in ((2048, 4), (8192, 1)):
        add("speed", speed, "2.7B-d128", seqlen, batch, 4, every)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "speed", "report"))
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60, help="of training; of a turn with speed")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--attn", default="fulgur,math", help=f"some of {','.join(ATTENTION)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile; default on CUDA")
    parser.add_argument("--context-parallel", action="store_true", help="of the processes of torchrun, with fulgur")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    parser.add_argument("--note", help="what the page says besides")
    args = parser.parse_args()
    args.attn = args.attn.split(",")
    if unknown := [name for name in args.attn if name not in ATTENTION]:
        parser.error(f"--attn: got {unknown[0]}, want some of {', '.join(ATTENTION)}")
    if args.context_parallel:
        if args.attn != ["fulgur"] or args.what == "report":
            parser.error("--context-parallel: want curves or speed with --attn fulgur")
        distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
        if args.device == "cuda":
            torch.cuda.set_device(distributed.get_rank() % torch.cuda.device_count())
        if distributed.get_rank() > 0:  # the first one reports
            sys.stdout = open(os.devnull, "w")
            args.json = None
    args.bf16 = args.device == "cuda"
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    torch.set_float32_matmul_precision("high")
    if args.what == "report" and args.json is None:
        args.json = ROOT / "docs/performance/training.json.gz"
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    result = {"device": device, "dtype": "bf16" if args.bf16 else "f32", "torch": torch.__version__,
              "date": str(datetime.date.today()), "curves": [], "speed": []}  # fmt: skip

    if args.json is not None:
        sys.path.insert(0, str(ROOT / "tools"))
        import report_file
        from training_table import write

    def keep():
        if args.json is None:
            return
        report_file.write(args.json, result)
        write(args.json)

    if args.what == "report":
        if args.json.exists():
            result |= {k: v for k, v in report_file.read(args.json).items() if k in ("curves", "speed", "note")}
        if args.note:
            result["note"] = args.note
        report(args, result, keep)
    else:
        result[args.what] = {"curves": curves, "speed": speed}[args.what](args)
        keep()


if __name__ == "__main__":
    main()
