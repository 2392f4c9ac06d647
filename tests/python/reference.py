"""Attention and its gradient written out with NumPy, one sequence at a time: what the tests expect.

With ``precision`` float64 it is the expected result; with the dtype of the inputs it is the naive
computation in that dtype, whose error is the yardstick of the engine's.
"""

import numpy as np


class Naive:
    """Arithmetic in float64, or in float32 with every matrix rounded to a smaller dtype."""

    def __init__(self, precision):
        self.precision = np.dtype(precision)
        self.work = np.float64 if self.precision == np.float64 else np.float32

    def __call__(self, x):
        return np.asarray(x).astype(self.precision).astype(self.work)


def sequences(q, k, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, **_):
    """For each sequence: the index of its rows in q, out and of its keys in k, v."""
    if cu_seqlens_q is None:
        used_q = [q.shape[1]] * q.shape[0] if seqused_q is None else seqused_q
        used_k = [k.shape[1]] * k.shape[0] if seqused_k is None else seqused_k
        return [((b, slice(0, used_q[b])), (b, slice(0, used_k[b]))) for b in range(q.shape[0])]
    rows = [slice(*ends) for ends in zip(cu_seqlens_q, cu_seqlens_q[1:])]
    keys = [slice(*ends) for ends in zip(cu_seqlens_k, cu_seqlens_k[1:])]
    if seqused_q is not None:
        rows = [slice(s.start, s.start + n) for s, n in zip(rows, seqused_q)]
    if seqused_k is not None:
        keys = [slice(s.start, s.start + n) for s, n in zip(keys, seqused_k)]
    return list(zip(rows, keys))


def in_lse(rows):
    """The index of those rows in lse."""
    return (rows[0], slice(None), rows[1]) if isinstance(rows, tuple) else (slice(None), rows)


