"""Memory that runs out, and requests that go, at any place of the engine: every other row is the reference's, once."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import prompt, request

from equivalence.test_tokens import esp, expected
from esp_worker import step as step_module
from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.sequence import ActiveSequence
from esp_worker.service import EngineService
from esp_worker.types import Completion, Request, SamplingParams

POINTS: dict[str, tuple[Any, str]] = {
    "forward": (CausalModel, "forward_block"),
    "embed": (CausalModel, "embed"),
    "logits": (CausalModel, "logits"),
    "start": (ProbeDrafter, "start"),
    "observe": (ProbeDrafter, "observe"),
    "copy": (SlotCache, "copy"),
    "resize": (SlotCache, "resize"),
    "compact": (SlotCache, "compact"),
    "select": (step_module, "select_token"),
    "logprobs": (step_module, "token_logprobs"),
}
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError("no memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried ..."),
]


def fail_sometimes(monkeypatch: pytest.MonkeyPatch, point: str, dice: random.Random, times: int) -> list[int]:
    """Let up to `times` calls of a point fail, some after they have done their work."""
    owner, name = POINTS[point]
    original: Callable[..., Any] = getattr(owner, name)
    failures: list[int] = []
    calls = [0]

    def fragile(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        fails = len(failures) < times and dice.random() < 0.25
        late = fails and dice.random() < 0.5
        if fails:
            failures.append(calls[0])
        if fails and not late:
            raise dice.choice(ERRORS)
        result = original(*arguments, **options)
        if late:
            raise dice.choice(ERRORS)
        return result

    monkeypatch.setattr(owner, name, fragile)
    return failures


def mixed(dice: random.Random) -> list[Request]:
    head = prompt(dice.choice([0, 10]), seed=8)
    return [
        request_of(f"r{i}", (*head, *prompt(dice.choice([1, 4, 9, 30]), seed=i)), i, dice)
        for i in range(dice.randint(2, 9))
    ]


def request_of(name: str, ids: tuple[int, ...], seed: int, dice: random.Random) -> Request:
    params = SamplingParams(
        max_new_tokens=dice.choice([0, 1, 6, 20]),
        temperature=dice.choice([0.0, 1.0]),
        presence_penalty=dice.choice([0.0, 0.5]),
        seed=seed,
        eos_token_ids=frozenset(dice.sample(range(14), 1)),
        logprobs=dice.choice([None, 0, 2]),
    )
    return Request(name, ids, params)


def check(item: Request, got: Completion) -> None:
    want = expected("llama", item)
    assert got.token_ids == want.token_ids
    assert got.finish_reason == want.finish_reason
    stats = got.stats
    assert sum(stats.accept_lengths) == max(len(got.token_ids) - 1, 0)
    assert stats.decode_calls == len(stats.accept_lengths)
    assert stats.mean_batch is None or stats.mean_batch >= 1
    if got.logprobs is not None:
        assert len(got.logprobs) == len(got.token_ids)
        for at, token, logits in zip(got.logprobs, got.token_ids, want.logits, strict=True):
            assert at.logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("point", POINTS)
def test_memory_that_runs_out_anywhere_loses_nothing(point: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esp_worker.cache.COLUMN_STEP", 16)
    monkeypatch.setattr("esp_worker.engine.BLOCK_COLUMNS", 32)
    dice = random.Random(f"{point} {seed}")
    asked = mixed(dice)
    for item in asked:
        expected("llama", item)  # before anything can fail
    column = esp("llama")._table.cache.column_bytes
    runner = esp("llama", 8, prefill_tokens=dice.choice([5, 64]), cache_bytes=dice.choice([128, 300, 9000]) * column)
    with monkeypatch.context() as patch:
        fail_sometimes(patch, point, dice, times=3)  # 8 slots can be halved three times
        done = {c.request_id: c for c in runner.generate(asked, dice.choice(["esp", "esp", "ar"]))}
    assert sorted(done) == sorted(item.request_id for item in asked)
    for item in asked:
        check(item, done[item.request_id])
    assert not runner.busy


def test_every_point_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would say nothing of a point that is never called."""
    for point in POINTS:
        with monkeypatch.context() as patch:
            patch.setattr("esp_worker.cache.COLUMN_STEP", 16)
            failures = fail_sometimes(patch, point, random.Random(1), times=2)
            asked = [request(f"r{i}", 5, max_new_tokens=9 + i, logprobs=0, temperature=1.0) for i in range(9)]
            assert len(list(esp("llama", 4).generate(asked))) == 9
        assert failures, point


