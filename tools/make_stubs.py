#!/usr/bin/env python3
"""Writes the stubs of the Python package, python/fulgur/**/*.pyi, from python/fulgur/_spec.py and the
documentation of the functions. Needs the package installed, NumPy alone; tests/python/test_package.py
fails where a stub is not what this writes."""

import ast
import inspect
import pathlib
import textwrap

from fulgur import _expressions, _spec

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "python/fulgur"

HEADERS = {
    "": '''\
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, overload

__all__ = {names}

__version__: str

class Error(RuntimeError): ...

class Engine(NamedTuple):
    name: str
    description: str
    unavailable: str

class WorkspaceNeed(NamedTuple):
    bytes: int
    alignment: int
    zeroed_bytes: int

class _DLPack(Protocol):
    """NumPy arrays, torch tensors and every other array with ``__dlpack__``."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class _CudaStream(Protocol):
    """The handle of a stream as second of the two numbers."""

    def __cuda_stream__(self) -> tuple[int, int]: ...

_Array = TypeVar("_Array", bound=_DLPack)
_ReturnLse = TypeVar("_ReturnLse", Literal[True], Literal[False])
_Shape = tuple[int, ...] | list[int]
_DType = Literal["f32", "bf16", "f16", "f64"]
_Stage = Literal["scaled", "softcap", "masked", "probabilities"]
_Indices = slice | Sequence[int] | _DLPack

class Expression:
    type: Literal["bool", "int", "float"]
    def astype(self, dtype: Any) -> Expression: ...
{operators}
_Operand = Expression | float
_Expression = str | Expression | Callable[..., Any]

class Quantized:
    format: str
    codes: Any
    scale: Any
    zero_point: Any
    mean: Any
    dtype: str
    rotated: bool
    shape: tuple[int, ...]
    def __init__(
        self,
        format: str,
        codes: _DLPack,
        scale: _DLPack | None = None,
        zero_point: _DLPack | None = None,
        *,
        mean: _DLPack | None = None,
        dtype: str = "f32",
        rotated: bool = False,
    ) -> None: ...
    def dequantize(
        self,
        dtype: _DType | None = None,
        *,
        threads: int = 0,
        stream: int | _CudaStream | None = None,
    ) -> Any: ...

class _AnyPlan:
    def explain(self, *, bias: _DLPack | None = None, tensors: Mapping[str, _DLPack] | None = None) -> str: ...
    def details(self) -> dict[str, Any]: ...
    def workspace(self) -> WorkspaceNeed: ...
''',
    "torch": '''\
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from torch import Tensor

from fulgur import _Expression, _Indices, _Stage

__all__ = {names}
''',
    "jax": '''\
from typing import Any, Literal, overload

from jax import Array
from jax.typing import ArrayLike

__all__ = {names}
''',
}
FOOTERS = {
    "": '''\
def expression(what: _Expression, *, tensors: Mapping[str, _DLPack] | None = None) -> Expression: ...
{functions}
def merge(
    outs: Iterable[_Array],
    lses: Iterable[_Array],
    *,
    stream: int | _CudaStream | None = None,
) -> tuple[_Array, _Array]: ...
def quantize(
    x: _DLPack,
    format: str,
    *,
    scale: Literal["tensor", "head", "token"] | int | _DLPack | None = None,
    zero_point: bool | _DLPack | None = None,
    scale_dtype: Literal["f32", "f16"] = "f32",
    mean: bool | _DLPack | None = None,
    rotate: bool = False,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> Quantized: ...
def hadamard(
    x: _Array,
    *,
    inverse: bool = False,
    dtype: _DType | None = None,
    threads: int = 0,
    stream: int | _CudaStream | None = None,
) -> _Array: ...
def expand_blocks(offsets: _Array, indices: _DLPack, key_blocks: int) -> _Array: ...
def engines() -> list[Engine]: ...
def install_as(
    name: Literal["flash_attn", "flash_attn_interface", "flash_attn.cute"],
) -> Callable[[], None]: ...
''',
    "torch": '''\
compiled: bool

def enable_flex(enabled: bool = True) -> None: ...
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[[Any, Any, Any, Any, Any], Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any: ...
''',
    "jax": '''\
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any: ...
''',
}

