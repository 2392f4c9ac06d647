"""Calls with expressions: their texts, and the operators ``torch.ops.fulgur.expression_forward`` and
``expression_backward``, which are those of attention with texts and the tensors that these index."""

import re

import torch

from fulgur import _arguments as _a
from fulgur import _expressions as _e
from fulgur import _fulgur
from fulgur.torch import _operators
from fulgur.torch._operators import by_name, library
from fulgur.torch._tensors import has_codes, whole_rows

MODS = ("score_mod", "mask_mod")
# What the tensors of expressions are called among those of a call.
PREFIX = "tensors."
_DTYPES = {
    torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64", torch.int32: "i32",
    torch.int64: "i64", torch.bool: "bool",
}  # fmt: skip
_PLACES = {"score_mod": _e.SYMBOLS, "mask_mod": _e.SYMBOLS[1:]}


@torch.compiler.disable(
    reason="functions for score_mod and mask_mod are not looked at in a graph: want a text, or what fulgur.expression "
    "makes of the function outside of it"
)
def _text(name, what, tensors):
    """The text of a function or an Expression."""
    views = {x: _fulgur.planned(x, [1] * tensor.dim(), _DTYPES[tensor.dtype]) for x, tensor in tensors.items()}
    return _e.made(name, what, tensors, _e.symbols_of(views), _PLACES[name]).text()


