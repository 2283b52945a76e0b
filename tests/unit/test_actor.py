"""The actor's parts that need no Ray: drafters of a configuration, columns of a completion, a row beside its plain
decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tiny import tiny_model

from esp_worker.cost import CostKey, StepCost
from esp_worker.drafters.budgeted import BudgetedDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.types import Completion, DecodeStats, FinishReason, Request, SamplingParams, TokenLogprobs
from pipeline import actor
from pipeline.actor import first_divergence, logprob_columns, margin, margin_request
from pipeline.config import DecoderConfig


def request(**sampling: Any) -> Request:
    return Request("r", (1, 2), SamplingParams(**{"max_new_tokens": 10, **sampling}))


def completion(token_ids: Sequence[int], margins: Sequence[float] | None = None) -> Completion:
    """A completion with, at each position, two best tokens that lie `margins` apart."""
    logprobs = margins and tuple(TokenLogprobs(-1.0, ((7, -0.5), (8, -0.5 - m))) for m in margins)
    return Completion("r", tuple(token_ids), FinishReason.STOP, DecodeStats(), 1.0, logprobs=logprobs or None)


@pytest.mark.parametrize(
    ("method", "plain", "position", "asked"),
    [
        ([5, 6, 7], [5, 6, 7], None, None),
        ([5, 6, 7], [5, 8, 7], 1, [5]),
        ([4, 6, 7], [5, 6, 7], 0, []),
        ([5, 6, 9, 1, 2], [5, 6, 7], 2, [5, 6]),
        ([5, 6], [5, 6, 7], 2, None),  # it ends where plain decoding goes on: what was chosen there is not known
        ([5, 6, 7, 8], [5, 6, 7], 3, None),
        ([], [5, 6, 7], 0, None),
    ],
)
def test_the_two_best_tokens_are_asked_for_where_outputs_first_differ(
    method: list[int], plain: list[int], position: int | None, asked: list[int] | None
) -> None:
    assert first_divergence(tuple(method), tuple(plain)) == position
    got = margin_request(request(), completion(method), completion(plain))
    assert (got and got.prompt_ids) == (None if asked is None else (1, 2, *asked))
    assert got is None or got.sampling == SamplingParams(max_new_tokens=1, logprobs=2)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"repetition_penalty": 1.1}, {"logit_bias": ((5, 1.0),)}, {"min_new_tokens": 1}],
)
def test_no_margin_where_the_best_token_is_not_the_models(sampling: dict[str, Any]) -> None:
    assert margin_request(request(**sampling), completion([5]), completion([6])) is None


def test_margin() -> None:
    assert margin(completion([6], [0.25])) == 0.25


def test_logprob_columns() -> None:
    assert logprob_columns(None) == {"logprobs": None, "top_logprobs": None}
    assert logprob_columns(()) == {"logprobs": [], "top_logprobs": []}
    given = (TokenLogprobs(-1.5, ((3, -0.5), (4, -1.5))), TokenLogprobs(-2.0))
    assert logprob_columns(given) == {
        "logprobs": [-1.5, -2.0],
        "top_logprobs": [[{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -1.5}], []],
    }


SETTINGS = [
    {},
    {"tree": "static", "branches": [7, 2], "masks": 2, "prune": "deep", "ema": 0.2, "init": "last_k"},
    {
        "tree": "best_first",
        "block_complexity": 40,
        "probe_owners": 5,
        "init": "offset",
        "init_offset": 3,
        "impl": "naive",
    },
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_reaches_the_drafter(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    class Watched(ProbeDrafter):
        def __init__(self, embed: Any, **given: Any) -> None:
            made.append(given)
            super().__init__(embed, **given)

    monkeypatch.setattr(actor, "ProbeDrafter", Watched)
    config = DecoderConfig(**settings)
    assert [drafter.name for drafter in actor.make_drafters(config, tiny_model("llama"))] == ["esp", "ar"]
    want = config.model_dump(exclude={"method", "ngram", "depth", "lookahead"}) | {"probe_owners": config.owner_count}
    want["table"] = tiny_model("llama").embedding_moments
    assert made == [want]
    assert settings.items() <= config.model_dump().items()


def test_auto_takes_the_costs_of_steps_and_a_fixed_tree_does_not() -> None:
    model, asked = tiny_model("llama"), []

    def step_cost() -> StepCost:
        asked.append(True)
        return StepCost([1], [1, 2], [8], [[[1.0], [2.0]]], CostKey("m", "float64", "a CPU", 1, "stock"))

    fixed = actor.make_drafters(DecoderConfig(), model, step_cost)
    assert not asked
    auto = actor.make_drafters(DecoderConfig(block_complexity="auto", masks=2), model, step_cost)
    assert asked == [True]
    assert [drafter.name for drafter in auto] == [drafter.name for drafter in fixed] == ["esp", "ar"]
    assert isinstance(auto[0], BudgetedDrafter)
    assert auto[0].masks == 2


@pytest.mark.parametrize(
    ("settings", "reached"),
    [
        ({"method": "pld", "ngram": 2, "depth": 5}, {"_ngram": 2, "_depth": 5}),
        ({"method": "lade", "block_complexity": 60}, {"_size": 5, "_width": 8, "_guesses": 7}),
        ({"method": "stand", "ngram": 4, "block_complexity": 20}, {"_ngram": 4, "_nodes": 19}),
        ({"method": "recycle", "block_complexity": 12}, {"_nodes": 11}),
    ],
)
def test_a_baselines_settings_reach_it(settings: dict[str, Any], reached: dict[str, int]) -> None:
    made, plain = actor.make_drafters(DecoderConfig(**settings), tiny_model("llama"))
    assert (made.name, plain.name) == (settings["method"], "ar")
    assert reached.items() <= vars(made).items()


def test_plain_decoding_has_one_lane() -> None:
    drafters = actor.make_drafters(DecoderConfig(method="ar"), tiny_model("llama"))
    assert [drafter.name for drafter in drafters] == ["ar"]
