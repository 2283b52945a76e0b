"""How many rows a step is worth, for trees whose probabilities are estimates already (drafters/hybrid.py).

B sequences in a step, at most W rows of each; a step costs what all rows do together. As in budget.py, choices change
what a step costs, never its tokens, and there is no clock here: times come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from esp_worker.cost import MAX_ROWS, Costs
from esp_worker.tree import TokenTree

NO_TREE = 2.0  # no P reaches it


class Rows(Protocol):
    """Chooses the rows of each step."""

    most: int  # rows of a sequence

    def least(self, batch: int, context: int) -> float:
        """P of a node below which no row of the next step is worth it; above 1: none is, whatever could be drafted.
        context: tokens of the longest sequence's."""
        ...

    def choose(self, trees: Sequence[TokenTree]) -> list[int]:
        """Rows of each sequence in the step that `least` was asked for. trees: the largest that each could verify."""
        ...

    def spent(self, seconds: float, drafting: float, tokens: int) -> None:
        """What the step that was chosen last took and gave; drafting: of it, seconds of drafting and of learning."""
        ...


class FixedRows:
    """Always the same."""

    def __init__(self, rows: int) -> None:
        self.most = rows

    def least(self, batch: int, context: int) -> float:
        return 1e-4

    def choose(self, trees: Sequence[TokenTree]) -> list[int]:
        return [self.most] * len(trees)

    def spent(self, seconds: float, drafting: float, tokens: int) -> None:
        return None


class _Mean:
    """Of all measurements while there are few, then of the newest."""

    _RATE = 0.1

    def __init__(self, guess: float) -> None:
        self.value, self.count = guess, 0

    def add(self, measured: float) -> None:
        self.count += 1
        self.value += max(self._RATE, 1 / self.count) * (measured - self.value)


