"""PyTorch's flex_attention, eagerly: its functions of tensors become expressions."""

import functools
import threading

import torch
from torch.overrides import TorchFunctionMode

from fulgur import _expressions as _e
from fulgur import _fulgur
from fulgur.torch._calls import attention

_PLACES = {"score": "score", "b": "b", "h": "h", "q_idx": "q", "kv_idx": "k"}
_HAS_NO_VALUE = (
    "has no value while the function is looked at: want torch.where(condition, x, y) for if, and &, | and ~ of "
    "compares in parentheses for and, or, not and chains"
)
_active = threading.local()


class _Value(_e.Expression):
    """What a function computes with in the place of a score, of indices, and of what it makes of them."""

    __slots__ = ("nonnegative",)
    __hash__ = None

    def __init__(self, expr, text=None):
        super().__init__(expr, text)
        self.nonnegative = False

    @classmethod
    def applied(cls, operation, operands):
        operands = [_active.trace.operand(x) for x in operands]
        result = super().applied(operation, operands)
        result.nonnegative = _is_nonnegative(operation, operands)
        return result

    @classmethod
    def __torch_function__(cls, function, types, operands=(), options=None):
        return _active.trace.call(function, operands, options or {})

    def __getattr__(self, name):
        if name in ("device", "dtype", "shape", "ndim"):
            kinds = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}
            return {"device": torch.device("cpu"), "dtype": kinds[self.type], "shape": torch.Size(()), "ndim": 0}[name]
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return functools.partial(_active.trace.method, name, self)

    def __bool__(self):
        raise TypeError(f"expression: {_HAS_NO_VALUE}")

    def item(self):
        raise TypeError(f"expression: {_HAS_NO_VALUE}")

    __int__ = __float__ = __index__ = item


def _is_nonnegative(operation, operands):
    """Whether integers that an operation makes are never less than 0, so that they need not count from an end."""

    def is_one(x):
        return x.nonnegative if isinstance(x, _Value) else x >= 0

    known = [is_one(x) for x in operands]
    if operation in ("+", "*", "min", "|"):
        return all(known)
    if operation in ("max", "&"):
        return any(known)
    if operation in ("//", ">>"):
        return known[0]
    if operation == "select":
        return all(known[1:])
    return operation in ("%", "abs")


class _Indexed(_e.TensorName):
    """A tensor with some of its indices."""

    __slots__ = ()

    def _index(self, index, dimension):
        if isinstance(index, torch.Tensor):
            index = _active.trace.operand(index)
        if not isinstance(index, _Value):
            return super()._index(index, dimension)
        if index.type == "float":
            shape = tuple(self.shape)
            raise TypeError(f"expression: got floats for an index of a tensor of shape {shape}, want integers")
        if index.nonnegative or index.type == "bool":
            return index
        return _e.where(index < 0, index + self.shape[dimension], index)  # as PyTorch counts from the end

    @classmethod
    def __torch_function__(cls, function, types, operands=(), options=None):
        return _active.trace.call(function, operands, options or {})


_UNARY = {
    name: name
    for name in ("abs", "floor", "exp", "exp2", "log", "tanh", "sqrt", "rsqrt", "sigmoid", "silu", "sin", "cos", "erf")
} | {"neg": "-", "negative": "-", "absolute": "abs"}  # fmt: skip
_BINARY = {
    "add": "+", "sub": "-", "subtract": "-", "mul": "*", "multiply": "*", "div": "/", "divide": "/", "true_divide": "/",
    "truediv": "/", "floor_divide": "//", "floordiv": "//", "remainder": "%", "mod": "%", "minimum": "min",
    "maximum": "max", "bitwise_and": "&", "and": "&", "bitwise_or": "|", "or": "|", "bitwise_xor": "^", "xor": "^",
    "bitwise_left_shift": "<<", "lshift": "<<", "bitwise_right_shift": ">>", "rshift": ">>", "eq": "==", "ne": "!=",
    "not_equal": "!=", "lt": "<", "less": "<", "le": "<=", "less_equal": "<=", "gt": ">", "greater": ">", "ge": ">=",
    "greater_equal": ">=",
}  # fmt: skip
_LOGIC = {"logical_and": "&&", "logical_or": "||", "logical_xor": "^"}
_CASTS = {"float": "float", "double": "float", "half": "float", "bfloat16": "float", "int": "int", "long": "int",
          "short": "int", "bool": "bool"}  # fmt: skip


