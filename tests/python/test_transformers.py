"""Every family of transformers, tiny and random: fulgur gives what eager attention gives, or says by name why not.

A run takes a sample of the families, another one each day (``FULGUR_SWEEP_SEED`` draws the same again);
``FULGUR_SWEEP=all`` takes every one, and prints what became of it.
"""

import copy
import datetime
import inspect
import os
import random
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

import fulgur.transformers  # noqa: E402, F401

SAMPLE = 10
LIMIT = 40_000_000  # parameters of a model that is small enough

# Sizes by the names that configurations have for them.
SMALL = {
    32: "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim d_embed width projection_dim "
        "encoder_hidden_size decoder_hidden_size out_hidden_size word_embed_proj_dim emb_dim",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner moe_intermediate_size "
        "shared_expert_intermediate_size intermediate_size_mlp encoder_intermediate_size mlp_dim ffn_hidden_size "
        "decoder_intermediate_size expert_ffn_hidden_size",
    97: "vocab_size text_vocab_size decoder_vocab_size",
    2: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers "
       "num_decoder_layers depth num_key_value_heads num_kv_heads n_head_kv num_experts_per_tok "
       "encoder_num_hidden_layers decoder_num_hidden_layers num_local_layers moe_k num_blocks",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads "
       "num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts n_routed_experts "
       "encoder_num_attention_heads decoder_num_attention_heads",
    8: "head_dim d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim",
    16: "q_lora_rank kv_lora_rank index_head_dim",
    64: "max_position_embeddings n_positions max_source_positions max_target_positions seq_length",
}  # fmt: skip
SMALL = {name: size for size, names in SMALL.items() for name in names.split()}
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)


def shrink(config_class, **fixed):
    """A configuration of its class with few and small layers."""
    default = config_class()
    changed = {}
    for name in dir(default):
        if name.startswith("_"):
            continue
        try:
            value = getattr(default, name)
        except Exception:  # a property of a configuration that is not whole
            continue
        if isinstance(value, transformers.PreTrainedConfig):
            changed[name] = shrink(type(value)).to_dict()
        elif name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            changed[name] = min(value, SMALL[name]) if value > 0 else value
    layers = changed.get("num_hidden_layers")
    kinds = getattr(default, "layer_types", None)
    if isinstance(kinds, list) and layers:
        changed["layer_types"] = (list(dict.fromkeys(kinds)) * layers)[-layers:]
    if hasattr(default, "kv_lora_rank"):  # latent attention has as many heads of keys as of queries
        changed["num_key_value_heads"] = SMALL["num_attention_heads"]
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(default, name, None), int):
            changed[name] = 5
    tokens = {name: x for name, x in TOKENS.items() if hasattr(default, name)}
    return config_class(**changed | tokens | fixed)


