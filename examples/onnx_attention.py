#!/usr/bin/env python3
"""The operators Attention, RotaryEmbedding and TensorScatter of ONNX (opset 23 to 25) by fulgur, on NumPy arrays.

    pip install fulgur onnx
    examples/onnx_attention.py          # runs the node cases that the package onnx brings, and says what differs

How Attention maps to fulgur.attention:

    Q, K, V         (batch, heads, seqlen, dim) are views of fulgur's (batch, seqlen, heads, dim): nothing is copied.
                    (batch, seqlen, heads * dim) with q_num_heads and kv_num_heads is that layout already.
    scale, softcap  the same; softcap comes before the mask in both.
    is_causal,      fulgur's causal and window. Query i is at key i + offset. Without a cache the offset is 0, whatever
    *_window_size   the numbers of keys and queries: top_left. With nonpad_kv_seqlen it is that number less the queries,
                    and so it is with past_key where as many keys as queries are new: fulgur's own alignment,
                    bottom-right. With any other past, the positions become a part of the dense mask.
    attn_mask       bias: bool, True where the query sees the key, or numbers to add. Its shape broadcasts. Where it has
                    fewer keys than K, the others are hidden.
    past_key,       present_key and present_value are past and new rows one after the other. (A server keeps both in one
    past_value      cache and calls fulgur.append_attention instead.)
    nonpad_kv_      seqused_k. Queries in front of the first key (a negative offset) see none.
    seqlen
    softmax_        is not looked at: fulgur's softmax is float32, float64 for float64.
    precision
    qk_matmul_      fulgur.scores: mode 0 is its stage "scaled", 1 "softcap", 2 "masked", 3 "probabilities".
    output

A query that sees no key has Y = 0, and in mode 3 a row of 0. RotaryEmbedding and TensorScatter are fulgur.append with
each token as a sequence of its own, so that positions and rows may be any.
"""

import sys

import numpy as np

import fulgur

STAGES = ("scaled", "softcap", "masked", "probabilities")


def attention(
    Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, *, scale=None, is_causal=0,
    softcap=0.0, q_num_heads=None, kv_num_heads=None, softmax_precision=None, qk_matmul_output_mode=0,
    left_window_size=-1, right_window_size=-1, wanted=4,
):  # fmt: skip
    """(Y, present_key, present_value, qk_matmul_output), of which the first `wanted` are made."""
    rank = Q.ndim
    q, k, v = (
        x.reshape(*x.shape[:2], heads, -1) if rank == 3 else x.transpose(0, 2, 1, 3)
        for x, heads in ((Q, q_num_heads), (K, kv_num_heads), (V, kv_num_heads))
    )
    sq, past = q.shape[1], 0
    if past_key is not None:
        past = past_key.shape[2]
        k, v = (np.concatenate((x.transpose(0, 2, 1, 3), y), axis=1) for x, y in ((past_key, k), (past_value, v)))
    sk = k.shape[1]

    options = dict(scale=scale, softcap=softcap)
    sees = dict(causal=bool(is_causal), window=(left_window_size, right_window_size), top_left=past_key is None)
    if nonpad_kv_seqlen is not None:
        sees.update(seqused_k=nonpad_kv_seqlen.astype(np.int32), top_left=False)
    elif past_key is not None and past + sq != sk:
        seen = in_window(sq, sk, past, left_window_size, 0 if is_causal else right_window_size)
        attn_mask = seen if attn_mask is None else restricted(attn_mask, seen)
        sees = {}
    if attn_mask is not None:
        sees["bias"] = with_all_keys(attn_mask, sk)

    y = fulgur.attention(q, k, v, **options, **sees)
    results = [y.reshape(*y.shape[:2], -1) if rank == 3 else y.transpose(0, 2, 1, 3)]
    results += [k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)]
    if wanted > 3:
        stage = STAGES[qk_matmul_output_mode]
        scores = fulgur.scores(q, k, stage=stage, **options, **(sees if qk_matmul_output_mode > 1 else {}))
        results.append(scores.astype(Q.dtype))
    return tuple(results[:wanted])


def in_window(sq, sk, offset, left, right):
    """Which keys (sk) the queries (sq) see whose first one is at key `offset`."""
    away = np.arange(sk) - np.arange(sq)[:, None] - offset
    return ((left < 0) | (away >= -left)) & ((right < 0) | (away <= right))


def restricted(mask, seen):
    """A mask that hides what either hides."""
    mask = with_all_keys(mask, seen.shape[1])
    return mask & seen if mask.dtype == bool else np.where(seen, mask, mask.dtype.type(-np.inf))


