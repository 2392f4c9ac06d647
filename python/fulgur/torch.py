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
values are read by ``forward_cached``, which has no gradient, and written by ``append``;
``append_forward`` does both in one call.
"""

import torch
from torch._C._functorch import _add_batch_dim, get_unwrapped, is_batchedtensor
from torch._functorch import config as functorch_config
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, proxy_call
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import register_flop_formula

from fulgur import _fulgur
from fulgur._arguments import want_dense

__all__ = ["append", "append_attention", "attention"]

if torch.__version__ < (2, 11):
    raise ImportError(f"fulgur.torch: got PyTorch {torch.__version__}, want 2.11 or newer")

_library = torch.library.Library("fulgur", "DEF")
# What both passes take after their tensors; python/torch_ops.cpp reads it in this order. All has a
# default, as an argument that a call leaves out costs half of one that it passes, 0.1 to 0.2 us.
_SHARED = (
    "Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None, "
    "Tensor? rng_state=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0, SymInt window_left=-1, "
    "SymInt window_right=-1, SymInt chunk=0, float? scale=None, float softcap=0.0, "
    "float dropout_p=0.0, bool invariant=False, SymInt max_workspace=0"
)
# What the forward pass alone takes after them, and has no gradient.
_CACHE = (
    "Tensor? page_table=None, Tensor? page_indptr=None, Tensor? cache_batch_idx=None, "
    "Tensor? leftpad_k=None, Tensor? tree_mask=None, Tensor? prefix_groups=None, "
    "Tensor? prefix_lens=None"
)
_APPEND = (
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor cache_seqlens, "
    "Tensor? cu_seqlens_k_new=None, Tensor? page_table=None, Tensor? page_indptr=None, "
    "Tensor? cache_batch_idx=None, Tensor? cos=None, Tensor? sin=None, bool interleaved=False, "
    "Tensor? rotary_seqlens=None, Tensor? q=None, Tensor(c!)? q_out=None, "
    "Tensor? cu_seqlens_q=None, SymInt window_left=-1, SymInt window_right=-1, SymInt chunk=0"
)
_FORWARD = "Tensor q, Tensor k, Tensor v"
_APPEND_FORWARD = (
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, "
    f"Tensor cache_seqlens, {_SHARED}, {_CACHE}, Tensor? cu_seqlens_k_new=None, Tensor? cos=None, "
    "Tensor? sin=None, bool interleaved=False, Tensor? rotary_seqlens=None"
)
_BACKWARD = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_GRADIENTS = f"Tensor? dlse=None, {_SHARED}, bool deterministic=False"
for _schema in (
    f"forward({_FORWARD}, {_SHARED}) -> (Tensor out, Tensor lse)",
    f"forward_into({_FORWARD}, Tensor(a!) out, Tensor(b!) lse, {_SHARED}) -> ()",
    f"forward_cached({_FORWARD}, {_SHARED}, {_CACHE}) -> (Tensor out, Tensor lse)",
    f"backward({_BACKWARD}, {_GRADIENTS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    f"backward_into({_BACKWARD}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, {_GRADIENTS}, "
    "Tensor(d!)? dsinks=None) -> ()",
    f"append({_APPEND}) -> ()",
    f"append_forward({_APPEND_FORWARD}) -> (Tensor out, Tensor lse)",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
_library.define(
    "random_numbers(*, Device device) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_fulgur.register_torch_ops()

_forward = torch.ops.fulgur.forward.default
_forward_cached = torch.ops.fulgur.forward_cached.default
_backward = torch.ops.fulgur.backward.default
_append = torch.ops.fulgur.append.default
_append_forward = torch.ops.fulgur.append_forward.default
_random_numbers = torch.ops.fulgur.random_numbers.default


def by_name(op, arguments):
    """The arguments of a call, or what stands for them, by their names; those at the end, if they
    have their defaults, PyTorch leaves out."""
    return dict(zip((argument.name for argument in op._schema.arguments), arguments))


# What lies where the first tensor of a call does; the others may be on the CPU with a GPU.
_BESIDE_FIRST = {"k", "v", "k_cache", "v_cache", "k_new", "v_new"}


def _fake(op):
    """Registers `results`, those of an operator without memory, of its tensors by name."""

    def register(results):
        @torch.library.register_fake(op._name, lib=_library)
        def fake(*args):
            given = {name: x for name, x in by_name(op, args).items() if isinstance(x, torch.Tensor)}
            first, device = next((name, x.device) for name, x in given.items())
            for name, x in given.items():
                # PyTorch comes here for one tensor on meta, too, and the results would be there.
                if x.device != device and (x.device.type == "meta" or name in _BESIDE_FIRST):
                    raise ValueError(f"{name}: got a tensor on {x.device}, want {device} as {first}")
            return results(**given)

        return results

    return register


@_fake(_forward)
@_fake(_forward_cached)
def _fake_forward(q, v, **_):
    lse = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(lse, dtype=lse_dtype)


@_fake(_append_forward)
def _fake_append_forward(q, v_cache, **_):
    return _fake_forward(q, v_cache)


@_fake(_backward)
def _fake_backward(q, k, v, sinks=None, **_):
    dsinks = q.new_empty((0,) if sinks is None else sinks.shape, dtype=torch.float32)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks


@_fake(torch.ops.fulgur.forward_into.default)
@_fake(torch.ops.fulgur.backward_into.default)
@_fake(_append)
def _fake_into(**_):
    pass


def _refuse(op):
    """Registers the error about tensors without rows: PyTorch's own does not say which argument is one."""

    def refuse(*args):
        for name, x in by_name(op, args).items():
            if isinstance(x, torch.Tensor):
                want_dense(name, x)

    for key in ("AutogradNestedTensor", "MkldnnCPU"):
        _library.impl(op, refuse, key)
    for kind in ("Sparse", "SparseCsr", "Quantized"):
        for device in ("CPU", "CUDA"):
            _library.impl(op, refuse, f"{kind}{device}")


