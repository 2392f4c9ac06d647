"""`fulgur attend` on wrong values, files and tensors: one line of error, and no output."""

import os
import struct

import numpy as np
import pytest

from program import ALL, FORWARD, PAGED, PREFIXES, fails, listing, load, save, succeeds, tensors


@pytest.mark.parametrize(
    "flags,says",
    [
        (["--scale", "nan"], ["scale", "nan"]),
        (["--scale", "inf"], ["scale", "inf"]),
        (["--softcap", "-1"], ["softcap", "-1"]),
        (["--softcap", "nan"], ["softcap", "nan"]),
        (["--window", "-2,0"], ["-2"]),
        (["--window", "0,-7"], ["-7"]),
        (["--chunk", "-3"], ["chunk", "-3"]),
        (["--dropout", "1"], ["dropout", "1"]),
        (["--dropout", "-0.1"], ["dropout", "-0.1"]),
        (["--threads", "-1"], ["threads", "-1"]),
        (["--max-workspace", "-1"], ["max_workspace", "-1"]),
        (["--max-workspace", "1"], ["max_workspace", "1", "at least"]),
    ],
)
def test_bad_values(folder, flags, says):
    before = listing(folder)
    fails(*ALL, *flags, says=says, cwd=folder)
    assert listing(folder) == before


def npy(descr, shape, data=b"", version=1, order=False, header=None):
    text = (header or repr({"descr": descr, "fortran_order": order, "shape": shape})).encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


@pytest.mark.parametrize(
    "raw,says",
    [
        (b"", ["magic"]),
        (b"hello", ["magic"]),
        (b"\x93NUMPY", ["truncated"]),
        (b"\x93NUMPY\x01\x00", ["truncated"]),
        (b"\x93NUMPY\x01\x00\xff\xff{}", ["truncated", "65535"]),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", ["truncated", "4294967295"]),
        (npy("<f4", (1,), version=9), ["version", "9"]),
        (npy(">f4", (1, 1, 1, 1), bytes(4)), [">f4"]),
        (npy("<u8", (1, 1, 1, 1), bytes(8)), ["<u8"]),
        (npy("|O", (1,), bytes(8)), ["|O"]),
        (npy("<f4", (1, 2, 2, 1), bytes(16), order=True), ["Fortran"]),
        (npy("<f4", (1, 1, 1, 2), bytes(4)), ["4 bytes", "want 8"]),
        (npy("<f4", (1, 1, 1, 2), bytes(9)), ["9 bytes", "want 8"]),
        (npy("<f4", ()), ["0 dimensions"]),
        (npy("<f4", (1,) * 5, bytes(4)), ["5 dimensions"]),
        (npy("<f4", (-1, -1, 1, 1), bytes(4)), ["negative"]),
        (npy("<f4", (2**40, 2**40, 1, 1), bytes(4)), ["2^63"]),
        (npy("<f4", (10**9, 10**5, 1, 1), bytes(4)), ["4 bytes"]),
        (
            npy("", (), header="{'descr': '<f4', 'fortran_order': False, 'shape': (1, }"),
            ["malformed"],
        ),
        (npy("", (), header="{'descr': '<f4', 'shape': (1,)}"), ["fortran_order"]),
        (npy("", (), header="{'descr': '<f4', 'descr': '<f4'}"), ["twice"]),
        (npy("", (), header="{'a': '<f4'}"), ["'a'"]),
        (npy("", (), header="{'descr': [('x', '<f4')], 'shape': (1,)}"), ["malformed"]),
        (npy("", (), header="{'shape': (99999999999999999999,)}"), ["malformed"]),
    ],
    ids=str,
)
def test_malformed_npy(folder, raw, says):
    (folder / "k.npy").write_bytes(raw)
    before = listing(folder)
    fails(*ALL, says=["--k k.npy", *says], cwd=folder)
    assert listing(folder) == before


def test_a_huge_file_of_nothing_is_not_read(folder):
    """A sparse terabyte whose header does not fit it."""
    with open(folder / "k.npy", "wb") as file:
        file.write(npy("<f4", (1, 1, 1, 1)))
        file.truncate(1 << 40)
    fails(*FORWARD, says=["--k k.npy", "bytes of data"], cwd=folder)


