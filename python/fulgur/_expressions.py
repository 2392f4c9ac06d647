"""Expressions: what becomes of scores and which keys are seen, of functions of Python or of text."""

import functools
import inspect
import numbers
import operator

import numpy as np

from fulgur import _arguments as _a
from fulgur import _fulgur

SYMBOLS = ("score", "b", "h", "hk", "q", "k", "sq", "sk", "q0", "delta")
_HAS_NO_VALUE = (
    "an expression has no value while it is made: want fulgur.where(condition, x, y) for if, and &, | and ~ of "
    "compares in parentheses for and, or, not and chains"
)


def _literal(x):
    """The native expression of a number."""
    if isinstance(x, (bool, np.bool_)):
        return _fulgur.Expr.of_bool(bool(x))
    if isinstance(x, numbers.Integral):
        return _fulgur.Expr.of_int(_a.integer("expression", int(x), *_a.INT32))
    if isinstance(x, numbers.Real):
        return _fulgur.Expr.of_float(float(x))
    got = f"an array of shape {x.shape}" if hasattr(x, "shape") else type(x).__name__
    raise TypeError(f"expression: got {got} for an operand, want an expression, a number, or an element of a tensor "
                    "that the call is given by name (tensors=)")  # fmt: skip


def native(x):
    return x._expr if isinstance(x, Expression) else _literal(x)


def apply(operation, *operands):
    """An operation of the language on expressions and numbers."""
    kind = next((type(x) for x in operands if isinstance(x, Expression)), Expression)
    return kind.applied(operation, operands)


def _binary(operation):
    return lambda x, y: apply(operation, x, y), lambda x, y: apply(operation, y, x)


def _refuse(want):
    def refuse(self, *_):
        raise TypeError(f"expression: {want}")

    return refuse


class Expression:
    """A formula over a score and its place, and over tensors of a call: an immutable graph of operations.

    Made by :func:`expression`, or by operators and functions of what functions for ``score_mod`` and ``mask_mod``
    are called with. ``str()`` is its text, which :func:`expression` reads; ``type`` is "bool", "int" or "float".
    NumPy's functions (``np.tanh``, ``np.minimum``, ``np.where``) take it, too.
    """

    __slots__ = ("_expr", "text")
    __hash__ = None  # == makes an expression

    def __init__(self, expr, text=None):
        self._expr, self.text = expr, text  # text: as str() gives it, of what is made for many calls

    @classmethod
    def applied(cls, operation, operands):
        return cls(_fulgur.Expr.apply(operation, [native(x) for x in operands]))

    @property
    def type(self):
        return self._expr.type

    def __str__(self):
        return self._expr.text()

    def __repr__(self):
        return f"Expression({str(self)!r})"

    __add__, __radd__ = _binary("+")
    __sub__, __rsub__ = _binary("-")
    __mul__, __rmul__ = _binary("*")
    __truediv__, __rtruediv__ = _binary("/")
    __floordiv__, __rfloordiv__ = _binary("//")
    __mod__, __rmod__ = _binary("%")
    __lshift__, __rlshift__ = _binary("<<")
    __rshift__, __rrshift__ = _binary(">>")
    __and__, __rand__ = _binary("&")
    __or__, __ror__ = _binary("|")
    __xor__, __rxor__ = _binary("^")
    __eq__, _ = _binary("==")
    __ne__, _ = _binary("!=")
    __lt__, _ = _binary("<")
    __le__, _ = _binary("<=")
    __gt__, _ = _binary(">")
    __ge__, _ = _binary(">=")

    def __pow__(self, exponent):
        if isinstance(exponent, numbers.Integral) and 1 <= exponent <= 4:  # exact, and of integers
            result = self
            for _ in range(exponent - 1):
                result = result * self
            return result
        return apply("pow", self, exponent)

    def __rpow__(self, base):
        return apply("pow", base, self)

    def __neg__(self):
        return apply("-", self)

    def __pos__(self):
        return self

    def __invert__(self):
        return apply("!", self) if self.type == "bool" else apply("^", self, -1)

    def __abs__(self):
        return apply("abs", self)

    def astype(self, dtype):
        """As bool, int (towards 0) or float, or a dtype of NumPy of such a kind."""
        kind = np.dtype(dtype).kind
        if kind == "b":
            return self if self.type == "bool" else self != 0
        if kind not in "if":
            raise TypeError(f"expression: got the dtype {dtype!r}, want bool, int or float")
        return apply("to_int" if kind == "i" else "to_float", self)

    __bool__ = _refuse(_HAS_NO_VALUE)
    __int__ = __float__ = __complex__ = __index__ = _refuse(
        "is no number while it is made: want functions of fulgur or of NumPy, not of math, and tensors that the call "
        "is given by name (tensors=) to be indexed with it"
    )
    __array__ = _refuse("is no array: want tensors that the call is given by name (tensors=) to be indexed with it")
    __iter__ = __len__ = __getitem__ = _refuse("has no elements")

    def __array_ufunc__(self, function, method, *operands, **options):
        made = _NUMPY.get(function.__name__)
        if made is None or method != "__call__" or options:
            raise TypeError(f"expression: np.{function.__name__} is no function of expressions, want one of "
                            f"{', '.join(sorted(_NUMPY))}")  # fmt: skip
        return made(*operands)

    def __array_function__(self, function, types, operands, options):
        return self.__array_ufunc__(function, "__call__", *operands, **options)


