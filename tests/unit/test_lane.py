"""Who gets the next free slot: those that had one, then the largest limits, then whoever came first."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from tiny import prompt, tiny_model

from esp_worker.drafters.none import NoDrafter
from esp_worker.engine import Engine
from esp_worker.lane import Lane
from esp_worker.sequence import ActiveSequence
from esp_worker.types import Request, SamplingParams


def lane_of(*limits: int) -> tuple[Lane, list[ActiveSequence]]:
    lane = Lane(NoDrafter())
    sequences = [
        ActiveSequence(Request(str(limit), (1,), SamplingParams(limit)), lane.drafter, limit) for limit in limits
    ]
    for sequence in sequences:
        lane.add(sequence)
    return lane, sequences


def taken(lane: Lane) -> list[ActiveSequence]:
    found = []
    while lane:
        assert lane.head in list(lane)
        found.append(lane.head)
        assert lane.pop() is found[-1]
    return found


def test_larger_limits_come_first_and_equal_ones_as_they_came() -> None:
    lane, (a, b, c, d, e) = lane_of(8, 64, 8, 96, 64)
    assert len(lane) == 5
    assert taken(lane) == [d, b, e, a, c]
    with pytest.raises(IndexError):
        _ = lane.head


def test_what_has_lost_its_slot_comes_before_all_others_in_its_own_order() -> None:
    lane, (a, b, c, d, e) = lane_of(8, 64, 8, 96, 4)
    first = [lane.pop(), lane.pop()]
    lane.put_back(first)
    later, (f, g) = lane_of(2, 3)
    assert len(later) == 2
    lane.put_back([f, g])
    assert taken(lane) == [f, g, d, b, a, c, e]


def decoded(requests: Iterable[Request]) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Outputs, steps, and those of them that left a slot empty."""
    engine = Engine(tiny_model("llama"), [NoDrafter()], slots=4)
    for request in requests:
        engine.submit(request)
    outputs: dict[str, tuple[int, ...]] = {}
    steps = empty = 0
    while engine.busy:
        done = engine.step()
        outputs |= {completion.request_id: completion.token_ids for completion in done}
        steps += 1
        empty += len(engine.running) + len(done) < engine.slots
    return outputs, steps, empty


def test_a_long_one_that_comes_last_does_not_run_on_beside_empty_slots() -> None:
    """Twelve short ones keep three slots busy for nearly as long as the long one needs the fourth, whenever it comes.
    Tokens never depend on the order."""
    limits = [10] * 12 + [41]
    requests = [Request(str(i), prompt(5, i), SamplingParams(max_new_tokens=limit)) for i, limit in enumerate(limits)]
    outputs, steps, empty = decoded(requests)
    assert {len(tokens) for tokens in outputs.values()} == {10, 41}
    assert (steps, empty) == (41, 1)
    shuffled = random.Random(1).sample(requests, len(requests))
    assert decoded(shuffled) == (outputs, steps, empty)
