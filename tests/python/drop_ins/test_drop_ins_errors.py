"""What the modules that stand in for FlashAttention's refuse, and calls of nothing."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounter  # noqa: E402

from drop_ins import int32, make, make_qkv, results_of  # noqa: E402

from fulgur import flash_attn as fa2  # noqa: E402
from fulgur import flash_attn_cute as fa4  # noqa: E402
from fulgur import flash_attn_interface as fa3  # noqa: E402
from fulgur._names import named  # noqa: E402
from fulgur.flash_attn import bert_padding, flash_attn_interface  # noqa: E402
from fulgur.flash_attn.layers import rotary  # noqa: E402
from fulgur.flash_attn_cute import interface as fa4_interface  # noqa: E402
from fulgur.torch import attention  # noqa: E402

ANYTHING = torch.ones(2)
OF_MODS = ("score_mod", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors")
REFUSED = [
    (fa3.flash_attn_func, 3, "qv"),
    (fa3.flash_attn_varlen_func, 7, "qv"),
    *((fa3._flash_attn_forward, 3, name) for name in ("qv", "q_descale", "k_descale", "v_descale")),
    (fa3.flash_attn_with_kvcache, 3, "qv"),
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


@pytest.mark.parametrize("name", ("q_descale", "k_descale", "v_descale"))
def test_descales_are_of_float8(name):
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match=f"^{name}: given with a q of float32, want it with float8$"):
        fa3.flash_attn_func(q, k, v, **{name: torch.ones(2, 2)})
    with pytest.raises(ValueError, match=f"^{name}: given with a k_cache of float32, want it with float8$"):
        fa3.flash_attn_with_kvcache(q, k, v, **{name: torch.ones(2, 2)})
    k8 = k.to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="^q_descale: got shape"):
        fa3.flash_attn_func(q.to(torch.float8_e4m3fn), k8, k8, q_descale=torch.ones(3, 7))
    with pytest.raises(ValueError, match="^k: got float32, want float8_e4m3fn as the cache"):
        fa3.flash_attn_with_kvcache(q, k8, k8, k, v, cache_seqlens=3)


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


_ENDS = dict(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 3, 7))


@pytest.mark.parametrize("function", [
    fa2.flash_attn_varlen_func, fa3.flash_attn_varlen_func, fa4.flash_attn_varlen_func,
])  # fmt: skip
def test_longest_lengths_are_integers_of_any_kind(function):
    rows = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    want = function(*rows, **_ENDS, max_seqlen_q=3, max_seqlen_k=4)
    for kind in (np.int64, np.int32, np.array, torch.tensor):
        got = function(*rows, **_ENDS, max_seqlen_q=kind(3), max_seqlen_k=kind(4))
        assert torch.equal(got, want) if isinstance(got, torch.Tensor) else torch.equal(got[0], want[0])
    for name in ("max_seqlen_q", "max_seqlen_k"):
        for wrong in (3.0, np.float32(3), "3"):
            lengths = dict(max_seqlen_q=3, max_seqlen_k=4) | {name: wrong}
            with pytest.raises(TypeError, match=f"^{name}: got {re.escape(repr(wrong))}, want an integer$"):
                function(*rows, **_ENDS, **lengths)


def test_packed_sequences_of_what_is_no_tensor():
    rows = dict(q=torch.randn(5, 4, 8), k=torch.randn(7, 2, 8), v=torch.randn(7, 2, 8))
    for name in rows:
        with pytest.raises(TypeError, match=f"^{name}: got ndarray, want a tensor$"):
            fa4.flash_attn_varlen_func(**rows | {name: np.zeros((5, 4, 8))}, **_ENDS)
    pages = torch.randn(2, 4, 2, 8)
    with pytest.raises(TypeError, match="^cu_seqlens_k: got list, want a tensor$"):
        fa2.flash_attn_varlen_func(
            rows["q"], pages, pages, **_ENDS | {"cu_seqlens_k": [0, 3, 7]}, max_seqlen_q=3, max_seqlen_k=4,
            block_table=int32(0, 1).reshape(2, 1),
        )  # fmt: skip


@pytest.mark.parametrize("function", [fa3.flash_attn_combine, fa4.flash_attn_combine])
def test_parts_to_combine_that_are_no_tensor(function):
    parts = dict(out_partial=torch.randn(3, 2, 4, 2, 8), lse_partial=torch.randn(3, 2, 4, 2))
    for name, x in parts.items():
        for wrong in (None, list(x), x.numpy()):
            with pytest.raises(TypeError, match=f"^{name}: got {type(wrong).__name__}, want a tensor$"):
                function(**parts | {name: wrong})


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
@pytest.mark.slow
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


def test_wide_values():
    q, k, v = make_qkv()
    v = torch.randn(*v.shape[:3], 512)
    assert torch.equal(fa3.flash_attn_func(q, k, v), attention(q, k, v))


def test_splits_with_pages_raise():
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
