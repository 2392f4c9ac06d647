"""The calls of XLA's handlers, under jit, and the gradient of attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fulgur import _fulgur
from fulgur._spec import TENSORS, WITHOUT_GRADIENT

if jax.__version_info__ < (0, 7):
    raise ImportError(f"fulgur.jax: got JAX {jax.__version__}, want 0.7 or newer")

for _target, _platforms in _fulgur.jax_handlers().items():
    for _platform, _stages in _platforms.items():
        jax.ffi.register_ffi_target(_target, _stages, platform=_platform)

# The names of the operands and of the results of each, in their order; what they have of them is a
# number with a bit for each tensor.
_CALLS = _fulgur.jax_calls()
_BITS = {name: 1 << entry.number for entries in TENSORS.values() for name, entry in entries.items()}
_OPTIONS = _fulgur.option_defaults()
# The functions of the calls that write new rows into caches.
_WRITERS = {"fulgur_append": "append", "fulgur_append_forward": "append_attention"}


# What the tensors of expressions are called among those of a call, after which they come, in the order of their names.
PREFIX = "tensors."


def fixed(options, interleaved=False, mods=("", "")):
    """What is fixed when a call is traced: the numbers that a handler reads, reals and integers, and the texts of
    score_mod and mask_mod."""
    whole = [name for name, default in _OPTIONS.items() if isinstance(default, int)]
    reals = tuple(options[name] for name in _OPTIONS if name not in whole)
    return reals, (*(int(options[name]) for name in whole), int(interleaved)), mods


def _indexed(names, prefix=PREFIX):
    return sorted(x for x in names if x.startswith(prefix))


def _texts(*texts):
    return np.frombuffer("\0".join(texts).encode(), np.uint8)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _call(target, results, options, operands):
    """The results by name of a handler, of operands by name; dimensions of vmap lie in front of those of
    all arrays.

    What append writes, the caches and its rotated queries, lies where its operands are.
    """
    names, names_of_results = _CALLS[target]
    taken = [x for x in names if x in operands]
    written = [x for x in names_of_results if x in results]
    given = sum(_BITS[name] for name in {*taken, *written})
    indexed, gradients = _indexed(operands), _indexed(results, "d" + PREFIX)
    taken, written = taken + indexed, written + gradients
    sources = {x: x.removesuffix("_out") for x in written}
    reals, integers, mods = options
    texts = {
        "mods": _texts(*mods), "tensors": _texts(*(x.removeprefix(PREFIX) for x in indexed)),
        "dtensors": _texts(*(x.removeprefix("d" + PREFIX) for x in gradients)),
    }  # fmt: skip
    call = jax.ffi.ffi_call(
        target, [results[x] for x in written], vmap_method="broadcast_all",
        input_output_aliases={
            taken.index(source): written.index(x) for x, source in sources.items() if source in taken
        },
    )  # fmt: skip
    arrays = call(
        *(operands[x] for x in taken),
        reals=np.array(reals, np.float64),
        integers=np.array([*integers, given], np.int64),
        **({name: text for name, text in texts.items() if text.size} if any(mods) else {}),
    )
    return dict(zip(written, arrays))


@_call.defjvp
def _no_derivative(target, *_):
    if target in _WRITERS:
        raise ValueError(
            f"{_WRITERS[target]}: called where a gradient is wanted, and caches have none; want "
            "jax.lax.stop_gradient of its arrays"
        )
    raise NotImplementedError("fulgur.jax: attention has a first derivative only")


def _varying(x):
    """The axes of a mesh along which an array differs inside shard_map."""
    kind = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def vary_alike(arrays):
    """All arrays of a tree, differing along the same axes of a mesh: what XLA's calls want."""
    axes = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))

    def vary(x):
        missing = tuple(axes - _varying(x))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)

    return jax.tree.map(vary, arrays)


def _result(shape, dtype, like):
    """The type of a result that differs along the axes of a mesh along which `like` does."""
    kind = jax.typeof(like)
    if not hasattr(kind, "manual_axis_type"):  # the name since JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, vma=kind.vma)
    mesh = kind.sharding.mesh
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    axes = kind.manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=axes)


def _like(x, varying_as=None):
    """The type of a result with the shape and the dtype of x."""
    return _result(x.shape, x.dtype, x if varying_as is None else varying_as)


