#!/usr/bin/env python3
"""Builds and runs every test; a step that fails does not keep the others from running.

tools/test.py [STEP...] runs only these steps. The last line counts the tests that passed, failed
and were skipped; a step that fails without a test of its own failing counts as one. Logs and
results are in build/tests/. Python packages come from PyPI, everything else from the system.
"""

import argparse
import concurrent.futures
import datetime
import functools
import json
import os
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
RESULTS = BUILD / "tests"
VENV_PYTHON = BUILD / "venv/bin/python"
# What several builds compile with the same options is compiled once: all lie in build/, so that paths relative to them
# are the same, and call the compiler by one name, for which pip would take another than CMake.
COMPILERS = {"CC": "gcc", "CXX": "g++", "CMAKE_C_COMPILER_LAUNCHER": "ccache",
             "CMAKE_CXX_COMPILER_LAUNCHER": "ccache", "CCACHE_BASEDIR": str(ROOT), "CCACHE_DEPEND": "1"}
# Two programs at a time share the cores: threads that spin while they wait would take them from the other one.
THREADS = {"OMP_WAIT_POLICY": "passive"}
# A run draws samples by the day's number, or by this one.
SEED = int(os.environ.get("FULGUR_TEST_SEED", datetime.date.today().toordinal()))
EVERYTHING = "--all" in sys.argv[1:]  # without samples
EMULATED = 2  # of the tests of the emulator
PARTS = 6  # of the cases of slow C++ tests a run takes one part of so many
CHECKED = 6  # of the small tests a run builds so many with AddressSanitizer
PROGRAMS = {"attention_small": "attention_test", "sanitizer": "sanitizer_test"}  # of tests with other names
ALONE = 8  # files of the library that are compiled by themselves in such a run
STATIC = ("-G", "Ninja", "-DBUILD_SHARED_LIBS=OFF", "-DFULGUR_APP=OFF", "-DFULGUR_TESTS=OFF", "-DFULGUR_BENCH=OFF")
FUZZ_TARGETS = ("fuzz_c_api", "fuzz_npy", "fuzz_safetensors")  # two at a time
FUZZ_SECONDS = 10  # of each target
FUZZ_BYTES = 1 << 20  # of an input: what only breaks a parser when it is deep or long is in reach


class StepFailed(Exception):
    pass


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(*command, env=None):
    print("$", " ".join(map(str, command)), flush=True)
    code = subprocess.run([*map(str, command)], cwd=ROOT, stdin=subprocess.DEVNULL,
                          env={**COMPILERS, **THREADS, **os.environ, **(env or {})}).returncode
    if code != 0:
        raise StepFailed(f"{command[0]} ended with status {code}")


def build(preset, *settings):
    run("cmake", "--preset", preset, *settings)
    run("cmake", "--build", "--preset", preset)


def ctest(preset, *arguments, name=None, env=None):
    run("ctest", "--preset", preset, "--output-junit", RESULTS / f"{name or preset}.xml", *arguments, env=env)


def ctest_sample(preset, *arguments):
    """The tests, and a part of the cases of each slow one."""
    part = {} if EVERYTHING else {"GTEST_TOTAL_SHARDS": str(PARTS), "GTEST_SHARD_INDEX": str(SEED % PARTS)}
    try:
        ctest(preset, "-LE", "slow", *arguments)
    finally:
        ctest(preset, "-L", "slow", "--no-tests=ignore", *arguments, name=f"{preset}-slow", env=part)


def listed(preset, *arguments):
    """The tests of a configured preset, as CTest describes them."""
    shown = subprocess.run(["ctest", "--preset", preset, "--show-only=json-v1", *arguments], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout
    return json.loads(shown)["tests"]


def these(names):
    """CTest's arguments for the tests with these names."""
    return "-R", f"^({'|'.join(names)})$"


def pip_install(*what, python=VENV_PYTHON):
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *what)


def pytest(name, *arguments, env=None):
    """The tests; of those that are marked slow a sample."""
    run(VENV_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses=2", "--dist=worksteal",
        f"--junitxml={RESULTS / name}.xml", *([] if EVERYTHING else ["--slow", SEED]), *arguments, env=env)


def sample(what, every, count):
    """`count` of them, drawn by SEED; with --all every one."""
    drawn = every if EVERYTHING else random.Random(SEED).sample(every, min(count, len(every)))
    print(f"{len(drawn)} of {len(every)} {what}, drawn by FULGUR_TEST_SEED={SEED}", flush=True)
    return drawn


