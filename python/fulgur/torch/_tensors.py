"""What the functions of fulgur.torch check and change of their tensors."""

import torch
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.autograd import forward_ad

from fulgur._arguments import want_dense


CODES = frozenset((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))


def has_codes(*tensors):
    return any([getattr(x, "dtype", None) in CODES for x in tensors])


def whole_rows(name, x):
    """A tensor with rows in one piece."""
    try:
        return x if x.stride()[-1] == 1 else x.contiguous()
    except AttributeError:
        raise TypeError(f"{name}: got {type(x).__name__}, want a tensor") from None
    except IndexError:
        raise ValueError(f"{name}: got a tensor of no dimensions, want rows") from None
    except RuntimeError:
        want_dense(name, x)
        raise


def autocasts(q):
    """Whether autocast casts a call with these queries."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = q.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind) and q.dtype != torch.float64


def cast_to_cache(k_cache, *rows):
    """Rows that go with a cache, under autocast in its dtype: what lies in the cache stays as it is."""
    casts = not has_codes(k_cache)
    return [x.to(k_cache.dtype) if casts and x is not None and autocasts(x) else x for x in rows]


def sides(window):
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: got {window!r}, want None or (left, right)")
    return window


def want_constant(name, x):
    if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
        raise ValueError(f"{name}: requires grad, and gets none; want {name}.detach()")


def _requires_grad(x):
    """Whether x, or what vmap maps to it, requires grad: inside of vmap x alone does not say so."""
    while isinstance(x, torch.Tensor) and is_batchedtensor(x):
        x = get_unwrapped(x)
    return getattr(x, "requires_grad", False)


def want_no_gradient(of="caches", **tensors):
    """Nothing records one, in either mode, and what is not recorded would be 0."""
    if forward_ad._current_level >= 0:
        for name, x in tensors.items():
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(f"{name}: has a tangent, and {of} have no gradient")
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if _requires_grad(x):
            raise ValueError(
                f"{name}: requires grad, and {of} have no gradient; want torch.no_grad() or "
                f"{name}.detach()"
            )