def probabilities(q, k, b, r, *, causal=False, window=None, chunk=0, top_left=False, scale=None,
                  softcap=0.0, alibi_slopes=None, bias=None, sinks=None, tree_words=None, **_):  # fmt: skip
    """P and LSE of one sequence q [sq, hq, d], k [sk, hq, d], and d score / d (q k^T)."""
    sq, sk = len(q), len(k)
    scale = r(1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    S = r(scale * np.einsum("ihd,jhd->hij", q, k))
    slope = np.full(S.shape, scale)
    if softcap:
        tanh = r(np.tanh(S / r(softcap)))
        S, slope = r(r(softcap) * tanh), scale * (1 - tanh * tanh)
    i, j = np.arange(sq)[:, None] + (0 if top_left else sk - sq), np.arange(sk)
    if alibi_slopes is not None:
        slopes = alibi_slopes if np.ndim(alibi_slopes) == 1 else alibi_slopes[b]
        S = S - slopes[:, None, None] * abs(i - j)
    if bias is not None:
        of_sequence = bias[b if len(bias) > 1 else 0]
        numbers = np.where(of_sequence, 0, -np.inf) if bias.dtype == bool else of_sequence.astype(S.dtype)
        S = S + numbers[:, :sq, :sk]  # a size of 1 broadcasts
    left, right = window or (-1, -1)
    right = 0 if causal else right
    seen = np.ones((sq, sk), bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    if chunk > 0:
        seen &= j // chunk == i // chunk
    if tree_words is not None:  # [sq]: the bits of keys sk - sq and on
        token = j - (sk - sq)
        bits = tree_words.view(np.uint64)[:, None] >> np.maximum(token, 0).astype(np.uint64)
        seen &= (token < 0) | (bits % 2 == 1)
    S = np.where(seen, S, -np.inf)
    if sinks is not None:  # one more column, of P without a value
        S = np.concatenate([S, np.broadcast_to(sinks[:, None, None], (*S.shape[:2], 1))], axis=-1)
    top = S.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isinf(top), 0, top)
    E = np.exp(S - top)
    total = E.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    P = r(E / np.where(total == 0, 1, total))
    return P, lse, slope


def of_keys(P, sinks):
    """P without the column of the sinks."""
    return P if sinks is None else P[..., :-1]


def _heads(x, hq):
    return np.repeat(x, hq // x.shape[-2], axis=-2)


def _sum_groups(x, hk):
    rows, hq, dim = x.shape
    return x.reshape(rows, hk, hq // hk, dim).sum(axis=2)


def attention(q, k, v, *, precision=np.float64, keep=None, **options):
    """out and lse; ``keep`` [b][h, i, j] is the dropout's mask over 1 - p, or None."""
    r, hq = Naive(precision), q.shape[-2]
    out = np.zeros(q.shape[:-1] + v.shape[-1:], r.work)
    lse = np.full((*out.shape[:-3], hq, out.shape[-3]), -np.inf)
    for b, (rows, keys) in enumerate(sequences(q, k, **options)):
        words = None if options.get("tree_mask") is None else options["tree_mask"][rows]
        P, row_lse, _ = probabilities(
            r(q[rows]), _heads(r(k[keys]), hq), b, r, tree_words=words, **options
        )
        P = of_keys(P, options.get("sinks"))
        P = P if keep is None else P * keep[b]
        if P.shape[-1]:  # einsum over no keys has given NaN
            out[rows] = r(np.einsum("hij,jhd->ihd", P, _heads(r(v[keys]), hq)))
        lse[in_lse(rows)] = row_lse
    return out, lse


def attention_backward(
    dout, q, k, v, *, dlse=None, precision=np.float64, keep=None, **options
):
    """dq, dk, dv, then dsinks where there are sinks, and dbias where there is a bias of numbers."""
    r, hq, hk = Naive(precision), q.shape[-2], k.shape[-2]
    dq, dk, dv = (np.zeros(x.shape, r.work) for x in (q, k, v))
    sinks, dsinks = options.get("sinks"), np.zeros(hq, r.work)
    bias = options.get("bias")
    dbias = None if bias is None or bias.dtype == bool else np.zeros(bias.shape, r.work)
    for b, (rows, keys) in enumerate(sequences(q, k, **options)):
        Q, K, V, dO = r(q[rows]), _heads(r(k[keys]), hq), _heads(r(v[keys]), hq), r(dout[rows])
        P, _, slope = probabilities(Q, K, b, r, **options)
        whole, P = P, of_keys(P, sinks)
        Z = 1 if keep is None else keep[b]
        dP = r(np.einsum("ihd,jhd->hij", dO, V)) * Z
        D = (P * dP).sum(axis=-1, keepdims=True)
        if dlse is not None:
            D = D - np.where(whole.any(axis=-1), dlse[in_lse(rows)], 0)[..., None]
        dS = r(P * (dP - D) * slope)
        if dbias is not None:
            part = dbias[b if len(dbias) > 1 else 0]
            shared = tuple(axis for axis in range(3) if part.shape[axis] == 1)
            of_scores = r(P * (dP - D)).sum(axis=shared, keepdims=True)
            part[:, : of_scores.shape[1], : of_scores.shape[2]] += of_scores
        if sinks is not None:
            dsinks -= (whole[..., -1] * D[..., 0]).sum(axis=-1)
        if P.shape[-1]:
            dq[rows] = r(np.einsum("hij,jhd->ihd", dS, K))
        dk[keys] = r(_sum_groups(np.einsum("hij,ihd->jhd", dS, Q), hk))
        dv[keys] = r(_sum_groups(np.einsum("hij,ihd->jhd", P * Z, dO), hk))
    extras = [x for given, x in ((sinks, dsinks), (dbias, dbias)) if given is not None]
    return dq, dk, dv, *extras


def assert_close(name, got, exact, naive, factor):
    """max|got - exact| <= factor max|naive - exact| + a little: 2 for outputs, 3 for gradients."""
    assert got.shape == exact.shape, name
    little = 1e-12 if got.dtype == np.float64 else 1e-5
    error = np.max(np.abs(got.astype(np.float64) - exact), initial=0)
    bound = factor * np.max(np.abs(naive - exact), initial=0) + little
    assert error <= bound, f"{name}: error {error:.3g}, want at most {bound:.3g}"


def assert_lse_close(got, exact):
    """1e-3 relative to its scale for the float32 results of small dtypes; -inf where -inf."""
    assert got.shape == exact.shape
    empty = np.isneginf(exact)
    np.testing.assert_array_equal(np.isneginf(got), empty)
    tolerance = 1e-12 if got.dtype == np.float64 else 1e-3
    np.testing.assert_allclose(got[~empty], exact[~empty], rtol=tolerance, atol=tolerance)
