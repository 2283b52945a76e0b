"""The configuration: every mistake is refused with the setting's name and the way out, and what is derived is right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from esp_worker.types import SamplingParams
from jobs import generate
from pipeline.config import JobConfig, load_config, parse_config, parse_decoder, setting_names
from pipeline.errors import ConfigError
from pipeline.sampling import ROW_KEYS, SamplingConfig

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MINIMAL = {"input": {"path": "in.jsonl"}, "output": {"path": "out"}, "model": {"path": "m"}}


def config_of(**sections: Any) -> JobConfig:
    """The minimal configuration with some settings of some sections."""
    data: dict[str, Any] = {name: dict(section) for name, section in MINIMAL.items()}
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section} if isinstance(section, dict) else section
    return parse_config(data)


def problem(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(**sections)
    return str(caught.value)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def with_set(tmp_path: Path, *overrides: str) -> JobConfig:
    return load_config(write(tmp_path, yaml.safe_dump(MINIMAL)), overrides)


# ----------------------------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("sections", "unknown", "nearest"),
    [
        ({"inputs": {"path": "a"}}, "inputs", "input"),
        ({"samplin": {"seed": 1}}, "samplin", "sampling"),
        ({"max_new_tokens": 5}, "max_new_tokens", "sampling.max_new_tokens"),
        ({"sampling": {"max_new_token": 5}}, "sampling.max_new_token", "sampling.max_new_tokens"),
        ({"input": {"promt_column": "p"}}, "input.promt_column", "input.prompt_column"),
        ({"decoder": {"mask": 2}}, "decoder.mask", "decoder.masks"),
        ({"sampling": {"slots": 4}}, "sampling.slots", None),
        ({"output": {"paht": "x"}}, "output.paht", "output.path"),
        ({"cluster": {"gpus": 1}}, "cluster.gpus", "cluster.num_gpus"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(sections: dict[str, Any], unknown: str, nearest: str | None) -> None:
    message = problem(**sections)
    assert message.startswith(f"{unknown}: unknown setting; the nearest valid key is ")
    named = message.rpartition(" ")[2]
    assert named in setting_names()
    assert nearest is None or named == nearest


@pytest.mark.parametrize(
    ("section", "name"), [("cluster", "tensor_parallel"), ("engine", "tensor_parallel_size"), ("model", "parallelism")]
)
def test_a_model_is_not_split(section: str, name: str) -> None:
    message = problem(**{section: {name: 2}})
    assert message.startswith(f"{section}.{name}: not supported: a model is not split over devices")


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({"actors": 2, "min_actors": 3}, "min_actors: 3 is more than actors: 2"),
        ({"min_actors": 0}, "cluster.min_actors: "),
        ({"num_gpus": 2}, "num_gpus: an actor uses one GPU or a part of one (got 2)"),
    ],
)
def test_impossible_pools(cluster: dict[str, Any], words: str) -> None:
    assert words in problem(cluster=cluster)


def test_unknown_key_below_a_setting_names_the_setting() -> None:
    assert problem(sampling={"seed": {"value": 1}}).startswith("sampling.seed: ")
    assert problem(input={"keep_columns": {"topic": {"type": "string"}}}).startswith("input.keep_columns.topic: ")


def test_all_problems_are_named_one_a_line() -> None:
    lines = problem(sampling={"seed": -1, "tempretaure": 0}, engine={"slots": 0}).split("\n")
    assert [line.partition(":")[0] for line in lines] == ["sampling.seed", "sampling.tempretaure", "engine.slots"]


def test_setting_names_are_the_schema() -> None:
    names = setting_names()
    assert len(names) == len(set(names))
    assert {"input", "input.path", "decoder.block_complexity", "cost.device_hour_usd"} <= set(names)
    dumped = config_of().model_dump()
    assert set(names) == set(dumped) | {f"{section}.{key}" for section, keys in dumped.items() for key in keys}


@pytest.mark.parametrize("section", ["input", "output", "model"])
def test_missing_sections_and_paths(section: str) -> None:
    with pytest.raises(ConfigError, match=f"^{section}: Field required$"):
        parse_config({name: value for name, value in MINIMAL.items() if name != section})
    with pytest.raises(ConfigError, match=rf"^{section}\.path: Field required$"):
        parse_config({**MINIMAL, section: {}})


@pytest.mark.parametrize(
    ("sections", "setting", "shown"),
    [
        ({"engine": {"slots": "eight"}}, "engine.slots", "'eight'"),
        ({"engine": {"slots": 8.5}}, "engine.slots", "8.5"),
        ({"engine": {"max_length": 1}}, "engine.max_length", "1"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature", "'hot'"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature", "nan"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p", "0"),
        ({"sampling": {"seed": 2**64}}, "sampling.seed", str(2**64)),
        ({"sampling": {"logit_bias": {-1: 2.0}}}, "sampling.logit_bias.-1", "-1"),
        ({"sampling": {"logit_bias": {5: "much"}}}, "sampling.logit_bias.5", "'much'"),
        ({"sampling": {"logit_bias": {5: float("inf")}}}, "sampling.logit_bias.5", "inf"),
        ({"sampling": {"logit_bias": [5]}}, "sampling.logit_bias", "[5]"),
        ({"sampling": {"bad_words": [""]}}, "sampling.bad_words.0", "''"),
        ({"sampling": {"keep_stop": "perhaps"}}, "sampling.keep_stop", "'perhaps'"),
        ({"sampling": {"n": 0}}, "sampling.n", "0"),
        ({"sampling": {"generation_config": "some"}}, "sampling.generation_config", "'some'"),
        ({"engine": {"prefill_tokens": 15}}, "engine.prefill_tokens", "15"),
        ({"engine": {"cache_gib": 0}}, "engine.cache_gib", "0"),
        ({"sampling": {"eos_token_ids": 2}}, "sampling.eos_token_ids", "2"),
        ({"sampling": {"stop": ["a", ""]}}, "sampling.stop.1", "''"),
        ({"output": {"resume": "maybe"}}, "output.resume", "'maybe'"),
        ({"model": {"device": "gpu"}}, "model.device", "'gpu'"),
        ({"model": {"dtype": "int8"}}, "model.dtype", "'int8'"),
        ({"input": {"path": 5}}, "input.path", "5"),
        ({"input": {"path": []}}, "input.path", "[]"),
        ({"input": {"limit": 0}}, "input.limit", "0"),
        ({"input": {"format": "csv"}}, "input.format", "'csv'"),
        ({"decoder": {"masks": 9}}, "decoder.masks", "9"),
        ({"decoder": {"block_complexity": "x"}}, "decoder.block_complexity", "'x'"),
        ({"decoder": {"block_complexity": True}}, "decoder.block_complexity", "True"),
        ({"decoder": {"block_complexity": 1}}, "decoder.block_complexity", "1"),
        ({"compare": {"fraction": 1.5}}, "compare.fraction", "1.5"),
        ({"decoder": [1]}, "decoder", "[1]"),
        ({"engine": 4}, "engine", "4"),
    ],
)
def test_wrong_value_names_the_setting_and_the_value(sections: dict[str, Any], setting: str, shown: str) -> None:
    message = problem(**sections)
    assert message.startswith(f"{setting}: ")
    assert message.endswith(f"(got {shown})")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("max_new_tokens", -1, "must not be negative"),
        ("min_new_tokens", -1, "must lie in 0..max_new_tokens"),
        ("temperature", -1.0, "must be 0 or >= 0.0001"),
        ("temperature", 1e-5, "must be 0 or >= 0.0001"),
        ("top_k", -1, "must not be negative (0 is off)"),
        ("top_p", 1.5, "must lie in (0, 1]"),
        ("min_p", -0.5, "must lie in [0, 1]"),
        ("repetition_penalty", 0.0, "must be positive and finite"),
        ("seed", -1, "must fit in 64 unsigned bits"),
        ("logprobs", -1, "must be None or not negative"),
    ],
)
def test_sampling_rules_are_the_decoders(setting: str, value: float, rule: str) -> None:
    assert problem(sampling={setting: value}) == f"sampling.{setting}: {rule} (got {value!r})"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{setting} {rule}, got {value}')}$"):
        SamplingParams(**{"max_new_tokens": 1, setting: value})


def test_sampling_settings_must_go_together() -> None:
    message = "sampling: min_new_tokens must lie in 0..max_new_tokens, got 257"
    assert problem(sampling={"min_new_tokens": 257}) == message
    assert config_of(sampling={"min_new_tokens": 0, "max_new_tokens": 0}).sampling.max_new_tokens == 0


def test_sampling_settings_reach_the_decoder() -> None:
    given = {
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "logprobs": 2,
    }
    sampling = config_of(sampling={**given, "logit_bias": {5: 1, "6": -2.5}}).sampling
    params = sampling.params(seed=8, sample_index=3, eos_token_ids=frozenset([2]), bad_words=((1, 2),))
    rest = {"seed": 8, "sample_index": 3, "eos_token_ids": frozenset([2]), "bad_words": ((1, 2),)}
    assert params == SamplingParams(**given, **rest, logit_bias=((5, 1.0), (6, -2.5)))
    assert SamplingConfig().params(seed=0) == SamplingParams(max_new_tokens=256)


# ------------------------------------------------------------------------------------------------------------ input


@pytest.mark.parametrize(
    ("given", "expected"), [("seed", ["seed"]), (["top_p", "seed", "top_p"], ["top_p", "seed"]), ([], [])]
)
def test_sampling_columns(given: Any, expected: list[str]) -> None:
    assert config_of(input={"sampling_columns": given}).input.sampling_columns == expected


@pytest.mark.parametrize("name", ["n", "logprobs", "eos_token_ids", "temprature"])
def test_sampling_columns_are_settings_that_a_row_may_have(name: str) -> None:
    message = problem(input={"sampling_columns": ["seed", name]})
    assert message.startswith(f"input.sampling_columns: {name} is no setting that a row may have; the nearest valid")
    assert message.rpartition(" ")[2] in ROW_KEYS


def test_path_forms() -> None:
    assert config_of(input={"path": "a"}).input.path == ["a"]
    assert config_of(input={"path": ["a", "s3://b/*"]}).input.path == ["a", "s3://b/*"]


def test_columns() -> None:
    assert config_of().input.text_column == "prompt"
    assert config_of(input={"prompt_column": "q"}).input.text_column == "q"
    assert config_of(input={"messages_column": "chat"}).input.text_column == "chat"
    message = problem(input={"prompt_column": "q", "messages_column": "chat"})
    assert message == "input: set prompt_column or messages_column, not both"


@pytest.mark.parametrize("setting", [{"messages_column": "chat"}, {"system_prompt": "be brief"}])
def test_settings_that_need_the_template(setting: dict[str, str]) -> None:
    (name,) = setting
    assert problem(input={**setting, "chat_template": "never"}) == (
        f"input: {name} needs the chat template: chat_template must be auto or always"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", {"a": "string"}),
        (["a", "b"], {"a": "string", "b": "string"}),
        ({"a": "int64", "b": "bool"}, {"a": "int64", "b": "bool"}),
        ([], {}),
        ({}, {}),
    ],
)
def test_keep_columns(given: Any, expected: dict[str, str]) -> None:
    assert config_of(input={"keep_columns": given}).input.keep_columns == expected


@pytest.mark.parametrize(
    ("given", "setting", "shown"),
    [
        ({"a": "int"}, "input.keep_columns.a", "'int'"),
        ({"a": None}, "input.keep_columns.a", "None"),
        ([1], "input.keep_columns", "[1]"),
        ([["a"]], "input.keep_columns", "[['a']]"),
        ([{"a": "int64"}], "input.keep_columns", "[{'a': 'int64'}]"),
        (None, "input.keep_columns", "None"),
    ],
)
def test_bad_keep_columns(given: Any, setting: str, shown: str) -> None:
    message = problem(input={"keep_columns": given})
    assert message.startswith(f"{setting}: ")
    assert message.endswith(f"(got {shown})")


def test_keep_columns_must_not_take_an_output_columns_name() -> None:
    message = problem(input={"keep_columns": ["topic", "text", "row_id", "prompt_ids"]})
    assert message.startswith("input: keep_columns: prompt_ids, row_id, text: the output has columns of that name")
    assert config_of(input={"keep_columns": ["prompt", "id"]}).input.keep_columns


# ---------------------------------------------------------------------------------------------------------- decoder

ESP = {"method": "esp"}


@pytest.mark.parametrize(
    ("branches", "masks", "block_complexity"),
    [([14], 1, 30), ([7, 2], 2, 30), ([29], 1, 60), ([15, 4], 2, 60), ([4], 1, 10), ([7, 5, 3], 3, 64)],
)
def test_block_complexity_of_a_static_tree(branches: list[int], masks: int, block_complexity: int) -> None:
    """BC = (k+1)(1 + sum K_i), the paper's configurations among them."""
    static = {**ESP, "tree": "static", "branches": branches, "masks": masks}
    assert config_of(decoder=static).decoder.block_complexity == block_complexity
    assert config_of(decoder={**static, "block_complexity": block_complexity}).decoder.branches == branches


