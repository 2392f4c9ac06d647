#!/usr/bin/env python3
"""The tables and the plots of GPU reports, made from docs/performance/h100.json.gz and h200.json.gz.

Checks that the .md and the .svg with each, and the table in README.md, are those of the reports: exit status 1 if
not. 77, which CTest shows as skipped, says that the kernels have changed since, or that there is no report.
With --write, makes the files.
"""

import argparse
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import report_file  # noqa: E402
from kernel_hash import kernel_hash  # noqa: E402
from marked import put  # noqa: E402
from speed_plot import length, mask, picture  # noqa: E402

FORWARD = ("sm90/forward/forward.cu", "common/copy_rows.cu", "common/padding.cu")
BACKWARD = (*FORWARD, *(f"sm90/backward/{part}.cu" for part in
                        ("prepare", "keys", "keys_wide", "rows", "reduce", "round", "repair", "sinks")))
DECODE = (*(f"decode/{part}.cu" for part in ("decode_warp", "decode_warpgroup", "combine")), "common/padding.cu")
KERNELS = {"forward": FORWARD, "backward": BACKWARD, "errors": BACKWARD,  # that the parts of a report measure
           "decode": DECODE, "decode_codes": ("decode/decode_codes.cu", "decode/decode_codes_warpgroup.cu", *DECODE),
           "decode_grid": DECODE, "host": BACKWARD}
NAMES = {"fulgur": "fulgur", "flash3": "FlashAttention-3", "flash4": "FlashAttention-4", "flashinfer": "FlashInfer",
         "cudnn": "cuDNN", "flash2": "FlashAttention-2"}
README_NAMES = ("fulgur", "flash3", "flash4", "cudnn", "flash2")  # in the README's table
COLORS = {"fulgur": "#c0392b", "flash3": "#27ae60", "flash4": "#8e44ad", "cudnn": "#2980b9", "flash2": "#7f8c8d"}


def measured(rows):
    """Keys of NAMES in the rows: FlashAttention-3 is there where it was installed."""
    return [name for name in NAMES if any(f"{name}_tflops" in r for r in rows)]


def lines_of(head, rows):
    """Lines of Markdown; what is not numbers stands to the left."""
    words = ("mask", "what", "data")
    return [f"| {' | '.join(map(str, line))} |"
            for line in (head, ["---" if name in words else "---:" for name in head], *rows)]


def speeds_of(rows, gemm=False):
    """Headings by key: of the peers' speeds, and of our share of them."""
    speeds = {f"{n}_tflops": NAMES[n] for n in measured(rows) if n != "fulgur"}
    if gemm:
        speeds["gemm_tflops"] = "GEMM"
    return speeds, {key: f"fulgur / {heading}" for key, heading in speeds.items() if key != "flash2_tflops"}


def table(rows, names, shape, speeds, ratios):
    """Lines of Markdown: of every row its shape, the speeds and our share of them; a peer may lack a shape."""
    clock = ["SM MHz"] if "sm_mhz" in rows[0] else []
    lines = []
    for r in rows:
        ours = r["fulgur_tflops"]
        others = [f"{r[key]:.0f}" if key in r else "" for key in speeds]
        shares = [f"{ours / r[key]:.2f}" if key in r else "" for key in ratios]
        lines.append([*shape(r), mask(r["causal"]), f"**{ours:.0f}**", *others, *shares,
                      *([r["sm_mhz"]] if clock else [])])
    return lines_of([*names, "mask", "fulgur", *speeds.values(), *ratios.values(), *clock], lines)


def on_grid(rows, gemm=False):
    return table(rows, ("d", "S"), lambda r: (r["d"], length(r["s"])), *speeds_of(rows, gemm))


def wins(rows):
    """"fulgur is faster than cuDNN in 36 of the 36 lines."; of lines that have the peer."""

    def count(name):
        both = [r for r in rows if f"{name}_tflops" in r]
        won = sum(r["fulgur_tflops"] > r[f"{name}_tflops"] for r in both)
        return f"{NAMES[name]} in {won}" + (f" of {len(both)}" if len(both) != len(rows) else "")

    peers = [count(name) for name in measured(rows) if name != "fulgur"]
    return f"fulgur is faster than {', '.join(peers)} of the {len(rows)} lines."


