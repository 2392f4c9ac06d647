#!/usr/bin/env python3
"""The page and the picture of the papers' tables, made from docs/performance/papers.json.gz.

`fulgur bench --device cuda --reproduce fa3 --json F` measures it, and bench/gpu_papers.py F adds peers. Checks that
papers.md and papers.svg are those of the report: exit status 1 if they are not, 77, which CTest shows as skipped, where
there is no report. With --write F, takes a new report and makes the files.
"""

import argparse
import pathlib
import sys

import report_file
from speed_plot import length, mask, picture

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs/performance/papers.json.gz"
NAMES = {
    "standard": "standard", "fa1": "FlashAttention", "fa2": "FlashAttention-2", "fa3": "FlashAttention-3",
    "torch_three_calls": "PyTorch, three calls", "torch_flash": "PyTorch, FlashAttention-2",
    "torch_efficient": "PyTorch, memory-efficient", "torch_cudnn": "PyTorch, cuDNN",
    "triton_flash2": "Triton, FlashAttention-2", "xformers": "xFormers",
}
COLORS = {
    "standard": "#7f8c8d", "fa1": "#e67e22", "fa2": "#2980b9", "fa3": "#c0392b", "torch_three_calls": "#bdc3c7",
    "torch_flash": "#8e44ad", "torch_efficient": "#f1c40f", "torch_cudnn": "#27ae60",
    "triton_flash2": "#16a085", "xformers": "#34495e",
}
# Both passes together: the faster algorithm, the slower one, what the papers say, and why ours differ.
CLAIMS = (
    ("fa1", "standard", "2 to 4 (A100)", "our S is f32 in memory, which costs standard attention half as much again"),
    ("fa2", "standard", "3 to 10 (A100), up to 9 (H100)", "the same; PyTorch's S has 16 bits"),
    ("fa2", "fa1", "1.7 to 3 (A100), 1.4 to 2.5 (H100)",
     "of our fa1 warps share rows, not keys, and its backward pass has a CTA for each head: slow where heads are few"),
    ("fa3", "fa2", "1.5 to 2 forward, 1.5 to 1.75 backward (H100)",
     "our fa2 by mma.sync is faster than the released one on this card"),
)


def cells_of(report):
    """{(d, causal): {algorithm: {n: {pass: row}}}}"""
    cells = {}
    for row in report["results"]:
        of_table = cells.setdefault((row["d"], row["causal"]), {})
        of_table.setdefault(row["algorithm"], {}).setdefault(row["sk"], {})[row["pass"]] = row
    return cells


def speed(cell, which):
    """TFLOP/s of a pass, or of both."""
    rows = [cell[name] for name in (("forward", "backward") if which == "both" else (which,)) if name in cell]
    if len(rows) < (2 if which == "both" else 1):
        return None
    return sum(r["gflop_per_s"] * r["ms"] for r in rows) / sum(r["ms"] for r in rows) * 1e-3


def in_line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def shown(x):
    return "" if x is None else f"{x:.0f}" if x >= 10 else f"{x:.1f}"


def ratios(cells, faster, slower, which="both"):
    found = []
    for algorithms in cells.values():
        for n, cell in algorithms.get(faster, {}).items():
            a, b = speed(cell, which), speed(algorithms.get(slower, {}).get(n, {}), which)
            if a and b:
                found.append(a / b)
    return found


def causal_ratios(cells, algorithm):
    """How much sooner a causal call ends than a full one, of 4k and more."""
    found = []
    for (d, causal), algorithms in cells.items():
        for n, cell in algorithms.get(algorithm, {}).items() if causal else ():
            full = cells.get((d, False), {}).get(algorithm, {}).get(n, {})
            if n >= 4096 and "forward" in cell and "forward" in full:
                found.append(full["forward"]["ms"] / cell["forward"]["ms"])
    return found


def memory_ratios(cells, n):
    found = []
    for algorithms in cells.values():
        a, b = (algorithms.get(name, {}).get(n, {}).get("backward") for name in ("fa2", "standard"))
        if a and b:
            found.append(b["extra_bytes"] / a["extra_bytes"])
    return found


