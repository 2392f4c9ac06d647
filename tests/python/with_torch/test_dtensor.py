"""fulgur.torch.attention of DTensors, and in models under DDP and FSDP, on two processes."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

CODE = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
import fulgur.dtensor
from fulgur.torch import attention

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
q, k, v = torch.randn(4, 6, 4, 8), torch.randn(4, 6, 2, 8), torch.randn(4, 6, 2, 8)
dout, dlse = torch.randn(4, 6, 4, 8), torch.randn(4, 4, 6)
slopes, sinks = torch.rand(4), torch.rand(4)
used = torch.tensor([6, 3, 0, 5], dtype=torch.int32)
used_q = torch.tensor([2, 6, 4, 0], dtype=torch.int32)

def check(placement, of_lse, of_slopes, of_used, quiet, **options):
    whole = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    want = attention(
        *whole[:3], sinks=whole[3], alibi_slopes=slopes, seqused_q=used_q, seqused_k=used, return_lse=True,
        **options,
    )
    expected = torch.autograd.grad(want, whole, (dout, dlse))
    places = (placement, placement, placement, of_slopes)
    parts = [
        distribute_tensor(x, mesh, [place]).requires_grad_() for x, place in zip((q, k, v, sinks), places)
    ]
    given = dict(
        alibi_slopes=distribute_tensor(slopes, mesh, [of_slopes]),
        seqused_q=distribute_tensor(used_q, mesh, [of_used]),
        seqused_k=distribute_tensor(used, mesh, [of_used]),
    )
    results = [distribute_tensor(x, mesh, [y]) for x, y in ((dout, placement), (dlse, of_lse))]
    with CommDebugMode() as sent:
        out, lse = attention(*parts[:3], sinks=parts[3], return_lse=True, **given, **options)
        got = torch.autograd.grad((out, lse), parts, results)
    if quiet:
        assert sent.get_total_counts() == 0, sent.get_comm_counts()
        assert (out.placements, lse.placements) == ((placement,), (of_lse,))
    for a, b in zip((out, lse, *got), (*want, *expected)):
        torch.testing.assert_close(a.full_tensor(), b, atol=1e-5, rtol=1e-5)

check(Shard(0), Shard(0), Replicate(), Shard(0), True, causal=True)
check(Shard(2), Shard(1), Shard(0), Replicate(), True, causal=True)
check(Shard(1), Replicate(), Replicate(), Replicate(), False)  # rows are gathered
dist.destroy_process_group()
os._exit(0)
"""


MODEL = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from fulgur.torch import attention

rank, path, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
torch.set_num_threads(1)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        return x + self.out(attention(q, k, v, causal=True).flatten(-2))

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())

whole, model = make(), make()
batch = torch.randn(4, 9, 32)
whole(batch).square().mean().backward()
if kind == "DDP":
    model = DistributedDataParallel(model)
else:
    mesh = init_device_mesh("cpu", (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
model(batch[2 * rank : 2 * rank + 2]).square().mean().backward()
for got, want in zip(model.parameters(), whole.parameters(), strict=True):
    got = got.grad if kind == "DDP" else got.grad.full_tensor()
    torch.testing.assert_close(got, want.grad, atol=1e-6, rtol=1e-5)
dist.destroy_process_group()
os._exit(0)
"""


def run_two(code, folder, *arguments):
    """Each process leaves by _exit: one was aborted as Python ended, where threads of gloo may still hold tensors."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(folder / "meeting"), *arguments],
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors


@pytest.mark.slow
def test_batch_and_heads_are_sharded(tmp_path):
    run_two(CODE, tmp_path)


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
@pytest.mark.slow
def test_models_train(kind, tmp_path):
    """With the gradients of one process that has the whole batch."""
    run_two(MODEL, tmp_path, kind)
