"""Attention and its gradients by NumPy in float64."""

import numpy as np


def visible(sq, sk, left, right, chunk=0, top_left=False):
    i, j = np.arange(sq)[:, None] + (0 if top_left else sk - sq), np.arange(sk)[None, :]
    one_chunk = i // chunk == j // chunk if chunk else True
    return ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right)) & one_chunk


def attention(
    q, k, v, dout=None, dlse=0, left=-1, right=-1, chunk=0, top_left=False, scale=None, softcap=0.0,
    slopes=None, used=None, sinks=None, words=None, added=None,
):  # fmt: skip
    """out, lse and, given dout, dq, dk, dv (dbias, dsinks) for (batch, seqlen, heads, dim) arrays."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))  # [b, h, s, d]
    (b, hq, sq, d), hk, sk = q.shape, k.shape[1], k.shape[2]
    group = hq // hk
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1 / np.sqrt(d) if scale is None else scale
    s = scale * (q @ k.transpose(0, 1, 3, 2))
    cap_slope = 1.0
    if softcap:
        t = np.tanh(s / softcap)
        s, cap_slope = softcap * t, 1 - t * t
    numbers = added is not None and added.dtype != bool
    if added is not None:
        added = np.where(added, 0, -np.inf) if added.dtype == bool else added.astype(np.float64)
    out, lse, p = np.zeros((b, hq, sq, v.shape[-1])), np.zeros((b, hq, sq)), np.zeros(s.shape)
    for n in range(b):
        keys = sk if used is None else used[n]
        seen = np.zeros((sq, sk), bool)
        seen[:, :keys] = visible(sq, keys, left, right, chunk, top_left)
        for i in range(sq if words is not None else 0):
            for token in range(sq):
                if keys - sq + token >= 0 and not int(words[n, i]) >> token & 1:
                    seen[i, keys - sq + token] = False
        bias = 0
        if slopes is not None:
            of_batch = np.broadcast_to(slopes, (b, hq))[n].astype(np.float64)
            bias = -of_batch[:, None, None] * np.abs(
                np.arange(sq)[:, None] + keys - sq - np.arange(sk)[None, :]
            )
        if added is not None:
            bias = bias + added[n if len(added) > 1 else 0]
        masked = np.where(seen, s[n] + bias, -np.inf)
        m = masked.max(-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            m = np.maximum(m, sinks[:, None, None])
        e = np.exp(masked - np.where(np.isinf(m), 0, m))
        total = e.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks[:, None, None] - m)
        p[n] = e / np.where(total == 0, 1, total)
        with np.errstate(divide="ignore"):
            lse[n] = (np.log(total) + np.where(np.isinf(m), 0, m))[..., 0]
    out = p @ v
    results = {"out": out.transpose(0, 2, 1, 3), "lse": lse}
    if dout is not None:
        do = dout.astype(np.float64).transpose(0, 2, 1, 3)
        d = (do * out).sum(-1) - dlse
        ds = p * (do @ v.transpose(0, 1, 3, 2) - d[..., None])
        if numbers:
            summed = tuple(n for n in range(4) if added.shape[n] == 1)
            results["dbias"] = ds.sum(summed, keepdims=True)
        ds *= scale * cap_slope
        per_kv = lambda x: x.reshape(b, hk, group, *x.shape[2:]).sum(2).transpose(0, 2, 1, 3)
        if sinks is not None:
            results["dsinks"] = -(np.exp(sinks[:, None] - lse) * d).sum((0, 2))
        results["dq"] = (ds @ k).transpose(0, 2, 1, 3)
        results["dk"] = per_kv(ds.transpose(0, 1, 3, 2) @ q)
        results["dv"] = per_kv(p.transpose(0, 1, 3, 2) @ do)
    return results


TOLERANCE = {"f64": 1e-12, "f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}


def assert_close(got, want, dtype):
    assert got.shape == want.shape
    tolerance = TOLERANCE[dtype] * max(1, np.abs(want[np.isfinite(want)]).max(initial=0))
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=tolerance)
