"""What the modules that stand in for FlashAttention's share: their arguments in the words of fulgur.torch."""

import operator
from contextlib import nullcontext

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.functional import pad

from fulgur._names import OPTIONS, named
from fulgur.torch import append, append_attention, attention
from fulgur.torch._tensors import autocasts, cast_to_cache, has_codes


def refuse(**arguments):
    """Raises for the first argument that asks for what fulgur does not have yet."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: fulgur does not have this yet; want it left out")


def want_int32(**tensors):
    """Raises for lengths and tables of another dtype, by the names that callers know."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.dtype != torch.int32:
            raise ValueError(f"{name}: got {str(x.dtype).removeprefix('torch.')}, want int32")


def _side(side):
    """A side of a window as an integer, which torch.compile may know by a symbol alone."""
    if side is None:
        return -1
    return side if isinstance(side, (int, torch.SymInt)) else operator.index(side)


def sides(window_size, name="window_size"):
    """(left, right) of a pair, a tensor of two, or FlashAttention-4's None for unbounded."""
    try:
        left, right = map(_side, window_size)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {window_size!r}, want (left, right), two integers") from None
    return left, right


def longest(name, max_seqlen, packed):
    """An upper bound of lengths, which callers know by `name`; where it is a tensor on a device, the rows
    there are, instead of a wait for it, and likewise in a graph, which cannot read it. At least 1: callers
    say 0 where all sequences are empty, and fulgur.torch reads it as not given."""
    if max_seqlen is None:
        max_seqlen = packed.shape[0]
    elif isinstance(max_seqlen, torch.Tensor):
        readable = max_seqlen.device.type == "cpu" and not torch.compiler.is_compiling()
        max_seqlen = int(max_seqlen) if readable else packed.shape[0]
    elif not isinstance(max_seqlen, (int, torch.SymInt)):
        try:
            max_seqlen = operator.index(max_seqlen)  # NumPy's integers
        except TypeError:
            raise TypeError(f"{name}: got {max_seqlen!r}, want an integer") from None
    return 1 if guard_or_false(max_seqlen == 0) else max_seqlen  # a graph may know a symbol alone, which is not 0


def keys_of_packed_queries(k, cu_seqlens_k, max_seqlen_k, block_table):
    """Arguments that say where keys lie: packed like the queries, or in pages, whose lengths are
    then those of cu_seqlens_k."""
    if block_table is None:
        return dict(cu_seqlens_k=cu_seqlens_k, max_seqlen_k=longest("max_seqlen_k", max_seqlen_k, k))
    want_tensors(cu_seqlens_k=cu_seqlens_k)
    # 0 stands for as many as the table has room for.
    given = max_seqlen_k is not None and not isinstance(max_seqlen_k, torch.Tensor)
    bound = longest("max_seqlen_k", max_seqlen_k, k) if given else 0
    return dict(seqused_k=cu_seqlens_k.diff(), page_table=block_table, max_seqlen_k=bound)


class _WithoutGradient(torch.autograd.Function):
    """A result that has no gradient, which its backward pass says."""

    @staticmethod
    def forward(ctx, why, result, *inputs):
        ctx.why = why
        return result.view_as(result)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(f"{ctx.why}; want torch.no_grad() or detached inputs")


def without_gradient(why, inputs, call):
    """The results of call(), which has no gradient: they require grad where inputs do, as upstream's, and the
    backward pass raises, and says why."""
    if not torch.is_grad_enabled() or not any(getattr(x, "requires_grad", False) for x in inputs):
        return call()
    with torch.no_grad():
        results = call()
    return tuple(_WithoutGradient.apply(why, x, *inputs) for x in results)


def with_pages(name, table, inputs, call):
    """The results of call(). Where it reads the pages of a table, which callers know by `name`, it has no gradient."""
    return call() if table is None else without_gradient(f"{name}: fulgur has no gradients with pages", inputs, call)


