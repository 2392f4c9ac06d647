"""The modules that stand in for FlashAttention's: signatures, results, refusals, install_as()."""

import importlib.util
import inspect
import itertools
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounter  # noqa: E402

import fulgur  # noqa: E402
from fulgur import flash_attn as fa2  # noqa: E402
from fulgur import flash_attn_cute as fa4  # noqa: E402
from fulgur import flash_attn_interface as fa3  # noqa: E402
from fulgur._names import named  # noqa: E402
from fulgur.flash_attn import bert_padding, flash_attn_interface  # noqa: E402
from fulgur.flash_attn.layers import rotary  # noqa: E402
from fulgur.flash_attn_cute import interface as fa4_interface  # noqa: E402
from fulgur.torch import attention  # noqa: E402

TAIL2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
DESCALE = "q_descale=None, k_descale=None, v_descale=None"
TAIL3 = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALE}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
MODS = "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
PRIVATE2 = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap"

# As upstream's: flash-attn 2.8.4, FlashAttention-3 of the same day, flash-attn-4 4.0.0b36.
SIGNATURES = {
    (fa2, "flash_attn_func"): f"q, k, v, {TAIL2}",
    (fa2, "flash_attn_kvpacked_func"): f"q, kv, {TAIL2}",
    (fa2, "flash_attn_qkvpacked_func"): f"qkv, {TAIL2}",
    (fa2, "flash_attn_varlen_func"): f"q, k, v, {VARLEN}, {TAIL2}, block_table=None",
    (fa2, "flash_attn_varlen_kvpacked_func"): f"q, kv, {VARLEN}, {TAIL2}",
    (fa2, "flash_attn_varlen_qkvpacked_func"): f"qkv, cu_seqlens, max_seqlen, {TAIL2}",
    (fa2, "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False"
    ),
    (flash_attn_interface, "_flash_attn_forward"): (
        f"q, k, v, {PRIVATE2}, alibi_slopes, return_softmax"
    ),
    (flash_attn_interface, "_flash_attn_backward"): (
        f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {PRIVATE2}, alibi_slopes, deterministic, "
        "rng_state=None"
    ),
    (flash_attn_interface, "_flash_attn_varlen_forward"): (
        f"q, k, v, {VARLEN}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0"
    ),
    (flash_attn_interface, "_flash_attn_varlen_backward"): (
        f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {VARLEN}, {PRIVATE2}, alibi_slopes, "
        "deterministic, rng_state=None, zero_tensors=False"
    ),
    (bert_padding, "unpad_input"): "hidden_states, attention_mask, unused_mask=None",
    (bert_padding, "pad_input"): "hidden_states, indices, batch, seqlen",
    (rotary, "apply_rotary_emb"): (
        "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "max_seqlen=None"
    ),
    (rotary, "apply_rotary_emb_qkv_"): (
        "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None"
    ),
    (rotary, "apply_rotary_emb_kv_"): "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    (rotary, "RotaryEmbedding"): "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    (fa3, "flash_attn_func"): f"q, k, v, {TAIL3}",
    (fa3, "flash_attn_varlen_func"): (
        f"q, k, v, {VARLEN}, seqused_q=None, seqused_k=None, {TAIL3}"
    ),
    (fa3, "flash_attn_qkvpacked_func"): (
        f"qkv, softmax_scale=None, causal=False, {DESCALE}, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, "
        "return_attn_probs=False"
    ),
    (fa3, "_flash_attn_forward"): (
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
        "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
        f"seqlens_rotary=None, {DESCALE}, softmax_scale=None, causal=False, window_size_left=-1, "
        "window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0"
    ),
    (fa3, "_flash_attn_backward"): (
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
        "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, "
        "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, "
        "deterministic=False, sm_margin=0"
    ),
    (fa3, "flash_attn_combine"): "out_partial, lse_partial, out=None, out_dtype=None",
    (fa3, "flash_attn_with_kvcache"): (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        f"{DESCALE}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    (fa4, "flash_attn_func"): (
        "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        f"{MODS}, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
        "block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, "
        "gather_bwd_token_chunk=None"
    ),
    (fa4, "flash_attn_varlen_func"): (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
        "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        f"{MODS}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
    ),
    (fa4_interface, "_flash_attn_fwd"): (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, "
        "softmax_scale=None, causal=False, softcap=None, window_size_left=None, "
        "window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
        "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, "
        "score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, "
        f"lse=None, aux_tensors=None, aux_scalars=None, {DESCALE}, gather_kv_indices=None, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False"
    ),
    (fa4_interface, "_flash_attn_bwd"): (
        "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
        "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, "
        "num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, "
        "dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, "
        "V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, "
        "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, dlse=None, learnable_sink=None"
    ),
    (fa4_interface, "_flash_attn_fwd_combine"): (
        "out_partial, lse_partial, out, lse=None, cu_seqlens=None, seqused=None, "
        "num_splits_dynamic_ptr=None, virtual_batch_idx=None, semaphore_to_reset=None, *, _arch=None"
    ),
    (fa4_interface, "flash_attn_combine"): (
        "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
        "virtual_batch_idx=None, return_lse=True"
    ),
    (fa4_interface, "get_scheduler_metadata"): (
        "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
        "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, "
        "cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, "
        "leftpad_k=None, seqlen_k_per_split=None, _arch=None"
    ),
}


@pytest.mark.parametrize("place", SIGNATURES, ids=lambda x: f"{x[0].__name__}.{x[1]}")
def test_signature(place):
    assert str(inspect.signature(getattr(*place))) == f"({SIGNATURES[place]})"


def make(*shapes, grad=False):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=grad) for shape in shapes]


def make_qkv(grad=False):
    return make((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), grad=grad)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


OPTIONS = [
    ({}, {}),
    (dict(causal=True), dict(causal=True)),
    (dict(window_size=torch.tensor([2, 1])), dict(window=(2, 1))),
    (dict(softmax_scale=0.7, softcap=3.0), dict(scale=0.7, softcap=3.0)),
]


class TestFlashAttention2:
    @pytest.mark.parametrize("theirs, ours", [*OPTIONS, (dict(alibi_slopes=torch.rand(2, 4)),) * 2])
    def test_results(self, theirs, ours):
        q, k, v = make_qkv()
        out, lse = attention(q, k, v, return_lse=True, **ours)
        assert torch.equal(fa2.flash_attn_func(q, k, v, **theirs), out)
        *got, probabilities = fa2.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
        assert_same(got, (out, lse))
        assert probabilities.shape == (0,)
        kv = torch.stack([k, v], 2)
        assert torch.equal(fa2.flash_attn_kvpacked_func(q, kv, **theirs), out)

    @pytest.mark.parametrize("theirs, ours", OPTIONS)
    def test_packed(self, theirs, ours):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        want = attention(q, k, v, **ends, **ours)
        lengths = (*ends.values(), 3, 4)
        assert torch.equal(fa2.flash_attn_varlen_func(q, k, v, *lengths, **theirs), want)
        kv = torch.stack([k, v], 1)
        assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(q, kv, *lengths, **theirs), want)
        tensors = (*ends.values(), torch.tensor(3), torch.tensor(4))
        assert torch.equal(fa2.flash_attn_varlen_func(q, k, v, *tensors, **theirs), want)

    def test_qkv_in_one(self):
        (qkv,) = make((2, 5, 3, 4, 8), grad=True)
        out = fa2.flash_attn_qkvpacked_func(qkv, causal=True)
        (gradient,) = torch.autograd.grad(out.square().sum(), qkv)
        parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
        want = attention(*parts, causal=True)
        assert torch.equal(out, want)
        expected = torch.stack(torch.autograd.grad(want.square().sum(), parts), 2)
        torch.testing.assert_close(gradient, expected)
        rows, ends = qkv.detach()[0], int32(0, 2, 5)
        got = fa2.flash_attn_varlen_qkvpacked_func(rows, ends, 3, causal=True)
        want = attention(*rows.unbind(1), cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
        assert torch.equal(got, want)

    def test_dropout(self):
        q, k, v = make_qkv()
        torch.manual_seed(3)
        want = attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(3)
        assert torch.equal(fa2.flash_attn_func(q, k, v, 0.5), want)

    def test_under_compile(self):
        q, k, v = make_qkv(grad=True)
        call = lambda *x: fa2.flash_attn_func(*x, causal=True, window_size=(3, 0))  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v), call(q, k, v))

    @pytest.mark.parametrize("dropout_p", [0.0, 0.5])
    def test_private_names(self, dropout_p):
        q, k, v = make_qkv(grad=True)
        torch.manual_seed(4)
        want, want_lse = attention(q, k, v, causal=True, dropout_p=dropout_p, return_lse=True)
        dout = torch.randn_like(want)
        expected = torch.autograd.grad(want, (q, k, v), dout)
        q, k, v = (x.detach() for x in (q, k, v))
        options = (dropout_p, 8**-0.5, True, -1, -1, 0.0, None)
        torch.manual_seed(4)
        out, lse, empty, rng = flash_attn_interface._flash_attn_forward(q, k, v, *options, False)
        assert_same((out, lse), (want, want_lse))
        assert empty.numel() == 0
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        flash_attn_interface._flash_attn_backward(
            dout, q, k, v, out, lse, *gradients, *options, False, rng
        )
        for a, b in zip(gradients, expected):
            torch.testing.assert_close(a, b)

    def test_private_names_draw_for_dropout_alone(self):
        """As upstream's: what is drawn later does not depend on how often they were called."""
        q, k, v = make_qkv()
        options = (0.5, False, -1, -1, 0.0, None, False)
        lengths = (int32(0, 2, 5), int32(0, 4, 7), 3, 4)
        for call in (
            lambda p: flash_attn_interface._flash_attn_forward(q, k, v, p, *options),
            lambda p: flash_attn_interface._flash_attn_varlen_forward(q[0], k[0], v[0], *lengths, p, *options),
        ):
            before = torch.get_rng_state()
            *_, rng = call(0.0)
            assert rng.shape == (2,) and rng.dtype == torch.int64
            assert torch.equal(torch.get_rng_state(), before)
            call(0.5)
            assert not torch.equal(torch.get_rng_state(), before)

    def test_private_names_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        lengths = (int32(0, 2, 5), int32(0, 4, 7), 3, 4)
        out, lse, _, rng = flash_attn_interface._flash_attn_varlen_forward(
            q, k, v, *lengths, 0.0, 0.5, False, seqused_k=int32(2, 3)
        )
        ends = dict(cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1], scale=0.5)
        want = attention(q, k, v, seqused_k=int32(2, 3), return_lse=True, **ends)
        assert_same((out, lse), want)
        out, lse, _, rng = flash_attn_interface._flash_attn_varlen_forward(
            q, k, v, *lengths, 0.0, 0.5, False
        )
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        flash_attn_interface._flash_attn_varlen_backward(
            out, q, k, v, out, lse, *gradients, *lengths, 0.0, 0.5, False, -1, -1, 0.0, None, True
        )
        whole = [x.requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(attention(*whole, **ends), whole, out)
        for a, b in zip(gradients, expected):
            torch.testing.assert_close(a, b)

    def test_private_names_take_any_strides(self):
        """Gradients of sums have strides of 0, and rows may have gaps."""
        q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in make_qkv())
        assert q.stride(-1) != 1
        options = (0.0, 0.5, True, -1, -1, 0.0, None)
        out, lse, _, rng = flash_attn_interface._flash_attn_forward(q, k, v, *options, False)
        leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
        want = attention(*leaves, causal=True, scale=0.5)
        assert torch.equal(out, want)
        dout = torch.ones(()).expand(out.shape)
        expected = torch.autograd.grad(want, leaves, dout)
        for backward in (
            lambda *x: flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, *x, *options, True, rng),
            lambda dq, dk, dv: fa3._flash_attn_backward(
                dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, softmax_scale=0.5, is_causal=True,
            ),
        ):  # fmt: skip
            gradients = [torch.empty(x.shape) for x in (q, k, v)]
            backward(*gradients)
            torch.testing.assert_close(tuple(gradients), expected)

    @pytest.mark.parametrize("module", [fa2, fa3])
    def test_cache(self, module):
        q, k_cache, v_cache = make((2, 3, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8))
        new_k, new_v = make((2, 3, 2, 8), (2, 3, 2, 8))
        lengths = int32(4, 9)
        before = k_cache.clone()
        out, lse, *rest = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, new_k, new_v, cache_seqlens=lengths, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        assert rest == ([None, None] if module is fa3 else [])
        assert lengths.tolist() == [4, 9]
        for b, n in enumerate((4, 9)):
            assert torch.equal(k_cache[b, n : n + 3], new_k[b])
            assert torch.equal(v_cache[b, n : n + 3], new_v[b])
            assert torch.equal(k_cache[b, :n], before[b, :n])
            assert torch.equal(k_cache[b, n + 3 :], before[b, n + 3 :])
            one = slice(b, b + 1), slice(0, n + 3)
            want = attention(q[b : b + 1], k_cache[one], v_cache[one], causal=True, return_lse=True)
            torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), want)
        got = module.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7)
        torch.testing.assert_close(got, attention(q, k_cache[:, :7], v_cache[:, :7]))
        got = module.flash_attn_with_kvcache(q, k_cache, v_cache)
        torch.testing.assert_close(got, attention(q, k_cache, v_cache))
        with pytest.raises(ValueError, match="^cache_seqlens: got None"):
            module.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v)
        with pytest.raises(ValueError, match="^k, v: got only one"):
            module.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, cache_seqlens=7)


