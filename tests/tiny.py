"""Tiny random models of every supported family, small enough that drafts are accepted often, and requests for them.

FAMILIES names each family once, and the variants of it that take another path through its code or ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams

VOCAB = 14  # few tokens, so that a tree of a dozen nodes often holds the next one
CONTEXT = 96
WINDOW = 7
NARROW = 2  # narrower than most trees are deep

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.4,  # large enough that attention matters: a wrong mask must change tokens
    "tie_word_embeddings": False,  # tied, most random models repeat their input for ever
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALL_HEADS = {name: size for name, size in _SHAPE.items() if name not in ("num_key_value_heads", "head_dim")}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _HYBRID}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA3 = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 20.0, "layer_types": _HYBRID}

_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama3-rope": lambda: LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "llama-linear-rope": lambda: LlamaConfig(**_SHAPE, rope_parameters=_LINEAR_ROPE),
    "llama-yarn-rope": lambda: LlamaConfig(**_SHAPE, rope_parameters=_YARN_ROPE),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "mistral-full": lambda: MistralConfig(**_SHAPE, sliding_window=None),
    "mistral-narrow": lambda: MistralConfig(**_SHAPE, sliding_window=NARROW),
    "ministral": lambda: MinistralConfig(**_SHAPE, sliding_window=WINDOW, layer_types=_HYBRID),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-hybrid": lambda: Qwen2Config(**_SHAPE, **_QWEN_WINDOW),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, num_experts=4),
    "gemma": lambda: GemmaConfig(**_SHAPE),
    # Caps so small that dropping either changes tokens.
    "gemma2": lambda: Gemma2Config(
        **_SHAPE,
        sliding_window=WINDOW,
        layer_types=_HYBRID,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, **_GEMMA3, sliding_window=WINDOW),
    "gemma3-narrow": lambda: Gemma3TextConfig(**_SHAPE, **_GEMMA3, sliding_window=NARROW + 1),
    "phi": lambda: PhiConfig(**_SHAPE, qk_layernorm=True),
    "phi3": lambda: Phi3Config(**_SHAPE, sliding_window=None, rope_parameters=_PARTIAL_ROPE),
    "phi3-window": lambda: Phi3Config(**_SHAPE, sliding_window=WINDOW, rope_parameters=_PARTIAL_ROPE),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0, 1]),
    "smollm3-window": lambda: SmolLM3Config(
        **_SHAPE, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=WINDOW
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_ALL_HEADS, rope_parameters=_PARTIAL_ROPE),
    "gpt_neox-serial": lambda: GPTNeoXConfig(**_ALL_HEADS, use_parallel_residual=False),
    "gpt2": lambda: GPT2Config(**{**_ALL_HEADS, "tie_word_embeddings": True}),
    "gpt2-layer-scale": lambda: GPT2Config(**_ALL_HEADS, scale_attn_by_inverse_layer_idx=True),
    "granite": lambda: GraniteConfig(
        **_SHAPE, logits_scaling=3.0, attention_multiplier=0.5, embedding_multiplier=2.0, residual_multiplier=0.7
    ),
    "olmo2": lambda: Olmo2Config(**_SHAPE),
    "olmo3": lambda: Olmo3Config(**_SHAPE, sliding_window=WINDOW, layer_types=_HYBRID),
    "starcoder2": lambda: Starcoder2Config(**_SHAPE, sliding_window=WINDOW),
    "glm4": lambda: Glm4Config(**_SHAPE),
    "cohere": lambda: CohereConfig(**_SHAPE, logit_scale=0.5, use_qk_norm=True),
    "cohere2": lambda: Cohere2Config(**_SHAPE, sliding_window=WINDOW, layer_types=_HYBRID, logit_scale=0.5),
}

FAMILIES = tuple(_CONFIGS)
# These take the full cross product of trees and slots: plain, per-layer windows, a window narrower than the tree, caps.
CORE = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "gemma3-narrow")


def tiny_config(family: str) -> PretrainedConfig:
    return _CONFIGS[family]()


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> CausalModel:
    torch.manual_seed(7)
    hf = AutoModelForCausalLM.from_config(tiny_config(family))
    if family.startswith("gemma"):  # they scale embeddings up: so loud, a random one repeats its input for ever
        with torch.no_grad():
            hf.get_input_embeddings().weight.mul_(0.15)
    return CausalModel(hf.to(dtype))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())


def request(name: str, length: int, **sampling: object) -> Request:
    options = {"max_new_tokens": 24, **sampling}
    return Request(name, prompt(length, len(name)), SamplingParams(**options))


def mixed_requests(**sampling: object) -> list[Request]:
    """Eight requests of mixed length, some beyond every sliding window."""
    return [request(f"r{length}", length, **sampling) for length in (1, 2, 5, 9, 14, 23, 31, 40)]
