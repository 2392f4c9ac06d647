#!/usr/bin/env python3
"""The page and the pictures of a training report, made from docs/performance/training.json.gz.

Checks that training.md and training.svg with it are those of the json: exit status 1 if they are
not, 77, which CTest shows as skipped, where there is no report. With --write, makes the files.
"""

import argparse
import pathlib
import sys

import report_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAMES = {
    "fulgur": "fulgur", "fa3": "FlashAttention-3", "cudnn": "cuDNN", "fa2": "FlashAttention-2",
    "sdpa": "PyTorch's choice", "math": "without",
}
COLORS = {
    "fulgur": "#c0392b", "fa3": "#27ae60", "cudnn": "#2980b9", "fa2": "#7f8c8d", "sdpa": "#8e44ad", "math": "#e67e22",
}


def length(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def groups(entries):
    """The entries of each shape, in their order."""
    shapes = {}
    for entry in entries:
        shapes.setdefault((entry["size"], entry["seqlen"], entry["batch"]), []).append(entry)
    return shapes


def title(shape):
    size, seqlen, batch = shape
    return f"GPT {size}, {length(seqlen)} tokens, batch {batch}"


def in_line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def markdown(report):
    text = [
        f"# Training on {report['device']}",
        "",
        f"`examples/train_gpt.py` on {report['date']}, PyTorch {report['torch']}: {report['dtype']}, float32 weights,"
        " AdamW, on the source of Python's standard library. TFLOP/s and MFU (of 989 TFLOP/s) count the model's FLOPs"
        " as FlashAttention-2's paper does; \"without\" is PyTorch's math, which keeps all scores."
        + (f" {report['note']}" if "note" in report else ""),
    ]
    if report["speed"]:
        text += ["", "Every attention in turns, in one process, on one model:", ""]
        text += [in_line(("model", "tokens", "batch", "attention", "ms a step", "tokens/s", "TFLOP/s", "MFU", "GiB"))]
        text += [in_line(["---", "---:", "---:", "---"] + ["---:"] * 5)]
        for entry in report["speed"]:
            shape = entry["size"], length(entry["seqlen"]), entry["batch"], NAMES[entry["attn"]]
            if "missing" in entry:
                text.append(in_line((*shape, entry["missing"], "", "", "", "")))
                continue
            mfu = "" if entry["mfu"] is None else f"{entry['mfu']:.1%}"
            memory = "" if entry["memory_gib"] is None else f"{entry['memory_gib']:.1f}"
            text.append(in_line((*shape, f"{entry['ms']:.1f}", f"{entry['tokens_per_second']:.0f}",
                                 f"{entry['tflops']:.3g}", mfu, memory)))
    for shape, entries in groups(report["curves"]).items():
        text += ["", f"Losses of {title(shape)}, from the same weights on the same batches:", ""]
        text += [in_line(("attention", "ms a step", "first loss", "last loss")), in_line(["---"] + ["---:"] * 3)]
        for entry in entries:
            name = NAMES[entry["attn"]]
            if "missing" in entry:
                text.append(in_line((name, entry["missing"], "", "")))
                continue
            losses = entry["losses"]
            text.append(in_line((name, f"{entry['ms']:.1f}", f"{losses[0]:.4f}", f"{losses[-1]:.4f}")))
    return "\n".join(text) + "\n"


def curve_panel(shape, entries, y0):
    """One set of axes: losses over steps."""
    width, height = 700, 160
    entries = [e for e in entries if "losses" in e]
    top = max(max(e["losses"]) for e in entries)
    steps = max(len(e["losses"]) for e in entries)

    def at(step, loss):
        return 40 + step * (width - 50) / max(1, steps - 1), y0 + 20 + height * (1 - loss / top)

    out = [f'<text x="40" y="{y0 + 12}" font-weight="bold">{title(shape)}: loss by step, 0 to {steps}</text>']
    for loss in range(int(top) + 1):
        y = at(0, loss)[1]
        out.append(f'<path d="M35 {y:.1f}H{width}" stroke="#ddd"/>'
                   f'<text x="30" y="{y + 4:.1f}" text-anchor="end">{loss}</text>')
    for width_of_line, entry in zip((4, 1.5, 1, 1, 1, 1), entries):
        points = " ".join("{:.1f},{:.1f}".format(*at(i, loss)) for i, loss in enumerate(entry["losses"]))
        out.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[entry["attn"]]}" '
                   f'stroke-width="{width_of_line}"/>')
    return out, height + 40


def bar_panel(shape, entries, y0):
    """Bars of TFLOP/s."""
    out = [f'<text x="40" y="{y0 + 12}" font-weight="bold">{title(shape)}: TFLOP/s</text>']
    top = max((e["tflops"] for e in entries if "tflops" in e), default=1)
    for i, entry in enumerate(entries):
        y, name = y0 + 20 + 18 * i, NAMES[entry["attn"]]
        size = 430 * entry["tflops"] / top if "tflops" in entry else 0
        said = f"{entry['tflops']:.3g}" if "tflops" in entry else entry["missing"]
        out.append(f'<text x="145" y="{y + 11}" text-anchor="end">{name}</text>'
                   f'<rect x="150" y="{y}" width="{size:.1f}" height="14" fill="{COLORS[entry["attn"]]}"/>'
                   f'<text x="{155 + size:.1f}" y="{y + 11}">{said}</text>')
    return out, 18 * len(entries) + 36


def svg(report):
    body, y = [], 10
    for shape, entries in groups(report["speed"]).items():
        lines, height = bar_panel(shape, entries, y)
        body, y = body + lines, y + height
    for shape, entries in groups(report["curves"]).items():
        if any("losses" in e for e in entries):
            lines, height = curve_panel(shape, entries, y)
            body, y = body + lines, y + height
    used = list(dict.fromkeys(e["attn"] for e in report["curves"]))
    for i, name in enumerate(used):
        body.append(f'<path d="M{40 + 150 * i} {y + 6}h20" stroke="{COLORS[name]}" stroke-width="3"/>'
                    f'<text x="{65 + 150 * i}" y="{y + 10}">{NAMES[name]}</text>')
    size = f'width="720" height="{y + 25}"'
    style = 'font-family="sans-serif" font-size="11" fill="#222"'
    lines = "\n".join(body)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<rect {size} fill="white"/>\n<g {style}>\n'
            f"{lines}\n</g>\n</svg>\n")


def write(path):
    """Makes the page and the pictures with a json."""
    report = report_file.read(path)
    report_file.page(path, ".md").write_text(markdown(report))
    report_file.page(path, ".svg").write_text(svg(report))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", nargs="?", type=pathlib.Path, default=ROOT / "docs/performance/training.json.gz")
    parser.add_argument("--write", action="store_true", help="make the page and the pictures")
    args = parser.parse_args()
    if not args.json.exists():
        print(f"{args.json}: not measured yet; run examples/train_gpt.py report on a machine with an H100 or H200")
        return 77
    if args.write:
        write(args.json)
    report = report_file.read(args.json)
    wrong = [suffix for suffix, text in ((".md", markdown(report)), (".svg", svg(report)))
             if report_file.page(args.json, suffix).read_text() != text]
    for suffix in wrong:
        print(f"training{suffix} is not that of {args.json.name}; run tools/training_table.py --write")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
