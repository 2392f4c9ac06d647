"""fulgur as an attention implementation of transformers.

    import fulgur.transformers

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fulgur")

Importing this module registers it. What a query sees is what the mask says that the model built
(:class:`Mask`): causal, a sliding window, chunks, padding on the left or right, packed sequences by
``position_ids`` that begin anew or by ``cu_seq_lens_q`` and ``cu_seq_lens_k``. Softcap, caches, other
dims of values than of keys and attention sinks (``s_aux``, as gpt-oss has them) are taken. Any other mask is
computed as it is, (batch, heads, queries, keys), biases of positions are added and trained, as T5 has them,
and attention weights are returned that are wanted (``output_attentions=True``). What else a model does raises
NotImplementedError, which names it.
"""

import dataclasses
import sys
from types import FunctionType
from typing import ClassVar

import torch
import transformers

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 6):
    raise ImportError(f"fulgur.transformers: got transformers {transformers.__version__}, want 5.6 or newer")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import output_capturing

from fulgur._drop_in import longest, refuse
from fulgur._names import named
from fulgur.flash_attn.bert_padding import pad_input, unpad_input
from fulgur.torch import attention, scores

__all__ = ["Mask", "attention_forward", "attention_mask"]

# What transformers calls what errors name.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "scale": "scaling", "window_left": "sliding_window",
    "chunk": "attention_chunk_size", "sinks": "s_aux", "dropout_p": "dropout",
    "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k", "max_seqlen_q": "max_length_q",
    "max_seqlen_k": "max_length_k", "bias": "attention_mask",
}  # fmt: skip

# What models pass along to every layer that says nothing of what a query sees.
_HARMLESS = {
    "cache_position", "is_first_iteration", "layer_idx", "logits_to_keep", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "past_key_values", "return_dict", "use_cache",
}  # fmt: skip
_CAPTURED = {"attentions", "cross_attentions", "mask_decoder_attentions"}


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """The mask that a model built, in the words of :func:`fulgur.torch.attention`.

    ``attention_mask`` makes it and ``attention_forward`` computes it; a model that reads or changes
    it in between gets an error.
    """

    queries: int  # rows of Q, and of K and V, that it is for
    rows: int
    keys: int  # the first ones of these rows, which exist: a static cache is longer
    causal: bool = False
    window: tuple = (-1, -1)
    chunk: int = 0
    padding: torch.Tensor | None = None  # bool (batch, keys): the keys that are none are False
    packed: torch.Tensor | None = None  # (batch, queries): equal numbers are of one sequence
    bias: torch.Tensor | None = None  # (batch, heads, queries, keys), of which each may be 1: all else

    ndim: ClassVar[int] = 4  # as transformers asks of masks that are made already

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"attention_mask: the model reads {name} of its mask, and fulgur has no mask in memory; "
            "want attn_implementation='eager'"
        )

    @classmethod
    def __torch_function__(cls, function, *_):
        raise NotImplementedError(
            f"attention_mask: the model computes {function.__name__} of its mask, and fulgur has no mask in "
            "memory; want attn_implementation='eager'"
        )

    def __getitem__(self, _):
        raise NotImplementedError(
            "attention_mask: the model takes a part of its mask, and fulgur has no mask in memory; "
            "want attn_implementation='eager'"
        )


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None,
    softcap=None, is_causal=None, s_aux=None, position_ids=None, cu_seq_lens_q=None,
    cu_seq_lens_k=None, max_length_q=None, max_length_k=None, deterministic=False, position_bias=None, **others,
):  # fmt: skip
    """(out ``(batch, seqlen, heads, dim)``, weights) of query, key and value ``(batch, heads, seqlen,
    dim)``, as transformers calls it. The weights ``(batch, heads, queries, keys)`` are None unless
    requested, and have no gradient.

    Args:
        attention_mask: a :class:`Mask`, or a tensor of four dimensions, bool or to be added, which
            alone says what a query sees; or None or padding ``(batch, keys)``, with which
            is_causal, or else the module, and sliding_window say it.
        position_bias: ``(batch, heads, queries, keys)``, of which each may be 1: added to the scores; it
            gets its gradient.

    Raises:
        NotImplementedError: an argument that fulgur does not know, a mask for other rows than query
            and key have, padding with packed sequences.
    """
    wants_weights = _wants_weights(others)
    refuse(**{name: x for name, x in others.items() if name not in _HARMLESS})
    # Modules may have norms in float32: then the weights of a Linear show the dtype. GPT-2's modules have no Linear.
    linear = (layer for layer in module.modules() if isinstance(layer, torch.nn.Linear))
    if query.dtype == torch.float32 and next(linear, None) is not None:
        dtype = get_target_dtype(query, module)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = attention_mask
    if isinstance(mask, Mask):
        _want_rows(mask, q, k)
    elif mask is not None and mask.dim() == 4:
        mask = _dense(mask, q, k)
    else:
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        mask = _mask_of(module, mask, q, k, causal, sliding_window)
    if mask.packed is None and mask.causal and mask.padding is None and cu_seq_lens_q is None:
        mask = dataclasses.replace(mask, packed=_numbers(position_ids, q, k))
    k, v = k[:, : mask.keys], v[:, : mask.keys]
    scored = dict(
        causal=mask.causal, window=mask.window, chunk=mask.chunk, scale=scaling, softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )  # fmt: skip
    options = scored | dict(dropout_p=dropout, deterministic=bool(deterministic))
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError("cu_seq_lens_q, cu_seq_lens_k: got only one of them, want both or none")
    weights, adds = None, mask.bias is not None or position_bias is not None
    if adds or wants_weights:
        wanted = "output_attentions" if wants_weights else "position_bias"
        refuse(**{
            f"{wanted} with cu_seq_lens_q": cu_seq_lens_q,
            f"{wanted} of chunks with padding": mask.chunk > 0 and mask.padding is not None,
            "output_attentions with dropout": wants_weights and dropout > 0,
        })  # fmt: skip
        bias = _bias(mask, position_bias, q.dtype)
        if wants_weights:
            weights = _weights(q, k, bias, mask.rows, scored)
        if adds:
            return named(_NAMES, attention, q, k, v, bias=bias, **options), weights
    if mask.padding is not None:
        refuse(**{"cu_seq_lens_q with padding": cu_seq_lens_q, "packed sequences with padding": mask.packed})
        return _padded(q, k, v, mask.padding, options), weights
    lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    if cu_seq_lens_q is None:
        ends = _ends(mask.packed, position_ids is not None)
        if ends is None:
            return named(_NAMES, attention, q, k, v, **options), weights
        lengths = ends, ends, None, None
    return _packed(q, k, v, *lengths, options), weights


