"""Decode calls over low-bit caches that a GPU report measures: every format in turns with bf16.

Codes are random, and what a call gives is compared with what bf16 gives for the numbers that they stand for.
"""

import concurrent.futures
import dataclasses

import torch
from gpu_case import DEVICE
from gpu_decode import COLD_BYTES, MOST_DIFFERENCE, DecodeCase, Ours

BLOCK = 32  # columns of a block of q8_0 or q4_0, after their scale of f16
PLAIN = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}  # formats that are dtypes, others are bytes


@dataclasses.dataclass(frozen=True)
class Codes:
    """A format of K and V, and what has a scale: "blocks" have them inside, "heads" (f32) of each sequence, "tokens"
    (f32 or f16) and `scales` columns of a token (f16), with zero points or without."""

    format: str
    scales: str = "blocks"
    dtype: str = "f16"
    zero_points: bool = False

    @property
    def name(self):
        words = {"blocks": "", "heads": ", heads", "tokens": f", {self.dtype} tokens"}
        zero_points = ", zero points" if self.zero_points else ""
        return self.format + words.get(self.scales, f", {self.scales} columns") + zero_points

    def row_bytes(self, d):
        return {"int4": d // 2, "q8_0": d // BLOCK * (BLOCK + 2), "q4_0": d // BLOCK * (BLOCK // 2 + 2)}.get(
            self.format, d)

    def cache_bytes(self, case):
        """Of K and V, without scales that lie elsewhere."""
        return 2 * case.batch * case.keys * case.kv_heads * self.row_bytes(case.d)


FORMATS = (Codes("e4m3", "heads"), Codes("int8", "tokens", "f32"), Codes("int8", "tokens"), Codes("int8", "32"),
           Codes("q8_0"), Codes("int4", "tokens"), Codes("int4", "64"), Codes("int4", "32"),
           Codes("int4", "32", zero_points=True), Codes("q4_0"))

CASES = (*(DecodeCase(64, keys, 32, 8) for keys in (8192, 16384)), DecodeCase(8, 4096, 32, 8),
         DecodeCase(64, 8192, 32, 8, page=16), DecodeCase(64, 8192, 32, 8, page=64),
         DecodeCase(64, 8192, 64, 8, d=64), DecodeCase(8, 4096, 64, 8, d=64), DecodeCase(32, 8192, 32, 8, d=256),
         *(DecodeCase(64, 8192, 32, 8, queries=queries) for queries in (4, 8, 16)))


