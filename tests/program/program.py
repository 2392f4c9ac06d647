"""Runs the program, FULGUR_PROGRAM, from outside; tensors and their files."""

import json
import os
import re
import struct
import subprocess

import numpy as np

PROGRAM = os.environ["FULGUR_PROGRAM"]
RNG = np.random.default_rng()


def fulgur(*args, cwd=None, **kwargs):
    return subprocess.run(
        [PROGRAM, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=900, **kwargs
    )


def succeeds(*args, **kwargs):
    done = fulgur(*args, **kwargs)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def details(*call, **kwargs):
    """The plan of a call, as data."""
    return json.loads(succeeds("explain", "--json", *call, **kwargs))


def fails(*args, code=1, says=(), **kwargs):
    """Runs a call that fails with one line on stderr (usage: and a hint) that has all of `says`."""
    done = fulgur(*args, **kwargs)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("fulgur: ")
    assert len(lines) == (2 if code == 2 else 1), done.stderr
    for text in says:
        assert text in lines[0], (text, lines[0])
    return lines[0]


def to_bf16(x):
    """Rounds float32 to the nearest bf16, ties to even; the upper 16 bits."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path, tensors, metadata=None):
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    types = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "BF16": np.uint16}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end], types[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = (entry["dtype"], array)
    assert sum(e["data_offsets"][1] - e["data_offsets"][0] for e in header.values()) == len(data)
    return tensors


def tensors(batch=2, sq=37, sk=53, hq=4, hk=2, d=24, dv=16, dtype=np.float32):
    shapes = {
        "q": (batch, sq, hq, d),
        "k": (batch, sk, hk, d),
        "v": (batch, sk, hk, dv),
        "dout": (batch, sq, hq, dv),
    }
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def save(folder, arrays):
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


FORWARD = ["attend", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--out", "out.npy"]
LSE = ["--lse", "lse.npy"]
BACKWARD = ["--dout", "dout.npy", "--dq", "dq.npy", "--dk", "dk.npy", "--dv", "dv.npy"]
ALL = FORWARD + LSE + BACKWARD


def listing(folder):
    return sorted(p.name for p in folder.iterdir())


def load(folder, names):
    return {name: np.load(folder / f"{name}.npy") for name in names}


def in_pages(x, page, rng, used=None):
    """Keys (batch, sk, heads, dim) as pages in a random order, and the table; NaN where no key is."""
    batch, sk, heads, dim = x.shape
    most = -(-sk // page)
    table = rng.permutation(batch * most + 2)[: batch * most].astype(np.int32).reshape(batch, most)
    cache = np.full((batch * most + 2, page, heads, dim), np.nan, x.dtype)
    for b in range(batch):
        for j in range(sk if used is None else used[b]):
            cache[table[b, j // page], j % page] = x[b, j]
    return cache, table


PAGED = ["--page-table", "table.npy", "--seqused-k", "used.npy"]
PREFIXES = ["--prefix-groups", "groups.npy", "--prefix-lens", "lens.npy"]


def has_cuda():
    return re.search(r"^cuda +available", fulgur("devices").stdout, re.M)


PEAKS = r"^ +f32 FMA [1-9][\d.]* GFLOP/s a thread, memory read [1-9][\d.]* GB/s in all, measured now$"