def test_missing_and_unreadable_inputs(folder):
    (folder / "v.npy").unlink()
    before = listing(folder)
    fails(*ALL, says=["--v v.npy", "No such file"], cwd=folder)
    (folder / "v.npy").mkdir()
    fails(*ALL, says=["--v v.npy", "not a regular file"], cwd=folder)
    (folder / "v.npy").rmdir()
    os.mkfifo(folder / "v.npy")
    fails(*ALL, says=["--v v.npy", "not a regular file"], cwd=folder)
    (folder / "v.npy").unlink()
    assert listing(folder) == before


@pytest.mark.parametrize(
    "change,says",
    [
        ({"q": (2, 37, 4)}, ["q", "3 dimensions", "(batch, seqlen, heads, dim)"]),
        ({"q": (37,)}, ["q", "1 dimensions"]),
        ({"k": (2, 53)}, ["k", "2 dimensions"]),
        ({"k": (3, 53, 2, 24)}, ["k", "(3, 53, 2, 24)", "(2, 53, 2, 24)"]),
        ({"k": (2, 53, 2, 25)}, ["k", "25"]),
        ({"v": (2, 52, 2, 16)}, ["v", "(2, 52, 2, 16)"]),
        ({"v": (2, 53, 1, 16)}, ["v", "(2, 53, 1, 16)"]),
        ({"q": (2, 37, 3, 24)}, ["q", "3 heads", "2 heads"]),
        ({"q": (2, 37, 4, 0), "k": (2, 53, 2, 0)}, ["head dim 0"]),
        ({"q": (2, 3, 4, 577), "k": (2, 5, 2, 577)}, ["577", "576"]),
        ({"dout": (2, 37, 4, 17)}, ["dout", "17"]),
        ({"k": (2, 53, 0, 24), "v": (2, 53, 0, 16)}, ["k", "0 heads"]),
    ],
)
def test_mismatched_shapes(folder, change, says):
    save(folder, {name: np.zeros(shape, np.float32) for name, shape in change.items()})
    before = listing(folder)
    fails(*ALL, says=says, cwd=folder)
    assert listing(folder) == before


def test_wrong_dtypes(folder):
    arrays = load(folder, ["q", "k"])
    np.save(folder / "k.npy", arrays["k"].astype(np.float16))
    fails(*ALL, says=["k", "f16", "f32"], cwd=folder)
    succeeds(*FORWARD, "--dtype", "f32", cwd=folder)
    (folder / "out.npy").unlink()
    np.save(folder / "k.npy", arrays["k"].astype(np.int32))
    fails(*ALL, says=["k", "i32"], cwd=folder)
    fails(*ALL, "--dtype", "f16", says=["k", "i32"], cwd=folder)
    assert listing(folder) == ["dout.npy", "k.npy", "q.npy", "v.npy"]


