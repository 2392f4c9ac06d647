#!/usr/bin/env python3
"""The table and the plot of a GPU report, made from docs/performance/h200.json.

Checks that h200.md and h200.svg beside it are those of the json: exit status 1 if they are not. 77,
which CTest shows as skipped, says that the kernels have changed since, or that there is no report.
With --write, makes the files.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from kernel_hash import kernel_hash  # noqa: E402

NAMES = {"fulgur": "fulgur", "flash3": "FlashAttention-3", "cudnn": "cuDNN", "flash2": "FlashAttention-2"}
COLORS = {"fulgur": "#c0392b", "flash3": "#27ae60", "cudnn": "#2980b9", "flash2": "#7f8c8d"}


def length(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def mask(causal):
    return "causal" if causal else "full"


def measured(report):
    """Keys of NAMES in the report: FlashAttention-3 is there where it was installed."""
    return [name for name in NAMES if f"{name}_tflops" in report["results"][0]]


def table(rows, names, shape, speeds, ratios):
    """Lines of Markdown: of every row its shape, the speeds and our share of them; a peer may lack a shape."""
    head = [*names, "mask", "fulgur", *speeds.values(), *ratios.values(), "SM MHz"]
    lines = [head, ["---:" if name != "mask" else "---" for name in head]]
    for r in rows:
        ours = r["fulgur_tflops"]
        others = [f"{r[key]:.0f}" if key in r else "" for key in speeds]
        shares = [f"{ours / r[key]:.2f}" if key in r else "" for key in ratios]
        lines.append([*shape(r), mask(r["causal"]), f"**{ours:.0f}**", *others, *shares, r["sm_mhz"]])
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def markdown(report):
    rows = report["results"]
    peers = [name for name in measured(report) if name != "fulgur"]

    def wins(name):
        return sum(r["fulgur_tflops"] > r[f"{name}_tflops"] for r in rows)

    speeds = {**{f"{n}_tflops": NAMES[n] for n in peers}, "gemm_tflops": "GEMM"}
    ratios = {key: f"fulgur / {heading}" for key, heading in speeds.items() if key != "flash2_tflops"}
    flash3 = f", FlashAttention-3 of {report['flash3']}" if "flash3" in peers else ""
    text = [
        f"# Forward on {report['gpu']}, bf16",
        "",
        f"TFLOP/s of 16k tokens with a hidden size of 2048; `make gpu-report` on {report['date']}, driver"
        f" {report['driver']}, PyTorch {report['torch']}, cuDNN {report['cudnn']}{flash3}, kernels"
        f" {report['kernels_sha256'][:12]}. All columns of a line were measured in turns, as CUDA graphs of"
        " many launches: the card's clock follows its load, so compare within a line. GEMM is cuBLAS, 8192 x 8192 x 8192, bf16.",
        "",
        "fulgur is faster than " + ", ".join(f"{NAMES[n]} in {wins(n)}" for n in peers) + f" of the {len(rows)} lines.",
        "",
        *table(rows, ("d", "S"), lambda r: (r["d"], length(r["s"])), speeds, ratios),
        "",
        "Too few heads for every multiprocessor, and value heads of another size:",
        "",
        *table(report["shapes"], ("batch", "S", "heads", "d", "dv"),
               lambda r: (r["batch"], length(r["s"]), r["heads"], r["d"], r["dv"]), speeds, ratios),
    ]
    text += ["", *(f"- {line}" for line in report["checks"])]
    return "\n".join(text).rstrip() + "\n"


def panel(rows, names, x0, y0, title, top):
    """One set of axes: speeds over lengths."""
    width, height = 250, 150
    lengths = [r["s"] for r in rows]

    def at(i, speed):
        return x0 + 40 + i * (width - 50) / max(1, len(lengths) - 1), y0 + 20 + height * (1 - speed / top)

    out = [f'<text x="{x0 + 40}" y="{y0 + 12}" font-weight="bold">{title}</text>']
    for speed in range(0, top + 1, 200):
        y = at(0, speed)[1]
        out.append(f'<path d="M{x0 + 35:.1f} {y:.1f}H{x0 + width - 5:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 + 30}" y="{y + 4:.1f}" text-anchor="end">{speed}</text>')
    for i, s in enumerate(lengths):
        out.append(f'<text x="{at(i, 0)[0]:.1f}" y="{y0 + height + 34}" text-anchor="middle">{length(s)}</text>')
    for name in names:
        points = " ".join("{:.1f},{:.1f}".format(*at(i, r[f"{name}_tflops"])) for i, r in enumerate(rows))
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[name]}" stroke-width="2"/>')
    return out


def svg(report):
    rows, names = report["results"], measured(report)
    top = -(-int(max(r[f"{n}_tflops"] for r in rows for n in names)) // 200) * 200
    dims = sorted({r["d"] for r in rows})
    body = []
    for row, causal in enumerate((False, True)):
        for column, d in enumerate(dims):
            cells = [r for r in rows if r["d"] == d and r["causal"] == causal]
            body += panel(cells, names, 260 * column, 200 * row, f"d {d}, {mask(causal)}: TFLOP/s by length", top)
    for i, name in enumerate(names):
        body.append(f'<path d="M{40 + 150 * i} 410h20" stroke="{COLORS[name]}" stroke-width="2"/>')
        body.append(f'<text x="{65 + 150 * i}" y="414">{NAMES[name]}</text>')
    size = f'width="{260 * len(dims)}" height="425"'
    style = 'font-family="sans-serif" font-size="11" fill="#222"'
    lines = "\n".join(body)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<rect {size} fill="white"/>\n<g {style}>\n'
            f"{lines}\n</g>\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", nargs="?", type=pathlib.Path, default=ROOT / "docs/performance/h200.json")
    parser.add_argument("--write", action="store_true", help="make the table and the plot")
    args = parser.parse_args()
    if not args.json.exists():
        print(f"{args.json}: not measured yet; run `make gpu-report` on a machine with a GPU")
        return 77
    report = json.loads(args.json.read_text())
    wrong = False
    for suffix, text in ((".md", markdown(report)), (".svg", svg(report))):
        path = args.json.with_suffix(suffix)
        if args.write:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path.name} is not that of {args.json.name}; run tools/gpu_table.py --write")
            wrong = True
    now = kernel_hash()
    stale = report["kernels_sha256"] != now
    if stale:
        print(f"{args.json.name} was measured with other kernels ({report['kernels_sha256'][:12]}, now {now[:12]});"
              " run `make gpu-report` on a machine with a GPU")
    return 1 if wrong else 77 if stale and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
