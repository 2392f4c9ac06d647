"""From padded batches to packed sequences and back, as flash-attn's module of this name."""

import torch
from torch.nn.functional import pad


def index_first_axis(x, indices):
    """The rows of x that are named."""
    return x.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """Rows of zeros, and the values at those that are named."""
    rows = values.new_zeros(first_axis_dim, *values.shape[1:])
    return rows.index_copy(0, indices, values)


def _packed(hidden_states, kept, lengths):
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, int(lengths.max()) if lengths.numel() > 0 else 0


def _want_mask(name, mask, hidden_states):
    if mask.shape != hidden_states.shape[:2]:
        got, want = tuple(mask.shape), tuple(hidden_states.shape[:2])
        raise ValueError(f"{name}: got shape {got}, want {want}, the first dimensions of hidden_states")


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """The rows of ``(batch, seqlen, ...)`` that a mask ``(batch, seqlen)`` keeps.

    Returns:
        (rows, their indices in the flat batch, cu_seqlens int32 (batch + 1,), the longest sequence,
        the rows of each sequence that attention_mask itself keeps: unused_mask keeps more).
    """
    _want_mask("attention_mask", attention_mask, hidden_states)
    if unused_mask is not None:
        _want_mask("unused_mask", unused_mask, hidden_states)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    packed = _packed(hidden_states, kept, kept.sum(-1, dtype=torch.int32))
    return *packed, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """Rows of ``(batch, seqlen, ...)`` that hold several sequences each, one after the other.

    ``attention_mask_in_length`` ``(batch, seqlen)`` begins with the lengths of a row's sequences;
    the rest is 0. Returns (rows, their indices, cu_seqlens, the longest sequence).
    """
    places = torch.arange(attention_mask_in_length.shape[-1], device=hidden_states.device)
    kept = places < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    return _packed(hidden_states, kept, lengths)


def pad_input(hidden_states, indices, batch, seqlen):
    """The rows at their indices in ``(batch, seqlen, ...)``, zeros elsewhere."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])
