"""What fulgur is measured with on a GPU: PyTorch's SDPA by cuDNN and by FlashAttention-2, FlashAttention-3 and -4.

A peer is a function of a case and its tensors (gpu_case.py) that returns a function: the forward pass, which gives out,
or the backward pass, which gives dq, dk and dv, on the current stream. What it does not compute it refuses with
RuntimeError or ValueError, at once or in its first run.
"""

import functools
import importlib
import importlib.metadata

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def in_words(error):
    """Why a peer refused."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def leaves(tensors):
    return [tensors[name].detach().requires_grad_() for name in ("q", "k", "v")]


def gradients(out, inputs, dout):
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def sdpa(backend, case, q, k, v):
    if case.lengths or case.window >= 0 or case.deterministic:
        raise ValueError("SDPA takes neither packed sequences nor windows nor `deterministic`")
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=case.causal,
                                            enable_gqa=case.hk != case.heads).transpose(1, 2)


def sdpa_forward(backend, case, tensors):
    return lambda: sdpa(backend, case, tensors["q"], tensors["k"], tensors["v"])


def sdpa_backward(backend, case, tensors):
    inputs = leaves(tensors)
    return gradients(sdpa(backend, case, *inputs), inputs, tensors["dout"])


def flash2_backward(case, tensors):
    """SDPA's, and what lies below it where SDPA has no word for what it can do."""
    if not case.lengths and case.window < 0:
        return sdpa_backward(SDPBackend.FLASH_ATTENTION, case, tensors)
    inputs, starts = leaves(tensors), tensors.get("cu_seqlens_q")
    window = case.window if case.window >= 0 else None
    out = torch.ops.aten._flash_attention_forward(*inputs, starts, starts, case.s, case.s, 0.0, case.causal, False,
                                                  window_size_left=window)[0]
    return gradients(out, inputs, tensors["dout"])


def flash3_out(module, case, tensors, q, k, v, **options):
    """By FlashAttention-3's own functions, or those that are called as they are."""
    if case.window >= 0:
        options["window_size"] = (case.window, 0)
    if case.lengths:
        starts = tensors["cu_seqlens_q"]
        out = module.flash_attn_varlen_func(q, k, v, starts, starts, case.s, case.s, causal=case.causal, **options)
    else:
        out = module.flash_attn_func(q, k, v, causal=case.causal, **options)
    return out[0] if isinstance(out, tuple) else out


def flash3_forward(module, case, tensors):
    return lambda: flash3_out(module, case, tensors, tensors["q"], tensors["k"], tensors["v"])


def flash3_backward(module, case, tensors):
    inputs = leaves(tensors)
    out = flash3_out(module, case, tensors, *inputs, deterministic=case.deterministic)
    return gradients(out, inputs, tensors["dout"])


def flash4_out(module, case, tensors, q, k, v, **options):
    """By FlashAttention-4, which asserts, or fails to compile, where it does not compute a case."""
    if case.window >= 0:
        options["window_size"] = (case.window, 0)
    try:
        if not case.lengths:
            out = module.flash_attn_func(q, k, v, causal=case.causal, **options)
        else:
            starts = tensors["cu_seqlens_q"]
            out = module.flash_attn_varlen_func(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=case.s,
                                                max_seqlen_k=case.s, causal=case.causal, **options)
    except Exception as error:
        raise RuntimeError(in_words(error)) from error
    return out[0] if isinstance(out, tuple) else out


def flash4_forward(module, case, tensors):
    return lambda: flash4_out(module, case, tensors, tensors["q"], tensors["k"], tensors["v"])


def flash4_backward(module, case, tensors):
    inputs = leaves(tensors)
    run = gradients(flash4_out(module, case, tensors, *inputs, deterministic=case.deterministic), inputs,
                    tensors["dout"])
    try:
        run()  # compiles
    except Exception as error:
        raise RuntimeError(in_words(error)) from error
    return run


def call_options(module, case):
    if case.lengths:
        raise ValueError(f"{module.__name__} takes no packed sequences")
    return {"causal": case.causal, "window": (case.window, 0 if case.window >= 0 else -1)}


def calls_forward(module, case, tensors):
    """By a module whose fwd_call and bwd_call give a function that launches, and the tensors that it writes."""
    run, (out, _) = module.fwd_call(tensors["q"], tensors["k"], tensors["v"], **call_options(module, case))
    return lambda: (run(), out)[1]


def calls_backward(module, case, tensors):
    q, k, v, options = tensors["q"], tensors["k"], tensors["v"], call_options(module, case)
    forward, (out, lse) = module.fwd_call(q, k, v, **options)
    forward()
    run, grads = module.bwd_call(tensors["dout"], q, k, v, out, lse, deterministic=case.deterministic, **options)
    return lambda: (run(), grads)[1]


# Modules that may have FlashAttention-3, and how each is called: built from its sources, from PyPI, and after ctypes.
FLASH3 = {
    "forward": {"flash_attn_interface": flash3_forward, "fa3_fwd_interface": flash3_forward,
                "fa3_peer": calls_forward},
    "backward": {"flash_attn_interface": flash3_backward, "fa3_peer": calls_backward},
}
FLASH4 = {"forward": flash4_forward, "backward": flash4_backward}
PYTORCH = {
    "forward": {"cudnn": functools.partial(sdpa_forward, SDPBackend.CUDNN_ATTENTION),
                "flash2": functools.partial(sdpa_forward, SDPBackend.FLASH_ATTENTION)},
    "backward": {"cudnn": functools.partial(sdpa_backward, SDPBackend.CUDNN_ATTENTION), "flash2": flash2_backward},
}


def flash3_module(which):
    """The first of FLASH3 that is installed; None, and a word about it, if none is."""
    for name in FLASH3[which]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    print(f"no {which} pass of FlashAttention-3: python3 has none of {', '.join(FLASH3[which])}", flush=True)
    return None


def flash4_module():
    """FlashAttention-4 where it is installed, or None."""
    try:
        return importlib.import_module("flash_attn.cute")
    except ModuleNotFoundError as error:
        if error.name not in ("flash_attn", "flash_attn.cute"):
            raise
    print("no FlashAttention-4: python3 has no flash_attn.cute", flush=True)
    return None


def peers_of(which):
    """Those of a pass by name, and by name what is installed of those that do not come with PyTorch."""
    peers, installed = dict(PYTORCH[which]), {}
    if flash3 := flash3_module(which):
        peers["flash3"] = functools.partial(FLASH3[which][flash3.__name__], flash3)
        installed["flash3"] = flash3.__name__
    if flash4 := flash4_module():
        peers["flash4"] = functools.partial(FLASH4[which], flash4)
        installed["flash4"] = f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"
    return peers, installed