@pytest.mark.parametrize(
    ("branches", "owners", "block_complexity"),
    [([14], 1, 16), ([7, 2], 1, 12), ([7, 2], 4, 18), ([7, 2], 10, 30), ([7, 2], 99, 30), ([7, 2], "all", 30)],
)
def test_block_complexity_of_a_static_tree_with_fewer_owners(
    branches: list[int], owners: int | str, block_complexity: int
) -> None:
    """(1 + sum) + masks * min(N, 1 + sum): fewer owners drop probes, no node."""
    static = {**ESP, "tree": "static", "branches": branches, "masks": len(branches), "probe_owners": owners}
    assert config_of(decoder=static).decoder.block_complexity == block_complexity
    assert problem(decoder={**static, "block_complexity": block_complexity + 1}).startswith(
        f"decoder: block_complexity: {block_complexity + 1} is not that of branches {branches}"
    )


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"tree": "static"}, "tree: static needs branches"),
        ({"tree": "static", "branches": 14}, "tree: static needs branches"),
        ({"tree": "static", "branches": ["wide"]}, "tree: static needs branches"),
        (
            {"tree": "static", "branches": [7], "block_complexity": "auto"},
            "block_complexity: auto chooses the tree's size, and tree: static has one; take another tree",
        ),
        (
            {"block_complexity": "auto", "probe_owners": 3},
            "probe_owners: block_complexity: auto chooses them; leave probe_owners out",
        ),
        ({"branches": [14]}, "branches belong to tree: static; tree: dynamic takes block_complexity"),
        ({"branches": [14], "tree": "best_first"}, "branches belong to tree: static; tree: best_first takes"),
        ({"tree": "static", "branches": [7, 2]}, "branches [7, 2] has 2 widths for masks: 1; give one a mask"),
        ({"tree": "static", "branches": [], "masks": 1}, "branches [] has 0 widths for masks: 1"),
        (
            {"tree": "static", "branches": [7, 2], "masks": 2, "block_complexity": 31},
            "block_complexity: 31 is not that of branches [7, 2] with 2 masks, (masks+1)(1+sum) = 30",
        ),
    ],
)
def test_static_tree_that_does_not_add_up(decoder: dict[str, Any], message: str) -> None:
    assert problem(decoder={**ESP, **decoder}).startswith(f"decoder: {message}")


