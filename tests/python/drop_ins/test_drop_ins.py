"""The modules that stand in for FlashAttention's: signatures, padding, install_as()."""

import importlib.util
import inspect
import itertools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from drop_ins import make  # noqa: E402

import fulgur  # noqa: E402
from fulgur import flash_attn as fa2  # noqa: E402
from fulgur import flash_attn_cute as fa4  # noqa: E402
from fulgur import flash_attn_interface as fa3  # noqa: E402
from fulgur.flash_attn import bert_padding, flash_attn_interface  # noqa: E402
from fulgur.flash_attn.layers import rotary  # noqa: E402
from fulgur.flash_attn_cute import interface as fa4_interface  # noqa: E402

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

    @pytest.mark.slow
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
