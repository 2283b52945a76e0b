"""A decoder without a model, for tests of what is around it: quick, deterministic, ill-behaved where a prompt says so.

A row's tokens depend on its prompt's ids, its sampling settings and its sample index alone. What a prompt may say:

    poison      ends the process (SIGKILL), every time
    kill N      ends the process the first N times
    raise       fails, with nothing wrong around it
    sleep S     takes S seconds
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from esp_worker.types import Completion, DecodeStats, FinishReason, Request, SamplingParams
from pipeline.decoder import EngineDecoder
from pipeline.plan import Plan, find_checkpoint
from pipeline.prepare import load_tokenizer

FIRST_TOKEN, TOKENS = 40, 50  # printable ones of the tiny tokenizer


class FakeDecoder:
    """Takes the place of pipeline.decoder.EngineDecoder, in functools.partial(FakeDecoder, ...)."""

    load_s = warmup_s = 0.0

    def __init__(self, plan: Plan, log: Path, seconds: float = 0.0) -> None:
        """log: a folder for what each process began and ended (see `events`). seconds: what a row takes."""
        self._tokenizer = load_tokenizer(find_checkpoint(plan.config).folder)
        self._log, self._folder = DecodeLog(log), log
        self._seconds = seconds
        self._slots = ThreadPoolExecutor(plan.config.engine.slots)

    def submit(self, request: Request, method: str | None = None) -> Future[Completion]:
        return self._slots.submit(self._decode, request)

    def probe(self) -> Future[Completion]:
        return self._slots.submit(lambda: Completion("probe", (), FinishReason.LENGTH, DecodeStats(), 0.0))

    def _decode(self, request: Request) -> Completion:
        began = time.perf_counter()
        row = self._log.note("began", request)
        self._obey(self._tokenizer.decode(request.prompt_ids), row)
        time.sleep(self._seconds)
        completion = fake_completion(request, began)
        self._log.note("ended", request)
        return completion

    def _obey(self, prompt: str, row: str) -> None:
        if sleep := re.search(r"sleep ([\d.]+)", prompt):
            time.sleep(float(sleep[1]))
        kill = re.search(r"kill (\d+)", prompt)
        begun = Counter(event.row for event in events(self._folder) if event.kind == "began")[row] if kill else 0
        if "poison" in prompt or (kill and begun <= int(kill[1])):
            os.kill(os.getpid(), signal.SIGKILL)
        if "raise" in prompt:
            raise RuntimeError("the prompt says so")


class LoggedDecoder(EngineDecoder):
    """The real one, with a log of what it began."""

    def __init__(self, plan: Plan, log: Path) -> None:
        super().__init__(plan)
        self._log = DecodeLog(log)

    def submit(self, request: Request, method: str | None = None) -> Future[Completion]:
        self._log.note("began", request)
        return super().submit(request, method)


class DecodeLog:
    """What one process began and ended, in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{time.time_ns()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, kind: str, request: Request) -> str:
        """Returns the row's name."""
        row = f"{request.request_id}#{request.sampling.sample_index}"
        os.write(self._file, f"{kind} {row}\n".encode())  # at once: a SIGKILL takes nothing of it away
        return row


class MendedDecoder(FakeDecoder):
    """The fake decoder after its faults were found: it does not do what prompts say, and gives the same tokens."""

    def _obey(self, prompt: str, row: str) -> None:
        pass


def die(plan: Plan) -> FakeDecoder:
    """A decoder whose process ends while it is made."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class InstantDecoder:
    """Gives the same tokens with no work of its own: no log, no threads, and prompts say nothing to it."""

    load_s = warmup_s = 0.0

    def __init__(self, plan: Plan) -> None:
        pass

    def submit(self, request: Request, method: str | None = None) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_result(fake_completion(request, time.perf_counter()))
        return future

    def probe(self) -> Future[Completion]:
        return self.submit(Request("probe", (1,), SamplingParams(max_new_tokens=1)))


def fake_completion(request: Request, began: float) -> Completion:
    tokens = fake_tokens(request)
    calls = max(len(tokens) - 1, 0)
    stats = DecodeStats(prefill_calls=1, decode_calls=calls, accept_lengths=[1] * calls)
    return Completion(request.request_id, tokens, FinishReason.LENGTH, stats, time.perf_counter() - began)


def fake_tokens(request: Request) -> tuple[int, ...]:
    """What FakeDecoder gives: up to max_new_tokens token ids."""
    settings = replace(request.sampling, eos_token_ids=frozenset())  # a set has no order of its own
    seed = _digest(f"{request.prompt_ids} {settings}")
    count = seed % request.sampling.max_new_tokens + 1
    return tuple(FIRST_TOKEN + _digest(f"{seed} {at}") % TOKENS for at in range(count))


def _digest(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode()))


@dataclass(frozen=True)
class Event:
    """One line of a process's log: `began` or `ended`, and "row id#sample"."""

    process: str
    kind: str
    row: str


def events(log: Path) -> Iterator[Event]:
    """What all processes noted, each process's in order."""
    for file in sorted(log.iterdir()):
        for line in file.read_text().splitlines():
            kind, row = line.split(" ", 1)
            yield Event(file.name, kind, row)