OPERATORS = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"]
COMPARES = ["eq", "ne", "lt", "le", "gt", "ge"]

# Types by what _spec.py calls them; of tensors also where they may be left out.
TYPES = {
    "": {
        "tensor": "_DLPack", "result": "_Array", "planned": "_DLPack | Quantized | _Shape", "dlse": "_DLPack",
        "coded": "_DLPack | Quantized",
        "dtype": "_DType", "stream": "int | _CudaStream | None", "stage": "_Stage", "indices": "_Indices | None",
        "expression": "_Expression | None", "tensors": "Mapping[str, _DLPack] | None",
        "gradients": "Mapping[str, _DLPack | None] | None",
    },
    "torch": {
        "tensor": "Tensor", "coded": "Tensor", "result": "Tensor", "stage": "_Stage", "indices": "_Indices | None",
        "expression": "_Expression | None", "tensors": "Mapping[str, Tensor] | None",
    },
    "jax": {"tensor": "ArrayLike", "coded": "ArrayLike", "result": "Array", "int of seed, offset": "int | ArrayLike"},
}  # fmt: skip
TENSORS = ("tensor", "coded", "result", "planned", "dlse")

# The signatures of functions whose result depends on their arguments: {argument: type}, result. An
# argument without a default in one has it in the other.
NO_LSE, LSE = {"return_lse": "Literal[False] = False"}, {"return_lse": "Literal[True]"}
NO_SINKS, SINKS = {"sinks": "None = None", "dsinks": "None = None"}, {"sinks": "_DLPack"}
NO_DBIAS, DBIAS = {"dbias": "None = None"}, {"bias": "_DLPack", "dbias": "_Array"}
NO_DTENSORS = {"dtensors": "None = None"}
DTENSORS = {"tensors": "Mapping[str, _DLPack]", "dtensors": "Mapping[str, _DLPack | None]"}


def tuple_of(array, count):
    return f"tuple[{', '.join([array] * count)}]"


def overloads(library):
    array, tensor = {"": ("_Array", "_DLPack"), "torch": ("Tensor",) * 2, "jax": ("Array", "ArrayLike")}[library]
    either = {"return_lse": "bool"}
    with_lse = [(NO_LSE, array), (LSE, tuple_of(array, 2)), (either, f"{array} | {tuple_of(array, 2)}")]
    gradients = [
        (of_sinks | of_bias | NO_DTENSORS, tuple_of(array, count + more))
        for of_bias, more in ((NO_DBIAS, 0), (DBIAS, 1)) for of_sinks, count in ((NO_SINKS, 3), (SINKS, 4))
    ] + [(DTENSORS, "tuple[Any, ...]")]  # fmt: skip
    queries = {"q": array if library == "" else tensor}
    rotates = {**queries, "cos": tensor, "sin": tensor}
    stays = {"q": "None = None", "q_out": "None = None", "cu_seqlens_q": "None = None"}
    if library == "jax":
        with_caches = [
            (NO_LSE, tuple_of(array, 3)), (LSE, tuple_of(array, 4)), (either, f"tuple[{array}, ...]"),
        ]  # fmt: skip
        appended = [(stays, tuple_of(array, 2)), (rotates, tuple_of(array, 3))]
        return {"attention": with_lse, "append": appended, "append_attention": with_caches}
    appended = [(stays, "None"), (rotates, array)]
    result = {"attention": with_lse, "append": appended, "append_attention": with_lse}
    result["scores"] = [({}, array)]
    if library == "torch":
        return result
    no, yes = "Literal[False]", "Literal[True]"
    return result | {
        "attention_backward": gradients,
        "plan": [(NO_LSE, f"Plan[{no}]"), (LSE, f"Plan[{yes}]")],
        "plan_backward": [({}, "BackwardPlan")],
        "Plan.run": [
            ({"self": f"Plan[{no}]", "lse": "None = None"}, array),
            ({"self": f"Plan[{yes}]"}, tuple_of(array, 2)),
        ],
        "BackwardPlan.run": gradients,
        "explain": [({}, "str")],
    }


def type_of(library, row, name, planned):
    kinds = TYPES[library]
    if name == "q" and row.kind == "tensor" and library == "":
        return "_Array"
    if row.kind == "result" and planned:
        return "_DLPack"
    if row.kind == "dlse" and planned:
        return "_DLPack | _Shape"
    if name in ("seed", "offset"):
        return kinds.get("int of seed, offset", "int")
    return kinds.get(row.kind, row.kind)


