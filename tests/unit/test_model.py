"""What is refused at load and why, what a cache is made of, and that float16 overflow stays in its own row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, tiny_config, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

from esp_worker.block import Block
from esp_worker.checkpoint import ModelError
from esp_worker.model import SUPPORTED, CausalModel, check_supported, load_model, read_config

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 48,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
ROPE_PER_LAYER = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tested_family_is_supported(family: str) -> None:
    check_supported(tiny_config(family))


def test_every_supported_family_is_tested() -> None:
    assert {tiny_config(family).model_type for family in FAMILIES} == set(SUPPORTED)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        # Unknown types, among them one with attention sinks, with alibi, with a window that only the mask knows.
        (GptOssConfig(), "model type gpt_oss is not supported; supported are: cohere, cohere2, gemma,"),
        (FalconConfig(alibi=True), "model type falcon is not supported"),
        (Qwen2MoeConfig(), "model type qwen2_moe is not supported"),
        (BartConfig(), "model type bart with an encoder or cross-attention is not supported"),
        (GPT2Config(add_cross_attention=True), "model type gpt2 with an encoder or cross-attention"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "model type gemma3_text with bidirectional attention"),
        (LlamaConfig(is_causal=False), "model type llama with bidirectional attention"),
        (MambaConfig(), "model type mamba with linear_attention layers is not supported"),
        (Qwen3NextConfig(), "model type qwen3_next with linear_attention layers is not supported"),
        (Llama4TextConfig(), "model type llama4_text with chunked_attention layers is not supported"),
        (Qwen2Config(layer_types=["chunked_attention"], num_hidden_layers=1), "qwen2 with chunked_attention layers"),
        (Qwen2Config(**SLIDING), "qwen2 with sliding_attention layers but no window"),
        (SmolLM3Config(**SLIDING, sliding_window=7), "smollm3 with sliding_attention layers but no window"),
        (GPT2Config(reorder_and_upcast_attn=True), "gpt2 with reorder_and_upcast_attn"),
        (LlamaConfig(rope_parameters=DYNAMIC), "llama with rope type dynamic is not supported"),
        (Gemma3TextConfig(rope_parameters=ROPE_PER_LAYER), "gemma3_text with rope type dynamic is not supported"),
        (
            Phi3Config(**{**tiny_config("phi3").to_dict(), "rope_parameters": LONGROPE}),
            "phi3 with rope type longrope is not supported",
        ),
    ],
    ids=lambda value: "" if isinstance(value, PretrainedConfig) else value[:40],
)
def test_what_is_not_supported_is_refused_by_name(config: PretrainedConfig, words: str) -> None:
    with pytest.raises(ModelError) as raised:
        check_supported(config)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_model_is_checked_when_it_is_built_and_when_its_folder_is_read(tmp_path: Path) -> None:
    config = LlamaConfig(**{**tiny_config("llama").to_dict(), "rope_parameters": DYNAMIC})
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="rope type dynamic"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="rope type dynamic"):
        CausalModel(AutoModelForCausalLM.from_config(config))


class OwnAttention(LlamaForCausalLM):
    """A checkpoint's own class under a supported model type."""


def test_own_modelling_code_is_refused() -> None:
    with pytest.raises(ModelError, match=r"OwnAttention of .*test_model .*trust_remote_code: false"):
        CausalModel(OwnAttention(tiny_config("llama")))


def test_a_checkpoint_that_brings_its_own_class(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """With remote code trusted transformers loads the class of the folder; without, its own one."""
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    source = "from transformers import LlamaForCausalLM\n\n\nclass Mine(LlamaForCausalLM):\n    pass\n"
    (tmp_path / "modeling_mine.py").write_text(source)
    config: Any = read_config(tmp_path)
    config.auto_map = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    config.save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").config.model_type == "llama"
    with pytest.raises(ModelError, match="model class Mine of transformers_modules"):
        load_model(tmp_path, device="cpu", trust_remote_code=True)


@pytest.mark.parametrize(("family", "heads"), [("llama", 2), ("gpt2", 4), ("gpt_neox", 4)])
def test_the_cache_has_the_models_own_key_value_heads(family: str, heads: int) -> None:
    cache = tiny_model(family).new_cache(slots=2)
    cache.resize(slots=2, columns=10)
    layers, head_dim, float64 = 3, 8, 8
    assert cache.nbytes == layers * 2 * 2 * heads * cache.columns * head_dim * float64


def test_experts_give_the_same_in_float32_as_in_float64() -> None:
    """Other kernels: grouped ones, which have no float64."""
    double, single = (logits(tiny_model("mixtral", dtype), [3, 4, 5]) for dtype in (torch.float64, torch.float32))
    torch.testing.assert_close(single, double, check_dtype=False, rtol=0, atol=1e-3)


@torch.inference_mode()
def logits(model: CausalModel, siblings: list[int]) -> torch.Tensor:
    """[N, V] of sibling rows behind a prompt of nine tokens."""
    cache, here = model.new_cache(1), model.device
    model.forward_block(cache, Block.chain(0, 0, 9, here), model.embed(torch.arange(3, 12)))
    rows = model.embed(torch.tensor(siblings))
    return model.logits(model.forward_block(cache, Block.siblings(0, 9, len(siblings), here), rows))


LOUD = 13


@pytest.fixture(params=["k_proj", "v_proj"])
def overflowing(request: pytest.FixtureRequest) -> CausalModel:
    """A float16 model whose first layer overflows for one token, and for no other."""
    torch.manual_seed(7)
    hf = AutoModelForCausalLM.from_config(tiny_config("llama"))
    embedding, layer = hf.get_input_embeddings().weight, hf.model.layers[0].self_attn
    with torch.no_grad():
        embedding[:, 0] = 0
        embedding[LOUD] = torch.eye(32)[0]
        getattr(layer, request.param).weight[:, 0] = 60000.0
    return CausalModel(hf.half())


def test_a_row_that_overflows_leaves_its_siblings_alone(overflowing: CausalModel) -> None:
    quiet, loud = logits(overflowing, [3, 4, 5]), logits(overflowing, [3, LOUD, 5])
    assert quiet.isfinite().all()
    assert not torch.equal(quiet[1], loud[1])
    assert torch.equal(quiet[[0, 2]], loud[[0, 2]])


def test_embedding_moments_are_those_of_the_whole_vocabulary() -> None:
    model = tiny_model("gemma3")  # it scales its embeddings
    embeds = model.embed(torch.arange(model.vocab_size))
    mean, sigma = model.embedding_moments()
    torch.testing.assert_close(mean, embeds.mean(0))
    torch.testing.assert_close(sigma, embeds.std(0, correction=0))
