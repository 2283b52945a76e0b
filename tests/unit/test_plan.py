"""What a run will really do: defaults settled on a cluster, plans that cannot run refused, fingerprints compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from esp_worker.checkpoint import Checkpoint, ModelError
from pipeline import plan as plan_module
from pipeline.config import JobConfig, parse_config
from pipeline.errors import ConfigError
from pipeline.plan import Node, Plan, check_cluster, continued, difference, make_plan

CONTEXT = 2048


def config_of(**sections: Any) -> JobConfig:
    data: dict[str, Any] = {"input": {"path": "in.jsonl"}, "output": {"path": "out"}, "model": {"path": "m"}}
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    return parse_config(data)


def plan_of(
    *,
    actors: int = 1,
    min_actors: int | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    dtype: str = "float32",
    **sections: Any,
) -> Plan:
    return Plan(
        config=config_of(cluster={"actors": actors, "min_actors": min_actors}, **sections),
        model_identity="folder:abc",
        dtype=dtype,
        device="cuda" if num_gpus else "cpu",
        threads=int(num_cpus) or 1,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_length=CONTEXT,
        eos_token_ids=(7, 2),
    )


# ---------------------------------------------------------------------------------------------------- check_cluster


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        ({}, [Node(2, 0)]),
        ({"actors": 2, "num_cpus": 4}, [Node(9, 0)]),
        ({"actors": 2, "num_cpus": 4}, [Node(4, 0), Node(5, 0)]),
        ({"actors": 8, "num_gpus": 1}, [Node(16, 8)]),
        ({"actors": 4, "num_gpus": 1}, [Node(8, 0), Node(2, 2), Node(2, 2)]),
        ({"actors": 10, "num_cpus": 0.1, "num_gpus": 0.1}, [Node(2, 1)]),  # 1 // 0.1 is 9
        ({"actors": 3, "num_cpus": 0.5, "num_gpus": 1 / 3}, [Node(4, 1)]),
    ],
)
def test_plans_that_fit(wanted: dict[str, Any], nodes: list[Node]) -> None:
    check_cluster(plan_of(**wanted), nodes)


def refusal(nodes: list[Node], **wanted: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_cluster(plan_of(**wanted), nodes)
    return str(caught.value)


def test_too_many_actors() -> None:
    assert refusal([Node(4, 0), Node(6, 0)], actors=4, num_cpus=4) == (
        "cluster.actors: 4 actors of 4 CPUs and 0 GPUs each do not fit: the cluster has 2 node(s), 10 logical CPUs and "
        "0 GPUs, room for 2; add nodes, or lower cluster.actors, engine.threads or cluster.num_cpus"
    )


def test_an_actor_must_fit_on_one_node() -> None:
    assert "2 node(s), 6 logical CPUs and 0 GPUs, room for 0;" in refusal([Node(3, 0), Node(3, 0)], num_cpus=4)


def test_gpus_lacking() -> None:
    message = refusal([Node(64, 0), Node(8, 1)], actors=2, num_gpus=1)
    assert "2 actors of 1 CPUs and 1 GPUs each do not fit" in message
    assert "72 logical CPUs and 1 GPUs, room for 1;" in message
    assert "room for 0;" in refusal([Node(64, 0)], num_gpus=1)
    assert "room for 6;" in refusal([Node(64, 3)], actors=7, num_gpus=0.4), "0.2 of each GPU is no use to anyone"


def test_a_pool_that_grows_needs_room_for_its_least() -> None:
    check_cluster(plan_of(actors=100, min_actors=3), [Node(4, 0)])
    message = refusal([Node(4, 0)], actors=100, min_actors=5)
    assert message.startswith("cluster.min_actors: 5 actors of ")
    assert "lower cluster.min_actors, engine.threads" in message


@pytest.mark.parametrize(
    ("wanted", "nodes", "least"),
    [
        ({"actors": 4}, [Node(3, 0)], 2),
        ({"actors": 4, "num_cpus": 3}, [Node(4, 0), Node(2, 0)], 1),
        ({"actors": 8, "min_actors": 2}, [Node(64, 0)], 2),
        ({"actors": 4, "num_gpus": 0.5}, [Node(64, 1)], 2),
        ({"actors": 2}, [], 1),  # make_plan then says what is missing
    ],
)
def test_a_job_goes_on_with_the_actors_that_the_remaining_nodes_hold(
    wanted: dict[str, Any], nodes: list[Node], least: int
) -> None:
    plan = plan_of(**wanted)
    config = continued(plan, nodes)
    assert config.cluster.least == least
    assert config.cluster.actors == plan.config.cluster.actors
    assert (config.output.resume, config.output.overwrite) == (True, False)


@pytest.mark.parametrize(
    ("nodes", "wanted", "more"),
    [
        ([Node(4, 0)], {"num_cpus": 4}, "1"),
        ([Node(8, 0)], {"actors": 2, "num_cpus": 4}, "1"),
        ([Node(4.5, 0)], {"num_cpus": 4}, "0.5"),
        ([Node(8, 8)], {"actors": 8, "num_gpus": 1}, "1"),
    ],
)
def test_a_cpu_must_stay_free_for_reading_and_writing(nodes: list[Node], wanted: dict[str, Any], more: str) -> None:
    message = refusal(nodes, **wanted)
    assert message.startswith(f"cluster: {wanted.get('actors', 1)} actors of ")
    assert "leave none for reading and writing (the job would hang)" in message
    assert f"; {more} more is needed: " in message


# -------------------------------------------------------------------------------------------------------- make_plan


@pytest.fixture(autouse=True)
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Stands in for the model's files: their config, generation config and tokenizer."""
    stub = SimpleNamespace(max_position_embeddings=CONTEXT, dtype="float16", vocab_size=100)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')

    class Tokenizer:
        eos_token_id, chat_template, bos_token_id = 7, None, None

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [] if text.strip() == "void" else [1]}

    tokenizer = Tokenizer()
    monkeypatch.setattr(plan_module, "resolve", lambda path, revision: Checkpoint(tmp_path, "folder:abc"))
    monkeypatch.setattr(plan_module, "read_config", lambda folder, trust: stub)
    monkeypatch.setattr(plan_module, "load_tokenizer", lambda folder, trust: tokenizer)
    monkeypatch.setattr(plan_module.os, "cpu_count", lambda: 64)
    return stub


