"""Exact attention as an operator of PyTorch: recorded by autograd, seen by ``torch.compile``.

    from fulgur.torch import attention

    out = attention(q, k, v, causal=True)
    out.sum().backward()

Tensors are on the CPU or on a CUDA device, where the work is put on PyTorch's current stream. Needs
PyTorch 2.11 or newer; nothing of fulgur is built against it. The operators are
``torch.ops.fulgur.forward`` and ``torch.ops.fulgur.backward``: custom operators with fake kernels
and rules for vmap and for the counter of flops, so that ``torch.compile(fullgraph=True)``,
``torch.export``, ``torch.func``, activation checkpointing and CUDA graphs need nothing more.
``forward_into`` and ``backward_into`` write their results where the caller says. Caches of keys and
values are read by ``forward_cached``, which has no gradient, and written by ``append``.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from fulgur import _fulgur

__all__ = ["append", "attention"]

if torch.__version__ < (2, 11):
    raise ImportError(f"fulgur.torch: got PyTorch {torch.__version__}, want 2.11 or newer")

_library = torch.library.Library("fulgur", "DEF")
# What both passes take behind their tensors; python/torch_ops.cpp reads it in this order.
_SHARED = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, float softcap, SymInt window_left, "
    "SymInt window_right, SymInt chunk, Tensor? alibi_slopes, Tensor? sinks, float dropout_p, "
    "Tensor? rng_state, bool invariant"
)
_FORWARD = f"Tensor q, Tensor k, Tensor v, {_SHARED}"
# What the forward pass alone takes behind them, and has no gradient.
_CACHE = (
    "Tensor? page_table, Tensor? page_indptr, Tensor? cache_batch_idx, Tensor? leftpad_k, "
    "Tensor? tree_mask, Tensor? prefix_groups, Tensor? prefix_lens"
)
_APPEND = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor cache_seqlens, "
    "Tensor? cu_seqlens_k_new, Tensor? page_table, Tensor? page_indptr, Tensor? cache_batch_idx, "
    "Tensor? cos, Tensor? sin, bool interleaved, Tensor? rotary_seqlens, Tensor? q, "
    "Tensor(c!)? q_out, Tensor? cu_seqlens_q, SymInt window_left, SymInt window_right, SymInt chunk"
)
_BACKWARD = (
    "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_SHARED}, bool deterministic"
)
for _schema in (
    f"forward({_FORWARD}) -> (Tensor out, Tensor lse)",
    f"forward_into({_FORWARD}, Tensor(a!) out, Tensor(b!) lse) -> ()",
    f"forward_cached({_FORWARD}, {_CACHE}) -> (Tensor out, Tensor lse)",
    f"backward({_BACKWARD}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    f"backward_into({_BACKWARD}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dsinks)"
    " -> ()",
    f"append({_APPEND}) -> ()",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
_fulgur.register_torch_ops()

_forward = torch.ops.fulgur.forward.default
_forward_cached = torch.ops.fulgur.forward_cached.default
_backward = torch.ops.fulgur.backward.default
_append = torch.ops.fulgur.append.default


@torch.library.register_fake("fulgur::forward", lib=_library)
@torch.library.register_fake("fulgur::forward_cached", lib=_library)
def _fake_forward(q, k, v, *_):
    lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse, dtype=lse_dtype)


@torch.library.register_fake("fulgur::backward", lib=_library)
def _fake_backward(dout, dlse, q, k, v, out, lse, *shared):
    sinks = shared[12]
    dsinks = q.new_empty((0,) if sinks is None else sinks.shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks


@torch.library.register_fake("fulgur::forward_into", lib=_library)
@torch.library.register_fake("fulgur::backward_into", lib=_library)
@torch.library.register_fake("fulgur::append", lib=_library)
def _fake_into(*_):
    pass


def _fold(size, mapped, tensors, shared):
    """Arguments of a batched call with the mapped dimension as a part of the batch."""

    def front(x, dim):
        return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    batch = tensors[0].shape[1 if mapped[0] == 0 else 0]
    folded = [
        None if x is None else front(x, dim).flatten(0, 1) for x, dim in zip(tensors, mapped)
    ]
    cu_q, cu_k, seqused_q, seqused_k, *numbers, slopes, _, dropout_p, rng, invariant = shared
    *seqused_dims, slopes_dim, rng_dim = (mapped[len(tensors) + i] for i in (2, 3, 11, 14))
    seqused = (
        None if x is None else front(x, dim).flatten()
        for x, dim in zip((seqused_q, seqused_k), seqused_dims)
    )  # fmt: skip
    if slopes is not None and (slopes_dim is not None or slopes.dim() == 2):
        slopes = front(slopes, slopes_dim)
        if slopes.dim() == 2:
            slopes = slopes.unsqueeze(1).expand(-1, batch, -1)
        slopes = slopes.flatten(0, 1)
    if rng is not None:
        if rng_dim is None:
            raise NotImplementedError("dropout_p: vmap(randomness='same'); want 'different'")
        rng = rng.select(rng_dim, 0)  # what is kept depends on the place in the batch, too
    return *folded, cu_q, cu_k, *seqused, *numbers, slopes, None, dropout_p, rng, invariant


def _fold_heads(size, mapped, tensors, shared):
    """The same as a part of the heads: each has a sink, whose gradient is wanted for each call."""
    *lengths_and_numbers, slopes, sinks, dropout_p, rng, invariant = shared
    q_dim, k_dim, slopes_dim, sinks_dim = (mapped[len(tensors) + i] for i in (2, 3, 11, 12))
    for name, given in (
        ("dropout_p", dropout_p > 0), ("seqused_q, mapped", q_dim is not None),
        ("seqused_k, mapped", k_dim is not None),
    ):  # fmt: skip
        if given:
            raise NotImplementedError(f"{name}: with sinks under vmap; want it left out")

    def fold(x, dim, heads=-2):
        heads %= x.dim() - (dim is not None)
        if dim is None:
            x = x.unsqueeze(heads).expand(*x.shape[:heads], size, *x.shape[heads:])
        else:
            x = x.movedim(dim, heads)
        return x.flatten(heads, heads + 1)

    folded = [None if x is None else fold(x, dim) for x, dim in zip(tensors, mapped)]
    slopes = None if slopes is None else fold(slopes, slopes_dim, -1)
    sinks = fold(sinks, sinks_dim, -1)
    return *folded, *lengths_and_numbers, slopes, sinks, dropout_p, rng, invariant


def _batched(op, tensors, heads):
    """The rule of vmap of an operator whose first so many arguments are tensors, and whose results
    have their heads in these dimensions."""

    def rule(info, in_dims, *args):
        size, shared, rest = info.batch_size, args[tensors : tensors + 16], args[tensors + 16 :]
        if shared[0] is not None:
            raise NotImplementedError(
                "cu_seqlens_q: packed sequences under vmap; want a batch of sequences of one length"
            )
        of_heads = shared[12] is not None
        fold = _fold_heads if of_heads else _fold
        results = op(*fold(size, in_dims, args[:tensors], shared), *rest)
        dims = heads if of_heads else (0,) * len(results)
        results = tuple(x.unflatten(dim, (size, -1)) for x, dim in zip(results, dims))
        return results, tuple(dim and x.dim() - 1 + dim for x, dim in zip(results, dims))

    return rule


_vmap_backward = _batched(_backward, 7, (-2, -2, -2, -1))
torch.library.register_vmap("fulgur::forward", _batched(_forward, 3, (-2, -2)), lib=_library)
torch.library.register_vmap("fulgur::backward", _vmap_backward, lib=_library)


def _visible_scores(
    q, k, cu_q, cu_k, seqused_q, seqused_k, left, right, chunk, leftpad_k=None
):  # fmt: skip
    """How many scores the mask shows in all sequences of one head."""

    def of_row(diagonal, sk):
        start, end = 0, sk  # behind the last key
        if left >= 0:
            start = max(start, diagonal - left)
        if right >= 0:
            end = min(end, diagonal + right + 1)
        if chunk > 0:
            start = max(start, diagonal // chunk * chunk)
            end = min(end, (diagonal // chunk + 1) * chunk)
        return max(end - start, 0)

    def visible(sq, sk):
        return sum(of_row(i + sk - sq, sk) for i in range(sq))

    if cu_q is None and seqused_q is None and seqused_k is None:
        return q.shape[0] * visible(q.shape[1], k.shape[1])
    if seqused_q is None:
        queries = [q.shape[1]] * q.shape[0] if cu_q is None else cu_q.diff().tolist()
    else:
        queries = seqused_q.tolist()
    if seqused_k is None:
        keys = [k.shape[1]] * len(queries) if cu_k is None else cu_k.diff().tolist()
    else:
        keys = (seqused_k if leftpad_k is None else seqused_k - leftpad_k).tolist()
    return sum(map(visible, queries, keys))


@register_flop_formula(torch.ops.fulgur.forward, get_raw=True)
def _forward_flops(q, k, v, cu_q, cu_k, seqused_q, seqused_k, *rest, **_):
    pairs = q.shape[-2] * _visible_scores(q, k, cu_q, cu_k, seqused_q, seqused_k, *rest[4:7])
    return pairs * 2 * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.fulgur.forward_cached, get_raw=True)
def _forward_cached_flops(q, k, v, cu_q, cu_k, seqused_q, seqused_k, *rest, **_):
    lengths = cu_q, cu_k, seqused_q, seqused_k
    pairs = q.shape[-2] * _visible_scores(q, k, *lengths, *rest[4:7], rest[-4])
    return pairs * 2 * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.fulgur.backward, get_raw=True)
def _backward_flops(dout, dlse, q, k, v, out, lse, cu_q, cu_k, seqused_q, seqused_k, *rest, **_):
    pairs = q.shape[-2] * _visible_scores(q, k, cu_q, cu_k, seqused_q, seqused_k, *rest[4:7])
    return pairs * (6 * q.shape[-1] + 4 * v.shape[-1])


def _save(ctx, tensors, out, lse, shared, deterministic):
    cu_q, cu_k, seqused_q, seqused_k, *numbers, slopes, sinks, dropout_p, rng, invariant = shared
    lengths = cu_q, cu_k, seqused_q, seqused_k
    ctx.save_for_backward(*tensors, out, lse, *lengths, slopes, sinks, rng)
    ctx.numbers = numbers, dropout_p, invariant, deterministic
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse, *lengths, slopes, sinks, rng = ctx.saved_tensors
    numbers, dropout_p, invariant, deterministic = ctx.numbers
    if dout is None and dlse is None:
        return (None,) * 20
    dout = torch.zeros_like(out) if dout is None else _rows(dout)
    dlse = None if dlse is None else _rows(dlse)
    compute = _Gradients.apply if torch.is_grad_enabled() else _backward
    *gradients, dsinks = compute(
        dout, dlse, q, k, v, out, lse, *lengths, *numbers, slopes, sinks, dropout_p, rng, invariant,
        deterministic,
    )  # fmt: skip
    return *gradients, *(None,) * 13, None if sinks is None else dsinks, *(None,) * 3


class _Gradients(torch.autograd.Function):
    """The gradients under ``create_graph=True``: a derivative of them raises, and is never 0."""

    @staticmethod
    def forward(*args):
        return _backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("fulgur.torch: attention has a first derivative only")

    @staticmethod
    def vmap(info, in_dims, *args):
        return _vmap_backward(info, in_dims, *args)


class _Attention(torch.autograd.Function):
    """Records the gradient in eager mode and in ``torch.compile``."""

    @staticmethod
    def forward(ctx, q, k, v, deterministic, *shared):
        out, lse = _forward(q, k, v, *shared)
        _save(ctx, (q, k, v), out, lse, shared, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)


class _FunctionalAttention(torch.autograd.Function):
    """The same for torch.func, which wants the saving apart; in eager mode that costs 20 us."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, deterministic, *shared):
        return _forward(q, k, v, *shared)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, deterministic, *shared = inputs
        _save(ctx, (q, k, v), *output, shared, deterministic)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)


