"""The handlers of fulgur.jax as XLA sees them, without a GPU."""

import ctypes
import itertools
import os
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_inputs import LENGTH, ROOT, qkv

from fulgur import _fulgur
from fulgur.jax import append, append_attention, attention


def test_structs_are_those_of_jaxlib(tmp_path):
    """The layout of python/xla_ffi.h against jaxlib's header, compiled."""
    code = """
        #include <cstddef>
        #include "xla/ffi/api/c_api.h"
        #include "xla_ffi.h"
        namespace ours = fulgur::python::xla;
        #define SAME_PLACE(a, x, b, y) static_assert(offsetof(ours::a, x) == offsetof(b, y) && \\
            sizeof(ours::a::x) == sizeof(b::y))
        #define SAME_SIZE(a, b) static_assert(sizeof(ours::a) == sizeof(b))
        #define SAME(a, b) static_assert(static_cast<long>(ours::a) == static_cast<long>(b))
    """
    fields = {
        "Extension XLA_FFI_Metadata_Extension": "",
        "ApiVersion XLA_FFI_Api_Version": "struct_size extensions:extension_start major:major_version "
        "minor:minor_version",
        "Metadata XLA_FFI_Metadata": "struct_size api_version traits",
        "MetadataExtension XLA_FFI_Metadata_Extension": "base:extension_base metadata",
        "Buffer XLA_FFI_Buffer": "struct_size extensions:extension_start dtype data rank dims",
        "Buffers XLA_FFI_Args": "struct_size extensions:extension_start size types items:args",
        "Buffers XLA_FFI_Rets": "struct_size extensions:extension_start size types items:rets",
        "Span XLA_FFI_ByteSpan": "data:ptr size:len",
        "Attributes XLA_FFI_Attrs": "struct_size extensions:extension_start size types names items:attrs",
        "Array XLA_FFI_Array": "dtype size data",
        "CallFrame XLA_FFI_CallFrame": "struct_size extensions:extension_start api context:ctx stage "
        "operands:args results:rets attributes:attrs",
        "MakeError XLA_FFI_Error_Create_Args": "struct_size extensions:extension_start message code:errc",
        "DestroyError XLA_FFI_Error_Destroy_Args": "struct_size extensions:extension_start error",
        "GetStream XLA_FFI_Stream_Get_Args": "struct_size extensions:extension_start context:ctx stream",
        "GetThreads XLA_FFI_ThreadPool_NumThreads_Args": "struct_size extensions:extension_start "
        "context:ctx threads:num_threads",
        "GetDevice XLA_FFI_DeviceOrdinal_Get_Args": "struct_size extensions:extension_start "
        "context:ctx device:device_ordinal",
        "Api XLA_FFI_Api": "struct_size extensions:extension_start version:api_version "
        "internal:internal_api make_error:XLA_FFI_Error_Create destroy_error:XLA_FFI_Error_Destroy "
        "get_stream:XLA_FFI_Stream_Get get_threads:XLA_FFI_ThreadPool_NumThreads "
        "get_device:XLA_FFI_DeviceOrdinal_Get",
    }  # fmt: skip
    sizes = "ApiVersion Buffer Buffers Span Attributes Array MetadataExtension MakeError GetStream GetThreads GetDevice"
    lines = []
    for names, pairs in fields.items():
        ours, theirs = names.split()
        for pair in pairs.split():
            a, _, b = pair.partition(":")
            lines.append(f"SAME_PLACE({ours}, {a}, {theirs}, {b or a});")
        if ours in sizes.split():
            lines.append(f"SAME_SIZE({ours}, {theirs});")
    lines.append("static_assert(offsetof(ours::MetadataExtension, metadata) == sizeof(ours::Extension));")
    constants = {
        "kMetadataExtension": "Extension_Metadata", "kMajorVersion": "API_MAJOR", "kBuffer": "ArgType_BUFFER",
        "kArray": "AttrType_ARRAY", "kCommandBufferCompatible": "HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
        "Stage::kInitialize": "ExecutionStage_INITIALIZE", "Stage::kExecute": "ExecutionStage_EXECUTE",
        **{f"DataType::k{x}": f"DataType_{x}" for x in ("S32", "U32", "F16", "BF16", "F32", "F64")},
        **{f"ErrorCode::k{x.title().replace('_', '')}": f"Error_Code_{x}" for x in
           ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE")},
    }  # fmt: skip
    lines += [f"SAME({a}, XLA_FFI_{b});" for a, b in constants.items()]
    lines.append("static_assert(ours::kBuffer == XLA_FFI_RetType_BUFFER);")
    lines.append("static_assert(ours::kMinorVersion <= XLA_FFI_API_MINOR);")
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join([*(line.strip() for line in code.splitlines()), *lines]) + "\n")
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", f"-I{ROOT / 'python'}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(lines) > 80 and "\\" in source.read_text()
    source.write_text(source.read_text() + "SAME_PLACE(Buffer, data, XLA_FFI_Buffer, rank);\n")
    assert subprocess.run(command, capture_output=True).returncode != 0  # the comparison compares