def with_all_keys(mask, sk):
    """A mask of four dimensions that has each key, those that it lacks hidden."""
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    hidden = False if mask.dtype == bool else -np.inf
    return np.pad(mask, [(0, 0)] * 3 + [(0, sk - mask.shape[3])], constant_values=hidden)


def rotary_embedding(X, cos_cache, sin_cache, position_ids=None, *, interleaved=0, num_heads=0, rotary_embedding_dim=0):
    """X with its tokens rotated to their positions, or by angles of their own where there are no positions."""
    x = X.reshape(*X.shape[:2], num_heads, -1) if X.ndim == 3 else X.transpose(0, 2, 1, 3)
    tokens = np.ascontiguousarray(x).reshape(-1, 1, *x.shape[2:])
    cos, sin = (angles.reshape(-1, angles.shape[-1]) for angles in (cos_cache, sin_cache))
    positions = np.arange(len(tokens)) if position_ids is None else position_ids.ravel()
    if rotary_embedding_dim and rotary_embedding_dim != 2 * cos.shape[1]:
        raise ValueError(f"rotary_embedding_dim: got {rotary_embedding_dim}, want twice the {cos.shape[1]} angles")
    rotated, values = np.empty_like(tokens), np.empty_like(tokens)
    fulgur.append(
        rotated, values, tokens, tokens, np.zeros(len(tokens), np.int32), cos=cos, sin=sin,
        interleaved=bool(interleaved), rotary_seqlens=positions.astype(np.int32),
    )  # fmt: skip
    rotated = rotated.reshape(x.shape)
    return rotated.reshape(X.shape) if X.ndim == 3 else rotated.transpose(0, 2, 1, 3)


def tensor_scatter(past_cache, update, write_indices=None, *, axis=-2, mode="linear"):
    """A copy of the cache with the rows of `update` written from the row write_indices of each sequence on."""
    cache, new = (np.moveaxis(x, axis, 1) for x in (past_cache, update))
    rows, count = cache.shape[1], new.shape[1]
    present = np.array(cache).reshape(*cache.shape[:2], -1, cache.shape[-1])
    tokens = np.ascontiguousarray(new).reshape(-1, 1, *present.shape[2:])
    first = np.zeros(len(cache), np.int64) if write_indices is None else write_indices
    places = first[:, None] + np.arange(count)
    places = (places % rows if mode == "circular" else places).astype(np.int32).ravel()
    sequences = np.repeat(np.arange(len(cache), dtype=np.int32), count)
    fulgur.append(present, np.empty_like(present), tokens, tokens, places, cache_batch_idx=sequences)
    return np.moveaxis(present.reshape(cache.shape), 1, axis)


def run(node, inputs):
    """The outputs of an ONNX node with these operands, None for those that are not given."""
    from onnx import helper

    options = {x.name: helper.get_attribute_value(x) for x in node.attribute}
    options = {name: x.decode() if isinstance(x, bytes) else x for name, x in options.items()}
    if node.op_type == "Attention":
        return attention(*inputs, **options, wanted=len(node.output))
    return ({"RotaryEmbedding": rotary_embedding, "TensorScatter": tensor_scatter}[node.op_type](*inputs, **options),)


def cases():
    """The node cases of these operators that the package onnx brings, but for those of their expansions."""
    from onnx.backend.test.case import node
    from onnx.backend.test.case.node import attention, rotaryembedding, tensorscatter  # noqa: F401  which add theirs

    return [case for case in node._NodeTestCases if not case.name.endswith("_expanded")]


def check(case):
    """Raises AssertionError where a result differs from that of the case by more than its tolerance, or in bfloat16 by
    more than two steps: one is more than that tolerance, and the numbers of the case were rounded many times."""
    (node,) = case.model.graph.node
    for operands, wanted in case.data_sets:
        given = dict(zip((x.name for x in case.model.graph.input), operands))
        results = dict(zip(node.output, run(node, [given.get(name) for name in node.input])))
        for output, want in zip(case.model.graph.output, wanted):
            got = results[output.name]
            assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape)
            rtol = max(case.rtol, 2.0**-6 if want.dtype.name == "bfloat16" else 0)
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol, case.atol)


def main():
    failed = 0
    for case in cases():
        try:
            check(case)
        except Exception as error:
            failed += 1
            print(f"{case.name}: {type(error).__name__}: {error}")
    print(f"{len(cases()) - failed} of {len(cases())} cases are as ONNX has them")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
