#!/usr/bin/env python3
"""The page of a report of bench/distributed.py, made from docs/performance/distributed.json.gz.

Checks that distributed.md with it is that of the json: exit status 1 if it is not, 77, which CTest shows as skipped,
where there is no report. With --write F, takes a new report and makes the page.
"""

import argparse
import math
import pathlib
import statistics
import sys

import report_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs/performance/distributed.json.gz"
WAYS = {
    "one": "one device", "gather": "gather", "invariant": "gather, invariant", "heads": "heads",
    "2d": "heads and gather", "turns": "fulgur's ring", "ring": "ring",
    "ring_fulgur": "ring on fulgur", "torch": "context_parallel", "torch_fulgur": "context_parallel on fulgur",
}
# TFLOP/s of an H100, of 8, of 64 query and 8 key heads of 128 columns: MagiAttention's charts, forward and backward.
PUBLISHED = {
    "MagiAttention": (645, 529),
    "TransformerEngine, ring": (421, 432),
    "all-gather": (600, 516),
    "Ulysses": (600, 582),
    "USP": (593, 572),
}
PUBLISHED_CASE = dict(heads=64, kv_heads=8, d=128, causal=True)


def length(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def in_line(cells):
    return f"| {' | '.join(map(str, cells))} |"


def call(row):
    mask, way = "causal" if row["causal"] else "full", "backward" if row["backward"] else "forward"
    return f"{way} {mask} {length(row['s'])}, {row['heads']}/{row['kv_heads']} heads d {row['d']}"


def published(row):
    """What others say of such a call, of 8 GPUs."""
    if any(row[name] != value for name, value in PUBLISHED_CASE.items()):
        return ""
    names = "MagiAttention", "TransformerEngine, ring"
    return ", ".join(str(PUBLISHED[name][row["backward"]]) for name in names)


def line(row):
    cells = [call(row), row["ranks"], WAYS.get(row.get("way"), f"rank {row.get('rank')} alone")]
    if "missing" in row:
        return in_line([*cells, row["missing"], *[""] * 6])
    model = row.get("predicted_ms")
    return in_line([
        *cells, f"{row['ms']:.3f}", f"{row['tflops']:.1f}" if "tflops" in row else "",
        f"{row['speedup']:.2f}" if "speedup" in row else "", f"{model:.3f}" if model else "",
        f"{row['ms'] / model - 1:+.0%}".replace("-0%", "+0%") if model else "",
        {True: "same", False: "OTHER"}.get(row.get("same_bits"), ""), published(row),
    ])  # fmt: skip


def markdown(report):
    ways = list(WAYS)
    rows = [row for row in report["rows"] if row.get("missing") != "no time"]
    rows.sort(key=lambda row: (row["s"], row["heads"], not row["causal"], row["backward"], row["ranks"],
                               ways.index(row["way"]) if row.get("way") in ways else row.get("rank", 0)))  # fmt: skip
    text = [
        f"# Attention over several processes on {report['device']}",
        "",
        f"`bench/distributed.py` on {report['date']}, PyTorch {report['torch']}, fulgur {report['fulgur']}, a process"
        f" for each device: bf16, milliseconds of the slowest rank of a call from Python. TFLOP/s are of a rank, a"
        f" causal call counts as half of a full one. The model is `fulgur explain --ranks --link {report['link']}`: the"
        f" share of what one device took here, and what is waited for; of one device the estimate of its plan."
        f" `invariant` calls have the bits of one device, or OTHER ones. [distributed.md](../distributed.md) says what"
        f" the ways are; published are TFLOP/s of MagiAttention and of TransformerEngine's ring on 8 H100.",
        "",
        in_line(["call", "ranks", "way", "ms", "TFLOP/s", "times one", "model, ms", "off", "bits", "published"]),
        in_line(["---", "---:", "---"] + ["---:"] * 5 + ["---", "---:"]),
        *map(line, rows),
    ]
    modeled = [r for r in rows if r["ranks"] > 1 and r.get("predicted_ms") and "ms" in r]
    errors = [abs(math.log(r["ms"] / r["predicted_ms"])) for r in modeled]
    if errors:
        worst, middle = (math.exp(x) - 1 for x in (max(errors), statistics.median(errors)))
        text += ["", f"The model is off by {middle:.0%} in the median, by {worst:.0%} at most, one device aside."]
    left = {}
    for row in report["rows"]:
        if row.get("missing") == "no time":
            ranks = f" of {row['ranks']}" if row["ranks"] > 1 else ""
            left.setdefault(call(row), []).append(WAYS[row["way"]] + ranks)
    if left:
        text += ["", f"There was no time for {sum(map(len, left.values()))} more:", ""]
        text += [f"- {which}: {', '.join(ways)}" for which, ways in left.items()]
    text += ["", "Published, of 8 H100, causal, 64/8 heads d 128, TFLOP/s a GPU, forward and backward: "
             + "; ".join(f"{who} {a}, {b}" for who, (a, b) in PUBLISHED.items()) + "."]  # fmt: skip
    return "\n".join(text) + "\n"


def take(report):
    """A new report, and its page."""
    report_file.write(REPORT, report)
    report_file.page(REPORT, ".md").write_text(markdown(report))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=pathlib.Path, metavar="F.json", help="take this report")
    args = parser.parse_args()
    page = report_file.page(REPORT, ".md")
    if args.write:
        take(report_file.read(args.write))
        return 0
    if not REPORT.exists():
        print(f"there is no {REPORT.name}")
        return 77
    if page.read_text() != markdown(report_file.read(REPORT)):
        print(f"{page.name} is not that of {REPORT.name}; run tools/distributed_table.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
