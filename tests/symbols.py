"""The shared library exports the public API and nothing else: symbols.py LIBRARY.

Of C functions it exports each one that c.h declares, and no other. tests/api/c/c_abi_test.c lists
them once more, so that none goes missing unnoticed: programs find them by name.
"""

import pathlib
import re
import subprocess
import sys

# Functions and types of include/fulgur, their type information and virtual tables.
PUBLIC = re.compile(
    r"(fulgur_\w+"
    r"|\.gomp_critical_user_fulgur_\w+"  # the lock of a named `omp critical`
    r"|(typeinfo (name )?for |vtable for )?fulgur::"
    r"(cuda::(allocate|deallocate|copy|synchronize|plan_for_card|prewarm|tune)|Error|BasicTensor|Plan|Details|Expr"
    r"|TensorSymbol|forward|backward|plan|append|merge|parse_expression|scores|scores_shape|engines|size_of|name_of"
    r"|expand_blocks|quantize|dequantize|hadamard|has_scales|format_named|block_of|Group|DistributedPlan|rows_of"
    r"|forecast)"
    r"\b.*)"
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
C_DECLARATION = re.compile(r"\b(fulgur_\w+)\(")
WANTED = ("fulgur::forward(", "fulgur::plan(", "fulgur::append(", "fulgur::merge(", "fulgur::scores(",
          "fulgur::quantize(", "fulgur::dequantize(", "fulgur::expand_blocks(")


def declared(path):
    """The C functions of a file, whose comments name none with its parentheses."""
    return set(C_DECLARATION.findall((ROOT / path).read_text()))


def main(library):
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", "-C", library], check=True, capture_output=True, text=True
    ).stdout
    # Weak symbols of the standard library's templates are instantiated everywhere and harmless.
    symbols = [line.split(" ", 2)[1:] for line in listing.splitlines()]
    foreign = [name for kind, name in symbols if kind not in "WVu" and not PUBLIC.fullmatch(name)]
    foreign += [name for kind, name in symbols if "fulgur::" in name and not PUBLIC.search(name)]
    missing = [want for want in WANTED if not any(name.startswith(want) for _, name in symbols)]
    functions = declared("include/fulgur/c.h")
    exported = {name for _, name in symbols if re.fullmatch(r"fulgur_\w+", name)}
    foreign += sorted(exported - functions)
    missing += sorted(functions - exported)
    alone = sorted(functions ^ declared("tests/api/c/c_abi_test.c"))
    for name in foreign:
        print(f"exported, but not public: {name}")
    for name in missing:
        print(f"public, but not exported: {name}")
    for name in alone:
        print(f"in c.h or in c_abi_test.c alone: {name}")
    return 1 if foreign or missing or alone or not symbols else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