def test_a_cpu_plan() -> None:
    plan = make_plan(config_of(engine={"threads": 3}), [Node(4, 0)])
    assert (plan.device, plan.dtype, plan.threads, plan.num_cpus, plan.num_gpus) == ("cpu", "float32", 3, 3.0, 0.0)
    assert (plan.max_length, plan.eos_token_ids, plan.model_identity) == (CONTEXT, (2, 7, 9), "folder:abc")


def test_a_gpu_plan() -> None:
    plan = make_plan(config_of(), [Node(4, 1)])
    assert (plan.device, plan.dtype, plan.threads, plan.num_cpus, plan.num_gpus) == ("cuda", "float16", 1, 1.0, 1.0)
    assert make_plan(config_of(model={"device": "cpu"}, engine={"threads": 2}), [Node(4, 1)]).device == "cpu"
    assert make_plan(config_of(cluster={"num_gpus": 0}, engine={"threads": 2}), [Node(4, 1)]).device == "cpu"
    assert make_plan(config_of(model={"device": "cuda:3"}), [Node(4, 8)]).device == "cuda", "Ray chooses the GPU"
    assert make_plan(config_of(cluster={"num_gpus": 0.5}), [Node(4, 1)]).num_gpus == 0.5


def test_dtype(model: SimpleNamespace) -> None:
    assert make_plan(config_of(model={"dtype": "bfloat16"}, engine={"threads": 1}), [Node(4, 0)]).dtype == "bfloat16"
    model.dtype = "torch.bfloat16"
    assert make_plan(config_of(), [Node(4, 1)]).dtype == "bfloat16"
    model.dtype = None
    assert make_plan(config_of(), [Node(4, 1)]).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("actors", "nodes", "threads"),
    [
        (1, [Node(66, 0)], 64),  # no more than the machine's cores
        (2, [Node(9, 0)], 4),
        (4, [Node(9, 0), Node(9, 0)], 4),
        (3, [Node(9, 0), Node(9, 0)], 4),
        (2, [Node(0, 0), Node(9, 0)], 4),  # a head node that takes no work
        (8, [Node(9, 0)], 1),
    ],
)
def test_threads_share_the_cores(actors: int, nodes: list[Node], threads: int) -> None:
    assert make_plan(config_of(cluster={"actors": actors}), nodes).threads == threads


def test_max_length() -> None:
    assert make_plan(config_of(engine={"max_length": 100}), [Node(4, 1)]).max_length == 100
    with pytest.raises(ConfigError, match=r"engine.max_length: 2049 is beyond the model's context of 2048 tokens"):
        make_plan(config_of(engine={"max_length": CONTEXT + 1}), [Node(4, 1)])


