"""Includes point one way: api -> plan -> engine -> kernel -> problem -> basics -> public headers.

A file may include files of its own layer and of those behind it; the engines' folders know nothing
of each other. Inside src/cuda: engine -> families -> gpu -> jit -> loader. Inside src/kernels: an
architecture's folder -> shared, and headers that the host reads, too, include no device text. A file
that no layer names is an error, so that a new one gets its place on purpose.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
ENGINES = ("cpu", "cuda", "reference")
SUFFIXES = (".h", ".cpp", ".cuh", ".cu")
GENERATED = ("plan.h",)  # the text that a plan makes, for device text alone

LAYERS = [
    ("public", r"include/fulgur/\w+\.h"),
    ("basics", r"src/(tensor|check|convert|parallel|rotary)\.(h|cpp)|src/kernels/(\w+/)?\w+\.(h|cuh|cu)"),
    ("problem", r"src/(problem|append_(call|lengths)|appending|cache|merge_call|sequences|key_rows|padding|prefix_parts|tiles|random_numbers|sinks|tree)\.(h|cpp)"),
    ("kernel", r"src/cpu/((kernels|amx)\.(h|cpp)|\w+-inl\.h)|src/reference/(?!reference_engine)\w+\.(h|cpp)"),
    ("engine", r"src/engine\.h|src/(cpu|cuda|reference)/\w+\.(h|cpp)"),
    ("plan", r"src/((plan(_cache)?|append_first|shared_prefix)\.(h|cpp)|engine\.cpp)"),
    ("api", r"src/(api|append|c|merge)\.cpp|src/(c_struct|prepare)\.h"),
]

# Layers inside a folder, for its files that include each other.
INNER = {
    "src/cuda/": [
        ("loader", r"(shared_library|trust|driver|sha256)\.\w+"),
        ("jit", r"(nvrtc|kernel_sources|cache_folder|cubin_cache|jit)\.\w+"),
        ("gpu", r"(gpu|launch_memory|memory)\.\w+"),
        ("families", r"(append_arguments|call_kernel|family|host_numbers|launch|tensor_map|hopper_\w+)\.\w+"),
        ("engine", r"(append|architectures|choose|merge|reachable|shape_class|shared_prefix|tuning|tune|prewarm|cuda_engine)\.\w+"),
    ],
    "src/kernels/": [
        ("shared header", r"shared/\w+\.h"),
        ("shared", r"shared/\w+\.cuh"),
        ("header", r"(sm\d+/)?\w+\.h"),
        ("architecture", r"sm\d+/\w+\.cuh"),
        ("kernel", r"(sm\d+/)?\w+\.cu"),
    ],
}


def layer(path, layers=LAYERS):
    """The index of the first layer that names `path`, or None."""
    return next((n for n, (_, files) in enumerate(layers) if re.fullmatch(files, path)), None)


def engine(path):
    parts = path.split("/")
    return parts[1] if parts[0] == "src" and parts[1] in ENGINES else None


def resolve(included, files):
    """The file that an include names, or None."""
    folders = ("src/", "include/", "src/kernels/")
    return next((folder + included for folder in folders if folder + included in files), None)


def above(path, target, layers):
    """The error of an include of `target`, which lies above `path` or nowhere, in a list."""
    mine, its = layer(path[1], layers), layer(target[1], layers)
    if mine is None or its is None or its <= mine:
        return []
    return [f"{path[0]} ({layers[mine][0]}) includes {target[0]} ({layers[its][0]}), which is above it"]


def check(files):
    """The errors of a {path: text} of source files."""
    errors = []
    for path, text in sorted(files.items()):
        folder = next((f for f in INNER if path.startswith(f)), None)
        inner = INNER.get(folder, [])
        if layer(path) is None or (inner and layer(path.removeprefix(folder), inner) is None):
            errors.append(f"{path}: in no layer; give it one in tests/layers.py")
            continue
        for included in INCLUDE.findall(text):
            if included in GENERATED and path.endswith((".cuh", ".cu")):
                continue
            target = resolve(included, files)
            if target is None:
                errors.append(f'{path}: includes "{included}", which is neither in src/ nor in include/')
                continue
            errors += above((path, path), (target, target), LAYERS)
            if engine(path) and engine(target) not in (None, engine(path)):
                errors.append(f"{path} includes {target} of another engine")
            if folder and target.startswith(folder):
                names = [(p, p.removeprefix(folder)) for p in (path, target)]
                errors += above(*names, inner)
            if folder == "src/kernels/" and path.endswith(".h") and target.endswith((".cuh", ".cu")):
                errors.append(f"{path} includes {target}, which the host cannot read")
            if not path.startswith("src/kernels/") and target.endswith((".cuh", ".cu")):
                errors.append(f"{path} includes {target}, which the host cannot read")
    return errors


def self_test():
    """The check finds what it is for."""
    clean = {"src/api.cpp": '#include "plan.h"', "src/plan.h": '#include "problem.h"', "src/problem.h": ""}
    assert check(clean) == []
    assert len(check(clean | {"src/problem.h": '#include "plan.h"'})) == 1
    assert len(check(clean | {"src/stray.cpp": ""})) == 1
    assert len(check(clean | {"src/plan.h": '#include "missing.h"'})) == 1
    engines = {"src/cpu/engine.cpp": '#include "reference/engine.h"', "src/reference/engine.h": ""}
    assert len(check(engines)) == 1
    cuda = {"src/cuda/gpu.h": '#include "cuda/driver.h"', "src/cuda/driver.h": ""}
    assert check(cuda) == []
    assert len(check(cuda | {"src/cuda/driver.h": '#include "cuda/gpu.h"'})) == 1
    assert len(check(cuda | {"src/cuda/stray.h": ""})) == 1
    kernels = {
        "src/kernels/shared/band.h": "",
        "src/kernels/shared/softmax.cuh": '#include "plan.h"\n#include "shared/band.h"',
        "src/kernels/sm90/forward.cu": '#include "shared/softmax.cuh"',
        "src/cuda/hopper_model.cpp": '#include "kernels/shared/band.h"',
    }
    assert check(kernels) == []
    assert len(check(kernels | {"src/kernels/shared/softmax.cuh": '#include "sm90/forward.cu"'})) == 1
    assert len(check(kernels | {"src/kernels/shared/band.h": '#include "shared/softmax.cuh"'})) == 2
    assert len(check(kernels | {"src/cuda/hopper_model.cpp": '#include "kernels/shared/softmax.cuh"'})) == 1
    assert len(check(kernels | {"src/cuda/hopper_model.cpp": '#include "plan.h"'})) == 1


def main():
    self_test()
    sources = [p for folder in ("include", "src") for p in (ROOT / folder).rglob("*") if p.suffix in SUFFIXES]
    files = {p.relative_to(ROOT).as_posix(): p.read_text() for p in sources}
    errors = check(files)
    print("\n".join(errors) or f"{len(files)} files, includes point one way")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
