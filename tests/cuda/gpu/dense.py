"""What attention on a GPU is compared with: NumPy in float64."""

import numpy as np


def dense(q, k, v, causal=False):
    """Attention and its gradients of dout = 1 in float64, masks aligned at the bottom right."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    K, V = (np.repeat(x, group, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    S = scale * np.einsum("bihd,bjhd->bhij", q, K)
    if causal:
        sq, sk = S.shape[-2:]
        S = np.where(np.arange(sk) <= np.arange(sq)[:, None] + sk - sq, S, -np.inf)
    P = np.exp(S - S.max(-1, keepdims=True))
    P /= P.sum(-1, keepdims=True)
    out = np.einsum("bhij,bjhd->bihd", P, V)
    dP = np.broadcast_to(V.sum(-1).transpose(0, 2, 1)[:, :, None], P.shape)
    dS = scale * P * (dP - (P * dP).sum(-1, keepdims=True))
    dk, dv = np.einsum("bhij,bihd->bjhd", dS, q), np.einsum("bhij,bih->bjh", P, np.ones(q.shape[:3]))
    dk = dk.reshape(*k.shape[:3], group, -1).sum(3)
    dv = np.broadcast_to(dv.reshape(*v.shape[:3], group).sum(3)[..., None], v.shape)
    return out, (np.einsum("bhij,bjhd->bihd", dS, K), dk, dv)
