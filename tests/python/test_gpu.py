"""Arrays on a GPU, on the fake driver of the C++ tests: its memory is the host's and its kernels do
nothing, so that these tests see what is launched where, and never a result."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

LOOK = """
#include "fake_driver.h"
extern "C" size_t launch_count() { return fulgur_fake_state()->launches.size(); }
extern "C" const void* last_stream() { return fulgur_fake_state()->launches.back().stream; }
"""

PRELUDE = """
import ctypes, re, sys
import numpy as np, pytest, fulgur

sys.path.insert(0, {tests!r})
from test_errors import Capsule

driver = ctypes.CDLL("libcuda.so.1")
driver.last_stream.restype = ctypes.c_void_p
asked = []


class OnGpu(Capsule):
    '''float16 zeros of a library that calls itself cupy's.'''

    __module__ = "cupy"

    def __init__(self, shape, device=(2, 0), dtype=(2, 16)):
        super().__init__(device, shape)
        self.memory = np.zeros(shape, "f2" if dtype[1] == 16 else "i%d" % (dtype[1] // 8))
        self.tensor.data = self.memory.ctypes.data
        self.tensor.dtype[0], self.tensor.dtype[1] = dtype
        self.device = "the GPU"

    def __dlpack__(self, *, stream=None, **others):
        asked.append(stream)
        if old and others:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return super().__dlpack__()

    def __array_namespace__(self):
        return Library


class Library:
    float16, float32 = (2, 16), (2, 32)

    @staticmethod
    def empty(shape, dtype, device):
        assert device == "the GPU"
        return OnGpu(shape, dtype=dtype)


class cupy:
    ndarray = OnGpu

    class cuda:
        class get_current_stream:
            ptr = 0x77


sys.modules["cupy"] = cupy
old = False
q, k = OnGpu((2, 128, 4, 64)), OnGpu((2, 256, 2, 64))
"""


@pytest.fixture(scope="module")
def on_fake_gpu(tmp_path_factory):
    """Runs code in a process that has a fake GPU."""
    folder = tmp_path_factory.mktemp("fake")
    (folder / "look.cpp").write_text(LOOK)
    root = TESTS.parent
    includes = [f"-I{root / name}" for name in ("src", "src/kernels", "include", "tests/cuda/fake")]
    subprocess.run(
        ["c++", "-std=c++20", "-shared", "-fPIC", *includes, folder / "look.cpp",
         TESTS / "cuda/fake/fake_driver.cpp", TESTS / "cuda/fake/fake_kernels.cpp", "-o", folder / "libcuda.so.1"],
        check=True,
    )  # fmt: skip
    environment = dict(os.environ, LD_LIBRARY_PATH=str(folder), FULGUR_CACHE_DIR=str(folder / "cache"))
    (folder / "cache").mkdir(mode=0o700)
    probe = "import fulgur; print(dict((e.name, e.unavailable) for e in fulgur.engines())['cuda'])"

    def run(code, **variables):
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    if unavailable := run(probe):
        pytest.skip(unavailable)
    return lambda code, **variables: run(PRELUDE.format(tests=str(TESTS / "python")) + code, **variables)


@pytest.mark.slow
def test_a_call_is_put_on_the_stream_of_the_library(on_fake_gpu):
    on_fake_gpu("""
out, lse = fulgur.attention(q, k, k, causal=True, return_lse=True)
assert type(out) is type(lse) is OnGpu
assert out.memory.shape == (2, 128, 4, 64) and lse.memory.shape == (2, 4, 128)
assert driver.launch_count() == 1 and driver.last_stream() == 0x77
assert set(asked) == {0x77}, asked
""")


@pytest.mark.slow
def test_results_of_cupy_which_has_no_array_namespace(on_fake_gpu):
    """They are made on the device of q, and their names are NumPy's."""
    on_fake_gpu("""
class Device:
    entered = 0

    def __enter__(self):
        Device.entered += 1

    def __exit__(self, *error):
        Device.entered -= 1

def empty(shape, dtype):
    assert Device.entered == 1
    return OnGpu(shape, dtype=vars(Library)[dtype])

del OnGpu.__array_namespace__
q.device, cupy.empty = Device(), empty
out, lse = fulgur.attention(q, k, k, causal=True, return_lse=True)
assert type(out) is type(lse) is OnGpu and Device.entered == 0
assert out.memory.dtype == np.float16 and lse.memory.shape == (2, 4, 128)
assert driver.launch_count() == 1 and driver.last_stream() == 0x77
""")


@pytest.mark.parametrize("given, exported, launched", [("0", 1, "None"), ("1", 1, 1), ("0x99", 0x99, 0x99)])
@pytest.mark.slow
def test_a_stream_of_the_caller(on_fake_gpu, given, exported, launched):
    """The default stream is 0 to the driver and 1 to DLPack."""
    on_fake_gpu(f"""
class Stream:
    def __cuda_stream__(self):
        return 0, {given}

for stream in ({given}, Stream()):
    fulgur.attention(q, k, k, stream=stream)
    assert driver.last_stream() == {launched}
assert set(asked) == {{{exported}}}, asked
""")


def test_a_library_older_than_dlpack_1(on_fake_gpu):
    on_fake_gpu("""
old = True
fulgur.attention(q, k, k)
assert driver.launch_count() == 1
""")


def test_plans(on_fake_gpu):
    on_fake_gpu("""
plan = fulgur.plan(q, k, k, return_lse=True)
assert plan.details()["engine"] == "cuda" and plan.details()["call"]["device"] == "cuda:0"
assert driver.launch_count() == 0
shapes = (2, 128, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64)
assert fulgur.explain(*shapes, dtype="f16", device="cuda:0") == fulgur.explain(q, k, k)
assert fulgur.plan(*shapes, dtype="f16").details()["engine"] == "cpu"
need = plan.workspace()
out = OnGpu((2, 128, 4, 64))
lse = OnGpu((2, 4, 128), dtype=(2, 32))
workspace = OnGpu((need.bytes // 4 + 256,), dtype=(0, 32))
workspace.tensor.data += -workspace.tensor.data % need.alignment
assert plan.run(q, k, k, out=out, lse=lse, workspace=workspace, stream=5) == (out, lse)
assert driver.last_stream() == 5
with pytest.raises(TypeError, match="^workspace: got ndarray.* contiguous array on cuda:0"):
    plan.run(q, k, k, workspace=np.zeros(need.bytes + 256, np.uint8))
""")


def test_lengths_on_the_host(on_fake_gpu):
    on_fake_gpu("""
packed, ends, used = OnGpu((300, 4, 64)), np.array([0, 100, 300], np.int32), np.array([90, 150], np.int32)
call = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, seqused_k=used)
fulgur.attention(packed, packed, packed, **call)
assert driver.launch_count() == 3  # the lengths, the rows, the padding
plan = fulgur.plan(packed, packed, packed, **call)
details = plan.details()
assert details["host_metadata"] == ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"]
assert details["uploaded_numbers"] == 8 and details["upload_launches"] == 1
plan.run(packed, packed, packed, **call)
assert driver.launch_count() == 6
used[1] = 201
with pytest.raises(ValueError, match="^seqused_k: got 201 at 1, want 0 to 200"):
    plan.run(packed, packed, packed, **call)
with pytest.raises(ValueError, match="^page_table: on cpu, want cuda:0 as q"):
    fulgur.attention(q, k, k, seqused_k=used, page_table=np.zeros((2, 1), np.int32))
assert driver.launch_count() == 6
""")


@pytest.mark.slow
def test_slopes_and_sinks_on_the_host(on_fake_gpu):
    on_fake_gpu("""
slopes, sinks = np.ones((2, 8), np.float32)[:, :4], np.zeros(4, np.float32)
_, lse = fulgur.attention(q, k, k, alibi_slopes=slopes, sinks=sinks, return_lse=True)
assert driver.launch_count() == 2  # the numbers, the rows
plan = fulgur.plan(q, k, k, alibi_slopes=slopes, sinks=sinks)
details = plan.details()
assert details["host_metadata"] == ["alibi_slopes", "sinks"]
assert details["uploaded_numbers"] == 12 and details["upload_launches"] == 1
before = driver.launch_count()
dq, dk, dv, dsinks = fulgur.attention_backward(q, q, k, k, q, lse, alibi_slopes=slopes, sinks=sinks)
assert type(dsinks) is OnGpu and driver.launch_count() > before + 1
with pytest.raises(ValueError, match="^dsinks: on cpu, want cuda:0 as q"):
    fulgur.attention_backward(q, q, k, k, q, lse, sinks=sinks, dsinks=np.zeros(4, np.float32))
""")


def test_dropout(on_fake_gpu):
    on_fake_gpu("""
fulgur.attention(q, k, k, dropout_p=0.5, seed=3)
fulgur.attention(q, k, k, dropout_p=0.5, rng_state=OnGpu((2,), dtype=(0, 64)))
with pytest.raises(ValueError, match="^rng_state: .*cpu.*cuda:0"):
    fulgur.attention(q, k, k, dropout_p=0.5, rng_state=np.zeros(2, np.int64))
assert driver.launch_count() == 2
""")


def test_append_and_merge(on_fake_gpu):
    on_fake_gpu("""
k_cache, v_cache, new = OnGpu((2, 64, 2, 64)), OnGpu((2, 64, 2, 64)), OnGpu((2, 3, 2, 64))
lengths, cos, sin = OnGpu((2,), dtype=(0, 32)), OnGpu((99, 32)), OnGpu((99, 32))
call = (k_cache, v_cache, new, OnGpu((2, 3, 2, 64)), lengths)
assert fulgur.append(*call) is None
assert driver.launch_count() == 1 and driver.last_stream() == 0x77
turned = fulgur.append(*call, cos=cos, sin=sin, q=q, causal=True, stream=5)
assert type(turned) is OnGpu and turned.memory.shape == (2, 128, 4, 64)
assert driver.launch_count() == 2 and driver.last_stream() == 5
assert fulgur.append(*call, cos=cos, sin=sin, q=q, q_out=q) is q
asked.clear()
lse = OnGpu((2, 4, 128), dtype=(2, 32))
out, merged = fulgur.merge([q, q], [lse, lse])
assert out.memory.shape == (2, 128, 4, 64) and merged.memory.shape == (2, 4, 128)
assert driver.launch_count() == 4 and driver.last_stream() == 0x77
assert set(asked) == {0x77}, asked
fulgur.merge([q], [lse], stream=9)
assert driver.last_stream() == 9
""")


def test_append_to_lengths_on_the_host(on_fake_gpu):
    on_fake_gpu("""
caches, lengths = (OnGpu((2, 64, 2, 64)), OnGpu((2, 64, 2, 64))), np.array([5, 60], np.int32)
new, ends = (OnGpu((4, 2, 64)), OnGpu((4, 2, 64))), np.array([0, 1, 4], np.int32)
fulgur.append(*caches, *new, lengths, cu_seqlens_k_new=ends)
assert driver.launch_count() == 2 and driver.last_stream() == 0x77  # the lengths, the rows
angles = dict(cos=OnGpu((99, 32)), sin=OnGpu((99, 32)), rotary_seqlens=lengths)
turned = fulgur.append(*caches, *new, lengths, cu_seqlens_k_new=ends, **angles, q=OnGpu((9, 4, 64)), cu_seqlens_q=ends)
assert turned.memory.shape == (9, 4, 64) and driver.launch_count() == 4
lengths[1] = 62
with pytest.raises(ValueError, match="^cache_seqlens: got 62 at 1, with 3 new rows 65, want at most the 64"):
    fulgur.append(*caches, *new, lengths, cu_seqlens_k_new=ends)
with pytest.raises(ValueError, match="^cache_batch_idx: on cpu, want cuda:0 as k_cache"):
    fulgur.append(*caches, *new, lengths, cu_seqlens_k_new=ends, cache_batch_idx=np.zeros(2, np.int32))
assert driver.launch_count() == 4
""")


def test_wrong_arguments(on_fake_gpu):
    on_fake_gpu("""
with pytest.raises(ValueError, match="^k: .*cpu.*cuda:0"):
    fulgur.attention(q, k.memory, k)
with pytest.raises(ValueError, match="^out: .*cpu.*cuda:0"):
    fulgur.attention(q, k, k, out=q.memory)
with pytest.raises(ValueError, match="^k: .*cuda:1.*cuda:0"):
    fulgur.attention(q, OnGpu((2, 256, 2, 64), device=(2, 1)), k)
with pytest.raises(ValueError, match="^max_seqlen_q"):
    packed, ends = OnGpu((128, 4, 64)), OnGpu((3,), dtype=(0, 32))
    fulgur.attention(packed, packed, packed, cu_seqlens_q=ends, cu_seqlens_k=ends)
lse = OnGpu((2, 4, 128), dtype=(2, 32))
with pytest.raises(ValueError, match="^outs.1.: on cpu, want cuda:0 as out"):
    fulgur.merge([q, q.memory], [lse, lse])
with pytest.raises(fulgur.Error, match="^outs: got 65, merge on cuda takes at most 64"):
    fulgur.merge([q] * 65, [lse] * 65)
with pytest.raises(ValueError, match="^cache_seqlens: on cuda:1, want cuda:0 as k_cache, or cpu"):
    fulgur.append(k, k, q, q, OnGpu((2,), device=(2, 1), dtype=(0, 32)))
for stream in (True, 1.0, "0"):
    with pytest.raises(TypeError, match="^stream: got .* want the handle of a CUDA stream"):
        fulgur.attention(q, k, k, stream=stream)
with pytest.raises(ValueError, match="^stream: got -1"):
    fulgur.attention(q, k, k, stream=-1)
with pytest.raises(ValueError, match="^device: got 'gpu', want 'cpu', 'cuda' or 'cuda:0'"):
    fulgur.explain((1, 1, 1, 8), (1, 1, 1, 8), (1, 1, 1, 8), device="gpu")
del OnGpu.__array_namespace__
cupy.ndarray = np.ndarray
with pytest.raises(TypeError, match="^q: got OnGpu on a GPU, whose library has no __array_namespace__"):
    fulgur.attention(q, k, k)
assert driver.launch_count() == 0
""")


@pytest.mark.parametrize(
    "variable, value, reason",
    [
        ("FAKE_CUDA_DEVICES", "0", "the driver sees no CUDA device|this machine has 0 CUDA devices"),
        ("FAKE_CUDA_INIT", "999", "does not start"),
        ("FAKE_CUDA_VERSION", "11080", "supports CUDA 11.8; want 12.0 or newer"),
        ("FAKE_CUDA_CAPABILITY", "72", r"has compute capability 7.2; want 7.5 or more"),
    ],
)
@pytest.mark.slow
def test_a_machine_that_does_not_do(on_fake_gpu, variable, value, reason):
    """Every call says why, as a fulgur.Error, and the CPU is none the worse for it."""
    on_fake_gpu(
        f"""
lse, lengths = OnGpu((2, 4, 128), dtype=(2, 32)), OnGpu((2,), dtype=(0, 32))
for call in (
    lambda: fulgur.attention(q, k, k),
    lambda: fulgur.plan(q, k, k),
    lambda: fulgur.explain(q, k, k),
    lambda: fulgur.attention_backward(q, q, k, k, q, lse),
    lambda: fulgur.append(k, OnGpu((2, 256, 2, 64)), OnGpu((2, 1, 2, 64)), OnGpu((2, 1, 2, 64)), lengths),
    lambda: fulgur.merge([q], [lse]),
):
    with pytest.raises(fulgur.Error, match={reason!r}):
        call()
(unavailable,) = (e.unavailable for e in fulgur.engines() if e.name == "cuda")
assert re.search({reason!r}, unavailable)
fulgur.attention(*[np.zeros((1, 4, 1, 8), np.float32)] * 3)
""",
        **{variable: value},
    )
