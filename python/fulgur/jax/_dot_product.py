"""``jax.nn.dot_product_attention``, computed by fulgur."""

import math

import jax
import jax.numpy as jnp

from fulgur import _arguments as _a
from fulgur.jax._calls import attention, number


def dot_product_attention(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None,
    implementation=None, return_residual=False,
):  # fmt: skip
    """``jax.nn.dot_product_attention``, computed by fulgur.

    Args:
        query: ``(B, T, N, H)`` or ``(T, N, H)``.
        key: ``(B, S, K, H)`` or ``(S, K, H)``, dtype of query; N is a multiple of K.
        value: shape and dtype of key.
        bias: ``(B, N, T, S)``, of which each may be 1, added to the scores; it gets its gradient. On the
            CPU.
        mask: boolean, of such a shape: the keys that a query sees. One that differs between queries or
            heads, on the CPU.
        scale: of the scores; default 1 / sqrt(H). Known when the call is traced.
        is_causal: query i sees keys up to i, whatever T and S are.
        query_seq_lengths: int32 ``(B,)``: later rows of the result are 0.
        key_value_seq_lengths: int32 ``(B,)``: later keys are not there.
        local_window_size: ``(left, right)`` or one number for both: query i sees the keys from
            i - left to i + right. As in jax.nn either may be negative, and -1 does not mean that a
            side is unbounded: a number that is at least max(T, S) does.
        implementation: None.
        return_residual: return ``(out, lse)``.

    Returns:
        An array of the shape of query; with ``return_residual`` also the log-sum-exp of each row,
        ``(B, T, N)`` or ``(T, N)``, in the dtype of key; as in jax.nn, no gradient flows through
        that (through that of :func:`attention` it does). A row that sees no key has out 0 and
        lse -inf; jax.nn averages all values there.

    Raises:
        NotImplementedError: implementation says what fulgur does not have.
        ValueError, TypeError: an argument is wrong.
    """
    if implementation is not None:
        raise NotImplementedError(
            f"implementation: got {implementation!r}, want None: fulgur computes this"
        )
    shape = jnp.shape(query)
    q, k, v = (
        x[None] if x.ndim == 3 else x for x in map(jnp.asarray, (query, key, value))
    )
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: got shape {x.shape}, want (batch, length, heads, dim)")
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    for name, x, want in (("key", k, (B, S, K, H)), ("value", v, (B, S, K, H))):
        if x.shape != want or x.dtype != q.dtype:
            raise ValueError(
                f"{name}: got {x.dtype.name} {x.shape}, want {q.dtype.name} {want}"
            )
    if H == 0:
        raise ValueError("query: got head dim 0, want 1 to 512")
    if K == 0 or N % K != 0:
        raise ValueError(f"query: got {N} heads, want a multiple of the {K} heads of key")
    scale = 1 / math.sqrt(H) if scale is None else _a.real("scale", number(scale))
    left, right = _band(local_window_size, _a.flag("is_causal", is_causal))
    rows = _before("query_seq_lengths", query_seq_lengths, B, T)
    keys = _before("key_value_seq_lengths", key_value_seq_lengths, B, S)
    bias, mask = (_of_scores(name, x, (B, N, T, S)) for name, x in (("bias", bias), ("mask", mask)))
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {mask.dtype.name}, want bool")
    hidden = None
    if mask is not None and bias is None and mask.shape[1:3] == (1, 1):
        hidden, mask = jnp.broadcast_to(mask[:, 0, 0], (B, S)), None

    options = {"scale": scale, "return_lse": True}
    if hidden is None and keys is not None and left is None and right is None:
        options["seqused_k"] = jnp.clip(jnp.asarray(key_value_seq_lengths), 0, S)
        keys = None
    keys = keys if hidden is None else hidden if keys is None else keys & hidden
    if rows is not None:  # what padding holds reaches no gradient, NaN included
        q = jnp.where(rows[:, :, None, None], q, 0)
    if bias is not None or mask is not None:
        if keys is not None:
            seen = keys[:, None, None]
            keys, mask = None, seen if mask is None else mask & seen
        bias = mask if bias is None else bias if mask is None else jnp.where(mask, bias, -jnp.inf)
    if keys is not None:
        q, k, v, options["scale"] = _push_away(q, k, v, keys, scale)

    # Keys that no query sees, and queries that see no key, are cut off. What is left has a band
    # that can be said from the other corner, where fulgur's masks are aligned.
    first_seen, first_seeing = max(0, -(left or 0)), max(0, -(right or 0))
    seen = S if right is None else min(S, T + right)
    seeing = T if left is None else min(T, seen + left)
    window = (
        -1 if left is None else left + seen - seeing, -1 if right is None else right - seen + seeing
    )  # fmt: skip
    if first_seen >= seen or first_seeing >= seeing or None not in (left, right) and left < -right:
        first_seen = seen = first_seeing = seeing = 0
        window = (-1, -1)
    q, k, v = q[:, first_seeing:seeing], k[:, first_seen:seen], v[:, first_seen:seen]
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else bias[:, :, first_seeing:seeing]
        options["bias"] = bias if bias.shape[3] == 1 else bias[..., first_seen:seen]
    out, lse = attention(q, k, v, window=window, **options)
    lse = jnp.swapaxes(lse, 1, 2)
    missing = [(0, 0), (first_seeing, T - seeing), (0, 0)]
    out, lse = jnp.pad(out, [*missing, (0, 0)]), jnp.pad(lse, missing, constant_values=-jnp.inf)
    if keys is not None:
        some = _sees_a_key(keys, T, left, right)
        rows = some if rows is None else rows & some
    if rows is not None:
        out = jnp.where(rows[:, :, None, None], out, 0)
        lse = jnp.where(rows[:, :, None], lse, -jnp.inf)
    out = out.reshape(shape)
    if not return_residual:
        return out
    return out, jax.lax.stop_gradient(lse.astype(k.dtype).reshape(shape[:-1]))


