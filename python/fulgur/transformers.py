"""fulgur as an attention implementation of transformers.

    import fulgur.transformers

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fulgur")

Importing this module registers it. It takes what transformers' flash attention takes: padded
batches with a mask ``(batch, seqlen)``, left or right; packed batches, by ``cu_seq_lens_q`` and
``cu_seq_lens_k`` or by ``position_ids`` that begin anew; sliding windows, softcap, caches, other
dims of values than of keys, attention sinks (``s_aux``, as gpt-oss has them); on the CPU as well.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.masking_utils import flash_attention_mask

from fulgur._drop_in import longest, refuse
from fulgur.flash_attn.bert_padding import pad_input, unpad_input
from fulgur.torch import attention

__all__ = ["attention_forward"]


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
    if attention_mask is not None and attention_mask.dim() != 2:
        refuse(**{f"attention_mask of {attention_mask.dim()} dimensions": attention_mask})
    # Modules may have norms in float32. GPT-2's have no Linear, by whose weights that would be told.
    if any(isinstance(layer, torch.nn.Linear) for layer in module.modules()):
        dtype = get_target_dtype(query, module) or query.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    left = -1 if sliding_window is None or sliding_window >= k.shape[1] else sliding_window - 1
    options = dict(
        causal=module.is_causal if is_causal is None else is_causal, window=(left, left),
        scale=scaling, softcap=softcap or 0.0, sinks=None if s_aux is None else s_aux.float(),
        dropout_p=dropout, deterministic=bool(deterministic),
    )  # fmt: skip
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, options), None
    lengths = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    if any(x is None for x in lengths):
        if not _begin_anew(position_ids, q.shape[0]):
            return attention(q, k, v, **options), None
        ends = _ends(position_ids)
        lengths = ends, ends, None, None
    return _packed(q, k, v, *lengths, options), None


def _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options):
    """A batch of rows that are several sequences each, one behind the other."""
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out = attention(
        *rows, cu_seqlens_q=cu_seqlens_q.int(), cu_seqlens_k=cu_seqlens_k.int(),
        max_seqlen_q=longest(max_seqlen_q, rows[0]), max_seqlen_k=longest(max_seqlen_k, rows[1]),
        **options,
    )  # fmt: skip
    return out.unflatten(0, q.shape[:2])


def _padded(q, k, v, mask, options):
    """A batch whose mask (batch, keys so far) says which keys are none; the queries are the last."""
    k, v = k[:, : mask.shape[1]], v[:, : mask.shape[1]]  # a static cache is longer
    keys, _, cu_seqlens_k, longest_k, _ = unpad_input(k, mask)
    values = unpad_input(v, mask)[0]
    queries, places, cu_seqlens_q, longest_q, _ = unpad_input(q, mask[:, -q.shape[1] :])
    out = attention(
        queries, keys, values, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options,
    )  # fmt: skip
    return pad_input(out, places, *q.shape[:2])


def _begin_anew(position_ids, batch):
    """Whether the places of one row's tokens are those of several sequences."""
    if position_ids is None or batch != 1 or position_ids.shape[-1] == 1:
        return False
    return bool((position_ids.diff(dim=-1) != 1).any())


def _ends(position_ids):
    """cu_seqlens of places that begin with 0 in each sequence."""
    places = position_ids.flatten()
    starts = (places == 0).nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([len(places)])])


AttentionInterface.register("fulgur", attention_forward)
AttentionMaskInterface.register("fulgur", flash_attention_mask)
