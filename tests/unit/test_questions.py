"""Spec-Bench's questions: what is read, chosen and mixed; and the chats that they make."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tiny_checkpoint import tiny_tokenizer

from jobs.questions import Chat, Question, choose, digest, read_questions, shards
from pipeline.errors import ConfigError

QUESTIONS = [Question(f"{category}{n}", category, ("t",)) for category in ("a", "b", "c") for n in range(5)]


def test_questions_are_read(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(
        '{"question_id": 7, "category": "qa", "turns": ["one", "two"], "reference": ["x"]}\n'
        '{"question_id": "8", "category": "qa", "turns": ["three"]}\n',
        encoding="utf-8",
    )
    assert read_questions(file) == [Question("7", "qa", ("one", "two")), Question("8", "qa", ("three",))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "line 2: expected a JSON object"),
        ("{", "line 2: Expecting property name"),
        ('{"question_id": 2, "category": "qa", "turns": []}', "line 2: expected `turns`"),
        ('{"question_id": 2, "category": "qa", "turns": ["a", 3]}', "line 2: expected `turns`"),
        ('{"question_id": 2, "turns": ["a"]}', "line 2: expected `question_id` and `category`"),
        ('{"question_id": 1, "category": "qa", "turns": ["a"]}', "line 2: question_id 1 stands there twice"),
    ],
)
def test_what_is_no_question_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 1, "category": "qa", "turns": ["a"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_questions(file)


def test_a_fixed_sample_of_each_category_that_fits() -> None:
    chosen, left_out = choose(QUESTIONS, 2, seed=1, fits=lambda question: question.id not in ("a0", "b1"))
    assert left_out == 2
    assert Counter(question.category for question in chosen) == {"a": 2, "b": 2, "c": 2}
    assert chosen == [question for question in QUESTIONS if question in chosen], "in the file's order"
    assert chosen == choose(QUESTIONS, 2, seed=1, fits=lambda question: question.id not in ("a0", "b1"))[0]
    assert {"a0", "b1"}.isdisjoint(question.id for question in chosen)
    others = [choose(QUESTIONS, 2, seed=seed, fits=lambda _: True)[0] for seed in range(5)]
    assert len({digest(other) for other in others}) > 1
    assert choose(QUESTIONS, None, seed=1, fits=lambda _: True) == (QUESTIONS, 0)


def test_shards_are_mixed_over_the_categories() -> None:
    parts = shards(QUESTIONS, 6)
    assert [len(part) for part in parts] == [6, 6, 3]
    assert [question.category for question in parts[0]] == ["a", "b", "c", "a", "b", "c"]
    assert Counter(question for part in parts for question in part) == Counter(QUESTIONS)


def test_a_later_turn_comes_behind_the_answers() -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer)
    text = tokenizer.decode(chat.prompt_ids(["A", "B"], ["yes"]))
    assert text == "<s><|user|>A\n<|assistant|>yes\n<|user|>B\n<|assistant|>"
    assert chat.answer(tokenizer("yes</s>", add_special_tokens=False)["input_ids"]) == "yes"
    one, two = Question("1", "qa", ("A",)), Question("2", "qa", ("A", "B"))
    assert chat.length(one, 10) == len(chat.prompt_ids(["A"], [])) + 10
    assert chat.length(two, 10) > len(chat.prompt_ids(["A", "B"], ["x" * 10])) + 10


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        Chat(tokenizer)