def test_branches_must_be_positive() -> None:
    assert problem(decoder={**ESP, "tree": "static", "branches": [0]}).startswith("decoder.branches.0: ")


@pytest.mark.parametrize(("masks", "least"), [(1, 4), (2, 6), (8, 18)])
def test_block_complexity_leaves_room_for_a_draft(masks: int, least: int) -> None:
    message = problem(decoder={**ESP, "masks": masks, "block_complexity": least - 1})
    assert message.startswith(f"decoder: block_complexity: {least - 1} leaves no row for a draft with {masks} masks")
    assert f"at least {least} is needed" in message
    assert config_of(decoder={**ESP, "masks": masks, "block_complexity": least}).decoder.block_complexity == least
    plain = config_of(decoder={"masks": masks, "block_complexity": least - 1, "method": "ar"})
    assert plain.decoder.method == "ar"


@pytest.mark.parametrize("tree", ["dynamic", "best_first"])
@pytest.mark.parametrize(
    ("masks", "owners", "least"), [(1, 1, 3), (3, 1, 5), (1, 2, 4), (2, 4, 12), (8, 1, 10), (1, 15, 30)]
)
def test_block_complexity_leaves_room_for_a_draft_and_its_owners(
    tree: str, masks: int, owners: int, least: int
) -> None:
    """At least one node, and as many rows as owners: 1 + nodes + masks * owners."""
    decoder = {**ESP, "tree": tree, "masks": masks, "probe_owners": owners}
    message = problem(decoder={**decoder, "block_complexity": least - 1})
    assert message == (
        f"decoder: block_complexity: {least - 1} cannot hold probe_owners: {owners} with {masks} masks each, and a "
        f"draft; at least {least} is needed (or method: ar)"
    )
    assert config_of(decoder={**decoder, "block_complexity": least}).decoder.owner_count == owners


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "some", "3", None, [1]])
@pytest.mark.parametrize("tree", [{}, {"tree": "static", "branches": [4]}])
def test_probe_owners_are_all_or_a_number(tree: dict[str, Any], given: Any) -> None:
    assert problem(decoder={**ESP, **tree, "probe_owners": given}) == (
        f"decoder.probe_owners: give all, or how many rows own probes, at least 1 (got {given!r})"
    )


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"init_offset": 2}, "init_offset belongs to init: offset; leave it out of init: mean"),
        ({"init_offset": 2, "init": "sample"}, "init_offset belongs to init: offset; leave it out of init: sample"),
        ({"init_moments": "table"}, "init_moments belongs to init: offset; leave it out of init: mean"),
        ({"method": "ar", "probe_owners": 2}, "probe_owners: method: ar drafts nothing; leave them out, or set"),
        ({"method": "ar", "impl": "naive"}, "impl: method: ar drafts nothing"),
        (
            {"method": "ar", "init": "offset", "init_offset": 2, "impl": "naive"},
            "init_offset, impl: method: ar drafts nothing",
        ),
    ],
)
def test_a_decoder_setting_that_does_not_apply_is_refused(decoder: dict[str, Any], message: str) -> None:
    assert problem(decoder={**ESP, **decoder}).startswith(f"decoder: {message}")


