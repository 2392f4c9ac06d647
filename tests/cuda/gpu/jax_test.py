"""fulgur in JAX on a GPU: python3 tests/cuda/gpu/jax_test.py, with fulgur, jax and a CUDA plugin of jax importable."""

import statistics
import time
import unittest
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from dense import dense

import fulgur
from fulgur.jax import append, append_attention, attention, dot_product_attention


def make(*shapes, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return [jax.device_put(jnp.asarray(rng.standard_normal(s), dtype), jax.devices("gpu")[0]) for s in shapes]


def make_qkv(sq=128, sk=192, hq=8, hk=2, d=64, dtype=jnp.bfloat16):
    return make((2, sq, hq, d), (2, sk, hk, d), (2, sk, hk, d), dtype=dtype)


class TestJax(unittest.TestCase):
    def assert_close(self, got, want, tolerance=2e-2):
        self.assertEqual(got.shape, want.shape)
        most = np.abs(np.asarray(got, np.float64) - want).max()
        self.assertLess(most, tolerance * max(1, np.abs(want).max()))

    def test_results_and_gradients(self):
        for dtype, tolerance in ((jnp.bfloat16, 2e-2), (jnp.float32, 1e-5)):
            q, k, v = make_qkv(dtype=dtype)
            for causal in (False, True):
                out, gradients = dense(q, k, v, causal)
                call = lambda q, k, v: attention(q, k, v, causal=causal)  # noqa: E731, B023
                self.assert_close(call(q, k, v), out, tolerance)
                self.assert_close(jax.jit(call)(q, k, v), out, tolerance)
                of_sum = jax.jit(jax.grad(lambda *x: call(*x).astype(jnp.float32).sum(), (0, 1, 2)))
                for got, want in zip(of_sum(q, k, v), gradients):
                    self.assert_close(got, want, tolerance)

    def test_stands_in_for_jax(self):
        q, k, v = make_qkv(hq=4, hk=4)
        got = jax.jit(dot_product_attention)(q, k, v)
        self.assert_close(got, np.asarray(jax.nn.dot_product_attention(q, k, v), np.float64))
        self.assertEqual(got.devices(), q.devices())

    def test_vmap(self):
        q, k, v = (x.reshape(2, 1, *x.shape[1:]) for x in make_qkv())
        self.assert_close(jax.vmap(attention)(q, k, v)[:, 0], dense(q[:, 0], k[:, 0], v[:, 0])[0])

    def test_many_calls_in_one_program(self):
        """XLA records such programs as CUDA graphs; each call waits for the one before."""
        q, k, v = make_qkv(sq=128, sk=128, hq=2)

        @jax.jit
        def layers(q):
            for _ in range(8):
                q = attention(q, k, v) + q
            return q

        want = q
        for _ in range(8):
            want = attention(want, k, v) + want
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(layers(q), np.float32), np.asarray(want, np.float32))

    def test_tree_mask(self):
        """Words say what a causal mask says: all earlier tokens and itself."""
        q, k, v = make_qkv(sq=40)
        words = np.broadcast_to([(2 << n) - 1 for n in range(40)], (2, 40)).astype(np.int64)
        want = dense(q, k, v, causal=True)[0]
        self.assert_close(attention(q, k, v, tree_mask=words), want)
        call = jax.jit(lambda words: attention(q, k, v, tree_mask=words))
        for _ in range(3):
            self.assert_close(call(words[..., None].view(np.uint32)), want)

    def test_append(self):
        """With fulgur on the CPU; a token without a place is not written."""
        k_cache, v_cache, k, v, q = make(*[(12, 16, 2, 64)] * 2, *[(3, 2, 2, 64)] * 2, (3, 2, 8, 64))
        angles = np.random.default_rng(1).uniform(0, 6, (48, 32))
        options = dict(
            page_table=np.array([[3, 9, 0], [5, 4, 7], [7, 2, 99]], np.int32), causal=True,
            cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32),
        )  # fmt: skip
        old = np.array([15, 0, 30], np.int32)
        want = [np.array(x) for x in (k_cache, v_cache)]
        want.append(fulgur.append(*want, np.array(k), np.array(v), old, q=np.array(q), **options))
        call = jax.jit(partial(append, **options))
        for function in (partial(append, **options), call):
            for got, x in zip(function(k_cache, v_cache, k, v, old, q=q), want, strict=True):
                self.assert_close(got, np.asarray(x, np.float64), 1e-2)
        got = call(k_cache, v_cache, k, v, np.array([48, 48, 48], np.int32))
        np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(k_cache, np.float32))

    def test_append_attention(self):
        """With append and attention, the same bits; lengths change from call to call."""
        k_cache, v_cache, k, v, q = make(*[(12, 16, 2, 64)] * 2, *[(3, 2, 2, 64)] * 2, (3, 2, 8, 64))
        angles = np.random.default_rng(1).uniform(0, 6, (48, 32))
        where = dict(page_table=np.array([[3, 9, 0], [5, 4, 1], [7, 2, 6]], np.int32), causal=True)
        turning = dict(cos=np.cos(angles).astype(np.float32), sin=np.sin(angles).astype(np.float32))
        call = jax.jit(partial(append_attention, return_lse=True, **where, **turning), donate_argnums=(1, 2))
        caches = k_cache + 0, v_cache + 0
        places = [x.unsafe_buffer_pointer() for x in caches]
        for old in ([15, 0, 30], [17, 2, 32], [46, 31, 5]):
            old = np.array(old, np.int32)
            k_cache, v_cache, turned = append(k_cache, v_cache, k, v, old, q=q, **where, **turning)
            want = attention(turned, k_cache, v_cache, seqused_k=old + 2, return_lse=True, **where)
            *caches, out, lse = call(q, *caches, k, v, old)
            for got, x in zip((*caches, out, lse), (k_cache, v_cache, *want), strict=True):
                np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(x, np.float32))
        self.assertEqual([x.unsafe_buffer_pointer() for x in caches], places)

    def test_decoding_in_place(self):
        """Tokens one by one, in the memory of the donated caches, as one causal call on all gives."""
        q, k, v = make_qkv(sq=24, sk=24)
        table = np.array([[3, 8], [7, 2]], np.int32)

        @partial(jax.jit, donate_argnums=0)
        def decode(caches, lengths, rows):
            def step(carry, rows):
                caches, lengths = carry
                q, k, v = (x[:, None] for x in rows)
                caches = append(*caches, k, v, lengths, page_table=table)
                out = attention(q, *caches, page_table=table, seqused_k=lengths + 1)
                return (caches, lengths + 1), out[:, 0]

            return jax.lax.scan(step, (caches, lengths), rows)

        caches = tuple(x + 0 for x in make(*[(10, 16, 2, 64)] * 2))
        where = [x.unsafe_buffer_pointer() for x in caches]
        lengths, outs = np.zeros(2, np.int32), []
        for half in (np.s_[:, :12], np.s_[:, 12:]):
            (caches, lengths), out = decode(caches, lengths, [jnp.swapaxes(x[half], 0, 1) for x in (q, k, v)])
            outs.append(out)
        self.assertEqual([x.unsafe_buffer_pointer() for x in caches], where)
        self.assert_close(jnp.swapaxes(jnp.concatenate(outs), 0, 1), dense(q, k, v, causal=True)[0])

    def test_host_time(self):
        """Of a compiled call, without waiting for the device; in microseconds, a median."""
        q, k, v = make_qkv(sq=1, sk=1, hq=2)
        call, times = jax.jit(attention), []
        for _ in range(500):
            start = time.perf_counter()
            out = call(q, k, v)
            times.append(time.perf_counter() - start)
        out.block_until_ready()
        print(f"host time: jit {1e6 * statistics.median(times):.1f} us")


if __name__ == "__main__":
    unittest.main()
