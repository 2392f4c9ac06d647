#!/usr/bin/env python3
"""Runs FlashAttention's own tests on fulgur, from an untouched checkout, by cases drawn at random.

    tools/upstream_suite.py fa2 CHECKOUT --draws 2000 --seed 1     tests/test_flash_attn.py
    tools/upstream_suite.py fa3 CHECKOUT --draws 2000 --seed 1     hopper/test_flash_attn.py

The suites have some hundred thousand cases each. Of every test the draws cover all pairs of values
of its parameters first, as far as they reach, and are independent from then on. A case passes, is
skipped by the test itself, asks for what fulgur does not have (counted by the argument's name), or
fails; exit status 1 if one fails. Needs fulgur, torch, pytest and einops, and for the real suites a
GPU. Switches of the suites (FLASH_ATTENTION_DISABLE_SPLIT=TRUE and others) are environment variables.
"""

import argparse
import collections
import importlib.util
import itertools
import json
import pathlib
import random
import sys
import traceback

import pytest

import fulgur

SUITES = {  # what to stand in for, the file, and folders that it imports from
    "fa2": (("flash_attn",), "tests/test_flash_attn.py", ()),
    "fa3": (("flash_attn", "flash_attn_interface"), "hopper/test_flash_attn.py", ("hopper",)),
}
# Tests as a whole of what fulgur does not have.
LACKS = {
    "test_flash3_bw_compatibility": "torch.ops.flash_attn_3",
    "test_flash_attn_generator_arg_must_be_none": "flash_attn_gpu",
    # They are clamped, as docs/contract.md says: reading them would make the host wait for the device.
    "test_flash_attn_kvcache_paged_block_table_bounds": "errors about lengths on the device",
}
CANDIDATES = 30  # of which the one with the most new pairs is drawn


def load(suite, checkout):
    """The suite's module, which finds fulgur where it imports FlashAttention."""
    names, file, folders = SUITES[suite]
    for name in names:
        fulgur.install_as(name)
    sys.path[:0] = [str(checkout / folder) for folder in folders]
    spec = importlib.util.spec_from_file_location("upstream_suite_module", checkout / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def axes_of(function):
    """[(names, values)] of its marks parametrize."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if mark.name != "parametrize":
            continue
        names, values = mark.args[:2]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        values = [v.values if hasattr(v, "values") and hasattr(v, "marks") else v for v in values]
        values = [v[0] if len(names) == 1 and isinstance(v, tuple) and len(v) == 1 else v for v in values]
        axes.append((names, values))
    return axes


def draws(axes, count, rng):
    """So many cases, as indices into the values of each axis."""
    sizes = [len(values) for _, values in axes]
    sides = list(itertools.combinations(range(len(sizes)), 2))
    open_pairs = {(a, i, b, j) for a, b in sides for i in range(sizes[a]) for j in range(sizes[b])}

    def pairs(case):
        return {(a, case[a], b, case[b]) for a, b in sides} & open_pairs

    for _ in range(count):
        candidates = [tuple(map(rng.randrange, sizes)) for _ in range(CANDIDATES if open_pairs else 1)]
        case = max(candidates, key=lambda c: len(pairs(c)))
        open_pairs -= pairs(case)
        yield case


def arguments(axes, case):
    result = {}
    for (names, values), index in zip(axes, case):
        value = values[index]
        result |= dict(zip(names, (value,) if len(names) == 1 else value))
    return result


def outcome(function, values):
    """("passed" | "skipped" | "missing" | "failed", why)."""
    try:
        function(**values)
    except pytest.skip.Exception as skip:
        return "skipped", str(skip)
    except NotImplementedError as missing:
        return "missing", str(missing).partition(":")[0]
    except (Exception, pytest.fail.Exception) as error:
        return "failed", "".join(traceback.format_exception_only(error)).strip()
    return "passed", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("checkout", type=pathlib.Path, help="of FlashAttention's repository")
    parser.add_argument("--draws", type=int, default=2000, help="of all tests together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="tests whose names contain this")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the counts and the failures")
    args = parser.parse_args()
    module = load(args.suite, args.checkout)
    tests = {name: test for name, test in sorted(vars(module).items())
             if name.startswith("test_") and callable(test) and args.only in name}  # fmt: skip
    if not tests:
        parser.error(f"--only: got {args.only!r}, which no test of the suite has in its name")
    counts, missing, failures = collections.Counter(), collections.Counter(), []
    for name, test in tests.items():
        axes, of_test = axes_of(test), collections.Counter()
        rng = random.Random(f"{args.seed} {name}")
        for case in draws(axes, max(1, args.draws // len(tests)) if axes else 1, rng):
            values = arguments(axes, case)
            result, why = ("missing", LACKS[name]) if name in LACKS else outcome(test, values)
            of_test[result] += 1
            if result == "missing":
                missing[why] += 1
            if result == "failed":
                failures.append({"test": name, "arguments": repr(values), "why": why})
                print(f"FAILED {name}({values}): {why}", flush=True)
        counts += of_test
        print(f"{name}: {', '.join(f'{n} {what}' for what, n in sorted(of_test.items()))}", flush=True)
    for what, n in missing.most_common():
        print(f"missing: {what} in {n} cases")
    print(f"{args.suite}, seed {args.seed}: {counts['passed']} passed, {counts['failed']} failed, "
          f"{counts['skipped']} skipped by the suite, {counts['missing']} want what is missing")
    if args.json is not None:
        about = {"suite": args.suite, "seed": args.seed, "counts": counts, "missing": missing, "failures": failures}
        args.json.write_text(json.dumps(about, indent=1) + "\n")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
