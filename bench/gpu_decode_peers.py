"""What decode calls are measured with: FlashAttention-3, FlashInfer and cuDNN, where python3 has their packages.

A peer is a function of a case and of its tensors, those of each copy of the cache (gpu_decode.py). It returns a
function that gives the out of a copy on the current stream, or None where the package is missing or does not compute
the case. All that a server does once for many layers, plans and graphs, is done before.
"""

import functools
import importlib
import itertools

import torch
from gpu_case import DEVICE

MODULE = "flash_attn_interface"  # FlashAttention-3 with flash_attn_with_kvcache
FLASHINFER_BYTES = 512 << 20  # of its workspace, for the parts of long sequences


def installed(name):
    """A module; None where python3 has none of this name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def flash3(case, tensors):
    call = getattr(installed(MODULE), "flash_attn_with_kvcache", None)
    if not call or case.sinks or case.tree:
        return None

    def run(copy):
        t = tensors[copy]
        out = call(t["q"], t["k"], t["v"], cache_seqlens=t["seqused_k"], page_table=t.get("page_table"), causal=True)
        return out[0] if isinstance(out, tuple) else out

    return run


def flashinfer(case, tensors):
    """Its decode call on tensor cores, over pages only; the kernel is its own choice."""
    module = installed("flashinfer")
    if not module or not case.page or case.sinks or case.tree:
        return None
    counts = [-(-n // case.page) for n in case.used()]
    starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    last = torch.tensor([(n - 1) % case.page + 1 for n in case.used()], dtype=torch.int32)
    workspace = torch.zeros(FLASHINFER_BYTES, dtype=torch.uint8, device=DEVICE)
    runs = []
    for t in tensors:
        pages = torch.cat([row[:count] for row, count in zip(t["page_table"], counts)])
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
        wrapper.plan(starts, pages, last, case.heads, case.kv_heads, case.d, case.page, q_data_type=torch.bfloat16,
                     q_len_per_req=case.queries)
        q = t["q"].flatten(0, 1)
        runs.append(functools.partial(wrapper.run, q, (t["k"], t["v"]), out=torch.empty_like(q)))
    return lambda copy: runs[copy]().view_as(tensors[copy]["q"])


@functools.cache
def cudnn_handle():
    return installed("cudnn").create_handle()


def cudnn(case, tensors):
    """SDPA by cuDNN's frontend, one graph for all copies."""
    module = installed("cudnn")
    if not module or case.tree or (case.sinks and case.queries == 1):
        return None
    queries = torch.full((case.batch, 1, 1, 1), case.queries, dtype=torch.int32, device=DEVICE)

    def named(t):
        """The tensors of a copy by the frontend's names, heads before rows."""
        names = {name: t[name].transpose(1, 2) for name in ("q", "k", "v")}
        names |= {"seq_len_q": queries, "seq_len_kv": t["seqused_k"].view(-1, 1, 1, 1)}
        if case.page:
            names |= dict.fromkeys(("paged_attention_k_table", "paged_attention_v_table"),
                                   t["page_table"].view(case.batch, 1, -1, 1))
        if case.sinks:
            names["sink_token"] = t["sinks"].view(1, -1, 1, 1)
        return names

    copies = [named(t) for t in tensors]
    types = module.data_type
    graph = module.pygraph(io_data_type=types.BFLOAT16, intermediate_data_type=types.FLOAT,
                           compute_data_type=types.FLOAT, handle=cudnn_handle())
    nodes = {name: graph.tensor_like(view) for name, view in copies[0].items()}
    longest = {"paged_attention_max_seq_len_kv": case.keys} if case.page else {}
    out, _ = graph.sdpa(**nodes, **longest, generate_stats=False, attn_scale=case.d**-0.5, use_padding_mask=True,
                        use_causal_mask_bottom_right=case.queries > 1)
    q = copies[0]["q"]
    out.set_output(True).set_dim(q.shape).set_stride(q.stride())
    graph.build([module.heur_mode.A, module.heur_mode.FALLBACK])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=DEVICE)
    outs = [torch.empty_like(t["q"]) for t in tensors]
    packs = [{nodes[name]: view for name, view in views.items()} | {out: mine.transpose(1, 2)}
             for views, mine in zip(copies, outs)]

    def run(copy):
        module.set_stream(handle=cudnn_handle(), stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(packs[copy], workspace, handle=cudnn_handle())
        return outs[copy]

    return run


PEERS = {"flash3": flash3, "flashinfer": flashinfer, "cudnn": cudnn}


def versions():
    """Of the packages that are installed, in words."""
    modules = {"FlashInfer": installed("flashinfer"), "cuDNN's frontend": installed("cudnn")}
    return {name: module.__version__ for name, module in modules.items() if module}
