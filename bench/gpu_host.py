"""What calls of PyTorch cost the host: fulgur.torch with PyTorch's SDPA and FlashAttention-3, in microseconds.

bf16 and causal, of shapes so small that the device waits for the host; no time has a wait for the device in it. `calls`
are those whose shape was seen before, medians of some thousand in groups, for which the candidates take turns.
`lengths` are first calls, each of a length that its process has not seen, after one of another length: they include
what is compiled or planned for each shape. `zeros` is what PyTorch costs without attention. With a wheel,
`seconds` are those from this file to results (tools/try_wheel.py).
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from gpu_peers import flash3_module, in_words
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from try_wheel import seconds

BATCH, S, HEADS, D = 2, 64, 2, 64
LENGTHS = range(300, 321)
CALLS, ROUNDS = 1000, 3
BURST = 200  # calls that the queue of a device takes without a wait
GROUP = 20  # calls that are timed as one: a look at the clock may take as long as a call


@dataclasses.dataclass(frozen=True)
class Caller:
    call: Callable  # of q, k and v
    backend: SDPBackend | None = None  # of PyTorch's SDPA, where heads come before rows

    def tensors(self, s, device, grad):
        shape = (BATCH, s, HEADS, D) if self.backend is None else (BATCH, HEADS, s, D)
        return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]

    def chosen(self):
        """A context in which calls mean the backend."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


class Zeros(torch.autograd.Function):
    """What PyTorch costs alone: results of each pass that are filled with zeros, a kernel for each."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.zeros_like(q)

    @staticmethod
    def backward(ctx, dout):
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def callers():
    """By the names of gpu_table.py; FlashAttention-3 where its own Python functions are installed."""
    from fulgur.torch import attention

    def sdpa(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    every = {
        "fulgur": Caller(lambda q, k, v: attention(q, k, v, causal=True)),
        "cudnn": Caller(sdpa, SDPBackend.CUDNN_ATTENTION),
        "flash2": Caller(sdpa, SDPBackend.FLASH_ATTENTION),
        "zeros": Caller(lambda q, k, v: Zeros.apply(q, k, v) if q.requires_grad else torch.zeros_like(q)),
    }
    flash3 = getattr(flash3_module("backward"), "flash_attn_func", None)
    if flash3:
        every["flash3"] = Caller(lambda q, k, v: flash3(q, k, v, causal=True))
    return every


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def micros(run):
    """Of one call, and what it returns."""
    start = time.perf_counter()
    result = run()
    return 1e6 * (time.perf_counter() - start), result


def burst(run, device, calls):
    """Microseconds a call of groups of calls, as many as have `calls`."""

    def group():
        for _ in range(GROUP):
            run()

    times = []
    for done in range(0, calls, GROUP):
        if done % BURST == 0:
            wait(device)
        times.append(micros(group)[0] / GROUP)
    wait(device)
    return times


def seen(caller, device):
    """What is called again and again, by what it is."""
    q, k, v = caller.tensors(S, device, grad=False)
    leaves = caller.tensors(S, device, grad=True)
    out = caller.call(*leaves)
    dout = torch.ones_like(out)
    return {
        "a call": lambda: caller.call(q, k, v),
        "a call, recorded": lambda: caller.call(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def of_calls(runs, every, device, calls):
    """Medians of `runs` by what they are and by caller; the first burst of each warms up."""
    times = {what: {name: [] for name in runs} for what in next(iter(runs.values()))}
    for turn in range(ROUNDS + 1):
        for what, by_name in times.items():
            for name in runs:
                with every[name].chosen():
                    spent = burst(runs[name][what], device, calls)
                by_name[name] += spent if turn > 0 else []
    return {what: {name: statistics.median(us) for name, us in by_name.items()} for what, by_name in times.items()}


def of_lengths(caller, device, lengths):
    """Of the first calls of each length but the first of them, by pass."""
    times = {"forward": [], "backward": []}
    with caller.chosen():
        for s in lengths:
            leaves = caller.tensors(s, device, grad=True)
            wait(device)
            forward, out = micros(lambda: caller.call(*leaves))
            dout = torch.ones_like(out)
            wait(device)
            backward, _ = micros(lambda: torch.autograd.grad(out, leaves, dout))
            times["forward"].append(forward)
            times["backward"].append(backward)
    return {which: spent[1:] for which, spent in times.items()}


def cpu_name():
    with open("/proc/cpuinfo") as info:
        return next((line.partition(": ")[2].strip() for line in info if line.startswith("model name")), "unknown")


def report(device, wheel=None, calls=CALLS, lengths=LENGTHS):
    """The part `host` of a report; a caller that lacks something is left out, and why is said."""
    every, runs, first, lacking = callers(), {}, {}, {}
    for name, caller in every.items():
        try:
            with caller.chosen():
                runs[name] = seen(caller, device)
            first[name] = of_lengths(caller, device, lengths)
        except (RuntimeError, ValueError) as error:
            if name == "fulgur":
                raise
            runs.pop(name, None)
            lacking[name] = in_words(error)
    part = {
        "device": device, "cpu": cpu_name(), "batch": BATCH, "s": S, "heads": HEADS, "d": D,
        "calls": of_calls(runs, every, device, calls), "lengths": first, "lacking": lacking,
    }  # fmt: skip
    for what, by_name in part["calls"].items():
        print(f"host, {what}: {', '.join(f'{name} {us:.1f} us' for name, us in by_name.items())}", flush=True)
    for name, passes in first.items():
        said = ", ".join(f"{which} {statistics.median(us):.1f} us, at most {max(us):.1f}"
                         for which, us in passes.items())
        print(f"host, a new length, {name}: {said}", flush=True)
    for name, why in lacking.items():
        print(f"host, {name}: {why}", flush=True)
    return part if wheel is None else part | {"seconds": seconds(wheel, device)}
