"""What an actor of `jobs.bench specbench` does: it holds one model, and decodes shards of questions, side by side.

A side's drafter stays alive from shard to shard (hybrid, recycle and stand learn across rows); its engine, and with it
the KV cache, lives for one shard, so that one cache is in memory however many sides there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import xxhash

from esp_worker.accel import accelerate
from esp_worker.calibrate import cost_key, step_cost
from esp_worker.checkpoint import resolve
from esp_worker.cost import StepCost
from esp_worker.drafters.base import Drafter
from esp_worker.engine import Engine
from esp_worker.model import load_model
from esp_worker.prime import Successors, successors
from esp_worker.types import Completion, Request, SamplingParams
from jobs.ceiling import measure_ceiling
from jobs.questions import Chat, Question
from jobs.runtime import machine, versions
from pipeline.decoder_config import DecoderConfig
from pipeline.methods import make_drafters
from pipeline.prepare import load_tokenizer

WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Setup:
    """What every actor decodes with. identity: the checkpoint's; eos: token ids."""

    model: str
    identity: str
    dtype: str
    device: str
    threads: int
    kernels: str
    slots: int
    new: int
    temperature: float
    seed: int
    eos: tuple[int, ...]

    def sampling(self, question: Question, turn: int) -> SamplingParams:
        """Greedy, or draws keyed by the question and the turn, so that every side draws alike."""
        key = xxhash.xxh3_64_intdigest(f"{self.seed} {question.id}".encode())
        return SamplingParams(
            max_new_tokens=self.new,
            temperature=self.temperature,
            seed=key,
            sample_index=turn,
            eos_token_ids=frozenset(self.eos),
        )


class Worker:
    """One model. Knows nothing of Ray, so that it can be put on an actor or used as it is."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._setup = setup
        checkpoint = resolve(setup.model)
        if checkpoint.identity != setup.identity:
            raise RuntimeError(
                f"this node's files of {setup.model} ({checkpoint.identity}) are not the driver's ({setup.identity}); "
                "all nodes must see the same model"
            )
        self._model = load_model(checkpoint.folder, dtype=setup.dtype, device=setup.device)
        self._kernels = accelerate(self._model) if setup.kernels == "auto" else "stock kernels"
        self._chat = Chat(load_tokenizer(checkpoint.folder))
        self._drafters: dict[str, list[Drafter]] = {}

    def about(self) -> dict[str, Any]:
        """What a reader of the figures must know of this machine."""
        return {
            "machine": machine(),
            "versions": versions(),
            "device": str(self._model.device),
            "threads": self._setup.threads,
            "kernels": self._kernels,
            "ceiling": measure_ceiling(self._model),
        }

    @cached_property
    def _step_cost(self) -> StepCost:
        key = cost_key(self._model, self._setup.identity, self._kernels)
        return step_cost(self._model, key, self._setup.slots, self._model.context_length)

    @cached_property
    def _successors(self) -> Successors:
        return successors(self._model, self._setup.identity)

    def step_cost(self) -> StepCost:
        """What steps cost here: the machine's own table, else a short one, measured now."""
        return self._step_cost

    def decode(self, side: str, config: DecoderConfig, questions: Sequence[Question]) -> dict[str, Any]:
        """The shard's record: seconds, this machine, and for each question its turns (see _turn). A turn that its own
        answers have made too long for the model's context is left out, with those behind it."""
        if side not in self._drafters:
            self._warm_up(config)
            self._drafters[side] = self._make_drafters(config)
        engine = Engine(self._model, self._drafters[side], slots=self._setup.slots)
        began = time.perf_counter()
        turns: dict[str, list[Completion]] = {question.id: [] for question in questions}
        known = {question.id: question for question in questions}
        for question in questions:
            self._ask(engine, question, [])
        while engine.busy:
            for completion in engine.step():
                answered = turns[completion.request_id]
                answered.append(completion)
                self._ask(engine, known[completion.request_id], answered)
        return {
            "seconds": round(time.perf_counter() - began, 3),
            "machine": {key: machine()[key] for key in ("cpu", "gpu")},
            "questions": [
                {
                    "id": question.id,
                    "category": question.category,
                    "turns": [_turn(done) for done in turns[question.id]],
                }
                for question in questions
            ],
        }

    def _ask(self, engine: Engine, question: Question, answered: Sequence[Completion]) -> None:
        """Submit the question's next turn, if it has one that fits."""
        turn = len(answered)
        if turn == len(question.turns):
            return
        answers = [self._chat.answer(completion.token_ids) for completion in answered]
        prompt = self._chat.prompt_ids(question.turns[: turn + 1], answers)
        if len(prompt) < engine.max_length:
            engine.submit(Request(question.id, prompt, self._setup.sampling(question, turn)))

    def _make_drafters(self, config: DecoderConfig) -> list[Drafter]:
        return make_drafters(config, self._model, self.step_cost, lambda: self._successors)

    def _warm_up(self, config: DecoderConfig) -> None:
        """A few steps with a drafter that is thrown away: allocation is charged to nobody, and nothing is learnt."""
        engine = Engine(self._model, self._make_drafters(config), slots=self._setup.slots)
        prompt = tuple(token % self._model.vocab_size for token in range(1, WARMUP_TOKENS + 1))
        list(engine.generate([Request("warm-up", prompt, SamplingParams(max_new_tokens=WARMUP_TOKENS))]))


def _turn(done: Completion) -> dict[str, Any]:
    stats = done.stats
    return {
        "tokens": list(done.token_ids),
        "finish_reason": str(done.finish_reason),
        "accept_lengths": stats.accept_lengths,
        "decode_calls": stats.decode_calls,
        "plain_steps": stats.plain_steps,
        "rows": stats.rows_computed,
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        "prefill_tokens": stats.prefill_tokens,
        "cached_tokens": stats.cached_tokens,
        "engine_s": stats.engine_s,
    }
