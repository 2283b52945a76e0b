"""The engine actor's parts that need no Ray: the drafters that a configuration asks for."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_model

from esp_worker.drafters.probe import ProbeDrafter
from pipeline import actor
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

    monkeypatch.setattr(actor, "ProbeDrafter", Watched)
    config = DecoderConfig(**settings)
    assert [drafter.name for drafter in actor.make_drafters(config, tiny_model("llama"))] == ["esp", "ar"]
    want = config.model_dump(exclude={"method"}) | {"probe_owners": config.owner_count}
    want["table"] = tiny_model("llama").embedding_moments
    assert made == [want]
    assert settings.items() <= config.model_dump().items()


def test_plain_decoding_has_one_lane() -> None:
    drafters = actor.make_drafters(DecoderConfig(method="ar"), tiny_model("llama"))
    assert [drafter.name for drafter in drafters] == ["ar"]