def where(condition, x, y):
    """x where the condition holds, else y."""
    return apply("select", condition, x, y)


def minimum(x, y):
    return apply("min", x, y)


def maximum(x, y):
    return apply("max", x, y)


def clip(x, low, high):
    return apply("clamp", x, low, high)


def power(x, y):
    return x**y if isinstance(x, Expression) else apply("pow", x, y)


def bit(x, i):
    """Whether bit i of the integer x is 1."""
    return apply("bit", x, i)


def t5_bucket(delta, buckets, farthest):
    """The bucket of a relative position as T5 has it, in both directions."""
    return apply("t5_bucket", delta, buckets, farthest)


def _function(name):
    def function(x):
        return apply(name, x)

    function.__name__ = function.__qualname__ = name
    return function


absolute, floor, exp, exp2, log, tanh = map(_function, ("abs", "floor", "exp", "exp2", "log", "tanh"))
sqrt, rsqrt, sigmoid, silu = map(_function, ("sqrt", "rsqrt", "sigmoid", "silu"))
sin, cos, erf = map(_function, ("sin", "cos", "erf"))

FUNCTIONS = (
    "bit", "clip", "cos", "erf", "exp", "exp2", "floor", "log", "maximum", "minimum", "power", "rsqrt", "sigmoid",
    "silu", "sin", "sqrt", "t5_bucket", "tanh", "where",
)  # fmt: skip


def _of_numpy():
    """What NumPy's functions make of expressions, by their names."""
    operations = {
        "add": "+", "subtract": "-", "multiply": "*", "divide": "/", "floor_divide": "//", "remainder": "%",
        "left_shift": "<<", "right_shift": ">>", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^",
        "logical_and": "&&", "logical_or": "||", "logical_not": "!", "equal": "==", "not_equal": "!=", "less": "<",
        "less_equal": "<=", "greater": ">", "greater_equal": ">=", "negative": "-", "absolute": "abs", "fabs": "abs",
        "minimum": "min", "maximum": "max", "clip": "clamp", "where": "select", "floor": "floor", "exp": "exp",
        "exp2": "exp2", "log": "log", "tanh": "tanh", "sqrt": "sqrt", "sin": "sin", "cos": "cos",
    }  # fmt: skip
    functions = {name: functools.partial(apply, operation) for name, operation in operations.items()}
    return functions | {"invert": operator.invert, "square": lambda x: x * x, "power": power}


_NUMPY = _of_numpy()