def texts(given, tensors):
    """score_mod and mask_mod of a call as texts, "" for none; `tensors`: those that they index, by name."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"tensors: {name}: got {type(x).__name__}, want a tensor")
        if x.dtype not in _DTYPES:
            raise TypeError(f"tensors: {name}: got {x.dtype}, want {', '.join(map(str, _DTYPES))}")
    found = {}
    for name in MODS:
        what = given.get(name)
        if what is None:
            found[name] = ""
        elif isinstance(what, str):
            found[name] = what
        elif isinstance(what, _e.Expression) and what.text is not None:
            found[name] = what.text
        else:
            found[name] = _text(name, what, tensors)
    return found


def tensors_of(given):
    """The tensors that a call gives its expressions."""
    tensors = given.get("tensors")
    if tensors is None:
        return {}
    if not isinstance(tensors, dict):
        raise TypeError(f"tensors: got {type(tensors).__name__}, want a dict of tensors by name")
    return tensors


def _define(name, schema, of_results, of_call):
    """An operator that takes expressions, too, of the schema of the one that does not."""
    arguments, results = re.fullmatch(r"\w+\((.*)\) -> \((.*)\)", schema).groups()
    at = arguments.index("Tensor? ")
    mine = f"Tensor[] tensors, str[] names, str score_mod, str mask_mod, {of_call}"
    library.define(
        f"{name}({arguments[:at]}{mine}{arguments[at:]}) -> ({results}{of_results})", tags=torch.Tag.pt2_compliant_tag
    )
    return getattr(torch.ops.fulgur, name).default


_schemas = {x.partition("(")[0]: x for x in _fulgur.torch_schemas()}
expression_forward = _define("expression_forward", _schemas["forward_cached"], "", "")
expression_backward = _define(
    "expression_backward", _schemas["backward"], ", Tensor[] dtensors", "str[] wanted, "
)
_OPTIONS = _fulgur.option_defaults()


def _call(op, arguments):
    """A call of an operator as the module has it: views, options, stream."""
    given = by_name(op, arguments)
    tensors = dict(zip(given.pop("names"), given.pop("tensors")))
    q = given["q"]
    stream = _fulgur.current_stream(q.detach())
    if q.dim() not in (3, 4):
        raise ValueError(f"q: got {q.dim()} dimensions, want (batch, seqlen, heads, dim) or (total, heads, dim)")
    views = {
        name: _a.view(name, x.detach(), stream=stream) for name, x in given.items() if isinstance(x, torch.Tensor)
    }
    views["tensors"] = {name: _a.view(name, x.detach(), stream=stream) for name, x in tensors.items()}
    symbols = _e.symbols_of(views["tensors"])
    options = {**_OPTIONS, **{x: y for x, y in given.items() if x in _OPTIONS}, "engine": "", "algorithm": ""}
    options["threads"] = torch.get_num_threads() if q.device.type == "cpu" else 0
    for name in MODS:
        if given[name]:
            options[name] = _e.made(name, given[name], {}, symbols)
    return given, tensors, views, options, stream


def _written(name, x):
    return {name: _a.view(name, x, writable=True)}


def _results(q, v, **_):
    """Empty out, in the layout of q, and lse."""
    like_q = q.shape[-1] == v.shape[-1] and not has_codes(q)
    out = torch.empty_like(q) if like_q else _operators.empty_out(q, v)
    return out, _operators.empty_lse(q)


def _compute_forward(*arguments):
    given, _, views, options, stream = _call(expression_forward, arguments)
    q, v = given["q"], given["v"]
    out, lse = _results(q, v)
    _fulgur.forward(views | _written("out", out) | _written("lse", lse), options, stream, 0, 0)
    return out, lse


def _compute_backward(*arguments):
    given, tensors, views, options, stream = _call(expression_backward, arguments)
    results = _empty_gradients(tensors=list(tensors.values()), names=list(tensors), **given)
    *rows, dsinks, dbias, dtensors = results
    for name, x in zip(("dq", "dk", "dv"), rows):
        views |= _written(name, x)
    if given.get("sinks") is not None:
        views |= _written("dsinks", dsinks)
    if given.get("with_dbias"):
        views |= _written("dbias", dbias)
    views["dtensors"] = {name: _a.view(name, x, writable=True) for name, x in zip(given["wanted"], dtensors)}
    _fulgur.backward(views, options, stream, 0, 0)
    return results


def _empty_gradients(tensors, names, wanted, **given):
    known = dict(zip(names, tensors))
    dtensors = [known[name].new_empty(known[name].shape) for name in wanted]
    return *_operators.empty_gradients(**given), dtensors


for _device in ("CPU", "CUDA"):
    library.impl(expression_forward, _compute_forward, _device)
    library.impl(expression_backward, _compute_backward, _device)
_operators.fake(expression_forward)(_results)
_operators.fake(expression_backward)(_empty_gradients)
for _op in (expression_forward, expression_backward):
    _operators.refuse(_op)


def _at(i, x, dim):
    """The part of a mapped argument that belongs to the i-th call."""
    if isinstance(x, (list, tuple)):
        return [_at(i, y, n) for y, n in zip(x, dim or [None] * len(x))]
    return x if dim is None else whole_rows("vmap", x.select(dim, i))


def _one_after_another(op):
    """The rule of an operator under vmap: what a formula says of a sequence may not be true of it in a larger batch."""

    def rule(info, in_dims, *arguments):
        calls = [op(*(_at(i, x, dim) for x, dim in zip(arguments, in_dims))) for i in range(info.batch_size)]
        results = [
            torch.stack(x) if isinstance(x[0], torch.Tensor) else [torch.stack(y) for y in zip(*x)]
            for x in zip(*calls)
        ]
        return tuple(results), tuple(0 if isinstance(x, torch.Tensor) else [0] * len(x) for x in results)

    torch.library.register_vmap(op._name, rule, lib=library)


for _op in (expression_forward, expression_backward):
    _one_after_another(_op)


def _apart(given):
    """What a call gives, with the tensors of expressions apart, as the operators take them."""
    own = {name: x for name, x in given.items() if not name.startswith(PREFIX)}
    mine = {name.removeprefix(PREFIX): x for name, x in given.items() if name.startswith(PREFIX)}
    return own, {"tensors": list(mine.values()), "names": list(mine)}


def forward(q, k, v, given):
    """(out, lse) of a call whose tensors have the names that :data:`PREFIX` begins."""
    given, mine = _apart(given)
    return expression_forward(q, k, v, **mine, **given)


def backward(given, wanted):
    """(dq, dk, dv, dsinks, dbias, and the gradients of the wanted tensors)."""
    given, mine = _apart(given)
    names = [name.removeprefix(PREFIX) for name in wanted]
    *results, dtensors = expression_backward(**mine, wanted=names, **given)
    return *results, *dtensors
