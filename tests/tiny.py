"""Tiny random models of every supported family, small enough that drafts are accepted often, and requests for them."""

from __future__ import annotations

from functools import cache

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams

VOCAB = 14  # few tokens, so that a tree of a dozen nodes often holds the next one
CONTEXT = 96
WINDOW = 7

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.4,  # large enough that attention matters: a wrong mask must change tokens
    "tie_word_embeddings": False,  # tied, a random Gemma repeats its input for ever
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def tiny_config(family: str) -> PretrainedConfig:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": lambda: LlamaConfig(**_SHAPE),
        "llama3-rope": lambda: LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
        "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
        "qwen2": lambda: Qwen2Config(**_SHAPE),
        "qwen3": lambda: Qwen3Config(**_SHAPE),
        "gemma3": lambda: Gemma3TextConfig(
            **_SHAPE, sliding_window=WINDOW, layer_types=layers, query_pre_attn_scalar=8, final_logit_softcapping=20.0
        ),
    }[family]()


FAMILIES = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3")


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> CausalModel:
    torch.manual_seed(7)
    hf = AutoModelForCausalLM.from_config(tiny_config(family))
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