def _placed_as(x, like):
    """An array shared out among devices as `like` is, on a mesh whose axes are a part of types."""
    sharding = jax.typeof(like).sharding
    return x if all(axes is None for axes in sharding.spec) else jax.sharding.reshard(x, sharding)


def has_codes(*arrays):
    return any(x.dtype.name in ("float8_e4m3fn", "float8_e5m2", "int8") for x in arrays)


def _results(q, v, with_lse):
    """The types of out and lse by name."""
    dtype = jnp.bfloat16 if has_codes(q) else q.dtype
    results = {"out": _result((*q.shape[:-1], v.shape[-1]), dtype, q)}
    if with_lse:
        lse = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
        results["lse"] = _result((*q.shape[:-3], q.shape[-2], q.shape[-3]), lse, q)
    return results


def _results_of(target, results, options, tensors):
    """The results in their order: JAX gives dicts in that of their keys."""
    found = _call(target, results, options, tensors)
    return tuple(found[x] for x in results)


def _forward(options, tensors, with_lse):
    results = _results(tensors["q"], tensors["v"], with_lse)
    return _results_of("fulgur_forward", results, options, tensors)


@partial(jax.jit, static_argnums=(0, 1))  # a call that is not under jit finds it compiled
def attention(options, with_lse, tensors):
    """(out,), or out and lse."""
    return _attention(options, with_lse, tensors)


@partial(jax.jit, static_argnums=0)
def append(options, tensors):
    """The caches, and q if it is there, as they are after the call."""
    written = [x for x in ("k_cache", "v_cache", "q") if x in tensors]
    results = {"q_out" if x == "q" else x: _like(tensors[x]) for x in written}
    return _results_of("fulgur_append", results, options, tensors)


@partial(jax.jit, static_argnums=(0, 1))
def append_forward(options, with_lse, tensors):
    """The caches as they are after the call, and the results of attention."""
    caches = {x: _like(tensors[x]) for x in ("k_cache", "v_cache")}
    results = caches | _results(tensors["q"], tensors["v_cache"], with_lse)
    return _results_of("fulgur_append_forward", results, options, tensors)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(options, with_lse, tensors):
    return _forward(options, tensors, with_lse)


def _attention_fwd(options, with_lse, tensors):
    slopes = tensors.get("alibi_slopes")
    if slopes is not None and slopes.perturbed:
        raise ValueError(
            "alibi_slopes: a gradient is wanted, and there is none; want "
            "jax.lax.stop_gradient(alibi_slopes)"
        )
    for name in ("q", "k", "v"):
        if has_codes(tensors[name].value):
            raise ValueError(
                f"{name}: got {tensors[name].value.dtype} where a gradient is wanted, and codes have none; want "
                "jax.lax.stop_gradient of q, k, v and sinks"
            )
    for name in WITHOUT_GRADIENT:
        if name in tensors:
            codes = name.endswith(("_descale", "_zero_point", "_mean"))
            things = "tree masks" if name == "tree_mask" else "codes" if codes else "caches"
            raise ValueError(
                f"{name}: given where a gradient is wanted, and {things} have none; want "
                "jax.lax.stop_gradient of q, k, v and sinks"
            )
    differentiated = {x: None for x in ("q", "k", "v", "sinks") if x in tensors}
    for name in ("bias", *_indexed(tensors)):  # whose gradients take time of their own
        if name in tensors and tensors[name].perturbed:
            differentiated[name] = None
    tensors = {name: x.value for name, x in tensors.items()}
    results = _forward(options, tensors, with_lse=True)
    return results if with_lse else results[:1], (tensors, differentiated, *results)


def _attention_bwd(options, with_lse, saved, gradients):
    tensors, differentiated, out, lse = saved
    zero = jax.custom_derivatives.SymbolicZero
    dout, dlse = gradients if with_lse else (*gradients, None)
    operands = tensors | {"out": out, "lse": lse}
    operands["dout"] = jnp.zeros_like(out) if isinstance(dout, zero) else dout
    if dlse is not None and not isinstance(dlse, zero):
        operands["dlse"] = dlse
    results = {f"d{x}": _like(tensors[x], tensors["q"]) for x in differentiated}
    found = _call("fulgur_backward", results, options, vary_alike(operands))
    wanted = {x: _placed_as(found[f"d{x}"], tensors[x]) for x in differentiated}
    return (dict.fromkeys(tensors) | wanted,)


_attention.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=True)
