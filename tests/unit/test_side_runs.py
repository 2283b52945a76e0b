"""jobs.side_runs: which steps a run's steady phase lies between, and what a side's profile counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tiny import prompt, request, tiny_model
from torch import nn

import esp_worker.model
from esp_worker.drafters.none import NoDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams
from jobs import watch
from jobs.side_runs import Moment, Run, SideRuns, Timing, run
from jobs.sides import Side
from pipeline.config import parse_decoder


def decoded(limits: list[int], slots: int) -> Run:
    requests = [Request(str(i), prompt(5, i), SamplingParams(max_new_tokens=limit)) for i, limit in enumerate(limits)]
    return run(Engine(tiny_model("llama"), [NoDrafter()], slots=slots), requests)


def test_the_steady_phase_lies_between_the_ends_of_the_first_and_the_last_full_step() -> None:
    """The first step of each is its prefill. Two run to the end of the fourth, where the short one ends; the next one
    joins the long one for as many; two steps more are the long one's alone."""
    found = decoded([10, 4, 4], slots=2)
    assert found.full is not None
    first, last = found.full
    assert (first.tokens, last.tokens) == (1 + 1, 8 + 4 + 4)
    assert 0 < first.seconds < last.seconds < found.seconds
    assert sorted(len(completion.token_ids) for completion in found.done) == [4, 4, 10]


@pytest.mark.parametrize(
    ("limits", "slots"),
    [([4, 4], 2), ([4], 2), ([1, 1, 1], 2)],
    ids=["a prompt a slot", "slots left over", "one step alone is full"],
)
def test_without_a_steady_phase_there_is_no_figure(limits: list[int], slots: int) -> None:
    found = decoded(limits, slots)
    timing = Timing()
    timing.add(found)
    assert found.full is None
    assert (timing.steady_tokens_per_s, timing.tail_seconds) == (None, None)


def test_figures_are_medians_of_the_repeats() -> None:
    timing = Timing()
    for seconds, last in ((9.0, Moment(5.0, 50)), (10.0, Moment(3.0, 50)), (12.0, Moment(11.0, 50))):
        timing.add(Run(seconds, [], (Moment(1.0, 10), last)))
    assert timing.steady_tokens_per_s == pytest.approx(40 / 4)
    assert timing.tail_seconds == pytest.approx(4)


def test_a_profile_is_of_decode_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only these move: 21 linear layers, 3 layers' attention, lm_head, a drafting, and what else a pass
    does. Passes that prefill take so long that nothing else would show beside them: the first, and that of the
    second prompt, which waits for what both begin with and so meets the first's decoding."""
    now = 0.0

    def takes(owner: Any, name: str, seconds: Callable[..., float]) -> None:
        real = getattr(owner, name)

        def work(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds(*args)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, work)

    takes(nn.Linear, "forward", lambda *_: 1.0)
    takes(esp_worker.model, "tree_attention", lambda *_: 2.0)
    takes(NoDrafter, "draft_all", lambda *_: 3.0)
    takes(CausalModel, "forward_block", lambda _, cache, block, embeds: 4.0 if block.rows <= 2 else 1e6)
    monkeypatch.setattr(watch.time, "perf_counter", lambda: now)

    def unasked() -> Any:
        raise AssertionError("plain decoding needs no step costs and no successors")

    first, other = request("a", 30, max_new_tokens=4), request("other", 40)
    second = Request("b", first.prompt_ids[:20] + prompt(9, 7), SamplingParams(max_new_tokens=9))
    requests = [first, second, other]
    runs = SideRuns(tiny_model("llama"), requests, unasked, unasked)
    profile = runs.profile(Side(parse_decoder({"method": "ar"}), slots=2))
    assert profile is not None
    assert profile.parts == {"linears": 21, "attention": 6, "lm_head": 1, "draft_verify": 3, "other": 4}
    assert 1 <= profile.rows <= 2