@pytest.mark.parametrize(
    ("decoder", "rows", "settings"),
    [
        ({"method": "pld"}, 11, {"ngram": 3, "depth": 10, "lookahead": None}),
        ({"method": "pld", "depth": 4, "ngram": 2, "block_complexity": 5}, 5, {"ngram": 2, "depth": 4}),
        ({"method": "lade"}, 30, {"lookahead": [4, 5, 5]}),
        ({"method": "lade", "block_complexity": 10}, 10, {"lookahead": [3, 4, 1]}),
        ({"method": "lade", "block_complexity": 60}, 60, {"lookahead": [5, 8, 7]}),
        ({"method": "lade", "lookahead": [3, 2, 1]}, 6, {"lookahead": [3, 2, 1]}),
        ({"method": "stand", "ngram": 4}, 30, {"ngram": 4, "lookahead": None}),
        ({"method": "recycle", "block_complexity": 2}, 2, {}),
    ],
)
def test_rows_of_the_baselines(decoder: dict[str, Any], rows: int, settings: dict[str, Any]) -> None:
    config = config_of(decoder=decoder).decoder
    assert config.block_complexity == rows
    assert settings.items() <= config.model_dump().items()


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            {"method": "pld", "block_complexity": 30},
            "decoder: block_complexity: 30 is not that of depth: 10, 1 + depth = 11; leave block_complexity out",
        ),
        (
            {"method": "lade", "block_complexity": 31, "lookahead": [4, 5, 5]},
            "decoder: block_complexity: 31 is not that of lookahead: [4, 5, 5], (L-1)(W+G) = 30; leave",
        ),
        (
            {"method": "lade", "block_complexity": 31},
            "decoder: block_complexity: 31 is none of the paper's for lade, 10, 30, 60; give lookahead: [L, W, G]",
        ),
        ({"method": "lade", "lookahead": [1, 5, 5]}, "decoder.lookahead: [1, 5, 5]: L, the tokens of an n-gram, must"),
        ({"method": "lade", "lookahead": [4, 5]}, "decoder.lookahead: "),
        ({"method": "lade", "lookahead": 4}, "decoder.lookahead: "),
        ({"method": "lade", "lookahead": [4, 5, "x"]}, "decoder.lookahead.2: "),
        ({"method": "pld", "depth": "far"}, "decoder.depth: "),
        ({"method": "pld", "depth": "4"}, "decoder.depth: "),
        ({"method": "lade", "lookahead": "345"}, "decoder.lookahead: "),
        ({"method": "lade", "lookahead": [4, 5, 0]}, "decoder.lookahead.2: "),
        ({"method": "recycle", "block_complexity": [4]}, "decoder.block_complexity: give auto, or the rows"),
        ({"method": "lade", "block_complexity": [4]}, "decoder: block_complexity: [4] is none of the paper's"),
        ({"method": ["lade"]}, "decoder.method: "),
        ({"method": "stand", "ngram": 0}, "decoder.ngram: "),
        ({"method": "recycle", "block_complexity": 1}, "decoder.block_complexity: give auto, or the rows"),
        ({"method": "stand", "block_complexity": "auto"}, "decoder: block_complexity: auto is for esp and hybrid;"),
        ({"method": "recycle", "masks": 2}, "decoder: masks: no settings of method: recycle; leave them out"),
        (
            {"method": "pld", "init": "last_k", "lookahead": [4, 5, 5]},
            "decoder: init, lookahead: no settings of method:",
        ),
        ({"method": "lade", "ngram": 2}, "decoder: ngram: no settings of method: lade"),
        ({"method": "stand", "tree": "static", "branches": [3]}, "decoder: tree, branches: no settings of"),
        (
            {**ESP, "ngram": 2, "depth": 4},
            "decoder: ngram, depth: no settings of method: esp; leave them out, or set method: pld",
        ),
        (
            {"masks": 2, "ema": 0.2},
            "decoder: masks, ema: no settings of method: hybrid; leave them out, or set method: esp",
        ),
        ({"ngram": 2}, "decoder: ngram: no settings of method: hybrid; leave them out, or set method: pld or stand"),
        ({"masks": 2, "depth": 4}, "decoder: masks, depth: no settings of method: hybrid; leave them out"),
        ({"method": "ar", "depth": 4}, "decoder: depth: method: ar drafts nothing"),
        ({"method": "lookahead"}, "decoder.method: "),
    ],
)
def test_a_baselines_setting_that_is_wrong_or_not_its_own(decoder: dict[str, Any], message: str) -> None:
    assert problem(decoder=decoder).startswith(message)


