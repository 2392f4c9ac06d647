"""fulgur inside PyTorch's scaled_dot_product_attention and inside transformers' models."""

import functools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch.nn import attention as torch_attention  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import fulgur.torch  # noqa: E402
from fulgur.torch import _operators, _sdpa  # noqa: E402


def make(*shapes, dtype=torch.float32, grad=True):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


class TestSdpa:
    @pytest.fixture(autouse=True)
    def _active(self, monkeypatch):
        """Activates fulgur, and counts its calls."""
        self.calls = []
        compute = _operators.forward_into
        monkeypatch.setattr(_operators, "forward_into", lambda *x, **y: (self.calls.append(x), compute(*x, **y)))
        torch_attention.activate_flash_attention_impl("fulgur")
        yield
        torch_attention.restore_flash_attention_impl(_raise_warn=False)

    def compare(self, q, k, v, tolerance=1e-5, **options):
        """With PyTorch's math, forward and backward."""
        before = len(self.calls)
        out = scaled_dot_product_attention(q, k, v, **options)
        calls = len(self.calls) - before
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
            want = scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
        dout = torch.randn_like(out)
        gradients = [torch.autograd.grad(x, (q, k, v), dout) for x in (out, want)]
        torch.testing.assert_close(*gradients, atol=4 * tolerance, rtol=4 * tolerance)
        return calls

    @pytest.mark.parametrize("lengths", [(7, 7), (9, 5), (5, 9), (1, 8)])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_is_that_of_torch(self, lengths, is_causal):
        """Its causal masks are aligned at the top left."""
        sq, sk = lengths
        q, k, v = make((2, 4, sq, 16), (2, 4, sk, 16), (2, 4, sk, 16))
        assert self.compare(q, k, v, is_causal=is_causal, scale=0.3) == 1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_dtypes(self, dtype):
        q, k, v = make(*[(2, 4, 33, 32)] * 3, dtype=dtype)
        assert self.compare(q, k, v, 3e-2, is_causal=True) == 1

    def test_grouped_heads(self):
        q, k, v = make((2, 8, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16))
        assert self.compare(q, k, v, enable_gqa=True, is_causal=True) == 1

    def test_layouts(self):
        """The result has the layout of the queries."""
        for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
            q, k, v = (
                x.detach().permute(order).contiguous().permute(order).requires_grad_()
                for x in make(*[(2, 4, 9, 16)] * 3)
            )
            assert self.compare(q, k, v, is_causal=True) == 1
            out = scaled_dot_product_attention(q, k, v)
            assert out.stride() == q.stride()

    @pytest.mark.parametrize("shape", [(9, 7), (2, 4, 9, 7), (2, 1, 1, 7)])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_masks(self, shape, dtype):
        q, k, v = make((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16))
        seen = torch.rand(shape) > 0.4
        seen[..., 0] = True
        mask = seen if dtype == torch.bool else torch.randn(shape).masked_fill(~seen, -torch.inf)
        assert self.compare(q, k, v, attn_mask=mask) == 1

    @pytest.mark.parametrize("shape", [(2, 4, 9, 7), (2, 1, 9, 7), (4, 1, 7), (1, 7)])
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("dtype, close", [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
    def test_masks_on_a_gpu(self, shape, is_causal, dtype, close):
        """What PyTorch asks memory-efficient attention for, of which a mask gets its gradient; called without a GPU."""
        q, k, v = make((2, 4, 9, 16), (2, 4, 7, 16), (2, 4, 7, 16), dtype=dtype)
        mask = torch.randn(shape, dtype=dtype)
        mask[..., 3] = -torch.inf
        mask.requires_grad_()
        bias = mask.expand(2, 4, 9, 7)
        hidden = torch.ones(9, 7).triu(1) > 0 if is_causal else torch.zeros(9, 7) > 0
        numbers = bias.float().masked_fill(hidden, -torch.inf)
        want = scaled_dot_product_attention(*(x.float() for x in (q, k, v)), numbers)
        dout = torch.randn_like(want).to(dtype)
        wanted = torch.autograd.grad(want, (q, k, v, mask), dout.float())
        given = [x.detach() for x in (q, k, v, bias)]
        out, lse, seed, offset = _sdpa._efficient_forward(None, *given, True, is_causal=is_causal)
        assert lse.shape == (2, 4, 32) and out.dtype == dtype
        *gradients, dbias = _sdpa._efficient_backward(
            None, dout, *given, out, lse, seed, offset, 0.0, [True] * 4, is_causal
        )
        gradients.append(torch.autograd.grad(bias, mask, dbias)[0])
        torch.testing.assert_close(out.float(), want, atol=close, rtol=close)
        torch.testing.assert_close(gradients, list(wanted), atol=2.5 * close, rtol=2.5 * close)
        *_, dbias = _sdpa._efficient_backward(
            None, dout, *given, out, lse, seed, offset, 0.0, [True] * 3 + [False], is_causal
        )
        assert dbias is None
        assert _sdpa._efficient_forward(None, *given, False)[1].shape == (2, 4, 0)

    @pytest.mark.parametrize("dtype, dim, close", [(torch.float32, 16, 1e-5), (torch.bfloat16, 512, 4e-2)])
    def test_without_masks_on_a_gpu(self, dtype, dim, close):
        """PyTorch asks memory-efficient attention for float32 and wide heads; called without a GPU."""
        q, k, v = make(*[(2, 4, 9, dim)] * 3, dtype=dtype)
        want = scaled_dot_product_attention(q, k, v, is_causal=True)
        dout = torch.randn_like(want)
        given = [x.detach() for x in (q, k, v)]
        out, lse, seed, offset = _sdpa._efficient_forward(None, *given, None, True, 0.0, True)
        results = (out, lse, seed, offset, 0.0, [True] * 3 + [False], True)
        *gradients, dbias = _sdpa._efficient_backward(None, dout, *given, None, *results)
        torch.testing.assert_close(out, want, atol=close, rtol=close)
        wanted = list(torch.autograd.grad(want, (q, k, v), dout))
        torch.testing.assert_close(gradients, wanted, atol=close, rtol=close)
        assert dbias is None

    def test_what_stays_with_efficient_attention(self):
        """Calls of 16 bits without a mask, in float64, and of more columns than GPUs compute, with dropout too."""
        torchs = lambda *x, **_: ("PyTorch", len(x))  # noqa: E731
        q, k, v = make(*[(2, 4, 9, 16)] * 3, dtype=torch.bfloat16, grad=False)
        mask, wide = torch.zeros(2, 4, 9, 9), torch.zeros(2, 4, 9, 520, dtype=torch.bfloat16)
        doubles, widest = (x.double() for x in (q, k, v)), wide[..., :256].float()
        for tensors in ((q, k, v, None), (*doubles, mask), (wide, wide, wide, mask), (widest, widest, widest, None)):
            assert _sdpa._efficient_forward(torchs, *tensors, True) == ("PyTorch", 7)
            results = (q, mask, mask, mask, 0.0, [True] * 4)
            assert _sdpa._efficient_backward(torchs, q, *tensors, *results) == ("PyTorch", 12)
        dropped = (*(wide[..., :264],) * 3, None)
        results = (q, mask, mask, mask, 0.5, [True] * 4)
        assert _sdpa._efficient_forward(torchs, *dropped, True, 0.5) == ("PyTorch", 7)
        assert _sdpa._efficient_backward(torchs, q, *dropped, *results) == ("PyTorch", 12)

    def test_what_stays_with_torch(self):
        q, k, v = make(*[(2, 4, 9, 16)] * 3)
        mask = torch.randn(9, 9).requires_grad_()
        assert self.compare(q, k, v, attn_mask=mask) == 0
        assert self.compare(*(x.detach().double().requires_grad_() for x in (q, k, v))) == 0
        assert self.compare(*make(*[(2, 1, 9, 512)] * 3), is_causal=True) == 1
        assert self.compare(*make(*[(2, 1, 9, 513)] * 3), is_causal=True) == 0

    @pytest.mark.slow
    def test_under_compile(self):
        q, k, v = make(*[(2, 4, 9, 16)] * 3)
        call = lambda *x: scaled_dot_product_attention(*x, is_causal=True) * 2  # noqa: E731
        out, want = torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v)
        torch.testing.assert_close(out, want)
        assert len(self.calls) == 2
        for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want))):
            torch.testing.assert_close(a, b)

    def test_is_restored(self):
        q, k, v = make(*[(2, 4, 9, 16)] * 3)
        first = torch._C._get_sdp_priority_order()
        assert torch_attention.current_flash_attention_impl() == "fulgur"
        assert first[0] == int(torch_attention.SDPBackend.FLASH_ATTENTION)
        for _ in range(2):
            torch_attention.restore_flash_attention_impl(_raise_warn=False)
            assert self.compare(q, k, v) == 0
            torch_attention.activate_flash_attention_impl("fulgur")
            assert self.compare(q, k, v) == 1

    def test_errors_have_the_names_of_callers(self):
        q, k, v = make(*[(2, 4, 9, 16)] * 3)
        with pytest.raises(RuntimeError, match="^value: got shape .2, 8, 4, 16., want .2, 9, 4, 16."):
            scaled_dot_product_attention(q, k, v[:, :, :8])
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        with pytest.raises(RuntimeError, match="^key: got bf16, want f32 .the dtype of query."):
            forward(q, k.bfloat16(), v)
        with pytest.raises(RuntimeError, match="^grad_out: got shape"):
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            backward(q[:, :, :8].detach(), q, k, v, *forward(q, k, v), 0.0, False)

    def test_sequences_that_are_all_empty(self):
        """PyTorch says on a GPU that the longest has 0 rows, which our operators would read as not given."""
        ends = torch.zeros(3, dtype=torch.int32)
        shared = _sdpa._cuda_shared(ends, ends, 0, 0, 0.0, None, False, None, None, None)
        assert (shared["max_seqlen_q"], shared["max_seqlen_k"]) == (1, 1)

    def test_is_listed(self):
        assert "fulgur" in torch_attention.list_flash_attention_impls()