def turned(x, cos, sin, interleaved):
    """Rows (n, heads, dim), each at the position of its row of cos and sin, in float64."""
    n = cos.shape[-1]
    x, (cos, sin) = x.double(), (y.double()[:, None] for y in (cos, sin))
    pairs = x[..., : 2 * n].unflatten(-1, (n, 2) if interleaved else (2, n))
    a, b = pairs.unbind(-1 if interleaved else -2)
    both = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2)
    return torch.cat((both.flatten(-2), x[..., 2 * n :]), -1)


class TestCaches:
    """flash_attn_with_kvcache with its own words in PyTorch, one sequence at a time."""

    PAGE, BATCH, HQ, HK, D = 4, 3, 4, 2, 16

    def caches(self, kind):
        """(k_cache, v_cache, arguments, the (entry, row) of row n of sequence b)."""
        if kind == "pages":
            k, v = make((12, self.PAGE, self.HK, self.D), (12, self.PAGE, self.HK, self.D))
            table = torch.tensor([[7, 1, 4], [0, 2, 9], [11, 3, 5]], dtype=torch.int32)
            places = lambda b, n: (table[b, n // self.PAGE], n % self.PAGE)  # noqa: E731
            return k, v, table, None, places
        k, v = make((5, 12, self.HK, self.D), (5, 12, self.HK, self.D))
        rows = int32(4, 0, 2)
        return k, v, None, rows, lambda b, n: (rows[b], n)

    @pytest.mark.parametrize("kind", ["pages", "rows"])
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        "options",
        [dict(causal=True), dict(), dict(window_size=(3, 1)), dict(causal=True, softcap=2.0)],
    )
    @pytest.mark.parametrize("module", [fa2, fa3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rotation(self, module, options, interleaved, kind, dtype):
        k_cache, v_cache, table, rows, places = self.caches(kind)
        k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
        q, k, v = (
            x.to(dtype) for x in make(*((self.BATCH, 3, h, self.D) for h in (self.HQ, self.HK, self.HK)))
        )  # fmt: skip
        angles = torch.rand(20, 5) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        lengths, leftpad = int32(6, 0, 9), int32(2, 0, 5)
        before = k_cache.clone(), v_cache.clone(), q.clone()
        out, lse, *_ = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            cache_batch_idx=rows, cache_leftpad=leftpad, rotary_interleaved=interleaved,
            return_softmax_lse=True, **{"page_table" if module is fa3 else "block_table": table},
            **options,
        )  # fmt: skip
        assert torch.equal(q, before[2])
        written = set()
        for b, (old, pad) in enumerate(zip(lengths.tolist(), leftpad.tolist())):
            at = slice(old, old + 3)
            new = turned(k[b], cos[at], sin[at], interleaved)
            advance = "causal" in options or "window_size" in options
            where = at if advance else [old] * 3
            query = turned(q[b], cos[where], sin[where], interleaved).to(dtype)
            for i in range(3):
                place = places(b, old + i)
                written.add(tuple(map(int, place)))
                torch.testing.assert_close(k_cache[place], new[i].to(dtype))
                assert torch.equal(v_cache[place], v[b, i])
            keys, values = (
                torch.stack([cache[places(b, n)] for n in range(pad, old + 3)])[None]
                for cache in (k_cache, v_cache)
            )
            ours = dict(causal=options.get("causal", False), window=options.get("window_size"))
            want = attention(
                query[None], keys, values, softcap=options.get("softcap", 0.0), return_lse=True, **ours
            )
            torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), want)
        for cache, was in zip((k_cache, v_cache), before):
            same = (cache == was).flatten(2).all(-1)
            changed = {tuple(place) for place in (~same).nonzero().tolist()}
            assert changed == written

    def test_rows_of_a_page_table(self):
        k_cache, v_cache, table, rows, _ = self.caches("pages")[:3] + self.caches("rows")[3:]
        (q,) = make((self.BATCH, 2, self.HQ, self.D))
        table = torch.cat([table, table.flip(0)])
        call = lambda **where: fa3.flash_attn_with_kvcache(  # noqa: E731
            q, k_cache, v_cache, cache_seqlens=int32(5, 9, 2), causal=True, **where
        )
        got = call(page_table=table, cache_batch_idx=rows)
        assert torch.equal(got, call(page_table=table[rows.tolist()]))

    def test_places_of_a_rotation_that_is_not_given(self):
        k_cache, v_cache, _, _, _ = self.caches("rows")
        q, k, v = make((5, 1, self.HQ, self.D), (5, 1, self.HK, self.D), (5, 1, self.HK, self.D))
        call = lambda **places: fa3.flash_attn_with_kvcache(  # noqa: E731
            q, k_cache, v_cache, k, v, cache_seqlens=4, **places
        )
        assert torch.equal(call(rotary_seqlens=int32(4, 4, 4, 4, 4)), call())

    def test_lengths_in_two_places(self):
        k_cache, v_cache, _, _, _ = self.caches("rows")
        new = torch.zeros(5, self.HK, self.D)
        with pytest.raises(ValueError, match="^cu_seqlens_k_new: on meta, want cpu as cache_seqlens"):
            fa3.flash_attn_with_kvcache(
                new, k_cache, v_cache, new, new, cache_seqlens=int32(0, 0, 0), cu_seqlens_q=int32(0, 1, 2, 5),
                cu_seqlens_k_new=int32(0, 1, 2, 5).to("meta"),
            )  # fmt: skip

    def test_packed_rows(self):
        k_cache, v_cache, table, _, places = self.caches("pages")
        q, k, v = make((6, self.HQ, self.D), (5, self.HK, self.D), (5, self.HK, self.D))
        q_ends, k_ends, lengths = int32(0, 3, 4, 6), int32(0, 2, 2, 5), int32(4, 7, 1)
        angles = torch.rand(40, 8) * 6
        cos, sin, positions = angles.cos(), angles.sin(), int32(30, 2, 11)
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            page_table=table, cu_seqlens_q=q_ends, cu_seqlens_k_new=k_ends, max_seqlen_q=3,
            rotary_seqlens=positions, causal=True, return_softmax_lse=True,
        )  # fmt: skip
        for b in range(self.BATCH):
            rows, new = slice(*q_ends[b : b + 2]), slice(*k_ends[b : b + 2])
            old, first, total = int(lengths[b]), int(positions[b]), int(lengths[b]) + new.stop - new.start
            keys, values = (
                torch.stack([cache[places(b, n)] for n in range(total)])[None]
                for cache in (k_cache, v_cache)
            )
            at = slice(first, first + total - old)
            want = turned(k[new], cos[at], sin[at], True).float()
            torch.testing.assert_close(keys[0, old:], want)
            assert torch.equal(values[0, old:], v[new])
            at = slice(first, first + rows.stop - rows.start)
            query = turned(q[rows], cos[at], sin[at], True).float()
            want, want_lse = attention(query[None], keys, values, causal=True, return_lse=True)
            torch.testing.assert_close((out[rows], lse[:, rows]), (want[0], want_lse[0]))

    STEPS = {
        "no new": dict(cache_leftpad=int32(2, 0, 5)),
        "new": dict(new=True),
        "rotated": dict(new=True, rotated=True, window_size=(4, 0), softcap=2.0),
        "packed": dict(new=True, rotated=True, packed=True, rotary_seqlens=int32(8, 2, 0)),
    }

    @pytest.mark.parametrize("module, step", [
        *((module, step) for module in (fa2, fa3) for step in ("no new", "new", "rotated")), (fa3, "packed"),
    ])  # fmt: skip
    @pytest.mark.parametrize("kind, backend", [
        ("pages", "aot_eager"), ("pages", "inductor"), ("rows", "aot_eager"), ("batch", "aot_eager"),
    ])  # fmt: skip
    def test_in_one_graph(self, module, step, kind, backend):
        """The bits of eager mode, in the results and in the caches, whatever requires grad."""
        options = dict(self.STEPS[step])
        new, rotated, packed = (options.pop(name, False) for name in ("new", "rotated", "packed"))
        k_cache, v_cache, table, rows, _ = self.caches("pages" if kind == "pages" else "rows")
        if kind == "batch":
            k_cache, v_cache, rows = k_cache[:3].clone(), v_cache[:3].clone(), None
        options["page_table" if module is fa3 else "block_table"] = table
        shape = (6,) if packed else (self.BATCH, 2)
        q, k, v = make(*((*shape, h, self.D) for h in (self.HQ, self.HK, self.HK)), grad=True)
        if new:
            options.update(k=k, v=v)
        if rotated:
            angles = torch.rand(20, 5) * 6
            options.update(rotary_cos=angles.cos(), rotary_sin=angles.sin())
        if packed:
            ends = int32(0, 3, 4, 6)
            options.update(cu_seqlens_q=ends, cu_seqlens_k_new=ends, max_seqlen_q=3)

        def call(q, k_cache, v_cache, lengths, options):
            out, lse, *_ = module.flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=rows, causal=True,
                return_softmax_lse=True, **options,
            )  # fmt: skip
            return out, lse, k_cache.sum()

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend=backend)
        theirs = k_cache.clone(), v_cache.clone()
        for lengths in (int32(6, 0, 9), int32(7, 3, 8)):
            before = k_cache.clone()
            want = call(q, k_cache, v_cache, lengths, options)
            got = compiled(q, *theirs, lengths, options)
            assert_same(got[:2], want[:2])
            torch.testing.assert_close(got[2], want[2])
            assert_same(theirs, (k_cache, v_cache))
            assert torch.equal(before, k_cache) != new and not got[0].requires_grad

    def test_lengths_that_are_numbers_in_one_graph(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        q, k, v = make(*((self.BATCH, 1, h, self.D) for h in (self.HQ, self.HK, self.HK)))
        theirs = k_cache.clone(), v_cache.clone()
        call = lambda *x: fa2.flash_attn_with_kvcache(*x[:-1], cache_seqlens=x[-1], block_table=table)  # noqa: E731
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for length in (4, 5, 6):
            want = call(q, k_cache, v_cache, k, v, length)
            assert torch.equal(compiled(q, *theirs, k, v, length), want)
            assert_same(theirs, (k_cache, v_cache))

    @pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(3, 1), softcap=2.0)])
    def test_pages_beside_packed_queries(self, options):
        """Of cu_seqlens_k the lengths alone count, wherever the sequences begin."""
        k_cache, v_cache, table, _, places = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        q_ends, k_ends = int32(0, 3, 3, 6), int32(40, 47, 47, 59)
        used, lengths = k_ends.diff(), (q_ends, k_ends, 3, 12)
        out, lse, _ = fa2.flash_attn_varlen_func(
            q, k_cache, v_cache, *lengths, return_attn_probs=True, block_table=table, **options
        )
        for b in (0, 2):
            rows = slice(*q_ends[b : b + 2])
            scores = torch.einsum(
                "ihd,jhd->hij", q[rows].double(),
                torch.stack([k_cache[places(b, n)] for n in range(used[b])]).double().repeat_interleave(2, 1),
            ) / self.D**0.5  # fmt: skip
            if "softcap" in options:
                scores = 2.0 * (scores / 2.0).tanh()
            left, right = (-1, 0) if "causal" in options else options.get("window_size", (-1, -1))
            distance = torch.arange(used[b]) - (torch.arange(3)[:, None] + used[b] - 3)
            hidden = (distance < -left) & (left >= 0) | (distance > right) & (right >= 0)
            scores = scores.masked_fill(hidden, -torch.inf)
            values = torch.stack([v_cache[places(b, n)] for n in range(used[b])]).double().repeat_interleave(2, 1)
            want = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
            torch.testing.assert_close(out[rows], want.float())
            torch.testing.assert_close(lse[:, rows], scores.logsumexp(-1).float())
        ours = dict(causal=options.get("causal", False), window_size=options.get("window_size", (None, None)))
        got = fa4.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q=q_ends, seqused_k=used, page_table=table, return_lse=True,
            softcap=options.get("softcap", 0.0), **ours,
        )  # fmt: skip
        assert_same(got, (out, lse))
        left, right = options.get("window_size", (-1, -1))
        got = flash_attn_interface._flash_attn_varlen_forward(
            q, k_cache, v_cache, *lengths, 0.0, self.D**-0.5, ours["causal"], left, right,
            options.get("softcap", 0.0), block_table=table,
        )  # fmt: skip
        assert_same(got[:2], (out, lse))

    def test_pages_of_a_batch(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((self.BATCH, 2, self.HQ, self.D))
        used = int32(7, 2, 12)
        out, _ = fa4.flash_attn_varlen_func(q, k_cache, v_cache, seqused_k=used, page_table=table, causal=True)
        want = fa2.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=used, block_table=table, causal=True
        )
        assert torch.equal(out, want)

    def test_pages_beside_packed_queries_under_compile(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        lengths = (int32(0, 3, 3, 6), int32(0, 7, 7, 19), 3, torch.tensor(12))
        call = lambda *x: fa2.flash_attn_varlen_func(*x, *lengths, block_table=table)  # noqa: E731
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k_cache, v_cache), call(q, k_cache, v_cache))

    def test_pages_have_no_gradient(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        sink = torch.randn(self.HQ, requires_grad=True)
        ends = dict(cu_seqlens_q=int32(0, 3, 3, 6), max_seqlen_q=3)
        paged2 = ends | dict(cu_seqlens_k=int32(0, 7, 7, 19), max_seqlen_k=12, block_table=table)
        paged4 = ends | dict(seqused_k=int32(7, 0, 12), page_table=table)
        for module, name, paged in ((fa2, "block_table", paged2), (fa4, "page_table", paged4)):

            def call(q, function=module.flash_attn_varlen_func, paged=paged, **more):
                results = function(q, k_cache, v_cache, **paged, **more)
                return results[0] if isinstance(results, tuple) else results

            want, leaf = call(q), q.clone().requires_grad_()
            got = call(leaf)
            assert torch.equal(got, want) and got.requires_grad
            with pytest.raises(NotImplementedError, match=f"^{name}: fulgur has no gradients with pages"):
                got.sum().backward()
            with torch.no_grad():
                assert not call(leaf).requires_grad
        assert call(q, learnable_sink=sink).requires_grad

    def test_errors_of_pages_beside_packed_queries(self):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        (q,) = make((6, self.HQ, self.D))
        call, ends = fa2.flash_attn_varlen_func, (int32(0, 3, 3, 6), int32(0, 7, 7, 19))
        with pytest.raises(RuntimeError, match=r"^cu_seqlens_k.diff\(\): got 12 at 2, want 0 to 11"):
            call(q, k_cache, v_cache, *ends, 3, 11, block_table=table)
        with pytest.raises(RuntimeError, match="^block_table: got 12 as page 0 of sequence 0"):
            call(q, k_cache, v_cache, *ends, 3, 12, block_table=table + 5)

        def private(**changed):
            lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends), max_seqlen_q=3, max_seqlen_k=12)
            options = lengths | dict(dropout_p=0.0, softmax_scale=1.0, causal=False, block_table=table) | changed
            flash_attn_interface._flash_attn_varlen_forward(q, k_cache, v_cache, **options)

        with pytest.raises(RuntimeError, match="^block_table: got 12 as page 0 of sequence 0"):
            private(block_table=table + 5)
        with pytest.raises(RuntimeError, match="^seqused_k: got 13 at 1, want 0 to 12"):
            private(seqused_k=int32(7, 13, 12))
        with pytest.raises(RuntimeError, match=r"^cu_seqlens_k.diff\(\): got -7 at 1, want 0 to 12"):
            private(cu_seqlens_k=int32(0, 7, 0, 12))

    @pytest.mark.parametrize("module", [fa2, fa3])
    def test_errors(self, module):
        k_cache, v_cache, table, _, _ = self.caches("pages")
        q, k, v = make(*((self.BATCH, 3, h, self.D) for h in (self.HQ, self.HK, self.HK)))
        paged = {"page_table" if module is fa3 else "block_table": table}
        angles = torch.rand(4, 4)
        call = module.flash_attn_with_kvcache
        with pytest.raises(ValueError, match="^rotary_cos: given without k and v"):
            call(q, k_cache, v_cache, rotary_cos=angles, rotary_sin=angles, cache_seqlens=3, **paged)
        before = k_cache.clone()
        with pytest.raises(RuntimeError, match="^rotary_cos: got 4 positions, want 6 for sequence 0"):
            call(
                q, k_cache, v_cache, k, v, rotary_cos=angles, rotary_sin=angles, cache_seqlens=3,
                **paged,
            )  # fmt: skip
        with pytest.raises(RuntimeError, match="^cache_seqlens: got 10 at 0, with 3 new rows 13"):
            call(q, k_cache, v_cache, k, v, cache_seqlens=10, **paged)
        assert torch.equal(k_cache, before)
        lengths, names = int32(3, 3, 3), ("cache_seqlens", "cache_batch_idx", "cache_leftpad", *paged)
        for name in names:
            wrong = dict(cache_seqlens=lengths) | paged | {name: torch.zeros(3, 3, dtype=torch.int64)}
            with pytest.raises(ValueError, match=f"^{name}: got int64, want int32"):
                call(q, k_cache, v_cache, **wrong)
        (table_name,) = paged
        with pytest.raises(RuntimeError, match="^cache_seqlens: got 99 at 0, want 0 to"):
            call(q, k_cache, v_cache, cache_seqlens=99, **paged)
        with pytest.raises(RuntimeError, match=f"^{table_name}: got .* as page 0 of sequence 0"):
            call(q, k_cache, v_cache, cache_seqlens=lengths, **{table_name: table + 1000})
        with pytest.raises(RuntimeError, match="^cache_leftpad: got shape .2., want"):
            call(q, k_cache, v_cache, cache_seqlens=lengths, cache_leftpad=int32(0, 1))
        with pytest.raises(RuntimeError, match="^k: got shape .3, 3, 1, 16., want"):
            call(q, k_cache, v_cache, k[:, :, :1], v, cache_seqlens=lengths, **paged)
        with pytest.raises(RuntimeError, match="^v_cache: got shape .11, 4, 2, 16., want .12, 4, 2, 16."):
            call(q, k_cache, v_cache[1:], cache_seqlens=lengths, **paged)
        with pytest.raises(RuntimeError, match="^cache_batch_idx: got 12 at 2, want one of the 12 rows of k_cache"):
            call(q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=int32(0, 1, 12))
        for new in ({}, dict(k=k, v=v)):
            with pytest.raises(RuntimeError, match="^softmax_scale: got nan, want"):
                call(q, k_cache, v_cache, cache_seqlens=lengths, softmax_scale=torch.nan, **new, **paged)