def test_a_decoder_setting_at_its_default_always_applies() -> None:
    decoder = {"method": "ar", "probe_owners": "all", "impl": "efficient", "init_offset": 1}
    assert config_of(decoder=decoder).decoder == config_of(decoder={"method": "ar"}).decoder


@pytest.mark.parametrize(
    ("decoder", "setting", "shown"),
    [
        ({"impl": "fast"}, "decoder.impl", "'fast'"),
        ({"tree": "best"}, "decoder.tree", "'best'"),
        ({"init": "zero"}, "decoder.init", "'zero'"),
        ({"init": "offset", "init_offset": "far"}, "decoder.init_offset", "'far'"),
        ({"init": "offset", "init_offset": float("inf")}, "decoder.init_offset", "inf"),
    ],
)
def test_wrong_decoder_value(decoder: dict[str, Any], setting: str, shown: str) -> None:
    message = problem(decoder=decoder)
    assert message.startswith(f"{setting}: ")
    assert message.endswith(f"(got {shown})")


def test_the_decoders_section_alone() -> None:
    """What the benchmark parses: the same settings, defaults and messages as a job's."""
    assert parse_decoder({**ESP, "masks": 2}) == config_of(decoder={**ESP, "masks": 2}).decoder
    for wrong in ({"mask": 2}, {"masks": 9}, {**ESP, "branches": [4]}):
        with pytest.raises(ConfigError) as caught:
            parse_decoder(wrong)
        assert str(caught.value) == problem(decoder=wrong)


