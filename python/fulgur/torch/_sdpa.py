"""fulgur after ``torch.nn.functional.scaled_dot_product_attention``, as one of PyTorch's flash
attention implementations: ``torch.nn.attention.activate_flash_attention_impl("fulgur")``.

PyTorch decides, as for its own implementation, which calls are flash attention's: tensors ``(batch,
heads, seqlen, dim)``. While it is active, those are computed by fulgur, on CUDA and on the CPU;
there, calls in float64, of more than 512 columns and with a mask that wants a gradient stay with PyTorch's kernel.
With attn_mask, in float32 and above 256 columns, PyTorch asks on CUDA for memory-efficient attention: fulgur computes
these calls, too, and the gradient of the mask, in float16 and bfloat16 of at most 512 columns (with dropout 256) and in
float32 of at most 224; on GPUs of compute capability 7.5 of at most 256 and 128.
"""

from functools import partial

import torch
from torch.nn.attention import SDPBackend, register_flash_attention_impl

from fulgur._names import named
from fulgur.torch import _operators
from fulgur.torch._random import rng_state_of

# What PyTorch calls what errors name.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "lse": "logsumexp", "dout": "grad_out",
    "cu_seqlens_q": "cum_seq_q", "cu_seqlens_k": "cum_seq_k", "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k", "bias": "attn_mask", "window_left": "window_size_left",
    "window_right": "window_size_right",
}  # fmt: skip
_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
# The columns of calls of memory-efficient attention that every GPU from compute capability 8.0 on computes, gradients
# too; those of 7.5; and those of calls with dropout and of calls that may be flash attention's.
_COLUMNS = {torch.float16: 512, torch.bfloat16: 512, torch.float32: 224}
_COLUMNS_OF_TURING = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
_NARROW = 256
_EFFICIENT = "_scaled_dot_product_efficient_attention"


def _given(**arguments):
    """The arguments of an operator that are not left to their defaults."""
    return {name: x for name, x in arguments.items() if x is not None}


def _rows(x):
    return x if x.stride()[-1] == 1 else x.contiguous()


def _refuse(name, given):
    if given:
        raise NotImplementedError(f"{name}: fulgur's scaled_dot_product_attention has none")


def _out_like(query, value):
    """An empty result in the layout of query, as PyTorch's kernels have it."""
    if query.shape[-1] == value.shape[-1] and query.stride(-1) == 1:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _dense(query, key, value, shared):
    """out and lse of tensors (batch, heads, seqlen, dim)."""
    out = _out_like(query, value)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    q, k, v = (_rows(x).transpose(1, 2) for x in (query, key, value))
    named(_NAMES, _operators.forward_into, q, k, v, out.transpose(1, 2), lse, **shared)
    return out, lse


def _dense_backward(grad_out, query, key, value, out, lse, shared):
    tensors = (_rows(x).transpose(1, 2) for x in (grad_out, query, key, value, out))
    grad_out, *tensors = tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    *gradients, _, dbias = named(
        _NAMES, _operators.backward, grad_out, *tensors, lse.contiguous(), **shared, deterministic=deterministic
    )
    return *(x.transpose(1, 2) for x in gradients), dbias


# On the CPU, and in memory-efficient attention, causal masks are aligned at the top left: query i sees key j <= i.


def _top_left(is_causal):
    return {"window_right": 0, "top_left": True} if is_causal else {}


def _stays(query, attn_mask):
    """Whether PyTorch's own kernel computes a call."""
    wants_gradient = attn_mask is not None and attn_mask.requires_grad
    return wants_gradient or query.dtype == torch.float64 or query.shape[-1] > 512


