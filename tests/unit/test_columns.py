"""Columns of a completion, and a row beside its plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from esp_worker.types import Completion, DecodeStats, FinishReason, Request, SamplingParams, TokenLogprobs
from pipeline.columns import first_divergence, logprob_columns, margin, margin_request


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