class TestFlashAttention3:
    @pytest.mark.parametrize("theirs, ours", OPTIONS)
    def test_results(self, theirs, ours):
        q, k, v = make_qkv()
        want = attention(q, k, v, return_lse=True, **ours)
        hints = dict(num_splits=3, pack_gqa=True, sm_margin=8)
        assert torch.equal(fa3.flash_attn_func(q, k, v, **theirs, **hints), want[0])
        assert_same(fa3.flash_attn_func(q, k, v, return_attn_probs=True, **theirs), want)

    @pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window_size=(2, 1))])
    @pytest.mark.parametrize("chunk", [1, 3, 20])
    def test_chunks(self, options, chunk):
        """Keys from the diagonal's multiple of the chunk on, and less than a chunk after it."""
        q, k, v = make_qkv(grad=True)
        out, lse = fa3.flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
        i, j = torch.arange(5)[:, None] + 2, torch.arange(7)
        first = i - i % chunk
        left, right = options.get("window_size", (7, 0 if "causal" in options else 7))
        hidden = (j < first) | (j >= first + chunk) | (j < i - left) | (j > i + right)
        keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, keys) / 8**0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        want = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), values)
        torch.testing.assert_close((out, lse), (want, scores.logsumexp(-1)))
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), dout)
        torch.testing.assert_close(got, torch.autograd.grad(want, (q, k, v), dout))

    def test_chunks_of_packed_sequences_and_caches(self):
        q, k, v = (x[0] for x in make_qkv())
        ours = dict(causal=True, chunk=3)
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        got = fa3.flash_attn_varlen_func(q, k, v, *ends.values(), 3, 4, attention_chunk=3, causal=True)
        assert torch.equal(got, attention(q, k, v, **ends, **ours))
        (qkv,) = make((2, 5, 3, 4, 16))
        got = fa3.flash_attn_qkvpacked_func(qkv, attention_chunk=3, causal=True)
        assert torch.equal(got, attention(*qkv.unbind(2), **ours))
        q, k_cache, v_cache = make((2, 3, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8))
        where = dict(page_table=torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32))
        used, angles = int32(7, 10), torch.rand(20, 4)
        call = lambda **more: fa3.flash_attn_with_kvcache(  # noqa: E731
            q, k_cache, v_cache, cache_seqlens=used, attention_chunk=3, **where, **more
        )
        want = attention(q, k_cache, v_cache, seqused_k=used, **where, **ours)
        assert torch.equal(call(causal=True), want)
        # Chunks bound the mask: queries turn to positions of their own.
        new = make((2, 2, 2, 8), (2, 2, 2, 8))
        rotation = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), rotary_interleaved=False)
        got = call(k=new[0], v=new[1], **rotation)
        query = torch.stack([
            turned(q[b], angles[n : n + 3].cos(), angles[n : n + 3].sin(), False).float()
            for b, n in enumerate(used.tolist())
        ])  # fmt: skip
        want = attention(query, k_cache, v_cache, seqused_k=used + 2, chunk=3, **where)
        torch.testing.assert_close(got, want)

    def test_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        lengths, used = (int32(0, 2, 5), int32(0, 4, 7), 3, 4), int32(1, 3)
        got = fa3.flash_attn_varlen_func(q, k, v, *lengths, seqused_k=used, causal=True)
        ends = dict(cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])
        assert torch.equal(got, attention(q, k, v, seqused_k=used, causal=True, **ends))
        # Of the queries, too: each sequence as if it had no others.
        got = fa3.flash_attn_varlen_func(
            q, k, v, *lengths, seqused_q=int32(1, 2), seqused_k=used, causal=True
        )
        for row, count, key, keys in ((0, 1, 0, 1), (2, 2, 4, 3)):
            part = (q[None, row : row + count], *(x[None, key : key + keys] for x in (k, v)))
            want = attention(*part, causal=True)[0]
            torch.testing.assert_close(got[row : row + count], want, atol=1e-6, rtol=1e-6)
        assert not got[1].any() and not got[4].any()

    OPTIONS = dict(softmax_scale=0.7, window_size_left=2, window_size_right=1, softcap=3.0)

    def test_private_names(self):
        q, k, v = make_qkv(grad=True)
        ours = dict(scale=0.7, window=(2, 1), softcap=3.0)
        want = attention(q, k, v, return_lse=True, **ours)
        hints = dict(num_splits=3, pack_gqa=True, sm_margin=8)
        out, lse, *empty = fa3._flash_attn_forward(q, k, v, **self.OPTIONS, **hints)
        assert_same((out, lse), want)
        assert [x.numel() for x in empty] == [0, 0]
        given = torch.empty_like(out)
        with torch.no_grad():
            assert fa3._flash_attn_forward(q, k, v, out_=given, **self.OPTIONS)[0] is given
        assert torch.equal(given, out)
        dout = torch.randn_like(out)
        expected = torch.autograd.grad(want[0], (q, k, v), dout)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), dout), expected)
        q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
        gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        dq, dk, dv = gradients
        fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **self.OPTIONS)
        torch.testing.assert_close(tuple(gradients), expected)
        with pytest.raises(ValueError, match="^dk: got None, want a tensor to write"):
            fa3._flash_attn_backward(dout, q, k, v, out, lse, dq=dq, **self.OPTIONS)
        for chunk in (0, 3):
            got = fa3._flash_attn_forward(q, k, v, causal=True, attention_chunk=chunk)[0]
            assert torch.equal(got, attention(q, k, v, causal=True, chunk=chunk))

    def test_private_names_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        used = int32(1, 3), int32(3, 3)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        want = attention(*leaves, causal=True, seqused_q=used[0], seqused_k=used[1], return_lse=True, **ends)
        for longest in ({}, dict(max_seqlen_q=3, max_seqlen_k=4)):
            out, lse, *_ = fa3._flash_attn_forward(
                q, k, v, causal=True, seqused_q=used[0], seqused_k=used[1], **ends, **longest
            )
            assert_same((out, lse), want)
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            fa3._flash_attn_backward(
                out, q, k, v, out, lse, **ends, sequed_q=used[0], sequed_k=used[1], is_causal=True,
                **dict(zip(("dq", "dk", "dv"), gradients)), **longest,
            )  # fmt: skip
            expected = torch.autograd.grad(want[0], leaves, out, retain_graph=True)
            torch.testing.assert_close(tuple(gradients), expected)

    def test_private_names_of_caches(self):
        """All that flash_attn_with_kvcache does, by other names."""
        q, k, v = make((2, 3, 4, 16), (2, 3, 2, 16), (2, 3, 2, 16))
        caches = make((6, 4, 2, 16), (6, 4, 2, 16))
        theirs = [x.clone() for x in caches]
        table = torch.tensor([[0, 0, 0], [5, 0, 2], [1, 4, 3]], dtype=torch.int32)
        angles, used, rows = torch.rand(20, 4), int32(7, 5), int32(1, 2)
        names = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), page_table=table, causal=True)
        out, lse, *_ = fa3._flash_attn_forward(
            q, *caches, k, v, seqused_k=used, kv_batch_idx=rows, leftpad_k=int32(2, 0), seqlens_rotary=int32(1, 0),
            **names,
        )  # fmt: skip
        want = fa3.flash_attn_with_kvcache(
            q, *theirs, k, v, cache_seqlens=used, cache_batch_idx=rows, cache_leftpad=int32(2, 0),
            rotary_seqlens=int32(1, 0), return_softmax_lse=True, **names,
        )  # fmt: skip
        assert_same((out, lse, *caches), (*want[:2], *theirs))
        out, *_ = fa3._flash_attn_forward(q, *caches, seqused_k=used + 3, page_table=table[1:], seqused_q=int32(3, 1))
        want = attention(q, *caches, seqused_k=used + 3, page_table=table[1:], seqused_q=int32(3, 1))
        assert torch.equal(out, want) and not out[1, 1:].any()
        with pytest.raises(RuntimeError, match="^seqused_k: got 99 at 0"):
            fa3._flash_attn_forward(q, *caches, seqused_k=used + 92, page_table=table[1:])
        with pytest.raises(ValueError, match="^seqused_k: got None, want where k_new and v_new go"):
            fa3._flash_attn_forward(q, *caches, k, v, page_table=table[1:])
        with pytest.raises(RuntimeError, match="^k_new: got f64, want f32 .the dtype of k."):
            fa3._flash_attn_forward(q, *caches, k.double(), v, seqused_k=used, page_table=table[1:])
        with pytest.raises(RuntimeError, match="^leftpad_k: got 8 at 0, want 0 to 7"):
            fa3._flash_attn_forward(q, *caches, seqused_k=used, leftpad_k=int32(8, 0), page_table=table[1:])

    def test_qkv_in_one(self):
        (qkv,) = make((2, 5, 8, 16))
        want = attention(*qkv.split([4, 2, 2], 2))
        assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4), want)
        (qkv,) = make((2, 5, 3, 4, 16))
        assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv), attention(*qkv.unbind(2)))
        with pytest.raises(ValueError, match="^num_heads_q"):
            fa3.flash_attn_qkvpacked_func(qkv[:, :, 0])

    @pytest.mark.parametrize("combine", [fa3.flash_attn_combine, fa4.flash_attn_combine])
    def test_combine(self, combine):
        q, k, v = make_qkv()
        parts = [attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(3), slice(3, 7))]
        nothing = torch.full_like(parts[0][0], torch.nan), torch.full((2, 4, 5), -torch.inf)
        outs, lses = zip(*parts, nothing)
        out, lse = combine(torch.stack(outs), torch.stack(lses).mT)
        want, want_lse = attention(q, k, v, return_lse=True)
        torch.testing.assert_close((out, lse), (want, want_lse.mT))
        out, lse = combine(torch.zeros(2, 1, 1, 1, 8), torch.full((2, 1, 1, 1), -torch.inf))
        assert (out == 0).all() and (lse == -torch.inf).all()
        given = torch.empty_like(want)
        assert combine(torch.stack(outs), torch.stack(lses).mT, given)[0] is given
        assert combine(torch.stack(outs), torch.stack(lses).mT, None, torch.bfloat16)[
            0
        ].dtype == torch.bfloat16
        for scale in (0.0, -1e5, -1e6, 1e6):  # whose LSE is rounded by more than the weights may be
            ones, equal = torch.ones(3, 1, 2, 1, 8), torch.full((3, 1, 2, 1), scale)
            torch.testing.assert_close(combine(ones, equal)[0], ones[0], atol=1e-6, rtol=0)
        exact = [torch.stack([x[i].double() for x in parts]) for i in (0, 1)]
        torch.testing.assert_close(
            combine(exact[0], exact[1].mT)[0], torch.as_tensor(fulgur.merge(*exact)[0]), atol=1e-14, rtol=0
        )
        with pytest.raises(ValueError, match="^lse_partial: got shape .3, 2, 4, 5., want .3, 2, 5, 4. as out_partial"):
            combine(torch.stack(outs), torch.stack(lses))

    def test_scheduler_metadata(self):
        metadata = fa3.get_scheduler_metadata(2, 1, 16, 4, 2, 64, int32(3, 4))
        assert metadata.numel() == 0 and metadata.dtype == torch.int32


