"""Python's arguments as _fulgur reads them: numbers in range, arrays as views, fresh results."""

import numbers
import operator
import sys

import numpy as np

from fulgur import _fulgur

QKV = ("q", "k", "v")
INT32, INT64, UINT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1), (0, 2**64 - 1)
_CUDA = 2  # DLPack's number of the kind of device
# DLPack's numbers of dtypes that ml_dtypes gives to NumPy, whose own numbers are less than _ML_DTYPES.
_DLPACK_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
_ML_DTYPES = 256
FLOATS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}
_NUMPY_NAMES = FLOATS | {
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "int8": "int8",
    "u8": "uint8",
    "i32": "int32",  # of wrong inputs, for the library to refuse
    "i64": "int64",
    "bool": "bool",
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


def _option(name, value, default):
    """An option of the kind of its default; None, that of scale, is any number."""
    if isinstance(default, bool):
        return flag(name, value)
    if isinstance(default, int):
        return integer(name, value, *INT64)
    return None if value is None and default is None else real(name, value)


_OPTIONS = _fulgur.option_defaults()


def text(name, value):
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {value!r}, want a string")
    return value


def card(given):
    return text("card", given.get("card", ""))


def options(given):
    """fulgur::Options of the arguments that a call is given."""
    result = {**_OPTIONS, "threads": 0, "engine": "", "algorithm": ""}
    for name, value in given.items():
        if name in _OPTIONS:
            result[name] = _option(name, value, _OPTIONS[name])
    window = given.get("window")
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window: got {window!r}, want None or (left, right)")
        left, right = (integer("window", side, -1, INT64[1]) for side in window)
        result["window_left"], result["window_right"] = left, right
    if flag("causal", given.get("causal", False)):
        result["window_right"] = 0
    if "chunk" in given and result["chunk"] < 0:
        raise ValueError(f"chunk: got {result['chunk']}, want 0 to {INT64[1]}")
    if "threads" in given:
        result["threads"] = integer("threads", given["threads"], *INT32)
    for name in ("engine", "algorithm"):
        result[name] = text(name, given.get(name, ""))
    return result


def random_numbers(given):
    """Seed and offset of dropout."""
    return tuple([integer(x, given.get(x, 0), *UINT64) for x in ("seed", "offset")])


def return_lse(given):
    return flag("return_lse", given.get("return_lse", False))


def interleaved(given):
    return flag("interleaved", given.get("interleaved", False))


def _is_torch(array):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_jax(array):
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def _is_cupy(array):
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def in_host_memory(array):
    """The array, or a copy of one on a GPU."""
    if _is_torch(array):
        return array.cpu()
    if _is_cupy(array):
        return array.get()
    return np.asarray(array) if _is_jax(array) else array


def run_stream(q, given):
    """The handle of a call's stream; 0 is the default one."""
    stream = given.get("stream")
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
        if dtype.kind in "Vf" and dtype.num >= _ML_DTYPES:  # the name alone takes 2 us
            code = _DLPACK_CODES.get(dtype.name)
            if code is not None:
                return _fulgur.host_view(name, array.view(f"i{dtype.itemsize}"), writable, code)
        return _fulgur.host_view(name, array, writable, 0)
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


class OfCodes:
    """Stands for an array of codes: `views(name, stream)` are those of the codes and of what makes numbers of them;
    `rotated`: those are of rows that hadamard() has rotated."""

    __slots__ = ()


def _is_rotated(array):
    return isinstance(array, OfCodes) and array.rotated


def of_rotated_keys(options, q=None, **keys_and_values):
    """The options of a call whose k, or k_cache, may be codes of rotated keys."""
    (k_name, k), (v_name, v) = keys_and_values.items()
    if _is_rotated(v):
        raise ValueError(f"{v_name}: got rotated codes, want those of q and k alone: out would be rotated")
    rotated = _is_rotated(k) or (options["hadamard"] and not isinstance(k, OfCodes))
    if isinstance(q, OfCodes) and q.rotated != rotated:
        one, other = ("q", k_name) if q.rotated else (k_name, "q")
        raise ValueError(f"{other}: got rows that are not rotated, want fulgur.quantize(..., rotate=True) as of {one}")
    if options["hadamard"] and not rotated:
        raise ValueError(f"hadamard: given with codes in {k_name} that are not rotated, want rotated=True of them")
    return options | {"hadamard": rotated}


def views(stream=0, **arrays):
    """Views of arrays by name, and of what comes with those that are quantized."""
    found = {}
    for name, array in arrays.items():
        if isinstance(array, OfCodes):
            found |= array.views(name, stream)
        else:
            found[name] = view(name, array, stream=stream)
    return found


def written(name, array, stream=0):
    """Views of an array that a call writes to, and of what comes with it where it is quantized."""
    if isinstance(array, OfCodes):
        return array.views(name, stream, writable=True)
    return {name: view(name, array, True, stream)}


def with_given(found, stream, names, given):
    """`found` and the views of those arrays with these names that a call is given, which it has once."""
    more = given_views(stream, names, given)
    for name in found.keys() & more.keys():
        raise ValueError(f"{name}: given with a Quantized {name[0]}, which brings its own")
    return found | more


def given_views(stream, names, given):
    """Views of those arrays with these names that a call is given."""
    return {
        name: view(name, given[name], stream=stream)
        for name in names
        if given.get(name) is not None
    }


def planned_views(given, **arrays):
    """Views of arrays or, without memory, of shapes by name."""
    dtype = text("dtype", given.get("dtype", "f32"))
    if dtype not in FLOATS:
        raise ValueError(f"dtype: got '{dtype}', want 'f32', 'bf16', 'f16' or 'f64'")
    device = text("device", given.get("device", "cuda" if card(given) else "cpu"))
    found = {}
    for name, x in arrays.items():
        if isinstance(x, (tuple, list)):
            found[name] = _fulgur.planned(name, [integer(name, n, *INT64) for n in x], dtype, device)
        else:
            found |= views(0, **{name: x})
    return found


def lse_dtype(dtype):
    """Of the dtype of q."""
    return "f64" if dtype == "f64" else "f32"


def forward_results(q, v, with_lse):
    """(shape, dtype) of out by name, and of lse."""
    out, dtype = q.shape[:-1] + v.shape[-1:], q.dtype
    if dtype in ("e4m3", "e5m2"):
        dtype = "bf16"  # as FlashAttention-3 has it
    results = {"out": (out, dtype)}
    if with_lse:
        lse = (*out[:-3], out[-2], out[-3]) if len(out) >= 3 else out
        results["lse"] = (lse, lse_dtype(dtype))
    return results


def backward_results(views, given):
    """(shape, dtype) of dq, dk and dv by name, of dsinks where there are sinks, and of a dbias that is given."""
    results = {"d" + name: (views[name].shape, views[name].dtype) for name in QKV}
    if "sinks" in views:
        results["dsinks"] = (views["sinks"].shape, views["sinks"].dtype)
    elif given.get("dsinks") is not None:
        raise ValueError("dsinks: given without sinks")
    if given.get("dbias") is not None:
        if "bias" not in views:
            raise ValueError("dbias: given without bias")
        results["dbias"] = (views["bias"].shape, "f32")
    return results


def planned_results(results, given, device):
    """Views to plan with: of the arrays given, contiguous on a device where there is none."""
    return {
        name: (
            _fulgur.planned(name, shape, dtype, device)
            if given.get(name) is None
            else view(name, given[name], writable=True)
        )
        for name, (shape, dtype) in results.items()
    }


def empty(shape, dtype, like):
    """A torch tensor if `like` is one, on a GPU an array of the library of `like`, or NumPy's."""
    dtype = _NUMPY_NAMES[dtype]
    if _is_torch(like):
        return like.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))
    is_on_gpu = not isinstance(like, np.ndarray) and on_gpu(like)
    if is_on_gpu and hasattr(like, "__array_namespace__"):
        namespace = like.__array_namespace__()
        return namespace.empty(shape, dtype=getattr(namespace, dtype), device=like.device)
    if dtype in _DLPACK_CODES:
        import ml_dtypes

        dtype = getattr(ml_dtypes, dtype)
    if not is_on_gpu:
        return np.empty(shape, dtype)
    if not _is_cupy(like):  # which has no __array_namespace__, as of version 14
        raise TypeError(
            f"q: got {type(like).__name__} on a GPU, whose library has no __array_namespace__ "
            "to make results with; want PyTorch's or CuPy's arrays, or results to write to"
        )
    with like.device:
        return sys.modules["cupy"].empty(shape, dtype)


def on_gpu(array):
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
    if isinstance(like, OfCodes):
        like = like.codes
    for name, (shape, dtype) in results.items():
        array = given.get(name)
        if array is None:
            array = empty(shape, dtype, like)
        arrays[name], views[name] = array, view(name, array, True, stream)
    fill(views)
    return tuple(
        [of_kind(like, x) if given.get(name) is None else x for name, x in arrays.items()]
    )