def families():
    """(name, auto class) of each configuration that has a model."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    plain = modeling_auto.MODEL_MAPPING_NAMES
    return [(name, "AutoModelForCausalLM" if name in causal else "AutoModel")
            for name in sorted(CONFIG_MAPPING_NAMES) if name in causal or name in plain]  # fmt: skip


def inputs_of(model, config):
    """Keyword arguments of a call, and which results count; None where the model wants what nobody knows here."""
    generator = torch.Generator().manual_seed(4)
    name = getattr(model, "main_input_name", "input_ids")
    if name == "input_ids":
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[1, :5] = 0
        tokens = torch.randint(3, 90, (2, 12), generator=generator) * mask
        given = dict(input_ids=tokens)
        if "attention_mask" in inspect.signature(model.forward).parameters:
            given["attention_mask"] = mask
        if "decoder_input_ids" in inspect.signature(model.forward).parameters:
            given["decoder_input_ids"] = torch.randint(3, 90, (2, 7), generator=generator)
            return given, slice(None)
        return given, mask.bool()
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(vision, "num_channels", 3)
        return dict(pixel_values=torch.randn(2, channels, size, size, generator=generator)), slice(None)
    if name == "input_values":
        return dict(input_values=torch.randn(2, 4000, generator=generator)), slice(None)
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 80))
        frames = 2 * getattr(config, "max_source_positions", 50)
        return dict(input_features=torch.randn(2, bins, frames, generator=generator)), slice(None)
    return None


def first_rows(output):
    for name in ("logits", "last_hidden_state"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return next(x for x in output.to_tuple() if isinstance(x, torch.Tensor) and x.is_floating_point())


def run(model, given, kept, decode):
    """The results and gradients of a call, and the results of two more tokens by its cache."""
    torch.manual_seed(6)
    rows = first_rows(model(**given))
    rows = rows[kept] if rows.shape[:2] == (2, 12) else rows
    results = [rows]
    if rows.requires_grad:
        rows.float().square().mean().backward()
        results += [x.grad for x in model.parameters() if x.grad is not None]
    if decode:
        with torch.no_grad():
            call = dict(given)
            for step in range(3):
                output = model(**call, use_cache=True)
                cache = getattr(output, "past_key_values", None)
                if cache is None:
                    break
                results.append(first_rows(output)[:, -1])
                mask = torch.cat([call["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
                call = dict(input_ids=torch.full((2, 1), 7 + step), attention_mask=mask, past_key_values=cache)
    return [x.detach().float() for x in results]


def judge(family, **fixed):
    """What became of a family: (verdict, words), the verdict one of equal, refused, unknown, fault."""
    name, auto = family
    try:
        config_class = transformers.CONFIG_MAPPING[name]
        models = []
        for implementation in ("eager", "fulgur"):
            config = shrink(config_class, **fixed)
            torch.manual_seed(1)
            model = getattr(transformers, auto).from_config(config, attn_implementation=implementation)
            if sum(x.numel() for x in model.parameters()) > LIMIT:
                return "unknown", "has too many parameters where all that is known is small"
            models.append(model.eval())
    except Exception as error:
        return "unknown", f"{type(error).__name__} where it is made: {error}"
    eager, ours = models
    made = inputs_of(eager, config)
    if made is None:
        return "unknown", f"main input {eager.main_input_name}"
    decode = auto == "AutoModelForCausalLM" and "attention_mask" in made[0] and "decoder_input_ids" not in made[0]
    try:
        want = run(eager, *copy.deepcopy(made), decode)
    except Exception as error:
        return "unknown", f"{type(error).__name__} by eager attention: {error}"
    try:
        got = run(ours, *made, decode)
    except NotImplementedError as error:
        return "refused", str(error)
    except ValueError as error:
        return ("refused" if "attn_implementation" in str(error) else "fault"), f"ValueError: {error}"
    except Exception as error:
        return "fault", f"{type(error).__name__}: {error}"
    try:
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3, equal_nan=True)
    except AssertionError as error:
        return "fault", " ".join(str(error).split())[:200]
    return "equal", ""


def chosen():
    every = families()
    if os.environ.get("FULGUR_SWEEP") == "all":
        return every
    seed = int(os.environ.get("FULGUR_SWEEP_SEED", datetime.date.today().toordinal()))
    return sorted(random.Random(seed).sample(every, SAMPLE))


@pytest.mark.parametrize("family, fixed, want", [
    ("minimax_m3_vl_text", dict(layer_types=["full_attention", "minimax_m3_sparse"]), "refused block_indices"),
    ("deepseek_v32", {}, "refused"), ("deepseek_v4", {}, "refused attention_mask: is for 12 queries"),
    ("doge", {}, "refused attention_mask: the model reads"), ("layoutlm", {}, "refused attention_mask of 4"),
    ("nllb-moe", {}, "equal"), ("pegasus_x", {}, "equal"), ("phimoe", {}, "equal"), ("splinter", {}, "equal"),
], ids=lambda x: x if isinstance(x, str) and " " not in x else "")  # fmt: skip
def test_masks_that_modules_do_not_tell(family, fixed, want):
    """What hides keys is in the mask alone, or in arguments that fulgur does not know."""
    every = dict(families())
    if family not in every:
        pytest.skip(f"this transformers has no {family}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict = " ".join(judge((family, every[family]), **fixed))
    assert verdict.strip().startswith(want), verdict


@pytest.mark.parametrize("family", chosen(), ids=lambda family: family[0])
def test_equals_eager_or_is_refused(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verdict, words = judge(family)
    print(f"\n{family[0]}: {verdict} {words[:300]}")
    if verdict == "unknown":
        pytest.skip(words[:200])
    assert verdict in ("equal", "refused"), words


def test_what_two_arguments_say_of_visibility():
    """None is left out in silence: half of cu_seq_lens, packed rows beside padding, masks that are added."""
    module = torch.nn.Module()
    module.is_causal = True
    tensors = [torch.zeros(1, heads, 6, 8) for heads in (4, 2, 2)]
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    padding = torch.tensor([[0, 1, 1, 1, 1, 1]])
    call = fulgur.transformers.attention_forward
    both = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    assert call(module, *tensors, None, **both)[0].shape == (1, 6, 4, 8)
    with pytest.raises(ValueError, match="^cu_seq_lens_q, cu_seq_lens_k: got only one of them"):
        call(module, *tensors, None, cu_seq_lens_q=ends)
    with pytest.raises(NotImplementedError, match="^cu_seq_lens_q beside padding: "):
        call(module, *tensors, padding, **both)
    packed = fulgur.transformers.Mask(6, 6, 6, True, padding=padding.bool(), packed=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    with pytest.raises(NotImplementedError, match="^packed sequences beside padding: "):
        call(module, *tensors, packed)
    with pytest.raises(NotImplementedError, match="^attention_mask of torch.float32, which is added: "):
        call(module, *tensors, torch.zeros(1, 6))
    with pytest.raises(ValueError, match=r"^attention_mask: got shape \(6, 6\), want \(1, 6 or less\)"):
        call(module, *tensors, torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="^padding between the tokens of a sequence"):
        call(module, *tensors, torch.tensor([[1, 1, 0, 1, 1, 1]]), sliding_window=3)


def test_functions_of_masks_are_known_by_more_than_their_names():
    def causal_mask_function(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx < q_idx

    causal_mask_function.__qualname__ = "causal_mask_function"
    with pytest.raises(NotImplementedError, match=f"^{__name__}.causal_mask_function in a mask: "):
        fulgur.transformers.attention_mask(1, 6, 6, mask_function=causal_mask_function)
