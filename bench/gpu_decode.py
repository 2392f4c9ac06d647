"""Decode calls that a GPU report measures: few query tokens with caches, fulgur and its peers in turns.

A burst goes through copies of the cache that are together larger than L2, so that every call reads memory. Bytes are
exact: live K and V, q and out.
"""

import concurrent.futures
import ctypes
import dataclasses
import itertools
import random
import time

import torch
from fulgur_c import ForwardArgs, Options, Run, WorkspaceNeed, described, filled
from gpu_case import DEVICE
from gpu_decode_peers import PEERS

COLD_BYTES = 120_000_000  # of the copies of a cache, more than any L2
MOST_DIFFERENCE = 0.02  # of a peer from us, of the norm of what it gives


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """A call in bf16, causal: `queries` new tokens of each sequence, which are the last of its keys."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    d: int = 128
    queries: int = 1
    page: int = 0  # keys of a page, in random order; 0: contiguous
    lengths: tuple = ()  # of the sequences, `keys` the longest; empty: all have `keys`
    prefix: int = 0  # so many first keys, whole pages, are those of the first sequence
    sinks: bool = False
    tree: bool = False  # the queries are a binary tree of drafts

    def used(self):
        return self.lengths or (self.keys,) * self.batch

    def bytes(self):
        shared = self.prefix * (self.batch - 1)
        of_keys = 2 * (sum(self.used()) - shared) * self.kv_heads
        return 2 * self.d * (of_keys + 2 * self.batch * self.queries * self.heads)

    def tensors(self, generator):
        """q, k, v, seqused_k and, with pages, page_table and the shared prefix, by the C API's names."""

        def normal(*shape):
            return torch.randn(shape, device=DEVICE, generator=generator, dtype=torch.bfloat16)

        used = torch.tensor(self.used(), device=DEVICE, dtype=torch.int32)
        tensors = {"q": normal(self.batch, self.queries, self.heads, self.d), "seqused_k": used}
        if self.sinks:
            tensors["sinks"] = normal(self.heads).float()
        if self.tree:
            seen = [0]
            for token in range(self.queries):
                seen.append(seen[(token + 1) // 2] | 1 << token)  # what its parent sees, and itself
            tensors["tree_mask"] = torch.tensor([seen[1:]] * self.batch, device=DEVICE)
        rows = (self.batch, self.keys)
        if self.page:
            counts = [-(-n // self.page) for n in self.used()]
            rows = (sum(counts), self.page)
            pages = torch.randperm(rows[0], device=DEVICE, generator=generator).to(torch.int32).split(counts)
            tensors["page_table"] = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
        if self.prefix:
            ints = {"device": DEVICE, "dtype": torch.int32}
            tensors["page_table"][:, : self.prefix // self.page] = tensors["page_table"][0, : self.prefix // self.page]
            tensors["prefix_groups"] = torch.tensor([0, self.batch], **ints)
            tensors["prefix_lens"] = torch.tensor([self.prefix], **ints)
        return tensors | {name: normal(*rows, self.kv_heads, self.d) for name in ("k", "v")}


CASES = (
    *(DecodeCase(batch, keys, 32, 8) for batch, keys in
      ((1, 1024), (1, 8192), (1, 131072), (8, 8192), (64, 8192), (256, 1024))),
    DecodeCase(1, 8192, 8, 1), DecodeCase(64, 4096, 28, 4), DecodeCase(64, 4096, 32, 32),
    DecodeCase(64, 8192, 64, 8, d=64), DecodeCase(32, 8192, 16, 8, d=256),
    *(DecodeCase(64, 8192, 32, 8, page=page) for page in (16, 64, 256)),
    DecodeCase(64, 8192 + 256, 32, 8, page=16, prefix=8192),
    DecodeCase(64, 131072, 32, 8, page=64, lengths=(131072, *(1024,) * 63)),
    DecodeCase(4, 45118, 32, 8, page=64, lengths=(4641, 45118, 1730, 1696)),
    DecodeCase(64, 8192, 64, 8, queries=4), DecodeCase(8, 8192, 64, 8, queries=4),
    *(DecodeCase(batch, keys, 64, 8, queries=4) for batch, keys in ((4, 8192), (1, 1024), (1, 8192), (1, 131072))),
    DecodeCase(4, 45118, 64, 8, queries=4, page=64, lengths=(4641, 45118, 1730, 1696)),
    *(DecodeCase(batch, keys, 32, 8, queries=16) for batch, keys in ((4, 8192), (1, 1024), (1, 8192), (1, 131072))),
    DecodeCase(1, 131072, 64, 8, queries=16),
    DecodeCase(64, 8192, 32, 8, queries=16), DecodeCase(8, 8192, 32, 8, queries=16),
    DecodeCase(64, 8192, 32, 8, queries=16, page=16),
    DecodeCase(64, 8192, 64, 8, queries=16), DecodeCase(8, 8192, 64, 8, queries=16),
    DecodeCase(64, 8192, 64, 8, queries=16, page=16), DecodeCase(64, 8192, 64, 8, queries=16, page=64),
    DecodeCase(32, 8192, 64, 8, d=64, queries=16), DecodeCase(32, 4096, 64, 8, d=256, queries=16),
    DecodeCase(64, 8192, 128, 1), DecodeCase(8, 8192, 96, 1),
    *(DecodeCase(64, 8192, 64, 8, d=64, queries=queries, sinks=True) for queries in (1, 4)),
    *(DecodeCase(batch, 8192, 64, 8, queries=16, tree=True) for batch in (8, 64)),
)

# What a server varies, each by each: heads and d, query tokens, and either sequences, keys and pages or uneven lengths.
HEADS = ((32, 8, 128), (64, 8, 128), (8, 1, 128), (32, 32, 128), (28, 4, 128), (64, 8, 64), (16, 8, 256))
BATCHES, KEYS, PAGES = (1, 4, 8, 32, 64, 128, 256), (1024, 4096, 8192, 32768, 131072), (0, 16, 64, 256)
UNEVEN = ((131072, *(1024,) * 63), (4641, 45118, 1730, 1696))
GRID = tuple(
    DecodeCase(batch, keys, *heads, queries=queries, page=page, lengths=lengths)
    for heads, queries in itertools.product(HEADS, (1, 2, 4, 16))
    for batch, keys, page, lengths in (
        *((batch, keys, page, ()) for batch, keys, page in itertools.product(BATCHES, KEYS, PAGES)),
        *((len(lengths), max(lengths), page, lengths) for page, lengths in itertools.product(PAGES[1:], UNEVEN)),
    )
)


def arguments(tensors):
    """The C API's of a call, and the descriptions that they refer to; what is bytes are names of formats."""
    formats = {name: t for name, t in tensors.items() if isinstance(t, bytes)}
    used = {name: described(t.shape, t.dtype, t.data_ptr()) for name, t in tensors.items() if name not in formats}
    args, kept = filled(ForwardArgs, {name: ctypes.addressof(t) for name, t in used.items()} | formats)
    return args, (used, kept)


def planned(fulgur, args, **more):
    """The plan of a call; `more` options by the C API's names."""
    options = Options(window_left=-1, window_right=0, engine=DEVICE.encode(), **more)
    plan = ctypes.c_void_p()
    fulgur.call("fulgur_plan_forward", ctypes.byref(args), ctypes.byref(options), ctypes.byref(plan))
    return plan


def compile_kernels(fulgur, cases):
    """In many threads: the first plan of a kind compiles its kernels. The tensors have no memory."""

    def plan(case):
        def tensor(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="meta")

        q = tensor(case.batch, case.queries, case.heads, case.d)
        rows, page_table = (case.batch, case.keys), {}
        if case.page:
            pages = -(-case.keys // case.page)
            rows = (sum(-(-n // case.page) for n in case.used()), case.page)
            page_table["page_table"] = tensor(case.batch, pages, dtype=torch.int32)
        cache = tensor(*rows, case.kv_heads, case.d)
        used = tensor(case.batch, dtype=torch.int32)
        args, keep = arguments({"q": q, "k": cache, "v": cache, "out": q, "seqused_k": used, **page_table})
        fulgur.lib.fulgur_plan_free(planned(fulgur, args))
        del keep

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(plan, cases))


class Ours:
    """fulgur's plan of a case, over its copies of the cache; `more` options by the C API's names."""

    def __init__(self, fulgur, tensors, **more):
        self.fulgur, self.plan, self.calls = fulgur, None, []
        self.tensors = tensors  # of which the calls have addresses alone
        for copy in tensors:
            out = torch.full_like(copy["q"], float("nan"))
            args, used = arguments({**copy, "out": out})
            self.plan = self.plan or planned(fulgur, args, **more)
            self.calls.append((args, used, out))
        need = WorkspaceNeed()
        fulgur.call("fulgur_plan_workspace", self.plan, ctypes.byref(need))
        self.workspace = torch.zeros(need.bytes, dtype=torch.uint8, device=DEVICE)
        self.run = Run(workspace=self.workspace.data_ptr(), workspace_bytes=need.bytes)

    def __call__(self, copy):
        self.run.stream = torch.cuda.current_stream().cuda_stream
        self.fulgur.call("fulgur_plan_run_forward", self.plan, ctypes.byref(self.calls[copy][0]),
                         ctypes.byref(self.run))
        return self.calls[copy][2]


def times_of(fulgur, case, generator, difference, turns, peers=PEERS):
    """Microseconds of a call by name, how much each peer differs, and why some could not be captured; `turns` and
    `difference` are those of gpu_report."""
    copies = min(8, -(-COLD_BYTES // case.bytes()))
    tensors = [case.tensors(generator) for _ in range(copies)]
    candidates = {"fulgur": Ours(fulgur, tensors)} | {name: peer(case, tensors) for name, peer in peers.items()}
    candidates = {name: run for name, run in candidates.items() if run}
    results = {name: [run(copy) for copy in range(copies)][0] for name, run in candidates.items()}
    ours = results.pop("fulgur")
    differs = {name: difference([ours], [out]) for name, out in results.items()}
    for name, share in differs.items():
        if not share < MOST_DIFFERENCE:
            raise RuntimeError(f"{case}: {name} differs by {share}, want less than {MOST_DIFFERENCE}")

    def bursts(run):  # of a call after the other, on one copy after the other
        return lambda: [run(copy) for copy in range(copies)]

    times, loops = turns({name: bursts(run) for name, run in candidates.items()}, 6, 7)
    micros = {f"{name}_us": 1000 * ms / copies for name, ms in times.items()}
    said = ", ".join(f"{key[:-3]} {us:.1f} us" for key, us in micros.items())
    print(f"decode, {case}: {said}; differs: {differs}; not captured: {loops}", flush=True)
    return micros, differs, loops


def row(fulgur, case, generator, difference, turns):
    """What a report says of a case."""
    micros, differs, loops = times_of(fulgur, case, generator, difference, turns)
    return {**dataclasses.asdict(case), "bytes": case.bytes(), "difference_from": differs, "not_captured": loops,
            **micros}


def grid_rows(fulgur, seed, seconds, generator, difference, turns):
    """As many cases of GRID as a time allows, in an order drawn by the seed, and how many there are that the card's
    memory holds."""
    cases = [case for case in GRID if case.bytes() < 0.8 * torch.cuda.mem_get_info()[0]]
    end, rows = time.monotonic() + seconds, []
    compile_kernels(fulgur, cases)
    for case in random.Random(seed).sample(cases, len(cases)):
        if time.monotonic() > end:
            break
        micros, *_ = times_of(fulgur, case, generator, difference, turns, {"flash3": PEERS["flash3"]})
        if "flash3_us" not in micros:
            raise RuntimeError("the grid is measured with FlashAttention-3, which is not installed")
        torch.cuda.empty_cache()  # the next case has tensors of other sizes
        named = ("batch", "keys", "heads", "kv_heads", "d", "queries", "page")
        rows.append([*(getattr(case, name) for name in named), bool(case.lengths),
                     *(round(micros[f"{name}_us"], 2) for name in ("fulgur", "flash3"))])
    return {"seed": seed, "fit": len(cases), "of": len(GRID), "rows": sorted(rows)}