class TensorName:
    """A tensor of a call in the functions that make its expressions: ``table[h, k - q]`` is an element.

    Indices are integers and expressions of them, of one dimension after another; those outside of the tensor are
    clamped to it, and numbers less than 0 count from the end, as in NumPy.
    """

    __slots__ = ("name", "shape", "_symbol", "_indices", "_kind")

    def __init__(self, name, shape, symbol, indices=(), kind=Expression):
        self.name, self.shape, self._symbol, self._indices, self._kind = name, shape, symbol, indices, kind

    def __getitem__(self, index):
        indices = list(self._indices)
        for one in index if isinstance(index, tuple) else (index,):
            if len(indices) == len(self.shape):
                raise IndexError(f"{self.name}: got more indices than {len(indices)}, one for each dimension")
            indices.append(self._index(one, len(indices)))
        if len(indices) < len(self.shape):
            return type(self)(self.name, self.shape, self._symbol, tuple(indices), self._kind)
        return self._kind(self._symbol.at([native(x) for x in indices]))

    def _index(self, index, dimension):
        if isinstance(index, Expression):
            return index
        try:
            number = operator.index(index)
        except TypeError:
            raise TypeError(
                f"{self.name}: got the index {index!r}, want an integer or an expression"
            ) from None
        size = self.shape[dimension]
        if not -size <= number < size:
            raise IndexError(f"{self.name}: got the index {number} of dimension {dimension}, which has {size}")
        return number % size

    __iter__ = None  # without an end, as every index is in range


def symbols_of(views):
    """Those of the tensors of a call, of their views by name."""
    for name in views:
        if name in SYMBOLS:
            raise ValueError(f"tensors: got the name {name!r}, which is a place of scores, want another one")
    return {name: _fulgur.TensorSymbol(name, view) for name, view in views.items()}


def _parameters(name, function, known):
    """The names of a function's parameters that are known."""
    found = []
    for x in inspect.signature(function).parameters.values():
        if x.kind in (x.VAR_POSITIONAL, x.VAR_KEYWORD):
            continue
        if x.name in known and x.kind != x.POSITIONAL_ONLY:
            found.append(x.name)
        elif x.default is x.empty:
            raise TypeError(f"{name}: got a function of {x}, want parameters of {', '.join(known)}")
    return found


def _call(name, function, views, symbols, places):
    """What a function returns for the places and tensors that its parameters are named after."""
    known = {x: Expression(_fulgur.Expr.symbol(x)) for x in places}
    known |= {x: TensorName(x, view.shape, symbols[x]) for x, view in views.items()}
    return function(**{x: known[x] for x in _parameters(name, function, known)})


def made(name, what, views, symbols, places=SYMBOLS):
    """The native expression of a text, a function or an Expression; errors name the argument."""
    try:
        if isinstance(what, Expression):
            return what._expr
        if isinstance(what, str):
            return _fulgur.parse_expression(what, list(symbols.values()))
        if callable(what):
            return native(_call(name, what, views, symbols, places))
    except (TypeError, ValueError) as error:
        (said, *_) = error.args or ("",)
        if str(said).startswith("expression: "):
            error.args = (f"{name}: {said.removeprefix('expression: ')}",)
        raise
    raise TypeError(f"{name}: got {type(what).__name__}, want a text, a function or an Expression")


def _views(tensors, stream=0, view=_a.view):
    if tensors is None:
        return {}
    try:
        named = dict(tensors)
    except (TypeError, ValueError):
        raise TypeError(f"tensors: got {type(tensors).__name__}, want a dict of arrays by name") from None
    for name in named:
        if not isinstance(name, str):
            raise TypeError(f"tensors: got the name {name!r}, want a string")
    return {name: view(name, array, stream=stream) for name, array in named.items()}


def expression(what, *, tensors=None):
    """A formula for ``score_mod`` or ``mask_mod``, made once for many calls, or to be printed.

    Args:
        what: a text (docs/expressions.md has the language), or a function whose parameters are named after what it
            needs: of score, b, h, hk, q, k, sq, sk, q0, delta, and of the tensors.
        tensors: those that it indexes, by name: arrays, whose dtype and number of dimensions are what counts.

    Returns:
        An :class:`Expression`.

    Raises:
        ValueError, TypeError: it has no meaning.

    >>> import numpy as np, fulgur
    >>> slopes = np.ones(8, np.float32)
    >>> fulgur.expression(lambda score, h, delta, slope: score - slope[h] * abs(delta), tensors={"slope": slopes})
    Expression('score - slope[h] * to_float(abs(delta))')
    >>> print(fulgur.expression("k < 4 || delta > -128"))
    k < 4 || -128 < delta
    """
    views = _views(tensors)
    expr = made("expression", what, views, symbols_of(views))
    return Expression(expr, expr.text())


