"""Kinds of arrays in and out, memory that is never copied, threads that go on."""

import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fulgur
from fulgur import _fulgur


def make_qkv(dtype=np.float32, shape=(2, 17, 2, 16)):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for _ in range(3)]


class OnlyDLPack:
    """An array of an unknown library: nothing but the DLPack methods."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OtherLibrary(OnlyDLPack):
    """An array of a library that follows the Python array API standard."""

    def __array_namespace__(self):
        return OtherLibrary

    @staticmethod
    def asarray(array):
        return OtherLibrary(array)


def test_views_point_to_the_memory_of_the_caller():
    array = np.zeros((2, 48, 4, 40), np.float32)[:, 1::2, :, 8:24]
    for kind in (array, OnlyDLPack(array)):
        view = _fulgur.view("q", kind)
        assert view.data == array.ctypes.data
        assert (view.shape, view.dtype) == ((2, 24, 4, 16), "f32")


def test_memory_does_not_grow_with_the_inputs():
    """In a process of its own, because the peak is the process's."""
    code = """
import resource, numpy as np, fulgur
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
q = np.ones((1, 1, 1, 64), np.float32)
k = np.ones((1, 2**20, 1, 64), np.float32)  # 256 MiB
k.flags.writeable = False
fulgur.attention(q, k[:, :64], k[:, :64])
before = peak()
out, lse = fulgur.attention(q, k, k, return_lse=True)
assert abs(out - 1).max() < 1e-4
print(peak() - before)
"""
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 64  # MiB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_only_inputs(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = make_qkv(dtype)
    want, want_lse = fulgur.attention(q, k, v, return_lse=True)
    want_gradients = fulgur.attention_backward(want, q, k, v, want, want_lse, deterministic=True)
    lengths = np.array([17, 9], np.int32)
    for array in (q, k, v, want, want_lse, lengths):
        array.flags.writeable = False
    np.testing.assert_array_equal(fulgur.attention(q, k, v), want)
    gradients = fulgur.attention_backward(want, q, k, v, want, want_lse, deterministic=True)
    for got, expected in zip(gradients, want_gradients):
        np.testing.assert_array_equal(got, expected)
    fulgur.attention(q, k, v, seqused_k=lengths)
    fulgur.merge([want], [want_lse])
    # A read-only memory map, where a write would crash.
    q = np.frombuffer(q.tobytes(), np.uint8).view(q.dtype).reshape(q.shape)
    np.testing.assert_array_equal(fulgur.attention(q, k, v), want)


def test_buffers():
    q, k, v = (x.astype(np.float32) for x in make_qkv())
    want = fulgur.attention(q, k, v)
    for kind in (memoryview, np.ctypeslib.as_ctypes):
        np.testing.assert_array_equal(fulgur.attention(*map(kind, (q, k, v))), want)
        out = np.zeros_like(want)
        fulgur.attention(q, kind(k), v, out=kind(out))
        np.testing.assert_array_equal(out, want)
    released = memoryview(q)
    released.release()
    with pytest.raises(TypeError, match="^k: got memoryview, want a NumPy array or an object with __dlpack__"):
        fulgur.attention(q, released, v)


def test_results_are_fresh():
    q, k, v = make_qkv()
    copies = [x.copy() for x in (q, k, v)]
    out, lse = fulgur.attention(q, k, v, return_lse=True)
    gradients = fulgur.attention_backward(out, q, k, v, out, lse)
    for result in (out, lse, *gradients):
        assert type(result) is np.ndarray
        assert result.flags.writeable and result.flags.c_contiguous
        assert not any(np.shares_memory(result, x) for x in (q, k, v))
    for array, copy in zip((q, k, v), copies):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("kind", [OnlyDLPack, OtherLibrary, memoryview])
def test_other_libraries(kind):
    arrays = make_qkv()
    want, want_lse = fulgur.attention(*arrays, return_lse=True)
    q, k, v = (kind(x) for x in arrays)
    out, lse = fulgur.attention(q, k, v, return_lse=True)
    merged, _ = fulgur.merge([out], [lse])
    dq, _, _ = fulgur.attention_backward(out, q, k, v, out, lse)
    for result in (out, lse, merged, dq):
        assert type(result) is (OtherLibrary if kind is OtherLibrary else np.ndarray)
    plain = (lambda x: x.array) if kind is OtherLibrary else (lambda x: x)
    np.testing.assert_array_equal(plain(out), want)
    np.testing.assert_array_equal(plain(lse), want_lse)
    np.testing.assert_allclose(plain(merged), want, rtol=1e-6)


def test_kinds_may_mix():
    q, k, v = make_qkv()
    out = np.empty_like(q)
    assert fulgur.attention(OnlyDLPack(q), k, OtherLibrary(v), out=out) is out
    np.testing.assert_array_equal(out, fulgur.attention(q, k, v))