def random_codes(codes, rows, case, generator):
    """K or V of some rows of keys, and their scales and zero points where they lie elsewhere."""
    device = generator.device

    def uniform(*shape):
        return torch.rand(shape, device=device, generator=generator)

    shape = (*rows, case.kv_heads, codes.row_bytes(case.d))
    # Of e4m3 no NaN, which has all bits of the lower seven.
    cache = torch.randint(0, 127 if codes.format == "e4m3" else 256, shape, dtype=torch.uint8, device=device,
                          generator=generator)
    size = {"e4m3": 0.01, "int8": 0.02, "q8_0": 0.02}.get(codes.format, 0.3)
    if codes.scales == "blocks":
        scales = size * (0.5 + uniform(*shape[:-1], case.d // BLOCK))
        cache.view(*scales.shape, -1)[..., :2] = scales.half().unsqueeze(-1).view(torch.uint8)
        return cache, None, None
    of = {"heads": (case.batch, case.kv_heads), "tokens": (*shape[:-1], 1)}.get(codes.scales)
    of = of or (*shape[:-1], case.d // int(codes.scales))
    dtype = torch.float32 if codes.scales == "heads" or codes.dtype == "f32" else torch.float16
    scales = (size * (0.5 + uniform(*of))).to(dtype)
    zero_points = (4 * uniform(*of) - 2).to(dtype) if codes.zero_points else None
    return cache.view(PLAIN.get(codes.format, torch.uint8)), scales, zero_points


def owners(case, tensors):
    """The sequence of each row of K and V's first dimension: with pages, the one that has the page."""
    sequences = torch.arange(case.batch, device=DEVICE)
    if not case.page:
        return sequences
    pages = tensors["page_table"].long()
    return torch.empty(pages.numel(), dtype=torch.long, device=DEVICE).index_copy_(
        0, pages.flatten(), sequences.repeat_interleave(pages.shape[1]))


def numbers(codes, cache, scales, zero_points, d, sequences):
    """What a cache of such codes stands for, f32; `sequences` are its owners."""
    if codes.scales == "blocks":
        blocks = cache.reshape(*cache.shape[:-1], d // BLOCK, -1)
        scale, rest = blocks[..., :2].contiguous().view(torch.float16).float(), blocks[..., 2:].contiguous()
        if codes.format == "q8_0":
            x = rest.view(torch.int8).float()
        else:
            x = torch.cat((rest & 15, rest >> 4), -1).float() - 8
        return (x * scale).flatten(-2)
    if codes.format == "int4":
        x = torch.stack((cache & 15, cache >> 4), -1).flatten(-2).float()
        x = torch.where(x > 7, x - 16, x)
    else:
        x = cache.float()

    def spread(t):
        t = t.float()
        return t[sequences, None, :, None] if codes.scales == "heads" else t.repeat_interleave(d // t.shape[-1], -1)

    return (x if zero_points is None else x - spread(zero_points)) * spread(scales)


def of_format(codes, case, tensors, generator):
    """The tensors of a case with K and V of a format, and with the same in bf16."""
    coded, plain = dict(tensors), dict(tensors)
    for name in ("k", "v"):
        cache, scales, zero_points = random_codes(codes, tensors[name].shape[:2], case, generator)
        coded |= {name: cache, f"{name}_descale": scales, f"{name}_zero_point": zero_points}
        if codes.format not in PLAIN:
            coded[f"{name}_format"] = codes.format.encode()
        plain[name] = numbers(codes, cache, scales, zero_points, case.d, owners(case, tensors)).to(
            torch.bfloat16)
    return {name: t for name, t in coded.items() if t is not None}, plain


def checked(fulgur, codes, case, generator, difference):
    """Copies of a case with caches of a format, after the first of them was compared with bf16's result."""
    copies = min(8, -(-COLD_BYTES // codes.cache_bytes(case)))
    tensors = []
    for copy in range(copies):
        coded, plain = of_format(codes, case, case.tensors(generator), generator)
        tensors.append(coded)
        if copy == 0:
            want = Ours(fulgur, [plain])(0)
    run = Ours(fulgur, tensors)
    differs = difference([run(0)], [want])
    if not differs < MOST_DIFFERENCE:
        raise RuntimeError(f"{case}, {codes.name}: differs from bf16 by {differs}, want less than {MOST_DIFFERENCE}")
    return run, copies


def row(fulgur, case, generator, difference, turns):
    """What a report says of a case: microseconds of bf16 and of every format."""

    def plan(codes):  # compiles its kernels; no number matters
        seed = torch.Generator(DEVICE)
        Ours(fulgur, [of_format(codes, case, case.tensors(seed), seed)[0]])

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(plan, FORMATS))
    copies = min(8, -(-COLD_BYTES // case.bytes()))
    calls = {"bf16": (Ours(fulgur, [case.tensors(generator) for _ in range(copies)]), copies)}
    calls |= {codes.name: checked(fulgur, codes, case, generator, difference) for codes in FORMATS}

    def bursts(run, count):
        return lambda: [run(copy) for copy in range(count)]

    times, _ = turns({name: bursts(*call) for name, call in calls.items()}, 6, 7)
    micros = {name: 1000 * ms / calls[name][1] for name, ms in times.items()}
    print(f"decode, {case}: {', '.join(f'{name} {us:.1f} us' for name, us in micros.items())}", flush=True)
    torch.cuda.empty_cache()  # the next case has tensors of other sizes
    return {**dataclasses.asdict(case), "us": micros}