def span(found):
    return f"{min(found):.2f} to {max(found):.2f}" if found else ""


def markdown(report):
    cells = cells_of(report)
    names = [name for name in NAMES if any(name in algorithms for algorithms in cells.values())]
    lengths = sorted({row["sk"] for row in report["results"]})
    text = [
        f"# The papers' tables on {report['machine']['device']}",
        "",
        f"`fulgur bench --device cuda --reproduce {report['grid']}`, fulgur {report['machine']['fulgur']},"
        f" {report['machine']['time'][:10]}: bf16, 16k tokens in all, hidden size 2048, TFLOP/s.",
        "[algorithms.md](../algorithms.md#10-on-one-gpu) says what is compared; [a picture](papers.svg) of it.",
        "",
        in_line(("both passes", "papers", "here", "why they differ")), in_line(["---"] * 4),
    ]
    for faster, slower, claim, why in CLAIMS:
        found = ratios(cells, faster, slower)
        if found:
            text.append(in_line((f"{NAMES[faster]} over {NAMES[slower]}", claim, span(found), why)))
    forward = span(ratios(cells, "fa3", "fa2", "forward"))
    text.append(in_line(("FlashAttention-3 over FlashAttention-2, forward", "1.5 to 2 (H100)", forward, "")))
    causal = span(causal_ratios(cells, "fa2"))
    text.append(in_line(("FlashAttention-2, causal over full, forward, from 4k on", "1.7 to 1.8", causal, "")))
    for n, claim in ((2048, "10"), (4096, "20")):
        text.append(in_line((f"memory of standard over fa2 at {length(n)}", claim, span(memory_ratios(cells, n)),
                             "besides the inputs; ours counts gradients and f32 sums of dQ")))
    for (d, causal), algorithms in sorted(cells.items()):
        text += ["", f"## d {d}, {mask(causal)}", "", in_line(("pass", "algorithm", *map(length, lengths))),
                 in_line(["---", "---"] + ["---:"] * len(lengths))]
        for which in ("forward", "backward", "both"):
            for name in names:
                of_name = algorithms.get(name, {})
                text.append(in_line((which, NAMES[name], *(shown(speed(of_name.get(n, {}), which)) for n in lengths))))
        for name in names:
            rows = [algorithms.get(name, {}).get(n, {}).get("backward") for n in lengths]
            text.append(in_line(("MB besides the inputs", NAMES[name],
                                 *(shown(r and r["extra_bytes"] * 1e-6) for r in rows))))
    return "\n".join(text) + "\n"


def svg(report):
    """As the papers have them: both passes, a row of panels for each mask."""
    rows = []
    for (d, causal), algorithms in sorted(cells_of(report).items()):
        for n in sorted({n for of_name in algorithms.values() for n in of_name}):
            speeds = {f"{name}_tflops": speed(of_name.get(n, {}), "both") for name, of_name in algorithms.items()}
            rows.append({"s": n, "d": d, "causal": causal} | {k: x for k, x in speeds.items() if x})
    names = {name: text for name, text in NAMES.items() if any(f"{name}_tflops" in r for r in rows)}
    return picture({", both passes": rows}, names, {name: COLORS[name] for name in names})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=pathlib.Path, metavar="F.json", help="take this report")
    args = parser.parse_args()
    if args.write:
        report_file.write(REPORT, report_file.read(args.write))
    if not REPORT.exists():
        print("not measured yet; run `fulgur bench --device cuda --reproduce fa3 --json F` and this with --write F")
        return 77
    report, wrong = report_file.read(REPORT), False
    for suffix, text in ((".md", markdown(report)), (".svg", svg(report))):
        made = report_file.page(REPORT, suffix)
        if args.write:
            made.write_text(text)
        elif not made.exists() or made.read_text() != text:
            print(f"{made.name} is not that of {REPORT.name}; run tools/papers_table.py --write")
            wrong = True
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