class BestRows:
    """The rows of most expected tokens a second, each where it is worth most: one a sequence, plain decoding's, where
    no draft pays.

    The table's times are corrected by what plain and wider steps really take, and a wide step pays for its drafts too;
    while steps are wide, PLAIN_FIRST behind the first WIDE_FIRST, and every PLAIN_EVERY-th, are plain, so that the
    comparison is fresh. Where steps have been plain for a time, trees are looked at in every LOOK_EVERY-th step alone,
    and less and less often down to every LONGEST_WAIT-th.
    """

    WIDE_FIRST, PLAIN_FIRST = 8, 2
    PLAIN_EVERY, LOOK_EVERY, LONGEST_WAIT = 64, 4, 32
    GAIN = 1.04  # over plain decoding, below which a step stays plain
    _RATE = 0.1
    _KEEP, _PRIOR = 0.98, 20.0  # of old tokens in a wide step; tokens that the estimates are trusted for at first
    # Of what wide steps took, and gave, with each plain one: else one bad time would rule them out for ever.
    _FORGET, _FORGIVE = 0.01, 0.001

    def __init__(self, cost: Costs, most: int = MAX_ROWS) -> None:
        self._cost, self.most = cost, most
        self._widths = np.arange(1, most + 1)
        self._pace = {wide: _Mean(1.0) for wide in (False, True)}  # measured seconds in the table's
        self._drafting = {looked: _Mean(0.0) for looked in (False, True)}  # seconds of drafting for a sequence
        self._steps = 0
        self._plain_for = 0  # steps since the last wide one
        self._seconds = self._widths * 1.0  # the table's, of each width of all sequences in the next step
        self._chosen = 1.0  # rows a sequence
        self._batch = 1
        self._looked = False
        self._gain = 1.0  # of the last steps' choices over plain decoding
        self._promised = 0.0  # drafted tokens that the next step should accept
        # Of the last wide steps, what was promised and what came: the best of many estimates are rather too high.
        self._expected = self._accepted = self._PRIOR

    def least(self, batch: int, context: int) -> float:
        self._steps += 1
        self._batch = batch
        wait = min(self.LOOK_EVERY * (1 + self._plain_for // 16), self.LONGEST_WAIT)
        self._looked = self._plain_for <= self.LOOK_EVERY or not self._steps % wait
        if not self._looked:
            self._seconds = self._cost.seconds(batch, self._widths[:1], context)
            return NO_TREE
        self._seconds = self._cost.seconds(batch, self._widths, context)
        seconds = self._corrected(self._widths)
        per_row = (seconds[1:] - seconds[0]) / np.arange(1, self.most)
        least = float(per_row.min() / seconds[0]) * max(0.8 * self._gain, 1.0)
        return min(max(least, 1e-3), 1.0)

    def choose(self, trees: Sequence[TokenTree]) -> list[int]:
        unknown = self._pace[True].count >= self.WIDE_FIRST and self._pace[False].count < self.PLAIN_FIRST
        compare = unknown or not (self._plain_for or self._steps % self.PLAIN_EVERY)
        nodes = self._best(trees) if any(map(len, trees)) and not compare else [0] * len(trees)
        if self._looked and not any(map(len, trees)):
            self._gain += self._RATE * (1 - self._gain)  # or the last text's gain would hide this one's candidates
        self._plain_for = 0 if any(nodes) else self._plain_for + 1
        self._chosen = 1 + sum(nodes) / len(nodes)
        return [1 + count for count in nodes]

    def spent(self, seconds: float, drafting: float, tokens: int) -> None:
        expected = np.interp(self._chosen, self._widths[: len(self._seconds)], self._seconds)
        wide = self._chosen > 1
        self._took(wide, min(max((seconds - drafting) / float(expected), 0.25), 4.0))
        if wide:
            self._expected = self._KEEP * self._expected + self._promised
            self._accepted = self._KEEP * self._accepted + tokens - self._batch
        else:
            self._accepted += self._FORGIVE * (self._expected - self._accepted)
        usual, drafting = self._drafting[self._looked], drafting / self._batch
        usual.add(min(drafting, 4 * usual.value) if usual.count else drafting)

    def _took(self, wide: bool, ratio: float) -> None:
        """A step took `ratio` times the table's seconds."""
        plain_pace, wide_pace = self._pace[False], self._pace[True]
        self._pace[wide].add(ratio)
        if not self._pace[not wide].count:
            self._pace[not wide].value = self._pace[wide].value  # until it is known, whatever slows all steps down
        elif not wide:
            wide_pace.value += self._FORGET * (plain_pace.value - wide_pace.value)

    def _best(self, trees: Sequence[TokenTree]) -> list[int]:
        """Nodes of each sequence, with which the step makes most tokens a second: of all trees the best nodes, whose
        ancestors are no worse and so among them."""
        owner = np.repeat(np.arange(len(trees)), [len(tree) for tree in trees])
        probs = np.concatenate([np.asarray(tree.probs, np.float64) for tree in trees])
        order = np.argsort(-probs, kind="stable")
        drafted = self._accepted / self._expected * np.append(0.0, probs[order].cumsum())
        rates = (len(trees) + drafted) / self._corrected(1 + np.arange(len(drafted)) / len(trees))
        best = int(rates.argmax())
        gain = float(rates[best] / rates[0])
        self._gain += self._RATE * (gain - self._gain)
        if gain < self.GAIN:
            best = 0
        self._promised = float(probs[order[:best]].sum())
        return np.bincount(owner[order[:best]], minlength=len(trees)).tolist()

    def _corrected(self, widths: np.ndarray) -> np.ndarray:
        """Seconds as they really are, of so many rows a sequence."""
        seconds, wide = np.interp(widths, self._widths, self._seconds), widths > 1
        pace = np.where(wide, self._pace[True].value, self._pace[False].value)
        drafting = np.where(wide, self._drafting[True].value, self._drafting[False].value)
        return seconds * pace + self._batch * drafting