@functools.cache
def packages():
    """Starts to install what the Python tests import into build/venv: that waits for the network, and builds do not."""
    return concurrent.futures.ThreadPoolExecutor(1).submit(install_packages)


def venv():
    """build/venv with what the Python tests import."""
    packages().result()


def install_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if not VENV_PYTHON.exists():
        run("python3", "-m", "venv", BUILD / "venv")
    pip_install(*project["dependencies"], *project["optional-dependencies"]["test"])


def release():
    """The release build: C++ tests, installation, symbols, layers, README.md's C++; of the emulator a sample."""
    build("release", "-DFULGUR_TESTS=ON", "-DFULGUR_BENCH=ON")
    every = [test["name"] for test in listed("release", "-L", "emulator")]
    left_out = set(every) - set(sample("tests of the emulator", every, EMULATED))
    ctest_sample("release", *(["-E", f"^({'|'.join(left_out)})$"] if left_out else []))


def emulator():
    """Every test of the GPU kernels in the emulator; twenty minutes, and only where it is named."""
    build("release", "-DFULGUR_TESTS=ON", "-DFULGUR_BENCH=ON")
    ctest("release", "-L", "emulator", name="emulator")


def program():
    """The program from outside."""
    build("release")
    venv()
    pytest("program", "tests/program",
           env={"FULGUR_PROGRAM": str(BUILD / "release/apps/fulgur/fulgur")})


def python():
    """The Python package: its wheel in build/venv, and alone in build/fresh; the Python in the documents."""
    venv()
    # PyTorch finds the graphs that it keeps by names of operators, whatever arguments they had then.
    graphs, extensions, wheels, fresh = [BUILD / x for x in ("inductor", "torch_extensions", "wheels", "fresh")]
    for folder in (BUILD / "python", graphs, extensions, wheels, fresh):
        shutil.rmtree(folder, ignore_errors=True)
    run(VENV_PYTHON, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", wheels,
        ROOT, f"--config-settings=build-dir={BUILD / 'python'}")
    (wheel,) = wheels.glob("*.whl")
    run("python3", "-m", "venv", fresh)
    pip_install(wheel, python=fresh / "bin/python")
    run(fresh / "bin/python", "-B", "tools/try_wheel.py")
    run(VENV_PYTHON, "-B", "tools/try_wheel.py", wheel, "--device", "cpu")
    pip_install("--force-reinstall", "--no-deps", wheel)
    pytest("python", "tests/python", env={"TORCHINDUCTOR_CACHE_DIR": str(graphs)})
    folder = "tests/python/with_torch"
    pytest("python-compiled", f"{folder}/test_torch.py", f"{folder}/test_torch_direct.py",
           env={"TORCHINDUCTOR_CACHE_DIR": str(graphs), "TORCH_EXTENSIONS_DIR": str(extensions),
                "FULGUR_TORCH_BUILD": "1"})


def static():
    """A static library, found by find_package and by pkg-config after installation; of its files a sample alone."""
    folder = BUILD / "static"
    run("cmake", "-S", ROOT, "-B", folder, *STATIC)
    run("cmake", "--build", folder)
    run("tools/check_install.sh", folder)
    compile_alone(lambda every: sample("files of the library", every, ALONE))


def alone():
    """Every file of the library compiled by itself, as it includes all that it uses; only where it is named."""
    compile_alone(lambda every: every)


