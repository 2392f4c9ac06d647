"""PyTorch's flex_attention, eagerly and in graphs: its functions of tensors become expressions."""

import functools
import math
import threading
import warnings
from typing import Callable, NamedTuple

import torch
from torch._higher_order_ops.flex_attention import flex_attention as operator
from torch._ops import DispatchKey
from torch._subclasses.fake_tensor import is_fake
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.compiler import is_dynamo_compiling
from torch.nn.attention import flex_attention as upstream
from torch.overrides import TorchFunctionMode

import fulgur
from fulgur import _arguments as _a
from fulgur import _expressions as _e
from fulgur import _fulgur
from fulgur.torch._calls import attention

_PLACES = {"score": "score", "b": "b", "h": "h", "q_idx": "q", "kv_idx": "k"}
_HAS_NO_VALUE = (
    "has no value while the function is looked at: want torch.where(condition, x, y) for if, and &, | and ~ of "
    "compares in parentheses for and, or, not and chains"
)
_WANT_ELEMENTS = "got a tensor of shape {} for an operand, want one of its elements, as tensor[h, q_idx]"
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

    def _is_no_operand(self, *_):
        rest = self.shape[len(self._indices) :]
        raise TypeError(f"expression: {_WANT_ELEMENTS.format(tuple(rest))}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_no_operand
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _is_no_operand
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __bool__ = _is_no_operand
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _is_no_operand
    __hash__ = None


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
        "log1p": lambda x: _e.log(1.0 + x), "tan": lambda x: _e.sin(x) / _e.cos(x),
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

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.tensors = {}  # by name
        self._known = {}  # (name, symbol) by the identity of a tensor, which is kept alive
        self._ones = {}  # tensors of one element, by what they stand for

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
        operands = [self.operand(x) for x in operands]
        options = {key: self.operand(x) for key, x in options.items()}
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
        if isinstance(x, torch.SymInt):
            return self._element(x.node.expr, torch.full((1,), x, dtype=torch.int32, device=self.device))
        if isinstance(x, _Indexed):
            x._is_no_operand()
        if not isinstance(x, torch.Tensor):
            return x
        if x.numel() != 1:
            raise TypeError(f"expression: {_WANT_ELEMENTS.format(tuple(x.shape))}")
        if not x.requires_grad and not is_fake(x):
            return x.item()
        return self._element(id(x), x.reshape(1).to(self.device))

    def _element(self, key, of_one):
        """The element of a tensor, the same one for a key that comes again."""
        one = self._ones.setdefault(key, of_one)
        return self.indexed(one)[0]


def _dtype(x):
    names = {
        torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64",
        torch.int32: "i32", torch.int64: "i64", torch.bool: "bool",
    }  # fmt: skip
    if x.dtype not in names:
        raise TypeError(f"expression: got a tensor of {x.dtype}, want {', '.join(map(str, names))}")
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


class _Blocks(NamedTuple):
    """What PyTorch's BlockMask has, as its ``as_tuple`` and the operator ``flex_attention`` give it."""

    counts: torch.Tensor  # of the blocks of each row of blocks that the function decides
    indices: torch.Tensor
    full_counts: torch.Tensor | None  # of those that are seen whole
    full_indices: torch.Tensor | None
    sizes: tuple  # (queries, keys) of a block
    mask_mod: Callable

    @classmethod
    def of(cls, block_mask):
        sizes = tuple(map(int, block_mask[-3:-1]))  # a graph with other sizes is another one: they divide
        return cls(*block_mask[2:6], sizes, block_mask[-1])

    def all_keys(self):
        """Whether there is one block of everything, as flex_attention makes it of no mask."""
        return self.sizes[0] >= 1 << 30

    def kinds(self, keys):
        """Which blocks of so many keys are seen whole (2), by the function (1), and not at all (0)."""
        count = -(-keys // self.sizes[1])
        kinds = _listed(self.counts, self.indices, count)
        if self.full_counts is None:
            return kinds
        return torch.maximum(kinds, 2 * _listed(self.full_counts, self.full_indices, count))


def _listed(counts, indices, count):
    """1 for the first `counts` of the indices, of those of `count` numbers, and 0 for others."""
    places = torch.arange(indices.shape[-1], device=indices.device)
    listed = (places < counts[..., None]) & (indices >= 0) & (indices < count)
    kept = torch.where(listed, indices, count).to(torch.int64)
    listed = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.int32, device=indices.device)
    return listed.scatter(-1, kept, torch.ones_like(kept, dtype=torch.int32))[..., :count]


def _attended(query, key, value, score_mod, blocks, scale, plans=False):
    """(out, lse) of functions of all places; `blocks`: None for all keys; `plans`: raises what computing it would."""
    if key.shape[0] == 1 and query.shape[0] > 1:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    trace, mods = _Trace(query.device), {}
    places = list(_PLACES)
    if score_mod is not None:
        mods["score_mod"] = _traced("score_mod", score_mod, places, trace)
    if blocks is not None:
        mods["mask_mod"] = _traced("mask_mod", _mask_mod(blocks, key.shape[2]), places[1:], trace)
    texts = {name: str(x) for name, x in mods.items()}
    mods = {name: x for name, x in mods.items() if texts[name] not in ("score", "true")}
    # What is indexed in vain, as by a factor of 0, is none of the call's.
    text = " ".join(texts[name] for name in mods)
    tensors = {name: x for name, x in trace.tensors.items() if f"{name}[" in text}
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if plans:
        _plan({"q": q, "k": k, "v": v}, scale, mods, tensors)
    out, lse = attention(q, k, v, scale=scale, return_lse=True, tensors=tensors, **mods)
    return out.transpose(1, 2), lse


def _plan(rows, scale, mods, tensors):
    """Raises what a call would when it computes, which one of a graph does when it is too late for PyTorch's own."""
    views = {name: _planned(name, x) for name, x in rows.items()}
    views["tensors"] = {name: _planned(name, x) for name, x in tensors.items()}
    numbers = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    if not isinstance(scale, torch.SymFloat):
        numbers["scale"] = scale
    options = _a.options(numbers) | {name: _e.native(x) for name, x in mods.items()}
    device, results = views["q"].device, _a.forward_results(views["q"], views["v"], True)
    views |= _a.planned_results(results, {}, device)
    _fulgur.plan_forward(views, options)
    wanted = {name: None for name, x in tensors.items() if x.requires_grad}
    if torch.is_grad_enabled() and (wanted or any(x.requires_grad for x in rows.values())):
        views["dout"] = views["out"]
        of_tensors = _e.Gradients({"dtensors": wanted}, views)
        results = _a.backward_results(views, {}) | of_tensors.results
        written = of_tensors.views(_a.planned_results(results, {}, device))
        _fulgur.plan_backward(views | written, options)


def _planned(name, x):
    """What a plan knows of a tensor; lengths that a graph does not know are those that it has been made with."""
    shape = [n if isinstance(n, int) else n.node.hint or 1 for n in x.shape]
    return _fulgur.planned(name, shape, _dtype(x), str(x.device))


def _mask_mod(blocks, keys):
    """The function of a block mask, and its lists, as a function of places."""
    if blocks.all_keys():
        return blocks.mask_mod
    kinds = blocks.kinds(keys)

    def mask_mod(b, h, q_idx, kv_idx):
        at = [x if size > 1 else 0 for x, size in zip((b, h), kinds.shape)]
        kind = kinds[at[0], at[1], q_idx // blocks.sizes[0], kv_idx // blocks.sizes[1]]
        return (kind == 2) | (kind == 1) & blocks.mask_mod(b, h, q_idx, kv_idx)

    return mask_mod


def _blocks_of(block_mask, query, key):
    """A block mask that goes with the tensors."""
    if not isinstance(block_mask, upstream.BlockMask):
        raise TypeError(f"block_mask: got {type(block_mask).__name__}, want a BlockMask of PyTorch")
    blocks = _Blocks.of(block_mask.as_tuple())
    sizes, want = block_mask.shape[-2:], (query.shape[-2], key.shape[-2])
    if not blocks.all_keys() and (sizes[0] < want[0] or sizes[1] < want[1]):
        raise ValueError(f"block_mask: got one of {sizes[0]} queries and {sizes[1]} keys, want {want[0]} and {want[1]}")
    return blocks


def flex_attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    """:func:`torch.nn.attention.flex_attention.flex_attention`, with all of its gradients.

    ``score_mod(score, b, h, q_idx, kv_idx)`` and the function of ``block_mask`` are looked at once a call, or once a
    graph of ``torch.compile``, with symbols in the place of tensors: they compute with operators, functions of PyTorch,
    elements of the tensors that they have from around them, and tensors of one number. These tensors get gradients.

    Args:
        query: ``(batch, hq, sq, d)``.
        key, value: ``(batch, hk, sk, d)`` and ``(batch, hk, sk, dv)``.
        score_mod: what becomes of each score, scaled; default nothing.
        block_mask: a :class:`torch.nn.attention.flex_attention.BlockMask`: its lists, and its function in the blocks
            that they leave to it.
        scale: of the scores; default 1 / sqrt(d).
        enable_gqa: hq may be a multiple of hk.
        return_lse: return ``(out, lse)``.
        kernel_options: not looked at.
        return_aux: return ``(out, AuxOutput)``; it may ask for lse alone.

    Returns:
        out ``(batch, hq, sq, dv)``, in the layout of query where dv is d; with ``return_lse`` also lse, ``(batch, hq,
        sq)``, natural log.

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
    if return_aux is not None and return_aux.max_scores:
        raise NotImplementedError("return_aux: got max_scores=True, want False")
    if is_dynamo_compiling():
        options = _ours(query, key, value, return_lse, kernel_options, return_aux)
        mask = upstream._create_empty_block_mask(query, key) if block_mask is None else block_mask
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        score_mod = upstream._identity if score_mod is None else score_mod
        out, lse, _ = operator(query, key, value, score_mod, mask.as_tuple(), scale, options)
        lse = lse * math.log(2)
    else:
        blocks = None if block_mask is None else _blocks_of(block_mask, query, key)
        out, lse = _attended(query, key, value, score_mod, blocks, scale)
    if return_aux is not None:
        return out, upstream.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


# In a graph is PyTorch's operator, with an option that says that fulgur computes it.
_OURS = "FULGUR"
_torchs_options, _torchs_device = upstream._apply_kernel_options, upstream._validate_device


def _ours(*given):
    return _torchs_options(*given) | {_OURS: True, "BACKEND": "AUTO"}


def _compute(torchs, query, key, value, score_mod, block_mask, scale, options, of_score=(), of_mask=()):
    """The operator: by fulgur where that can, else by PyTorch's own implementation."""
    if _OURS in options:
        blocks = _Blocks.of(block_mask)
        blocks = blocks._replace(mask_mod=lambda *places: block_mask[-1](*places, *of_mask))
        try:
            if options.get("OUTPUT_MAX"):
                raise NotImplementedError("return_aux: got max_scores=True")
            score = lambda *places: score_mod(*places, *of_score)  # noqa: E731
            out, lse = _attended(query, key, value, score, blocks, scale, plans=True)
            return out, lse / math.log(2), lse.new_empty(0)
        except (TypeError, ValueError, IndexError, NotImplementedError, fulgur.Error) as error:
            warnings.warn(f"flex_attention: PyTorch computes this call, not fulgur: {error}", stacklevel=2)
    options = {name: x for name, x in options.items() if name != _OURS}
    return torchs(query, key, value, score_mod, block_mask, scale, options, of_score, of_mask)


def _compute_in(torchs, mode, *arguments):
    """The operator in a mode, which is not active where its implementation is called."""
    if _OURS not in arguments[6]:
        return torchs(mode, *arguments)
    with mode:
        return _compute(operator, *arguments)


for _key in (DispatchKey.Autograd, DispatchKey.CompositeExplicitAutograd):
    operator.py_kernels[_key] = functools.partial(_compute, operator.py_kernels[_key])
operator.python_key_table[FunctionalTensorMode] = functools.partial(
    _compute_in, operator.python_key_table[FunctionalTensorMode]
)
operator._dispatch_cache.clear()


def enable_flex(enabled=True):
    """Lets fulgur compute PyTorch's own ``flex_attention``, under ``torch.compile`` and eagerly.

    What fulgur does not compute stays PyTorch's, with a warning that says why. Graphs that are compiled already
    stay as they are.

    Args:
        enabled: False lets PyTorch compute all of it again.
    """
    upstream._apply_kernel_options = _ours if enabled else _torchs_options
    upstream._validate_device = _any_device if enabled else _torchs_device


def _any_device(query, key, value):
    """PyTorch's own refuses gradients on the CPU."""
