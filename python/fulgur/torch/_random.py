"""The random numbers of dropout: an operator of its own, whose results both passes share."""

import torch
from torch._C._functorch import _add_batch_dim
from torch._functorch import config as functorch_config
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, proxy_call
from torch.utils.checkpoint import CheckpointPolicy

from fulgur.torch import _operators
from fulgur.torch._operators import library


@torch.library.impl(_operators.random_numbers._name, "BackendSelect", lib=library)
def _draw(*, device):
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=device)


@torch.library.register_fake(_operators.random_numbers._name, lib=library)
def _fake_random_numbers(*, device):
    return torch.empty((2,), dtype=torch.int64, device=device)


_VMAP_MODE = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)


@torch.library.impl(_operators.random_numbers._name, "FuncTorchVmapMode", lib=library)
def _vmap_random_numbers(*, device):
    """Decides by the randomness of vmap alone, as PyTorch's random operators do, whatever is mapped."""
    vmap = retrieve_current_functorch_interpreter()
    randomness = vmap.randomness()
    if randomness == "error":
        raise RuntimeError("dropout_p: vmap(randomness='error'); want 'different'")
    with torch._C._ExcludeDispatchKeyGuard(_VMAP_MODE):
        if randomness == "same":
            return _operators.random_numbers(device=device)
        numbers = torch.stack([_operators.random_numbers(device=device) for _ in range(vmap.batch_size())])
    return _add_batch_dim(numbers, 0, vmap.level())


def _trace_random_numbers(mode, func, types, args, kwargs):
    """Records the operator so that no partition of a training graph draws the numbers again.

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
    _operators.random_numbers._name, ProxyTorchDispatchMode, _trace_random_numbers, lib=library
)


def random_numbers(q):
    """Seed and offset of dropout, int64 ``(2,)``, from PyTorch's generator of q's device."""
    return _operators.random_numbers(device=q.device)


def rng_state_of(q, dropout_p):
    """Seed and offset for both passes of a call; 0 where it has no dropout, and the generator stays as it is."""
    return random_numbers(q) if dropout_p else q.new_zeros(2, dtype=torch.int64)
