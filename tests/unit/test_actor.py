"""The actor's parts that need no Ray: drafters of a configuration, columns of a completion, a row beside its plain
decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny import tiny_model

from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.types import Completion, DecodeStats, FinishReason, Request, SamplingParams, TokenLogprobs
from pipeline import actor
from pipeline.actor import divergence_margin, first_divergence, logprob_columns, plain_request
from pipeline.config import DecoderConfig


def request(**sampling: Any) -> Request:
    return Request("r", (1, 2), SamplingParams(**{"max_new_tokens": 10, **sampling}))


def completion(token_ids: Sequence[int], margins: Sequence[float] | None = None) -> Completion:
    """A completion with, at each position, two best tokens that lie `margins` apart."""
    logprobs = margins and tuple(TokenLogprobs(-1.0, ((7, -0.5), (8, -0.5 - m), (9, -9.0))) for m in margins)
    return Completion("r", tuple(token_ids), FinishReason.STOP, DecodeStats(), 1.0, logprobs=logprobs or None)


@pytest.mark.parametrize(
    ("method", "plain", "position", "margin"),
    [
        ([5, 6, 7], [5, 6, 7], None, None),
        ([5, 6, 7], [5, 8, 7], 1, 0.25),
        ([4, 6, 7], [5, 6, 7], 0, 0.5),
        ([5, 6, 9], [5, 6, 7], 2, 0.0),
        ([5, 6, 9, 1, 2], [5, 6, 7], 2, 0.0),
        ([5, 6], [5, 6, 7], 2, None),  # it ends where plain decoding goes on: what was chosen there is not known
        ([5, 6, 7, 8], [5, 6, 7], 3, None),
        ([], [5, 6, 7], 0, None),
    ],
)
def test_margin_at_the_first_divergence(
    method: list[int], plain: list[int], position: int | None, margin: float | None
) -> None:
    beside = completion(plain, [0.5, 0.25, 0.0][: len(plain)])
    assert first_divergence(tuple(method), tuple(plain)) == position
    assert divergence_margin(request(), completion(method), beside) == margin


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"repetition_penalty": 1.1}, {"logit_bias": ((5, 1.0),)}, {"min_new_tokens": 1}],
)
def test_no_margin_where_the_best_token_is_not_the_models(sampling: dict[str, Any]) -> None:
    drawn = request(**sampling, logprobs=2)
    assert divergence_margin(drawn, completion([5]), completion([6], [0.5])) is None
    assert plain_request(drawn) == drawn


@pytest.mark.parametrize(("wanted", "asked"), [(None, 2), (0, 2), (1, 2), (2, 2), (5, 5)])
def test_plain_decoding_is_asked_for_what_the_margin_needs(wanted: int | None, asked: int) -> None:
    row = request(logprobs=wanted, seed=4)
    assert plain_request(row) == replace(row, sampling=replace(row.sampling, logprobs=asked))


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
    want = config.model_dump(exclude={"method"}) | {"probe_owners": config.owner_count}
    want["table"] = tiny_model("llama").embedding_moments
    assert made == [want]
    assert settings.items() <= config.model_dump().items()


def test_plain_decoding_has_one_lane() -> None:
    drafters = actor.make_drafters(DecoderConfig(method="ar"), tiny_model("llama"))
    assert [drafter.name for drafter in drafters] == ["ar"]
