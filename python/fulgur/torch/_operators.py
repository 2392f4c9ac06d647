"""The operators ``torch.ops.fulgur``: schemas, kernels, fake kernels, and errors for tensors without rows."""

import torch

from fulgur import _fulgur
from fulgur._arguments import want_dense
from fulgur.torch._tensors import has_codes

if torch.__version__ < (2, 11):
    raise ImportError(f"fulgur.torch: got PyTorch {torch.__version__}, want 2.11 or newer")

library = torch.library.Library("fulgur", "DEF")
for _schema in _fulgur.torch_schemas():
    library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
library.define(
    "random_numbers(*, Device device) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_fulgur.register_torch_ops()

forward = torch.ops.fulgur.forward.default
forward_into = torch.ops.fulgur.forward_into.default
forward_cached = torch.ops.fulgur.forward_cached.default
backward = torch.ops.fulgur.backward.default
backward_into = torch.ops.fulgur.backward_into.default
append = torch.ops.fulgur.append.default
append_forward = torch.ops.fulgur.append_forward.default
random_numbers = torch.ops.fulgur.random_numbers.default


def by_name(op, arguments):
    """The arguments of a call, or what stands for them, by their names; those at the end, if they
    have their defaults, PyTorch leaves out."""
    return dict(zip((argument.name for argument in op._schema.arguments), arguments))


# What lies where the first tensor of a call does; the others may be on the CPU with a GPU.
_ON_DEVICE_OF_FIRST = {"k", "v", "k_cache", "v_cache", "k_new", "v_new"}


def fake(op):
    """Registers `results`, those of an operator without memory, of its arguments by name."""

    def register(results):
        @torch.library.register_fake(op._name, lib=library)
        def compute(*args):
            given = by_name(op, args)
            tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
            first, device = next((name, x.device) for name, x in tensors.items())
            for name, x in tensors.items():
                # PyTorch comes here for one tensor on meta, too, and the results would be there.
                if x.device != device and (x.device.type == "meta" or name in _ON_DEVICE_OF_FIRST):
                    raise ValueError(f"{name}: got a tensor on {x.device}, want {device} as {first}")
            return results(**given)

        return results

    return register


def empty_out(q, v):
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16 if has_codes(q) else q.dtype)


def empty_lse(q):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    *batch, rows, heads, _ = q.shape
    return q.new_empty((*batch, heads, rows), dtype=dtype)


@fake(forward)
@fake(forward_cached)
def _fake_forward(q, v, **_):
    return empty_out(q, v), empty_lse(q)


@fake(append_forward)
def _fake_append_forward(q, v_cache, **_):
    return _fake_forward(q, v_cache)


@fake(backward)
def empty_gradients(q, k, v, sinks=None, bias=None, with_dbias=False, **_):
    dsinks = q.new_empty((0,)) if sinks is None else q.new_empty(sinks.shape, dtype=sinks.dtype)
    dbias = bias.new_empty(bias.shape) if with_dbias else q.new_empty((0,))
    return *(x.new_empty(x.shape) for x in (q, k, v)), dsinks, dbias


@fake(forward_into)
@fake(backward_into)
@fake(append)
def _fake_into(**_):
    pass


def refuse(op):
    """Registers the error about tensors without rows: PyTorch's own does not say which argument is one."""

    def want_rows(*args):
        for name, x in by_name(op, args).items():
            if isinstance(x, torch.Tensor):
                want_dense(name, x)

    for key in ("AutogradNestedTensor", "MkldnnCPU"):
        library.impl(op, want_rows, key)
    for kind in ("Sparse", "SparseCsr", "Quantized"):
        for device in ("CPU", "CUDA"):
            library.impl(op, want_rows, f"{kind}{device}")


for _op in (
    forward, forward_into, forward_cached, backward, backward_into, append, append_forward,
):  # fmt: skip
    refuse(_op)
