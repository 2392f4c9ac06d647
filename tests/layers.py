"""Includes point one way: api -> plan -> cpu, cuda, reference -> host -> engine -> call -> base -> kernels.

Each folder of src/ names the folders that its files may include; the folders that a folder does not
name, it does not know. Inside a folder no two files (a source with its header is one) include each
other, however many files lie between them. Headers below src/kernels/ that the host reads include no
device text.
"""

import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
DEVICE = (".cuh", ".cu")
GENERATED = "kernel_config.h"  # a plan's constants, which only device text includes
MAX_UNITS = 16  # of a folder

PUBLIC = "include/fulgur"
PUBLIC_CODES = "include/fulgur/codes"
PUBLIC_GROUPS = "include/fulgur/distributed"
HOST_DEVICE = ["kernels/host_device"]
SM90_PARAMS = ["kernels/attention"] + [f"kernels/sm90/{kernel}" for kernel in ("common", "forward", "backward")]
CALL = [PUBLIC, "base", "expression", "call", *HOST_DEVICE]
CUDA_COMMON = [*CALL, "engine", "kernels/common", "kernels/codes", "kernels/backward", "cuda/driver", "cuda/jit",
               "cuda/device"]
CUDA_PASSES = [*CUDA_COMMON, "cuda/common", "cuda/maps"]
KERNEL = [*HOST_DEVICE, "kernels/device"]
ATTENTION_KERNEL = [*KERNEL, "kernels/attention"]
SM90_KERNEL = [*ATTENTION_KERNEL, "kernels/sm90/ptx", "kernels/sm90/common"]
SM90_FORWARD = [*SM90_KERNEL, "kernels/sm90/forward", "kernels/sm90/forward/maps"]
DECODE_KERNEL = [*SM90_KERNEL, "kernels/common",
                 *(f"kernels/decode{part}"
                   for part in ("", "/codes", "/codes/warpgroup", "/loads", "/schedule", "/warpgroup", "/wide"))]

# What the files of a folder may include besides their own folder.
FOLDERS = {
    PUBLIC: [PUBLIC_CODES, PUBLIC_GROUPS],
    PUBLIC_CODES: [PUBLIC],
    PUBLIC_GROUPS: [PUBLIC],
    "base": [PUBLIC, *HOST_DEVICE],
    "expression": [PUBLIC, "base", *HOST_DEVICE],
    "call": [PUBLIC, "base", "expression", *HOST_DEVICE],
    "engine": CALL,
    "host": [*CALL, "engine"],
    "reference": [*CALL, "engine", "host"],
    "cpu": [*CALL, "engine", "host", "cpu/kernels"],
    "cpu/kernels": [*CALL, "cpu/kernels/simd", "cpu/kernels/bf16"],
    "cpu/kernels/simd": CALL,
    "cpu/kernels/bf16": [*CALL, "cpu/kernels/simd"],
    "cuda/driver": [PUBLIC, "base"],
    "cuda/jit": [PUBLIC, "cuda/driver"],
    "cuda/device": [PUBLIC, "base", "cuda/driver", "cuda/jit"],
    "cuda/common": CUDA_COMMON,
    "cuda/maps": [*CUDA_COMMON, "cuda/common"],
    "cuda/passes": CUDA_PASSES,
    "cuda/decode": [*CUDA_PASSES, "cuda/passes", "kernels/decode"],
    "cuda/sm90": [*CUDA_PASSES, "cuda/passes", "cuda/decode", *SM90_PARAMS],
    "cuda/portable": [*CUDA_PASSES, "cuda/passes", "kernels/portable/forward", "kernels/portable/backward",
                      "kernels/portable/wide_backward"],
    "cuda/papers": [*CUDA_COMMON, "cuda/common", "cuda/passes", "cuda/portable", "kernels/papers"],
    "cuda/engine": [*CUDA_COMMON, "cuda/common", "cuda/decode", "cuda/papers", "cuda/passes", "cuda/portable",
                    "cuda/sm90"],
    "plan": [*CALL, "engine", "reference", "cpu", "cuda/engine"],
    "api": [*CALL, "engine", "plan", PUBLIC_CODES, PUBLIC_GROUPS],
    "distributed": [*CALL, PUBLIC_GROUPS, "distributed/device", "distributed/group", "distributed/transport"],
    "distributed/device": [*CALL, PUBLIC_GROUPS, "distributed/group", "distributed/transport", "kernels/backward",
                           "cuda/driver", "cuda/jit", "cuda/device", "cuda/common"],
    "distributed/group": [*CALL, PUBLIC_GROUPS, "distributed/transport"],
    "distributed/transport": [PUBLIC, PUBLIC_GROUPS, "base", "cuda/driver", "cuda/jit", "cuda/device"],
    "kernels/host_device": [],
    "kernels/codes": [*HOST_DEVICE, "kernels/common", "kernels/device"],
    "kernels/common": ATTENTION_KERNEL,
    "kernels/device": [*HOST_DEVICE, "kernels/common"],
    "kernels/attention": KERNEL,
    "kernels/maps": ATTENTION_KERNEL,
    "kernels/backward": [*ATTENTION_KERNEL, "kernels/maps"],
    "kernels/portable/common": KERNEL,
    "kernels/portable/forward": [*ATTENTION_KERNEL, "kernels/portable/common"],
    "kernels/portable/backward": [*ATTENTION_KERNEL, "kernels/backward", "kernels/portable/common"],
    "kernels/portable/wide_backward": [*ATTENTION_KERNEL, "kernels/backward", "kernels/portable/backward"],
    "kernels/papers": [*ATTENTION_KERNEL, "kernels/portable/common", "kernels/portable/forward"],
    "kernels/sm90/ptx": KERNEL,
    "kernels/sm90/common": [*ATTENTION_KERNEL, "kernels/sm90/ptx"],
    "kernels/sm90/forward": SM90_FORWARD,
    "kernels/sm90/forward/maps": SM90_FORWARD,
    "kernels/sm90/backward": [*SM90_KERNEL, "kernels/backward"],
    "kernels/decode": DECODE_KERNEL,
    "kernels/decode/codes": DECODE_KERNEL,
    "kernels/decode/codes/warpgroup": DECODE_KERNEL,
    "kernels/decode/loads": DECODE_KERNEL,
    "kernels/decode/schedule": DECODE_KERNEL,
    "kernels/decode/warpgroup": DECODE_KERNEL,
    "kernels/decode/wide": DECODE_KERNEL,
}


