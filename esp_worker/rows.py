"""How many rows a step is worth, for trees whose probabilities are estimates already (drafters/hybrid.py).

B sequences in a step, at most W rows of each; a step costs what all rows do together. As in budget.py, choices change
what a step costs, never its tokens, and there is no clock here: times come in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from esp_worker.cost import MAX_ROWS, Costs
from esp_worker.tree import TokenTree


class Rows(Protocol):
    """Chooses the rows of each step."""

    def floors(self, left: Sequence[int], context: int, waiting: bool) -> list[Sequence[float]]:
        """By sequence, and by nodes that its tree has already, the P below which another is hardly worth a row of the
        next step: never falling, as many as it may have. Empty: none is worth one, whatever could be drafted.

        left [B]: tokens that each may still commit; context: tokens of the longest sequence's; waiting: whether others
        wait for their slots."""
        ...

    def choose(self, trees: Sequence[TokenTree]) -> list[int]:
        """Rows of each sequence in the step that `floors` was asked for. trees: all of each that reaches these."""
        ...

    def spent(self, seconds: float | None, drafting: float, tokens: Sequence[int]) -> None:
        """What the step that was chosen last took, and gave each sequence; drafting: of it, seconds of drafting and of
        learning. seconds: None where its pass did more."""
        ...


class FixedRows:
    """Always the same."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def floors(self, left: Sequence[int], context: int, waiting: bool) -> list[Sequence[float]]:
        return [[1e-4] * (self._rows - 1)] * len(left)

    def choose(self, trees: Sequence[TokenTree]) -> list[int]:
        return [self._rows] * len(trees)

    def spent(self, seconds: float | None, drafting: float, tokens: Sequence[int]) -> None:
        return None


class _Mean:
    """Of all measurements while there are few, then of the newest."""

    def __init__(self, guess: float, rate: float = 0.1) -> None:
        self.value, self.count, self._rate = guess, 0, rate

    def add(self, measured: float) -> None:
        self.count += 1
        self.value += max(self._rate, 1 / self.count) * (measured - self.value)


class _Looks:
    """Which steps look at trees, with batches of about one size: all while that pays. What pays is what has paid,
    whatever was expected.

    Where it has lost GRACE, no step does for a time; then BURST steps do, and so on. These bursts take about LOOKING of
    the time, and less and less of it while they find nothing.
    """

    GRACE = 8.0  # plain steps that the bad luck of one sequence may lose; of B together less, and looking costs more
    _RATE = 0.02
    BURST, LOOKING, LONGEST_WAIT = 8, 0.01, 32 * 8

    def __init__(self, batch: int) -> None:
        self._grace = self.GRACE / batch**0.75
        self._saved = _Mean(0.0, self._RATE)  # by a step that looked, in plain steps
        self._lost = 0.0  # since it was last ahead
        self._wait, self._closings = 0, 0

    def due(self) -> bool:
        """Whether the next step looks."""
        if self._wait:
            self._wait -= 1
            return False
        return True

    def looked(self, saved: float, price: float) -> None:
        """A step did, and saved so many plain steps; price: what looking takes of such a step."""
        self._saved.add(saved)
        self._lost = max(self._lost - saved, 0.0)
        if self._saved.count < self.BURST:
            return
        if self._saved.value > 0:
            self._closings = 0
        elif self._lost > self._grace:
            self._closings += 1
            wait = self.BURST * max(math.ceil(price / self.LOOKING), 1)
            self._wait = max(wait, min(wait * self._closings, self.LONGEST_WAIT))
            self._saved, self._lost = _Mean(0.0, self._RATE), self._grace