def handler(call, platform, stage="execute"):
    capsule = _fulgur.jax_handlers()[call][platform][stage]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(pointer(capsule, None))


SIZE, POINTER, INT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32


def struct(*values):
    """A struct of ctypes values, which are kept."""
    fields = [(f"f{n}", type(value)) for n, value in enumerate(values)]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})(*values)


def address(value):
    return POINTER(ctypes.addressof(value))


@pytest.mark.parametrize("call", ["fulgur_forward", "fulgur_backward", "fulgur_append", "fulgur_append_forward"])
@pytest.mark.parametrize("platform, stage", [("cpu", "execute"), ("CUDA", "execute"), ("CUDA", "initialize")])
def test_handlers_say_what_they_are(call, platform, stage):
    metadata = struct(SIZE(56), struct(SIZE(24), POINTER(), INT(-1), INT(-1)), ctypes.c_uint32(77), ctypes.c_int64())
    extension = struct(struct(SIZE(24), INT(1), POINTER()), address(metadata))
    frame = struct(SIZE(144), address(extension))
    assert handler(call, platform, stage)(address(frame)) is None
    version = metadata.f1
    assert (version.f2, version.f3) == (0, 1)
    assert metadata.f2 == (1 if platform == "CUDA" else 0)  # COMMAND_BUFFER_COMPATIBLE


class Frame:
    """XLA's call of a handler, on a device that there need not be. `given`: the names of tensors that
    such a call may lack, and this one has."""

    def __init__(self, stage, operands, results, given=()):
        self.asked, self.errors = [], []
        given = sum(1 << BITS[name] for name in given)
        options = _fulgur.option_defaults() | dict(scale=0.25, window_right=0)
        reals, integers = ([x for x in options.values() if isinstance(x, float) == real] for real in (True, False))
        numbers = [np.array(x) for x in (reals, [*integers, 0, given])]
        self.kept = [numbers]
        arrays = [self.keep(struct(INT(12 if x.dtype.kind == "f" else 5), SIZE(x.size), POINTER(x.ctypes.data)))
                  for x in numbers]  # fmt: skip
        names = [ctypes.create_string_buffer(x) for x in (b"reals", b"integers")]
        self.kept += names
        spans = [self.keep(struct(address(x), SIZE(len(x) - 1))) for x in names]
        stop = POINTER()
        attributes = struct(
            SIZE(48), stop, ctypes.c_int64(2), self.list(INT, [1, 1]), self.list(POINTER, map(address, spans)),
            self.list(POINTER, map(address, arrays)),
        )  # fmt: skip
        # Memory of the device, which the host does not look at, and none before the execution.
        memory = ((n << 20) * (stage == 3) for n in itertools.count(1))
        frame = struct(SIZE(144), stop, address(self.api()), POINTER(4321), INT(stage),
                       self.buffers(operands, memory), self.buffers(results, memory), attributes, stop)  # fmt: skip
        self.address = address(self.keep(frame))

    def keep(self, value):
        self.kept.append(value)
        return value

    def list(self, kind, values):
        values = list(values)
        return address(self.keep((kind * len(values))(*(getattr(x, "value", x) for x in values))))

    def buffers(self, shapes, memory):
        """Buffers of float32; vectors are of int32."""
        items = [
            self.keep(struct(SIZE(48), POINTER(), INT(4 if len(x) == 1 else 11), POINTER(data),
                             ctypes.c_int64(len(x)), self.list(ctypes.c_int64, x)))
            for x, data in zip(shapes, memory)
        ]  # fmt: skip
        return struct(SIZE(40), POINTER(), ctypes.c_int64(len(items)), self.list(INT, [1] * len(items)),
                      self.list(POINTER, map(address, items)))  # fmt: skip

    def api(self):
        kind = ctypes.CFUNCTYPE(POINTER, POINTER)

        def make_error(arguments):
            fields = struct(SIZE(), POINTER(), ctypes.c_char_p(), INT())
            fields = type(fields).from_address(arguments)
            self.errors.append((fields.f3, fields.f2.decode()))
            return 99

        def get_stream(arguments):
            fields = type(struct(SIZE(), POINTER(), POINTER(), POINTER())).from_address(arguments)
            self.asked.append(("stream", fields.f2))
            fields.f3 = 1234
            return None

        def get_device(arguments):
            fields = type(struct(SIZE(), POINTER(), POINTER(), INT())).from_address(arguments)
            self.asked.append(("device", fields.f2))
            fields.f3 = 4095  # no machine has that many
            return None

        makers = {0: make_error, 4: get_stream, 17: get_device}
        functions = [self.keep(kind(makers[n])) if n in makers else None for n in range(18)]
        table = [POINTER(ctypes.cast(f, POINTER).value if f else None) for f in functions]
        return self.keep(struct(SIZE(), POINTER(), struct(SIZE(), POINTER(), INT(), INT()), POINTER(), *table))