class TestFlashAttention4:
    def test_results(self):
        q, k, v = make_qkv()
        want = attention(q, k, v, causal=True, window=(2, -1), return_lse=True)
        options = dict(causal=True, window_size=(2, None))
        out, lse = fa4.flash_attn_func(q, k, v, **options)
        assert torch.equal(out, want[0]) and lse is None
        assert_same(fa4.flash_attn_func(q, k, v, return_lse=True, **options), want)

    def test_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        out, lse = fa4.flash_attn_varlen_func(q, k, v, **ends, max_seqlen_q=3, causal=True)
        assert torch.equal(out, attention(q, k, v, causal=True, **ends)) and lse is None
        q, k, v = make_qkv()
        out, _ = fa4.flash_attn_varlen_func(q, k, v, seqused_k=int32(3, 7))
        assert torch.equal(out, attention(q, k, v, seqused_k=int32(3, 7)))

    def test_used_queries(self):
        q, k, v = (x.requires_grad_() for x in make_qkv())
        used = dict(seqused_q=int32(4, 0), seqused_k=int32(3, 7))
        out, lse = fa4.flash_attn_varlen_func(q, k, v, causal=True, return_lse=True, **used)
        part = [q[:1, :4], k[:1, :3], v[:1, :3]]
        want = attention(*part, causal=True)
        torch.testing.assert_close(out[:1, :4], want, atol=1e-6, rtol=1e-6)
        assert not out[0, 4:].any() and not out[1].any() and lse[1].isneginf().all()
        dout = torch.randn_like(out)
        got = torch.autograd.grad(out, (q, k, v), dout)
        for x, y in zip(got, torch.autograd.grad(want, part, dout[:1, :4])):
            torch.testing.assert_close(x[:1, : y.shape[1]], y, atol=1e-6, rtol=1e-6)
            assert not x[:1, y.shape[1] :].any() and not x[1].any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_learnable_sink(self, dtype):
        q, k, v = make_qkv()
        sinks = torch.randn(q.shape[2], dtype=dtype, requires_grad=True)
        out, lse = fa4.flash_attn_func(q, k, v, learnable_sink=sinks, return_lse=True)
        assert_same((out, lse), attention(q, k, v, sinks=sinks.float(), return_lse=True))
        (got,) = torch.autograd.grad(out.square().sum(), sinks)
        assert got.dtype == dtype and got.abs().min() > 0
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        q, k, v = (x[0] for x in (q, k, v))
        out, _ = fa4.flash_attn_varlen_func(q, k, v, **ends, max_seqlen_q=3, learnable_sink=sinks)
        assert torch.equal(out, attention(q, k, v, sinks=sinks.float(), **ends))

    OPTIONS = dict(softmax_scale=0.7, softcap=3.0, window_size_left=2)
    HINTS = dict(num_threads=128, pack_gqa=True)

    @pytest.mark.parametrize("sink", [False, True])
    def test_private_names(self, sink):
        q, k, v = make_qkv(grad=True)
        sinks = torch.randn(4, dtype=torch.bfloat16, requires_grad=True) if sink else None
        more = dict(self.OPTIONS, learnable_sink=sinks, **self.HINTS)
        ours = dict(scale=0.7, softcap=3.0, window=(2, -1), return_lse=True)
        want = attention(q, k, v, sinks=sinks.float() if sink else None, **ours)
        out, lse, *nothing = fa4_interface._flash_attn_fwd(q, k, v, tile_mn=(64, 64), **more)
        assert_same((out, lse), want)
        assert nothing == [None] * 3 and not out.requires_grad
        leaves = [q, k, v, *([sinks] if sink else [])]
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        expected = torch.autograd.grad(want, leaves, (dout, dlse))
        arguments = [x.detach() for x in (q, k, v)] + [out, dout, lse]
        got = fa4_interface._flash_attn_bwd(*arguments, dlse=dlse, deterministic=True, **more)
        torch.testing.assert_close(got, expected)
        given = [torch.full_like(x, torch.nan) for x in arguments[:3]]
        got = fa4_interface._flash_attn_bwd(
            *arguments, dlse=dlse, **dict(zip(("dq", "dk", "dv"), given)), **more
        )
        assert all(x is y for x, y in zip(got, given))
        torch.testing.assert_close(got, expected)

    def test_private_names_write_where_they_are_told(self):
        q, k, v = make_qkv()
        want = attention(q, k, v, causal=True, return_lse=True)
        assert fa4_interface._flash_attn_fwd(q, k, v, causal=True)[1] is None
        assert_same(fa4_interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2], want)
        given = [torch.full_like(x, torch.nan) for x in want]
        got = fa4_interface._flash_attn_fwd(q, k, v, causal=True, out=given[0], lse=given[1])
        assert got[0] is given[0] and got[1] is given[1]
        assert_same(given, want)

    def test_private_names_packed(self):
        q, k, v = (x[0] for x in make_qkv())
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 4, 7))
        used = dict(seqused_q=int32(1, 3), seqused_k=int32(3, 3))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        want = attention(*leaves, causal=True, return_lse=True, **ends, **used)
        out, lse, *_ = fa4_interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True, **ends, **used)
        assert_same((out, lse), want)
        got = fa4_interface._flash_attn_bwd(
            q, k, v, out, out, lse, causal=True, max_seqlen_q=3, max_seqlen_k=4, **ends, **used
        )
        torch.testing.assert_close(got, torch.autograd.grad(want[0], leaves, out))

    def test_private_names_of_pages(self):
        q, k, v = make((2, 3, 4, 16), (6, 4, 2, 16), (6, 4, 2, 16))
        where = dict(page_table=torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32), seqused_k=int32(7, 12))
        out, lse, *_ = fa4_interface._flash_attn_fwd(q, k, v, causal=True, return_lse=True, **where)
        assert_same((out, lse), attention(q, k, v, causal=True, return_lse=True, **where))
        q = q.requires_grad_()  # nothing is recorded
        assert torch.equal(fa4_interface._flash_attn_fwd(q, k, v, causal=True, **where)[0], out)

    def test_private_combine(self):
        outs, lses = torch.randn(2, 1, 3, 4, 8), torch.randn(2, 1, 3, 4)
        out, lse = torch.full((1, 3, 4, 8), torch.nan), torch.full((1, 4, 3), torch.nan)
        assert fa4_interface._flash_attn_fwd_combine(outs, lses, out, lse.mT) is None
        assert_same((out, lse.mT), fa4.flash_attn_combine(outs, lses))

    def test_scheduler_metadata(self):
        (q,) = make((5, 4, 8))
        ends = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 2, 5))
        metadata = fa4_interface.get_scheduler_metadata(3, 3, 4, 4, 8, 1, **ends)
        out, _ = fa4.flash_attn_varlen_func(q, q, q, **ends, scheduler_metadata=metadata)
        assert torch.equal(out, attention(q, q, q, **ends))