def argument(library, row, name, types, planned):
    if name in types:
        return f"{name}: {types[name]}"
    kind = type_of(library, row, name, planned)
    if row.default is _spec.REQUIRED:
        return f"{name}: {kind}"
    optional = f"{kind} | None" if row.kind in TENSORS and row.default is None else kind
    default = f'"{row.default}"' if isinstance(row.default, str) else row.default
    return f"{name}: {optional} = {default}"


def signature(library, name, types, result):
    function = _spec.FUNCTIONS[f"{library}.{name}".lstrip(".")]
    planned = name in ("plan", "plan_backward")
    lines = [f"self: {types['self']}" if "self" in types else "self"] if "." in name else []
    for rows, before in ((function.positional, []), (function.keywords, ["*"])):
        lines += before
        lines += [argument(library, row, x, types, planned) for row in rows for x in row.names]
    arguments = "".join(f"    {line},\n" for line in lines)
    return f"def {name.rpartition('.')[2]}(\n{arguments}) -> {result}:"


def documentations(*paths):
    """Of functions and of methods, by their names."""
    found = {}

    def visit(body, prefix=""):
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                found[prefix + node.name] = ast.get_docstring(node)

    for path in paths:
        visit(ast.parse(path.read_text()).body)
    return found


def operators():
    """The stubs of the operators of Expression."""
    lines = [f"__{x}__(self, other: _Operand) -> Expression" for name in OPERATORS for x in (name, f"r{name}")]
    lines += [f"__{x}__(self, other: _Operand) -> Expression" for x in COMPARES]
    lines += [f"__{x}__(self) -> Expression" for x in ("neg", "pos", "invert", "abs")]
    ignored = {f"__{x}__" for x in ("eq", "ne")}
    return "".join(
        f"    def {x}: ..." + "  # type: ignore[override]" * (x.partition("(")[0] in ignored) + "\n" for x in lines
    )


def expression_functions():
    """The stubs of the functions of expressions."""
    functions = ((name, inspect.signature(getattr(_expressions, name))) for name in sorted(_expressions.FUNCTIONS))
    return "\n".join(
        f"def {name}({', '.join(f'{x}: _Operand' for x in of.parameters)}) -> Expression: ..." for name, of in functions
    )


def functions(library, names, texts):
    """The stubs of functions, the first of each with its documentation."""
    result = []
    for name in names:
        variants = overloads(library)[name]
        for n, (types, returns) in enumerate(variants):
            stub = "@overload\n" if len(variants) > 1 else ""
            stub += signature(library, name, types, returns)
            if n == 0:
                text = _spec.document(f"{library}.{name}".lstrip("."), texts[name])
                lines = f'"""{text}\n"""'.splitlines()
                stub += "\n" + textwrap.indent("\n".join(lines), "    ") + "\n"
            else:
                stub += " ...\n"
            result.append(stub)
    return result


def names_of(path):
    (names,) = (
        node.value for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )  # fmt: skip
    return "[\n" + "".join(f'    "{name}",\n' for name in ast.literal_eval(names)) + "]"


def stub(library):
    folder = PACKAGE / library
    texts = documentations(folder / "_calls.py", *folder.glob("_plans.py"))
    header = HEADERS[library].replace("{operators}", operators())
    parts = [header.replace("{names}", names_of(folder / "__init__.py"))]
    names = list(overloads(library))
    if library == "":
        for plan, base in (("Plan", "_AnyPlan, Generic[_ReturnLse]"), ("BackwardPlan", "_AnyPlan")):
            runs = functions(library, [f"{plan}.run"], texts)
            parts.append(f"class {plan}({base}):\n" + textwrap.indent("".join(runs), "    "))
            names.remove(f"{plan}.run")
    footer = FOOTERS[library].replace("{functions}", expression_functions())
    parts.append("".join(functions(library, names, texts)) + footer)
    return "\n".join(parts)


def stubs():
    """The texts of all stubs by their files."""
    return {PACKAGE / library / "__init__.pyi": stub(library) for library in HEADERS}


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