def remarks(rows):
    """Which peers were timed otherwise than all others, or left out although they ran."""
    loops = sorted({NAMES[name] for r in rows for name in r.get("not_captured", ())})
    text = [f"Timed as loops of launches, as no graph could be captured: {', '.join(loops)}."] if loops else []
    for r in rows:
        text += [f"{NAMES[name]} is left out of d {r['d']} S {length(r['s'])} {mask(r['causal'])}: its results differ."
                 for name, why in r.get("lacking", {}).items() if why.startswith("differs")]
    return [line for remark in text for line in ("", remark)]


def forward(report):
    rows = report["results"]
    text = [
        wins(rows),
        "",
        *on_grid(rows, gemm=True),
        "",
        "Too few heads for every SM, and value heads of another size:",
        "",
        *table(report["shapes"], ("batch", "S", "heads", "d", "dv"),
               lambda r: (r["batch"], length(r["s"]), r["heads"], r["d"], r["dv"]),
               *speeds_of(rows, gemm=True)),
    ]
    return text + remarks([*rows, *report["shapes"]])


def pair(x, y):
    return f"{x}" if x == y else f"{x}/{y}"


def backward(report):
    rows, shapes = report["backward"]["results"], report["backward"]["shapes"]
    return [
        "## Backward",
        "",
        "TFLOP/s of the same shapes; five products count, 2.5 times the flops of the forward pass. " + wins(rows),
        "",
        *on_grid(rows),
        "",
        "Shapes off the grid; of packed sequences S is the longest. A peer that does not compute a shape has no entry.",
        "",
        *table(shapes, ("what", "batch", "S", "heads", "d"),
               lambda r: (r["what"], r["batch"], length(r["s"]), pair(r["heads"], r["kv_heads"]),
                          pair(r["d"], r["dv"])), *speeds_of(shapes)),
        *remarks([*rows, *shapes]),
    ]


def together(report):
    """Rows of the grid with the speeds of a forward and a backward pass, one after the other: the sums of their times
    for 3.5 times the flops of the forward pass."""

    def key(r):
        return r["d"], r["s"], r["causal"]

    back = {key(r): r for r in report["backward"]["results"]}
    rows = []
    for r in report["results"]:
        if key(r) not in back:
            continue
        names = [n for n in measured([r]) if f"{n}_tflops" in back[key(r)]]
        speeds = {f"{n}_tflops": 3.5 / (1 / r[f"{n}_tflops"] + 2.5 / back[key(r)][f"{n}_tflops"]) for n in names}
        rows.append({"d": r["d"], "s": r["s"], "causal": r["causal"], **speeds})
    return rows


def forward_and_backward(report):
    rows = together(report)
    return [
        "## Forward and backward",
        "",
        "TFLOP/s of both passes, from the sums of their median times. " + wins(rows),
        "",
        *on_grid(rows),
    ]


def errors(report):
    rows = report["errors"]
    who = [name for name in ("fulgur", "flash3", "naive") if name in rows[0]["rms_error"]]
    grads = {"dq": "dQ", "dk": "dK", "dv": "dV"}

    def cell(r, name, grad):
        share = r["rms_error"][name][grad] / r["reference"][grad]
        return f"**{share:.2e}**" if name == "fulgur" else f"{share:.2e}"

    head = ["data", "d", "S", "mask",
            *(f"{heading}, {NAMES.get(name, name)}" for heading in grads.values() for name in who)]
    return [
        "## Errors of gradients",
        "",
        "RMS errors against float64, as shares of the RMS of the gradient; 2 heads. Naive is the plain formula in bf16."
        " Outliers: two coordinates of every key and value are 20 times as large.",
        "",
        *lines_of(head, [[r["data"], r["d"], length(r["s"]), mask(r["causal"]),
                          *(cell(r, name, grad) for grad in grads for name in who)] for r in rows]),
    ]