def test_eos_of_the_configuration_wins() -> None:
    assert make_plan(config_of(sampling={"eos_token_ids": []}), [Node(4, 1)]).eos_token_ids == ()
    assert make_plan(config_of(sampling={"eos_token_ids": [5]}), [Node(4, 1)]).eos_token_ids == (5,)


def test_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = {"eos_token_id": [9, 2], "do_sample": True, "temperature": 0.5, "top_k": 20, "max_length": 100}
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    caplog.set_level("INFO")
    plan = make_plan(config_of(sampling={"top_k": 7}), [Node(4, 1)])
    assert (plan.config.sampling.temperature, plan.config.sampling.top_k, plan.eos_token_ids) == (0.0, 7, (2, 7, 9))
    left = {"do_sample": True, "temperature": 0.5, "top_k": 20}
    assert plan.resolved()["generation_config"] == {"rule": "eos", "taken": {}, "not_taken": left}
    (line,) = [record.message for record in caplog.records]
    assert line.endswith("(sampling.generation_config: eos): do_sample: True, temperature: 0.5, top_k: 20")

    wanting = config_of(sampling={"top_k": 7, "generation_config": "all"})
    taking = make_plan(wanting, [Node(4, 1)])
    assert (taking.config.sampling.temperature, taking.config.sampling.top_k) == (0.5, 7)
    assert taking.resolved()["sampling"]["temperature"] == 0.5
    shown = {"rule": "all", "taken": {"temperature": 0.5}, "not_taken": {"top_k": 20}}
    assert taking.resolved()["generation_config"] == shown
    assert changed(plan, taking) == ["sampling.temperature: 0.0 -> 0.5"]
    same = make_plan(config_of(sampling={"top_k": 7, "temperature": 0.5}), [Node(4, 1)])
    assert changed(taking, same) == [], "what is taken counts, not the rule"

    (tmp_path / "generation_config.json").write_text(json.dumps({**file, "num_beams": 4}))
    with pytest.raises(ConfigError, match=r"sets num_beams: 4, which this project does not have"):
        make_plan(wanting, [Node(4, 1)])
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^model.path: .*generation_config.json is not valid JSON"):
        make_plan(wanting, [Node(4, 1)])


def test_settings_that_speak_of_tokens_speak_of_the_models() -> None:
    with pytest.raises(ConfigError, match=r"^sampling.logit_bias: token 100 is outside the model's vocabulary of 100$"):
        make_plan(config_of(sampling={"logit_bias": {99: 1, 100: 1}}), [Node(4, 1)])
    with pytest.raises(ConfigError, match=r"^sampling.bad_words: 'void' has no token that the model's tokenizer knows"):
        make_plan(config_of(sampling={"bad_words": ["void"]}), [Node(4, 1)])
    make_plan(config_of(sampling={"logit_bias": {99: 1}, "bad_words": ["a"]}), [Node(4, 1)])


def test_plans_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cluster.num_gpus: 0 with model.device: cuda"):
        make_plan(config_of(model={"device": "cuda"}, cluster={"num_gpus": 0}), [Node(4, 1)])
    with pytest.raises(ConfigError, match=r"do not fit"):
        make_plan(config_of(model={"device": "cuda"}), [Node(4, 0)])
    with pytest.raises(ConfigError, match=r"input.chat_template: always needs a chat template"):
        make_plan(config_of(input={"chat_template": "always"}), [Node(4, 1)])

    def absent(path: str, revision: str | None) -> None:
        raise ModelError("model m: no such file or folder")

    monkeypatch.setattr(plan_module, "resolve", absent)
    with pytest.raises(ConfigError, match=r"^model.path: model m: no such file or folder$"):
        make_plan(config_of(), [Node(4, 1)])


# ------------------------------------------------------------------------------------- what is recorded and compared


def test_resolved_has_nothing_open() -> None:
    resolved = plan_of(num_cpus=2, sampling={"seed": 5}).resolved()
    assert resolved["model"] | {"dtype": "float32", "device": "cpu", "identity": "folder:abc"} == resolved["model"]
    prefill = {"prefill_tokens": 512, "prefix_reuse": True, "cache_gib": None}
    assert resolved["engine"] == {"slots": 8, "max_length": CONTEXT, "kernels": "auto", "threads": 2, **prefill}
    assert resolved["generation_config"] == {"rule": "eos", "taken": {}, "not_taken": {}}
    assert resolved["cluster"] == {"actors": 1, "min_actors": 1, "num_cpus": 2, "num_gpus": 0}
    assert (resolved["sampling"]["eos_token_ids"], resolved["sampling"]["seed"]) == ([7, 2], 5)
    assert resolved["decoder"]["block_complexity"] == "auto"