def test_bfloat16_of_numpy():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = make_qkv(bfloat16)
    out, lse = fulgur.attention(q, k, v, return_lse=True)
    assert out.dtype == bfloat16 and lse.dtype == np.float32
    exact = fulgur.attention(*(x.astype(np.float32) for x in (q, k, v)))
    np.testing.assert_allclose(out.astype(np.float32), exact, atol=2e-2)
    given = np.empty_like(q)
    assert fulgur.attention(q, k, v, out=given) is given
    np.testing.assert_array_equal(given, out)


def test_the_gil_is_released():
    """A Python thread goes on while one call computes."""
    q, k, v = make_qkv(shape=(1, 2048, 4, 64))
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    start = time.perf_counter()
    fulgur.attention(q, k, v, threads=1, engine="reference")
    end = time.perf_counter()
    done.set()
    ticker.join()
    quarter = (end - start) / 4
    during = [t for t in ticks if start + quarter < t < end - quarter]
    assert len(during) >= 3, f"{len(during)} ticks in the middle of {end - start:.3f} s"


def test_calls_from_many_threads():
    inputs = [make_qkv(shape=(1, 40 + n, 2, 16)) for n in range(6)]
    want = [fulgur.attention(*x, causal=True, threads=1) for x in inputs]
    got = [None] * len(inputs)

    def work(n):
        for _ in range(5):
            got[n] = fulgur.attention(*inputs[n], causal=True, threads=1)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


def test_a_forked_child_computes():
    """In a process of its own, which an alarm ends if the child waits for the parent's threads."""
    code = """
import os, signal, numpy as np, fulgur
q = np.ones((2, 300, 4, 32), np.float32)
want = fulgur.attention(q, q, q, threads=2)
child = os.fork()
signal.alarm(20)
got = fulgur.attention(q, q, q, threads=2)
status = 0 if (got == want).all() else 1
if child == 0:
    os._exit(status)
raise SystemExit(status or os.waitpid(child, 0)[1])
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_children_forked_while_other_threads_compute():
    """The child has the locks that other threads held when it was forked, but no thread that releases them."""
    code = """
import os, signal, threading, numpy as np, fulgur
stop = False
def compute(thread):
    n = 0
    while not stop:  # of many shapes: plans are looked up, made and forgotten, and memory is shared
        n += 1
        x = np.ones((1, 1 + (7 * n + 13 * thread) % 60, 2, 8), np.float32)
        fulgur.attention(x, x, x, threads=1)
threads = [threading.Thread(target=compute, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
x = np.ones((1, 5, 2, 8), np.float32)
failed = 0
for _ in range(150):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if (fulgur.attention(x, x, x, threads=1) == 1).all() else 1)
    failed += os.waitpid(child, 0)[1] != 0
    if failed: break
stop = True
raise SystemExit(failed)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_daemon_threads_compute_while_the_interpreter_ends():
    code = """
import threading, time, numpy as np, fulgur
x = np.ones((1, 64, 4, 32), np.float32)
def compute():
    while True:
        fulgur.attention(x, x, x, threads=1)
for _ in range(4):
    threading.Thread(target=compute, daemon=True).start()
time.sleep(0.1)
"""
    for _ in range(3):  # each of which aborted where the threads were unwound
        ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stderr=subprocess.PIPE, text=True)
        assert ended.stderr == ""


