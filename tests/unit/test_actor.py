"""What the actor makes of completions: columns, and how a row is set beside its plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from esp_worker.types import Completion, DecodeStats, FinishReason, Request, SamplingParams, TokenLogprobs
from pipeline.actor import divergence_margin, first_divergence, logprob_columns, plain_request


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


def testlogprob_columns() -> None:
    assert logprob_columns(None) == {"logprobs": None, "top_logprobs": None}
    assert logprob_columns(()) == {"logprobs": [], "top_logprobs": []}
    given = (TokenLogprobs(-1.5, ((3, -0.5), (4, -1.5))), TokenLogprobs(-2.0))
    assert logprob_columns(given) == {
        "logprobs": [-1.5, -2.0],
        "top_logprobs": [[{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -1.5}], []],
    }
