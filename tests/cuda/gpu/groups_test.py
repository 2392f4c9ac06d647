"""fulgur.distributed with PyTorch on the GPUs of this machine: python3 tests/cuda/gpu/groups_test.py, with fulgur and
torch importable. Ranks share a GPU where there are fewer."""

import os
import socket
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fulgur.distributed
from fulgur.torch import attention

MAKE = dict(dtype=torch.bfloat16, requires_grad=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rows_and_gradients(q, k, v, dout, compute):
    out = compute(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def compare(rank, ranks, case):
    """Out and gradients of this rank's rows with those of one GPU."""
    sharding, head_ranks, invariant, options = case
    n, hq, hk, d = 700, 8, 4, 64
    torch.manual_seed(0)
    shapes = (2, n, hq, d), (2, n, hk, d), (2, n, hk, d)
    q, k, v = (torch.randn(s, device="cuda", **MAKE) for s in shapes)
    dout = torch.randn(2, n, hq, d, device="cuda", dtype=torch.bfloat16)
    options = options | dict(invariant=invariant)
    want = rows_and_gradients(q, k, v, dout, lambda q, k, v: attention(q, k, v, **options))
    rows = torch.as_tensor(fulgur.distributed.rows_of(sharding, n, ranks, rank), device="cuda")
    own = [x.detach()[:, rows].requires_grad_() for x in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = rows_and_gradients(
            *own, dout[:, rows],
            lambda q, k, v: fulgur.distributed.attention(
                q, k, v, group=dist.group.WORLD, sharding=sharding, head_ranks=head_ranks, **options
            ),
        )  # fmt: skip
    torch.cuda.current_stream().wait_stream(stream)
    for name, mine, whole in zip(("out", "dq", "dk", "dv"), got, want):
        of_rank = whole[:, rows]
        difference = (mine.float() - of_rank.float()).abs().max().item()
        same = torch.equal(mine, of_rank)
        assert same if invariant else difference < 0.05, f"rank {rank}, {case}, {name}: {difference}"


def refuse(rank, ranks, case):
    """An error of one rank is that of all, and the group goes on."""
    q = torch.randn(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16)
    k = q[:, :, : 4 - rank]
    try:
        fulgur.distributed.attention(q, k, k, group=dist.group.WORLD)
    except ValueError as error:
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("no error")
    fulgur.distributed.attention(q, q, q, group=dist.group.WORLD)


def run_rank(rank, ranks, port, backend, work, cases):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    for case in cases:
        work(rank, ranks, case)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


CASES = [
    ("zigzag", 1, True, dict(causal=True)),
    ("zigzag", 1, False, dict(causal=True)),
    ("contiguous", 1, True, dict(window=(100, 30))),
    ("zigzag", 2, True, dict(causal=True)),
    ("contiguous", 2, False, dict()),
]


class Groups(unittest.TestCase):
    def test_gloo(self):
        for ranks in (2, 4):
            mp.spawn(run_rank, (ranks, free_port(), "gloo", compare, CASES), nprocs=ranks)

    def test_nccl(self):
        ranks = torch.cuda.device_count()
        if ranks < 2:
            self.skipTest("NCCL wants a GPU for each rank")
        ranks -= ranks % 2
        mp.spawn(run_rank, (ranks, free_port(), "nccl", compare, CASES), nprocs=ranks)

    def test_errors(self):
        mp.spawn(run_rank, (2, free_port(), "gloo", refuse, [None]), nprocs=2)


if __name__ == "__main__":
    unittest.main()
