"""P(a drafted token is the model's own) from what several sources say of it, learned while decoding.

A source's opinion of a candidate is one of a few codes ("the bigram's last answer gave it more than half"). The
log-odds are the sum of the codes' weights: sources that agree add up. Every candidate that stood where the model's
token is known is a lesson, whether or not a row was spent on it, so that learning costs no forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_RATE = 0.2  # of a weight's first steps; they shrink with the squared errors seen (AdaGrad)


@dataclass(frozen=True, slots=True)
class Candidate:
    """codes: of all sources, in their order; prob: P(the model takes it | it took the path down to here)."""

    token: int
    codes: tuple[int, ...]
    prob: float


class Odds:
    """Logistic regression over one code of each source. prior: the weights that learning begins with, by source and
    code; their last one is the bias."""

    def __init__(self, prior: Sequence[Sequence[float]], bias: float) -> None:
        self.weights = [list(source) for source in prior]
        self.bias = bias
        self._squares = [[1.0] * len(source) for source in prior]
        self._bias_square = 1.0

    def candidates(self, opinions: dict[int, list[int]]) -> list[Candidate]:
        """Of all that may stand at one place, best first; their probabilities sum to 1 at most. opinions: token ->
        codes."""
        weighed = [(token, tuple(codes), self._prob(codes)) for token, codes in opinions.items()]
        total = max(sum(prob for _, _, prob in weighed), 1.0)
        found = [Candidate(token, codes, prob / total) for token, codes, prob in weighed]
        return sorted(found, key=lambda candidate: -candidate.prob)

    def learn(self, candidates: Sequence[Candidate], token: int) -> None:
        """The model took `token` where these stood."""
        for candidate in candidates:
            error = (candidate.token == token) - candidate.prob
            square = error * error
            self._bias_square += square
            self.bias += _RATE * error / math.sqrt(self._bias_square)
            for weights, squares, code in zip(self.weights, self._squares, candidate.codes, strict=True):
                squares[code] += square
                weights[code] += _RATE * error / math.sqrt(squares[code])

    def _prob(self, codes: Sequence[int]) -> float:
        score = self.bias
        for weights, code in zip(self.weights, codes, strict=True):
            score += weights[code]
        return 1 / (1 + math.exp(-max(min(score, 30.0), -30.0)))