for _op in (
    _forward, _forward_cached, _backward, _append, _append_forward,
    torch.ops.fulgur.forward_into.default, torch.ops.fulgur.backward_into.default,
):  # fmt: skip
    _refuse(_op)


# Tensors with a batch in front, and heads as the last dimension but one.
_ROWS = ("dout", "q", "k", "v", "out", "lse", "dlse")


def _fold(size, given, mapped):
    """Arguments of a batched call with the mapped dimension as a part of the batch."""

    def front(name):
        x, dim = given[name], mapped[name]
        return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)

    batch = given["q"].shape[1 if mapped["q"] == 0 else 0]
    folded = {name: front(name).flatten(0, 1) for name in _ROWS if name in given}
    for name in ("seqused_q", "seqused_k"):
        if name in given:
            folded[name] = front(name).flatten(0, 1).contiguous()
    if "alibi_slopes" in given:
        slopes = given["alibi_slopes"]
        if mapped["alibi_slopes"] is not None or slopes.dim() == 2:
            slopes = front("alibi_slopes")
            if slopes.dim() == 2:
                slopes = slopes.unsqueeze(1).expand(-1, batch, -1)
            folded["alibi_slopes"] = slopes.flatten(0, 1)
    if "rng_state" in given:
        if mapped["rng_state"] is None:
            raise NotImplementedError("dropout_p: vmap(randomness='same'); want 'different'")
        # What is kept depends on the place in the batch, too.
        folded["rng_state"] = given["rng_state"].select(mapped["rng_state"], 0)
    return given | folded


def _fold_heads(size, given, mapped):
    """The same as a part of the heads: each has a sink, whose gradient is wanted for each call."""
    for name, refused in (
        ("dropout_p", "rng_state" in given),
        ("seqused_q, mapped", mapped.get("seqused_q") is not None),
        ("seqused_k, mapped", mapped.get("seqused_k") is not None),
    ):
        if refused:
            raise NotImplementedError(f"{name}: with sinks under vmap; want it left out")

    def fold(name, heads):
        x, dim = given[name], mapped[name]
        heads %= x.dim() - (dim is not None)
        if dim is None:
            x = x.unsqueeze(heads).expand(*x.shape[:heads], size, *x.shape[heads:])
        else:
            x = x.movedim(dim, heads)
        return x.flatten(heads, heads + 1)

    rows = {name: fold(name, -2) for name in _ROWS if name in given}
    of_heads = ("alibi_slopes", "sinks")
    return given | rows | {name: fold(name, -1).contiguous() for name in of_heads if name in given}