BITS = {tensor.name: tensor.number for tensors in _fulgur.tensors().values() for tensor in tensors}
ROWS, LSE = (1, 5, 2, 16), (1, 2, 5)
CALLS = {
    "fulgur_forward": ([ROWS] * 3, [ROWS, LSE], ["lse"]),
    "fulgur_backward": ([ROWS] * 5 + [LSE], [ROWS] * 3),
    "fulgur_append": ([ROWS] * 4 + [(1,)], [ROWS] * 2),
    "fulgur_append_forward": ([ROWS] * 4 + [(1,), ROWS], [ROWS] * 3 + [LSE], ["lse"]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stage, number", [("initialize", 2), ("execute", 3)])
def test_cuda_handlers_ask_for_device_and_stream(call, stage, number):
    """float32, or a device that is not there: the engine's answer is an error, whatever the machine."""
    frame = Frame(number, *CALLS[call])
    assert handler(call, "CUDA", stage)(frame.address) == 99
    assert sorted(frame.asked) == [("device", 4321), ("stream", 4321)]
    ((code, message),) = frame.errors
    assert code in (12, 14) and "cuda" in message.lower(), (code, message)


@pytest.mark.parametrize(
    "operands, results, given, message",
    [
        ([ROWS], [ROWS], [], "got 1 operands, want more"),
        ([], [ROWS], [], "got 0 operands, want more"),
        ([ROWS] * 3, [], [], "got 0 results, want more"),
        ([ROWS] * 4, [ROWS], [], "got 4 operands, want 3"),
        ([ROWS] * 3, [ROWS, LSE, LSE], ["lse"], "got 3 results, want 2"),
        ([ROWS] * 3, [ROWS], ["sinks"], "got 3 operands, want more"),
        ([ROWS, (5, 2, 16), ROWS], [ROWS], [], "k: got 3 dimensions"),
        ([(2, *ROWS), (2,), (2, *ROWS)], [ROWS], [], "k: got 0 dimensions"),
        ([(1, 5, 2, 16), (1, 5, 3, 16), ROWS], [ROWS], [], "q: got 2 heads"),
    ],
)  # fmt: skip
def test_wrong_calls_of_handlers(operands, results, given, message):
    frame = Frame(3, operands, results, given)
    assert handler("fulgur_forward", "CUDA")(frame.address) == 99
    ((code, got),) = frame.errors
    assert code == 3 and re.search(message, got), got


def test_calls_are_lowered_for_cuda():
    q, k, v = qkv(dtype="bfloat16")
    loss = jax.jit(jax.grad(lambda q: attention(q, k, v, causal=True).astype(jnp.float32).sum()))
    text = loss.trace(q).lower(lowering_platforms=("cuda",)).as_text()
    step = jax.jit(lambda k, v: append(k, v, k[:, :1], v[:, :1], LENGTH))
    text += step.trace(k, v).lower(lowering_platforms=("cuda",)).as_text()
    step = jax.jit(lambda q, k, v: append_attention(q[:, :1], k, v, k[:, :1], v[:, :1], LENGTH))
    text += step.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    for call in CALLS:
        assert f"@{call}(" in text
    assert text.count("output_operand_alias<") == 4