def test_a_row_that_never_fits_fails_alone_and_the_slots_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CausalModel.forward_block

    def fragile(self: CausalModel, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        if block.columns > 60:
            raise ERRORS[0]
        return forward(self, cache, block, embeds)

    small = [request(f"s{i}", 4 + i, max_new_tokens=12) for i in range(12)]
    want = [expected("llama", item).token_ids for item in small]
    monkeypatch.setattr(CausalModel, "forward_block", fragile)
    with EngineService(esp("llama", 8, masks=1, block_complexity=10)) as service:
        huge = service.submit(request("huge", 61))
        futures = [service.submit(item) for item in small[:4]]
        assert isinstance(huge.exception(timeout=60), torch.OutOfMemoryError)
        done = [future.result(timeout=60) for future in futures]
        later = [service.submit(item) for item in small[4:]]
        done += [future.result(timeout=60) for future in later]
    assert [c.token_ids for c in done] == want
    assert max(c.stats.mean_batch or 0 for c in done[4:]) > 4


def test_memory_that_runs_out_at_the_first_step_leaves_room_for_several() -> None:
    runner = esp("llama", 8)
    with pytest.MonkeyPatch.context() as patch:
        resize, first = SlotCache.resize, [True]

        def fails_first(self: SlotCache, slots: int, columns: int) -> None:
            if first:
                first.pop()
                raise ERRORS[0]
            resize(self, slots, columns)

        patch.setattr(SlotCache, "resize", fails_first)
        done = list(runner.generate([request(f"r{i}", 5 + i) for i in range(8)]))
    assert runner.slots == 4
    assert max(c.stats.mean_batch or 0 for c in done) > 2


def test_waiting_for_futures_ends_when_they_are_cancelled() -> None:
    with EngineService(esp("llama", 2)) as service:
        futures = [service.submit(request(f"e{i}", 5, max_new_tokens=80)) for i in range(6)]
        for future in futures[::2]:
            future.cancel()
        done, left = wait(futures, timeout=60)
        assert not left
        assert len(done) == 6


def test_cancelling_rows_that_must_run_alone_lets_others_share_steps() -> None:
    runner = esp("llama", 4)
    for i in range(4):
        runner.submit(request(f"a{i}", 5))
    runner.step()
    runner.restart_alone()
    for i in range(4):
        runner.cancel(f"a{i}")
    assert not runner.busy
    done = list(runner.generate([request(f"b{i}", 5 + i) for i in range(4)]))
    assert min(c.stats.mean_batch or 0 for c in done) > 2


def test_a_closed_generator_leaves_others_completions() -> None:
    runner = esp("llama", 2)
    mine = replace(request("mine", 5, max_new_tokens=4), request_id="same name")
    runner.submit(mine)
    generator = runner.generate([replace(mine), request("longer", 5, max_new_tokens=9)])
    next(generator)
    generator.close()
    assert runner.busy
    done: list[Completion] = []
    while runner.busy:
        done += runner.step()
    assert [c.token_ids for c in done] == [expected("llama", mine).token_ids]


class Watched(list[int]):
    """A list that counts how often its items are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_a_long_output_costs_the_same_at_every_token() -> None:
    params = SamplingParams(max_new_tokens=1001)
    sequence = ActiveSequence(Request("r", (1,), params), NoDrafter(), limit=1001)
    sequence.commit([3])
    lengths = sequence.stats.accept_lengths = Watched()
    for _ in range(1000):
        sequence.commit_run([4], [])
    assert len(lengths) == 1000
    assert lengths.reads < 5 * 1000


def test_an_engine_can_be_dropped_while_it_has_work() -> None:
    runner: Engine = esp("llama", 2)
    runner.submit(request("left", 5))
    runner.step()
    runner.drop_running()
    assert not runner.busy