def test_decoder_defaults() -> None:
    decoder = config_of().decoder
    assert (decoder.impl, decoder.init, decoder.probe_owners, decoder.owner_count) == ("efficient", "mean", "all", None)
    assert (decoder.method, decoder.tree, decoder.masks, decoder.block_complexity) == ("hybrid", "dynamic", 1, "auto")


@pytest.mark.parametrize(
    ("decoder", "rows"),
    [
        ({}, "auto"),
        ({"method": "hybrid"}, "auto"),
        (ESP, "auto"),
        ({**ESP, "probe_owners": 3}, 30),
        ({"method": "stand"}, 30),
        ({"method": "recycle"}, 30),
        ({"method": "lade"}, 30),
    ],
)
def test_default_rows(decoder: dict[str, Any], rows: str | int) -> None:
    assert config_of(decoder=decoder).decoder.block_complexity == rows
    assert config_of(decoder={**decoder, "block_complexity": None}).decoder.block_complexity == rows


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        config_of().decoder.masks = 3


# ------------------------------------------------------------------------------------------------------------ --set


def test_set_values_are_yaml(tmp_path: Path) -> None:
    config = with_set(
        tmp_path,
        "sampling.stop=[a, 'b c']",
        "sampling.temperature=0.5",
        "output.resume=false",
        "engine.max_length=null",
        "input.path=x=y.jsonl",
        "input.keep_columns={n: int64}",
        " model.device =cpu",
    )
    assert config.sampling.stop == ["a", "b c"]
    assert config.sampling.temperature == 0.5
    assert config.output.resume is False
    assert config.engine.max_length is None
    assert config.input.path == ["x=y.jsonl"], "only the first = separates"
    assert config.input.keep_columns == {"n": "int64"}
    assert config.model.device == "cpu"


