"""Python's arguments as _fulgur reads them: numbers in range, arrays as views, fresh results."""

import numbers
import operator
import sys

import numpy as np

from fulgur import _fulgur

QKV = ("q", "k", "v")
INT32, INT64, UINT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1), (0, 2**64 - 1)
_CUDA = 2  # DLPack's number of the kind of device
_NUMPY_NAMES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",  # of wrong inputs, for the library to refuse
    "i64": "int64",
}


def flag(name, value):
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {value!r}, want True or False")
    return bool(value)


def real(name, value):
    if not isinstance(value, (float, numbers.Real)):  # float first: numbers.Real takes long to ask
        raise TypeError(f"{name}: got {value!r}, want a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: got {value}, want a finite number") from None


def integer(name, value, low, high):
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, want an integer") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, want {low} to {high}")
    return value


def array_list(name, arrays):
    try:
        return list(arrays)
    except TypeError:
        raise TypeError(f"{name}: got {type(arrays).__name__}, want a sequence of arrays") from None


def options(
    causal, window, chunk, scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic,
    invariant, threads, engine, max_workspace=0,
):  # fmt: skip
    """fulgur::Options."""
    left = right = -1
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window: got {window!r}, want None or (left, right)")
        left, right = (integer("window", side, -1, INT64[1]) for side in window)
    if flag("causal", causal):
        right = 0
    if not isinstance(engine, str):
        raise TypeError(f"engine: got {type(engine).__name__}, want a string")
    return {
        "left": left,
        "right": right,
        "chunk": integer("chunk", chunk, 0, INT64[1]),
        "scale": None if scale is None else real("scale", scale),
        "softcap": real("softcap", softcap),
        "dropout_p": real("dropout_p", dropout_p),
        "max_seqlen_q": integer("max_seqlen_q", max_seqlen_q, *INT64),
        "max_seqlen_k": integer("max_seqlen_k", max_seqlen_k, *INT64),
        "deterministic": flag("deterministic", deterministic),
        "invariant": flag("invariant", invariant),
        "max_workspace": integer("max_workspace", max_workspace, *INT64),
        "threads": integer("threads", threads, *INT32),
        "engine": engine,
    }


def random_numbers(seed, offset):
    """Seed and offset of dropout."""
    return integer("seed", seed, *UINT64), integer("offset", offset, *UINT64)


def _is_torch(array):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_jax(array):
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def _is_cupy(array):
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def run_stream(q, stream):
    """The handle of a call's stream; 0 is the default one."""
    if stream is None:
        return 0 if isinstance(q, np.ndarray) else _fulgur.current_stream(q)
    if hasattr(stream, "__cuda_stream__"):
        _, stream = stream.__cuda_stream__()
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError(
            f"stream: got {stream!r}, want the handle of a CUDA stream, or an object with "
            "__cuda_stream__"
        )
    return integer("stream", stream, *UINT64)


def view(name, array, writable=False, stream=0):
    """A view of the array's memory, on a GPU ready for work on a stream."""
    if isinstance(array, np.ndarray):
        dtype = array.dtype
        bf16 = dtype.kind == "V" and dtype.name == "bfloat16"  # the name alone takes 2 us
        return _fulgur.host_view(name, array.view(np.int16) if bf16 else array, writable, bf16)
    elif _is_torch(array):
        if array.requires_grad:
            raise ValueError(
                f"{name}: requires grad, which is not recorded here; want {name}.detach(), or "
                "fulgur.torch.attention, which records it"
            )
        if array.is_neg():
            raise ValueError(f"{name}: is a negated view, want {name}.resolve_neg()")
        forward_ad = sys.modules["torch"].autograd.forward_ad
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None:
            raise NotImplementedError(
                f"{name}: has a tangent, and fulgur has no derivative in forward mode; want {name}.detach()"
            )
        try:
            return _fulgur.view(name, array, writable, stream)
        except Exception:
            _want_memory(name, array)
            raise
    elif writable and _is_jax(array):
        raise ValueError(f"{name}: got an array of JAX, which never changes; want another one, or fulgur.jax")
    return _fulgur.view(name, array, writable, stream)


def want_dense(name, tensor):
    """Raises for a tensor of PyTorch that has no rows, or others than its shape and strides say."""
    if tensor.is_nested:
        raise TypeError(f"{name}: got a nested tensor, want a dense one")
    if tensor.layout != sys.modules["torch"].strided:
        raise TypeError(f"{name}: got a tensor of layout {tensor.layout}, want a dense one")
    if tensor.is_quantized:
        raise TypeError(f"{name}: got a quantized tensor, want {name}.dequantize()")


