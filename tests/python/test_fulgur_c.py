"""The structs of bench/fulgur_c.py are those of include/fulgur/c.h, which it cannot read."""

import ctypes
import pathlib
import re
import sys

import pytest

pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = re.sub(r"//.*", "", (ROOT / "include/fulgur/c.h").read_text())
TYPES = {
    "size_t": ctypes.c_size_t,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "int": ctypes.c_int,
    "double": ctypes.c_double,
    "const char*": ctypes.c_char_p,
}
STRUCTS = {
    "Options": "fulgur_options",
    "VarLen": "fulgur_var_len",
    "KvCache": "fulgur_kv_cache",
    "SharedPrefix": "fulgur_shared_prefix",
    "Rotary": "fulgur_rotary",
    "NewRows": "fulgur_new_rows",
    "ForwardArgs": "fulgur_forward_args",
    "BackwardArgs": "fulgur_backward_args",
    "AppendArgs": "fulgur_append_args",
    "Run": "fulgur_run",
    "WorkspaceNeed": "fulgur_workspace_need",
}


def fields(struct):
    """(name, ctypes' type) of each field of a struct of the header; pointers are alike but strings."""
    (body,) = re.findall(rf"typedef struct {struct} {{([^}}]*)}} {struct};", HEADER)
    for declaration in body.split(";")[:-1]:
        kind, first, more = re.fullmatch(r"\s*((?:const )?(?:struct )?\w+[ *]+)(\w+)((?:,[ *]+\w+)*)\s*", declaration).groups()
        kind = kind.replace(" *", "* ").strip()
        pointer = ctypes.c_void_p if "*" in kind else None
        for name in (first, *re.findall(r"\w+", more)):
            yield name, TYPES.get(kind, pointer)


@pytest.mark.parametrize("ours, struct", STRUCTS.items())
def test_structs(ours, struct, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import fulgur_c

    assert getattr(fulgur_c, ours)._fields_ == list(fields(struct))
