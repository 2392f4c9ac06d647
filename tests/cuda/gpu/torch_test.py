"""fulgur in PyTorch on a GPU: python3 tests/cuda/gpu/torch_test.py, with fulgur and torch importable.

Gradients are tested where the CUDA engine computes them, and skipped with its own words elsewhere.
"""

import statistics
import subprocess
import sys
import time
import unittest
from pathlib import Path

import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import fulgur.torch  # the operators, which the others take
from fulgur import flash_attn, flash_attn_cute, flash_attn_interface
from fulgur.torch import _operators, attention
from fulgur.torch._random import random_numbers


def make(*shapes, dtype=torch.bfloat16, grad=False):
    torch.manual_seed(0)
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=grad) for s in shapes]


def make_qkv(sq=128, sk=192, hq=8, hk=2, d=64, dv=64, **kind):
    return make((2, sq, hq, d), (2, sk, hk, d), (2, sk, hk, dv), **kind)


def math(q, k, v, causal=False, scale=None, softcap=0.0, sinks=None):
    """In float64, masks aligned at the bottom right."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    sq, sk = scores.shape[-2:]
    if causal:
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:  # one more key, without a value
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., :sk] @ v).transpose(1, 2)


class OnGpu(unittest.TestCase):
    def assert_close(self, got, want, tolerance=2e-2):
        self.assertEqual(got.shape, want.shape)
        self.assertLess((got.double() - want.double()).abs().max().item(), tolerance)

    def gradients(self, out, inputs, dout):
        try:
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)
        except RuntimeError as error:
            if "backward" in str(error):
                self.skipTest(str(error))
            raise


class TestAttention(OnGpu):
    OPTIONS = ({}, dict(causal=True), dict(softcap=4.0, scale=0.3))

    def test_results(self):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for options in self.OPTIONS:
                with self.subTest(dtype=dtype, options=options):
                    q, k, v = make_qkv(dtype=dtype)
                    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
                    self.assert_close(attention(q, k, v, **options), math(q, k, v, **options), tolerance)

    def test_packed_lengths_that_are_freed(self):
        q, k, v = (x.flatten(0, 1) for x in make_qkv(sq=192))
        want = None
        for _ in range(20):  # a plan is found again, the lengths lie elsewhere
            ends = torch.tensor([0, 100, 384], device="cuda", dtype=torch.int32)
            out = attention(
                q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=300, max_seqlen_k=300
            )
            del ends
            torch.randn(1000, device="cuda")
            want = out if want is None else want
            self.assertTrue(torch.equal(out, want))
        self.assert_close(want[None, :100], math(q[None, :100], k[None, :100], v[None, :100]))

    def test_streams(self):
        q, k, v = make_qkv(sq=2048, sk=2048)
        want = attention(q, k, v)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            later = [x * 2 for x in (q, k, v)]
            out, same = attention(*later), fulgur.attention(*later)
        side.synchronize()
        self.assert_close(out, math(*later), 5e-2)
        self.assertTrue(torch.equal(out, same))
        out = fulgur.attention(q, k, v, stream=side)
        side.synchronize()
        self.assertTrue(torch.equal(out, want))

    def test_graphs(self):
        q, k, v = make_qkv()
        attention(q, k, v, causal=True)  # plans
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, k, v, causal=True)
        for _ in range(100):
            q.copy_(torch.randn_like(q))
            graph.replay()
        self.assertTrue(torch.equal(out, attention(q, k, v, causal=True)))

    def test_a_capture_without_a_plan_is_an_error(self):
        q, k, v = make_qkv(sq=77, sk=99)
        with self.assertRaisesRegex(RuntimeError, "captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            attention(q, k, v)
        self.assert_close(attention(q, k, v), math(q, k, v))

    def test_gradients(self):
        for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float32, 5e-5)):
            for options in self.OPTIONS:
                with self.subTest(dtype=dtype, options=options):
                    q, k, v = make_qkv(grad=True, dtype=dtype)
                    out, lse = attention(q, k, v, return_lse=True, **options)
                    dout = torch.randn_like(out)
                    got = self.gradients(out, (q, k, v), dout)
                    want = torch.autograd.grad(math(q, k, v, **options), (q, k, v), dout.double())
                    for a, b in zip(got, want):
                        self.assert_close(a, b, tolerance)

    def test_sinks(self):
        sinks = torch.tensor([0.5, -torch.inf, -1, 2, 0, 9, -3, 1], device="cuda", requires_grad=True)
        for options in self.OPTIONS:
            for sq in (128, 1):  # by the forward and by the decode kernel
                with self.subTest(options=options, sq=sq):
                    q, k, v = make_qkv(sq=sq, grad=True)
                    out = attention(q, k, v, sinks=sinks, **options)
                    want = math(q, k, v, sinks=sinks, **options)
                    self.assert_close(out, want)
                    dout = torch.randn_like(out)
                    got = self.gradients(out, (q, k, v, sinks), dout)
                    for a, b in zip(got, torch.autograd.grad(want, (q, k, v, sinks), dout.double())):
                        self.assert_close(a, b, 5e-2 * max(1, b.abs().max().item()))

    def test_sinks_of_drop_ins(self):
        q, k, v = make_qkv()
        sinks = torch.randn(8, device="cuda")
        out = flash_attn_cute.flash_attn_func(q, k, v, causal=True, learnable_sink=sinks.bfloat16())[0]
        self.assert_close(out, math(q, k, v, causal=True, sinks=sinks.bfloat16()))

    def test_dropout_is_that_of_the_cpu(self):
        q, k, v = make_qkv(grad=True)
        torch.manual_seed(5)
        out = attention(q, k, v, causal=True, dropout_p=0.4)
        torch.manual_seed(5)
        seed, offset = random_numbers(q).tolist()
        shared = dict(causal=True, dropout_p=0.4, seed=seed % 2**64, offset=offset % 2**64)
        dout = torch.randn_like(out)
        on_cpu = [x.detach().cpu() for x in (q, k, v)]
        want, lse = fulgur.attention(*on_cpu, return_lse=True, **shared)
        self.assert_close(out.cpu(), want)
        expected = fulgur.attention_backward(dout.cpu(), *on_cpu, want, lse, **shared)
        for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), expected):
            self.assert_close(a.cpu(), b, 5e-2)

    def test_dropout_of_every_replay_is_another(self):
        q, k, v = make_qkv()
        attention(q, k, v, dropout_p=0.5)  # plans
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attention(q, k, v, dropout_p=0.5)
        results = []
        for _ in range(2):
            graph.replay()
            results.append(out.clone())
        self.assertFalse(torch.equal(*results))

    def test_compile(self):
        q, k, v = make_qkv()
        call = lambda *x: attention(*x, causal=True) * 2  # noqa: E731
        compiled = torch.compile(call, fullgraph=True)
        self.assertTrue(torch.equal(compiled(q, k, v), call(q, k, v)))

    def test_opcheck(self):
        torch.library.opcheck(torch.ops.fulgur.forward, make_qkv(), dict(scale=0.1, window_right=0))

    def test_wrong_arguments(self):
        q, k, v = make_qkv()
        for wrong in ((q, k.cpu(), v), (q, k.half(), v), (q, k, v[:, :5]), (q.double(), k.double(), v.double())):
            with self.assertRaises(RuntimeError):
                attention(*wrong)


class TestDropIns(OnGpu):
    def test_results(self):
        q, k, v = make_qkv()
        want, lse = attention(q, k, v, causal=True, return_lse=True)
        got, got_lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        self.assertTrue(torch.equal(got, want) and torch.equal(got_lse, lse))
        self.assertTrue(torch.equal(flash_attn_interface.flash_attn_func(q, k, v, causal=True), want))
        self.assertTrue(torch.equal(flash_attn_cute.flash_attn_func(q, k, v, causal=True)[0], want))

    def test_cache(self):
        q, k, v = make_qkv(sq=1, sk=256)
        lengths = torch.tensor([17, 200], device="cuda", dtype=torch.int32)
        new_k, new_v = make((2, 1, 2, 64), (2, 1, 2, 64))
        out = flash_attn.flash_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=lengths)
        for b, n in enumerate((18, 201)):
            self.assert_close(out[b : b + 1], math(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n]))

    def test_float8(self):
        """e4m3 times descales of sequences and kv heads, out in bfloat16; FlashAttention-3's names."""
        codes = [x.to(torch.float8_e4m3fn) for x in make_qkv(sk=200)]
        descales = [torch.rand(2, 2, device="cuda") + 0.5 for _ in codes]
        names = "q_descale", "k_descale", "v_descale"
        numbers = [
            x.double() * scale.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
            for x, scale in zip(codes, descales, strict=True)
        ]  # fmt: skip
        for causal in (False, True):
            with self.subTest(causal=causal):
                out = flash_attn_interface.flash_attn_func(*codes, causal=causal, **dict(zip(names, descales)))
                self.assertEqual(out.dtype, torch.bfloat16)
                self.assert_close(out, math(*numbers, causal=causal))
        packed, ends = [x.flatten(0, 1) for x in codes], (
            torch.tensor([0, n, 2 * n], device="cuda", dtype=torch.int32) for n in (128, 200))
        got = flash_attn_interface.flash_attn_varlen_func(
            *packed, *ends, 128, 200, causal=True, **dict(zip(names, descales)))  # fmt: skip
        self.assertTrue(torch.equal(got, out.flatten(0, 1)))

    def test_cache_with_rotation(self):
        lengths = torch.tensor([17, 50], device="cuda", dtype=torch.int32)
        for module in (flash_attn, flash_attn_interface):
            q, k, v = make_qkv(sq=3, sk=64)
            names = dict(zip(("k", "v", "rotary_cos", "rotary_sin"), make(
                *[(2, 3, 2, 64)] * 2, *[(64, 16)] * 2)), cache_seqlens=lengths)  # fmt: skip
            on_cpu = [x.cpu() for x in (q, k, v)], {name: x.cpu() for name, x in names.items()}
            call = module.flash_attn_with_kvcache
            out, want = call(q, k, v, causal=True, **names), call(*on_cpu[0], causal=True, **on_cpu[1])
            torch.testing.assert_close(out.cpu(), want, rtol=2e-2, atol=2e-2)
            self.assertTrue(torch.equal(k.cpu(), on_cpu[0][1]) and torch.equal(v.cpu(), on_cpu[0][2]))

    def test_cache_of_odd_dims(self):
        q, k, v = make((2, 3, 4, 59), (2, 40, 2, 59), (2, 40, 2, 43), dtype=torch.float16)
        lengths, pad = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([40, 17], [3, 9]))
        out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=pad, causal=True)
        for b, (n, first) in enumerate(zip(lengths.tolist(), pad.tolist())):
            one = slice(b, b + 1), slice(first, n)
            self.assert_close(out[b : b + 1], math(q[b : b + 1], k[one], v[one], causal=True))

    def test_cache_of_lengths_on_the_host(self):
        lengths, ends = (torch.tensor(x, dtype=torch.int32) for x in ([17, 50], [0, 2, 3]))
        q, k_cache, v_cache = make_qkv(sk=64)
        q, k, v, cos, sin = make((3, 8, 64), (3, 2, 64), (3, 2, 64), (64, 16), (64, 16))
        results = []
        for device in ("cpu", "cuda"):
            caches = k_cache.clone(), v_cache.clone()
            out = flash_attn_interface.flash_attn_with_kvcache(
                q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths.to(device),
                cu_seqlens_q=ends.to(device), cu_seqlens_k_new=ends.to(device), max_seqlen_q=2, causal=True,
            )  # fmt: skip
            results.append((out, *caches))
        self.assertTrue(all(map(torch.equal, *results)))
        with self.assertRaisesRegex(RuntimeError, "cache_seqlens: got 63 at 0, with 2 new rows 65"):
            fulgur.torch.append(*caches, k, v, lengths + 46, cu_seqlens_k_new=ends)

    def test_cache_in_one_graph(self):
        q, k, v = make_qkv(sq=1, sk=256)
        new_k, new_v = make((2, 1, 2, 64), (2, 1, 2, 64))
        caches, theirs = (k, v), (k.clone(), v.clone())
        call = lambda *x: flash_attn.flash_attn_with_kvcache(*x[:-1], cache_seqlens=x[-1])  # noqa: E731
        compiled = torch.compile(call, fullgraph=True)
        for lengths in ((17, 200), (18, 201)):
            lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
            want = call(q, *caches, new_k, new_v, lengths)
            self.assertTrue(torch.equal(compiled(q, *theirs, new_k, new_v, lengths), want))
            self.assertTrue(all(map(torch.equal, theirs, caches)))