def random_numbers(q):
    """Seed and offset of dropout, int64 ``(2,)``, from PyTorch's generator of q's device."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def _rows(x):
    """A tensor with rows in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _want_no_gradient(of="caches", **tensors):
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name}: requires grad, and {of} have no gradient; want torch.no_grad() or "
                f"{name}.detach()"
            )


def attention(
    q, k, v, *, causal=False, window=None, chunk=0, scale=None, softcap=0.0, alibi_slopes=None,
    sinks=None, dropout_p=0.0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
    seqused_q=None, seqused_k=None, page_table=None, page_indptr=None, cache_batch_idx=None,
    leftpad_k=None, tree_mask=None, prefix_groups=None, prefix_lens=None, deterministic=False,
    invariant=False, return_lse=False,
):  # fmt: skip
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Means the same as :func:`fulgur.attention`, on tensors of PyTorch, and records gradients to q,
    k, v and sinks; caches and tree masks have none. Under autocast q, k and v are cast to its dtype, float64
    apart; of a cache, q alone.

    Args:
        q: ``(batch, sq, hq, d)`` or packed ``(total_q, hq, d)``; 1 <= d <= 512.
        k: ``(batch, sk, hk, d)`` or ``(total_k, hk, d)``, dtype of q; hq is a multiple of hk.
        v: ``(batch, sk, hk, dv)`` or ``(total_k, hk, dv)``, dtype of q; 1 <= dv <= 512.
        causal: query i of sq sees keys up to i + sk - sq.
        window: ``(left, right)``: keys from i + sk - sq - left to i + sk - sq + right, -1 is
            unbounded. With ``causal`` both hold.
        chunk: of these keys j, those with j // chunk == (i + sk - sq) // chunk; 0 is off.
        scale: of the scores; default 1 / sqrt(d).
        softcap: 0 is off.
        alibi_slopes: float32 ``(hq,)`` or ``(batch, hq)``; gets no gradient.
        sinks: float32 ``(hq,)``: a score of each head that joins the softmax of every row, without
            a value (attention sinks, as gpt-oss learns them).
        dropout_p: 0 <= p < 1; the random numbers come from PyTorch's generator of q's device.
        cu_seqlens_q, cu_seqlens_k: int32 ``(batch + 1,)``: sequence b is the packed rows
            ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. Both or none.
        max_seqlen_q, max_seqlen_k: the longest packed sequences; 0 reads them from cu_seqlens, on
            the CPU only.
        seqused_q: int32 ``(batch,)``: only the first ``seqused_q[b]`` queries of sequence b exist:
            the rows behind are padding, with out 0, lse -inf and gradients 0.
        seqused_k: int32 ``(batch,)``: only the first ``seqused_k[b]`` keys of sequence b exist.
        page_table, page_indptr, cache_batch_idx, leftpad_k: where the sequences of a cache lie, as
            :func:`fulgur.attention` has it; q may be packed by cu_seqlens_q alone there.
        tree_mask: int64 ``(batch, sq)`` or packed ``(total_q,)``, sq <= 64: bit j says whether a
            query sees the jth of the last sq keys, the drafted tokens.
        prefix_groups, prefix_lens: sequences that share their first keys, beside a page_table, as
            :func:`fulgur.attention` has it.
        deterministic: the backward pass gives the same bits in every run; so it does under
            ``torch.use_deterministic_algorithms(True)``.
        invariant: a sequence's bits do not depend on its batch or on the number of threads.
        return_lse: return ``(out, lse)``.

    Returns:
        out, contiguous; with ``return_lse`` also lse, float32 (float64 where q is), ``(batch, hq,
        sq)`` or packed ``(hq, total_q)``, natural log. Gradients flow through both.

    Raises:
        RuntimeError: an argument is wrong, or no engine computes this here.
    """
    window_left, window_right = (-1, -1) if window is None else window
    if causal:
        window_right = 0
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes: requires grad, and gets none; want alibi_slopes.detach()")
    cache = (page_table, page_indptr, cache_batch_idx, leftpad_k)
    cached = any(x is not None for x in cache)
    alone = (tree_mask, prefix_groups, prefix_lens)
    forward_only = cached or any(x is not None for x in alone)
    if forward_only:
        _want_no_gradient("caches" if cached else "tree masks", q=q, k=k, v=v, sinks=sinks)
    kind = q.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        q = q.to(dtype)
        if not cached:
            k, v = k.to(dtype), v.to(dtype)
    rng = random_numbers(q) if dropout_p > 0 else None
    shared = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
        q.shape[-1] ** -0.5 if scale is None else scale, softcap, window_left, window_right,
        chunk, alibi_slopes, sinks, dropout_p, rng, invariant,
    )  # fmt: skip
    q = _rows(q)
    if not cached:
        k, v = _rows(k), _rows(v)
    if forward_only:
        out, lse = _forward_cached(q, k, v, *shared, *cache, *alone)
        return (out, lse) if return_lse else out
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        if sinks is not None and sinks.requires_grad and sinks.device != q.device:
            raise ValueError(
                f"sinks: requires grad on {sinks.device}, want {q.device} as q, where dsinks lies"
            )
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        functional = torch._C._are_functorch_transforms_active()
        function = _FunctionalAttention if functional else _Attention
        out, lse = function.apply(q, k, v, deterministic, *shared)
    else:
        out, lse = _forward(q, k, v, *shared)
    return (out, lse) if return_lse else out


def append(
    k_cache, v_cache, k_new, v_new, cache_seqlens, *, cu_seqlens_k_new=None, page_table=None,
    page_indptr=None, cache_batch_idx=None, cos=None, sin=None, interleaved=False,
    rotary_seqlens=None, q=None, q_out=None, cu_seqlens_q=None, causal=False, window=None, chunk=0,
):  # fmt: skip
    """Writes new keys and values into caches, in place, and turns them and q to their positions.

    Means the same as :func:`fulgur.append`, as an operator that ``torch.compile`` sees. Nothing is
    recorded: tensors that require grad are refused but under ``torch.no_grad()``.

    Returns:
        The turned queries, fresh or the very ``q_out`` given; None without q. Packed rows behind
        the last sequence are not written.

    Raises:
        RuntimeError: an argument is wrong, and nothing was written; or the tensors are where no
            engine appends.
    """
    window_left, window_right = (-1, -1) if window is None else window
    if causal:
        window_right = 0
    _want_no_gradient(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, q=q, q_out=q_out)
    k_new, v_new = _rows(k_new), _rows(v_new)
    if q is not None:
        q = _rows(q)
        if q_out is None:
            q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _append(
        k_cache, v_cache, k_new, v_new, cache_seqlens, cu_seqlens_k_new, page_table, page_indptr,
        cache_batch_idx, cos, sin, interleaved, rotary_seqlens, q, q_out, cu_seqlens_q,
        window_left, window_right, chunk,
    )  # fmt: skip
    return q_out


from fulgur import _sdpa  # noqa: E402, F401  registers "fulgur" with PyTorch, and activates nothing