ANYTHING = torch.ones(2)
OF_MODS = ("score_mod", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors")
REFUSED = [
    *((fa3.flash_attn_func, 3, name) for name in (
        "qv", "q_descale", "k_descale", "v_descale")),
    (fa3.flash_attn_varlen_func, 7, "qv"),
    *((fa3._flash_attn_forward, 3, name) for name in ("qv", "q_descale", "k_descale", "v_descale")),
    *((fa3.flash_attn_with_kvcache, 3, name) for name in (
        "qv", "q_descale", "k_descale", "v_descale")),
    *((function, 3, name) for function in (fa4.flash_attn_func, fa4.flash_attn_varlen_func) for name in (
        *OF_MODS, "score_mod_bwd", "qv", "gather_kv_indices", "gather_bwd_recompute_p", "gather_bwd_token_chunk")),
    (fa4.flash_attn_func, 3, "block_sparse_tensors_bwd"),
    *((fa4_interface._flash_attn_fwd, 3, name) for name in (
        *OF_MODS, "qv", "q_descale", "k_descale", "v_descale", "gather_kv_indices", "gather_bwd_recompute_p")),
    *((fa4_interface._flash_attn_bwd, 6, name) for name in (*OF_MODS, "score_mod_bwd")),
    *((fa4_interface._flash_attn_fwd_combine, 3, name) for name in (
        "seqused", "num_splits_dynamic_ptr", "virtual_batch_idx", "semaphore_to_reset")),
]  # fmt: skip


@pytest.mark.parametrize("function, tensors, name", REFUSED)
def test_what_is_missing_raises(function, tensors, name):
    q, k, v = make_qkv()
    arguments = (q, k, v, int32(0, 5), int32(0, 7), 5, 7)[:tensors]
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        function(*arguments, **{name: ANYTHING})


Q, KV, QKV, ENDS = (2, 5, 4, 8), (2, 7, 2, 2, 8), (2, 5, 3, 4, 8), int32(0, 2, 9)
PRIVATE = (torch.nan, False, -1, -1, 0.0, None, False), (1.0, False, -2, -1, 0.0, None, False)
RENAMED = [
    (fa2.flash_attn_func, (Q, Q, Q), dict(softmax_scale=torch.nan), "softmax_scale: got nan, want"),
    (fa2.flash_attn_func, (Q, Q, Q), dict(window_size=(-2, 0)), "window_size: got -2, want"),
    (fa2.flash_attn_kvpacked_func, (Q, (*KV[:4], 9)), {}, r"k of kv: got shape \(2, 7, 2, 9\), want \(2, 7, 2, 8\)"),
    (fa2.flash_attn_kvpacked_func, (Q, QKV), {}, r"kv: got shape .*, want \(batch, seqlen, 2, heads, dim\)"),
    (fa2.flash_attn_qkvpacked_func, ((2, 5, 3, 4, 600),), {}, "q of qkv: got head dim 600, want"),
    (fa2.flash_attn_qkvpacked_func, (KV,), {}, r"qkv: got shape .*, want \(batch, seqlen, 3, heads, dim\)"),
    (fa2.flash_attn_varlen_kvpacked_func, (Q[1:], KV[1:], ENDS, int32(0, 3, 7), 7, 7), {}, "cu_seqlens_q: ends with 9"),
    (fa2.flash_attn_varlen_kvpacked_func, (Q[1:], KV, ENDS, ENDS, 7, 7), {},
     r"kv: got .*, want \(total, 2, heads, dim\)"),
    (fa2.flash_attn_varlen_qkvpacked_func, (QKV[1:], ENDS, 7), {}, "cu_seqlens: ends with 9, want at most 5"),
    (fa2.flash_attn_varlen_qkvpacked_func, (QKV[1:], int32(0, 5), 4), {}, "max_seqlen: got 4, want at least"),
    (fa2.flash_attn_varlen_qkvpacked_func, (QKV, ENDS, 7), {}, r"qkv: got .*, want \(total, 3, heads, dim\)"),
    (flash_attn_interface._flash_attn_forward, (Q, Q, Q, 0.0, *PRIVATE[0]), {}, "softmax_scale: got nan"),
    (flash_attn_interface._flash_attn_backward, (*[Q] * 5, (2, 4, 5), *[Q] * 3, 0.0, *PRIVATE[1]), {},
     "window_size_left: got -2"),
    (flash_attn_interface._flash_attn_backward, (*[Q] * 5, (2, 4, 6), *[Q] * 3, 0.0, 1.0, *PRIVATE[0][1:]), {},
     "softmax_lse: got shape"),
    (fa3.flash_attn_func, (Q, Q, Q), dict(attention_chunk=-1), "attention_chunk: got -1, want"),
    (fa3.flash_attn_qkvpacked_func, ((2, 5, 9, 600),), dict(num_heads_q=3), "q of qkv: got head dim 600, want"),
    (fa3.flash_attn_qkvpacked_func, (KV,), {}, r"qkv: got shape .*, want \(batch, seqlen, 3, heads, dim\)"),
    (fa3.flash_attn_qkvpacked_func, ((2, 5, 4, 8),), dict(num_heads_q=1), "num_heads_q: got 1, want to leave"),
    (fa3._flash_attn_forward, (Q, Q, Q), dict(window_size_right=-2), "window_size_right: got -2, want"),
    (fa3._flash_attn_backward, (Q, Q, Q, Q, Q, (2, 4, 5)), dict(dq=Q, dk=Q, dv=Q, sequed_k=int32(1, 6)),
     "sequed_k: got 6 at 1, want 0 to 5"),
    (flash_attn_interface._flash_attn_backward, (*[Q] * 5, None, *[Q] * 3, 0.0, 1.0, *PRIVATE[0][1:]), {},
     "softmax_lse: got None, want a tensor"),
    (fa4_interface._flash_attn_fwd, (Q, Q, Q), dict(window_size_left="x"), "window_size_left, window_size_right: got"),
    (fa4.flash_attn_func, (Q, Q, Q), dict(learnable_sink=(3,)), r"learnable_sink: got shape \(3\), want"),
    (fa4.flash_attn_varlen_func, (Q, Q, Q), dict(softmax_scale=torch.nan), "softmax_scale: got nan, want"),
    (fa4_interface._flash_attn_fwd, (Q, Q, Q), dict(window_size_left=-2), "window_size_left: got -2, want"),
    (fa4_interface._flash_attn_bwd, (*[Q] * 5, (2, 4, 6)), {}, r"lse: got shape \(2, 4, 6\), want \(2, 4, 5\)"),
]  # fmt: skip


@pytest.mark.parametrize("function, arguments, options, message", RENAMED)
def test_errors_have_the_names_of_callers(function, arguments, options, message):
    """What is written as a shape is a tensor."""
    arguments = [torch.zeros(x) if isinstance(x, tuple) else x for x in arguments]
    shapes = ("dq", "dk", "dv", "learnable_sink")
    options = {name: torch.zeros(x) if name in shapes else x for name, x in options.items()}
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"^{message}"):
        function(*arguments, **options)