def want_tensors(**given):
    """Raises for what is no tensor."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, want a tensor")


def want_parts(name, x, parts, rows="batch, seqlen"):
    """Raises where x is not kv or qkv of so many parts, one with the other in their dimension."""
    want_tensors(**{name: x})
    if x.dim() != rows.count(",") + 4 or x.shape[-3] != parts:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, want ({rows}, {parts}, heads, dim)")


def heads_of_k(qkv, num_heads_q):
    """Of qkv ``(batch, seqlen, num_heads_q + 2 hk, dim)``: hk."""
    if qkv.dim() != 4:
        raise ValueError(f"qkv: got shape {tuple(qkv.shape)}, want 4 or 5 dimensions")
    if num_heads_q is None:
        raise ValueError(f"num_heads_q: got None, want the heads of q among the {qkv.shape[2]} of qkv")
    heads = qkv.shape[2] - num_heads_q
    if num_heads_q < 1 or heads < 2 or heads % 2:
        raise ValueError(
            f"num_heads_q: got {num_heads_q}, want to leave as many heads of k as of v of the"
            f" {qkv.shape[2]} of qkv"
        )
    return heads // 2


# What errors about parts call them.
PARTS_OF_KV = {"k": "k of kv", "v": "v of kv"}
PARTS_OF_QKV = {"q": "q of qkv", "k": "k of qkv", "v": "v of qkv"}

# What flash_attn_with_kvcache calls the arguments of fulgur.torch, which has other names for keys and
# values where rows are added.
_NAMES_OF_CACHES = OPTIONS | {"seqused_k": "cache_seqlens", "leftpad_k": "cache_leftpad"}
_NAMES_OF_KEYS = _NAMES_OF_CACHES | {"k": "k_cache", "v": "v_cache"}
_NAMES_OF_NEW_ROWS = _NAMES_OF_CACHES | {
    "k_new": "k", "v_new": "v", "cos": "rotary_cos", "sin": "rotary_sin",
}  # fmt: skip


@torch.no_grad()
def with_kvcache(
    q, k_cache, v_cache, k, v, cache_seqlens, *, rotary_cos, rotary_sin, rotary_interleaved,
    cache_batch_idx, page_table, cache_leftpad, rotary_seqlens=None, cu_seqlens_q=None,
    cu_seqlens_k_new=None, max_seqlen_q=None, chunk=0, **options,
):  # fmt: skip
    """(out, lse) of queries and a cache, to which new keys and values are added first; nothing is
    recorded. Errors have the names of flash_attn_with_kvcache."""
    want_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if (k is None) != (v is None):
        raise ValueError("k, v: got only one of them, want both or none")
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos: given without k and v, want the keys that are rotated")
    if cache_seqlens is None and k is not None:
        raise ValueError("cache_seqlens: got None, want where k and v go")
    if isinstance(cache_seqlens, int):
        sequences = len(q) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        device = q.device if cu_seqlens_k_new is None else cu_seqlens_k_new.device
        cache_seqlens = torch.full((sequences,), cache_seqlens, dtype=torch.int32, device=device)
    places = dict(page_table=page_table, cache_batch_idx=cache_batch_idx)
    queries = dict(
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=0 if cu_seqlens_q is None else longest("max_seqlen_q", max_seqlen_q, q),
    )
    dv = v_cache.shape[-1]
    # As upstream does, too: the GPU reads caches in rows of multiples of 16 bytes.
    padded = q.is_cuda and (q.shape[-1] % 8 or dv % 8)
    # New rows of codes are codes already, which descales do not change.
    apart = padded or has_codes(k_cache)
    if k is not None:
        new = cu_seqlens_k_new
        if new is not None and new.device != cache_seqlens.device:
            raise ValueError(
                f"cu_seqlens_k_new: on {new.device}, want {cache_seqlens.device} as cache_seqlens"
            )
        rows = dict(
            cu_seqlens_k_new=new, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
            rotary_seqlens=None if rotary_cos is None else rotary_seqlens, **places,
        )  # fmt: skip
        if not apart:
            return named(
                _NAMES_OF_NEW_ROWS, append_attention, q, k_cache, v_cache, k, v, cache_seqlens,
                leftpad_k=cache_leftpad, chunk=chunk, return_lse=True, **rows, **queries, **options,
            )  # fmt: skip
        rotated = named(
            _NAMES_OF_NEW_ROWS, append, k_cache, v_cache, k, v, cache_seqlens,
            q=None if rotary_cos is None else q, causal=options["causal"],
            cu_seqlens_q=None if rotary_cos is None else cu_seqlens_q,
            window=options["window"], chunk=chunk, **rows,
        )  # fmt: skip
        q = q if rotated is None else rotated
        cache_seqlens = cache_seqlens + (k.shape[1] if new is None else new.diff())
    if padded:
        if options["scale"] is None:
            options["scale"] = q.shape[-1] ** -0.5
        q, k_cache, v_cache = (pad(x, (0, -x.shape[-1] % 8)) for x in (q, k_cache, v_cache))
    # A cache is not cast, which would copy it: q is, to its dtype.
    as_it_is = torch.autocast(q.device.type, enabled=False) if autocasts(q) else nullcontext()
    (q,) = cast_to_cache(k_cache, q)
    with as_it_is:
        out, lse = named(
            _NAMES_OF_KEYS, attention, q, k_cache, v_cache, seqused_k=cache_seqlens,
            leftpad_k=cache_leftpad, chunk=chunk, return_lse=True, **places, **queries, **options,
        )  # fmt: skip
    return out[..., :dv], lse


def combine(out_partial, lse_partial, out=None, out_dtype=None):
    """out and lse of parts along the first dimension; lse_partial is out_partial's shape less its
    last dimension, and so is lse."""
    want_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.shape != out_partial.shape[:-1]:
        got, want = tuple(lse_partial.shape), tuple(out_partial.shape[:-1])
        raise ValueError(f"lse_partial: got shape {got}, want {want} as out_partial")
    lse_partial = lse_partial.to(torch.promote_types(lse_partial.dtype, torch.float32))
    # Rounded, so that what the weights add up to is not 1: that is divided by, and added to the LSE.
    shift = torch.logsumexp(lse_partial, 0)
    weights = (lse_partial - shift).exp().masked_fill(lse_partial.isneginf(), 0)
    total = weights.sum(0)
    weights = weights[..., None]
    result = (weights * out_partial).masked_fill(weights == 0, 0).sum(0)
    result = result / total.masked_fill(total == 0, 1)[..., None]
    result = result.to(out_dtype or (out_partial.dtype if out is None else out.dtype))
    lse = torch.where(shift.isfinite(), shift + total.log(), shift)
    return (result if out is None else out.copy_(result)), lse
