#!/usr/bin/env python3
"""Others' context parallelism on fulgur's drop-in modules: ring-flash-attention and DeepSpeed's Ulysses.

    pip install --no-deps ring-flash-attn deepspeed
    tools/context_parallel_suite.py 2          # processes, on the CPU; a GPU each where there are so many

Their functions share out a call among the processes and call flash_attn, which is fulgur's here; results and gradients
are compared with those of one process in float64. What is not installed is named.
"""

import os
import socket
import subprocess
import sys
import types

S, HEADS, KV_HEADS, D = 512, 8, 4, 64
BOUND = 0.02  # of bf16 partial results, of values of about 1


def ring_flash_attention():
    """The module, without its adapter of old versions of transformers."""
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    import ring_flash_attn

    return ring_flash_attn


def compare(name, torch, rows, whole, attention):
    """Prints whether what `attention` makes of the rows of this process are those of the whole call."""
    q, k, v, dout = (x[:, rows].to(torch.bfloat16).contiguous() for x in whole[:4])
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*inputs)
    out.backward(dout)
    worst = max(
        ((got.double() - want[:, rows]).abs().max() / want.abs().max().clamp(min=1)).item()
        for got, want in zip((out, *(x.grad for x in inputs)), whole[4:])
    )
    worst = torch.tensor(worst, device=q.device)
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    if torch.distributed.get_rank() == 0:
        print(f"{name}: {'passed' if worst <= BOUND else 'FAILED'}, off by {worst:.4f}", flush=True)
    return worst <= BOUND


def rank_of(rank, size):
    import torch
    import torch.distributed as dist

    import fulgur

    fulgur.install_as("flash_attn")
    cuda = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    q, dout = (torch.randn(1, S, HEADS, D).to(torch.bfloat16).double() for _ in range(2))
    k, v = (torch.randn(1, S, KV_HEADS, D).to(torch.bfloat16).double() for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(HEADS // KV_HEADS, 2)) / D**0.5
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(HEADS // KV_HEADS, 2))
    gradients = torch.autograd.grad(out, inputs, dout)
    whole = [x.detach().to(device) for x in (q, k, v, dout, out, *gradients)]
    run, part, all_rows = S // size, S // (2 * size), torch.arange(S)
    contiguous = all_rows[rank * run : (rank + 1) * run]
    zigzag = torch.cat([all_rows[i * part : (i + 1) * part] for i in (rank, 2 * size - 1 - rank)])
    passed = True

    def tried(name, rows, make):
        nonlocal passed
        try:
            attention = make()
        except ImportError as error:
            if rank == 0:
                print(f"{name}: not run: {error}", flush=True)
            return
        passed &= bool(compare(name, torch, rows.to(device), whole, attention))

    def ring(function):
        def make():
            attention = getattr(ring_flash_attention(), function)
            return lambda *x: attention(*x, causal=True)

        return make

    def llama3():
        module = ring_flash_attention()
        starts = torch.tensor([0, S], dtype=torch.int32, device=device)
        *lengths, keys = module.llama3_flash_attn_prepare_cu_seqlens(starts, True, rank, size)
        return lambda *x: module.llama3_flash_attn_varlen_func(
            *(t[0] for t in x), *lengths, heads_k_stride=1, local_k_slice=keys, causal=True
        )[None]

    def ulysses():
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
        import deepspeed.comm
        from deepspeed.sequence.layer import DistributedAttention
        from flash_attn import flash_attn_func

        deepspeed.comm.init_distributed("nccl" if cuda else "gloo", dist_init_required=False)
        attention = DistributedAttention(flash_attn_func, dist.group.WORLD, scatter_idx=2, gather_idx=1)
        return lambda *x: attention(*x, 0, causal=True)  # 0: the dimension of the batch

    tried("ring-flash-attention, ring", contiguous, ring("ring_flash_attn_func"))
    tried("ring-flash-attention, zigzag", zigzag, ring("zigzag_ring_flash_attn_func"))
    tried("ring-flash-attention, stripe", all_rows[rank::size], ring("stripe_flash_attn_func"))
    tried("ring-flash-attention, llama3", contiguous, llama3)
    tried("DeepSpeed, Ulysses", contiguous, ulysses)
    dist.destroy_process_group()
    return 0 if passed else 1


def main():
    if "RANK" in os.environ:
        sys.exit(rank_of(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = dict(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_SIZE=str(size))
    ranks = [
        subprocess.Popen([sys.executable, __file__], env=os.environ | given | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(size)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
