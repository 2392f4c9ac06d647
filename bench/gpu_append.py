#!/usr/bin/env python3
"""Times a step of decoding that brings its own key, on a GPU: one call of fulgur that appends and attends, append and
attention in two calls, attention alone, and FlashAttention-3's flash_attn_with_kvcache where it is installed.

    python3 bench/gpu_append.py --library libfulgur.so

bf16, 32 heads of 8 kv heads, d 128, causal, one new token after 8k - 1 keys, keys and queries turned. As decode calls
of gpu_report.py: in CUDA graphs, over copies of the cache that are together larger than L2, all candidates in turns.
"""

import argparse
import ctypes
import json
import pathlib

import torch
from fulgur_c import AppendArgs, ForwardArgs, Fulgur, Options, Run, WorkspaceNeed, described, filled
from gpu_case import DEVICE
from gpu_decode import COLD_BYTES, DecodeCase
from gpu_decode_peers import MODULE
from gpu_report import difference, in_words, turns

CASES = tuple(DecodeCase(batch, 8192, 32, 8, page=page) for batch in (1, 64) for page in (0, 16))
NAMES = {"one": "append and attention in one call", "two": "in two calls", "alone": "attention alone"}


def steps(case, generator):
    """The tensors of a step, by the C API's names, for each copy of the cache."""

    def normal(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator, dtype=torch.bfloat16)

    copies = min(8, -(-COLD_BYTES // case.bytes()))
    angles = torch.rand(2, case.keys, case.d // 2, device=DEVICE, generator=generator) * 6.3
    cos, sin = angles[0].cos().bfloat16(), angles[1].sin().bfloat16()
    for _ in range(copies):
        step = case.tensors(generator)
        new = (case.batch, 1, case.kv_heads, case.d)
        yield step | {"k_new": normal(*new), "v_new": normal(*new), "cos": cos, "sin": sin,
                      "cache_seqlens": step["seqused_k"] - 1, "turned": torch.empty_like(step["q"]),
                      "out": torch.full_like(step["q"], float("nan"))}


class Ours:
    """fulgur's plan of a case in one of the ways of NAMES."""

    def __init__(self, fulgur, way, tensors):
        self.fulgur, self.way, self.plan, self.calls = fulgur, way, ctypes.c_void_p(), []
        self.options = Options(window_left=-1, window_right=0, engine=DEVICE.encode())
        for step in tensors:
            tables = ("page_table",) if "page_table" in step else ()
            views = {name: described(t.shape, t.dtype, t.data_ptr()) for name, t in step.items()}
            at = {name: ctypes.addressof(view) for name, view in views.items()}
            named = {name: at[name] for name in ("k_new", "v_new", "cache_seqlens", "cos", "sin", *tables)}
            named |= {"k_cache": at["k"], "v_cache": at["v"], "q": at["q"]}
            if way == "one":
                rows = None
                args, kept = filled(ForwardArgs, named | {"out": at["out"]})
            else:
                rows, kept = filled(AppendArgs, named | {"q_out": at["turned"]})
                args, more = filled(ForwardArgs, {"q": at["turned"]} | {
                    name: at[name] for name in ("k", "v", "out", "seqused_k", *tables)})
                kept += more
            if not self.plan:
                fulgur.call("fulgur_plan_forward", ctypes.byref(args), ctypes.byref(self.options),
                            ctypes.byref(self.plan))
            self.calls.append((args, rows, (views, kept), step["out"]))
        need = WorkspaceNeed()
        fulgur.call("fulgur_plan_workspace", self.plan, ctypes.byref(need))
        self.workspace = torch.zeros(need.bytes, dtype=torch.uint8, device=DEVICE)
        self.run = Run(workspace=self.workspace.data_ptr(), workspace_bytes=need.bytes)

    def explain(self):
        length = ctypes.c_size_t()
        self.fulgur.call("fulgur_plan_explain", self.plan, None, ctypes.c_size_t(0), ctypes.byref(length))
        text = ctypes.create_string_buffer(length.value + 1)
        self.fulgur.call("fulgur_plan_explain", self.plan, text, ctypes.c_size_t(len(text)), None)
        return text.value.decode()

    def __call__(self, copy):
        args, rows, _, out = self.calls[copy]
        self.run.stream = torch.cuda.current_stream().cuda_stream
        if self.way == "two":
            self.fulgur.call("fulgur_append", ctypes.byref(rows), ctypes.byref(self.options), ctypes.byref(self.run))
        self.fulgur.call("fulgur_plan_run_forward", self.plan, ctypes.byref(args), ctypes.byref(self.run))
        return out


def flash3(tensors):
    """FlashAttention-3's call on a copy; None, and a word about it, where it is not installed or takes no new rows."""
    try:
        module = __import__(MODULE)

        def run(copy):
            t = tensors[copy]
            out = module.flash_attn_with_kvcache(
                t["q"], t["k"], t["v"], k=t["k_new"], v=t["v_new"], rotary_cos=t["cos"], rotary_sin=t["sin"],
                cache_seqlens=t["cache_seqlens"], page_table=t.get("page_table"), causal=True,
                rotary_interleaved=False)
            return out[0] if isinstance(out, tuple) else out

        run(0)
    except (ModuleNotFoundError, AttributeError, TypeError, RuntimeError) as error:
        print(f"no FlashAttention-3 that appends: {in_words(error)}", flush=True)
        return None
    return run


def measured(fulgur, case, generator):
    """Microseconds of each candidate."""
    tensors = list(steps(case, generator))
    ours = {way: Ours(fulgur, way, tensors) for way in NAMES}
    print("\n".join(line for line in ours["one"].explain().splitlines() if "new rows" in line or "append" in line))
    want = ours["two"](0).clone()
    got = ours["one"](0).clone()
    assert torch.equal(got, want), "one call gives other bits than two"
    peer = flash3(tensors)
    differs = difference([got], [peer(0)]) if peer else None
    candidates = {f"fulgur_{way}": run for way, run in ours.items()} | ({"flash3": peer} if peer else {})
    for run in candidates.values():
        for copy in range(len(tensors)):
            run(copy)

    def bursts(run):
        return lambda: [run(copy) for copy in range(len(tensors))]

    times, loops = turns({name: bursts(run) for name, run in candidates.items()}, 6, 15)
    micros = {name: 1000 * ms / len(tensors) for name, ms in times.items()}
    said = ", ".join(f"{name} {us:.2f} us" for name, us in micros.items())
    print(f"b {case.batch}, {case.keys} keys, pages of {case.page}: {said}; differs by {differs}; {loops}", flush=True)
    return {"batch": case.batch, "keys": case.keys, "page": case.page, "difference_from_flash3": differs, **micros}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libfulgur.so")
    parser.add_argument("--json", help="where to write the microseconds, too")
    args = parser.parse_args()
    fulgur, generator = Fulgur(args.library), torch.Generator(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = [measured(fulgur, case, generator) for case in CASES]
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