def _bias(attn_mask):
    """A mask (batch, heads, sq, sk) or of fewer dimensions, each of which may be 1."""
    if attn_mask is None:
        return None
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def _cpu_forward(
    torchs, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
    if _stays(query, attn_mask):
        return torchs(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    _refuse("dropout_p", dropout_p > 0)
    shared = _given(scale=scale, bias=_bias(attn_mask)) | _top_left(is_causal)
    out, lse = _dense(query, key, value, shared)
    return out, lse.mT.contiguous().mT  # (batch, seqlen, heads) in memory, as PyTorch's


def _cpu_backward(
    torchs, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None,
    scale=None,
):  # fmt: skip
    if _stays(query, attn_mask):
        return torchs(
            grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask,
            scale=scale,
        )  # fmt: skip
    shared = _given(scale=scale, bias=_bias(attn_mask)) | _top_left(is_causal)
    return _dense_backward(grad_out, query, key, value, out, logsumexp, shared)[:3]


def _is_efficients(query, value, attn_bias, dropout_p):
    """Whether PyTorch's own kernel computes a call of memory-efficient attention: one that may be flash attention's is
    meant for it."""
    columns = max(query.shape[-1], value.shape[-1])
    may_be_flash = attn_bias is None and query.dtype != torch.float32 and columns <= _NARROW
    drops = dropout_p > 0 and columns > _NARROW
    is_turing = query.is_cuda and torch.cuda.get_device_capability(query.device) < (8, 0)
    columns_of = _COLUMNS_OF_TURING if is_turing else _COLUMNS
    return may_be_flash or drops or columns > columns_of.get(query.dtype, 0)


def _efficient_forward(
    torchs, query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    if _is_efficients(query, value, attn_bias, dropout_p):
        return torchs(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale=scale)
    rng_state = rng_state_of(query, dropout_p)
    shared = _given(scale=scale, bias=attn_bias, dropout_p=dropout_p, rng_state=rng_state) | _top_left(is_causal)
    out, lse = _dense(query, key, value, shared)
    # PyTorch's has whole groups of 32 rows, or none where no gradient is wanted.
    rows = query.shape[2]
    lse = torch.nn.functional.pad(lse, (0, -rows % 32)) if compute_log_sumexp else lse[..., :0]
    return out, lse, *rng_state


def _efficient_backward(
    torchs, grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
    grad_input_mask, is_causal=False, *, scale=None,
):  # fmt: skip
    if _is_efficients(query, value, attn_bias, dropout_p):
        return torchs(
            grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
            grad_input_mask, is_causal, scale=scale,
        )  # fmt: skip
    # PyTorch expands a mask to all heads and rows; fulgur sums its gradient over those.
    strides = () if attn_bias is None else attn_bias.stride()
    first = tuple(slice(1) if stride == 0 else slice(None) for stride in strides)
    bias = None if attn_bias is None else attn_bias[first]
    wants_dbias = attn_bias is not None and grad_input_mask[3]
    rng_state = torch.stack((philox_seed, philox_offset)) if dropout_p else None
    shared = _given(scale=scale, bias=bias, dropout_p=dropout_p, rng_state=rng_state)
    shared |= _top_left(is_causal) | {"with_dbias": wants_dbias}
    lse = logsumexp[..., : query.shape[2]]
    *gradients, sums = _dense_backward(grad_out, query, key, value, out, lse, shared)
    if not wants_dbias:
        return *gradients, None
    dbias = torch.zeros_like(attn_bias, memory_format=torch.contiguous_format)
    dbias[first] = sums
    return *gradients, dbias


# In flash attention on CUDA, they are aligned at the bottom right.


def _last_results(q, rng_state):
    """What PyTorch's kernels return at the end: rng_state, an unused one, no probabilities."""
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    return rng_state.view(torch.uint64), unused, q.new_empty(0)


def _cuda_options(dropout_p, rng_state, is_causal, scale, left=None, right=None):
    return _given(
        scale=scale, window_left=left, window_right=0 if is_causal else right, dropout_p=dropout_p,
        rng_state=rng_state,
    )  # fmt: skip


def _cuda_sdpa_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    _refuse("return_debug_mask", return_debug_mask)
    rng_state = rng_state_of(query, dropout_p)
    shared = _cuda_options(dropout_p, rng_state, is_causal, scale)
    out, lse = _dense(query, key, value, shared)
    lengths = query.shape[2], key.shape[2]
    return out, lse, None, None, *lengths, *_last_results(query, rng_state)


def _cuda_sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    shared = _cuda_options(dropout_p, philox_seed.view(torch.int64), is_causal, scale)
    return _dense_backward(grad_out, query, key, value, out, logsumexp, shared)[:3]


def _cuda_shared(
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, rng_state, is_causal, scale, window_size_left,
    window_size_right, seqused_k=None, alibi_slopes=None,
):  # fmt: skip
    options = _cuda_options(
        dropout_p, rng_state, is_causal, scale, window_size_left, window_size_right
    )
    options |= _given(seqused_k=seqused_k, alibi_slopes=alibi_slopes)
    if cum_seq_q is None:
        return options
    # PyTorch says 0 where all sequences are empty, which our operators read as not given.
    return options | _given(
        cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, max_seqlen_q=max(max_q, 1),
        max_seqlen_k=max(max_k, 1),
    )  # fmt: skip


def _cuda_shared_of_forward(
    rng_state, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    block_table=None, num_splits=None,
):  # fmt: skip
    _refuse("return_debug_mask", return_debug_mask)
    _refuse("block_table", block_table is not None)
    return _cuda_shared(
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, rng_state, is_causal, scale,
        window_size_left, window_size_right, seqused_k, alibi_slopes,
    )  # fmt: skip


def _cuda_flash_forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, *rest, **options):
    """Computes tensors (batch, seqlen, heads, dim), or packed ones."""
    rng_state = rng_state_of(query, dropout_p)
    lengths = cum_q, cum_k, max_q, max_k
    shared = _cuda_shared_of_forward(rng_state, *lengths, dropout_p, *rest, **options)
    out, lse = named(_NAMES, _operators.forward, _rows(query), _rows(key), _rows(value), **shared)
    return out, lse, *_last_results(query, rng_state)


def _cuda_flash_forward_inplace(out, query, key, value, *arguments, **options):
    shared = _cuda_shared_of_forward(None, *arguments, **options)
    packed = query.dim() == 3
    rows, heads = query.shape[-3:-1]
    shape = (heads, rows) if packed else (query.shape[0], heads, rows)
    lse = query.new_empty(shape, dtype=torch.float32)
    named(_NAMES, _operators.forward_into, _rows(query), _rows(key), _rows(value), out, lse, **shared)
    return lse


def _cuda_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    shared = _cuda_shared(
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, rng_state.view(torch.int64), is_causal,
        scale, window_size_left, window_size_right,
    )  # fmt: skip
    tensors = (_rows(x) for x in (query, key, value, out, logsumexp))
    deterministic = torch.are_deterministic_algorithms_enabled()
    rows = _rows(grad_out), *tensors
    return named(_NAMES, _operators.backward, *rows, **shared, deterministic=deterministic)[:3]


class _Active:
    """The implementation while it is active."""

    def __init__(self):
        cpu, cuda = (torch.library.Library("aten", "IMPL", key) for key in ("CPU", "CUDA"))
        for name, ours in ((_ON_CPU, _cpu_forward), (f"{_ON_CPU}_backward", _cpu_backward)):
            cpu.impl(name, _before(_torchs(name, "CPU"), ours), "CPU", with_keyset=True)
        for name, ours in ((_EFFICIENT, _efficient_forward), (f"{_EFFICIENT}_backward", _efficient_backward)):
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):  # PyTorch may have no GPUs
                cuda.impl(name, _before(_torchs(name, "CUDA"), ours), "CUDA", with_keyset=True)
        for name, ours in {
            "_scaled_dot_product_flash_attention": _cuda_sdpa_forward,
            "_scaled_dot_product_flash_attention_backward": _cuda_sdpa_backward,
            "_flash_attention_forward": _cuda_flash_forward,
            "_flash_attention_forward_no_dropout_inplace": _cuda_flash_forward_inplace,
            "_flash_attention_backward": _cuda_flash_backward,
        }.items():
            if hasattr(torch.ops.aten, name):  # the third came with PyTorch 2.15
                cuda.impl(name, ours, "CUDA")
        self._libraries = [cpu, cuda]
        self._order = None
        self._prefer_flash()
        torch.cuda._lazy_call(self._prefer_flash_on_cuda)

    def _prefer_flash(self):
        """PyTorch may prefer cuDNN: flash attention is to be asked first."""
        self._order = torch._C._get_sdp_priority_order()
        flash = int(SDPBackend.FLASH_ATTENTION)
        others = [backend for backend in self._order if backend != flash]
        torch._C._set_sdp_priority_order([flash, *others])

    def _prefer_flash_on_cuda(self):
        """The same after PyTorch's first choice on a GPU, which sets the order to that GPU's."""
        if not self._libraries:
            return
        torch._C._set_sdp_priority_order(self._order)
        x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(x, x, x)
        self._prefer_flash()

    def remove(self):
        for library in self._libraries:
            library._destroy()
        self._libraries = []
        torch._C._set_sdp_priority_order(self._order)


def _torchs(name, key):
    return torch.library.get_kernel(f"aten::{name}", key)


def _before(torchs, ours):
    """`ours` with PyTorch's own kernel for the calls that stay with it."""
    return lambda keys, *args, **options: ours(partial(torchs.call_boxed, keys), *args, **options)


register_flash_attention_impl("fulgur", register_fn=_Active)