def _batched(op, heads, size, given, mapped):
    """Results of a call under vmap, and where the mapped dimension is in them; their heads are in
    these dimensions. Of `given` by name, those in `mapped` are tensors."""
    given = {name: x for name, x in given.items() if x is not None}
    if "cu_seqlens_q" in given:
        raise NotImplementedError(
            "cu_seqlens_q: packed sequences under vmap; want a batch of sequences of one length"
        )
    of_heads = "sinks" in given
    results = op(**(_fold_heads if of_heads else _fold)(size, given, mapped))
    dims = heads if of_heads else (0,) * len(results)
    results = tuple(x.unflatten(dim, (size, -1)) for x, dim in zip(results, dims))
    return results, tuple(dim and x.dim() - 1 + dim for x, dim in zip(results, dims))


_HEADS_OF_RESULTS, _HEADS_OF_GRADIENTS = (-2, -2), (-2, -2, -2, -1)


@torch.library.register_vmap("fulgur::forward", lib=_library)
def _vmap_forward(info, in_dims, *args):
    given, mapped = (by_name(_forward, x) for x in (args, in_dims))
    for name in ("q", "k", "v", "sinks"):
        if torch.is_grad_enabled() and getattr(given.get(name), "requires_grad", False):
            raise NotImplementedError(
                f"{name}: requires grad outside of vmap, where a compiled graph or a call of the "
                "operator records none; want fulgur.torch.attention outside of torch.compile"
            )
    return _batched(_forward, _HEADS_OF_RESULTS, info.batch_size, given, mapped)


@torch.library.register_vmap("fulgur::backward", lib=_library)
def _vmap_backward(info, in_dims, *args):
    given, mapped = (by_name(_backward, x) for x in (args, in_dims))
    return _batched(_backward, _HEADS_OF_GRADIENTS, info.batch_size, given, mapped)


def _triangle(n):
    n = torch.sym_max(n, 0)
    return n * (n + 1) // 2


def _visible_scores(
    q, k, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, window_left=-1,
    window_right=-1, chunk=0, leftpad_k=None, page_table=None, **_,
):  # fmt: skip
    """How many scores the mask shows in all sequences of all heads. Where fake tensors, or those on meta,
    do not tell the lengths, packed sequences are equally long, and all others as long as they may be."""

    def in_band(sq, sk):
        def up_to(right):  # key i + sk - sq + right of query i
            right += sk - sq
            corners = (right + sq, 1), (right, -1), (right + sq - sk, -1), (right - sk, 1)
            return sum(sign * _triangle(n) for n, sign in corners)

        count = sq * sk if window_right < 0 else up_to(window_right)
        return count if window_left < 0 else count - up_to(-window_left - 1)

    def visible(sq, sk):
        if chunk == 0:
            return in_band(sq, sk)
        count = 0
        for start in range(0, sk, chunk):
            end = min(start + chunk, sk)
            count += in_band(max(end - max(start, sk - sq), 0), end - start)
        return count

    heads = q.shape[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    sequences = torch.sym_max(batch, 1)
    sq = q.shape[1] if cu_seqlens_q is None else q.shape[0] // sequences
    if page_table is not None:
        sk = page_table.numel() // sequences * k.shape[1]
    else:
        sk = k.shape[1] if cu_seqlens_k is None else k.shape[0] // sequences
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k
    lengths = [x for x in lengths if x is not None]
    if not lengths or any(is_fake(x) or x.is_meta for x in lengths):
        return heads * batch * visible(sq, sk)

    def numbers(used, cu_seqlens, otherwise):
        used = cu_seqlens.diff() if used is None and cu_seqlens is not None else used
        return [otherwise] * batch if used is None else used.tolist()

    if seqused_k is not None and leftpad_k is not None:
        seqused_k = seqused_k - leftpad_k
    queries, keys = numbers(seqused_q, cu_seqlens_q, sq), numbers(seqused_k, cu_seqlens_k, sk)
    return heads * sum(map(visible, queries, keys))


def _forward_flops(op):
    def flops(*args, out_val, **options):
        given = by_name(op, args) | options
        return _visible_scores(**given) * 2 * (given["q"].shape[-1] + given["v"].shape[-1])

    return flops


for _packet in (torch.ops.fulgur.forward, torch.ops.fulgur.forward_cached):
    register_flop_formula(_packet, get_raw=True)(_forward_flops(_packet.default))


@register_flop_formula(torch.ops.fulgur.append_forward, get_raw=True)
def _append_forward_flops(*args, out_val, **options):
    given = by_name(_append_forward, args) | options
    fresh = given.get("cu_seqlens_k_new")
    fresh = given["k_new"].shape[1] if fresh is None else fresh.diff()
    given |= dict(k=given["k_cache"], seqused_k=given["cache_seqlens"] + fresh)
    return _visible_scores(**given) * 2 * (given["q"].shape[-1] + given["v_cache"].shape[-1])


@register_flop_formula(torch.ops.fulgur.backward, get_raw=True)
def _backward_flops(*args, out_val, **options):
    given = by_name(_backward, args) | options
    return _visible_scores(**given) * (6 * given["q"].shape[-1] + 4 * given["v"].shape[-1])


# Functions without a jvp raise where forward mode wants a derivative; operators alone would give 0.
# A call is recorded with q, k, v, its options (numbers by name, names of further tensors, whether
# gradients are deterministic) and these tensors: each argument costs 0.15 us.


def _forward_with(q, k, v, options, tensors):
    numbers, names, _ = options
    if names:
        numbers = numbers | dict(zip(names, tensors))
    return _forward(q, k, v, **numbers)


def _save(ctx, tensors, options):
    ctx.save_for_backward(*tensors)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    numbers, names, deterministic = ctx.options
    if dout is None and dlse is None:
        return (None,) * (4 + len(names))
    dout = torch.zeros_like(out) if dout is None else whole_rows("dout", dout)
    given = dict(zip(names, tensors))
    if dlse is not None:
        given["dlse"] = whole_rows("dlse", dlse)
    if deterministic:
        numbers = numbers | {"deterministic": True}
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        rows = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse} | given
        dq, dk, dv, dsinks = _Gradients.apply(numbers, tuple(rows), *rows.values())
    else:
        dq, dk, dv, dsinks = _backward(dout, q, k, v, out, lse, **given, **numbers)
    return dq, dk, dv, None, *[dsinks if name == "sinks" else None for name in names]