def expand_blocks(offsets, indices, key_blocks):
    """Lists of blocks as a tensor for ``mask_mod`` to index, ``blocks[h, q // 64, k // 64]``.

    A list has the blocks of keys that a block of queries sees (CSR). What else the mask says decides inside of these.

    Args:
        offsets: ``(row blocks + 1)``, or with a dimension for heads, or for batch and heads, in front: int32 or int64
            in the host's memory. The list of row block i is ``indices[offsets[i] : offsets[i + 1]]``.
        indices: the blocks of all lists, ascending in each of them: int32 or int64 in the host's memory.
        key_blocks: how many blocks of keys there are.

    Returns:
        Bools ``(..., row blocks, key_blocks)``, a fresh array of the kind of offsets.

    Raises:
        ValueError, TypeError: an argument is wrong, or a list's blocks are not ascending or not below key_blocks.

    >>> import numpy as np, fulgur
    >>> fulgur.expand_blocks(np.array([0, 1, 3]), np.array([0, 0, 2]), 3)
    array([[ True, False, False],
           [ True, False,  True]])
    """
    views = {"offsets": _a.view("offsets", offsets), "indices": _a.view("indices", indices)}
    *maps, ends = views["offsets"].shape or (0,)
    shape = (*maps, max(ends - 1, 0), _a.integer("key_blocks", key_blocks, 0, _a.INT32[1]))
    blocks = _a.empty(shape, "bool", np.empty(0) if _a.on_gpu(offsets) else offsets)  # lists on a GPU are refused
    _fulgur.expand_blocks(views | {"blocks": _a.view("blocks", blocks, True)})
    return _a.of_kind(offsets, blocks)


def of_call(given, stream=0, view=_a.view):
    """The expressions of a call, as options, and its tensors, as what joins its views, by `view`."""
    mods = {name: given[name] for name in ("score_mod", "mask_mod") if given.get(name) is not None}
    tensors = given.get("tensors")
    if not mods and tensors is None:
        return {}, {}
    views = _views(tensors, stream, view)
    symbols = symbols_of(views)
    places = {"score_mod": SYMBOLS, "mask_mod": SYMBOLS[1:]}
    options = {name: made(name, what, views, symbols, places[name]) for name, what in mods.items()}
    return options, {"tensors": views}


class Gradients:
    """The requested gradients of a call's tensors: ``dtensors``, arrays to write to by name, None for new ones."""

    def __init__(self, given, views):
        self._given = given.get("dtensors")
        self.results, self.arrays = {}, {}  # as those of _arguments.py, by other names than arguments have
        if self._given is None:
            return
        try:
            self._given = dict(self._given)
        except (TypeError, ValueError):
            got = type(self._given).__name__
            raise TypeError(f"dtensors: got {got}, want a dict of arrays or None by name") from None
        tensors = views.get("tensors", {})
        for name, array in self._given.items():
            if name not in tensors:
                names = ", ".join(tensors) or "none is given"
                raise ValueError(f"dtensors: got {name!r}, want names of tensors ({names})")
            dtype = "f64" if tensors[name].dtype == "f64" else "f32"
            self.results[self._key(name)] = (tensors[name].shape, dtype)
            self.arrays[self._key(name)] = array

    @staticmethod
    def _key(name):
        return f"gradient of {name}"

    def views(self, written):
        """The views of a call's results as the library has them: these among `dtensors`."""
        if self._given is None:
            return written
        mine = {name: written[self._key(name)] for name in self._given}
        return {name: view for name, view in written.items() if name not in self.results} | {"dtensors": mine}

    def split(self, arrays):
        """The results of a call, with these as a dict in the end."""
        if self._given is None:
            return arrays
        count = len(arrays) - len(self._given)
        return (*arrays[:count], dict(zip(self._given, arrays[count:])))
