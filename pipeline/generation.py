"""The checkpoint's generation_config.json: which of its sampling settings a job takes.

Names are Hugging Face's. Its EOS ids are always taken (esp_worker.checkpoint); the rest by sampling.generation_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.sampling import SamplingConfig
from pipeline.section import problems

FILE = "generation_config.json"

# Settings that are ours too, and their names here.
_SAME = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OURS = {**{name: name for name in _SAME}, "stop_strings": "stop"}
_DRAWING = frozenset({"temperature", "top_k", "top_p", "min_p"})  # without do_sample they change nothing

# Settings that change tokens and that this project does not have, with the value (beside null) that switches them off.
_NEUTRAL: dict[str, Any] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": [],
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": [],
    "forced_bos_token_id": None,
    "forced_decoder_ids": [],
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_time": None,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "penalty_alpha": 0,
    "sequence_bias": {},
    "suppress_tokens": [],
    "token_healing": False,
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}

_OFF = _NEUTRAL | {"do_sample": False} | {key: SamplingConfig.model_fields[ours].default for key, ours in _OURS.items()}

# Settings that change no token here: ids, lengths that engine.max_length rules, beams' own (num_beams is 1), caches,
# what is returned, and how drafts are made.
_OTHER = frozenset(
    {
        *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version"),
        *("_from_model_config", "max_length", "num_return_sequences", "early_stopping", "length_penalty"),
        *("diversity_penalty", "low_memory", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
        *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
        *("renormalize_logits", "remove_invalid_values", "compile_config", "disable_compile", "prefill_chunk_size"),
        *("continuous_batching_config", "is_assistant", "use_mtp", "speculation_type", "target_lookbehind"),
        *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
        *("assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "num_assistant_tokens"),
        "num_assistant_tokens_schedule",
    }
)


@dataclass(frozen=True)
class GenerationDefaults:
    """What the file gives to a job, by our names, and its other settings that would change tokens, by its own."""

    taken: dict[str, Any] = field(default_factory=dict)
    not_taken: dict[str, Any] = field(default_factory=dict)


def generation_defaults(file: Mapping[str, Any], sampling: SamplingConfig) -> GenerationDefaults:
    """What of generation_config.json's content a job takes.

    Raises ConfigError for a setting that `all` would have to take and that this project does not have or know.
    """
    telling = {key: value for key, value in file.items() if _tells(key, value)}
    if sampling.generation_config == "eos":
        return GenerationDefaults({}, telling)
    foreign = [key for key in telling if key not in _OURS and key != "do_sample"]
    if foreign:
        key = foreign[0]
        what = "does not have" if key in _NEUTRAL else "does not know"
        raise ConfigError(
            f"sampling.generation_config: all: the checkpoint's {FILE} sets {key}: {telling[key]!r:.80}, which this "
            f"project {what}; set the sampling settings that you want here and generation_config: eos"
        )
    drawing = bool(file.get("do_sample"))
    offered = {_OURS[key]: value for key, value in telling.items() if key in _OURS and (drawing or key not in _DRAWING)}
    if drawing:
        offered.setdefault("temperature", 1.0)  # Hugging Face's default; 0 would be greedy
    taken = {name: value for name, value in offered.items() if name not in sampling.model_fields_set}
    left = {key: value for key, value in telling.items() if _OURS.get(key) not in taken and key != "do_sample"}
    return GenerationDefaults(taken, left)


def with_defaults(sampling: SamplingConfig, defaults: GenerationDefaults) -> SamplingConfig:
    """The job's settings over the checkpoint's. Raises ConfigError for a value that none of ours may have."""
    given = sampling.model_dump(include=sampling.model_fields_set)
    try:
        return SamplingConfig.model_validate({**defaults.taken, **given})
    except ValidationError as error:
        wrong = ": ".join(filter(None, next(iter(problems(error, list(SamplingConfig.model_fields))))))
        raise ConfigError(f"sampling.generation_config: all: the checkpoint's {FILE}: {wrong}") from error


def _tells(key: str, value: Any) -> bool:
    """Whether a setting can change tokens (an unknown one can)."""
    if value is None or key in _OTHER:
        return False
    return key == "temperature" or value != _OFF.get(key)
