"""P(a drafted token is the model's own) from what several sources say of it, learned while decoding.

A source's opinion of a candidate is one of a few codes ("the bigram's last answer gave it more than half"). The
log-odds are the sum of the codes' weights: sources that agree add up. Every candidate that stood where the model's
token is known is a lesson, whether or not a row was spent on it, so that learning costs no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

_FAINT = 0.004  # what is so improbable teaches nothing by not being taken
_RATE = 0.2  # of a weight's first steps; they shrink with the squared errors seen (AdaGrad)

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
        self.weights = [list(source) for source in prior]
        self.bias = bias
        self._squares = [[1.0] * len(source) for source in prior]
        self._bias_square = 1.0

    def place(self, opinions: Sequence[Opinion]) -> Place:
        """All that the sources name; their probabilities sum to 1 at most."""
        unnamed = self.bias  # the score of a token that nobody names
        for weights, (others, _) in zip(self.weights, opinions, strict=True):
            unnamed += weights[others]
        scores: dict[int, float] = {}
        for weights, (others, named) in zip(self.weights, opinions, strict=True):
            for token, code in named.items():
                scores[token] = scores.get(token, unnamed) + weights[code] - weights[others]
        probs = [1 / (1 + math.exp(-min(max(score, -30.0), 30.0))) for score in scores.values()]
        total = max(sum(probs), 1.0)
        candidates = [(token, prob / total) for token, prob in zip(scores, probs, strict=True)]
        candidates.sort(key=itemgetter(1), reverse=True)
        return Place(opinions, candidates)

    def learn(self, place: Place, token: int) -> None:
        """The model took `token` there."""
        for candidate, prob in place.candidates:
            if prob < _FAINT and candidate != token:
                continue
            error = (candidate == token) - prob
            square = error * error
            self._bias_square += square
            self.bias += _RATE * error / math.sqrt(self._bias_square)
            for weights, squares, (others, named) in zip(self.weights, self._squares, place.opinions, strict=True):
                code = named.get(candidate, others)
                squares[code] += square
                weights[code] += _RATE * error / math.sqrt(squares[code])