def _want_memory(name, tensor):
    """Raises for a tensor of PyTorch that DLPack does not give, in words that name it."""
    torch = sys.modules["torch"]
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise TypeError(f"{name}: got a tensor of torch.func, want fulgur.torch.attention, which goes with it")
    want_dense(name, tensor)
    if tensor.is_meta:
        raise TypeError(f"{name}: got a tensor on meta, want one with memory, or fulgur.torch.attention")


def views(stream=0, **arrays):
    """Views of arrays by name."""
    return {name: view(name, array, stream=stream) for name, array in arrays.items()}


# What a call may take besides, in the order of `extras`; of a backward pass the first row.
_EXTRAS = (
    "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "rng_state",
    "page_table", "page_indptr", "cache_batch_idx", "leftpad_k", "tree_mask", "prefix_groups",
    "prefix_lens",
)  # fmt: skip


def extras(stream, *arrays):
    """Views of those arrays that are given, by name."""
    return {
        name: view(name, array, stream=stream)
        for name, array in zip(_EXTRAS, arrays)
        if array is not None
    }


def given_views(stream, **arrays):
    """Views of further arrays that are given, by name."""
    return {
        name: view(name, array, stream=stream)
        for name, array in arrays.items()
        if array is not None
    }


def planned_views(dtype, device, **given):
    """Views of arrays or, without memory, of shapes by name."""
    for name, x in (("dtype", dtype), ("device", device)):
        if not isinstance(x, str):
            raise TypeError(f"{name}: got {x!r}, want a string")
    return {
        name: (
            _fulgur.planned(name, [integer(name, n, *INT64) for n in x], dtype, device)
            if isinstance(x, (tuple, list))
            else view(name, x)
        )
        for name, x in given.items()
    }


def lse_dtype(dtype):
    """Of the dtype of q."""
    return "f64" if dtype == "f64" else "f32"


def forward_results(q, v):
    """(shape, dtype) of out and lse by name."""
    out, dtype = q.shape[:-1] + v.shape[-1:], q.dtype
    lse = (*out[:-3], out[-2], out[-3]) if len(out) >= 3 else out
    return {"out": (out, dtype), "lse": (lse, lse_dtype(dtype))}


def backward_results(q, k, v, sinks):
    """(shape, dtype) of dq, dk and dv by name, and of dsinks where there are sinks."""
    results = {"d" + name: (x.shape, x.dtype) for name, x in zip(QKV, (q, k, v))}
    return results if sinks is None else results | {"dsinks": (sinks.shape, "f32")}


def planned_results(results, given, device):
    """Views to plan with: of the arrays given, contiguous on a device where there is none."""
    return {
        name: (
            _fulgur.planned(name, shape, dtype, device)
            if given[name] is None
            else view(name, given[name], writable=True)
        )
        for name, (shape, dtype) in results.items()
    }


def empty(shape, dtype, like):
    """A torch tensor if `like` is one, on a GPU an array of the library of `like`, or NumPy's."""
    dtype = _NUMPY_NAMES[dtype]
    if _is_torch(like):
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    on_gpu = not isinstance(like, np.ndarray) and _on_gpu(like)
    if on_gpu and hasattr(like, "__array_namespace__"):
        namespace = like.__array_namespace__()
        return namespace.empty(shape, dtype=getattr(namespace, dtype), device=like.device)
    if dtype == "bfloat16":
        from ml_dtypes import bfloat16 as dtype
    if not on_gpu:
        return np.empty(shape, dtype)
    if not _is_cupy(like):  # which has no __array_namespace__, as of version 14
        raise TypeError(
            f"q: got {type(like).__name__} on a GPU, whose library has no __array_namespace__ "
            "to make results with; want PyTorch's or CuPy's arrays, or results to write to"
        )
    with like.device:
        return sys.modules["cupy"].empty(shape, dtype)


def _on_gpu(array):
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and device()[0] == _CUDA


def of_kind(like, array):
    """A fresh array in the array library of `like`, if it is one."""
    if isinstance(like, np.ndarray) or not isinstance(array, np.ndarray):
        return array
    namespace = getattr(like, "__array_namespace__", None)
    return array if namespace is None else namespace().asarray(array)


def filled(results, given, like, fill, stream=0):
    """The arrays of `results` in their order, after `fill` has written to their views by name.

    Those given are the very same, the others fresh and of the kind of `like`.
    """
    arrays, views = {}, {}
    for name, (shape, dtype) in results.items():
        array = empty(shape, dtype, like) if given[name] is None else given[name]
        arrays[name], views[name] = array, view(name, array, True, stream)
    fill(views)
    return tuple(
        [of_kind(like, x) if given[name] is None else x for name, x in arrays.items()]
    )
