"""What a job takes of the checkpoint's generation_config.json, and what it refuses to leave out in silence."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from pipeline.errors import ConfigError
from pipeline.generation import GenerationDefaults, generation_defaults, with_defaults
from pipeline.sampling import SamplingConfig

LLAMA = {
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.40.0",
}


def taken(file: dict[str, Any], **settings: Any) -> SamplingConfig:
    sampling = SamplingConfig(generation_config="all", **settings)
    return with_defaults(sampling, generation_defaults(file, sampling))


def test_by_default_the_eos_ids_alone_are_taken() -> None:
    sampling = SamplingConfig(top_k=3)
    found = generation_defaults({**LLAMA, "num_beams": 4, "new_in_2027": 1, "max_length": 20}, sampling)
    left = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "num_beams": 4, "new_in_2027": 1}
    assert found == GenerationDefaults(taken={}, not_taken=left)
    assert with_defaults(sampling, found) == sampling


def test_all_takes_what_the_job_leaves_unset() -> None:
    file = {
        **LLAMA,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "min_new_tokens": 2,
        "max_new_tokens": 32,
        "stop_strings": "###",
    }
    sampling = taken(file)
    assert sampling == SamplingConfig(
        generation_config="all",
        temperature=0.6,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.05,
        min_new_tokens=2,
        max_new_tokens=32,
        stop=["###"],
    )
    given = SamplingConfig(generation_config="all", temperature=0.0, top_p=1.0, max_new_tokens=256)
    found = generation_defaults(file, given)
    merged = with_defaults(given, found)
    assert (merged.temperature, merged.top_p, merged.max_new_tokens, merged.top_k) == (0.0, 1.0, 256, 40)
    assert found.not_taken == {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 32}, "set here, if to the default"
    assert sorted(found.taken) == ["min_new_tokens", "min_p", "repetition_penalty", "stop", "top_k"]


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}])
def test_without_do_sample_it_is_greedy(do_sample: dict[str, Any]) -> None:
    file = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.2, **do_sample}
    sampling = SamplingConfig(generation_config="all")
    found = generation_defaults(file, sampling)
    assert found == GenerationDefaults({"repetition_penalty": 1.2}, {"temperature": 0.6, "top_p": 0.9})
    assert with_defaults(sampling, found).temperature == 0


def test_do_sample_alone_is_temperature_1() -> None:
    assert taken({"do_sample": True}).temperature == 1.0
    assert taken({"do_sample": True, "temperature": 1.0}).temperature == 1.0
    assert taken({"do_sample": True}, temperature=0.0).temperature == 0.0
    assert taken({"do_sample": True, "temperature": 0.0}).temperature == 0.0


FOREIGN = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.1,
    "typical_p": 0.9,
    "epsilon_cutoff": 3e-4,
    "eta_cutoff": 3e-4,
    "penalty_alpha": 0.6,
    "suppress_tokens": [5],
    "begin_suppress_tokens": [5],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.5},
    "min_length": 10,
    "bad_words_ids": [[5]],
    "sequence_bias": [[[5], 1.0]],
    "force_words_ids": [[5]],
    "exponential_decay_length_penalty": [10, 1.5],
    "dola_layers": "high",
    "token_healing": True,
    "constraints": [1],
    "top_h": 0.4,
    "max_time": 2.0,
}


@pytest.mark.parametrize("key", FOREIGN)
def test_what_changes_tokens_and_is_not_ours_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        taken({**LLAMA, key: FOREIGN[key]})
    start = f"sampling.generation_config: all: the checkpoint's generation_config.json sets {key}: {FOREIGN[key]!r}, "
    assert str(caught.value).startswith(start + "which this project does not have; ")
    assert taken({**LLAMA, key: None}) == taken(LLAMA)


def test_neutral_values_are_no_obstacle() -> None:
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "min_length": 0}
    neutral |= {"suppress_tokens": [], "encoder_repetition_penalty": 1.0, "token_healing": False, "guidance_scale": 1.0}
    assert taken({**LLAMA, **neutral}) == taken(LLAMA)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sets new_in_2027: 1, which this project does not know; "):
        taken({**LLAMA, "new_in_2027": 1})


def test_a_value_that_none_of_ours_may_have() -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p: must lie in \(0, 1\] \(got 1.5\)$"):
        taken({**LLAMA, "top_p": 1.5})
    with pytest.raises(ConfigError, match=r"generation_config.json: min_new_tokens must lie in 0..max_new_tokens"):
        taken({**LLAMA, "min_new_tokens": 300})


def test_every_setting_of_hugging_faces_is_known() -> None:
    """What a later transformers adds must be looked at: does it change tokens?"""
    assert not [key for key in GenerationConfig().to_dict() if "does not know" in refusal({**LLAMA, key: "a value"})]


def refusal(file: dict[str, Any]) -> str:
    try:
        taken(file)
    except ConfigError as error:
        return str(error)
    return ""