class _Gradients(torch.autograd.Function):
    """The gradients under ``create_graph=True``: a derivative of them raises, and is never 0."""

    @staticmethod
    def forward(numbers, names, *tensors):
        return _backward(**dict(zip(names, tensors)), **numbers)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("fulgur.torch: attention has a first derivative only")

    @staticmethod
    def vmap(info, in_dims, numbers, names, *tensors):
        given, mapped = dict(zip(names, tensors)) | numbers, dict(zip(names, in_dims[2:]))
        return _batched(_backward, _HEADS_OF_GRADIENTS, info.batch_size, given, mapped)


class _Attention(torch.autograd.Function):
    """Records the gradient in eager mode and in ``torch.compile``."""

    @staticmethod
    def forward(ctx, q, k, v, options, *tensors):
        out, lse = results = _forward_with(q, k, v, options, tensors)
        _save(ctx, (q, k, v, out, lse, *tensors), options)
        return results

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)


class _FunctionalAttention(torch.autograd.Function):
    """The same for torch.func, which wants the saving apart; in eager mode that costs 20 us."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q, k, v, options, *tensors):
        return _forward_with(q, k, v, options, tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, options, *tensors = inputs
        _save(ctx, (q, k, v, *output, *tensors), options)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)


@torch.library.impl(_random_numbers._name, "BackendSelect", lib=_library)
def _draw(*, device):
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


@torch.library.register_fake(_random_numbers._name, lib=_library)
def _fake_random_numbers(*, device):
    return torch.empty((2,), dtype=torch.int64, device=device)


_VMAP_MODE = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)


@torch.library.impl(_random_numbers._name, "FuncTorchVmapMode", lib=_library)
def _vmap_random_numbers(*, device):
    """Decides by the randomness of vmap alone, as PyTorch's random operators do, whatever is mapped."""
    vmap = retrieve_current_functorch_interpreter()
    randomness = vmap.randomness()
    if randomness == "error":
        raise RuntimeError("dropout_p: vmap(randomness='error'); want 'different'")
    with torch._C._ExcludeDispatchKeyGuard(_VMAP_MODE):
        if randomness == "same":
            return _random_numbers(device=device)
        numbers = torch.stack([_random_numbers(device=device) for _ in range(vmap.batch_size())])
    return _add_batch_dim(numbers, 0, vmap.level())


