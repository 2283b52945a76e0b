"""P(a drafted token is the model's own) from what several sources say of it, learned while decoding.

A source's opinion of a candidate is one of a few codes ("the bigram's last answer gave it more than half"). The
log-odds are the sum of the codes' weights: sources that agree add up. Every candidate that stood where the model's
token is known is a lesson, whether or not a row was spent on it, so that learning costs no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

_FAINT = 0.004  # what is so improbable teaches nothing by not being taken
_RATE = 0.1  # of a weight's first steps; they shrink with the squared errors seen (AdaGrad)

# Codes: the source knows nothing here; it does not name the token; from NAMED on, how it names it.
NOTHING, NOT_NAMED, NAMED = 0, 1, 2
BINS = 7  # codes of a source that gives probabilities: 1, above 1/2, above 1/4, ..


def named_codes(probs: np.ndarray) -> np.ndarray:
    """Codes, of the same shape, of tokens that a source names with these probabilities."""
    _, exponents = np.frexp(np.maximum(probs, 1e-30))
    return (NAMED + np.clip(1 - exponents, 0, BINS - 1)).astype(np.int8)


class Answer(NamedTuple):
    """A source's most probable tokens, with their codes and log-probabilities."""

    tokens: list[int]
    codes: list[int]
    logprobs: np.ndarray


class Opinion(NamedTuple):
    """What a source says of every token at one place: the codes of those that it names, and that of all others."""

    others: int
    named: Mapping[int, int]


SILENT = Opinion(NOTHING, {})


class Place(NamedTuple):
    """Where one of some tokens may stand: the sources' opinions, in their order, and the candidates, best first, with
    P(the model takes it | it took the path down to here)."""

    opinions: Sequence[Opinion]
    candidates: list[tuple[int, float]]


class Odds:
    """Logistic regression over one code of each source. prior: the weights that learning begins with, by source and
    code, and the bias."""

    def __init__(self, prior: Sequence[Sequence[float]], bias: float) -> None:
        self._starts = np.cumsum([0, *map(len, prior)])  # of each source's codes among all; behind them the bias
        self._all = np.array([*(weight for source in prior for weight in source), bias])
        self._squares = np.ones(len(self._all))
        self._weights, self._bias = self._by_source()

    def _by_source(self) -> tuple[list[list[float]], float]:
        """The weights as `place` reads them, and the bias."""
        weights, starts = self._all.tolist(), self._starts.tolist()
        return [weights[start:end] for start, end in pairwise(starts)], weights[-1]

    def place(self, opinions: Sequence[Opinion]) -> Place:
        """All that the sources name; their probabilities sum to 1 at most."""
        unnamed = self._bias  # the score of a token that nobody names
        for weights, (others, _) in zip(self._weights, opinions, strict=True):
            unnamed += weights[others]
        scores: dict[int, float] = {}
        for weights, (others, named) in zip(self._weights, opinions, strict=True):
            for token, code in named.items():
                scores[token] = scores.get(token, unnamed) + weights[code] - weights[others]
        probs = [1 / (1 + math.exp(-min(max(score, -30.0), 30.0))) for score in scores.values()]
        total = max(sum(probs), 1.0)
        candidates = [(token, prob / total) for token, prob in zip(scores, probs, strict=True)]
        candidates.sort(key=itemgetter(1), reverse=True)
        return Place(opinions, candidates)

    def learn(self, lessons: Iterable[tuple[Place, int]]) -> None:
        """Of places, each with the token that the model took there: one step of all weights."""
        codes: list[int] = []
        errors: list[float] = []
        for (opinions, candidates), token in lessons:
            for candidate, prob in candidates:
                if prob < _FAINT and candidate != token:
                    continue
                errors.append((candidate == token) - prob)
                codes += [named.get(candidate, others) for others, named in opinions]
        if not errors:
            return
        sources, of_bias = len(self._weights), len(self._all) - 1
        spoke = np.full((len(errors), sources + 1), of_bias)  # of each candidate, the weights of its score
        spoke[:, :sources] = self._starts[:-1] + np.array(codes).reshape(-1, sources)
        each = np.repeat(errors, sources + 1)
        self._squares += np.bincount(spoke.ravel(), each * each, len(self._all))
        self._all += _RATE * np.bincount(spoke.ravel(), each, len(self._all)) / np.sqrt(self._squares)
        self._weights, self._bias = self._by_source()