@pytest.mark.parametrize("function, name, value", [
    (fa2.flash_attn_func, "softmax_scale", "x"), (fa3.flash_attn_func, "softmax_scale", "x"),
    (fa4.flash_attn_func, "softmax_scale", "x"), (fa3.flash_attn_func, "attention_chunk", 1.5),
    (fa2.flash_attn_with_kvcache, "softmax_scale", "x"), (fa2.flash_attn_with_kvcache, "cache_seqlens", [3, 4]),
    (fa2.flash_attn_with_kvcache, "cache_leftpad", [3, 4]), (fa2.flash_attn_with_kvcache, "block_table", [3, 4]),
    (fa4_interface._flash_attn_fwd, "softmax_scale", "x"),
])  # fmt: skip
def test_errors_of_wrong_kinds_have_the_names_of_callers(function, name, value):
    """PyTorch's, about arguments of the operator."""
    with pytest.raises(RuntimeError, match=f"for argument '{name}' but instead found type"):
        function(*make_qkv(), **{name: value})


@pytest.mark.parametrize("function", [
    fa2.flash_attn_func, fa3.flash_attn_func, fa4.flash_attn_func, fa3._flash_attn_forward,
    fa4_interface._flash_attn_fwd, fa2.flash_attn_with_kvcache, fa3.flash_attn_with_kvcache,
])  # fmt: skip
def test_what_is_no_tensor(function):
    names = ("q", "k_cache", "v_cache") if "kvcache" in function.__name__ else ("q", "k", "v")
    for name in names:
        for wrong in (None, [1.0], np.zeros(3)):
            with pytest.raises(TypeError, match=f"^{name}: got {type(wrong).__name__}, want a tensor"):
                function(**dict(zip(names, make_qkv())) | {name: wrong})
    with pytest.raises(TypeError, match="^learnable_sink: got str, want a tensor"):
        fa4.flash_attn_func(*make_qkv(), learnable_sink="x")