def test_the_last_set_wins(tmp_path: Path) -> None:
    assert with_set(tmp_path, "engine.slots=2", "engine.slots=3").engine.slots == 3


def test_set_makes_sections_that_are_absent_or_null(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump({**MINIMAL, "sampling": None}))
    config = load_config(path, ["sampling.seed=3", "engine.slots=2"])
    assert (config.sampling.seed, config.engine.slots) == (3, 2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.seed", "--set sampling.seed: expected key.path=value, such as"),
        ("=3", "--set =3: expected key.path=value"),
        ("sampling..seed=3", "--set sampling..seed=3: expected key.path=value"),
        ("input.path.first=a", "--set input.path.first=a: path is a value, not a section"),
        ("sampling.stop=[a", "--set sampling.stop=[a: the value is not valid YAML"),
        ("output.path=2024-13-45", "--set output.path=2024-13-45: the value is not valid YAML"),
        ("sampling.sed=3", "sampling.sed: unknown setting; the nearest valid key is sampling.seed"),
        ("sampling=3", "sampling: "),
        ("engine.slots=", "engine.slots: Input should be a valid integer (got None)"),
    ],
)
def test_bad_set(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_set(tmp_path, override)
    assert str(caught.value).startswith(message)


# ------------------------------------------------------------------------------------------------------------ files


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^config file .*absent.yaml: No such file or directory$"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("text", ["input: [", "a: b: c", "when: 2024-13-45"])
def test_invalid_yaml(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config file .*job.yaml: not valid YAML: "):
        load_config(write(tmp_path, text))


def test_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"input: {path: \xff}")
    with pytest.raises(ConfigError, match=r"^config file .*job.yaml: not valid UTF-8"):
        load_config(path)


@pytest.mark.parametrize("text", ["", "- input", "just text", "3"])
def test_yaml_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config file .*job.yaml: expected a mapping of sections"):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"decoder": {**ESP, "tree": "static", "branches": [7, 2], "masks": 2}},
        {"decoder": {**ESP, "tree": "static", "branches": [7, 2], "masks": 2, "probe_owners": 3}},
        {"decoder": {**ESP, "init": "offset", "init_offset": 2.5, "impl": "naive", "probe_owners": 3}},
        {"decoder": {"method": "ar", "block_complexity": 2}},
        {"input": {"messages_column": "c", "keep_columns": {"a": "bool"}}, "sampling": {"stop": "\n\n", "seed": 7}},
        {
            "sampling": {
                "logit_bias": {5: 1.5},
                "bad_words": ["a", "\u00fc"],
                "n": 3,
                "logprobs": 0,
                "max_new_tokens": 0,
            }
        },
        {"input": {"sampling_column": "p", "sampling_columns": ["seed"]}, "engine": {"cache_gib": 1.5}},
    ],
)
def test_a_dump_parses_to_the_same_configuration(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = config_of(**sections)
    assert parse_config(config.model_dump()) == config
    assert load_config(write(tmp_path, config.dump_yaml())) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_print_config_output_is_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    monkeypatch.setattr(generate, "set_up_logging", lambda: None)
    assert generate.main(["--config", str(path), "--set", "sampling.seed=5", "--print-config"]) == 0
    printed = write(tmp_path, capsys.readouterr().out)
    assert load_config(printed) == load_config(path, ["sampling.seed=5"])


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the key seed stands twice(.|\n)*line 2"):
        load_config(write(tmp_path, "sampling:\n  seed: 1\n  seed: 2\n"))


def test_a_bare_section_means_its_defaults(tmp_path: Path) -> None:
    text = "input: {path: a}\noutput: {path: o}\nmodel: {path: m}\nsampling:\n"
    assert load_config(write(tmp_path, text)).sampling.max_new_tokens == 256


def test_block_complexity_auto() -> None:
    decoder = config_of(decoder={**ESP, "block_complexity": "auto", "masks": 3, "tree": "best_first"}).decoder
    assert (decoder.block_complexity, decoder.owner_count) == ("auto", None)