def compile_alone(choose):
    folder = BUILD / "alone"
    run("cmake", "-S", ROOT, "-B", folder, *STATIC, "-DCMAKE_UNITY_BUILD=OFF", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    commands = json.loads((folder / "compile_commands.json").read_text())
    objects = sorted(re.search(r" -o (\S+)", entry["command"])[1] for entry in commands)
    run("cmake", "--build", folder, "--target", *choose(objects))


def asan():
    """Small tests under AddressSanitizer and UndefinedBehaviorSanitizer, of some programs."""
    run("cmake", "--preset", "asan")
    every = {test["name"] for test in listed("asan")} - {"sanitizer"}
    drawn = sample("small tests", sorted(every), CHECKED) + ["sanitizer"]  # which shows that sanitizers find something
    run("cmake", "--build", BUILD / "asan", "--target", *(PROGRAMS.get(name, name) for name in drawn))
    ctest_sample("asan", *these(drawn))


def tsan():
    """The tests where threads share work under ThreadSanitizer."""
    build("tsan")
    ctest_sample("tsan")


def fuzz():
    """Each libFuzzer target, from the corpus of make_corpus.py, in the asan build."""
    run("cmake", "--preset", "asan")
    run("cmake", "--build", "--preset", "fuzz")
    corpus = BUILD / "asan/corpus"
    run(sys.executable, "-B", "tests/fuzz/make_corpus.py", corpus)
    suite = ET.Element("testsuite")

    def fuzz_one(target):
        case = ET.SubElement(suite, "testcase", name=target)
        try:
            run(BUILD / "asan/tests/fuzz" / target, f"-max_total_time={FUZZ_SECONDS}", f"-max_len={FUZZ_BYTES}",
                "-malloc_limit_mb=1024", "-timeout=100", "-print_final_stats=1", "-verbosity=0",
                f"-artifact_prefix={RESULTS}/{target}-", corpus / target,
                env={"LSAN_OPTIONS": f"suppressions={ROOT}/tests/lsan.supp:print_suppressions=0"})
        except StepFailed as error:
            ET.SubElement(case, "failure", message=str(error))
            print(f"{target}: {error}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(fuzz_one, FUZZ_TARGETS))
    ET.ElementTree(suite).write(RESULTS / "fuzz.xml")
    if suite.find("testcase/failure") is not None:
        raise StepFailed("a fuzz target failed")


def arm():
    """The small tests for 64-bit ARM by QEMU; ten minutes, and only where it is named."""
    # The preset leaves out those of tiles, which are x86's, and of running out of memory, which QEMU does not limit.
    run("tools/install_deps.sh", "arm")
    run("tools/arm_root.sh", BUILD / "arm-root")
    build("arm")
    ctest("arm")


ALWAYS = (release, program, python, static)
SANITIZED = (asan, tsan, fuzz)  # each a build of its own: one of them in a run
STEPS = {step.__name__: step for step in (*ALWAYS, *SANITIZED, emulator, alone, arm)}


def result_files(name):
    return [path for path in (RESULTS / f"{name}.xml", RESULTS / f"{name}-slow.xml") if path.exists()]


def count(name):
    """(passed, failed, skipped) of the step's result files."""
    cases = [case for path in result_files(name) for case in ET.parse(path).iter("testcase")]
    failed = sum(c.find("failure") is not None or c.find("error") is not None for c in cases)
    skipped = sum(c.find("skipped") is not None for c in cases)
    return len(cases) - failed - skipped, failed, skipped


def main():
    parser = argparse.ArgumentParser(
        description="Builds and runs every test.", epilog="\n".join(
            f"  {name:9} {step.__doc__}" for name, step in STEPS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--all", action="store_true", help="every test, where a run draws samples")
    steps = parser.parse_args().steps
    if not steps:
        drawn = sample("sanitizers", SANITIZED, 1)
        steps = [step.__name__ for step in (*ALWAYS, *drawn)]
    if unknown := [name for name in steps if name not in STEPS]:
        parser.error(f"unknown step {unknown[0]}, want some of {', '.join(STEPS)}")

    RESULTS.mkdir(parents=True, exist_ok=True)
    lines, totals = [], [0, 0, 0]
    if {"program", "python"} & set(steps):
        packages()
    for name in steps:
        print(f"\n== {name}: {STEPS[name].__doc__}", flush=True)
        for path in result_files(name):
            path.unlink()
        start, start_cpu, problem = time.monotonic(), cpu_seconds(), ""
        try:
            STEPS[name]()
        except StepFailed as error:
            problem = str(error)
        passed, failed, skipped = count(name)
        if problem and not failed:
            failed = 1
        elif not problem and not passed + skipped:
            passed = 1  # the step is the test
        lines.append(f"{name:9} {time.monotonic() - start:5.0f} s ({cpu_seconds() - start_cpu:5.0f} s of CPU)"
                     f"  {passed:5} passed {failed:4} failed {skipped:4} skipped  {problem}".rstrip())
        totals = [a + b for a, b in zip(totals, (passed, failed, skipped))]
    print("\n" + "\n".join(lines))
    print(f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    return 1 if totals[1] else 0


if __name__ == "__main__":
    sys.exit(main())
