"""Drafters of a configuration."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_model

from esp_worker.cost import CostKey, StepCost
from esp_worker.drafters.budgeted import BudgetedDrafter
from esp_worker.drafters.probe import ProbeDrafter
from pipeline import decoder
from pipeline.config import DecoderConfig

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

    monkeypatch.setattr(decoder, "ProbeDrafter", Watched)
    config = DecoderConfig(**settings)
    assert [drafter.name for drafter in decoder.make_drafters(config, tiny_model("llama"))] == ["esp", "ar"]
    want = config.model_dump(exclude={"method"}) | {"probe_owners": config.owner_count}
    want["table"] = tiny_model("llama").embedding_moments
    assert made == [want]
    assert settings.items() <= config.model_dump().items()


def test_auto_takes_the_costs_of_steps_and_a_fixed_tree_does_not() -> None:
    model, asked = tiny_model("llama"), []

    def step_cost() -> StepCost:
        asked.append(True)
        return StepCost([1], [1, 2], [8], [[[1.0], [2.0]]], CostKey("m", "float64", "a CPU", 1, "stock"))

    fixed = decoder.make_drafters(DecoderConfig(), model, step_cost)
    assert not asked
    auto = decoder.make_drafters(DecoderConfig(block_complexity="auto", masks=2), model, step_cost)
    assert asked == [True]
    assert [drafter.name for drafter in auto] == [drafter.name for drafter in fixed] == ["esp", "ar"]
    assert isinstance(auto[0], BudgetedDrafter)
    assert auto[0].masks == 2


def test_plain_decoding_has_one_lane() -> None:
    drafters = decoder.make_drafters(DecoderConfig(method="ar"), tiny_model("llama"))
    assert [drafter.name for drafter in drafters] == ["ar"]