def decode(report):
    rows = report["decode"]
    peers = [name for name in NAMES if name != "fulgur" and any(f"{name}_us" in r for r in rows)]
    others = [name for name in peers if name != "flash3"]

    def won(name):
        both = [r for r in rows if f"{name}_us" in r]
        return f"{NAMES[name]} in {sum(r['fulgur_us'] < r[f'{name}_us'] for r in both)} of the {len(both)} lines"

    def cell(r, name):
        return f"{r[f'{name}_us']:.1f}" if f"{name}_us" in r else ""

    def line(r):
        keys = f"{length(r['keys'])} and shorter" if r["lengths"] else length(r["keys"])
        keys += f", {length(r['prefix'])} shared" if r.get("prefix") else ""
        keys += "".join(f", {word}" for word in ("sinks", "tree") if r.get(word))
        ratio = f"{r['flash3_us'] / r['fulgur_us']:.2f}" if "flash3_us" in r else ""
        return [r["batch"], keys, pair(r["heads"], r["kv_heads"]), r["d"], r["queries"], r["page"] or "",
                f"**{r['fulgur_us']:.1f}**", f"{r['bytes'] / r['fulgur_us'] / 1e6:.2f}", cell(r, "flash3"), ratio,
                *(cell(r, name) for name in others)]

    head = ["batch", "keys", "heads", "d", "queries", "page", "fulgur, us", "TB/s", "FlashAttention-3, us",
            "its time / ours", *(f"{NAMES[name]}, us" for name in others)]
    faster = f" fulgur is faster than {', '.join(map(won, peers))}." if peers else ""
    versions = ", ".join(f"{name} {version}" for name, version in report.get("decode_peers", {}).items())
    return [
        "## Decode",
        "",
        "Few query tokens with caches, causal, lengths on the device; TB/s of exact bytes: live K and V, q and out."
        " Every call reads memory, as the copies of a cache are together larger than L2." + faster,
        *(["", f"Also with {versions}. A peer that does not compute a call has no entry; FlashInfer takes pages."]
          if others else []),
        "",
        *lines_of(head, [line(r) for r in rows]),
        *remarks(rows),
    ]


def decode_codes(report):
    """A line for each case, and a column for each format."""
    rows = report["decode_codes"]
    names = [name for name in rows[0]["us"] if name != "bf16"]

    def line(r):
        bf16 = r["us"]["bf16"]
        cells = [f"{us:.1f} ({bf16 / us:.2f})" if us else "" for us in (r["us"].get(name) for name in names)]
        return [r["batch"], length(r["keys"]), pair(r["heads"], r["kv_heads"]), r["d"], r["queries"], r["page"] or "",
                f"{bf16:.1f}", *cells]

    return [
        "## Decode, low-bit caches",
        "",
        "Queries of bf16 and caches of codes, with scales of each sequence and kv head, of each token and kv head, or"
        " of so many columns of one (f16); microseconds, and in brackets the time of bf16 over theirs. What was not"
        " measured with the plan that is made now has no entry.",
        "",
        *lines_of(["batch", "keys", "heads", "d", "queries", "page", "bf16", *names], [line(r) for r in rows]),
    ]


