"""Low-bit formats: arrays to codes and back."""

import operator

from fulgur import _arguments as _a
from fulgur import _fulgur

_SCALES = ("tensor", "head", "token")


class Quantized(_a.OfCodes):
    """Numbers as codes of a low-bit format, and what scales them; may stand for k or v of
    :func:`attention`.

    Made by :func:`quantize`, or of arrays that are there: a cache of bytes, or of float8.

    ``format``: its name. ``codes``: of float8 or int8 in the shape of the numbers; of the other formats
    uint8, whose last dimension counts the bytes of a row. ``scale``, ``zero_point``: as k_descale and
    k_zero_point of :func:`attention`, or None. ``dtype``: what :meth:`dequantize` gives. ``rotated``: the codes
    are those of :func:`hadamard` of the numbers. With such a k attention rotates a q of floats, too, and append the
    new keys. ``mean``: what the rows have besides, of keys: float32 ``(batch, hk, d)``, of which batch may be 1, or
    None. append keeps it.

    >>> import numpy as np, fulgur
    >>> x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 1, 1, 64)
    >>> y = fulgur.quantize(x, "q4_0")
    >>> y, y.codes.shape
    (Quantized('q4_0', (1, 1, 1, 64)), (1, 1, 1, 36))
    """

    __slots__ = ("format", "codes", "scale", "zero_point", "mean", "dtype", "rotated", "_view")

    def __init__(self, format, codes, scale=None, zero_point=None, *, mean=None, dtype="f32", rotated=False):
        if not isinstance(format, str):
            raise TypeError(f"format: got {format!r}, want a name")
        self.format, self.codes, self.scale, self.zero_point = format, codes, scale, zero_point
        self.mean, self.dtype, self.rotated = mean, dtype, rotated
        self._view = _a.view("codes", codes).as_format(format, "codes")

    def __getstate__(self):  # of pickle and copy: the view is of the memory of these codes
        options = {"mean": self.mean, "dtype": self.dtype, "rotated": self.rotated}
        return self.format, self.codes, self.scale, self.zero_point, options

    def __setstate__(self, state):
        *arrays, options = state
        self.__init__(*arrays, **options)

    @property
    def shape(self):
        """Of the numbers."""
        return self._view.shape

    def __repr__(self):
        return f"Quantized({self.format!r}, {self.shape})"

    def views(self, name, stream=0, writable=False):
        """Views of the codes and of what makes numbers of them, by the names that a call has for them."""
        found = {name: _a.view(name, self.codes, writable, stream).as_format(self.format, name)}
        for what, array in (("descale", self.scale), ("zero_point", self.zero_point)):
            if array is not None:
                found[f"{name}_{what}"] = _a.view(f"{name}_{what}", array, writable, stream)
        if self.mean is not None:
            if not name.startswith("k"):
                raise ValueError(f"{name}: got codes less their mean, want those of k alone")
            found[f"{name}_mean"] = _a.view(f"{name}_mean", self.mean, stream=stream)
        return found

    def dequantize(self, dtype=None, *, threads=0, stream=None):
        """The numbers, a fresh array: "f32", "bf16", "f16" or "f64"; default what was quantized. ``threads`` and
        ``stream`` as of :func:`quantize`."""
        stream = _a.run_stream(self.codes, {"stream": stream})
        x = _a.empty(self.shape, dtype or self.dtype, self.codes)
        codes = _a.view("codes", self.codes, stream=stream).as_format(self.format, "codes")
        views = {"x": _a.view("x", x, True, stream), "codes": codes}
        of_codes = {"scale": self.scale, "zero_point": self.zero_point, "mean": self.mean}
        views |= _a.given_views(stream, of_codes, of_codes)
        _fulgur.dequantize(views, _a.integer("threads", threads, *_a.INT32), stream)
        x = _a.of_kind(self.codes, x)
        return hadamard(x, inverse=True, threads=threads, stream=stream) if self.rotated else x


def hadamard(x, *, inverse=False, dtype=None, threads=0, stream=None):
    """Rows rotated by a Hadamard matrix with fixed signs, so that no column is much larger than the others.

    Products of two rows are as before: scores of q and k that are both rotated are those of q and k, and their codes
    are nearer to them where a few numbers are large.

    Args:
        x: ``(batch, seqlen, heads, dim)`` or ``(total, heads, dim)``: float32, bfloat16, float16 or, on the CPU,
            float64. Each n columns are rotated, n the largest power of two that divides dim and is at most 512.
        inverse: True: x is a result, and is rotated back.
        dtype: of the result: "f32", or that of x, the default.
        threads, stream: as of :func:`quantize`.

    Returns:
        A fresh array of the kind of x.

    >>> import numpy as np, fulgur
    >>> x = np.zeros((1, 1, 1, 64), np.float32)
    >>> x[..., 5] = 8
    >>> y = fulgur.hadamard(x)
    >>> np.unique(abs(y)), np.array_equal(fulgur.hadamard(y, inverse=True), x)
    (array([1.], dtype=float32), True)
    """
    stream = _a.run_stream(x, {"stream": stream})
    view = _a.view("x", x, stream=stream)
    y = _a.empty(view.shape, dtype or view.dtype, x)
    views = {"x": view, "y": _a.view("y", y, True, stream)}
    _fulgur.hadamard(views, _a.flag("inverse", inverse), _a.integer("threads", threads, *_a.INT32), stream)
    return _a.of_kind(x, y)


