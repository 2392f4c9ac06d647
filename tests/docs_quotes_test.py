"""Code quoted in docs/ must exist.

A block opened by ```cpp PATH (or another language and a path) quotes consecutive lines of PATH;
a line of three dots stands for lines left out.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def find(lines, wanted, start):
    """The index after `wanted` in `lines` from `start` on, or None."""
    for begin in range(start, len(lines) - len(wanted) + 1):
        if lines[begin : begin + len(wanted)] == wanted:
            return begin + len(wanted)
    return None


def missing(path, quote):
    """The first part of the quote that is not in the file, or None."""
    source = ROOT / path
    if not source.is_file():
        return f"{path} does not exist"
    lines = [line.strip() for line in source.read_text().splitlines()]
    position = 0
    for part in re.split(r"^\.\.\.\n", quote, flags=re.MULTILINE):
        wanted = [line.strip() for line in part.splitlines()]
        position = find(lines, wanted, position)
        if position is None:
            return f"{path} has no such lines:\n{part}"
    return None


def main():
    quotes, failures = 0, 0
    for document in sorted((ROOT / "docs").rglob("*.md")):
        for path, quote in BLOCK.findall(document.read_text()):
            quotes += 1
            problem = missing(path, quote)
            if problem:
                failures += 1
                print(f"{document.relative_to(ROOT)}: {problem}")
    print(f"{quotes} quotes, {failures} wrong")
    return 1 if failures or quotes == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
