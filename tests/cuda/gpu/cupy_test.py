"""fulgur on CuPy's arrays: python3 tests/cuda/gpu/cupy_test.py, with fulgur and cupy importable and a GPU."""

import unittest

import cupy as cp
import numpy as np
from dense import dense

import fulgur


def make(*shapes):
    rng = np.random.default_rng(0)
    return [cp.asarray(rng.standard_normal(s), cp.float16) for s in shapes]


def make_qkv(sq=128, sk=192, hq=8, hk=2, d=64):
    return make((2, sq, hq, d), (2, sk, hk, d), (2, sk, hk, d))


class TestCuPy(unittest.TestCase):
    def assert_close(self, got, want, tolerance=5e-3):
        self.assertIsInstance(got, cp.ndarray)
        self.assertEqual(got.shape, want.shape)
        most = np.abs(cp.asnumpy(got).astype(np.float64) - want).max()
        self.assertLess(most, tolerance * max(1, np.abs(want).max()))

    def test_results_and_gradients(self):
        q, k, v = make_qkv()
        for causal in (False, True):
            want, gradients = dense(*map(cp.asnumpy, (q, k, v)), causal)
            out, lse = fulgur.attention(q, k, v, causal=causal, return_lse=True)
            self.assert_close(out, want)
            got = fulgur.attention_backward(cp.ones_like(out), q, k, v, out, lse, causal=causal)
            for x, y in zip(got, gradients, strict=True):
                self.assert_close(x, y)

    def test_the_current_stream(self):
        """Inputs that are still being made, and results read after them, on a stream that waits for no other."""
        q, k, v = make_qkv()
        want = dense(*map(cp.asnumpy, (q, k, v)))[0]
        late, busy = cp.full_like(q, cp.nan), cp.ones(1 << 20, cp.float16)
        fulgur.attention(q, k, v)  # compiled
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(20):
                late[...] = cp.sort(busy)[:1]
            late[...] = q
            out = fulgur.attention(late, k, v)
            stream.synchronize()
        self.assert_close(out, want)

    def test_a_graph(self):
        """Recorded once, replayed on other inputs."""
        q, k, v = make_qkv()
        out = cp.empty_like(q)
        with cp.cuda.Stream(non_blocking=True) as stream:
            fulgur.attention(q, k, v, out=out)
            stream.begin_capture()
            fulgur.attention(q, k, v, out=out)
            graph = stream.end_capture()
            for factor in (1, -2):
                q *= factor
                out[...] = cp.nan
                graph.launch(stream)
                stream.synchronize()
                self.assert_close(out, dense(*map(cp.asnumpy, (q, k, v)))[0])

    def test_caches(self):
        """Rows are appended to pages where they lie, and attended."""
        k_cache, v_cache, k, v, q = make(*[(12, 16, 2, 64)] * 2, *[(3, 2, 2, 64)] * 2, (3, 2, 8, 64))
        table = cp.array([[3, 9, 0], [5, 4, 1], [7, 2, 6]], cp.int32)
        old = cp.array([15, 0, 30], cp.int32)
        on_host = [cp.asnumpy(x) for x in (q, k_cache, v_cache, k, v)]
        options = dict(cache_seqlens=old, page_table=table, causal=True)
        want = fulgur.append_attention(*on_host, **{n: x if x is True else cp.asnumpy(x) for n, x in options.items()})
        self.assert_close(fulgur.append_attention(q, k_cache, v_cache, k, v, **options), want)
        for got, x in zip((k_cache, v_cache), on_host[1:3]):
            np.testing.assert_array_equal(cp.asnumpy(got), x)

    def test_merge(self):
        q, k, v = make_qkv()
        halves = [fulgur.attention(q, k[:, s], v[:, s], return_lse=True) for s in np.s_[:100, 100:]]
        out, _ = fulgur.merge(*zip(*halves))
        self.assert_close(out, dense(*map(cp.asnumpy, (q, k, v)))[0])

    def test_what_it_cannot_take(self):
        q, k, v = make_qkv()
        with self.assertRaisesRegex(ValueError, "^k: on cpu, want cuda:0 as q"):
            fulgur.attention(q, cp.asnumpy(k), v)


if __name__ == "__main__":
    unittest.main()