def attention_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
    attention_mask=None, **options,
):  # fmt: skip
    """The :class:`Mask` that :func:`attention_forward` gets; a tensor of bools ``(batch, 1, queries,
    keys)`` where the mask has what no Mask has, as tokens of images that see each other both ways,
    queries beyond the last key, and chunks of several queries with a cache.

    Query i is at place q_offset + i and key j at kv_offset + j, as everywhere in transformers.

    Raises:
        NotImplementedError: the model never asks for an attention implementation and would take the
            mask for its own.
    """
    _want_interface(type(options.get("config")).__module__)
    if isinstance(attention_mask, Mask):
        return attention_mask
    of = batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask
    try:
        return _in_words(*of)
    except NotImplementedError:
        return sdpa_mask(*of, **options | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))


def _in_words(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask):
    """The :class:`Mask` of :func:`attention_mask`, where it has words for it."""
    form = dict(causal=False, window=(-1, -1), chunk=0)
    chunks = packed = places = None
    for name, inside in _overlays(mask_function):
        if name == "causal_mask_function":
            form["causal"] = True
        elif name == "sliding_window_overlay":
            form["window"] = inside["sliding_window"] - 1, form["window"][1]
        elif name == "sliding_window_bidirectional_overlay":
            form["window"] = (inside["sliding_window"],) * 2
        elif name == "chunked_overlay":
            chunks = inside
        elif name == "packed_sequence_mask_function":
            packed = inside["packed_sequence_mask"]
        elif name == "remap_positions_for_packed_sequence":
            places = inside["position_ids"]
        elif name != "bidirectional_mask_function":
            refuse(**{f"{name} in a mask": mask_function})
    keys = kv_length
    if form["causal"] or form["window"] != (-1, -1) or chunks is not None:
        keys = q_length + int(q_offset) - kv_offset
        if not 0 <= keys <= kv_length:
            place = int(q_offset) - kv_offset
            refuse(**{f"a mask of {q_length} queries from place {place} on, beyond the {kv_length} keys": True})
    padding = _padding_of(attention_mask, kv_offset, keys)
    if padding is not None and (form["window"] != (-1, -1) or chunks is not None):
        _want_one_piece(padding)
    if chunks is not None:
        form["chunk"], padding = _chunks(chunks, batch_size, q_length, keys, kv_offset, padding, packed, places)
    return Mask(q_length, kv_length, keys, padding=padding, packed=packed, **form)