def decode_grid(report):
    """A line per heads and query tokens, and the cells that are slower."""
    part = report["decode_grid"]
    names = ("batch", "keys", "heads", "kv_heads", "d", "queries", "page", "uneven", "fulgur_us", "flash3_us")
    rows = [dict(zip(names, row)) for row in part["rows"]]
    by_line = {}
    for r in rows:
        r["ratio"] = r["flash3_us"] / r["fulgur_us"]
        by_line.setdefault((r["d"], r["heads"], r["kv_heads"], r["queries"]), []).append(r)

    def line(key, of):
        ratios = sorted(r["ratio"] for r in of)
        return [pair(key[1], key[2]), key[0], key[3], len(of), sum(ratio > 1 for ratio in ratios),
                *(f"{ratio:.2f}" for ratio in (ratios[0], statistics.median(ratios), ratios[-1]))]

    slower = sorted((r for r in rows if r["ratio"] <= 1), key=lambda r: r["ratio"])
    text = [
        "## Decode, a grid",
        "",
        f"Drawn by the seed {part['seed']}: {len(rows)} of the {part['fit']} cells that fit into the card's memory, of"
        f" {part['of']}: 1 to 256 sequences of 1k to 128k keys, contiguous or in pages of 16, 64 and 256, or in such"
        " pages of uneven lengths (one of 128k and 63 of 1k; 4641, 45118, 1730 and 1696). FlashAttention-3's time over"
        f" ours; fulgur is faster in {len(rows) - len(slower)} of the {len(rows)}.",
        "",
        *lines_of(["heads", "d", "queries", "cells", "faster", "least", "median", "most"],
                  [line(key, of) for key, of in sorted(by_line.items())]),
    ]
    if slower:
        head = ["batch", "keys", "heads", "d", "queries", "page", "fulgur, us", "FlashAttention-3, us",
                "its time / ours"]
        text += ["", "The cells that are not faster:", "", *lines_of(head, [
            [r["batch"], length(r["keys"]) + (" and shorter" if r["uneven"] else ""), pair(r["heads"], r["kv_heads"]),
             r["d"], r["queries"], r["page"] or "", f"{r['fulgur_us']:.1f}", f"{r['flash3_us']:.1f}",
             f"{r['ratio']:.3f}"] for r in slower])]
    return text


def micros(us):
    return f"{us:.0f}" if us >= 1000 else f"{us:.1f}"


def host(report):
    part = report["host"]
    if part["device"] != "cuda":
        raise ValueError(f"host: measured on {part['device']}, want cuda")
    names = NAMES | {"zeros": "zeros"}
    who = [name for name in names if name in part["lengths"]]

    def line(what, us):
        return [what, *(f"**{micros(us[name])}**" if name == "fulgur" else micros(us[name]) for name in who)]

    lines = [line(what, us) for what, us in part["calls"].items()]
    for which in ("forward", "backward"):
        for word, of in (("", statistics.median), (", the slowest", max)):
            lines.append(line(f"a new length, {which}{word}", {name: of(part["lengths"][name][which]) for name in who}))
    text = [
        "## Host time",
        "",
        f"Microseconds of PyTorch's calls on the host, {part['cpu']}, without waits for the device: bf16, causal, batch"
        f" {part['batch']}, S {part['s']}, {part['heads']} heads, d {part['d']}. cuDNN and FlashAttention-2 are"
        " scaled_dot_product_attention's; zeros is what PyTorch takes to fill as many results, a kernel for each, recorded"
        " where the others are. A new length is one that the process has not seen, where others were.",
        "",
        *lines_of(["what", *(names[name] for name in who)], lines),
    ]
    if "seconds" in part:
        said = ", ".join(f"{what} {s:.1f} s" if s >= 0.1 else f"{what} {1000 * s:.1f} ms"
                         for what, s in part["seconds"].items())
        text += ["", f"From a wheel to results, kernels compiled anew: {said}."]
    return text


def peers_of(report):
    """The packages of the peers that do not come with PyTorch, in words."""
    every = [part["peers"] for part in (report, report.get("backward", {})) if "peers" in part]
    text = ""
    for name in dict.fromkeys(name for peers in every for name in peers):
        text += f", {NAMES[name]} of {' and '.join(dict.fromkeys(p[name] for p in every if name in p))}"
    return text


