"""The timed runs of a benchmark's sides, and apart from these, a watched one of each.

A run decodes N prompts in S slots. While prompts wait, all slots are taken: the steady phase. Behind it the last
sequences leave slots empty one by one: the tail, which a job of many rows has only once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from esp_worker.cost import StepCost
from esp_worker.drafters.base import Drafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.prime import Successors
from esp_worker.types import Completion, Request
from jobs.sides import Side
from jobs.watch import PARTS, watched
from pipeline.methods import make_drafters


@dataclass(frozen=True)
class Moment:
    """The end of a step: seconds since the run began, and tokens committed until then."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Run:
    """One decoding of all prompts. full: the first and the last step that all slots were taken in; None where there
    are no two, or no more prompts than slots."""

    seconds: float
    done: Sequence[Completion]
    full: tuple[Moment, Moment] | None


@dataclass
class Timing:
    """What the repeats of one side gave; counts are of the last one (they vary with block complexity auto alone)."""

    seconds: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)  # tokens/s while all slots were taken, of the repeats with `full`
    tails: list[float] = field(default_factory=list)  # seconds behind that, of the same
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # decode calls of each request
    rows: int = 0
    plain_steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0

    def add(self, run: Run) -> None:
        self.seconds.append(run.seconds)
        if run.full is not None:
            first, last = run.full
            self.steady.append((last.tokens - first.tokens) / (last.seconds - first.seconds))
            self.tails.append(run.seconds - last.seconds)
        self.outputs = {completion.request_id: completion.token_ids for completion in run.done}
        self.calls = {completion.request_id: completion.stats.decode_calls for completion in run.done}
        self.rows = sum(completion.stats.rows_computed for completion in run.done)
        self.plain_steps = sum(completion.stats.plain_steps for completion in run.done)
        self.prefill_tokens = sum(completion.stats.prefill_tokens for completion in run.done)
        self.cached_tokens = sum(completion.stats.cached_tokens for completion in run.done)

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for tokens in self.outputs.values())

    @property
    def decode_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / median(self.seconds)

    @property
    def steady_tokens_per_s(self) -> float | None:
        return median(self.steady) if self.steady else None

    @property
    def tail_seconds(self) -> float | None:
        return median(self.tails) if self.tails else None


@dataclass(frozen=True)
class Profile:
    """A decode step: rows of all its sequences, and seconds of each of watch.PARTS."""

    rows: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class SideRuns:
    """Runs of any sides on the same requests. cost, known: as make_drafters takes them.

    Each run has an engine of its own, that has seen none of the prompts.
    """

    model: CausalModel
    requests: Sequence[Request]
    cost: Callable[[], StepCost]
    known: Callable[[], Successors]

    def time(self, sides: Sequence[Side], repeat: int) -> list[Timing]:
        """Every side once per repeat, in turn; a short run of each first, which is not counted."""
        for side in sides:
            list(self._engine(side, self._drafters(side)).generate(self.requests[:1]))
        timings = [Timing() for _ in sides]
        for number in range(repeat):
            for side, timing in zip(sides, timings, strict=True):
                timing.add(run(self._engine(side, self._drafters(side)), self.requests))
                print(f"repeat {number + 1}: {side.label}", file=sys.stderr)
        return timings

    def profile(self, side: Side) -> Profile | None:
        """The mean decode step of the first prompts, one for each slot, steps that prefill too apart; None where there
        are no others."""
        drafters = self._drafters(side)
        engine = self._engine(side, drafters)
        steps: list[dict[str, float]] = []
        rows = 0
        for request in self.requests[: side.slots]:
            engine.submit(request)
        with watched(self.model, drafters) as watch:
            while engine.busy:
                _, parts = watch.step(engine)
                if parts is not None:
                    steps.append(parts)
                    rows += watch.rows
        if not steps:
            return None
        return Profile(rows / len(steps), {name: mean(step[name] for step in steps) for name in PARTS})

    def _drafters(self, side: Side) -> list[Drafter]:
        return make_drafters(side.config, self.model, self.cost, self.known)

    def _engine(self, side: Side, drafters: Sequence[Drafter]) -> Engine:
        return Engine(self.model, drafters, slots=side.slots, prefix_reuse=side.prefix_reuse)


def run(engine: Engine, requests: Sequence[Request]) -> Run:
    """Decode all requests with an idle engine."""
    began = time.perf_counter()
    done: list[Completion] = []
    ended_tokens = 0
    full: list[Moment] = []
    for request in requests:
        engine.submit(request)
    while engine.busy:
        ended = engine.step()
        done += ended
        ended_tokens += sum(len(completion.token_ids) for completion in ended)
        if len(engine.running) + len(ended) >= engine.slots:
            full.append(Moment(time.perf_counter() - began, ended_tokens + engine.running_tokens))
    seconds = time.perf_counter() - began
    return Run(seconds, done, (full[0], full[-1]) if len(full) > 1 and len(requests) > engine.slots else None)