def _wants_weights(others):
    """Whether a model wants attention weights, of which it may say so among its arguments."""
    captured = output_capturing._active_collector.get() or {}
    return bool(others.pop("output_attentions", None)) or not _CAPTURED.isdisjoint(captured)


def _dense(mask, q, k):
    """The :class:`Mask` of a tensor (batch, heads, queries, keys), which may know of more keys than there are."""
    refuse(**{f"attention_mask of {mask.dtype}": not mask.dtype.is_floating_point and mask.dtype != torch.bool})
    keys = k.shape[1]
    return Mask(q.shape[1], keys, keys, bias=mask[..., :keys])


def _bias(mask, position_bias, dtype):
    """What scores of this dtype take besides causal, window and chunk: (batch, heads, queries, keys), bool or
    numbers to add; None: nothing."""
    bias = mask.bias
    if position_bias is not None:
        bias = _both(bias, position_bias[..., : mask.keys])
    if mask.padding is not None:
        bias = _both(bias, mask.padding[:, None, None, :])
    if mask.packed is not None:
        bias = _both(bias, (mask.packed[:, :, None] == mask.packed[:, None, :])[:, None])
    return bias.to(dtype) if bias is not None and bias.dtype == torch.float64 else bias


def _both(x, y):
    """What two masks do, each of bools or of numbers to add."""
    if x is None:
        return y
    if x.dtype == y.dtype == torch.bool:
        return x & y
    if torch.bool not in (x.dtype, y.dtype):
        return x + y
    seen, numbers = (x, y) if x.dtype == torch.bool else (y, x)
    return torch.where(seen, numbers, -torch.inf)


def _weights(q, k, bias, rows, scored):
    """The attention weights (batch, heads, queries, rows), 0 of the rows after the keys, without a gradient."""
    with torch.no_grad():
        weights = named(_NAMES, scores, q, k, stage="probabilities", bias=bias, **scored).to(q.dtype)
    return torch.nn.functional.pad(weights, (0, rows - k.shape[1]))


def _want_rows(mask, q, k):
    """Raises where a mask is not for these queries and keys: a model has others than it built it for."""
    got = q.shape[1], k.shape[1]
    if got != (mask.queries, mask.rows):
        raise NotImplementedError(
            f"attention_mask: is for {mask.queries} queries and {mask.rows} keys, and the model has {got[0]} "
            f"and {got[1]}, of which it does not say what they see; want attn_implementation='eager'"
        )


def _mask_of(module, padding, q, k, causal, sliding_window):
    """The mask of a call whose model built none, or padding ``(batch, keys)`` alone."""
    keys = k.shape[1]
    if padding is not None and padding.dim() != 2:
        refuse(**{f"attention_mask of {padding.dim()} dimensions": padding})
    if causal is None:
        refuse(**{f"is_causal: neither given nor said by {type(module).__name__}, with no mask": True})
    if padding is not None:
        refuse(**{f"attention_mask of {padding.dtype}, which is added": padding.is_floating_point()})
        if padding.shape[0] != k.shape[0] or padding.shape[1] > keys:
            want = f"({k.shape[0]}, {keys} or less) = (batch, keys)"
            raise ValueError(f"attention_mask: got shape {tuple(padding.shape)}, want {want}")
        keys, padding = padding.shape[1], padding.bool()
    left = -1 if sliding_window is None or sliding_window >= keys else sliding_window - 1
    if padding is not None and left != -1:
        _want_one_piece(padding)
    return Mask(q.shape[1], k.shape[1], keys, causal, (left, left), 0, padding)