def test_errors_of_others_keep_their_words():
    def fail(message):
        raise RuntimeError(message)

    for message in ("Expected size of k to be 3", "k and v differ: by far"):
        with pytest.raises(RuntimeError, match=f"^{message}$"):
            named({"k": "key"}, fail, message)
    with pytest.raises(RuntimeError, match="^q: on cpu, want cuda as key, not k_new or mask.k$"):
        named({"k": "key"}, fail, "q: on cpu, want cuda as k, not k_new or mask.k")


@pytest.mark.parametrize("module", [fa2, fa3, fa4])
@pytest.mark.parametrize("window", [None, 3, (1, 2, 3), ("a", 0), (1.5, 0)])
def test_windows_that_are_no_pair(module, window):
    with pytest.raises(TypeError, match="^window_size: got .*, want .left, right."):
        module.flash_attn_func(*make_qkv(), window_size=window)


def results_of(returned):
    """out, which FlashAttention-4 returns with lse."""
    return returned[0] if isinstance(returned, tuple) else returned


@pytest.mark.parametrize("module", [fa2, fa3, fa4])
class TestNothing:
    """Empty batches, and sequences that are all empty, whose longest length is 0."""

    def test_no_sequence(self, module):
        rows = torch.empty(0, 5, 2, 16)
        assert results_of(module.flash_attn_func(rows, rows, rows)).shape == rows.shape

    @pytest.mark.parametrize("rows", [0, 3])
    def test_empty_sequences(self, module, rows):
        x, ends = torch.ones(rows, 2, 16), int32(0, 0, 0)
        out = results_of(
            module.flash_attn_varlen_func(
                x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=0, max_seqlen_k=0
            )
        )
        assert out.shape == x.shape and not out.any()


@pytest.mark.parametrize("module", [fa2, fa3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_autocast_casts_to_the_dtype_of_caches(module, dtype, appends, paged):
    q, new = make((2, 1, 2, 16), (2, 1, 2, 16))
    cache = make((2, 8, 2, 16))[0].to(dtype)
    table = {"block_table" if module is fa2 else "page_table": int32(1, 0)[:, None]} if paged else {}

    def call(q, new):
        caches = cache.clone(), cache.clone()
        rows = (new, new) if appends else ()
        return module.flash_attn_with_kvcache(q, *caches, *rows, cache_seqlens=int32(3, 4), **table), *caches

    torch.compiler.reset()
    for function in (call, torch.compile(call, fullgraph=True, backend="eager")):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = function(q, new)
        assert got[0].dtype == dtype
        assert all(map(torch.equal, got, call(q.to(dtype), new.to(dtype))))


@pytest.mark.parametrize("module", [fa2, fa3])
def test_caches_of_no_sequence(module):
    q, cache = torch.empty(0, 1, 2, 16), torch.empty(0, 8, 2, 16)
    assert module.flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=3).shape == q.shape


@pytest.mark.parametrize("shape", [(0, 5, 2, 8), (2, 0, 2, 8)])
def test_padding_of_empty_batches(shape):
    rows, indices, ends, longest, used = bert_padding.unpad_input(torch.empty(shape), torch.ones(shape[:2]))
    assert (rows.shape, ends.tolist(), longest) == ((0, *shape[2:]), [0] * (shape[0] + 1), 0)
    assert used.tolist() == [0] * shape[0]
    assert bert_padding.pad_input(rows, indices, *shape[:2]).shape == shape


@pytest.mark.parametrize("module", [fa2, fa3, fa4])
def test_longest_lengths_in_tensors_are_exported(module):
    """Nothing reads them while a graph is made."""

    class Module(torch.nn.Module):
        def forward(self, x, ends, longest):
            return results_of(
                module.flash_attn_varlen_func(
                    x, x, x, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest
                )
            )

    inputs = make((7, 2, 8))[0], int32(0, 3, 7), torch.tensor(4)
    assert torch.equal(torch.export.export(Module(), inputs).module()(*inputs), Module()(*inputs))


@pytest.mark.parametrize("module", [fa2, fa3, fa4])
def test_windows_of_symbolic_sizes_compile_once(module):
    counter = CompileCounter()

    @torch.compile(dynamic=True, fullgraph=True, backend=counter)
    def half(q):
        return results_of(module.flash_attn_func(q, q, q, window_size=(q.shape[1] // 2, 0)))

    for rows in range(5, 25):
        q = torch.randn(1, rows, 2, 8)
        want = attention(q, q, q, window=(rows // 2, 0))
        assert torch.equal(half(q), want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("call, name", [
    (fa2.flash_attn_qkvpacked_func, "qkv"), (fa3.flash_attn_qkvpacked_func, "qkv"),
    (lambda x: fa2.flash_attn_kvpacked_func(make_qkv()[0], x), "kv"),
    (lambda x: rotary.apply_rotary_emb_qkv_(x, None, None), "qkv"),
])  # fmt: skip
def test_parts_that_are_no_tensor(call, name):
    for x in (None, torch.ones(2, 5, 3, 4, 8).numpy()):
        with pytest.raises(TypeError, match=f"^{name}: got {type(x).__name__}, want a tensor$"):
            call(x)


def test_wide_values_on_a_gpu_raise():
    wide = SimpleNamespace(is_cuda=True, shape=(1, 5, 2, 512))
    for function in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        with pytest.raises(NotImplementedError, match="^headdim_v: .* up to 256, got v with 512"):
            function(wide, wide, wide)
    q, k, v = make_qkv()
    v = torch.randn(*v.shape[:3], 512)  # not on a GPU
    assert torch.equal(fa3.flash_attn_func(q, k, v), attention(q, k, v))


def test_splits_beside_pages_raise():
    q, k, v = make_qkv()
    pages = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 7, 14), max_seqlen_q=3,
                 max_seqlen_k=7, block_table=int32(0, 1).reshape(2, 1))  # fmt: skip

    def call(**options):
        return flash_attn_interface._flash_attn_varlen_forward(
            q[0], k, v, dropout_p=0.0, softmax_scale=0.5, causal=False, **pages, **options
        )[0]

    assert torch.equal(call(), call(num_splits=1))
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported with a block_table"):
        call(num_splits=2)


def test_probabilities_under_dropout_raise():
    with pytest.raises(NotImplementedError, match="^return_attn_probs with dropout_p"):
        fa2.flash_attn_func(*make_qkv(), 0.5, return_attn_probs=True)


class TestPadding:
    def test_there_and_back(self):
        (x,) = make((3, 5, 2, 4), grad=True)
        mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
        rows, indices, ends, longest, used = bert_padding.unpad_input(x, mask)
        assert torch.equal(rows, x[mask.bool()])
        assert ends.tolist() == [0, 3, 6, 11] and ends.dtype == torch.int32
        assert (longest, used.tolist()) == (5, [3, 3, 5])
        back = bert_padding.pad_input(rows, indices, 3, 5)
        assert torch.equal(back, x * mask[..., None, None])
        (gradient,) = torch.autograd.grad(back.sum(), x)
        assert torch.equal(gradient, mask[..., None, None].expand_as(x).float())

    def test_rows_that_are_allocated_but_unused(self):
        mask, unused = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.tensor([[0, 1, 0], [0, 0, 0]])
        rows, _, ends, longest, used = bert_padding.unpad_input(torch.ones(2, 3, 1), mask, unused)
        assert (len(rows), ends.tolist(), longest, used.tolist()) == (4, [0, 2, 4], 2, [1, 2])

    def test_masks_of_another_shape(self):
        x, mask = torch.ones(2, 3, 1), torch.ones(2, 3, dtype=torch.int32)
        for masks, name in (((mask[:, :2],), "attention_mask"), ((mask, mask[:, :2]), "unused_mask")):
            with pytest.raises(ValueError, match=f"^{name}: got shape .2, 2., want .2, 3., the first"):
                bert_padding.unpad_input(x, *masks)

    def test_several_sequences_in_a_row(self):
        (x,) = make((2, 6, 3))
        lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
        rows, indices, ends, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
        assert torch.equal(rows, torch.cat([x[0, :5], x[1]]))
        assert (ends.tolist(), longest) == ([0, 2, 5, 11], 6)
        assert torch.equal(bert_padding.pad_input(rows, indices, 2, 6)[0, :5], x[0, :5])


class TestRotary:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_turns_pairs(self, interleaved):
        """As complex numbers that are multiplied."""
        (x,) = make((2, 5, 3, 12))
        angles = torch.rand(9, 4)
        got = rotary.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, seqlen_offsets=2)
        turned, rest = x[..., :8], x[..., 8:]
        pairs = turned.unflatten(-1, (4, 2)) if interleaved else turned.unflatten(-1, (2, 4)).mT
        result = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles[2:7, None])
        result = torch.view_as_real(result)
        want = (result if interleaved else result.mT).flatten(-2)
        torch.testing.assert_close(got, torch.cat([want, rest], -1))

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_is_rounded_once(self, interleaved):
        x, angles = make((1, 64, 5, 40))[0].bfloat16(), 6 * torch.rand(64, 16)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        got = rotary.apply_rotary_emb(x, cos, sin, interleaved)
        # Products of bf16 are exact in float32, so this is what kernels compute, whichever way they add.
        assert torch.equal(got[0], turned(x[0], cos, sin, interleaved).float().bfloat16())

    def test_packed_and_offsets(self):
        (x,) = make((2, 4, 3, 8))
        angles = torch.rand(9, 4)
        cos, sin, offsets = angles.cos(), angles.sin(), torch.tensor([3, 0])
        want = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
        torch.testing.assert_close(want[:1], rotary.apply_rotary_emb(x[:1], cos, sin, seqlen_offsets=3))
        rows = torch.cat([x[0, :2], x[1], x[0, :1]])  # the last is padding
        got = rotary.apply_rotary_emb(
            rows, cos, sin, seqlen_offsets=offsets, cu_seqlens=int32(0, 2, 6), max_seqlen=4
        )
        torch.testing.assert_close(got[:6], torch.cat([want[0, :2], want[1]]))

    def test_wrong_arguments(self):
        (x,) = make((2, 4, 3, 8))
        angles, call = torch.rand(5, 4), rotary.apply_rotary_emb
        with pytest.raises(ValueError, match="^cos: got 3 positions, want 4"):
            call(x, angles[:3], angles[:3])
        with pytest.raises(ValueError, match="^cos: got 5 positions, want 6"):
            call(x, angles, angles, seqlen_offsets=2)
        with pytest.raises(ValueError, match="^cos: got 5 positions, want 7"):
            call(x[0], angles, angles, seqlen_offsets=3, cu_seqlens=int32(0, 4), max_seqlen=4)
        with pytest.raises(ValueError, match="^cos: got 5 columns, want at most half of the 8 of x"):
            call(x, torch.rand(5, 5), torch.rand(5, 5))
        with pytest.raises(ValueError, match="^sin: got shape .5, 3., want .5, 4. as cos"):
            call(x, angles, angles[:, :3])
        # A device would not tell, but end the process: places in a tensor are those that there are.
        got = call(x, angles, angles, seqlen_offsets=torch.tensor([0, 9]))
        torch.testing.assert_close(got[1], call(x[1:], angles[4:].expand(4, 4), angles[4:].expand(4, 4))[0])

    def test_in_place(self):
        (x,) = make((1, 4, 2, 8))
        cos, sin = torch.rand(2, 4, 4)
        want = rotary.apply_rotary_emb(x, cos, sin)
        assert rotary.apply_rotary_emb(x, cos, sin, inplace=True) is x
        assert torch.equal(x, want)

    @pytest.mark.parametrize("scaled", [False, True])
    def test_packed_with_v(self, scaled):
        (qkv,) = make((2, 4, 3, 2, 8))
        cos, sin, cos_k, sin_k = torch.rand(4, 6, 4)
        of_k = (cos_k, sin_k) if scaled else (cos, sin)
        options = dict(interleaved=True, seqlen_offsets=torch.tensor([2, 0]))
        q = rotary.apply_rotary_emb(qkv[:, :, 0], cos, sin, **options)
        k = rotary.apply_rotary_emb(qkv[:, :, 1], *of_k, **options)
        want = torch.stack([q, k, qkv[:, :, 2]], 2)
        given = dict(cos_k=cos_k, sin_k=sin_k) if scaled else {}
        flat = qkv.flatten(2, 3).clone()  # two heads each
        assert rotary.apply_rotary_emb_qkv_(flat, cos, sin, num_heads_q=2, **given, **options) is flat
        assert torch.equal(flat, want.flatten(2, 3))
        kv = qkv[:, :, 1:].clone()
        assert rotary.apply_rotary_emb_qkv_(qkv, cos, sin, **given, **options) is qkv
        assert torch.equal(qkv, want)
        assert rotary.apply_rotary_emb_kv_(kv, *of_k, **options) is kv
        assert torch.equal(kv, want[:, :, 1:])

    def test_packed_with_v_has_gradients(self):
        (qkv,), (cos, sin) = make((1, 3, 3, 2, 4)), torch.rand(2, 3, 2, dtype=torch.float64)
        qkv = qkv.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: rotary.apply_rotary_emb_qkv_(x.clone(), cos, sin), qkv)

    def test_packed_with_v_wrong_arguments(self):
        (qkv,), angles = make((1, 4, 7, 8)), torch.rand(4, 4)
        call = rotary.apply_rotary_emb_qkv_
        errors = {None: "got None, want the heads of q", 4: "got 4, want to leave", 7: "got 7", 0: "got 0"}
        for heads, error in errors.items():
            with pytest.raises(ValueError, match=f"^num_heads_q: {error}"):
                call(qkv, angles, angles, num_heads_q=heads)
        with pytest.raises(ValueError, match="^sin_k: got None, want it with cos_k"):
            call(qkv, angles, angles, cos_k=angles, num_heads_q=3)
        for name, call in (("qkv", call), ("kv", rotary.apply_rotary_emb_kv_)):
            with pytest.raises(ValueError, match=f"^{name}: got shape .1, 4, 7, 1, 8., want .batch, seqlen, [23]"):
                call(qkv.unsqueeze(3), angles, angles)
        with pytest.raises(ValueError, match="^qkv: got shape .4, 8., want 4 or 5 dimensions"):
            rotary.apply_rotary_emb_qkv_(qkv[0, :, 0], angles, angles)


class TestRotaryEmbedding:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_angles(self, interleaved):
        (qkv,) = make((2, 5, 3, 2, 10))
        angles = torch.arange(7)[:, None] * 100.0 ** -(torch.arange(4) / 4)
        want = rotary.apply_rotary_emb_qkv_(
            qkv.clone(), angles.cos(), angles.sin(), interleaved=interleaved, seqlen_offsets=2
        )
        call = rotary.RotaryEmbedding(8, base=100, interleaved=interleaved)
        torch.testing.assert_close(call(qkv.clone(), seqlen_offset=2), want)
        flat = call(qkv.clone().flatten(2, 3), seqlen_offset=2, num_heads_q=2)
        torch.testing.assert_close(flat, want.flatten(2, 3))
        q, kv = call(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=torch.tensor([2, 2]))
        torch.testing.assert_close(torch.cat([q.unsqueeze(2), kv], 2), want)
        assert not call.state_dict()

    @pytest.mark.parametrize("scale_base", [None, 16])
    def test_scores_depend_on_distances_alone(self, scale_base):
        call = rotary.RotaryEmbedding(8, scale_base=scale_base)
        qkv = make((1, 1, 3, 1, 8))[0].expand(1, 6, 3, 1, 8)  # the same at each place
        near = call(qkv.clone(), max_seqlen=20)[0, :, :, 0]
        far = call(qkv.clone(), seqlen_offset=9, max_seqlen=20)[0, :, :, 0]
        scores = near[:, 0] @ near[:, 1].T
        torch.testing.assert_close(scores, far[:, 0] @ far[:, 1].T)
        torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1])
        assert not torch.allclose(scores[1, 0], scores[0, 0])

    def test_far_places_of_a_module_in_bfloat16(self):
        q = make((1, 1, 2, 8))[0].bfloat16()
        kv = torch.zeros(1, 1, 2, 2, 8).bfloat16()
        exact = rotary.RotaryEmbedding(8)
        call = rotary.RotaryEmbedding(8).bfloat16()
        want, _ = exact(q.clone(), kv.clone(), seqlen_offset=5000)
        got, _ = call(q.clone(), kv.clone(), seqlen_offset=5000)
        assert torch.equal(got, want)

    @pytest.mark.parametrize("scale_base", [None, 16])
    def test_rows_in_bfloat16_are_rounded_once(self, scale_base):
        qkv = make((2, 5, 3, 2, 8))[0].bfloat16()
        want = rotary.RotaryEmbedding(8, scale_base=scale_base)(qkv.float())
        assert torch.equal(rotary.RotaryEmbedding(8, scale_base=scale_base)(qkv.clone()), want.bfloat16())

    def test_wrong_arguments(self):
        with pytest.raises(ValueError, match="^dim: got 7, want an even number from 2 on"):
            rotary.RotaryEmbedding(7)
        (qkv,) = make((2, 5, 3, 2, 8))
        with pytest.raises(ValueError, match="^max_seqlen: got None, want the longest sequence"):
            rotary.RotaryEmbedding(8)(qkv, seqlen_offset=torch.tensor([0, 1]))


