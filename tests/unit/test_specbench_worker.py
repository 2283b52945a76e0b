"""What an actor of specbench decodes, without Ray: sampled tokens, turns that do not fit, drafters that stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esp_worker import reference
from esp_worker.checkpoint import resolve
from esp_worker.model import load_model
from esp_worker.types import Request
from jobs.questions import Chat, Question
from jobs.specbench_worker import Setup, Worker
from pipeline.config import parse_decoder
from pipeline.prepare import load_tokenizer

QUESTIONS = [Question("1", "qa", ("Say", "And?")), Question("2", "rag", ("Tell me",)), Question("3", "qa", ("Say",))]
RECYCLE = parse_decoder({"method": "recycle", "block_complexity": 10})


@pytest.fixture
def setup(tiny_checkpoint: Path) -> Setup:
    checkpoint = resolve(str(tiny_checkpoint))
    return Setup(
        model=str(tiny_checkpoint),
        identity=checkpoint.identity,
        dtype="float64",
        device="cpu",
        threads=1,
        kernels="auto",
        slots=2,
        new=12,
        temperature=0.0,
        seed=1,
        eos=(2,),
    )


def tokens(record: dict[str, Any]) -> dict[str, list[list[int]]]:
    return {question["id"]: [turn["tokens"] for turn in question["turns"]] for question in record["questions"]}


def calls(record: dict[str, Any]) -> int:
    return sum(turn["decode_calls"] for question in record["questions"] for turn in question["turns"])


def test_sampled_tokens_are_the_references(setup: Setup) -> None:
    setup = replace(setup, temperature=1.0)
    worker = Worker(setup)
    plain = tokens(worker.decode("ar", parse_decoder({"method": "ar"}), QUESTIONS))
    assert tokens(worker.decode("recycle", RECYCLE, QUESTIONS)) == plain
    folder = resolve(setup.model).folder
    model, chat = load_model(folder, dtype="float64"), Chat(load_tokenizer(folder))
    for question in QUESTIONS:
        answers: list[str] = []
        for turn, got in enumerate(plain[question.id]):
            prompt = chat.prompt_ids(question.turns[: turn + 1], answers)
            want = reference.decode(model, Request("r", prompt, setup.sampling(question, turn)))
            assert list(want.token_ids) == got
            answers.append(chat.answer(got))
        assert len(answers) == len(question.turns)
    assert plain["1"][0] != plain["3"][0], "equal prompts draw by their own questions"


def test_a_drafter_stays_from_shard_to_shard(setup: Setup) -> None:
    worker = Worker(setup)
    first, second = (worker.decode("recycle", RECYCLE, QUESTIONS) for _ in range(2))
    assert tokens(first) == tokens(second)
    assert calls(second) < calls(first), "it has seen these rows"
    assert calls(Worker(setup).decode("recycle", RECYCLE, QUESTIONS)) == calls(first), "it begins cold"


def test_a_turn_that_does_not_fit_is_left_out(setup: Setup) -> None:
    long = Question("4", "qa", ("Say", "x" * 150))
    got = tokens(Worker(setup).decode("ar", parse_decoder({"method": "ar"}), [long, QUESTIONS[1]]))
    assert (len(got["4"]), len(got["2"])) == (1, 1)


def test_another_nodes_files_must_be_the_drivers(setup: Setup) -> None:
    with pytest.raises(RuntimeError, match="all nodes must see the same model"):
        Worker(replace(setup, identity="folder:other"))
