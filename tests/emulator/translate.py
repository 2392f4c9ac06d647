#!/usr/bin/env python3
"""Makes of the kernel texts in a folder, in place, what the host's compiler and device.h read.

Inline PTX becomes calls of emulator::execute, whose operands are those of the asm statement, and shared memory what the
emulator has for the thread block.
"""

import pathlib
import re
import sys


def separate_operands(text, at):
    """The colons of an asm statement become commas: its parenthesis is in front of `at`."""
    out, depth, quoted, behind_comma = [], 1, False, False
    while depth > 0:
        x = text[at]
        if quoted:
            quoted = x != '"' or text[at - 1] == "\\"
        else:
            quoted = x == '"'
            depth += (x == "(") - (x == ")")
            if x == ":" and depth == 1:
                x = " " if behind_comma else ","
                behind_comma = True
            elif not x.isspace() and x != "\\":
                behind_comma = False
        out.append(x)
        at += 1
    return "".join(out), at


def translated(text):
    out, end = [], 0
    for match in re.finditer(r"\basm\s*(?:volatile\s*)?\(", text):
        operands, behind = separate_operands(text, match.end())
        out += [text[end:match.start()], "emulator::execute(", operands]
        end = behind
    text = "".join(out) + text[end:]
    for what, become in ((r'("[+=]?[rhlfdnq]")\s*\(', r"emulator::operand(\1, "),
                         (r"__grid_constant__ (\w+) ", r"\1& "),
                         (r"extern __shared__ [^;]*?(\w+)\[\];", r"#define \1 emulator::dynamic_shared()"),
                         (r"__shared__ (\w+) (\w+)((?:\[\w+\])+);",
                          r"\1 (&\2)\3 = emulator::shared_variable<\1\3, __LINE__>();"),
                         (r"#pragma unroll[^\n]*", "")):
        text = re.sub(what, become, text)
    return text


for path in pathlib.Path(sys.argv[1]).rglob("*"):
    if path.is_file():
        path.write_text(translated(path.read_text()))
