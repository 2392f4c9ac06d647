#!/usr/bin/env python3
"""The CPUs' speed tables, made from docs/performance/cpu/*.json.gz (`fulgur bench --json`).

The folder has a report for each CPU and grid. docs/performance/cpu.md shows the newest one of the standard grid of each
make and all of the decode grid, README.md a few figures of the former. Checks that they do: exit status 1 if not. With
--write, makes them so; with --add, puts a new report into the folder first.
"""

import argparse
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import report_file  # noqa: E402
from marked import put  # noqa: E402

REPORTS = "docs/performance/cpu"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def length(n):
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)


def than_torch(row):
    return f", {row['fulgur_speedup']:.1f}x" if "fulgur_speedup" in row else ""


def cell(row):
    return f"{row['gflop_per_s']:.0f} ({row['percent_of_fma_peak']:.0f}%{than_torch(row)})"


SHORT = 1024  # below, sequences have tables of their own


def products(rows, threads):
    """Forward and backward on `threads` threads: a line per pass, dtype and head dim."""
    rows = [r for r in rows if r["pass"] != "decode" and r["threads"] == threads and not r["causal"]]
    rows = [r for r in rows if r["sq"] >= SHORT]
    lengths = sorted({r["sq"] for r in rows})
    lines = {}
    for r in rows:
        lines.setdefault((r["pass"], r["dtype"], str(r["d"])), {})[r["sq"]] = cell(r)
    head = ["pass", "dtype", "d", *(f"N = {length(n)}" for n in lengths)]
    return table(head, [[*key, *(cells.get(n, "") for n in lengths)] for key, cells in lines.items()])


def short(rows):
    """Forward of short sequences: a line per threads, dtype and heads."""
    rows = [r for r in rows if r["pass"] == "forward" and r["sq"] < SHORT]
    lengths = sorted({r["sq"] for r in rows})
    lines = {}
    for r in rows:
        text = f"{1e3 * r['ms']:.0f} µs{than_torch(r)}; first {1e3 * r['first_ms']:.0f}"
        lines.setdefault((r["threads"], r["dtype"], r["hq"]), {})[r["sq"]] = text
    head = ["threads", "dtype", "heads", *(f"N = {n}" for n in lengths)]
    return table(head, [[*map(str, key), *(cells.get(n, "") for n in lengths)] for key, cells in sorted(lines.items())])


def causal(rows):
    """Causal with full, where both were measured."""

    def key(r):
        return r["pass"], r["dtype"], r["d"], r["sq"], r["threads"]

    full = {key(r): r["ms"] for r in rows if not r["causal"]}
    lines = [
        [r["pass"], r["dtype"], str(r["d"]), length(r["sq"]), f"{full[key(r)]:.1f} ms", f"{r['ms']:.1f} ms",
         f"{full[key(r)] / r['ms']:.2f}x"]
        for r in rows if r["causal"] and key(r) in full
    ]
    return table(["pass", "dtype", "d", "N", "full", "causal", "faster by"], lines)


