"""`fulgur attend` on .safetensors files, malformed ones among them."""

import json
import struct

import numpy as np
import pytest

from attention import assert_close, attention
from program import fails, from_bf16, listing, read_safetensors, succeeds, tensors, to_bf16, write_safetensors


def test_safetensors_forward_and_backward(tmp_path):
    arrays = tensors()
    write_safetensors(
        tmp_path / "in.safetensors",
        {n: ("F32", x) for n, x in arrays.items()} | {"other": ("BOOL", np.ones(3, np.uint8))},
        {"made": "by a test"},
    )
    succeeds(
        "attend", "--input", "in.safetensors", "--output", "o.safetensors", "--causal", cwd=tmp_path
    )
    want = attention(**arrays, right=0)
    got = read_safetensors(tmp_path / "o.safetensors")
    assert sorted(got) == sorted(want)
    for name, (dtype, array) in got.items():
        assert dtype == "F32"
        assert_close(array, want[name], "f32")


@pytest.mark.parametrize("dtype,numpy_type", [("F16", np.float16), ("F64", np.float64)])
def test_safetensors_dtypes(tmp_path, dtype, numpy_type):
    arrays = tensors(dtype=numpy_type)
    write_safetensors(tmp_path / "in.safetensors", {n: (dtype, arrays[n]) for n in "qkv"})
    succeeds("attend", "--input", "in.safetensors", "--output", "o.safetensors", cwd=tmp_path)
    got = read_safetensors(tmp_path / "o.safetensors")
    assert sorted(got) == ["lse", "out"] and got["out"][0] == dtype
    arrays.pop("dout")
    assert_close(got["out"][1], attention(**arrays)["out"], dtype.lower())


def test_safetensors_bf16_stays_bf16(tmp_path):
    bits = {n: to_bf16(x) for n, x in tensors(batch=1, sq=3, hq=1, hk=1, dv=5).items()}
    write_safetensors(tmp_path / "in.safetensors", {n: ("BF16", x) for n, x in bits.items()})
    succeeds("attend", "--input", "in.safetensors", "--output", "o.safetensors", cwd=tmp_path)
    got = read_safetensors(tmp_path / "o.safetensors")
    want = attention(**{n: from_bf16(x) for n, x in bits.items()})
    for name in want:
        dtype, array = got[name]
        assert dtype == ("F32" if name == "lse" else "BF16")
        assert_close(array if name == "lse" else from_bf16(array), want[name], "bf16")


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def packed_json(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


F4 = tensor("F32", [1, 1, 1, 1], 0, 4)


@pytest.mark.parametrize("where", ["dtype", "shape", "data_offsets"])
def test_safetensors_nested_deeper_than_any_stack(tmp_path, where):
    fields = tensor("F32", [1, 1, 1, 1], 0, 4) | {where: "DEEP"}
    text = json.dumps({"q": fields}).encode().replace(b'"DEEP"', b"[" * 200_000 + b"]" * 200_000)
    (tmp_path / "in.safetensors").write_bytes(packed_json(text, bytes(4)))
    fails(
        "attend", "--input", "in.safetensors", "--output", "o.safetensors",
        says=["--input in.safetensors", "more than 16 deep"], cwd=tmp_path,
    )
    assert listing(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize(
    "raw,says",
    [
        (b"", ["truncated"]),
        (b"\2\0\0\0\0\0\0\0{", ["truncated"]),
        (struct.pack("<Q", 2**63) + b"{}", ["header"]),
        (struct.pack("<Q", 100_000_001) + b"{}", ["100000000"]),
        (packed_json(b"{nonsense"), ["not JSON"]),
        (packed_json(b"\xff\xfe"), ["not JSON"]),
        (packed_json(b'{"q":1E9999}'), ["range"]),
        (packed_json(b"[]"), ["object"]),
        (packed_json(b"[" * 100000), ["more than 16 deep"]),
        (packed_json(b'{"q":' + b"[" * 16 + b"]" * 16 + b"}"), ["more than 16 deep"]),
        (packed_json(b'{"q":' + b"[" * 15 + b"]" * 15 + b"}"), ['"q"', "dtype"]),
        (packed_json(b'{"__metadata__":' + b'{"q":' * 15 + b"1" + b"}" * 16, bytes(4)), ["4 bytes of data"]),
        (packed_json({"q": 1}), ['"q"', "dtype"]),
        (packed_json({"q": {"dtype": "F32", "shape": [1]}}), ['"q"', "data_offsets"]),
        (
            packed_json({"q": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
            ["-1"],
        ),
        (packed_json({"q": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}), ["1.5"]),
        (packed_json({"q": {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 4]}}), ["2^63"]),
        (
            packed_json({"q": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}),
            ["3 entries"],
        ),
        (packed_json(b'{"q":{},"q":{}}'), ["twice"]),
        (packed_json({"q": F4}, bytes(3)), ["[0, 4]", "3 bytes"]),
        (packed_json({"q": tensor("F32", [1], 8, 4)}, bytes(8)), ["[8, 4]"]),
        (packed_json({"q": F4, "k": F4}, bytes(4)), ["overlap"]),
        (packed_json({"q": F4, "k": tensor("F32", [1], 2, 6)}, bytes(6)), ["overlap"]),
        (packed_json({"q": F4, "k": tensor("F32", [1], 8, 12)}, bytes(12)), ["gaps"]),
        (packed_json({"q": F4}, bytes(8)), ["8 bytes", "4"]),
        (packed_json({"q": tensor("F32", [3], 0, 4)}, bytes(4)), ['"q"', "want 12"]),
        (packed_json({"q": tensor("F32", [2**62, 2**62], 0, 4)}, bytes(4)), ['"q"', "2^63"]),
        (packed_json({"q": tensor("I64", [1], 0, 8)}, bytes(8)), ['"q"', "I64"]),
        (packed_json({"q": tensor("F32", [], 0, 4)}, bytes(4)), ['"q"', "0 dimensions"]),
        (packed_json({"q": F4}, bytes(4)), ["lacks the tensor 'k'"]),
    ],
    ids=str,
)
def test_malformed_safetensors(tmp_path, raw, says):
    (tmp_path / "in.safetensors").write_bytes(raw)
    fails(
        "attend",
        "--input",
        "in.safetensors",
        "--output",
        "out.safetensors",
        says=["--input in.safetensors", *says],
        cwd=tmp_path,
    )
    assert listing(tmp_path) == ["in.safetensors"]
