"""How many rows a step is worth, for trees whose probabilities are estimates already (drafters/hybrid.py).

B sequences in a step, W rows of each (the step is as wide as its widest sequence). As in budget.py, choices change what
a step costs, never its tokens, and there is no clock here: times come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from esp_worker.tree import TokenTree

MAX_ROWS = 64
NO_TREE = 2.0  # no P reaches it


class Rows(Protocol):
    """Chooses the width of each step."""

    most: int  # rows of a sequence

    def least(self, batch: int, context: int) -> float:
        """P of a node below which no row is worth it; above 1: none is, whatever could be drafted."""
        ...

    def choose(self, trees: Sequence[TokenTree], context: int) -> int:
        """Rows of each sequence in the next step. trees: the largest that each could verify; context: tokens of the
        longest one's."""
        ...

    def spent(self, seconds: float, tokens: int) -> None:
        """What the step that was chosen last took and gave."""
        ...


class FixedRows:
    """Always the same."""

    def __init__(self, rows: int) -> None:
        self.most = rows

    def least(self, batch: int, context: int) -> float:
        return 1e-4

    def choose(self, trees: Sequence[TokenTree], context: int) -> int:
        return self.most

    def spent(self, seconds: float, tokens: int) -> None:
        return None


class _Costs(Protocol):
    """cost.StepCost, as far as it is needed here."""

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray: ...


class BestRows:
    """The width of most expected tokens a second: one row, plain decoding's, where no draft pays.

    The table's times are corrected by what plain and wider steps really take; while steps are wide, every
    PLAIN_EVERY-th is plain, so that the comparison stays fresh. Where steps have been plain for a time, trees are
    looked at in every LOOK_EVERY-th step alone.
    """

    PLAIN_EVERY, LOOK_EVERY = 64, 4
    GAIN = 1.02  # over plain decoding, below which a step stays plain
    _RATE = 0.1

    def __init__(self, cost: _Costs, most: int = MAX_ROWS) -> None:
        self._cost, self.most = cost, most
        self._widths = np.arange(1, most + 1)
        self._off = {False: 1.0, True: 1.0}  # measured seconds in the table's, of plain and of wide steps
        self._steps = 0
        self._plain_for = 0  # steps since the last wide one
        self._chosen = (1, 1.0)  # rows, the table's seconds

    def least(self, batch: int, context: int) -> float:
        self._steps += 1
        if self._skips():
            return NO_TREE
        seconds = self._seconds(batch, context)
        per_row = (seconds[1:] - seconds[0]) / np.arange(1, self.most)
        return min(max(float(per_row.min()) / float(seconds[0]), 1e-3), 1.0)

    def choose(self, trees: Sequence[TokenTree], context: int) -> int:
        seconds = self._seconds(len(trees), context)
        gained = np.zeros(self.most)
        for tree in trees:
            probs = -np.sort(-np.asarray(tree.probs, np.float64))[: self.most - 1]
            gained[1 : 1 + len(probs)] += probs
        rates = (len(trees) + gained.cumsum()) / seconds
        best = int(rates.argmax())
        if rates[best] < self.GAIN * rates[0] or self._steps % self.PLAIN_EVERY == 0:
            best = 0
        self._plain_for = 0 if best else self._plain_for + 1
        self._chosen = best + 1, float(self._cost.seconds(len(trees), self._widths[best : best + 1], context)[0])
        return best + 1

    def spent(self, seconds: float, tokens: int) -> None:
        rows, expected = self._chosen
        ratio = min(max(seconds / expected, 0.25), 4.0)
        wide = rows > 1
        self._off[wide] += self._RATE * (ratio - self._off[wide])

    def _skips(self) -> bool:
        return self._plain_for > 2 * self.LOOK_EVERY and self._steps % self.LOOK_EVERY != 0

    def _seconds(self, batch: int, context: int) -> np.ndarray:
        seconds = self._cost.seconds(batch, self._widths, context) * self._off[True]
        seconds[0] *= self._off[False] / self._off[True]
        return seconds