def decode(rows):
    lines = [
        [r["dtype"], str(r["hq"] // r["hk"]), str(r["d"]), length(r["sk"]), f"{1e3 * r['ms']:.0f} µs",
         f"{r['gbytes_per_s']:.1f} GB/s ({r['percent_of_read_bandwidth']:.0f}%{than_torch(r)})"]
        for r in rows if r["pass"] == "decode"
    ]
    return table(["dtype", "query heads per key head", "d", "keys", "time", "of memory's read rate"], lines)


def decode_grid(report):
    """A line per dtype, group and tokens; a column per sequences and keys."""
    rows = sorted(report["results"], key=lambda r: (r["batch"], r["sk"]))
    columns, lines = {}, {}
    for r in rows:
        column = columns.setdefault((r["batch"], r["sk"]), f"{r['batch']} x {length(r['sk'])}")
        cell = f"{r['gbytes_per_s']:.1f} ({r['percent_of_read_bandwidth']:.0f}%)"
        lines.setdefault((r["dtype"], r["hq"] // r["hk"], r["sq"]), {})[column] = cell
    order = ["f32", "bf16", "f16"]
    return table(
        ["dtype", "group", "tokens", *columns.values()],
        [[*map(str, key), *(cells.get(column, "") for column in columns.values())]
         for key, cells in sorted(lines.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:]))],
    )


def threads_in_words(n):
    return "1 thread" if n == 1 else f"{n} threads"


def paragraph(text):
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def machine_in_words(machine):
    return (
        f"{machine['cpu']}, {machine['simd']}, {machine['compiler']}, fulgur {machine['fulgur']}, "
        f"{machine['time'][:10]}."
    )


def render_decode(report):
    machine, peaks = report["machine"], report["peaks"]
    text = f"### {machine['cpu']}\n\n" + paragraph(
        f"{machine_in_words(machine)} Memory reads {peaks['read_gbytes_per_s_all_threads']:.1f} GB/s on "
        f"{threads_in_words(machine['threads'])}, in the same turns; medians over three rounds."
    )
    if "note" in machine:
        text += "\n" + paragraph(machine["note"])
    return text + "\n" + decode_grid(report)


def render(report):
    machine, peaks, rows = report["machine"], report["peaks"], report["results"]
    text = f"### {machine['cpu']}\n\n" + paragraph(
        f"{machine_in_words(machine)} Measured peaks: f32 FMA {peaks['fma_gflop_per_s_1_thread']:.0f} GFLOP/s on "
        f"1 thread, {peaks['fma_gflop_per_s_all_threads']:.0f} on {machine['threads']}; memory reads "
        f"{peaks['read_gbytes_per_s_all_threads']:.1f} GB/s. Times are medians over five rounds; 2 heads, sq = sk = N."
    )
    if "note" in machine:
        text += "\n" + paragraph(machine["note"])
    if "torch" in machine:
        text += "\n" + paragraph(
            f"The factor in brackets is how many times faster fulgur is than scaled_dot_product_attention of "
            f"torch {machine['torch']} on the CPU, on the same shape, dtype and threads."
        )
    for threads in sorted({r["threads"] for r in rows if r["pass"] != "decode"}):
        text += f"\nOn {threads_in_words(threads)}:\n\n{products(rows, threads)}"
    text += f"\nCausal against full, on {threads_in_words(machine['threads'])}:\n\n{causal(rows)}"
    text += f"\nDecoding, 1 query and 2 sequences, on {threads_in_words(machine['threads'])}:\n\n{decode(rows)}"
    if any(r["sq"] < SHORT for r in rows if r["pass"] == "forward"):
        text += f"\nShort sequences, forward, d 64; \"first\": planning and the first call:\n\n{short(rows)}"
    return text


PAGE = """# CPUs

`make bench` measures the machine it runs on and adds its report. Each cell is GFLOP/s and, in brackets, the share of the
machine's f32 FMA peak, measured in the same run; bf16 on AMX's tiles and by AVX512-BF16's dot products passes it.

"""
DECODE_PAGE = """
## Decode

GB/s of K and V read and the share of the rate at which the machine reads memory, by dtype, query heads of a kv head and
new tokens of a sequence, for so many sequences and keys (`make bench-decode`).

"""


def summary(reports):
    """A line for each CPU, pass and dtype: GFLOP/s on all its threads, and how many times faster than PyTorch."""
    lines = []
    for report in reports:
        rows = [r for r in report["results"] if r["pass"] != "decode" and r["sq"] == 4096 and not r["causal"]]
        cells = {}
        for r in rows:
            if r["threads"] == report["machine"]["threads"] and r["dtype"] != "f16":
                text = f"{r['gflop_per_s']:.0f}" + (f" ({r['fulgur_speedup']:.1f}x)" if "fulgur_speedup" in r else "")
                cells.setdefault((r["pass"], r["dtype"]), {})[r["d"]] = text
        cpu = re.sub(r"\((R|TM)\)", "", report["machine"]["cpu"])
        lines += [[cpu, *key, *(at.get(d, "") for d in (64, 128))] for key, at in cells.items()]
    return table(["CPU", "pass", "dtype", "d 64", "d 128"], lines)


def name_of(report):
    """The file name of a report: its CPU, that it multiplied on tiles, where it did, and its grid."""
    machine = report["machine"]
    tiles = "" if "tiles for" not in machine["simd"] else " amx"
    grid = " decode" if report["grid"] == "decode" else ""
    words = re.sub(r"\((r|tm)\)|@.*", "", machine["cpu"].lower() + tiles + grid)
    return "-".join(re.findall(r"[a-z0-9]+", words)) + ".json.gz"


def newest_of_each_make(reports):
    """By the first word of the CPU's name, in the order of the alphabet."""
    makes = {}
    for report in sorted(reports, key=lambda r: r["machine"]["time"]):
        makes[report["machine"]["cpu"].split()[0]] = report
    return [makes[make] for make in sorted(makes)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables instead of checking them")
    parser.add_argument("--add", metavar="F.json", type=pathlib.Path, help="a report to add, or to replace its CPU's")
    parser.add_argument("--note", help="with --add: what else a reader should know of the machine or the run")
    args = parser.parse_args()
    if args.note and not args.add:
        parser.error("--note: got no --add, whose report it belongs to")
    if args.add:
        report = report_file.read(args.add)
        if args.note:
            report["machine"]["note"] = args.note
        report_file.write(ROOT / REPORTS / name_of(report), report)

    reports = [report_file.read(path) for path in sorted((ROOT / REPORTS).glob("*.json.gz"))]
    of_decode = [report for report in reports if report["grid"] == "decode"]
    newest = newest_of_each_make(report for report in reports if report["grid"] != "decode")
    page = PAGE + "\n".join(map(render, newest)) + DECODE_PAGE + "\n".join(map(render_decode, of_decode))
    write = args.write or args.add is not None
    path = ROOT / "docs/performance/cpu.md"
    if write:
        path.write_text(page)
    same = path.read_text() == page
    if not same:
        print("cpu.md is not that of the reports")
    if not (put(ROOT / "README.md", "cpu", summary(newest), write) and same):
        sys.exit("run tools/cpu_table.py --write")


if __name__ == "__main__":
    main()
