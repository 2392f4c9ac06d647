"""The operators in ``torch.utils.flop_counter``: two matrix products of the scores that the mask shows."""

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils.flop_counter import register_flop_formula

from fulgur.torch import _expressions  # noqa: F401  which defines operators
from fulgur.torch._operators import append_forward, by_name


def _triangle(n):
    n = torch.sym_max(n, 0)
    return n * (n + 1) // 2


def _visible_scores(
    q, k, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, window_left=-1,
    window_right=-1, chunk=0, top_left=False, leftpad_k=None, page_table=None, **_,
):  # fmt: skip
    """The number of scores that the mask shows in all sequences of all heads. If fake tensors or tensors on meta
    hide the lengths, packed sequences count as equally long, and all others as long as they may be."""

    def in_band(sq, sk):
        def up_to(right):  # of query i the key `right` after that on its diagonal
            right += 0 if top_left else sk - sq
            corners = (right + sq, 1), (right, -1), (right + sq - sk, -1), (right - sk, 1)
            return sum(sign * _triangle(n) for n, sign in corners)

        count = sq * sk if window_right < 0 else up_to(window_right)
        return count if window_left < 0 else count - up_to(-window_left - 1)

    def visible(sq, sk):
        if chunk == 0:
            return in_band(sq, sk)
        count = 0
        for start in range(0, sk, chunk):
            end = min(start + chunk, sk)
            rows = min(start + chunk, sq) - start if top_left else end - max(start, sk - sq)
            count += in_band(max(rows, 0), end - start)
        return count

    heads = q.shape[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    sequences = torch.sym_max(batch, 1)
    sq = q.shape[1] if cu_seqlens_q is None else q.shape[0] // sequences
    if page_table is not None:
        sk = page_table.numel() // sequences * k.shape[1]
    else:
        sk = k.shape[1] if cu_seqlens_k is None else k.shape[0] // sequences
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k
    lengths = [x for x in lengths if x is not None]
    if not lengths or any(is_fake(x) or x.is_meta for x in lengths):
        return heads * batch * visible(sq, sk)

    def numbers(used, cu_seqlens, otherwise):
        used = cu_seqlens.diff() if used is None and cu_seqlens is not None else used
        return [otherwise] * batch if used is None else used.tolist()

    if seqused_k is not None and leftpad_k is not None:
        seqused_k = seqused_k - leftpad_k
    queries, keys = numbers(seqused_q, cu_seqlens_q, sq), numbers(seqused_k, cu_seqlens_k, sk)
    return heads * sum(map(visible, queries, keys))


def _forward_flops(op):
    def flops(*args, out_val, **options):
        given = by_name(op, args) | options
        return _visible_scores(**given) * 2 * (given["q"].shape[-1] + given["v"].shape[-1])

    return flops


for _packet in (torch.ops.fulgur.forward, torch.ops.fulgur.forward_cached, torch.ops.fulgur.expression_forward):
    register_flop_formula(_packet, get_raw=True)(_forward_flops(_packet.default))


@register_flop_formula(torch.ops.fulgur.append_forward, get_raw=True)
def _append_forward_flops(*args, out_val, **options):
    given = by_name(append_forward, args) | options
    fresh = given.get("cu_seqlens_k_new")
    fresh = given["k_new"].shape[1] if fresh is None else fresh.diff()
    given |= dict(k=given["k_cache"], seqused_k=given["cache_seqlens"] + fresh)
    return _visible_scores(**given) * 2 * (given["q"].shape[-1] + given["v_cache"].shape[-1])


def _backward_flops(op):
    def flops(*args, out_val, **options):
        given = by_name(op, args) | options
        return _visible_scores(**given) * (6 * given["q"].shape[-1] + 4 * given["v"].shape[-1])

    return flops


for _packet in (torch.ops.fulgur.backward, torch.ops.fulgur.expression_backward):
    register_flop_formula(_packet, get_raw=True)(_backward_flops(_packet.default))