@pytest.mark.parametrize(
    "flag,array,says",
    [
        ("--alibi-slopes", np.ones(3, np.float32), ["alibi_slopes", "3"]),
        ("--alibi-slopes", np.ones(4, np.float64), ["alibi_slopes", "f64", "f32"]),
        ("--bias", np.ones((2, 4, 36, 53), np.float32), ["bias", "(2, 4, 36, 53)", "(2, 4, 37, 53)"]),
        ("--bias", np.ones((37, 53), np.float32), ["bias", "2 dimensions"]),
        ("--bias", np.ones((1, 1, 1, 1), np.int64), ["bias", "i64", "bool"]),
        ("--sinks", np.ones(3, np.float32), ["sinks", "3", "4"]),
        ("--sinks", np.ones(4, np.float64), ["sinks", "f64", "f32"]),
        ("--seqused-q", np.array([1, 99], np.int32), ["seqused_q", "99"]),
        ("--seqused-q", np.array([1, -1], np.int32), ["seqused_q", "-1"]),
        ("--seqused-q", np.array([1, 2, 3], np.int32), ["seqused_q", "3"]),
        ("--seqused-k", np.array([1, 99], np.int32), ["seqused_k", "99"]),
        ("--seqused-k", np.array([1, -1], np.int32), ["seqused_k", "-1"]),
        ("--seqused-k", np.array([1.0, 2.0], np.float32), ["seqused_k", "f32", "i32"]),
        ("--seqused-k", np.array([1, 2, 3], np.int32), ["seqused_k", "3"]),
    ],
)
def test_bad_extras(folder, flag, array, says):
    np.save(folder / "extra.npy", array)
    before = listing(folder)
    fails(*ALL, flag, "extra.npy", says=says, cwd=folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"table": np.full((2, 4), 9, np.int32)}, ["page_table", "got 9 as page 0 of sequence 0"]),
        ({"table": np.zeros((2, 4), np.float32)}, ["page_table", "f32", "i32"]),
        ({"table": np.zeros(4, np.int32)}, ["page_table", "1 dimensions"]),
        ({"used": np.array([65, 0], np.int32)}, ["seqused_k", "65"]),
        ({"k": np.zeros((9, 8, 2, 24), np.float32)}, ["v", "(9, 8, 2, 16)"]),
    ],
)
def test_bad_pages(folder, changes, says):
    cache = {"k": np.zeros((9, 16, 2, 24), np.float32), "v": np.zeros((9, 16, 2, 16), np.float32)}
    save(folder, cache | {"table": np.zeros((2, 4), np.int32), "used": np.array([3, 2], np.int32)} | changes)
    before = listing(folder)
    fails(*FORWARD, *PAGED, says=says, cwd=folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"groups": np.array([0, 1], np.int32)}, ["prefix_groups", "ends with 1, want 2"]),
        ({"groups": np.array([0, 1, 2], np.int32)}, ["prefix_lens", "got shape (1), want (2)"]),
        ({"lens": np.array([2], np.int32)}, ["prefix_lens", "got 2 at 0"]),
        ({"lens": np.array([2], np.int64)}, ["prefix_lens", "i64", "i32"]),
    ],
)
def test_bad_prefixes(tmp_path, changes, says):
    cache = {"q": np.zeros((2, 1, 4, 24), np.float32), "k": np.zeros((9, 16, 2, 24), np.float32)}
    cache |= {"v": np.zeros((9, 16, 2, 16), np.float32), "table": np.zeros((2, 4), np.int32)}
    prefixes = {"groups": np.array([0, 2], np.int32), "lens": np.array([1], np.int32)}
    save(tmp_path, cache | {"used": np.array([3, 2], np.int32)} | prefixes | changes)
    before = listing(tmp_path)
    fails(*FORWARD, *PAGED, *PREFIXES, says=says, cwd=tmp_path)
    for given in (PREFIXES[:2], PREFIXES[2:]):
        fails(*FORWARD, *PAGED, *given, code=2, says=["--prefix-groups", "--prefix-lens"], cwd=tmp_path)
    fails(*FORWARD, *PREFIXES, code=2, says=["--prefix-groups", "--page-table"], cwd=tmp_path)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "words,says",
    [
        (np.ones((2, 3), np.int64), ["tree_mask", "(2, 3)", "2, 37"]),
        (np.ones((2, 37), np.int32), ["tree_mask", "i32", "i64"]),
    ],
)
def test_bad_tree_mask(folder, words, says):
    np.save(folder / "words.npy", words)
    before = listing(folder)
    fails(*FORWARD, "--tree-mask", "words.npy", says=says, cwd=folder)
    assert listing(folder) == before


def test_caches_have_no_gradient(folder):
    np.save(folder / "extra.npy", np.zeros(2, np.int32))
    before = listing(folder)
    for flag in ("--page-table", "--cache-batch-idx", "--leftpad-k", "--tree-mask"):
        fails(*ALL, flag, "extra.npy", code=2, says=[flag, "no gradient"], cwd=folder)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "cu,says",
    [
        ([0, 20, 10, 30], ["cu_seqlens_k", "decreases", "10 after 20"]),
        ([-1, 5, 10, 30], ["cu_seqlens_k", "starts with -1"]),
        ([0, 5, 10, 31], ["cu_seqlens_k", "31"]),
        ([0, 5, 30], ["cu_seqlens_k", "3"]),
    ],
)
def test_bad_cu_seqlens(tmp_path, cu, says):
    save(tmp_path, {name: x[0] for name, x in tensors(batch=1, sq=30, sk=30).items()})
    save(tmp_path, {"cu_q": np.array([0, 10, 20, 30], np.int32), "cu_k": np.array(cu, np.int32)})
    before = listing(tmp_path)
    fails(*ALL, "--cu-seqlens-q", "cu_q.npy", "--cu-seqlens-k", "cu_k.npy", says=says, cwd=tmp_path)
    assert listing(tmp_path) == before
