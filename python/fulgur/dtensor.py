"""fulgur.torch.attention of DTensors: importing this module tells PyTorch how they may be sharded.

    import fulgur.dtensor

The batch may be sharded (dimension 0; not of packed sequences), and the heads (dimension 2, packed
1) where the device mesh divides those of k. Then every device computes its part, forward and
backward, and nothing is sent. Other placements are gathered first, as PyTorch does it.
"""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import fulgur.torch

__all__ = []


def _shardings(q, k, shared, tensors, results):
    """The acceptable placements of results and arguments; `tensors` are (tensor, "rows" or "lse")."""
    *lengths, slopes, sinks, dropout_p, rng_state, _ = shared
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *numbers = lengths

    def sharding(rows, lse, used, of_slopes, of_sinks, of_dsinks):
        everywhere = Replicate()
        place = {"rows": rows, "lse": lse, "dsinks": everywhere if sinks is None else of_dsinks}
        return (
            [place[kind] for kind in results],
            [
                *(None if x is None else place[kind] for x, kind in tensors),
                *(None if x is None else everywhere for x in (cu_seqlens_q, cu_seqlens_k)),
                *(None if x is None else used for x in (seqused_q, seqused_k)),
                *[None] * len(numbers),
                None if slopes is None else of_slopes,
                None if sinks is None else of_sinks,
                None,
                None if rng_state is None else everywhere,
                None,
            ],
        )

    packed = cu_seqlens_q is not None
    acceptable = [sharding(*[Replicate()] * 6)]
    if dropout_p == 0 and not packed:  # dropout depends on the place in the batch
        slopes_dim = 0 if slopes is None else slopes.ndim
        of_slopes = Shard(0) if slopes_dim == 2 else Replicate()
        acceptable.append(sharding(*[Shard(0)] * 3, of_slopes, Replicate(), Partial()))
    if dropout_p == 0 and k.shape[-2] % q.mesh.size() == 0:  # and on that among the heads
        of_slopes = Shard(0 if slopes is None else slopes.ndim - 1)
        acceptable.append(
            sharding(
                Shard(q.ndim - 2), Shard(0 if packed else 1), Replicate(), of_slopes, Shard(0),
                Shard(0),
            )  # fmt: skip
        )
    return acceptable


@register_sharding(torch.ops.fulgur.forward.default)
def _forward(q, k, v, *shared):
    tensors = [(x, "rows") for x in (q, k, v)]
    return _shardings(q, k, shared, tensors, ("rows", "lse"))


@register_sharding(torch.ops.fulgur.backward.default)
def _backward(dout, dlse, q, k, v, out, lse, *rest):
    *shared, _ = rest
    kinds = ("rows", "lse", "rows", "rows", "rows", "rows", "lse")
    tensors = list(zip((dout, dlse, q, k, v, out, lse), kinds))
    acceptable = _shardings(q, k, shared, tensors, ("rows",) * 3 + ("dsinks",))
    return [(results, [*inputs, None]) for results, inputs in acceptable]