def folder_of(path):
    return path.rsplit("/", 1)[0].removeprefix("src/")


def unit_of(path):
    """A file without its suffix: a source and its header are one unit."""
    return path.rsplit(".", 1)[0].removesuffix("-inl")


def resolve(included, files):
    """The file that an include names, or None."""
    folders = ("src/", "include/", "src/kernels/")
    return next((folder + included for folder in folders if folder + included in files), None)


def cycles(graph):
    """The circles of a {unit: units that it includes}, each as the list of its units."""
    found, done = [], set()

    def visit(unit, path):
        if unit in path:
            found.append([*path[path.index(unit):], unit])
        elif unit not in done:
            for target in sorted(graph[unit]):
                visit(target, [*path, unit])
            done.add(unit)

    for unit in sorted(graph):
        visit(unit, [])
    return found


def check(files):
    """The errors of a {path: text} of source files."""
    errors, graph, units = [], collections.defaultdict(set), collections.defaultdict(set)
    for path, text in sorted(files.items()):
        folder = folder_of(path)
        units[folder].add(unit_of(path))
        if folder not in FOLDERS:
            errors.append(f"{path}: no folder of tests/layers.py; name it there with what it may include")
            continue
        graph[unit_of(path)]
        for included in INCLUDE.findall(text):
            if included == GENERATED and path.endswith(DEVICE):
                continue
            target = resolve(included, files)
            if target is None:
                errors.append(f'{path}: includes "{included}", which is neither in src/ nor in include/')
                continue
            its = folder_of(target)
            if its != folder and its not in FOLDERS[folder]:
                errors.append(f"{path} includes {target}; files of {folder} may include {FOLDERS[folder]}")
            if target.endswith(DEVICE) and not path.endswith(DEVICE):
                errors.append(f"{path} includes {target}, which the host cannot read")
            if unit_of(target) != unit_of(path):
                graph[unit_of(path)].add(unit_of(target))
    errors += [f"includes form a circle: {' -> '.join(circle)}" for circle in cycles(graph)]
    errors += [f"{folder} has {len(names)} units, want at most {MAX_UNITS}: divide it"
               for folder, names in units.items() if len(names) > MAX_UNITS]  # fmt: skip
    return errors


def self_test():
    """The check finds what it is for."""
    clean = {"src/api/api.cpp": '#include "plan/plan.h"', "src/plan/plan.h": '#include "call/problem.h"',
             "src/call/problem.h": ""}  # fmt: skip
    assert check(clean) == []
    assert len(check(clean | {"src/call/problem.h": '#include "plan/plan.h"'})) == 2  # a folder above, a circle
    assert len(check(clean | {"src/stray/a.cpp": ""})) == 1
    assert len(check(clean | {"src/call/problem.h": '#include "missing.h"'})) == 1
    circle = {"src/call/a.h": '#include "call/b.h"', "src/call/b.h": "", "src/call/b.cpp": '#include "call/a.h"'}
    assert len(check(circle)) == 1
    engines = {"src/cpu/engine.cpp": '#include "reference/engine.h"', "src/reference/engine.h": ""}
    assert len(check(engines)) == 1
    assert len(check({f"src/call/{n}.h": "" for n in range(MAX_UNITS + 1)})) == 1
    kernels = {
        "src/kernels/host_device/mask.h": "",
        "src/kernels/attention/softmax.cuh": '#include "kernel_config.h"\n#include "host_device/mask.h"',
        "src/kernels/sm90/forward/forward.cu": '#include "attention/softmax.cuh"',
        "src/cuda/sm90/forward_cost.cpp": '#include "kernels/host_device/mask.h"',
    }
    assert check(kernels) == []
    assert check(kernels | {"src/kernels/host_device/mask.h": '#include "attention/softmax.cuh"'})
    assert len(check(kernels | {"src/cuda/sm90/forward_cost.cpp": '#include "kernels/attention/softmax.cuh"'})) == 1
    assert len(check(kernels | {"src/cuda/sm90/forward_cost.cpp": '#include "kernel_config.h"'})) == 1


def main():
    self_test()
    sources = [p for folder in ("include", "src") for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    files = {p.relative_to(ROOT).as_posix(): p.read_text() for p in sources}
    errors = check(files)
    print("\n".join(errors) or f"{len(files)} files, includes point one way")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