def _padding_of(mask, kv_offset, keys):
    """Which keys exist of those that a mask ``(batch, places)`` knows; None: all."""
    if mask is None:
        return None
    padding = mask[:, kv_offset : kv_offset + keys].bool()
    missing = keys - padding.shape[1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    return None if padding.all() else padding


def _want_one_piece(padding):
    """Raises where keys are missing between others: windows and chunks would count without them."""
    if (padding.int().diff(dim=1) != 0).sum(1).max() > 2 or (padding[:, 0] & padding[:, -1] & ~padding.all(1)).any():
        refuse(**{"padding between the tokens of a sequence, with a window or chunks": True})


def _chunks(chunks, batch_size, q_length, keys, kv_offset, padding, packed, places):
    """(keys of a chunk, padding) of chunks that begin with the first token of each sequence.

    A query alone has the keys of its chunk for padding: chunks of fulgur begin with the first key.
    """
    size = chunks["chunk_size"]
    if kv_offset + keys <= size:
        return 0, padding
    if packed is not None and places is not None:
        starts = torch.nn.functional.pad(packed.diff(dim=1) != 0, (1, 0), value=True)
        if places[starts].any():
            refuse(**{"chunks with position_ids that do not begin at 0": True})
    if q_length == keys:
        return size, padding
    if q_length > 1:
        refuse(**{"chunked_overlay of several queries with a cache": True})
    first = chunks["left_padding"][:, None]
    if padding is None:
        padding = first.new_ones(batch_size, keys, dtype=torch.bool)
    place = torch.arange(keys, device=padding.device) + kv_offset
    return 0, padding & ((place - first) // size == (place[-1] - first) // size)


@torch.compiler.assume_constant_result
def _want_interface(configuration):
    """Raises for a model that computes attention by itself. `configuration`: the module of its configuration."""
    name = configuration.replace(".configuration_", ".modeling_")
    module = sys.modules.get(name)
    of_model = {} if module is None else vars(module)
    computes = any(
        isinstance(x, type) and issubclass(x, torch.nn.Module) and x.__module__ == name
        for x_name, x in of_model.items() if "Attention" in x_name
    )  # fmt: skip
    if computes and "ALL_ATTENTION_FUNCTIONS" not in of_model:
        raise NotImplementedError(
            f"attn_implementation: {name} computes attention by itself; want 'eager', or a model that uses "
            "transformers' AttentionInterface"
        )


def _overlays(function):
    """The names of what a mask is the intersection of, and what these enclose."""
    if not isinstance(function, FunctionType):
        yield type(function).__name__, {}
        return
    name = function.__qualname__.split(".")[0]
    if function.__module__ != causal_mask_function.__module__:  # A model may give its own the same name.
        yield f"{function.__module__}.{name}", {}
        return
    cells = function.__closure__ or ()
    inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))
    if name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _overlays(part)
    elif name == "remap_positions_for_packed_sequence":
        yield name, inside
        yield from _overlays(inside["mask_function"])
    else:
        yield name, inside


def _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options):
    """A batch of rows that are several sequences each, one after the other."""
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out = named(
        _NAMES, attention, *rows, cu_seqlens_q=cu_seqlens_q.int(), cu_seqlens_k=cu_seqlens_k.int(),
        max_seqlen_q=longest("max_seqlen_q", max_seqlen_q, rows[0]),
        max_seqlen_k=longest("max_seqlen_k", max_seqlen_k, rows[1]),
        **options,
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2])


def _padded(q, k, v, mask, options):
    """A batch whose mask (batch, keys so far) says which keys are none.

    Where the mask gives the places of tokens, the queries are the last ones. Elsewhere, as in the
    attention of a decoder to an encoder's keys, they may be other tokens, and all of them exist.
    """
    keys, _, cu_seqlens_k, longest_k, _ = unpad_input(k, mask)
    values = unpad_input(v, mask)[0]
    in_place = options["causal"] or options["window"] != (-1, -1)
    mask_q = mask[:, -q.shape[1] :] if in_place else mask.new_ones(q.shape[:2])
    queries, places, cu_seqlens_q, longest_q, _ = unpad_input(q, mask_q)
    out = named(
        _NAMES, attention, queries, keys, values, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options,
    )  # fmt: skip
    return pad_input(out, places, *q.shape[:2])


def _numbers(position_ids, q, k):
    """A number for each token, equal in each sequence: places that do not go on begin a new one. None
    where the places are not those of q and k."""
    if position_ids is None or position_ids.dim() != 2 or q.shape[1] != k.shape[1]:
        return None
    if position_ids.shape[1] != q.shape[1]:
        return None
    position_ids = position_ids.expand(q.shape[0], -1)
    return torch.nn.functional.pad((position_ids.diff(dim=1) != 1).int(), (1, 0)).cumsum(1)


def _ends(packed, by_caller):
    """cu_seqlens of rows whose tokens have the numbers of their sequences; None: each is one sequence.

    While a model is traced, all masks are made of such numbers, whose values are not known: they are
    asserted to be equal, unless the caller gave position_ids of a single row.
    """
    if packed is None or packed.shape[1] == 1:
        return None
    if torch.compiler.is_compiling() and (packed.shape[0] > 1 or not by_caller):
        name = "position_ids that begin anew" + (" in several rows" if packed.shape[0] > 1 else "")
        same = (packed == packed[:, :1]).all()
        want = "a compiled model cannot tell how many sequences there are; want cu_seq_lens_q"
        torch._assert_async(same, f"{name}: {want}")
        return None
    if not (packed != packed[:, :1]).any():
        return None
    starts = torch.nn.functional.pad(packed.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([packed.numel()])])


AttentionInterface.register("fulgur", attention_forward)
AttentionMaskInterface.register("fulgur", attention_mask)
