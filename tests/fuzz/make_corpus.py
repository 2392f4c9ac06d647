#!/usr/bin/env python3
"""Writes the seed corpus of each fuzz target into FOLDER/<target>, in place of what is there.

The corpus is not kept in the repository: some seeds are as large as the inputs that break parsers.
"""

import argparse
import json
import pathlib
import shutil
import struct


def npy(descr, shape, data, version=1, fortran=False, header=None):
    if header is None:
        header = repr({"descr": descr, "fortran_order": fortran, "shape": shape})
    header = header.encode() + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


def npy_seeds():
    f32 = struct.pack("<4f", 1, -2, 0.5, float("nan"))
    yield "f32", npy("<f4", (1, 2, 1, 2), f32)
    yield "f16", npy("<f2", (2, 2), bytes(8))
    yield "f64_v2", npy("<f8", (2,), bytes(16), version=2)
    yield "i32_v3", npy("<i4", (4,), f32, version=3)
    yield "empty", npy("<f4", (1, 0, 2, 4), b"")
    yield "big_endian", npy(">f4", (4,), f32)
    yield "fortran", npy("<f4", (2, 2), f32, fortran=True)
    yield "scalar", npy("<f4", (), f32[:4])
    yield "rank_5", npy("<f4", (1, 1, 1, 1, 4), f32)
    yield "record", npy("", (), b"", header="{'descr': [('a', '<f4')], 'shape': (1,), }")
    yield "short", npy("<f4", (4,), f32[:-1])
    yield "huge", npy("<f4", (2**40, 2**40), f32)
    yield "negative", npy("<f4", (-1, -4), f32)
    yield "deep", npy("", (), b"", version=2, header="{'shape': " + "(" * 200_000 + ")" * 200_000 + "}")
    yield "version_9", npy("<f4", (4,), f32, version=9)
    yield "magic_only", b"\x93NUMPY"


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_seeds():
    q = tensor("F32", [1, 1, 1, 2], 0, 8)
    yield "three", safetensors(
        {"q": q, "k": tensor("F16", [1, 1, 1, 2], 8, 12), "v": tensor("BF16", [2], 12, 16)},
        bytes(16),
    )
    yield "metadata", safetensors({"__metadata__": {"by": "seed"}, "dout": q}, bytes(8))
    yield "f64_i32", safetensors(
        {"q": tensor("F64", [1], 0, 8), "k": tensor("I32", [1], 8, 12)}, bytes(12)
    )
    yield "empty_tensor", safetensors({"q": tensor("F32", [0, 3], 0, 0)})
    yield "no_tensor", safetensors({})
    yield "overlap", safetensors({"q": q, "k": tensor("F32", [2], 4, 12)}, bytes(12))
    yield "gap", safetensors({"q": q, "k": tensor("F32", [2], 12, 20)}, bytes(20))
    yield "out_of_range", safetensors({"q": tensor("F32", [4], 0, 16)}, bytes(8))
    yield "reversed", safetensors({"q": tensor("F32", [1], 8, 4)}, bytes(8))
    yield "wrong_size", safetensors({"q": tensor("F32", [3], 0, 8)}, bytes(8))
    yield "overflow", safetensors({"q": tensor("F32", [2**62, 4], 0, 8)}, bytes(8))
    yield "other_dtype", safetensors({"q": tensor("BOOL", [8], 0, 8)}, bytes(8))
    yield "scalar", safetensors({"q": tensor("F32", [], 0, 4)}, bytes(4))
    yield "twice", safetensors(b'{"q":1,"q":2}')
    yield "huge_number", safetensors(b'{"q":{"dtype":4E9999}}')
    yield "list", safetensors(b"[]")
    yield "not_json", safetensors(b"{nonsense")
    # No stack takes a recursion over these.
    deep = b"[" * 200_000 + b"]" * 200_000
    yield "deep_shape", safetensors(
        b'{"q":{"dtype":"F32","shape":' + deep + b',"data_offsets":[0,4]}}', bytes(4)
    )
    yield "deep_metadata", safetensors(b'{"__metadata__":' + b'{"a":' * 60_000)
    yield "long_header", struct.pack("<Q", 2**63) + b"{}"
    yield "short", b"\x02\0\0"


