"""fulgur.distributed by process groups of PyTorch: rows, gradients, compiled, heads for rows, in context_parallel."""

import pytest
from ranks import run_ranks

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import fulgur.distributed as fd
import fulgur.torch

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
q, dout = (torch.randn(1, 256, 4, 32, dtype=torch.bfloat16) for _ in range(2))
k, v = (torch.randn(1, 256, 2, 32, dtype=torch.bfloat16) for _ in range(2))
sinks = torch.randn(4)
whole = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
out = fulgur.torch.attention(*whole[:3], sinks=whole[3], causal=True, invariant=True)
out.backward(dout)

rows = torch.from_numpy(fd.rows_of("zigzag", 256, size, rank))
group = init_device_mesh("cpu", (size,)) if rank % 2 else dist.group.WORLD
own = [x[:, rows].clone().requires_grad_() for x in (q, k, v)] + [sinks.clone().requires_grad_()]
compute = fd.attention
for attention in (fd.attention, torch.compile(fd.attention, backend="eager")):
    for x in own:
        x.grad = None
    got = attention(*own[:3], sinks=own[3], causal=True, invariant=True, group=group, sharding="zigzag")
    assert torch.equal(got, out[:, rows])
    got.backward(dout[:, rows])
    for x, all_rows in zip(own[:3], whole):
        assert torch.equal(x.grad, all_rows.grad[:, rows])
    assert torch.equal(own[3].grad, whole[3].grad)

# Gradients of what all processes have whole.
bias = torch.randn(1, 4, 256, 256)
table = torch.randn(4, 9)
def mods(table):
    return dict(score_mod="score + table[h, q - k]", tensors={"table": table})
whole = [x.clone().requires_grad_() for x in (q, k, v, bias, table)]
out = fulgur.torch.attention(*whole[:3], bias=whole[3], **mods(whole[4]), invariant=True)
out.backward(dout)
own = [x[:, rows].clone().requires_grad_() for x in (q, k, v)] + [x.clone().requires_grad_() for x in (bias, table)]
got = fd.attention(*own[:3], bias=own[3], **mods(own[4]), invariant=True, group=group, sharding="zigzag")
assert torch.equal(got, out[:, rows])
got.backward(dout[:, rows])
for x, all_rows in zip(own[:3], whole):
    assert torch.equal(x.grad, all_rows.grad[:, rows])
assert torch.equal(own[3].grad, whole[3].grad)
torch.testing.assert_close(own[4].grad, whole[4].grad)
out = fulgur.torch.attention(q, k, v, sinks=sinks, causal=True, invariant=True)

# Processes that seem to be on several machines have PyTorch's messages alone.
fd._machine = lambda: rank
elsewhere = dist.new_group(list(range(size)), backend="gloo")
got = fd.attention(*(x[:, rows] for x in (q, k, v)), sinks=sinks, causal=True, invariant=True, group=elsewhere,
                   sharding="zigzag")
assert torch.equal(got, out[:, rows])

# Heads for rows.
rows = torch.from_numpy(fd.rows_of("contiguous", 256, size, rank))
got = fd.attention(*(x[:, rows] for x in (q, k, v)), sinks=sinks, causal=True, invariant=True, group=group,
                   head_ranks=size)
assert torch.equal(got, out[:, rows])
dist.barrier()
dist.destroy_process_group()
"""

CONTEXT_PARALLEL = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
import fulgur.distributed as fd
import fulgur.torch

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
q, dout = (torch.randn(1, 512, 4, 32, dtype=torch.bfloat16) for _ in range(2))
k, v = (torch.randn(1, 512, 2, 32, dtype=torch.bfloat16) for _ in range(2))
whole = [x.clone().requires_grad_() for x in (q, k, v)]
out = fulgur.torch.attention(*whole, causal=True, invariant=True)
out.backward(dout)

buffers = [x.clone() for x in (q, k, v, dout, torch.arange(512))]
with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1, 1, 0]):
    *own, own_dout, rows = buffers
    assert torch.equal(rows, torch.from_numpy(fd.rows_of("zigzag", 512, size, rank)))
    own = [x.detach().clone().requires_grad_() for x in own]
    got = fd.attention(*own, causal=True, invariant=True, group=mesh, sharding="zigzag")
    got.backward(own_dout)
    assert torch.equal(got, out[:, rows])
    for x, all_rows in zip(own, whole):
        assert torch.equal(x.grad, all_rows.grad[:, rows])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_process_groups():
    run_ranks(SCRIPT, 2)


@pytest.mark.slow
def test_in_context_parallel():
    """Its head-tail rows are those of zigzag, with the bits of one process."""
    run_ranks(CONTEXT_PARALLEL, 2)