class TestServe(OnGpu):
    """The example, which compares its tokens with dense attention itself."""

    def test_tokens_are_those_of_dense_attention(self):
        serve = Path(__file__).parents[3] / "examples/serve.py"
        for shape in ((), ("--page", "17", "--pages", "9", "--budget", "7")):
            command = [sys.executable, "-B", serve, "--device", "cuda", *shape]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class TestAppend(OnGpu):
    """With the same on the CPU, bit for bit."""

    def test_append_and_merge(self):
        k, v, q = make((2, 3, 2, 64), (2, 3, 2, 64), (2, 3, 8, 64))
        caches, angles = make((9, 16, 2, 64), (9, 16, 2, 64)), make((40, 16), (40, 16))
        lengths = torch.tensor([14, 5], device="cuda", dtype=torch.int32)
        table = torch.tensor([[7, 2], [3, 8]], device="cuda", dtype=torch.int32)

        def append(k, v, q, k_cache, v_cache, cos, sin, lengths, table):
            turned = fulgur.append(
                k_cache, v_cache, k, v, lengths, page_table=table, cos=cos, sin=sin, q=q, causal=True
            )
            return turned, k_cache, v_cache

        tensors = (k, v, q, *caches, *angles, lengths, table)
        want = append(*(x.cpu() for x in tensors))
        for got, right in zip(append(*tensors), want):
            self.assertTrue(torch.equal(got.cpu(), right))
        outs, lses = make((2, 3, 8, 64), (2, 3, 8, 64)), make((2, 8, 3), (2, 8, 3), dtype=torch.float32)
        want = fulgur.merge([x.cpu() for x in outs], [x.cpu() for x in lses])
        for got, right in zip(fulgur.merge(outs, lses), want):
            torch.testing.assert_close(got.cpu(), right)

    def test_in_a_graph(self):
        k, v, k_cache, v_cache = make(*[(2, 1, 2, 64)] * 2, *[(2, 16, 2, 64)] * 2)
        lengths = torch.zeros(2, device="cuda", dtype=torch.int32)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            fulgur.append(k_cache, v_cache, k, v, lengths)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            fulgur.append(k_cache, v_cache, k, v, lengths)
            lengths += 1
        for n in range(3):
            k.fill_(n)
            graph.replay()
        torch.cuda.synchronize()
        self.assertEqual(k_cache[1, :3, 0, 0].tolist(), [0, 1, 2])
        self.assertEqual(lengths.tolist(), [3, 3])