def c_api_seeds():
    """What and how, dtype (5 more: with sinks, 10 more: and dsinks, 15 more: with a tree mask, 30 more: with shared
    prefixes, 60 more: with new rows that are appended first, 120 more: with a bias), seven sizes and flags, then the
    number of changes and the changes.

    What follows is the byte that fills the memory, wild lengths with flag 32, for a merge the number
    of parts, and with MOVED the lengths of the run.
    """

    def call(what=0, dtype=0, batch=0, sq=0, sk=0, hk=0, group=0, d=0, dv=0, flags=0, changes=(),
             how=0):
        sizes = [batch, sq, sk, hk, group, d, dv]
        return bytes([what + 4 * how, dtype, *sizes, flags, len(changes)]) + b"".join(changes)

    causal = bytes([1, 0])
    for what, name in enumerate(["forward", "backward", "merge"]):
        for dtype, dtype_name in enumerate(["f32", "f16", "bf16", "f64"]):
            yield f"{name}_{dtype_name}", call(
                what, dtype, batch=1, sq=4, sk=60, group=1, d=13
            ) + b"\x3c\2"
        yield f"{name}_sinks", call(what, 2 + 10, batch=1, sq=4, sk=60, group=1) + b"\x3c\2"
        yield f"{name}_tree", call(what, 2 + 15, batch=1, sq=4, sk=60, group=1) + b"\x3c\2"
        for flags in (0, 2):
            yield f"{name}_bias_{flags}", call(what, 2 + 120, batch=1, sq=4, sk=60, group=1, flags=flags) + b"\x3c\2"
        yield f"{name}_packed", call(what, batch=1, flags=1, changes=[causal]) + b"\x3c\2"
        yield f"{name}_extras", call(
            what, flags=4 | 8, changes=[causal, b"\x04\x14" + bytes(8)]
        ) + b"\x3c\2"
        yield f"{name}_wild_lengths", call(what, flags=1 | 4 | 32) + b"\x3c" + b"\x01\0\0\0" * 8
        yield f"{name}_used_queries", call(what, batch=1, sq=4, sk=60, flags=2 | 4) + b"\x3c"
        yield f"{name}_used_queries_packed", call(what, batch=1, flags=1 | 2 | 4 | 32) + b"\x3c" + struct.pack(
            "<10i", 0, 3, 6, 0, 5, 10, 5, 5, 2, 3
        )
    PLAN, OWN_WORKSPACE, MOVED = 1, 2, 4
    for what, name in enumerate(["forward", "backward"]):
        yield f"{name}_plan", call(what, sq=4, sk=60, how=PLAN) + b"\x3c"
        yield f"{name}_plan_workspace", call(
            what, batch=1, sq=4, sk=60, how=PLAN | OWN_WORKSPACE
        ) + b"\x3c"
        # One sequence, planned for its 3 queries and 5 keys, run with 2 and 4.
        yield f"{name}_plan_other_lengths", call(
            what, flags=1, changes=[causal], how=PLAN | MOVED
        ) + b"\x3c" + struct.pack("<4i", 0, 2, 0, 4)
        yield f"{name}_plan_longer_lengths", call(
            what, flags=1, how=PLAN | MOVED | OWN_WORKSPACE
        ) + b"\x3c" + struct.pack("<4i", 0, 4, 0, 5)
    # Caches of 4 pages of 6 keys, with 3 new rows, keys and queries rotated, and of 5 rows without.
    for name, dtype in [("f32", 0), ("bf16", 2)]:
        for how_name, how in [("", 0), ("_plan", PLAN), ("_plan_workspace", PLAN | OWN_WORKSPACE)]:
            yield f"appends_{name}{how_name}", call(
                0, 60 + dtype, batch=1, flags=8, changes=[causal], how=8 | how
            ) + b"\x3c"
            yield f"appends_rows_{name}{how_name}", call(0, 60 + dtype, batch=1, how=how) + b"\x3c"
    yield "appends_packed", call(0, 60, batch=1, flags=1 | 8, how=16) + b"\x3c"
    yield "appends_twice", call(0, 180, batch=1, flags=8, how=8) + b"\x3c"
    # Caches of 4 pages of 6 keys, or of 4 rows of 5 keys, for sequences of up to 3 pages.
    TABLE, LISTS, ROWS, LEFT_PADDED = 8, 16, 24, 32
    for name, cache in [("table", TABLE), ("lists", LISTS), ("rows", ROWS)]:
        for how_name, how in [("", 0), ("_plan", PLAN), ("_leftpad", LEFT_PADDED)]:
            yield f"cache_{name}{how_name}", call(batch=1, flags=4, how=cache | how) + b"\x3c"
        yield f"cache_{name}_packed", call(batch=1, flags=1 | 4, how=cache) + b"\x3c"
        yield f"cache_{name}_wild", call(batch=0, flags=4 | 32, how=cache) + b"\x3c" + struct.pack(
            "<12i", 0, 3, 0, 3, 5, 2, 1, -1, 0, 3, 1, 0
        )
        # Planned for lengths of 0, run with 5 keys in pages 3 and 1, or in row 1.
        yield f"cache_{name}_moved", call(flags=4, how=cache | PLAN | MOVED) + b"\x3c" + struct.pack(
            "<12i", 0, 3, 0, 3, 5, 3, 1, -1, 0, 3, 1, 0
        )
    # One group of both sequences: no key shared, then the first 2 of 5.
    yield "prefixes", call(dtype=30, batch=1, flags=4, how=TABLE) + b"\x3c"
    yield "prefixes_wild", call(dtype=30, batch=1, flags=4 | 32, how=TABLE) + b"\x3c" + struct.pack(
        "<26i", 0, 3, 6, 0, 5, 10, 5, 5, 1, 3, 2, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 3, 3, 0, 2, 2
    )
    yield "leftpad", call(how=LEFT_PADDED) + b"\x3c"
    # Calls with 3 new rows. Flags: 8 adds cos and sin, 2 makes them f32, 16 leaves out queries, 128 rotates these in
    # place; LEFT_PADDED stands for rotary_seqlens.
    for name, cache in [("plain", 0), ("table", TABLE), ("lists", LISTS), ("rows", ROWS)]:
        for dtype, dtype_name in enumerate(["f32", "f16", "bf16", "f64"]):
            yield f"append_{name}_{dtype_name}", call(
                3, dtype, batch=1, d=9, flags=8 | 2 * (dtype % 2), how=cache, changes=[causal]
            ) + b"\x3c"
        yield f"append_{name}_copy", call(3, how=cache) + b"\x3c"
        yield f"append_{name}_packed", call(3, batch=1, flags=1 | 8, how=cache) + b"\x3c"
        yield f"append_{name}_positions", call(
            3, flags=2 | 4 | 8 | 128, how=cache | LEFT_PADDED
        ) + b"\x3c"
        yield f"append_{name}_wild", call(
            3, flags=1 | 8 | 16 | 32, how=cache | LEFT_PADDED
        ) + b"\x3c" + struct.pack("<12i", 0, 3, 0, 2, 2, 3, 1, -1, 0, 3, 1, 7)
    # Change 9 is to a struct: which (options, run, args), its size, a byte after it.
    yield "options_of_a_pointer", call(changes=[bytes([9, 0, 8, 0, 0])])
    yield "options_newer", call(changes=[bytes([9, 0, 136, 0, 0])])
    yield "options_newer_than_the_library", call(changes=[bytes([9, 0, 136, 0, 1])])
    yield "run_newer", call(changes=[bytes([9, 1, 56, 0, 0])], how=PLAN)
    yield "args_newer", call(changes=[bytes([9, 2, 5, 152, 8, 1])])
    yield "args_short", call(changes=[bytes([9, 2, 5, 72, 0, 0])], how=PLAN)
    yield "args_of_half_a_pointer", call(changes=[bytes([9, 2, 5, 84, 0, 0])])
    # Change 12 is to a tensor: its index, the field, the value.
    yield "null_q", call(changes=[bytes([12, 0, 0])])
    yield "rank_of_k", call(changes=[bytes([12, 1, 1, 3])])
    yield "wild_shape", call(changes=[bytes([12, 2, 2, 1, 8])])
    yield "wild_stride", call(changes=[bytes([12, 3, 3, 2, 5])])
    yield "doubled_strides", call(changes=[bytes([12, 0, 4, 2, 2, 2, 1, 1, 1, 1, 1])])
    yield "lanes", call(changes=[bytes([12, 4, 7, 4])])
    yield "cuda", call(changes=[bytes([12, 0, 8, 2, 0])])
    yield "misaligned", call(changes=[bytes([12, 3, 9, 1])])
    yield "nan_scale", call(changes=[b"\2" + struct.pack("<d", float("nan"))])
    yield "softcap", call(changes=[b"\3" + struct.pack("<d", 5.0)])
    # Change 11 is to expressions: which tensors they have, score_mod, mask_mod: their numbers, or 128 and a number of
    # tokens, and these. From dtype 240 on the call is of scores.
    for name, what, dtype in [("forward", 0, 0), ("backward", 1, 0), ("bf16", 1, 2), ("scores", 0, 240)]:
        for how in (0, PLAN):
            for score, mask, tensors in [(1, 3, 7), (4, 2, 0), (5, 0, 3), (6, 7, 7), (8, 0, 5), (9, 10, 1)]:
                yield f"expressions_{name}_{how}_{score}", call(
                    what, dtype, batch=1, sq=4, sk=60, group=1, changes=[bytes([11, tensors, score, mask])], how=how
                ) + b"\x3c"
    yield "expressions_of_tokens", call(changes=[bytes([11, 0, 128 + 3, 0, 13, 1, 128 + 3, 1, 17, 2])]) + b"\x3c"
    yield "expressions_of_odd_bindings", call(changes=[bytes([11, 251, 1, 3])]) + b"\x3c\2\1\x20\0\7"
    yield "reference", call(changes=[b"\5\2"])
    yield "window", call(changes=[b"\0\2", b"\1\2"])
    yield "threads", call(changes=[b"\6\3"])
    yield "max_workspace", call(changes=[b"\x0a\0\0\1\3\0"])
    yield "chunk", call(changes=[b"\x0a\0\0\0\1\3"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    corpus = parser.parse_args().folder
    for target, seeds in [
        ("fuzz_npy", npy_seeds),
        ("fuzz_safetensors", safetensors_seeds),
        ("fuzz_c_api", c_api_seeds),
    ]:
        folder = corpus / target
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, data in seeds():
            (folder / name).write_bytes(data)


if __name__ == "__main__":
    main()