def _cast(x, kind):
    if kind == "bool":
        return x if x.type == "bool" else x != 0
    return _e.apply("to_int" if kind == "int" else "to_float", x)


def _kind(dtype):
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def _value(x):
    """A number as a value."""
    return _Value(_e.native(x))


def _to(x, *to, dtype=None, **_):
    dtype = next((y for y in to if isinstance(y, torch.dtype)), dtype)
    return x if dtype is None else _cast(x, _kind(dtype))


def _filled(x, value, dtype=None):
    kind = x.type if dtype is None else _kind(dtype)
    return _value({"bool": bool, "int": int, "float": float}[kind](value))


def _clamp(x, min=None, max=None):
    x = x if min is None else _e.maximum(x, min)
    return x if max is None else _e.minimum(x, max)


def _divide(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return _e.apply("/", x, y)
    if rounding_mode == "floor":
        return _e.apply("//", x, y)
    raise TypeError(f"expression: torch.div: got rounding_mode {rounding_mode!r}, want None or 'floor'")


def _added(sign):
    def function(x, y, *, alpha=1):
        return _e.apply(sign, x, y if alpha == 1 else _e.apply("*", y, alpha))

    return function


_FUNCTIONS = (
    {name: functools.partial(_e.apply, operation) for name, operation in (_UNARY | _BINARY).items()}
    | {name: functools.partial(lambda kind, x: _cast(x, kind), kind) for name, kind in _CASTS.items()}
    | {
        name: functools.partial(lambda op, x, y: _e.apply(op, _cast(_number(x), "bool"), _cast(_number(y), "bool")), op)
        for name, op in _LOGIC.items()
    }
    | {
        "add": _added("+"), "sub": _added("-"), "div": _divide, "divide": _divide,
        "logical_not": lambda x: ~_cast(x, "bool"), "bitwise_not": lambda x: ~x, "invert": lambda x: ~x,
        "rsub": lambda x, y: _e.apply("-", y, x), "where": _e.where, "pow": _e.power, "square": lambda x: x * x,
        "float_power": lambda x, y: _e.apply("pow", x, y), "reciprocal": lambda x: 1.0 / x,
        "relu": lambda x, inplace=False: _e.maximum(x, 0), "silu": lambda x, inplace=False: _e.silu(x),
        "log1p": lambda x: _e.log(1.0 + x),
        "expm1": lambda x: _e.exp(x) - 1.0, "log2": lambda x: _e.log(x) * 1.4426950408889634,
        "softplus": lambda x: _e.maximum(x, 0.0) + _e.log(1.0 + _e.exp(-abs(x))),
        "clamp": _clamp, "clip": _clamp, "clamp_min": lambda x, min: _clamp(x, min),
        "clamp_max": lambda x, max: _clamp(x, max=max), "masked_fill": lambda x, mask, value: _e.where(mask, value, x),
        "to": _to, "type": _to, "clone": lambda x, **_: x, "detach": lambda x: x, "contiguous": lambda x, **_: x,
        "zeros_like": lambda x, dtype=None, **_: _filled(x, 0, dtype),
        "ones_like": lambda x, dtype=None, **_: _filled(x, 1, dtype),
        "full_like": lambda x, fill_value, dtype=None, **_: _filled(x, fill_value, dtype),
        "new_zeros": lambda x, size=(), dtype=None, **_: _filled(x, 0, dtype),
        "new_ones": lambda x, size=(), dtype=None, **_: _filled(x, 1, dtype),
        "new_full": lambda x, size, fill_value, dtype=None, **_: _filled(x, fill_value, dtype),
    }
)  # fmt: skip


def _number(x):
    return x if isinstance(x, _Value) else _value(x)


class _Trace(TorchFunctionMode):
    """Turns functions of PyTorch into expressions, and keeps the tensors that they index."""

    def __init__(self):
        super().__init__()
        self.tensors = {}  # by name
        self._known = {}  # (name, symbol) by the identity of a tensor, which is kept alive

    def __torch_function__(self, function, types, operands=(), options=None):
        options = options or {}
        symbolic = any(issubclass(x, (_Value, _Indexed)) for x in types)
        indexes = function is torch.Tensor.__getitem__ and _has_values(operands[1])
        return self.call(function, operands, options) if symbolic or indexes else function(*operands, **options)

    def call(self, function, operands, options):
        name = getattr(function, "__name__", str(function))
        if name == "__getitem__" and isinstance(operands[0], torch.Tensor):
            return self.indexed(operands[0])[operands[1]]
        reflected = name.startswith("__r") and name.strip("_") not in _FUNCTIONS
        name = name.strip("_")
        if reflected:
            name, operands = name[1:], operands[::-1]
        return self.method(name, *operands, **options)

    def method(self, name, *operands, **options):
        made = _FUNCTIONS.get(name)
        if made is None:
            raise TypeError(f"expression: has no torch.{name}, want one of {', '.join(sorted(_FUNCTIONS))}")
        operands = [self.operand(x) if isinstance(x, torch.Tensor) else x for x in operands]
        options = {key: self.operand(x) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
        return made(*operands, **options)

    def indexed(self, tensor):
        """A tensor that an expression indexes, which is one of the call's from now on."""
        known = self._known.get(id(tensor))
        if known is None:
            name = f"captured{len(self._known)}"
            kept = tensor.to(torch.int32) if tensor.dtype in (torch.uint8, torch.int8, torch.int16) else tensor
            view = _fulgur.planned("captured tensor", [1] * kept.dim(), _dtype(kept))
            known = self._known[id(tensor)] = tensor, name, _fulgur.TensorSymbol(name, view)
            self.tensors[name] = kept
        _, name, symbol = known
        return _Indexed(name, tensor.shape, symbol, (), _Value)

    def operand(self, x):
        """A value or a number; a tensor of one number is its element."""
        if not isinstance(x, torch.Tensor):
            return x
        if x.numel() != 1:
            raise TypeError(
                f"expression: got a tensor of shape {tuple(x.shape)} for an operand, want one of its elements, as "
                "tensor[h, q_idx]"
            )
        if not x.requires_grad:
            return x.item()
        known = self._known.get(id(x))
        if known is None:
            self.indexed(x.reshape(1))
            known = self._known[id(x)] = (x, *next(reversed(self._known.values()))[1:])
        return _Value(known[2].at([_e.native(0)]))


def _dtype(x):
    names = {
        torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64",
        torch.int32: "i32", torch.int64: "i64", torch.bool: "bool",
    }  # fmt: skip
    if x.dtype not in names:
        raise TypeError(f"expression: got a tensor of {x.dtype} to index, want {', '.join(map(str, names))}")
    return names[x.dtype]


def _has_values(index):
    return any(isinstance(x, _Value) for x in (index if isinstance(index, tuple) else (index,)))


def _traced(name, function, parameters, trace):
    """The expression of a function of flex_attention, of places with these names in their order."""
    places = []
    for x in parameters:
        place = _Value(_fulgur.Expr.symbol(_PLACES[x]))
        place.nonnegative = x != "score"
        places.append(place)
    _active.trace = trace
    try:
        with trace:
            result = function(*places)
            return _e.Expression(_e.native(trace.operand(result)))
    except (TypeError, ValueError, IndexError) as error:
        (said, *_) = error.args or ("",)
        error.args = (f"{name}: {str(said).removeprefix('expression: ')}",)
        raise
    finally:
        del _active.trace


def _of_blocks(block_mask):
    """What a block mask shows that has no function: its lists, as the visibility of blocks."""
    shown = block_mask.to_dense() != 0
    rows, keys = block_mask.BLOCK_SIZE

    def mask_mod(b, h, q_idx, kv_idx):
        at = [b if shown.shape[0] > 1 else 0, h if shown.shape[1] > 1 else 0]
        return shown[at[0], at[1], q_idx // rows, kv_idx // keys]

    return mask_mod


def _mask_mod(block_mask, query, key):
    """The function of a block mask."""
    from torch.nn.attention import flex_attention as flex

    if not isinstance(block_mask, flex.BlockMask):
        raise TypeError(f"block_mask: got {type(block_mask).__name__}, want a BlockMask of PyTorch")
    sizes, want = block_mask.shape[-2:], (query.shape[-2], key.shape[-2])
    no_blocks = block_mask.BLOCK_SIZE[0] >= 1 << 30  # flex_attention's own, of no mask
    if not no_blocks and (sizes[0] < want[0] or sizes[1] < want[1]):
        raise ValueError(f"block_mask: got one of {sizes[0]} queries and {sizes[1]} keys, want {want[0]} and {want[1]}")
    if block_mask.mask_mod is not flex.noop_mask:
        return block_mask.mask_mod
    return None if no_blocks else _of_blocks(block_mask)


@torch.compiler.disable(reason="fulgur.torch.flex_attention is eager: it looks at functions outside of a graph")
def flex_attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None,
):  # fmt: skip
    """:func:`torch.nn.attention.flex_attention.flex_attention`, eagerly, with all of its gradients.

    ``score_mod(score, b, h, q_idx, kv_idx)`` and the function of ``block_mask`` are looked at once a call, with symbols
    in the place of tensors: they compute with operators, functions of PyTorch, elements of the tensors that they have
    from around them, and tensors of one number. These tensors get gradients.

    Args:
        query: ``(batch, hq, sq, d)``.
        key, value: ``(batch, hk, sk, d)`` and ``(batch, hk, sk, dv)``.
        score_mod: what becomes of each score, scaled; default nothing.
        block_mask: a :class:`torch.nn.attention.flex_attention.BlockMask`, whose function counts, or its lists where it
            has none.
        scale: of the scores; default 1 / sqrt(d).
        enable_gqa: hq may be a multiple of hk.
        return_lse: return ``(out, lse)``.
        kernel_options: not looked at.

    Returns:
        out ``(batch, hq, sq, dv)``; with ``return_lse`` also lse, ``(batch, hq, sq)``, natural log.

    Raises:
        TypeError, ValueError: a function computes what expressions have not, or an argument is wrong.
        fulgur.Error: the tensors are where expressions are not computed.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            got = f"{x.dim()} dimensions" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name}: got {got}, want a tensor (batch, heads, seqlen, dim)")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"key: got {key.shape[1]} heads, want {query.shape[1]} as query, or enable_gqa=True")
    if key.shape[0] == 1 and query.shape[0] > 1:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    trace, mods = _Trace(), {}
    places = list(_PLACES)
    if score_mod is not None:
        mods["score_mod"] = _traced("score_mod", score_mod, places, trace)
    if block_mask is not None:
        mask_mod = _mask_mod(block_mask, query, key)
        if mask_mod is not None:
            mods["mask_mod"] = _traced("mask_mod", mask_mod, places[1:], trace)
    # What is indexed in vain, as by a factor of 0, is none of the call's.
    text = " ".join(str(x) for x in mods.values())
    tensors = {name: x for name, x in trace.tensors.items() if f"{name}[" in text}
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    results = attention(q, k, v, scale=scale, return_lse=return_lse, tensors=tensors, **mods)
    return (results[0].transpose(1, 2), results[1]) if return_lse else results.transpose(1, 2)
