"""The calls that a GPU report measures, and tensors for them."""

import dataclasses

import torch

DEVICE = "cuda"


@dataclasses.dataclass(frozen=True)
class Case:
    """A call in bf16. With `lengths` it is of packed sequences, else of `batch` sequences of s rows."""

    batch: int
    s: int  # rows of a sequence, of the longest where they are packed
    heads: int
    d: int
    dv: int
    causal: bool
    kv_heads: int = 0  # 0: as many as heads
    window: int = -1  # keys that a row of a causal call sees before its own; -1: all
    deterministic: bool = False
    lengths: tuple = ()

    @property
    def hk(self):
        return self.kv_heads or self.heads

    def shape(self, tensor):
        """Of a tensor, by the name that the C API has for it."""
        rows = (sum(self.lengths),) if self.lengths else (self.batch, self.s)
        if tensor == "lse":
            return (self.heads, *rows) if self.lengths else (self.batch, self.heads, self.s)
        if tensor in ("cu_seqlens_q", "cu_seqlens_k"):
            return (len(self.lengths) + 1,)
        heads = self.hk if tensor in ("k", "v", "dk", "dv") else self.heads
        return (*rows, heads, self.dv if tensor in ("v", "dv", "out", "dout") else self.d)

    def visible(self):
        """Scores that are seen, of a head; a causal call counts as half of a full one."""

        def of_sequence(n):
            hidden = max(0, n - self.window) ** 2 / 2 if self.window >= 0 else 0
            return (n * n / 2 if self.causal else n * n) - hidden

        return sum(map(of_sequence, self.lengths)) if self.lengths else self.batch * of_sequence(self.s)

    def flops(self, backward):
        """Of the products S and O, or S, dP, dQ, dK and dV: with d = dv the second is 2.5 times the first."""
        per_score = 6 * self.d + 4 * self.dv if backward else 2 * (self.d + self.dv)
        return float(self.heads) * self.visible() * per_score

    def row(self):
        """What a report says of it: of packed sequences `s` is the longest."""
        row = dataclasses.asdict(self) | {"kv_heads": self.hk}
        return {**row, "batch": len(self.lengths) or self.batch, "lengths": list(self.lengths)}

    def __str__(self):
        heads = f"{self.heads}" if self.hk == self.heads else f"{self.heads}/{self.hk}"
        rows = f"packed {self.lengths}" if self.lengths else f"batch {self.batch} S {self.s}"
        options = [f"window {self.window}"] * (self.window >= 0) + ["deterministic"] * self.deterministic
        return " ".join([rows, f"heads {heads} d {self.d} dv {self.dv}", "causal" if self.causal else "full", *options])


def empty(case, *names):
    """Tensors by name, full of NaN: what is not written is found."""
    return {name: torch.full(case.shape(name), float("nan"), device=DEVICE,
                             dtype=torch.float32 if name == "lse" else torch.bfloat16) for name in names}


def inputs(case, generator):
    """q, k, v and dout from the standard normal distribution, and where sequences are packed their starts."""
    tensors = {name: torch.randn(case.shape(name), device=DEVICE, generator=generator, dtype=torch.bfloat16)
               for name in ("q", "k", "v", "dout")}
    if case.lengths:
        starts = torch.tensor((0, *case.lengths), device=DEVICE).cumsum(0, dtype=torch.int32)
        tensors |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    return tensors