class BestRows:
    """The rows of most expected tokens a second, each where it is worth most: one a sequence, plain decoding's, where
    no draft pays.

    The table's times are corrected by what plain and wider steps really take, and a wide step pays for its drafts too;
    while steps are wide, PLAIN_FIRST behind the first WIDE_FIRST, and every PLAIN_EVERY-th, are plain, so that the
    comparison is fresh. Where looking at trees does not pay, few steps do (_Looks).
    """

    WIDE_FIRST, PLAIN_FIRST = 8, 2
    PLAIN_EVERY = 64
    CONTEXT = 32  # tokens that change little in what a step costs
    # Over plain decoding, below which a step of one sequence stays plain, in plain steps. Of B sequences cbrt(B) times
    # that: those whose drafts pay end apart from the others, and a prompt alone, or an empty slot, takes their place.
    GAIN = 0.04
    ALIKE = 0.15  # of what a sequence has left
    _RATE, _SETTLED = 0.1, 10  # of the gain's mean; measurements after which a pace's changes may be the machine's
    _KEEP, _PRIOR = 0.98, 20.0  # of old tokens in a wide step; tokens that the estimates are trusted for at first
    # Of what wide steps took, and gave, with each plain one: else one bad time would rule them out for ever.
    _FORGET, _FORGIVE = 0.003, 0.001

    def __init__(self, cost: Costs, most: int = MAX_ROWS) -> None:
        self._widths = widths = np.arange(1, most + 1)
        self._table = lru_cache(1024)(lambda batch, context: cost.seconds(batch, widths, context))
        self._pace = {wide: _Mean(1.0) for wide in (False, True)}  # measured seconds in the table's
        # Seconds of drafting: for a sequence in plain steps that look at trees, and in those that do not; for each
        # drafted row beyond that.
        self._looking, self._not_looking, self._per_row = _Mean(0.0), _Mean(0.0), _Mean(0.0)
        self._steps = 0
        self._seconds = self._widths * 1.0  # the table's, of the next step with so many rows a sequence
        self._chosen = 1.0  # rows a sequence
        self._worth = np.ones(1)  # of a token of each sequence
        self._looked = False
        self._looks_of = lru_cache(None)(_Looks)  # by size of batch
        self._looks = self._looks_of(1)  # of the next step's size
        self._gain = 1.0  # of the last steps' choices over plain decoding
        self._promised = 0.0  # drafted tokens that the next step should accept
        # Of the last wide steps, what was promised and what came: the best of many estimates are rather too high.
        self._expected = self._accepted = self._PRIOR

    def floors(self, left: Sequence[int], context: int, waiting: bool) -> list[Sequence[float]]:
        self._steps += 1
        batch, context = len(left), context - context % self.CONTEXT
        self._seconds = self._table(batch, context)
        self._worth = np.ones(batch) if waiting else self._worth_of(np.array(left), context)
        self._looks = self._looks_of(1 << round(math.log2(batch)))
        self._looked = self._looks.due()
        if not self._looked:
            return [()] * batch
        seconds = self._corrected(self._widths)
        # What a row more of each sequence takes at least: on average from the first on, and behind as many as a tree
        # has, of whose nodes B are one if no other sequence has any.
        average = (seconds[1:] - seconds[0]) / (self._widths[1:] - 1)
        behind = np.minimum.accumulate(np.diff(self._seconds)[::-1])[::-1] * self._pace[True].value
        behind += batch * self._drafting_a_row
        floors = np.maximum(behind, average.min(initial=np.inf)) / seconds[0] * max(0.8 * self._gain, 1.0)
        floors = floors[np.arange(len(floors)) // batch] / np.maximum(self._worth, 1e-3)[:, None]
        return np.clip(floors, 1e-3, 1.0).tolist()

    def choose(self, trees: Sequence[TokenTree]) -> list[int]:
        unknown = self._pace[True].count >= self.WIDE_FIRST and self._pace[False].count < self.PLAIN_FIRST
        compare = unknown or not self._steps % self.PLAIN_EVERY
        nodes = self._best(trees) if any(map(len, trees)) and not compare else [0] * len(trees)
        if self._looked and not any(map(len, trees)):
            self._gain += self._RATE * (1 - self._gain)  # or the last text's gain would hide this one's candidates
        self._chosen = 1 + sum(nodes) / len(nodes)
        return [1 + count for count in nodes]

    def spent(self, seconds: float | None, drafting: float, tokens: Sequence[int]) -> None:
        rows, batch = self._chosen, len(tokens)
        expected = float(np.interp(rows, self._widths, self._seconds))
        wide = rows > 1
        if seconds is None:
            seconds = expected * self._pace[wide].value + drafting
        else:
            self._took(wide, (seconds - drafting) / expected)
        if self._looked and self._pace[False].count:
            plain = self._plain_seconds + batch * self._not_looking.value
            took = min(seconds, 4 * expected * self._pace[wide].value)  # one slow moment must not decide
            looking = batch * (self._looking.value - self._not_looking.value)
            self._looks.looked(float(self._worth @ tokens) / batch - took / plain, looking / plain)
        if wide:
            self._expected = self._KEEP * self._expected + self._promised
            self._accepted = self._KEEP * self._accepted + sum(tokens) - batch
        else:
            self._accepted += self._FORGIVE * (self._expected - self._accepted)
        drafting /= batch
        usual = self._per_row if wide else self._looking if self._looked else self._not_looking
        if wide:
            drafting = max(drafting - self._looking.value, 0.0) / (rows - 1)
        usual.add(min(drafting, 4 * usual.value) if usual.value else drafting)

    def _took(self, wide: bool, ratio: float) -> None:
        """A step took `ratio` times the table's seconds. What slows one kind of step down may be the machine, or that
        kind alone: the other's pace goes half the way with it, and is measured again sooner or later."""
        own, other = self._pace[wide], self._pace[not wide]
        before = own.value
        own.add(min(max(ratio, before / 4), 4 * before) if own.count else ratio)
        if not other.count:
            other.value = own.value
        elif own.count > self._SETTLED:
            other.value *= math.sqrt(own.value / before)
        if not wide:
            other.value += self._FORGET * (own.value - other.value)

    def _best(self, trees: Sequence[TokenTree]) -> list[int]:
        """Nodes of each sequence, with which the step makes most a second of what tokens are worth: of all trees the
        best nodes, whose ancestors are no worse and so among them.
        """
        count = len(trees)
        owner = np.repeat(np.arange(count), [len(tree) for tree in trees])
        probs = np.concatenate([np.asarray(tree.probs, np.float64) for tree in trees])
        worth = self._worth[owner] * probs
        order = np.argsort(-worth, kind="stable")
        owner, probs, worth = owner[order], probs[order], worth[order]
        drafted = self._accepted / self._expected * np.append(0.0, worth.cumsum())
        rates = (count + drafted) / self._corrected(1 + np.arange(len(drafted)) / count)
        nodes = int(rates.argmax())
        gain = float(rates[nodes] / rates[0])
        self._gain += self._RATE * (gain - self._gain)
        if gain < 1 + self.GAIN * math.cbrt(count):
            nodes = 0
        self._promised = float(probs[:nodes].sum())
        return np.bincount(owner[:nodes], minlength=count).tolist()

    def _worth_of(self, left: np.ndarray, context: int) -> np.ndarray:
        """[B] what a token of each sequence is worth where nobody waits for a slot, 1 on average: what it takes off the
        time until all have ended.

        Of plain steps the one with the j-th most left has a part in, each costs what j sequences' takes beyond that of
        j - 1. Who has about as much left as others may end in any place of theirs.
        """
        plain = [float(self._table(sequences, context)[0]) for sequences in range(1, len(left) + 1)]
        parts = np.diff(plain, prepend=0.0)
        near = np.abs(left[:, None] - np.sort(left)[::-1]) <= np.maximum(self.ALIKE * left, 2)[:, None]
        worth = near @ parts / near.sum(1)
        return worth * len(left) / worth.sum()

    @property
    def _plain_seconds(self) -> float:
        """Of a plain step as it really is, without drafting."""
        return float(self._seconds[0]) * self._pace[False].value

    def _corrected(self, rows: np.ndarray) -> np.ndarray:
        """Seconds as they really are of so many rows a sequence, where trees are looked at."""
        pace = np.where(rows > 1, self._pace[True].value, self._pace[False].value)
        drafting = len(self._worth) * (self._looking.value + (rows - 1) * self._drafting_a_row)
        return np.interp(rows, self._widths, self._seconds) * pace + drafting

    @property
    def _drafting_a_row(self) -> float:
        """Seconds beyond looking."""
        per_row, looking = self._per_row, self._looking
        # Or one slow moment of a wide step would rule wide steps out.
        return min(per_row.value, looking.value) if looking.count else per_row.value