def changed(first: Plan, second: Plan) -> list[str]:
    return difference(json.loads(json.dumps(first.fingerprint())), second.fingerprint())


def test_fingerprint_is_of_what_changes_tokens_or_columns() -> None:
    base = plan_of()
    assert changed(base, plan_of()) == []
    same = plan_of(
        actors=4,
        num_cpus=3,
        input={"limit": 5},
        decoder={"method": "ar", "masks": 2},
        engine={"slots": 2, "prefill_tokens": 64, "prefix_reuse": False, "cache_gib": 2},
        sampling={"n": 4},
        output={"path": "elsewhere"},
        compare={"fraction": 1},
    )
    assert changed(base, same) == [], "in 32 bits the method and the batch change no token"
    assert changed(base, replace(base, model_identity="hub:a@2")) == [f"model: {base.model_identity!r} -> 'hub:a@2'"]
    assert changed(base, replace(base, max_length=99)) == [f"max_length: {base.max_length} -> 99"]
    assert changed(base, replace(base, eos_token_ids=(7,))) == ["sampling.eos_token_ids: [2, 7] -> [7]"]
    assert changed(base, plan_of(dtype="float64")) == ["dtype: 'float32' -> 'float64'"]
    assert changed(base, plan_of(input={"system_prompt": "Be brief."})) == ["input.system_prompt: None -> 'Be brief.'"]
    assert changed(base, plan_of(input={"chat_template": "never"})) == ["input.chat_template: 'auto' -> 'never'"]
    assert changed(base, plan_of(sampling={"seed": 1})) == ["sampling.seed: 0 -> 1"]
    biased = plan_of(sampling={"logit_bias": {5: 1.0}})
    assert changed(base, biased) == ["sampling.logit_bias.5: None -> 1.0"]
    assert changed(biased, biased) == [], "also after run.json has made the token id a string"
    assert changed(base, plan_of(sampling={"keep_stop": True})) == ["sampling.keep_stop: False -> True"]
    assert changed(base, plan_of(sampling={"logprobs": 1})) == ["sampling.logprobs: None -> 1"]
    assert changed(base, plan_of(input={"sampling_column": "p"})) == ["input.sampling_column: None -> 'p'"]
    assert changed(base, plan_of(input={"keep_columns": ["a"]})) == ["input.keep_columns.a: None -> 'string'"]
    here = Path.cwd()
    assert changed(base, plan_of(input={"path": ["./in.jsonl"]})) == [], "the same file, written otherwise"
    assert changed(base, plan_of(input={"path": ["b"]})) == [f"input.path: ['{here}/in.jsonl'] -> ['{here}/b']"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fingerprint_in_16_bits_holds_the_method_too(dtype: str) -> None:
    base = plan_of(dtype=dtype)
    assert changed(base, plan_of(dtype=dtype, decoder={"block_complexity": 8})) == [
        "decoder.block_complexity: 'auto' -> 8"
    ]
    engine = {"slots": 2, "prefill_tokens": 64, "prefix_reuse": False, "kernels": "stock"}
    assert changed(base, plan_of(dtype=dtype, engine=engine)) == [
        "engine.prefill_tokens: 512 -> 64",
        "engine.prefix_reuse: True -> False",
        "engine.slots: 8 -> 2",
    ]
    assert changed(base, plan_of(dtype=dtype, num_gpus=1)) == ["device: 'cpu' -> 'cuda'"]
    assert changed(base, plan_of(dtype=dtype, actors=4)) == ["actors: 1 -> 4"]


def test_difference() -> None:
    old = {"a": 1, "b": {"x": [1], "y": {"z": None}}, "gone": 2, "turned": {"k": 1}}
    new = {"a": 1, "b": {"x": [1, 2], "y": {"z": None}}, "turned": 3, "fresh": {"k": 1}}
    assert difference(old, new) == [
        "b.x: [1] -> [1, 2]",
        "fresh: None -> {'k': 1}",
        "gone: 2 -> None",
        "turned: {'k': 1} -> 3",
    ]
    assert difference(old, old) == []
    assert difference({}, {}) == []
