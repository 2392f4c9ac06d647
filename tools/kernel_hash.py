#!/usr/bin/env python3
"""Prints the hash of the kernel sources, as the library computes it for its cache."""

import hashlib
import pathlib

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "src/kernels"


def kernel_hash():
    """SHA-256 over name, size and text of each file of src/kernels, in the order of names."""
    digest = hashlib.sha256()
    files = {p.relative_to(FOLDER).as_posix(): p for p in FOLDER.rglob("*") if p.suffix in (".cu", ".cuh", ".h")}
    for name in sorted(files):
        text = files[name].read_bytes()
        digest.update(f"{name}\n{len(text)}\n".encode() + text)
    return digest.hexdigest()


if __name__ == "__main__":
    print(kernel_hash())
