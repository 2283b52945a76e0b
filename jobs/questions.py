"""Spec-Bench's questions (question_id, category, turns) and the chats that they make under a model's template."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_MARGIN = 16  # tokens that a template may add around an answer; and the text of an answer may make a few more


@dataclass(frozen=True, slots=True)
class Question:
    """turns: what the user says, one after the other; each but the first comes behind the model's own answers."""

    id: str
    category: str
    turns: tuple[str, ...]


class Chat:
    """A tokenizer's chat template. Raises ConfigError for a tokenizer that has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "--model: its tokenizer has no chat template, and Spec-Bench's questions are turns of a chat; "
                "take an instruct model"
            )
        self._tokenizer = tokenizer

    def prompt_ids(self, turns: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
        """The prompt of the last of `turns`, behind the others and their `answers` (one fewer)."""
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, as the next turn's prompt holds it."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def length(self, question: Question, new: int) -> int:
        """Most tokens that the whole chat comes to with answers of `new` tokens each."""
        empty = len(self.prompt_ids(question.turns, [""] * (len(question.turns) - 1)))
        return empty + len(question.turns) * new + TURN_MARGIN * (len(question.turns) - 1)


def read_questions(path: Path) -> list[Question]:
    """Raises ConfigError naming the line that is no question of Spec-Bench's, or repeats another's question_id."""
    questions: dict[str, Question] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            question = _question(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"--questions: {path}, line {number}: {error}") from error
        if question.id in questions:
            raise ConfigError(f"--questions: {path}, line {number}: question_id {question.id} stands there twice")
        questions[question.id] = question
    if not questions:
        raise ConfigError(f"--questions: {path} holds no questions")
    return list(questions.values())


def _question(row: Any) -> Question:
    if not isinstance(row, Mapping):
        raise ValueError("expected a JSON object")
    turns, category = row.get("turns"), row.get("category")
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)):
        raise ValueError("expected `turns`, a list of one or two texts, as in Spec-Bench's question.jsonl")
    if "question_id" not in row or not isinstance(category, str):
        raise ValueError("expected `question_id` and `category`, as in Spec-Bench's question.jsonl")
    return Question(str(row["question_id"]), category, tuple(turns))


def choose(
    questions: Sequence[Question], per_category: int | None, seed: int, fits: Callable[[Question], bool]
) -> tuple[list[Question], int]:
    """Up to `per_category` (None: all) of each category's questions, a fixed random sample of those that fit, in the
    file's order; and how many of the file's did not fit."""
    fitting = [question for question in questions if fits(question)]
    chosen: set[str] = set()
    for members in by_category(fitting).values():
        count = len(members) if per_category is None else min(per_category, len(members))
        chosen.update(question.id for question in random.Random(seed).sample(members, count))
    return [question for question in fitting if question.id in chosen], len(questions) - len(fitting)


def by_category(questions: Iterable[Question]) -> dict[str, list[Question]]:
    grouped: dict[str, list[Question]] = {}
    for question in questions:
        grouped.setdefault(question.category, []).append(question)
    return grouped


def shards(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Parts of `size` questions, each mixed over the categories: first one of each, then a second one of each, .."""
    ranked = [(rank, question) for members in by_category(questions).values() for rank, question in enumerate(members)]
    mixed = [question for _, question in sorted(ranked, key=lambda pair: pair[0])]
    return [mixed[first : first + size] for first in range(0, len(mixed), size)]


def digest(questions: Sequence[Question]) -> str:
    """Of ids, categories and texts, in order."""
    content = json.dumps([asdict(question) for question in questions], ensure_ascii=False)
    return xxhash.xxh3_64_hexdigest(content.encode("utf-8", "surrogatepass"))