class TestInstallAs:
    @pytest.mark.parametrize(
        "name, modules",
        [
            ("flash_attn", ["flash_attn", "flash_attn.bert_padding", "flash_attn.layers.rotary"]),
            ("flash_attn_interface", ["flash_attn_interface"]),
            ("flash_attn.cute", ["flash_attn.cute", "flash_attn.cute.interface"]),
        ],
    )
    def test_there_and_back(self, name, modules):
        before = {x for x in sys.modules if x.startswith("flash_attn")}
        undo = fulgur.install_as(name)
        try:
            for module in modules:
                assert importlib.import_module(module).__name__.startswith("fulgur.")
                assert importlib.util.find_spec(module) is not None
        finally:
            undo()
        assert {x for x in sys.modules if x.startswith("flash_attn")} == before
        assert importlib.util.find_spec(name.partition(".")[0]) is None

    def test_nested(self):
        """A name is taken back with the last one that took it, in any order, and each counts once."""
        before = {x for x in sys.modules if x.startswith("flash_attn")}
        for order in itertools.permutations(range(3)):
            undos = [fulgur.install_as(name) for name in ("flash_attn", "flash_attn", "flash_attn.cute")]
            flash_attn = importlib.import_module("flash_attn")
            for left, i in zip((2, 1, 0), order):
                undos[i](), undos[i]()
                assert ("flash_attn" in sys.modules) == (left > 0)
                if i == 2:
                    assert "flash_attn.cute" not in sys.modules and not hasattr(flash_attn, "cute")
            assert {x for x in sys.modules if x.startswith("flash_attn")} == before

    def test_statements_that_programs_have(self):
        code = """
import fulgur
fulgur.install_as("flash_attn"), fulgur.install_as("flash_attn.cute")
fulgur.install_as("flash_attn_interface")
import flash_attn, flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_varlen_func, bert_padding
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward, _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_func
from flash_attn.cute import flash_attn_func as fa4
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd, flash_attn_varlen_func as fa4_varlen
from flash_attn_interface import get_scheduler_metadata
assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 8)
try:
    import flash_attn.ops
except ModuleNotFoundError as error:
    assert error.name == "flash_attn.ops"
"""
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_refuses_what_is_imported(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flash_attn", sys)
        with pytest.raises(RuntimeError, match="^name: flash_attn is imported already"):
            fulgur.install_as("flash_attn")

    def test_refuses_other_names(self):
        with pytest.raises(ValueError, match="^name: got 'xformers', want one of 'flash_attn'"):
            fulgur.install_as("xformers")
