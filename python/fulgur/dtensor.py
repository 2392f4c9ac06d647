"""fulgur.torch.attention of DTensors: importing this module registers how they may be sharded.

    import fulgur.dtensor

The batch may be sharded (dimension 0; not of packed sequences), and the heads (dimension 2, packed
1) where the device mesh divides those of k. Then every device computes its part, forward and
backward, and nothing is sent. Other placements are gathered first, as PyTorch does it.
"""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from fulgur.torch._operators import by_name

__all__ = []


_ROWS, _LSE = ("dout", "q", "k", "v", "out"), ("lse", "dlse")
_WHOLE = ("cu_seqlens_q", "cu_seqlens_k", "rng_state", "bias")  # on every device


def _shardings(op, args, results):
    """The acceptable placements of results, by their names, and arguments."""
    given = by_name(op, args)
    q, k, slopes, sinks = (given.get(name) for name in ("q", "k", "alibi_slopes", "sinks"))

    def sharding(rows, lse, used, of_slopes, of_sinks, of_dsinks):
        places = dict.fromkeys(_ROWS, rows) | dict.fromkeys(_LSE, lse)
        places |= dict.fromkeys(_WHOLE, Replicate()) | {"seqused_q": used, "seqused_k": used}
        places |= {"alibi_slopes": of_slopes, "sinks": of_sinks}
        of_dsinks = Replicate() if sinks is None else of_dsinks
        of_results = {"rows": rows, "lse": lse, "dsinks": of_dsinks, "dbias": Replicate()}
        return (
            [of_results[name] for name in results],
            [None if x is None else places.get(name) for name, x in given.items()],
        )

    packed = given.get("cu_seqlens_q") is not None
    # Both depend on the place in the batch.
    fixed = given.get("dropout_p", 0) > 0 or given.get("bias") is not None
    acceptable = [sharding(*[Replicate()] * 6)]
    if not fixed and not packed:
        slopes_dim = 0 if slopes is None else slopes.ndim
        of_slopes = Shard(0) if slopes_dim == 2 else Replicate()
        acceptable.append(sharding(*[Shard(0)] * 3, of_slopes, Replicate(), Partial()))
    if not fixed and k.shape[-2] % q.mesh.size() == 0:  # and on that among the heads
        of_slopes = Shard(0 if slopes is None else slopes.ndim - 1)
        acceptable.append(
            sharding(
                Shard(q.ndim - 2), Shard(0 if packed else 1), Replicate(), of_slopes, Shard(0),
                Shard(0),
            )  # fmt: skip
        )
    return acceptable


@register_sharding(torch.ops.fulgur.forward.default)
def _forward(*args):
    return _shardings(torch.ops.fulgur.forward.default, args, ("rows", "lse"))


@register_sharding(torch.ops.fulgur.backward.default)
def _backward(*args):
    return _shardings(torch.ops.fulgur.backward.default, args, ("rows",) * 3 + ("dsinks", "dbias"))
