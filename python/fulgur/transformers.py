"""fulgur as an attention implementation of transformers.

    import fulgur.transformers

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fulgur")

Importing this module registers it. It takes what transformers' flash attention takes: padded
batches with a mask ``(batch, seqlen)``, left or right; packed batches, by ``cu_seq_lens_q`` and
``cu_seq_lens_k`` or by ``position_ids`` that begin anew; sliding windows, softcap, caches, other
dims of values than of keys, attention sinks (``s_aux``, as gpt-oss has them); on the CPU as well.
Beyond that it takes chunks, as Llama 4's local layers have them.
"""

import sys
from types import FunctionType

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.masking_utils import causal_mask_function, flash_attention_mask

from fulgur._drop_in import longest, refuse
from fulgur._names import named
from fulgur.flash_attn.bert_padding import pad_input, unpad_input
from fulgur.torch import attention

__all__ = ["attention_forward", "attention_mask"]

# What transformers calls what errors name.
_NAMES = {
    "q": "query", "k": "key", "v": "value", "scale": "scaling", "window_left": "sliding_window",
    "chunk": "attention_chunk_size", "sinks": "s_aux", "dropout_p": "dropout",
    "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k", "max_seqlen_q": "max_length_q",
    "max_seqlen_k": "max_length_k",
}  # fmt: skip

# What transformers makes its masks of that attention_forward computes, from other arguments.
_OVERLAYS = {
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_overlay",
    "sliding_window_bidirectional_overlay", "chunked_overlay", "packed_sequence_mask_function",
}  # fmt: skip


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None,
    softcap=None, is_causal=None, s_aux=None, position_ids=None, cu_seq_lens_q=None,
    cu_seq_lens_k=None, max_length_q=None, max_length_k=None, deterministic=False, cache=None,
    block_table=None, position_bias=None, **_,
):  # fmt: skip
    """(out ``(batch, seqlen, heads, dim)``, None) of query, key and value ``(batch, heads, seqlen,
    dim)``, as transformers calls it.

    Raises:
        NotImplementedError: a bias of positions, paged caches, and masks of four dimensions.
    """
    refuse(cache=cache, block_table=block_table, position_bias=position_bias)
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            refuse(**{f"attention_mask of {attention_mask.dim()} dimensions": attention_mask})
        keys = attention_mask.shape[1]  # a static cache is longer
        key, value = key[:, :, :keys], value[:, :, :keys]
    # Modules may have norms in float32. GPT-2's have no Linear, by whose weights that would be told.
    linear = (layer for layer in module.modules() if isinstance(layer, torch.nn.Linear))
    if query.dtype == torch.float32 and next(linear, None) is not None:
        dtype = get_target_dtype(query, module)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    left = -1 if sliding_window is None or sliding_window >= k.shape[1] else sliding_window - 1
    options = dict(
        causal=module.is_causal if is_causal is None else is_causal, window=(left, left),
        # One query has a mask of the keys that it sees, and that of more keys than queries is refused.
        chunk=_chunk(module) if q.shape[1] == k.shape[1] else 0,
        scale=scaling, softcap=softcap or 0.0, sinks=None if s_aux is None else s_aux.float(),
        dropout_p=dropout, deterministic=bool(deterministic),
    )  # fmt: skip
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, options), None
    lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    if any(x is None for x in lengths):
        if not _begin_anew(position_ids, q.shape[0]):
            return named(_NAMES, attention, q, k, v, **options), None
        ends = _ends(position_ids)
        lengths = ends, ends, None, None
    return _packed(q, k, v, *lengths, options), None


def attention_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
    attention_mask=None, **options,
):  # fmt: skip
    """The mask of keys ``(batch, keys)`` that :func:`attention_forward` gets, or None.

    Raises:
        NotImplementedError: the mask has what fulgur does not have, as tokens of images that see each
            other both ways, and chunks of queries beside a cache; or the model never asks for an
            attention implementation and would take no mask as one that hides nothing.
    """
    _want_interface(type(options.get("config")).__module__)
    chunks = None
    for name, inside in _overlays(mask_function):
        if name not in _OVERLAYS:
            refuse(**{f"{name} in a mask": mask_function})
        if name == "chunked_overlay":
            chunks = inside
        # One row's sequences attention_forward finds by position_ids.
        if name == "packed_sequence_mask_function" and batch_size > 1:
            _refuse_packed(inside["packed_sequence_mask"])
    mask = flash_attention_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options
    )
    if chunks is None or kv_offset + kv_length <= chunks["chunk_size"]:
        return mask
    if q_length > 1:
        if q_length < (kv_length if mask is None else mask.shape[1]):
            refuse(**{"chunked_overlay of several queries beside a cache": mask_function})
        return mask
    first = chunks["left_padding"][:, None]
    if mask is None:
        mask = first.new_ones(batch_size, kv_length, dtype=torch.bool)
    places = torch.arange(mask.shape[1], device=mask.device) + kv_offset
    size = chunks["chunk_size"]
    return mask & ((places - first) // size == (q_offset - first) // size)


def _refuse_packed(sequences):
    """Raises for rows of which any is several sequences; their numbers begin with 0 in each row."""
    name = "position_ids that begin anew in several rows"
    if not torch.compiler.is_compiling():
        refuse(**{name: sequences})
    # Traced, all masks are made of these numbers, and only the graph can tell what they are.
    torch._assert_async((sequences == 0).all(), f"{name}: fulgur does not have this yet; want it left out")


@torch.compiler.assume_constant_result
def _want_interface(configuration):
    """Raises for a model that computes attention by itself, told by the module of its configuration."""
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
    cells = function.__closure__ or ()
    inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))
    if name == "and_masks":
        for part in inside["mask_functions"]:
            yield from _overlays(part)
    elif name == "remap_positions_for_packed_sequence":
        yield from _overlays(inside["mask_function"])
    else:
        yield name, inside


def _chunk(module):
    """How many keys the chunks of a module have; 0: it has none."""
    config, place = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or place is None or kinds[place] != "chunked_attention":
        return 0
    return config.attention_chunk_size


def _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options):
    """A batch of rows that are several sequences each, one behind the other."""
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out = named(
        _NAMES, attention, *rows, cu_seqlens_q=cu_seqlens_q.int(), cu_seqlens_k=cu_seqlens_k.int(),
        max_seqlen_q=longest(max_seqlen_q, rows[0]), max_seqlen_k=longest(max_seqlen_k, rows[1]),
        **options,
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2])


def _padded(q, k, v, mask, options):
    """A batch whose mask (batch, keys so far) says which keys are none.

    Where masks tell places, the queries are at the last ones; elsewhere they may be others, as in
    the decoder of an encoder's keys, and all of them exist.
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


def _begin_anew(position_ids, batch):
    """Whether the places of one row's tokens are those of several sequences."""
    if position_ids is None or batch != 1 or position_ids.shape[-1] == 1:
        return False
    return bool((position_ids.diff(dim=-1) != 1).any())


def _ends(position_ids):
    """cu_seqlens of places that begin with the least of all in each sequence, as in transformers."""
    places = position_ids.flatten()
    starts = (places == places.min()).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([len(places)])])


AttentionInterface.register("fulgur", attention_forward)
AttentionMaskInterface.register("fulgur", attention_mask)
