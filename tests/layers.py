"""Includes point one way: api -> plan -> engine -> kernel -> problem -> basics -> public headers.

A file may include files of its own layer and of those behind it; the engines' folders know nothing
of each other. A file that no layer names is an error, so that a new one gets its place on purpose.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
ENGINES = ("cpu", "cuda", "reference")

LAYERS = [
    ("public", r"include/fulgur/\w+\.h"),
    ("basics", r"src/(tensor|check|convert|parallel|philox)\.(h|cpp)|src/kernels/(\w+/)?\w+\.h"),
    ("problem", r"src/(problem|sequences|padding|tiles)\.(h|cpp)"),
    ("kernel", r"src/cpu/(kernels\.(h|cpp)|\w+-inl\.h)|src/reference/(?!reference_engine)\w+\.(h|cpp)"),
    ("engine", r"src/engine\.h|src/(cpu|cuda|reference)/\w+\.(h|cpp)"),
    ("plan", r"src/(plan(_cache)?\.(h|cpp)|engine\.cpp)"),
    ("api", r"src/(api|c|merge)\.cpp|src/c_struct\.h"),
]


def layer(path):
    """The index of the first layer that names `path`, or None."""
    return next((n for n, (_, files) in enumerate(LAYERS) if re.fullmatch(files, path)), None)


def engine(path):
    parts = path.split("/")
    return parts[1] if parts[0] == "src" and parts[1] in ENGINES else None


def check(files):
    """The errors of a {path: text} of source files."""
    errors = []
    for path, text in sorted(files.items()):
        if layer(path) is None:
            errors.append(f"{path}: in no layer; give it one in tests/layers.py")
            continue
        for included in INCLUDE.findall(text):
            target = next((p for p in (f"src/{included}", f"include/{included}") if p in files), None)
            if target is None:
                errors.append(f'{path}: includes "{included}", which is neither in src/ nor in include/')
                continue
            if layer(target) is None:
                continue  # said above
            if layer(target) > layer(path):
                errors.append(
                    f"{path} ({LAYERS[layer(path)][0]}) includes {target} ({LAYERS[layer(target)][0]}),"
                    " which is above it"
                )
            if engine(path) and engine(target) not in (None, engine(path)):
                errors.append(f"{path} includes {target} of another engine")
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


def main():
    self_test()
    sources = [p for folder in ("include", "src") for p in (ROOT / folder).rglob("*") if p.suffix in (".h", ".cpp")]
    files = {p.relative_to(ROOT).as_posix(): p.read_text() for p in sources}
    errors = check(files)
    print("\n".join(errors) or f"{len(files)} files, includes point one way")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