def _band(local_window_size, is_causal):
    """How many keys are seen to the left and to the right of a query's own; None is all."""
    left = right = None
    if local_window_size is not None:
        sides = local_window_size
        if not isinstance(sides, (tuple, list)):
            sides = (sides, sides)
        if len(sides) != 2:
            raise ValueError(f"local_window_size: got {sides!r}, want (left, right) or a number")
        left, right = (_a.integer("local_window_size", n, *_a.INT32) for n in sides)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    return left, right


def _before(name, lengths, batch, rows):
    """Which of `rows` rows each sequence has; None where all have all."""
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"{name}: got {lengths.dtype.name} {lengths.shape}, want int32 ({batch},)")
    return jnp.arange(rows)[None] < lengths[:, None]


def _of_scores(name, x, shape):
    """An array for the scores of this shape, with four dimensions, each of which may be 1."""
    if x is None:
        return None
    x = jnp.asarray(x)
    sizes = (1,) * (4 - x.ndim) + x.shape
    if len(sizes) > 4 or any(n not in (1, want) for n, want in zip(sizes, shape)):
        raise ValueError(f"{name}: got shape {x.shape}, want {shape}, or 1 for any of them")
    return x.reshape(sizes)


def _push_away(q, k, v, keys, scale):
    """q, k, v and scale with which keys that are not in `keys` get no weight.

    Dimensions are appended in which the product of these keys with every query is so far below 0
    that exp gives 0. Unlike seqused_k, this does not move the band, and the keys may be anywhere.
    The product is a power of two and so exact in every dtype.
    """
    keys = keys[:, :, None, None]
    k, v = jnp.where(keys, k, 0), jnp.where(keys, v, 0)
    if scale == 0:  # the scores are 0 whatever q is
        q, scale = jnp.zeros_like(q), 1.0
    # 2^30 and less for float16, whose numbers end at 65504.
    exponent = min(20 - math.floor(math.log2(abs(scale)) / 2), 15 if q.dtype == jnp.float16 else 60)
    far = 2.0**exponent
    if abs(scale) * far * far < 2**14:
        raise NotImplementedError(
            f"scale: got {scale} in {q.dtype.name} with keys that are hidden, want 2e-5 at least"
        )
    more = 16 // q.dtype.itemsize  # rows stay at multiples of 16 bytes
    if q.shape[3] + more > 512:
        raise NotImplementedError(
            f"query: got head dim {q.shape[3]} with keys that are hidden, want {512 - more} at most"
        )
    ends = [(0, 0)] * 3 + [(0, more)]
    q = jnp.pad(q, ends).at[..., -more].set(far)
    k = jnp.pad(k, ends).at[..., -more].set(
        jnp.where(keys, 0, -math.copysign(far, scale))[..., 0].astype(k.dtype)
    )
    return q, k, v, scale


def _sees_a_key(keys, queries, left, right):
    """Whether a query sees one of `keys` (batch, keys) in its band: (batch, queries)."""
    S = keys.shape[1]
    i = jnp.arange(queries)
    begin = jnp.zeros_like(i) if left is None else jnp.clip(i - left, 0, S)
    end = jnp.full_like(i, S) if right is None else jnp.clip(i + right + 1, 0, S)
    before = jnp.pad(jnp.cumsum(keys, axis=1, dtype=jnp.int32), [(0, 0), (1, 0)])
    return before[:, end] > before[:, begin]
