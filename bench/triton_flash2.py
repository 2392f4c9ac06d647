"""FlashAttention-2 in Triton, a peer of fulgur's kernels (gpu_papers.py).

Algorithms 1 and 2 of the paper as Triton's compiler schedules them: a program has a block of rows of Q in the forward
pass and in dQ, a block of keys in dK and dV, and walks over the blocks of the other side. Calls are dense, with as many
queries as keys, whole blocks of them, and d a power of two.
"""

import math

import torch
import triton
import triton.language as tl

LARGEST_BLOCK = 128
# By pass and d: rows of a block, keys of a block, warps, stages of the loop.
TILES = {
    ("forward", 64): (128, 64, 4, 3),
    ("forward", 128): (128, 64, 8, 3),
    ("keys", 64): (64, 128, 8, 3),
    ("keys", 128): (64, 128, 8, 2),
    ("rows", 64): (128, 64, 8, 3),
    ("rows", 128): (128, 64, 8, 2),
}


@triton.jit
def block(base, begin, stride, SIZE: tl.constexpr, D: tl.constexpr):
    """Addresses of SIZE rows of a tensor."""
    return base + (begin + tl.arange(0, SIZE))[:, None] * stride + tl.arange(0, D)[None, :]


@triton.jit
def attend(O, l, m, Q, K, V, row, begin, end, stride, scale_log2, D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
           MASKED: tl.constexpr):
    """Algorithm 1, lines 6 to 11, over the keys from begin to end."""
    for key in tl.range(begin, end, BC):
        k = tl.load(block(K, key, stride, BC, D))
        S = tl.dot(Q, tl.trans(k)) * scale_log2
        if MASKED:
            S = tl.where((row + tl.arange(0, BR))[:, None] >= (key + tl.arange(0, BC))[None, :], S, -float("inf"))
        m_new = tl.maximum(m, tl.max(S, 1))
        P = tl.exp2(S - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        l = l * rescale + tl.sum(P, 1)
        v = tl.load(block(V, key, stride, BC, D))
        O = tl.dot(P.to(v.dtype), v, O * rescale[:, None])
        m = m_new
    return O, l, m


@triton.jit
def forward_kernel(q, k, v, o, lse, stride_b, stride, stride_h, S, H, scale_log2, D: tl.constexpr, BR: tl.constexpr,
                   BC: tl.constexpr, CAUSAL: tl.constexpr):
    row, head = tl.program_id(0) * BR, tl.program_id(1)
    at = (head // H).to(tl.int64) * stride_b + (head % H) * stride_h
    Q = tl.load(block(q + at, row, stride, BR, D))
    O = tl.zeros([BR, D], tl.float32)
    l = tl.zeros([BR], tl.float32)
    m = tl.full([BR], -float("inf"), tl.float32)
    full = row // BC * BC if CAUSAL else S
    O, l, m = attend(O, l, m, Q, k + at, v + at, row, 0, full, stride, scale_log2, D, BR, BC, False)
    if CAUSAL:
        O, l, m = attend(O, l, m, Q, k + at, v + at, row, full, row + BR, stride, scale_log2, D, BR, BC, True)
    tl.store(block(o + at, row, stride, BR, D), (O / l[:, None]).to(o.dtype.element_ty))
    tl.store(lse + head.to(tl.int64) * S + row + tl.arange(0, BR), m + tl.log2(l))


@triton.jit
def delta_kernel(o, do, delta, stride_b, stride, stride_h, S, H, D: tl.constexpr, BR: tl.constexpr):
    """D = rowsum(dO o O)."""
    row, head = tl.program_id(0) * BR, tl.program_id(1)
    at = (head // H).to(tl.int64) * stride_b + (head % H) * stride_h
    O = tl.load(block(o + at, row, stride, BR, D)).to(tl.float32)
    dO = tl.load(block(do + at, row, stride, BR, D)).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * S + row + tl.arange(0, BR), tl.sum(O * dO, 1))


@triton.jit
def keys_kernel(q, k, v, do, dk, dv, lse, delta, stride_b, stride, stride_h, S, H, scale, scale_log2, D: tl.constexpr,
                BR: tl.constexpr, BC: tl.constexpr, CAUSAL: tl.constexpr):
    """dK and dV of a block of keys: algorithm 2 with transposed tiles, without dQ."""
    key, head = tl.program_id(0) * BC, tl.program_id(1)
    at = (head // H).to(tl.int64) * stride_b + (head % H) * stride_h
    rows_at = head.to(tl.int64) * S
    K = tl.load(block(k + at, key, stride, BC, D))
    V = tl.load(block(v + at, key, stride, BC, D))
    dK = tl.zeros([BC, D], tl.float32)
    dV = tl.zeros([BC, D], tl.float32)
    for row in tl.range(key // BR * BR if CAUSAL else 0, S, BR):
        rows = row + tl.arange(0, BR)
        Q = tl.load(block(q + at, row, stride, BR, D))
        dO = tl.load(block(do + at, row, stride, BR, D))
        L = tl.load(lse + rows_at + rows)
        P = tl.exp2(tl.dot(K, tl.trans(Q)) * scale_log2 - L[None, :])
        if CAUSAL:
            P = tl.where(rows[None, :] >= (key + tl.arange(0, BC))[:, None], P, 0.0)
        dV = tl.dot(P.to(dO.dtype), dO, dV)
        dS = P * (tl.dot(V, tl.trans(dO)) - tl.load(delta + rows_at + rows)[None, :])
        dK = tl.dot(dS.to(Q.dtype), Q, dK)
    tl.store(block(dk + at, key, stride, BC, D), (dK * scale).to(dk.dtype.element_ty))
    tl.store(block(dv + at, key, stride, BC, D), dV.to(dv.dtype.element_ty))


@triton.jit
def rows_kernel(q, k, v, do, dq, lse, delta, stride_b, stride, stride_h, S, H, scale, scale_log2, D: tl.constexpr,
                BR: tl.constexpr, BC: tl.constexpr, CAUSAL: tl.constexpr):
    """dQ of a block of rows."""
    row, head = tl.program_id(0) * BR, tl.program_id(1)
    at = (head // H).to(tl.int64) * stride_b + (head % H) * stride_h
    rows = row + tl.arange(0, BR)
    Q = tl.load(block(q + at, row, stride, BR, D))
    dO = tl.load(block(do + at, row, stride, BR, D))
    L = tl.load(lse + head.to(tl.int64) * S + rows)
    delta_rows = tl.load(delta + head.to(tl.int64) * S + rows)
    dQ = tl.zeros([BR, D], tl.float32)
    for key in tl.range(0, row + BR if CAUSAL else S, BC):
        K = tl.load(block(k + at, key, stride, BC, D))
        V = tl.load(block(v + at, key, stride, BC, D))
        P = tl.exp2(tl.dot(Q, tl.trans(K)) * scale_log2 - L[:, None])
        if CAUSAL:
            P = tl.where(rows[:, None] >= (key + tl.arange(0, BC))[None, :], P, 0.0)
        dS = P * (tl.dot(dO, tl.trans(V)) - delta_rows[:, None])
        dQ = tl.dot(dS.to(K.dtype), K, dQ)
    tl.store(block(dq + at, row, stride, BR, D), (dQ * scale).to(dq.dtype.element_ty))


class Flash2(torch.autograd.Function):
    """(batch, s, heads, d), contiguous, of a 16-bit dtype."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        batch, s, heads, d = q.shape
        if ("forward", d) not in TILES or s % LARGEST_BLOCK != 0 or not q.shape == k.shape == v.shape:
            raise ValueError("computes as many queries as keys, multiples of 128, with d 64 and 128, "
                             f"got {tuple(q.shape)} and {tuple(k.shape)}")
        if not all(t.is_contiguous() for t in (q, k, v)):
            raise ValueError("computes contiguous tensors")
        o = torch.empty_like(q)
        lse = torch.empty(batch * heads, s, device=q.device)
        rows, keys, warps, stages = TILES["forward", d]
        forward_kernel[(s // rows, batch * heads)](
            q, k, v, o, lse, q.stride(0), q.stride(1), q.stride(2), s, heads, math.log2(math.e) / math.sqrt(d), D=d,
            BR=rows, BC=keys, CAUSAL=causal, num_warps=warps, num_stages=stages)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        batch, s, heads, d = q.shape
        dq, dk, dv, delta = (torch.empty_like(t) for t in (q, k, v, lse))
        at = q.stride(0), q.stride(1), q.stride(2), s, heads
        scale = 1 / math.sqrt(d)
        delta_kernel[(s // LARGEST_BLOCK, batch * heads)](o, do, delta, *at, D=d, BR=LARGEST_BLOCK)
        rows, keys, warps, stages = TILES["keys", d]
        keys_kernel[(s // keys, batch * heads)](
            q, k, v, do, dk, dv, lse, delta, *at, scale, scale * math.log2(math.e), D=d, BR=rows, BC=keys,
            CAUSAL=ctx.causal, num_warps=warps, num_stages=stages)
        rows, keys, warps, stages = TILES["rows", d]
        rows_kernel[(s // rows, batch * heads)](
            q, k, v, do, dq, lse, delta, *at, scale, scale * math.log2(math.e), D=d, BR=rows, BC=keys,
            CAUSAL=ctx.causal, num_warps=warps, num_stages=stages)
        return dq, dk, dv, None


def flash2(q, k, v, causal):
    return Flash2.apply(q, k, v, causal)