def _trace_random_numbers(mode, func, types, args, kwargs):
    """Records the operator so that no partition of a training graph draws the numbers anew.

    The backward pass must drop the same entries of P as the forward pass. PyTorch's partitioner
    recomputes what an activation memory budget or a policy of checkpointing asks for, random
    operators too, unless they are marked so; under a budget of 0 it does not read the mark, so the
    budget becomes the smallest one under which it does.
    """
    numbers = proxy_call(mode, func, mode.pre_dispatch, args, kwargs)
    node = next(node for node in reversed(mode.tracer.graph.nodes) if node.target is func)
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if functorch_config.activation_memory_budget == 0:
        node.meta["memory_budget"] = 1e-9
    return numbers


torch.library.register_torch_dispatch(
    _random_numbers._name, ProxyTorchDispatchMode, _trace_random_numbers, lib=_library
)


def random_numbers(q):
    """Seed and offset of dropout, int64 ``(2,)``, from PyTorch's generator of q's device."""
    return _random_numbers(device=q.device)


def rng_state_of(q, dropout_p):
    """The same for both passes of a call that may have no dropout: the generator stays then."""
    return random_numbers(q) if dropout_p else q.new_zeros(2, dtype=torch.int64)


def whole_rows(name, x):
    """A tensor with rows in one piece."""
    try:
        return x if x.stride()[-1] == 1 else x.contiguous()
    except AttributeError:
        raise TypeError(f"{name}: got {type(x).__name__}, want a tensor") from None
    except IndexError:
        raise ValueError(f"{name}: got a tensor of no dimensions, want rows") from None
    except RuntimeError:
        want_dense(name, x)
        raise


def _apart(tensors):
    """Views of those that come again: Dynamo lets a Function take no tensor twice."""
    return [x.view_as(x) if any(x is y for y in tensors[:i]) else x for i, x in enumerate(tensors)]


