"""Drafters of a configuration: every setting reaches its method, and nothing is measured that nobody needs."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_model

from esp_worker.cost import CostKey, StepCost
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.budgeted import BudgetedDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.prime import Successors, prime
from pipeline import methods
from pipeline.config import DecoderConfig

COST = StepCost([1], [1, 2], [8], [[[1.0], [2.0]]], CostKey("m", "float64", "a CPU", 1, "stock"))

SETTINGS = [
    {"block_complexity": 30},
    {"tree": "static", "branches": [7, 2], "masks": 2, "prune": "deep", "ema": 0.2, "init": "last_k"},
    {
        "tree": "best_first",
        "block_complexity": 40,
        "probe_owners": 5,
        "init": "offset",
        "init_offset": 3,
        "init_moments": "table",
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

    monkeypatch.setattr(methods, "ProbeDrafter", Watched)
    config = DecoderConfig(method="esp", **settings)
    assert [drafter.name for drafter in drafters_of(config)] == ["esp", "ar"]
    want = config.model_dump(exclude={"method", "ngram", "depth", "lookahead"}) | {"probe_owners": config.owner_count}
    want["table"] = tiny_model("llama").embedding_moments
    assert made == [want]
    assert settings.items() <= config.model_dump().items()


def drafters_of(config: DecoderConfig, asked: list[str] | None = None) -> list[Drafter]:
    asked = [] if asked is None else asked
    model = tiny_model("llama")

    def step_cost() -> StepCost:
        asked.append("step costs")
        return COST

    def successors() -> Successors:
        asked.append("successors")
        return prime(model)

    return methods.make_drafters(config, model, step_cost, successors)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, ["step costs", "successors"]),
        ({"block_complexity": 30}, ["successors"]),
        ({"method": "esp", "masks": 2}, ["step costs"]),
        ({"method": "esp", "block_complexity": 30}, []),
        ({"method": "recycle"}, []),
        ({"method": "ar"}, []),
    ],
)
def test_only_what_a_method_needs_is_measured(settings: dict[str, Any], wanted: list[str]) -> None:
    asked: list[str] = []
    drafters_of(DecoderConfig(**settings), asked)
    assert asked == wanted


def test_auto_is_a_budget_over_the_same_method() -> None:
    auto = drafters_of(DecoderConfig(method="esp", block_complexity="auto", masks=2))
    assert [drafter.name for drafter in auto] == ["esp", "ar"]
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
    made, plain = drafters_of(DecoderConfig(**settings))
    assert (made.name, plain.name) == (settings["method"], "ar")
    assert reached.items() <= vars(made).items()


def test_plain_decoding_has_one_lane() -> None:
    assert [drafter.name for drafter in drafters_of(DecoderConfig(method="ar"))] == ["ar"]