def markdown(report):
    """Sections of what was measured."""
    passes = [name for name, there in (("Forward", "results"), ("backward", "backward")) if there in report]
    title = " and ".join(passes) or "Errors"
    kernels = [f"{hash[:12]} ({part}, {report['dates'][part]})" for part, hash in report["kernels"].items()]
    text = [
        f"# {title[0].upper() + title[1:]} on {report['gpu']}, bf16",
        "",
        "TFLOP/s of 16k tokens with a hidden size of 2048; `make gpu-report`, driver"
        f" {report['driver']}, PyTorch {report['torch']}, cuDNN {report['cudnn']}{peers_of(report)}, kernels"
        f" {', '.join(kernels)}. All columns of a line were"
        " measured in turns, as CUDA graphs of many launches: the card's clock follows its load, so compare within a"
        " line. GEMM is cuBLAS, 8192 x 8192 x 8192, bf16.",
    ]
    if "results" in report:
        text += ["", *(["## Forward", ""] if len(passes) > 1 else []), *forward(report)]
    if "backward" in report:
        text += ["", *backward(report)]
    if "results" in report and "backward" in report:
        text += ["", *forward_and_backward(report)]
    if "errors" in report:
        text += ["", *errors(report)]
    if "decode" in report:
        text += ["", *decode(report)]
    if "decode_codes" in report:
        text += ["", *decode_codes(report)]
    if "decode_grid" in report:
        text += ["", *decode_grid(report)]
    if "host" in report:
        text += ["", *host(report)]
    if report["checks"]:
        text += ["", f"Tests and sanitizers, of kernels {report['checks_of'][:12]}:", ""]
        text += [f"- {line}" for line in report["checks"]]
    return "\n".join(text).rstrip() + "\n"


def svg(report):
    """The grids of the passes that were measured, a row of panels for each mask."""
    grids = {"": report.get("results", []), ", backward": report.get("backward", {}).get("results", [])}
    names = measured([r for rows in grids.values() for r in rows])
    return picture(grids, {name: NAMES[name] for name in names}, {name: COLORS[name] for name in names})


def summary(report):
    """A line for each pass, mask and dim at 8k: TFLOP/s of everybody."""
    lines = []
    passes = {"forward": report["results"], "backward": report["backward"]["results"]}
    columns = [n for n in README_NAMES if n in measured([r for rows in passes.values() for r in rows])]
    for name, rows in passes.items():
        names = measured(rows)
        for r in rows:
            if r["s"] == 8192:
                figures = {n: r[f"{n}_tflops"] for n in names if f"{n}_tflops" in r}
                cells = [f"**{figures[n]:.0f}**" if n == max(figures, key=figures.get) else f"{figures[n]:.0f}"
                         if n in figures else "" for n in columns]
                lines.append([name, mask(r["causal"]), str(r["d"]), *cells])
    card = report["gpu"].removeprefix("NVIDIA ")
    head = [f"{card}, 8k", "mask", "d", *(NAMES[n] for n in columns)]
    lines = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def check(path, write):
    """Whether the table and the plot of a report are not its own, and whether it is of other kernels than ours."""
    report = report_file.read(path)
    wrong = False
    for suffix, text in ((".md", markdown(report)), (".svg", svg(report))):
        made = report_file.page(path, suffix)
        if write:
            made.write_text(text)
        elif not made.exists() or made.read_text() != text:
            print(f"{made.name} is not that of {path.name}; run tools/gpu_table.py --write")
            wrong = True
    stale = [part for part, hash in report["kernels"].items() if hash != kernel_hash(*KERNELS[part])]
    if report["checks"] and report["checks_of"] != kernel_hash():
        stale.append("checks")
    if stale:
        print(f"{path.name} was measured with other kernels ({', '.join(stale)}); run `make gpu-report` on a"
              " machine with such a GPU")
    return wrong, bool(stale)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", nargs="*", type=pathlib.Path, help="default: those of docs/performance")
    parser.add_argument("--write", action="store_true", help="make the tables and the plots")
    args = parser.parse_args()
    reports = args.json or sorted((ROOT / "docs/performance").glob("h[0-9]*.json.gz"))
    if not reports:
        print("not measured yet; run `make gpu-report` on a machine with a GPU")
        return 77
    found = [check(path, args.write) for path in reports]
    newest = max(map(report_file.read, reports), key=lambda report: report["dates"]["forward"])
    same = bool(args.json) or put(ROOT / "README.md", "gpu", summary(newest), args.write)
    if any(wrong for wrong, _ in found) or not same:
        return 1
    return 77 if any(stale for _, stale in found) and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