def test_repeated_calls_leak_nothing():
    q, k, v = make_qkv(shape=(1, 256, 4, 64))  # 256 KiB each
    references = [sys.getrefcount(x) for x in (q, k, v)]

    def work(count):
        for _ in range(count):
            out, lse = fulgur.attention(q, k, v, return_lse=True)
            fulgur.attention_backward(out, q, k, v, out, lse)
            with pytest.raises(ValueError):
                fulgur.attention(q, k[:, :1], v)

    work(20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work(200)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50 * 1024  # KiB; leaking the results alone would be 250 MiB
    assert [sys.getrefcount(x) for x in (q, k, v)] == references


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        self.torch = pytest.importorskip("torch")

    def make(self, dtype="float32"):
        return [self.torch.from_numpy(x).to(getattr(self.torch, dtype)) for x in make_qkv()]

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
    def test_results(self, dtype):
        q, k, v = self.make(dtype)
        out, lse = fulgur.attention(q, k, v, causal=True, return_lse=True)
        gradients = fulgur.attention_backward(out, q, k, v, out, lse, causal=True)
        merged, merged_lse = fulgur.merge([out], [lse])
        for result in (out, lse, *gradients, merged, merged_lse):
            assert type(result) is self.torch.Tensor
        assert out.dtype == q.dtype == gradients[0].dtype == merged.dtype
        assert lse.dtype == (self.torch.float64 if dtype == "float64" else self.torch.float32)
        if dtype == "bfloat16":
            exact = fulgur.attention(*(x.float() for x in (q, k, v)), causal=True)
            assert (out.float() - exact).abs().max() < 2e-2
        else:
            want = fulgur.attention(*(x.numpy() for x in (q, k, v)), causal=True)
            np.testing.assert_array_equal(out.numpy(), want)

    def test_gradients_are_those_of_autograd(self):
        q, k, v = (x.requires_grad_() for x in self.make("float64"))
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        want = (heads[0] @ heads[1].mT / 4).softmax(-1) @ heads[2]
        dout = self.torch.ones_like(q)
        want.transpose(1, 2).backward(dout)
        plain = [x.detach() for x in (q, k, v)]
        out, lse = fulgur.attention(*plain, return_lse=True)
        for got, x in zip(fulgur.attention_backward(dout, *plain, out, lse), (q, k, v)):
            np.testing.assert_allclose(got.numpy(), x.grad.numpy(), atol=1e-12)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_no_copy(self, dtype):
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.make(dtype))
        assert _fulgur.view("q", q).data == q.data_ptr()
        out = self.torch.empty_like(q)
        assert fulgur.attention(q, k, v, out=out) is out
        assert self.torch.equal(out, fulgur.attention(q, k, v))

    def test_a_tensor_that_requires_grad_is_refused(self):
        q, k, v = self.make()
        with pytest.raises(ValueError, match=r"^k: requires grad.*detach"):
            fulgur.attention(q, k.requires_grad_(), v)

    def test_views_that_are_no_memory_are_refused(self):
        q, k, v = self.make()
        negated = self.torch.complex(q, k).conj().imag
        assert negated.is_neg()
        with pytest.raises(ValueError, match="^v: is a negated view"):
            fulgur.attention(q, k, negated)
        with self.torch._subclasses.FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
        with pytest.raises(ValueError, match="^q: data is null"):
            fulgur.attention(fake, k, v)

    @pytest.mark.parametrize("kind, message", [
        ("sparse", "got a tensor of layout torch.sparse_coo, want a dense one"),
        ("nested", "got a nested tensor, want a dense one"), ("jagged", "got a nested tensor, want a dense one"),
        ("quantized", "got a quantized tensor, want {}.dequantize"),
        ("meta", "got a tensor on meta, want one with memory, or fulgur.torch.attention"),
    ])  # fmt: skip
    @pytest.mark.filterwarnings("ignore")
    def test_tensors_without_rows_are_refused(self, kind, message):
        q, k, v = self.make()
        torch = self.torch
        wrong = {
            "sparse": lambda: q.to_sparse(),
            "nested": lambda: torch.nested.nested_tensor(list(q)),
            "jagged": lambda: torch.nested.nested_tensor(list(q), layout=torch.jagged),
            "quantized": lambda: torch.quantize_per_tensor(q, 0.1, 0, torch.qint8),
            "meta": lambda: q.to("meta"),
        }[kind]()
        for call, name in [
            (lambda: fulgur.attention(wrong, k, v), "q"), (lambda: fulgur.attention(q, k, wrong), "v"),
            (lambda: fulgur.attention(q, k, v, alibi_slopes=wrong), "alibi_slopes"),
            (lambda: fulgur.attention(q, k, v, out=wrong), "out"), (lambda: fulgur.explain(q, wrong, v), "k"),
            (lambda: fulgur.merge([q, wrong], [q, q]), r"outs\[1\]"),
        ]:  # fmt: skip
            with pytest.raises(TypeError, match=f"^{name}: {message.format(name)}"):
                call()
        with pytest.raises(TypeError, match="^workspace: got .*, want a writable contiguous array"):
            fulgur.plan(q, k, v).run(q, k, v, workspace=wrong)

    def test_tensors_of_transformations_are_refused(self):
        """Nothing would be mapped, and no tangent carried on."""
        q, k, v = self.make()
        with pytest.raises(TypeError, match="^k: got a tensor of torch.func, want fulgur.torch.attention"):
            self.torch.func.vmap(lambda k: fulgur.attention(q, k, v))(k[None])
        forward_ad = self.torch.autograd.forward_ad
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(v, v)
            with pytest.raises(NotImplementedError, match="^v: has a tangent, .* want v.detach"):
                fulgur.attention(q, k, dual)
            assert self.torch.equal(fulgur.attention(q, k, dual.detach()), fulgur.attention(q, k, v))

    def test_parameters(self):
        q, k, v = self.make()
        parameter = self.torch.nn.Parameter(q, requires_grad=False)
        assert self.torch.equal(fulgur.attention(parameter, k, v), fulgur.attention(q, k, v))

    def test_streams_are_those_of_torch(self):
        """On the CPU there is none."""
        q, _, _ = self.make()
        assert _fulgur.current_stream(q) == 0