def _scale_shape(x, scale, format):
    """The shape of the scales of an array of these numbers."""
    if scale == "tensor":
        return (1,)
    if scale == "head":
        return (x.shape[0] if len(x.shape) == 4 else 1, x.shape[-2])
    if scale == "token":
        return (*x.shape[:-1], 1)
    try:
        columns = operator.index(scale)
    except TypeError:
        raise TypeError(
            f"scale: got {scale!r}, want {', '.join(map(repr, _SCALES))}, a number of columns, or an array"
        ) from None
    if columns < 1 or x.shape[-1] % columns != 0:
        raise ValueError(f"scale: got groups of {columns} columns, want a divisor of {x.shape[-1]}")
    return (*x.shape[:-1], x.shape[-1] // columns)


def quantize(
    x, format, *, scale=None, zero_point=None, scale_dtype="f32", mean=None, rotate=False, threads=0, stream=None
):
    """Numbers as codes of a low-bit format, by the largest of those that share a scale.

    Args:
        x: ``(batch, seqlen, heads, dim)``, ``(pages, page, heads, dim)`` or ``(total, heads, dim)``: float32,
            bfloat16, float16 or, on the CPU, float64.
        format: "e4m3", "e5m2", "int8", "int4", or of ggml "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl",
            whose blocks of 32 columns have their scales in themselves.
        scale: what shares a scale: "tensor" all of x, "head" a head of a sequence, "token" (the default) a row
            of a head, a number of columns, a multiple of 16, of a row. Or an array of scales that are there.
        zero_point: True: codes of int8 and int4 begin at the smallest number. Or an array, with one for scale.
        scale_dtype: "f32" or "f16".
        mean: True: of k, codes are of what its rows have beyond their mean over the sequence, for each head and column,
            which :func:`attention` knows of: columns that are far from 0 have finer codes. Or an array of means.
        rotate: True: the codes are those of :func:`hadamard` of x, whose large numbers are spread over the columns. For
            k, with which attention rotates a q of floats, or for k and q.
        threads: 0 is OMP_NUM_THREADS or all cores.
        stream: as of :func:`attention`, where x is on a GPU.

    Returns:
        A :class:`Quantized`, with fresh arrays of the kind of x. docs/contract.md says what is computed.

    Raises:
        ValueError, TypeError: an argument is wrong.

    >>> import numpy as np, fulgur
    >>> x = np.array([1, -2, 3, 127], np.float32).reshape(1, 1, 1, 4)
    >>> fulgur.quantize(x, "int8").codes.ravel()
    array([  1,  -2,   3, 127], dtype=int8)
    >>> q, k, v = (np.ones((1, 3, 2, 64), np.float32) for _ in range(3))
    >>> fulgur.attention(q, fulgur.quantize(k, "e4m3"), fulgur.quantize(v, "q8_0"))[0, 0, 0, 0].round(3)
    np.float32(1.0)
    """
    stream = _a.run_stream(x, {"stream": stream})
    view = _a.view("x", x, stream=stream)
    dtype_of_x = view.dtype
    if _a.flag("rotate", rotate):
        x = hadamard(x, dtype="f32", threads=threads, stream=stream)
        view = _a.view("x", x, stream=stream)
    if not isinstance(format, str):
        raise TypeError(f"format: got {format!r}, want a name")
    block, size, dtype, scaled = _fulgur.format(format)
    if len(view.shape) not in (3, 4):
        raise ValueError(
            f"x: got {len(view.shape)} dimensions, want (batch, seqlen, heads, dim) or (total, heads, dim)"
        )
    if view.shape[-1] % block != 0:
        raise ValueError(f"x: got head dim {view.shape[-1]}, want a multiple of {block}, the block of {format}")
    fixed = hasattr(scale, "shape")
    given = {"scale": scale if fixed else None, "zero_point": zero_point if hasattr(zero_point, "shape") else None}
    if fixed != (given["zero_point"] is not None) and (given["zero_point"] is not None or zero_point):
        raise ValueError("zero_point: got an array or True alone, want arrays of both, scale and zero_point, or none")
    if scale_dtype not in ("f32", "f16"):
        raise ValueError(f"scale_dtype: got {scale_dtype!r}, want 'f32' or 'f16'")
    if not fixed and not (scaled and scale is None):
        shape = _scale_shape(view, "token" if scale is None else scale, format)
        given["scale"] = _a.empty(shape, scale_dtype, x)
        if _a.flag("zero_point", False if zero_point is None else zero_point):
            given["zero_point"] = _a.empty(shape, scale_dtype, x)
    elif not fixed and zero_point:
        raise ValueError(f"zero_point: given with {format}, want it with int8 or int4")
    given["mean"] = mean if hasattr(mean, "shape") else None
    if given["mean"] is None and _a.flag("mean", False if mean is None else mean):
        given["mean"] = _a.empty((view.shape[0] if len(view.shape) == 4 else 1, *view.shape[-2:]), "f32", x)
    codes = _a.empty((*view.shape[:-1], view.shape[-1] // block * size), dtype, x)
    views = {"x": view, "codes": _a.view("codes", codes, True, stream).as_format(format, "codes")}
    fixed_mean = hasattr(mean, "shape")
    written = {"scale": not fixed, "zero_point": not fixed, "mean": not fixed_mean}
    views |= {name: _a.view(name, array, written[name], stream) for name, array in given.items() if array is not None}
    _fulgur.quantize(views, fixed, fixed_mean, _a.integer("threads", threads, *_a.INT32), stream)
    arrays = {name: None if array is None else _a.of_kind(x, array) for name, array in given.items()}
    return Quantized(format, _a.of_kind(x, codes), **arrays, dtype=dtype_of_x, rotated=rotate)