class TestTransformers:
    LENGTHS = (9, 4, 12)

    @pytest.fixture(autouse=True)
    def _imports(self):
        self.transformers = pytest.importorskip("transformers")
        import fulgur.transformers  # noqa: F401

    def model(self, kind, implementation, **options):
        config = getattr(self.transformers, f"{kind}Config")(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation=implementation,
            **options,
        )  # fmt: skip
        torch.manual_seed(1)
        return self.transformers.AutoModelForCausalLM.from_config(config).eval()

    def pair(self, kind="Llama", **options):
        return [self.model(kind, name, **options) for name in ("fulgur", "eager")]

    def batch(self, side):
        torch.manual_seed(2)
        tokens = torch.randint(3, 97, (3, max(self.LENGTHS)))
        places = torch.arange(max(self.LENGTHS))
        lengths = torch.tensor(self.LENGTHS)[:, None]
        mask = places >= max(self.LENGTHS) - lengths if side == "left" else places < lengths
        return tokens * mask, mask.long()

    MODELS = {
        "llama": ("Llama", {}),
        "no Linear": ("GPT2", {}),
        "sliding window": ("Mistral", dict(sliding_window=5)),
        "softcap": ("Gemma2", dict(sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=8)),
        "chunks": ("Llama4Text", dict(attention_chunk_size=5, intermediate_size_mlp=48, num_local_experts=2)),
        "sinks": ("GptOss", dict(sliding_window=5, num_local_experts=2, num_experts_per_tok=2)),
    }
    each_model = pytest.mark.parametrize("name", MODELS)

    @each_model
    @pytest.mark.parametrize("side", ["left", "right", None])
    def test_logits_and_gradients(self, name, side):
        kind, options = self.MODELS[name]
        tokens, mask = self.batch(side)
        if side is None:
            mask = torch.ones_like(mask)
        results = []
        for model in self.pair(kind, **options):
            logits = model(tokens, attention_mask=mask).logits[mask.bool()]
            logits.square().mean().backward()
            results.append([logits, *(x.grad for x in model.parameters())])
        torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)

    @each_model
    def test_generation(self, name):
        """With a cache: one query and many keys, left padded."""
        kind, options = self.MODELS[name]
        tokens, mask = self.batch("left")
        generate = dict(attention_mask=mask, max_new_tokens=12, do_sample=False)
        ours, theirs = (model.generate(tokens, **generate) for model in self.pair(kind, **options))
        assert torch.equal(ours, theirs)

    @pytest.mark.slow
    def test_under_compile(self):
        """In one graph, masks included."""
        model = self.model("Mistral", "fulgur", sliding_window=5)
        tokens, _ = self.batch("right")
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        got = compiled(tokens, use_cache=False).logits
        torch.testing.assert_close(got, model(tokens, use_cache=False).logits)

    @pytest.mark.parametrize("length", [4, 12, 20])
    def test_encoder_and_decoder(self, length):
        """The mask of an encoder's keys says nothing of the decoder's queries."""
        tokens, mask = self.batch("right")
        decoded = torch.randint(3, 97, (3, length))
        results = []
        for name in ("fulgur", "eager"):
            config = self.transformers.BartConfig(
                vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
                decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0,
                attn_implementation=name,
            )  # fmt: skip
            torch.manual_seed(1)
            model = self.transformers.BartModel(config)
            out = model(tokens, attention_mask=mask, decoder_input_ids=decoded).last_hidden_state
            out.square().mean().backward()
            results.append([out, *(x.grad for x in model.parameters() if x.grad is not None)])
        torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)

    def test_static_cache(self):
        tokens, mask = self.batch("left")
        options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False)
        ours, theirs = self.pair()
        got = ours.generate(tokens, cache_implementation="static", disable_compile=True, **options)
        assert torch.equal(got, theirs.generate(tokens, **options))

    def test_packed(self):
        """By position_ids that begin again, and by lengths."""
        model, eager = self.pair()
        tokens, _ = self.batch("right")
        parts = [tokens[i : i + 1, :n] for i, n in enumerate(self.LENGTHS)]
        rows = torch.cat(parts, 1)
        places = torch.cat([torch.arange(n) for n in self.LENGTHS])[None]
        want = torch.cat([eager(x).logits for x in parts], 1)
        torch.testing.assert_close(model(rows, position_ids=places).logits, want)
        torch.testing.assert_close(model(rows, position_ids=places + 2).logits, want)  # rotations are relative
        later = torch.cat([torch.arange(4) + 7, torch.arange(8)])[None]  # the first does not begin at 0
        options = dict(position_ids=later, use_cache=False)
        torch.testing.assert_close(model(tokens[:1], **options).logits, eager(tokens[:1], **options).logits)
        ends = torch.tensor([0, 9, 13, 25], dtype=torch.int32)
        lengths = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=12, max_length_k=12)
        got = model(rows, position_ids=places, **lengths).logits
        torch.testing.assert_close(got, want)

    @pytest.mark.slow
    def test_packed_in_several_rows(self):
        """A compiled model cannot tell how many sequences there are."""
        model, eager = self.pair()
        tokens, _ = self.batch("right")
        places = torch.arange(12).expand(3, -1)
        want = model(tokens, use_cache=False).logits
        torch.testing.assert_close(model(tokens, position_ids=places, use_cache=False).logits, want)
        anew = dict(position_ids=torch.stack([places[0] % n for n in (6, 5, 12)]), use_cache=False)
        torch.testing.assert_close(model(tokens, **anew).logits, eager(tokens, **anew).logits)
        message = "^position_ids that begin anew in several rows: "
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(tokens, position_ids=places, use_cache=False).logits, want)
        with pytest.raises(RuntimeError, match=message):
            compiled(tokens, position_ids=places % 6, use_cache=False)

    @pytest.mark.slow
    def test_an_old_version_is_refused(self):
        code = """
import transformers
transformers.__version__ = "5.5.4"
import fulgur.transformers
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "ImportError: fulgur.transformers: got transformers 5.5.4, want 5.6 or newer" in done.stderr

    def test_mixed_dtypes(self):
        """Norms in float32, as fine-tuning libraries have them."""
        model = self.model("Llama", "fulgur").to(torch.bfloat16)
        query, key, value = make((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), grad=False)
        module = model.model.layers[0].self_attn
        out, _ = fulgur.transformers.attention_forward(module, query, key, value, None)
        assert out.dtype == torch.bfloat16 and out.shape == (1, 6, 4, 8)

    def test_sinks_of_any_dtype(self):
        module = self.model("Llama", "fulgur").model.layers[0].self_attn
        query, key, value = make((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), grad=False)
        sinks = torch.tensor([0.5, -1, 2, 0], dtype=torch.bfloat16, requires_grad=True)
        forward = fulgur.transformers.attention_forward
        out, _ = forward(module, query, key, value, None, s_aux=sinks)
        without, _ = forward(module, query, key, value, None)
        assert not torch.equal(out, without)
        (got,) = torch.autograd.grad(out.square().sum(), sinks)
        assert got.dtype == torch.bfloat16 and got.abs().min() > 0

    @pytest.mark.parametrize("name", ["block_table", "block_indices"])
    def test_what_is_missing_raises(self, name):
        module = self.model("Llama", "fulgur").model.layers[0].self_attn
        tensors = make((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), grad=False)
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            fulgur.transformers.attention_forward(module, *tensors, None, **{name: tensors[0]})
        with pytest.raises(NotImplementedError, match="^attention_mask of torch.int64: "):
            fulgur.transformers.attention_forward(module, *tensors, torch.ones(1, 1, 6, 6, dtype=torch.long))

    @pytest.mark.parametrize("kind", ["bool", "numbers", "float64", "of more keys", "of all queries"])
    @pytest.mark.parametrize("biased", [False, True])
    def test_masks_of_four_dimensions(self, kind, biased):
        """They alone say what a query sees, as in eager attention; numbers and biases of positions get gradients."""
        module = self.model("Llama", "fulgur").model.layers[0].self_attn
        query, key, value = tensors = make((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, 8))
        mask = torch.rand(2, 1, 6, 9) < 0.6
        mask[..., 3] = True
        if kind in ("numbers", "float64"):
            mask = torch.randn(2, 4, 6, 9, dtype=torch.float64 if kind == "float64" else torch.float32)
            mask[..., 5] = -torch.inf
            mask.requires_grad_()
        given = torch.nn.functional.pad(mask, (0, 3), value=True) if kind == "of more keys" else mask
        if kind == "of all queries":
            given = mask = mask[:, :, :1]
        bias = torch.randn(1, 4, 6, 9, requires_grad=True) if biased else None
        inputs = [x for x in (*tensors, mask, bias) if x is not None and x.requires_grad]
        out, weights = fulgur.transformers.attention_forward(module, *tensors, given, position_bias=bias)
        assert weights is None
        numbers = torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float()
        numbers = numbers if bias is None else numbers + bias
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        want = scaled_dot_product_attention(query, key, value, numbers).transpose(1, 2)
        gradients = [torch.autograd.grad(x.square().sum(), inputs, retain_graph=True) for x in (out, want)]
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("options, message", [
        (dict(scaling=torch.nan), "scaling: got nan"), (dict(s_aux=torch.zeros(3)), "s_aux: got shape .3., want .4."),
        (dict(dropout=2.0), "dropout: got 2"), (dict(key=torch.zeros(1, 3, 6, 8)), "query: got 4 heads, .* of key"),
        (dict(cu_seq_lens_q=torch.tensor([0, 7]), cu_seq_lens_k=torch.tensor([0, 6]), max_length_q=6, max_length_k=6),
         "cu_seq_lens_q: ends with 7, want at most 6"),
        (dict(scaling=torch.nan, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]])), "scaling: got nan"),
    ])  # fmt: skip
    def test_errors_have_the_names_of_callers(self, options, message):
        module = self.model("Llama", "fulgur").model.layers[0].self_attn
        names = dict(zip(("query", "key", "value"), make((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), grad=False)))
        names["attention_mask"] = None
        if "key" in options:
            names["value"] = options["key"]
        with pytest.raises(RuntimeError, match=f"^{message}"):
            fulgur.transformers.attention_forward(module, **names | options)

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("padded", [False, True])
    def test_models_that_compute_by_themselves_raise(self, batch, padded):
        """They take the mask that they get for their own, and none would hide nothing."""
        model = self.model("Bloom", "fulgur")
        tokens, mask = (x[:batch] for x in self.batch("left"))
        message = r"^attn_implementation: transformers.models.bloom.modeling_bloom computes attention by itself"
        with pytest.raises(NotImplementedError, match=message):
            model(tokens, attention_mask=mask if padded else torch.ones_like(mask))

    def test_masks_without_words(self):
        """Tokens that see each other both ways, chunks of several queries with a cache, and their like: bools of each
        query and key."""
        masks = pytest.importorskip("transformers.masking_utils")

        def without_words(*shape, **options):
            got = fulgur.transformers.attention_mask(1, *shape, device="cpu", **options)
            assert torch.equal(got, masks.sdpa_mask(1, *shape, allow_is_causal_skip=False, **options))

        ids = torch.zeros(1, 6, dtype=torch.long)
        both_ways = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(ids))
        without_words(6, 6, mask_function=both_ways)
        unknown = masks.and_masks(functools.partial(masks.causal_mask_function))
        without_words(6, 6, mask_function=unknown)
        chunks = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
        without_words(2, 6, q_offset=4, mask_function=chunks)
        assert fulgur.transformers.attention_mask(1, 6, 6, mask_function=chunks).chunk == 4
        one = fulgur.transformers.attention_mask(1, 1, 6, q_offset=5, mask_function=chunks)
        assert one.padding.tolist() == [[False] * 4 + [True] * 2] and one.chunk == 0
        without_words(2, 3, q_offset=4)
        assert fulgur.transformers.attention_mask(1, 2, 6).keys == 2  # later keys are seen by nobody
        holes = torch.tensor([[1, 1, 0, 1, 1, 1]])
        window = masks.sliding_window_causal_mask_function(3)
        assert fulgur.transformers.attention_mask(1, 6, 6, attention_mask=holes).causal
        without_words(6, 6, mask_function=window, attention_mask=holes)

    def test_what_a_mask_is_for(self):
        """Other queries and keys than it was made for have no mask; a model that reads it gets an error."""
        module = self.model("Llama", "fulgur").model.layers[0].self_attn
        query, key, value = make((1, 4, 6, 8), (1, 2, 8, 8), (1, 2, 8, 8), grad=False)
        mask = fulgur.transformers.attention_mask(1, 6, 6)
        with pytest.raises(NotImplementedError, match="^attention_mask: is for 6 queries and 6 keys, .* has 6 and 8"):
            fulgur.transformers.attention_forward(module, query, key, value, mask)
        for read in (
            lambda: mask.shape, lambda: mask[..., :2], lambda: mask.to(torch.float32), lambda: torch.cat([mask]),
        ):  # fmt: skip
            with pytest.raises(NotImplementedError, match="^attention_mask: the model "):
                read()

    @each_model
    @pytest.mark.parametrize("side", ["left", "right", None])
    def test_attention_weights(self, name, side):
        """Those of eager attention, of tokens that see any."""
        kind, options = self.MODELS[name]
        tokens, mask = self.batch(side)
        if side is None:
            mask = torch.ones_like(mask)
        ours, theirs = self.pair(kind, **options)
        call = dict(attention_mask=mask, output_attentions=True)
        if name == "chunks" and side is not None:
            with pytest.raises(NotImplementedError, match="^output_attentions of chunks with padding: "):
                ours(tokens, **call)
            return
        got, want = ours(tokens, **call).attentions, theirs(tokens, **call).attentions
        assert len(got) == 2 and ours(tokens, attention_mask=mask).attentions is None
        for x, y in zip(got, want):
            assert x.shape == y.shape and x.dtype == y.dtype
            kept = mask.bool()
            torch.testing.assert_close(x.transpose(1, 2)[kept], y.transpose(1, 2)[kept])

    def test_attention_weights_of_steps_and_packed_rows(self):
        ours, theirs = self.pair()
        tokens, mask = self.batch("left")
        call = dict(attention_mask=mask, max_new_tokens=3, do_sample=False)
        call |= dict(return_dict_in_generate=True, output_attentions=True)
        got, want = (x.generate(tokens, **call).attentions for x in (ours, theirs))
        assert len(got) == 3
        torch.testing.assert_close(got[1:], want[1:])
        places = torch.cat([torch.arange(5), torch.arange(7)])[None]
        packed = dict(position_ids=places, output_attentions=True, use_cache=False)
        (got, _), (want, _) = (x(tokens[:1], **packed).attentions for x in (ours, theirs))
        torch.testing.assert_close(got, want)
        static = dict(call, cache_implementation="static", disable_compile=True)
        got, want = (x.generate(tokens, **static).attentions for x in (ours, theirs))
        torch.testing.assert_close(got[1:], want[1:])

    def test_attention_weights_refused(self):
        module = self.model("Llama", "fulgur").model.layers[0].self_attn
        tensors = make((1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8), grad=False)
        call = functools.partial(fulgur.transformers.attention_forward, module, *tensors, None, output_attentions=True)
        with pytest.raises(NotImplementedError, match="^output_attentions with dropout: "):
            call(dropout=0.5)
        ends = torch.tensor([0, 2, 6], dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="^output_attentions with cu_seq_lens_q: "):
            call(cu_seq_lens_q=ends, cu_seq_lens_k=ends)

    def test_biases_of_positions(self):
        """T5 adds and trains them."""
        tokens, mask = self.batch("right")
        results = []
        for name in ("fulgur", "eager"):
            config = self.transformers.T5Config(
                vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                decoder_start_token_id=0, attn_implementation=name,
            )  # fmt: skip
            torch.manual_seed(1)
            model = self.transformers.T5ForConditionalGeneration(config)
            out = model(tokens, attention_mask=mask, labels=tokens[:, :7].contiguous())
            out.loss.backward()
            results.append([out.loss, out.logits, *(x.grad for x in model.parameters() if x.grad is not None)])
        torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)