def autocasts(q):
    """Whether autocast casts a call with these queries."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = q.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind) and q.dtype != torch.float64


def cast_to_cache(k_cache, *rows):
    """Rows that go with a cache, under autocast in its dtype: what lies in the cache stays as it is."""
    return [x.to(k_cache.dtype) if x is not None and autocasts(x) else x for x in rows]


def _sides(window):
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: got {window!r}, want None or (left, right)")
    return window


def _want_constant(name, x):
    if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
        raise ValueError(f"{name}: requires grad, and gets none; want {name}.detach()")


def _requires_grad(x):
    """Whether x, or what vmap maps to it, requires grad: inside of vmap x alone does not say so."""
    while isinstance(x, torch.Tensor) and is_batchedtensor(x):
        x = get_unwrapped(x)
    return getattr(x, "requires_grad", False)


def _want_no_gradient(of="caches", **tensors):
    """Nothing records one, in either mode, and what is not recorded would be 0."""
    if forward_ad._current_level >= 0:
        for name, x in tensors.items():
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(f"{name}: has a tangent, and {of} have no gradient")
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if _requires_grad(x):
            raise ValueError(
                f"{name}: requires grad, and {of} have no gradient; want torch.no_grad() or "
                f"{name}.detach()"
            )


def attention(
    q, k, v, *, causal=False, window=None, chunk=0, scale=None, softcap=0.0, alibi_slopes=None,
    sinks=None, dropout_p=0.0, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=0, max_seqlen_k=0,
    seqused_q=None, seqused_k=None, page_table=None, page_indptr=None, cache_batch_idx=None,
    leftpad_k=None, tree_mask=None, prefix_groups=None, prefix_lens=None, deterministic=False,
    invariant=False, max_workspace=0, return_lse=False,
):  # fmt: skip
    """Exact attention: softmax(scale q k^T) v, and the log-sum-exp of each row when asked.

    Means the same as :func:`fulgur.attention`, on tensors of PyTorch, and records gradients to q,
    k, v and sinks; caches and tree masks have none. Under autocast q, k and v are cast to its dtype, float64
    apart; with a cache, q alone is cast, to the dtype of the cache.

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
            the rows after are padding, with out 0, lse -inf and gradients 0.
        seqused_k: int32 ``(batch,)``: only the first ``seqused_k[b]`` keys of sequence b exist.
        page_table, page_indptr, cache_batch_idx, leftpad_k: where the sequences of a cache lie, as
            :func:`fulgur.attention` has it; q may be packed by cu_seqlens_q alone there.
        tree_mask: int64 ``(batch, sq)`` or packed ``(total_q,)``, sq <= 64: bit j says whether a
            query sees the jth of the last sq keys, the drafted tokens.
        prefix_groups, prefix_lens: sequences that share their first keys, with a page_table, as
            :func:`fulgur.attention` has it.
        deterministic: the backward pass gives the same bits in every run; so it does under
            ``torch.use_deterministic_algorithms(True)``.
        invariant: a sequence's bits do not depend on its batch or on the number of threads.
        max_workspace: the most bytes that a pass may want besides its tensors; 0 is any number.
        return_lse: return ``(out, lse)``.

    Returns:
        out, contiguous; with ``return_lse`` also lse, float32 (float64 where q is), ``(batch, hq,
        sq)`` or packed ``(hq, total_q)``, natural log. Gradients flow through both.

    Raises:
        RuntimeError, TypeError, ValueError: an argument is wrong, or no engine computes this here.
        NotImplementedError: another derivative than the first, or one in forward mode, is wanted.
    """
    numbers = {}
    if window is not None:
        numbers["window_left"], numbers["window_right"] = _sides(window)
    if causal:
        numbers["window_right"] = 0
    if chunk:
        numbers["chunk"] = chunk
    if scale is not None:
        _want_constant("scale", scale)
        numbers["scale"] = scale
    if softcap:
        _want_constant("softcap", softcap)
        numbers["softcap"] = softcap
    # With lengths they may be numbers that torch.compile does not know, and does not compare.
    if cu_seqlens_q is not None or max_seqlen_q:
        numbers["max_seqlen_q"] = max_seqlen_q
    if cu_seqlens_k is not None or page_table is not None or max_seqlen_k:
        numbers["max_seqlen_k"] = max_seqlen_k
    if invariant:
        numbers["invariant"] = invariant
    if max_workspace:
        numbers["max_workspace"] = max_workspace
    tensors = {}
    if sinks is not None:
        tensors["sinks"] = sinks
    if cu_seqlens_q is not None:
        tensors["cu_seqlens_q"] = cu_seqlens_q
    if cu_seqlens_k is not None:
        tensors["cu_seqlens_k"] = cu_seqlens_k
    if seqused_q is not None:
        tensors["seqused_q"] = seqused_q
    if seqused_k is not None:
        tensors["seqused_k"] = seqused_k
    if alibi_slopes is not None:
        _want_constant("alibi_slopes", alibi_slopes)
        tensors["alibi_slopes"] = alibi_slopes
    cache = {}
    if page_table is not None:
        cache["page_table"] = page_table
    if page_indptr is not None:
        cache["page_indptr"] = page_indptr
    if cache_batch_idx is not None:
        cache["cache_batch_idx"] = cache_batch_idx
    if leftpad_k is not None:
        cache["leftpad_k"] = leftpad_k
    cached = len(cache) > 0
    if tree_mask is not None:
        cache["tree_mask"] = tree_mask
    if prefix_groups is not None:
        cache["prefix_groups"] = prefix_groups
    if prefix_lens is not None:
        cache["prefix_lens"] = prefix_lens
    if cache:
        _want_no_gradient("caches" if cached else "tree masks", q=q, k=k, v=v, sinks=sinks)
    if autocasts(q):
        dtype = k.dtype if cached else torch.get_autocast_dtype(q.device.type)
        q = q.to(dtype)
        if not cached:
            k, v = k.to(dtype), v.to(dtype)
    q = whole_rows("q", q)
    if dropout_p:
        numbers["dropout_p"] = dropout_p
        tensors["rng_state"] = random_numbers(q)
    if not cached:
        k, v = whole_rows("k", k), whole_rows("v", v)
    functional = torch._C._are_functorch_transforms_active()
    # What vmap maps may require grad outside of it, and does not say so inside.
    mapped = functional and any(map(is_batchedtensor, (q, k, v, *tensors.values())))
    if cache:
        out, lse = _forward_cached(q, k, v, **tensors, **numbers, **cache)
    elif mapped or forward_ad._current_level >= 0 or torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
        or getattr(sinks, "requires_grad", False)
    ):  # fmt: skip
        if getattr(sinks, "requires_grad", False) and sinks.device != q.device:
            raise ValueError(
                f"sinks: requires grad on {sinks.device}, want {q.device} as q, where dsinks lies"
            )
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        function = _FunctionalAttention if functional else _Attention
        options = numbers, tuple(tensors), deterministic
        inputs = (q, k, v, *tensors.values())
        if torch.compiler.is_compiling():
            inputs = _apart(inputs)
        out, lse = function.apply(*inputs[:3], options, *inputs[3:])
    else:
        out, lse = _forward(q, k, v, **tensors, **numbers)
    return (out, lse) if return_lse else out


def append(
    k_cache, v_cache, k_new, v_new, cache_seqlens, *, cu_seqlens_k_new=None, page_table=None,
    page_indptr=None, cache_batch_idx=None, cos=None, sin=None, interleaved=False,
    rotary_seqlens=None, q=None, q_out=None, cu_seqlens_q=None, causal=False, window=None, chunk=0,
):  # fmt: skip
    """Writes new keys and values into caches, in place, and turns them and q to their positions.

    Means the same as :func:`fulgur.append`, as an operator that ``torch.compile`` sees. Nothing is
    recorded: tensors that require grad are refused but under ``torch.no_grad()``. Under autocast q,
    k_new and v_new are cast to the dtype of the caches.

    Returns:
        The turned queries, fresh or the very ``q_out`` given; None without q. Packed rows after
        the last sequence are not written.

    Raises:
        RuntimeError: an argument is wrong, and nothing was written; or the tensors are where no
            engine appends.
    """
    window_left, window_right = (-1, -1) if window is None else _sides(window)
    if causal:
        window_right = 0
    _want_no_gradient(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, q=q, q_out=q_out)
    q, k_new, v_new = cast_to_cache(k_cache, q, k_new, v_new)
    k_new, v_new = whole_rows("k_new", k_new), whole_rows("v_new", v_new)
    if q is not None:
        q = whole_rows("q", q)
        if q_out is None:
            q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _append(
        k_cache, v_cache, k_new, v_new, cache_seqlens, cu_seqlens_k_new, page_table, page_indptr,
        cache_batch_idx, cos, sin, interleaved, rotary_seqlens, q, q_out, cu_seqlens_q,
        window_left, window_right, chunk,
    )  # fmt: skip
    return q_out


def append_attention(
    q, k_cache, v_cache, k_new, v_new, cache_seqlens, *, cu_seqlens_k_new=None, cos=None, sin=None,
    interleaved=False, rotary_seqlens=None, causal=False, window=None, chunk=0, scale=None,
    softcap=0.0, alibi_slopes=None, sinks=None, cu_seqlens_q=None, max_seqlen_q=0, max_seqlen_k=0,
    seqused_q=None, page_table=None, page_indptr=None, cache_batch_idx=None, leftpad_k=None,
    tree_mask=None, prefix_groups=None, prefix_lens=None, invariant=False, max_workspace=0,
    return_lse=False,
):  # fmt: skip
    """:func:`append` and the :func:`attention` that follows, in one call.

    Means the same as :func:`fulgur.append_attention`, as an operator that ``torch.compile`` sees.
    Nothing is recorded: tensors that require grad are refused but under ``torch.no_grad()``. Under
    autocast q, k_new and v_new are cast to the dtype of the caches.

    Returns:
        As :func:`attention`.

    Raises:
        RuntimeError: an argument is wrong, and nothing was written; or no engine computes this.
    """
    window_left, window_right = (-1, -1) if window is None else _sides(window)
    if causal:
        window_right = 0
    _want_no_gradient(
        q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, sinks=sinks,
    )  # fmt: skip
    q, k_new, v_new = cast_to_cache(k_cache, q, k_new, v_new)
    out, lse = _append_forward(
        whole_rows("q", q), k_cache, v_cache, whole_rows("k_new", k_new),
        whole_rows("v_new", v_new), cache_seqlens, sinks, cu_seqlens_q, None, seqused_q, None,
        alibi_slopes, None, max_seqlen_q, max_seqlen_k, window_left, window_right, chunk, scale,
        softcap, 0.0, invariant, max_workspace, page_table, page_indptr, cache_batch_idx,
        leftpad_k, tree_mask, prefix_groups, prefix_lens, cu_seqlens_k_new, cos, sin, interleaved,
        rotary_seqlens,
    )  # fmt: skip
    return (out, lse) if return_lse else out


from fulgur import _sdpa  # noqa: E402, F401  registers "fulgur" with PyTorch, and activates nothing
