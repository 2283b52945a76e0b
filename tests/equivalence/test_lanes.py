"""Two methods on one engine never share a step, and a failing step costs only the request that fails alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch
from tiny import VOCAB, mixed_requests, prompt, request, tiny_model

from equivalence.test_tokens import assert_equal, esp, expected
from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.drafters.base import Turn
from esp_worker.drafters.none import NoDrafter
from esp_worker.engine import Engine, RequestError
from esp_worker.model import CausalModel
from esp_worker.service import EngineService, ServiceClosedError
from esp_worker.tree import Draft
from esp_worker.types import Completion, Request, SamplingParams


def test_lanes_never_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = esp("llama", 3)
    steps: list[set[str]] = []
    forward = CausalModel.forward_block

    def watched(self: CausalModel, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        assert len(engine._table.sequences) == len(block.counts)
        steps.append({sequence.drafter.name for sequence in engine._table.sequences})
        return forward(self, cache, block, embeds)

    monkeypatch.setattr(CausalModel, "forward_block", watched)
    requests = mixed_requests()
    for item in requests:
        engine.submit(item, "esp")
        engine.submit(Request(f"{item.request_id}-ar", item.prompt_ids, item.sampling), "ar")
    done = []
    while engine.busy:
        done += engine.step()
    assert all(len(methods) == 1 for methods in steps)
    assert [*dict.fromkeys(method for (method,) in steps)] == ["esp", "ar"]  # the main method first, one switch
    assert_equal("llama", requests, [c for c in done if not c.request_id.endswith("-ar")])
    assert {c.request_id: c.token_ids for c in done if c.request_id.endswith("-ar")} == {
        f"{item.request_id}-ar": expected("llama", item).token_ids for item in requests
    }


def test_drafters_hear_whether_others_wait_for_a_slot() -> None:
    class Listening(NoDrafter):
        def draft_all(self, turns: Sequence[Turn], waiting: bool) -> list[Draft]:
            heard.append((len(turns), waiting))
            return super().draft_all(turns, waiting)

    heard: list[tuple[int, bool]] = []
    engine = Engine(tiny_model("llama"), [Listening()], slots=2)
    list(engine.generate(request(name, 5, max_new_tokens=4) for name in "abc"))
    assert heard == [(2, True)] * 3 + [(1, False)] * 3


def test_engine_time_is_shared_out_over_rows() -> None:
    done = list(esp("llama", 3).generate(mixed_requests()))
    assert all(0 < c.stats.engine_s <= c.latency_s for c in done)
    assert all(1 <= (c.stats.mean_batch or 0) <= 3 for c in done)
    assert max(c.stats.mean_batch or 0 for c in done) > 2


def test_those_that_decode_pay_alike_and_prompts_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def takes_a_second(self: CausalModel, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 1.0
        return forward(self, cache, block, embeds)

    forward = CausalModel.forward_block
    monkeypatch.setattr(CausalModel, "forward_block", takes_a_second)
    monkeypatch.setattr("esp_worker.engine.time.perf_counter", lambda: now)
    engine = esp("llama", 2, prefix_reuse=False)
    requests = [
        Request(str(i), prompt(8 + i, i), SamplingParams(max_new_tokens=new)) for i, new in enumerate((9, 2, 1))
    ]
    done = {c.request_id: c.stats for c in engine.generate(requests, "ar")}
    # passes: 8 + 9 prompt rows; one row each; one row beside 10; one row, six times
    assert done["0"].engine_s == pytest.approx(8 / 17 + 1 / 2 + 1 / 11 + 6)
    assert done["1"].engine_s == pytest.approx(9 / 17 + 1 / 2)
    assert done["2"].engine_s == pytest.approx(10 / 11)


@pytest.mark.parametrize(
    ("prompt_ids", "words"),
    [((), "no tokens"), ((3,) * 96, "at most 95 fit"), ((3, VOCAB), "outside the model's vocabulary")],
)
def test_impossible_requests_are_refused(prompt_ids: tuple[int, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        esp("llama").submit(Request("bad", prompt_ids, SamplingParams(max_new_tokens=4)))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"slots": 0}, "slots"), ({"max_length": 97}, "max_length"), ({"max_length": 1}, "max_length")],
)
def test_impossible_engines_are_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        esp("llama", **{"slots": 2, **options})


def test_unknown_method_is_an_error() -> None:
    with pytest.raises(ValueError, match="not one of this engine's: esp, ar"):
        esp("llama").submit(request("x", 3), "medusa")


@pytest.fixture
def service() -> Iterator[EngineService]:
    with EngineService(esp("llama", 3)) as running:
        yield running


def test_service_serves_many_threads(service: EngineService) -> None:
    """Equal ids from different threads stay apart."""
    results: dict[int, list[tuple[int, ...]]] = {}
    requests = mixed_requests()

    def submit_all(thread: int) -> None:
        futures = [service.submit(item, ("esp", "ar")[thread % 2]) for item in requests]
        results[thread] = [future.result(timeout=60).token_ids for future in futures]

    threads = [threading.Thread(target=submit_all, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want = [expected("llama", item).token_ids for item in requests]
    assert [results[i] for i in range(4)] == [want] * 4


def test_service_refuses_one_and_serves_the_others(service: EngineService) -> None:
    bad = service.submit(Request("bad", (3,) * 200, SamplingParams(max_new_tokens=4)))
    good = service.submit(request("good", 5))
    with pytest.raises(RequestError, match="200 tokens"):
        bad.result(timeout=60)
    assert good.result(timeout=60).request_id == "good"


def test_only_the_request_that_fails_alone_gets_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that breaks the forward pass in mid-decoding, beside others: they start again and lose nothing."""
    forward = CausalModel.forward_block
    breaking_length = 83  # a context that only the bad row reaches

    def fragile(self: CausalModel, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        if max(block.lengths) >= breaking_length:
            raise RuntimeError("injected failure")
        return forward(self, cache, block, embeds)

    monkeypatch.setattr(CausalModel, "forward_block", fragile)
    requests = mixed_requests()
    bad = request("bad", 80, max_new_tokens=10)
    with EngineService(esp("llama", 4)) as service:
        futures = [service.submit(item) for item in [*requests[:3], bad, *requests[3:]]]
        results = [future.exception(timeout=60) or future.result() for future in futures]
    failed = results.pop(3)
    assert isinstance(failed, RuntimeError)
    assert str(failed) == "injected failure"
    assert_equal("llama", requests, [result for result in results if isinstance(result, Completion)])


def test_a_row_that_ended_in_the_step_that_failed_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token ends the first row while the second one's prefill fails in the same step."""
    forward = CausalModel.forward_block

    def fragile(self: CausalModel, cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
        if block.width >= 50:
            raise RuntimeError("injected failure")
        return forward(self, cache, block, embeds)

    monkeypatch.setattr(CausalModel, "forward_block", fragile)
    with EngineService(esp("llama", 4)) as service:
        short, bad = service.submit(request("short", 5, max_new_tokens=1)), service.submit(request("bad", 50))
        assert short.result(timeout=60).token_ids == expected("llama", request("short", 5, max_new_tokens=1)).token_ids
        assert isinstance(bad.exception(timeout=60), RuntimeError)


def test_closing_ends_what_has_not_finished() -> None:
    service = EngineService(esp("llama", 1))
    futures = [service.submit(request(f"r{i}", 30, max_new_tokens=60)) for i in range(20)]
    service.close()
    with pytest.raises(ServiceClosedError):
        futures[-1].result(timeout=60)
    with pytest.raises(ServiceClosedError):
        service.submit(request("late", 3))


def test_a_cancelled_request_costs_no_other(service: EngineService) -> None:
    requests = mixed_requests()
    futures = [service.submit(item) for item in requests]
    cancelled = [future.cancel() for future in futures[1::2]]
    done = [future.result(timeout=60) for future in futures if not future.cancelled()]
    assert len(done) >= 4
    assert len(done) == len(futures) - sum(cancelled)
    again = [service.submit(item).result(timeout=60) for item in requests]
    assert_equal("llama", requests, again)


def test_every_future_ends_when_the_service_closes() -> None:
    service = EngineService(esp("llama", 1))
    futures = [service.submit(request(f"r{i}", 30, max_new_tokens=60)) for i in range(12)]
    for future in futures[1::3]:
        future.cancel()
    service.close()
    assert all(future.done() for future in futures)


def test_a_submit_that_races_the_close_is_answered() -> None:
    """Submitters keep going until they are refused: what was taken before that must end."""
    service = EngineService(esp("llama", 2))
    taken: list[Future[Completion]] = []

    def submit_until_refused() -> None:
        with contextlib.suppress(ServiceClosedError):
            while True:
                taken.append(service.submit(request("x", 3, max_new_tokens=2)))

    threads = [threading.Thread(target=submit_until_refused) for _ in range(4)]
    for thread in threads:
        thread.start()
    service.close()
    for thread in threads:
        thread.join()
    assert all(future.done() for future in taken)


def test_a_request_of_nonsense_is_its_own_fault(service: EngineService) -> None:
    nonsense = service.submit(Request("bad", (3, None), SamplingParams(max_new_tokens=4)))
    assert isinstance(nonsense.exception(timeout=60), TypeError)
    assert service.submit(request("good", 5)).result(timeout=60).token_ids


def test_a_move_that_fails_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails once while a gap is closed; what had ended and what was running both come back."""
    copy, failures = SlotCache.copy, [1]

    def fragile(self: SlotCache, *columns: int) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("injected failure")
        copy(self, *columns)

    monkeypatch.setattr(SlotCache, "copy", fragile)
    requests = [request(f"m{i}", 4 + i, max_new_tokens=19) for i in range(5)]  # drafts decide who ends first
    with EngineService(esp("llama", 4)) as service:
        futures = [service.submit(item) for item in requests]
        assert_equal("llama", requests, [future.result(timeout=60) for future in futures])
    assert not failures
