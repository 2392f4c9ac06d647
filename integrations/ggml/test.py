#!/usr/bin/env python3
"""Builds ggml-fulgur with llama.cpp and has ggml's own tests judge it: `make test-ggml`.

llama.cpp is what the source distribution of llama-cpp-python on PyPI brings, or the checkout that
--source names. All of it is built in build/ggml/. The steps: which cases of FLASH_ATTN_EXT of
test-backend-ops the backend claims, whether it computes them as ggml does, how fast, and whether a
model gives the same logits with it. Names of steps run only these.
"""

import argparse
import csv
import io
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/ggml"
PACKAGE = "llama-cpp-python==0.3.36"
OTHER_TYPES = re.compile(r"type_[KV]=q[12]_0\b")  # which fulgur does not know, as the documentation says
# Of the cases that test-backend-ops measures.
MEASURED = r"hsk=(64,hsv=64,nh=8,.*kv=7680|128,hsv=128,nh=8,nr23=\[4,1\],kv=(4096,|32768,nb=1,)|256,.*kv=10000)"


def run(*command, env=None, **options):
    print("$", " ".join(map(str, command)), flush=True)
    return subprocess.run([*map(str, command)], check=True, env={**os.environ, **(env or {})}, **options)


def source():
    """llama.cpp of the package."""
    folder = BUILD / "source"
    found = sorted(folder.glob("*/vendor/llama.cpp"))
    if found:
        return found[0]
    venv.create(BUILD / "venv", with_pip=True)
    pip = (BUILD / "venv/bin/python", "-m", "pip")
    run(*pip, "install", "--quiet", "scikit-build-core")  # pip asks the package for its metadata
    run(*pip, "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary=:all:", "--dest", BUILD, PACKAGE)
    with tarfile.open(next(BUILD.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))


def build(llama):
    prefix = BUILD / "prefix"
    library = ("-DFULGUR_APP=OFF", "-DFULGUR_TESTS=OFF", "-DFULGUR_BENCH=OFF", "-DCMAKE_BUILD_TYPE=Release")
    run("cmake", "-S", ROOT, "-B", BUILD / "fulgur", "-G", "Ninja", *library)
    run("cmake", "--build", BUILD / "fulgur")
    run("cmake", "--install", BUILD / "fulgur", "--prefix", prefix, stdout=subprocess.DEVNULL)
    run("cmake", "-S", ROOT / "integrations/ggml", "-B", BUILD / "backend", "-G", "Ninja",
        f"-DGGML_FULGUR_SOURCE={llama}", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", BUILD / "backend")


def backend_ops(mode, backend, *arguments, **options):
    module = {"GGML_BACKEND_PATH": str(BUILD / "backend/bin/libggml-fulgur.so")}
    return run(BUILD / "backend/bin/test-backend-ops", mode, "-o", "FLASH_ATTN_EXT", "-b", backend, *arguments,
               env=module, **options)


def support():
    """Fails where the backend claims less, or other cases, than the documentation says."""
    text = backend_ops("support", "fulgur", "--output", "csv", stdout=subprocess.PIPE, text=True).stdout
    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if "op_params" in line)
    cases = {row["op_params"]: row["supported"] == "1" for row in csv.DictReader(io.StringIO("\n".join(lines[header:])))
             if row["op_name"] == "FLASH_ATTN_EXT" and row["backend_name"] == "fulgur"}
    left = [case for case, claimed in cases.items() if not claimed]
    print(f"{len(cases) - len(left)} of {len(cases)} cases are claimed; left to ggml:", *left, sep="\n  ")
    wrong = [case for case, claimed in cases.items() if claimed == bool(OTHER_TYPES.search(case))]
    if not cases or wrong:
        sys.exit(f"support: got {len(cases)} cases, want those of q1_0 and q2_0 alone left to ggml, but: {wrong}")


def compare():
    """Fails where a case differs from ggml's CPU backend."""
    with (BUILD / "test.log").open("w") as log:
        backend_ops("test", "fulgur", stdout=log)
    print(re.search(r"\d+/\d+ tests passed", (BUILD / "test.log").read_text())[0])


def times(backend):
    """Microseconds of the measured cases."""
    text = backend_ops("perf", backend, "-p", MEASURED, stdout=subprocess.PIPE, text=True).stdout
    return {case: float(time) for case, time in re.findall(r"FLASH_ATTN_EXT\((.*?)\):.* ([0-9.]+) us/run", text)}


def perf():
    ggml, fulgur = times("CPU"), times("fulgur")
    print("   ggml us  fulgur us  ratio")
    for case, time in fulgur.items():
        print(f"{ggml[case]:10.0f} {time:10.0f} {ggml[case] / time:6.2f} {case}")


def model():
    """Fails where the logits of a model differ from those by ggml alone."""
    run(BUILD / "backend/bin/end_to_end", BUILD, BUILD / "backend/bin/libggml-fulgur.so")


def main():
    steps = {"support": support, "compare": compare, "perf": perf, "model": model}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, help="a checkout of llama.cpp")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=" ".join(steps))
    args = parser.parse_args()
    if not set(args.steps) <= set(steps):
        parser.error(f"STEP: got {' '.join(args.steps)}, want some of {' '.join(steps)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    build((args.source or source()).resolve())
    for name in args.steps or steps:
        steps[name]()


if __name__ == "__main__":
    main()
