"""Copies libgomp so that it loads on systems from glibc 2.28 on.

    portable_libgomp.py SOURCE TARGET

Debian 12's libgomp wants glibc 2.34 for one reason: there libpthread and libdl became parts of libc, and
their functions, the same as ever, got a new version. The copy asks for these functions without a version.
It needs a process that has libpthread and libdl, as every Python has. A function that is really newer is
an error. (The libgomp that manylinux_2_28 wheels have otherwise, GCC 8's, has no omp_pause_resource_all.)
"""

import re
import sys

from elftools.elf.elffile import ELFFile

MOST = (2, 28)
MOVED = re.compile(r"pthread_\w+|dl(open|sym|close|error)")


def main(source, target):
    with open(source, "rb") as file:
        elf = ELFFile(file)
        versions, needs, symbols = map(elf.get_section_by_name, (".gnu.version", ".gnu.version_r", ".dynsym"))
        file.seek(0)
        data = bytearray(file.read())
        base, new = None, {}  # where the entry of the oldest version is; those of versions that are too new
        at = needs["sh_offset"]
        for need, entries in needs.iter_versions():
            entry = at + need["vn_aux"]
            for version in entries:
                if version.name == "GLIBC_2.2.5":
                    base = entry
                elif match := re.fullmatch(r"GLIBC_(\d+)\.(\d+)", version.name):
                    if tuple(map(int, match.groups())) > MOST:
                        new[version["vna_other"]] = entry
                entry += version["vna_next"]
            at += need["vn_next"]
        for n in range(symbols.num_symbols()):
            if versions.get_symbol(n)["ndx"] not in new:
                continue
            name = symbols.get_symbol(n).name
            if not MOVED.fullmatch(name):
                raise SystemExit(f"portable_libgomp.py: {source} needs {name} of a newer glibc, want 2.28")
            place = versions["sh_offset"] + 2 * n
            data[place : place + 2] = (1).to_bytes(2, "little")  # any version
        for entry in new.values():
            data[entry : entry + 4] = data[base : base + 4]  # the hash, and
            data[entry + 8 : entry + 12] = data[base + 8 : base + 12]  # the name of the version
    with open(target, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