class TestSdpa(OnGpu):
    def setUp(self):
        torch_attention.activate_flash_attention_impl("fulgur")
        self.addCleanup(torch_attention.restore_flash_attention_impl, _raise_warn=False)

    def test_is_asked(self):
        calls, compute = [], _operators.forward_into
        self.addCleanup(setattr, _operators, "forward_into", compute)
        _operators.forward_into = lambda *x, **y: (calls.append(x), compute(*x, **y))
        q, k, v = (x.transpose(1, 2) for x in make_qkv(sq=192, hk=8))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        self.assertEqual(len(calls), 1)
        self.assertEqual(out.stride(), q.stride())
        with sdpa_kernel(SDPBackend.MATH):
            self.assert_close(out, scaled_dot_product_attention(q, k, v, is_causal=True))

    def test_gradients(self):
        q, k, v = (x.transpose(1, 2) for x in make_qkv(sq=192, hk=8, grad=True))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        dout = torch.randn_like(out)
        got = self.gradients(out, (q, k, v), dout)
        with sdpa_kernel(SDPBackend.MATH):
            want = scaled_dot_product_attention(q, k, v, is_causal=True)
        for a, b in zip(got, torch.autograd.grad(want, (q, k, v), dout)):
            self.assert_close(a, b, 5e-2)

    def test_float32(self):
        """What PyTorch asks memory-efficient attention for, with a mask and without."""
        calls, compute = [], _operators.forward_into
        self.addCleanup(setattr, _operators, "forward_into", compute)
        _operators.forward_into = lambda *x, **y: (calls.append(x), compute(*x, **y))
        q, k, v = (x.transpose(1, 2) for x in make_qkv(sq=192, hk=8, grad=True, dtype=torch.float32))
        mask = make((2, 8, 192, 192), dtype=torch.float32, grad=True)[0]
        for options in (dict(is_causal=True), dict(attn_mask=mask)):
            inputs = (q, k, v, mask) if "attn_mask" in options else (q, k, v)
            calls.clear()
            out = scaled_dot_product_attention(q, k, v, **options)
            self.assertEqual(len(calls), 1)
            dout = torch.randn_like(out)
            with sdpa_kernel(SDPBackend.MATH):
                exact = {name: x.double() if name == "attn_mask" else x for name, x in options.items()}
                want = scaled_dot_product_attention(q.double(), k.double(), v.double(), **exact)
            self.assert_close(out, want, 1e-5)
            wanted = torch.autograd.grad(want, inputs, dout.double())
            for a, b in zip(self.gradients(out, inputs, dout), wanted):
                self.assert_close(a, b, 5e-5)

    def test_the_first_call_of_a_process_is_ours(self):
        """PyTorch's first choice of a backend sets the order of backends."""
        for first in ("activate(); call()", "call(); activate(); call()", "torch.cuda.init(); activate(); call()"):
            with self.subTest(first=first):
                process = subprocess.run([sys.executable, "-c", FIRST_CALL + first + "; print('calls', len(calls))"],
                                         capture_output=True, text=True, timeout=300)
                self.assertEqual((process.stdout, process.returncode), ("calls 1\n", 0), process.stderr)

    def test_masks(self):
        for kind in ("bool", "float", "gradient"):
            with self.subTest(kind):
                q, k, v = (x.transpose(1, 2) for x in make_qkv(hk=8, grad=True))
                shape = q.shape[0], 1, q.shape[2], k.shape[2]
                mask = (torch.rand(shape, device="cuda") > 0.3) if kind == "bool" else make(shape)[0].requires_grad_(
                    kind == "gradient")
                inputs = (q, k, v, mask) if kind == "gradient" else (q, k, v)
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask)
                dout = torch.randn_like(out)
                with sdpa_kernel(SDPBackend.MATH):
                    want = scaled_dot_product_attention(q, k, v, attn_mask=mask)
                self.assert_close(out, want)
                for a, b in zip(self.gradients(out, inputs, dout), torch.autograd.grad(want, inputs, dout)):
                    self.assert_close(a, b, 6e-2)


FIRST_CALL = """
import torch
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.functional import scaled_dot_product_attention
import fulgur.torch
from fulgur.torch import _operators
calls, compute = [], _operators.forward_into
_operators.forward_into = lambda *x, **y: (calls.append(x), compute(*x, **y))
def activate(): activate_flash_attention_impl("fulgur")
def call():
    q = torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.float16)
    scaled_dot_product_attention(q, q, q, is_causal=True)
"""


class HostTime(OnGpu):
    """Of calls that find their plan, without waiting for the device; in microseconds, medians. Those of
    fulgur.torch are a part of GPU reports (bench/gpu_host.py)."""

    def measure(self, call, count=2000):
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        times = []
        for i in range(count):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            if i % 200 == 199:
                torch.cuda.synchronize()
        return 1e6 * statistics.median(times)

    def test_host_time(self):
        q, k, v = make_qkv(sq=64, sk=64, hq=2)
        times = {
            "operator": self.measure(lambda: torch.ops.fulgur.forward.default(q, k, v)),
            "fulgur.attention": self.measure(lambda: fulgur.attention(q, k, v)),
        }
        print("host time: " + ", ".join(f"{name} {us:.1f} us" for name, us in times.items()))


if __name__ == "__main__":
    unittest.main()
