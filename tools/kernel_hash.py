#!/usr/bin/env python3
"""Prints the hash of the kernel sources, as the library computes it; of some kernels alone, if they are named."""

import hashlib
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "src/kernels"


def read_by(kernels):
    """Names of the files that some kernels read, themselves included."""
    names, waiting = set(), list(kernels)
    while waiting:
        name = waiting.pop()
        if name not in names and (FOLDER / name).exists():  # a plan's header is none of the sources
            names.add(name)
            waiting += re.findall(r'^#include "(.*)"', (FOLDER / name).read_text(), re.MULTILINE)
    return names


def kernel_hash(*kernels):
    """SHA-256 over name, size and text of each file of src/kernels, or of those that the kernels read, in the order of
    names."""
    every = (p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.suffix in (".cu", ".cuh", ".h"))
    digest = hashlib.sha256()
    for name in sorted(read_by(kernels) if kernels else every):
        text = (FOLDER / name).read_bytes()
        digest.update(f"{name}\n{len(text)}\n".encode() + text)
    return digest.hexdigest()


if __name__ == "__main__":
    print(kernel_hash(*sys.argv[1:]))
