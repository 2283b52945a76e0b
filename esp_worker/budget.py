"""How many rows a decode step is worth: acceptance estimates, and the choice that makes most tokens a second of them.

B sequences in a step, k masks; a sequence with n draft nodes and m probe owners takes 1 + n + k m rows, W at most. A
step costs what all sequences' rows do together. P(node): the estimate that the model's path goes through a node;
P(ends): that a row is the deepest accepted one, whose probes give the next tree.

Choices depend on the batch and on measured times, and change what a step costs, never its tokens. There is no clock
here: times come in, so that the same inputs give the same choices.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from esp_worker.cost import MAX_ROWS, Costs
from esp_worker.tree import Candidates, TokenTree

logger = logging.getLogger(__name__)

_PRICES = 16  # of a row, that are tried
_RANKS, _BINS = 8, 14  # ranks 0, 1, 2-3, 4-7, ..; probabilities above 1/2, 1/4, ..


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence may use of a step: its best `nodes` draft nodes, probes behind its best `owners` rows."""

    nodes: int
    owners: int


PLAIN = Share(0, 0)


class Budget(Protocol):
    """Chooses the rows of each step."""

    def calibrated(self, levels: Sequence[Candidates]) -> list[Candidates]:
        """The same candidates with probabilities of being accepted, best first."""
        ...

    def choose(self, trees: Sequence[TokenTree], context: int) -> list[Share]:
        """A share for each sequence of the next step. trees: the largest that each could verify, under calibrated
        probabilities (empty: it has no candidates); context: tokens of the longest one's."""
        ...

    def learn(self, levels: Sequence[Candidates], committed: Sequence[int]) -> None:
        """What a sequence committed in a step in front of which the masks had proposed `levels`."""
        ...

    def spent(self, seconds: float | None, tokens: int) -> None:
        """What the step that was chosen last took (None where its pass did more) and gave."""
        ...


class Acceptance:
    """P(a candidate is accepted | its parent was), by depth, rank and probability.

    A mask's probability p is scaled by the hits per probability mass of its cell, that is by what masks have been worth
    so far when they said this; a cell with little evidence takes the scale of its depth, and a depth with little the
    prior's. Old evidence fades: `memory` is how many contexts count.
    """

    _PRIOR_SCALE, _PRIOR_MASS, _CELL_MASS = 0.7, 4.0, 0.5  # scale of p; evidence, in probability mass, that it is worth

    def __init__(self, masks: int, memory: float = 1000.0) -> None:
        self._hits = np.zeros((masks, _RANKS, _BINS))
        self._mass = np.zeros((masks, _RANKS, _BINS))
        self._keep = 1 - 1 / memory
        self.contexts = 0

    def learn(self, levels: Sequence[Candidates], committed: Sequence[int]) -> None:
        """levels[j] proposed committed[j], whose predecessors were accepted (else committed would end before it)."""
        self._hits *= self._keep
        self._mass *= self._keep
        self.contexts += 1
        for depth, (level, token) in enumerate(zip(levels, committed, strict=False)):
            probs = np.asarray(level.probs)
            ranks, bins = _cells(probs)
            np.add.at(self._mass[depth], (ranks, bins), probs)
            if token in level.tokens:
                rank = level.tokens.index(token)
                self._hits[depth, ranks[rank], bins[rank]] += 1

    def calibrated(self, levels: Sequence[Candidates]) -> list[Candidates]:
        return [self._calibrated(depth, level) for depth, level in enumerate(levels)]

    def _calibrated(self, depth: int, level: Candidates) -> Candidates:
        hits, mass = self._hits[depth], self._mass[depth]
        of_depth = (hits.sum() + self._PRIOR_MASS * self._PRIOR_SCALE) / (mass.sum() + self._PRIOR_MASS)
        probs = np.asarray(level.probs)
        cell = _cells(probs)
        probs = probs * (hits[cell] + self._CELL_MASS * of_depth) / (mass[cell] + self._CELL_MASS)
        probs = probs / max(probs.sum(), 1.0)
        order = np.argsort(-probs, kind="stable")
        return Candidates([level.tokens[i] for i in order], probs[order].tolist())


def _cells(probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rank and probability bins of one level's candidates, best first."""
    ranks = np.frexp(np.arange(len(probs)))[1]  # 0, 1, 2, 2, 3, 3, 3, 3, ..
    bins = -np.frexp(np.maximum(probs, 1e-30))[1]
    return np.minimum(ranks, _RANKS - 1), np.clip(bins, 0, _BINS - 1)


@dataclass(frozen=True, slots=True)
class Worth:
    """What a sequence's rows are worth. tokens: [M] expected tokens of a step with its n best nodes; ends: [M, M + 1]
    P(one of its m most valuable owners is the deepest accepted row) then. Filled up with the last values."""

    tokens: np.ndarray
    ends: np.ndarray


def worth(tree: TokenTree, size: int) -> Worth:
    """Of the largest tree that a sequence could verify, for n < `size` nodes."""
    order = sorted(range(len(tree)), key=lambda i: -tree.probs[i])[: size - 1]
    place = {0: 0} | {node + 1: position + 1 for position, node in enumerate(order)}
    count = len(order)
    probs = np.array([tree.probs[i] for i in order])
    below = np.zeros((count + 1, count + 1))  # [n nodes, row]: what the row's children take of it
    below[np.arange(1, count + 1), [place[tree.parents[i]] for i in order]] = probs
    ends = np.tril(np.append(1.0, probs) - below.cumsum(axis=0))
    reach = np.zeros((count + 1, count + 2))
    reach[:, 1:] = -np.sort(-ends, axis=1).cumsum(axis=1)
    pad = size - 1 - count
    return Worth(
        np.pad(np.append(1.0, 1 + probs.cumsum()), (0, pad), mode="edge"),
        np.pad(reach, ((0, pad), (0, pad)), mode="edge"),
    )


class AutoBudget:
    """Spends rows where they make most tokens a second, and none where plain decoding is faster.

    Drafting is on or off, by the rate that it would settle at with trees as they have lately been. On: each step takes
    the width that makes most tokens for its time at that rate, where the probes of a row that ends the path save the
    step that would have to probe anew. Off: plain steps. What masks proposed is held against the token that came,
    whether or not it was verified: a prompt's first candidates tell for nothing what drafting would give, and so does a
    plain step in front of which another had one probe beside each root. Such exploring steps take at most EXPLORE of
    the time, and become rarer while they change nothing.

    What the table says is corrected by what steps really take: by the machine's pace, and by what drafting costs on top
    (learned in the first steps after each switch to it). Drafting that has lost more than it may is stopped, whatever
    is predicted.
    """

    SWITCH_ON, SWITCH_OFF = 1.03, 1.0  # predicted gain over plain decoding
    EXPLORE = 0.01  # share of all time that exploring, and drafting that did not pay, may cost
    GRACE = 8.0  # plain steps that drafting may lose in any case: a row of rejected drafts is no proof
    PLAIN_FIRST, CONTEXTS_FIRST = 5, 4  # measured plain steps, and judged proposals, before the first switch
    FIRST_WAIT, LONGEST_WAIT = 2, 64  # plain steps between explorations
    FIRST_BAR = 256  # plain steps before drafting is tried again after it was stopped
    _RATE, _SETTLING = 0.1, 20

    def __init__(self, cost: Costs, masks: int, max_rows: int = MAX_ROWS) -> None:
        self._cost, self._masks = cost, masks
        self.max_rows = max_rows
        self.acceptance = Acceptance(masks)
        self.drafting = False
        self.elapsed = 0.0  # seconds of all steps
        self.lost = 0.0  # of them, those that exploring and drafting cost beyond plain decoding
        self._widths = np.arange(1, max_rows + 1)
        nodes = np.arange(max_rows)
        rows_left = self._widths[:, None] - 1 - nodes  # [W, n]
        self._fits = rows_left >= 0
        self._owners = np.minimum(np.maximum(rows_left, 0) // masks, nodes + 1)
        self._typical: Worth | None = None
        self._pace = 1.0  # measured seconds in the table's
        self._extra = 1.0  # of a drafted step, beyond the pace
        self._steps = 0  # of the present mode
        self._plain_steps = 0
        self._wait = self.FIRST_WAIT
        self._loss = 0.0  # of drafting since it was last ahead
        self._barred: dict[
            int, tuple[int, int]
        ] = {}  # by size of batch: plain steps to go, and those after the next loss
        self._chosen: _Chosen | None = None

    def calibrated(self, levels: Sequence[Candidates]) -> list[Candidates]:
        return self.acceptance.calibrated(levels)

    def learn(self, levels: Sequence[Candidates], committed: Sequence[int]) -> None:
        if levels:
            self.acceptance.learn(levels, committed)

    def choose(self, trees: Sequence[TokenTree], context: int) -> list[Share]:
        if not self.drafting and self._steps < self._wait and not any(map(len, trees)):
            batch = len(trees)
            plain = float(self._cost.seconds(batch, self._widths[:1], context)[0]) * self._pace
            self._chosen = _Chosen(batch, batch, plain, plain)
            self._bar_left(batch)
            return [PLAIN] * batch
        worths = [worth(tree, self.max_rows) for tree in trees] if self.drafting or any(map(len, trees)) else []
        self._remember([each for tree, each in zip(trees, worths, strict=False) if len(tree)])
        batch = len(trees)
        seconds = self._cost.seconds(batch, self._widths, context) * self._pace
        plain = float(seconds[0])
        seconds = np.append(plain, seconds[1:] * self._extra)
        rate = self._settled_rate(batch, seconds)
        self._switch(batch, rate * plain / batch)
        if self.drafting:
            shares = self._best(worths or [worth(tree, self.max_rows) for tree in trees], seconds, rate)
        else:
            probe_s = float(seconds[self._masks]) - plain
            shares = [Share(0, 1) if self._may_explore(probe_s) else PLAIN] * batch
        rows = sum(1 + share.nodes + self._masks * share.owners for share in shares)
        self._chosen = _Chosen(batch, rows, plain, float(np.interp(rows / batch, self._widths, seconds)))
        return shares

    def spent(self, seconds: float | None, tokens: int) -> None:
        chosen = self._chosen
        assert chosen is not None, "choose comes before"
        seconds = chosen.seconds if seconds is None else seconds
        self.elapsed += seconds
        self._steps += 1
        seconds = min(max(seconds, chosen.seconds / 2), 2 * chosen.seconds)  # one slow moment must not decide
        error = (seconds / chosen.seconds) ** self._RATE
        if chosen.rows == chosen.batch:
            self._plain_steps += 1
            self._pace *= error
        elif self.drafting and self._steps <= self._SETTLING:
            self._extra *= error
        elif self.drafting:
            self._pace *= error
        if not self.drafting:
            if chosen.rows > chosen.batch:
                self.lost = max(self.lost + seconds - chosen.plain, 0.0)
            return
        self._loss = max(self._loss + seconds - tokens * chosen.plain / chosen.batch, 0.0)
        if self._loss > max(self.EXPLORE * self.elapsed - self.lost, self.GRACE * chosen.plain):
            self._bar(chosen.batch)

    # ---- on and off

    def _remember(self, worths: Sequence[Worth]) -> None:
        """Mean worth of the trees that came by lately, what a settled rate is reckoned from."""
        if not worths:
            return
        tokens, ends = np.mean([each.tokens for each in worths], 0), np.mean([each.ends for each in worths], 0)
        if self._typical is None:
            self._typical = Worth(tokens, ends)
            return
        new = 1 - 0.97 ** len(worths)
        old = self._typical
        self._typical = Worth(old.tokens + new * (tokens - old.tokens), old.ends + new * (ends - old.ends))

    def _settled_rate(self, batch: int, seconds: np.ndarray) -> float:
        """Tokens a second of drafting with typical trees, at its best width: a step whose path ends where nobody
        probed is followed by one that only probes the roots."""
        if self._typical is None:
            return 0.0
        tokens = self._typical.tokens
        missing = 1 - self._typical.ends[np.arange(self.max_rows), self._owners]  # [W, n]
        rates = batch * (tokens + missing) / (seconds[:, None] + missing * seconds[self._masks])
        return float(rates[1:][self._fits[1:]].max())

    def _switch(self, batch: int, gain: float) -> None:
        left = self._bar_left(batch)
        known = self._plain_steps >= self.PLAIN_FIRST and self.acceptance.contexts >= self.CONTEXTS_FIRST
        affordable = not left and self.lost <= self.EXPLORE * self.elapsed
        if not self.drafting and gain > self.SWITCH_ON and known and affordable:
            self._turn(True, gain)
        elif self.drafting and gain < self.SWITCH_OFF:
            self._turn(False, gain)

    def _bar_left(self, batch: int) -> int:
        """Plain steps until drafting may be tried again at this size of batch, this one among them."""
        size = batch.bit_length()
        left, next_bar = self._barred.get(size, (0, 0))
        if not self.drafting and left:
            self._barred[size] = (left - 1, next_bar)
        return left

    def _turn(self, drafting: bool, gain: float) -> None:
        logger.debug("drafting %s: predicted gain %.3f", "on" if drafting else "off", gain)
        self.drafting, self._steps = drafting, 0
        self._wait = self.FIRST_WAIT
        self.lost += self._loss
        self._loss = 0.0

    def _bar(self, batch: int) -> None:
        """Drafting lost what it may at this size of batch, against prediction: off, each time for twice as long."""
        size = batch.bit_length()
        _, steps = self._barred.get(size, (0, self.FIRST_BAR))
        self._barred[size] = (steps, 2 * steps)
        self._turn(False, 0.0)

    def _may_explore(self, seconds: float) -> bool:
        """Whether this plain step may cost `seconds` more."""
        if self._steps < self._wait or self.lost + seconds > self.EXPLORE * self.elapsed:
            return False
        self._wait, self._steps = min(2 * self._wait, self.LONGEST_WAIT), 0
        self._extra **= 0.9  # what drafting costs on top was learned some time ago
        return True

    # ---- one step

    def _best(self, worths: Sequence[Worth], seconds: np.ndarray, rate: float) -> list[Share]:
        """The shares of highest tokens + (what the next tree saves) - (tokens that the step's time is worth)."""
        saved = max(rate * float(seconds[self._masks]) / len(worths) - 1, 0.0)  # a root-probing step gives one token
        return best_shares(worths, seconds, self._owners, self._fits, rate, saved)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The step that was chosen last: its size (rows of all sequences), and seconds predicted for it and a plain one."""

    batch: int
    rows: int
    plain: float
    seconds: float


def best_shares(
    worths: Sequence[Worth], seconds: np.ndarray, owners: np.ndarray, fits: np.ndarray, rate: float, saved: float
) -> list[Share]:
    """A share for each sequence, the best that is found by sum(tokens + saved * ends) - rate * seconds.

    seconds: [W] of steps of 1.. rows a sequence; owners: [W, n] probe owners that n nodes leave room for; fits: [W, n];
    rate: tokens that a second is worth; saved: tokens that having a tree in the next step is worth.

    Each sequence takes what pays at one price of a row, for prices between what the flattest and the steepest part of
    `seconds` makes of it; or all take one width. The best for one sequence, and where seconds are linear; else close
    to it, as sequences with the same price could only trade rows.
    """
    count, batch = np.arange(owners.shape[1]), len(worths)
    all_values = np.stack([np.where(fits, each.tokens + saved * each.ends[count, owners], -np.inf) for each in worths])
    nodes, values = all_values.argmax(2), all_values.max(2)  # [B, W]
    widths = np.arange(1, len(seconds) + 1)
    slopes = np.maximum(np.diff(seconds), 1e-12) if len(seconds) > 1 else np.ones(1)
    prices = rate / batch * np.geomspace(slopes.min(), slopes.max(), _PRICES)
    priced = (values - prices[:, None, None] * widths).argmax(2)  # [P, B] index of a width
    grows = np.diff(values, axis=1, prepend=-np.inf) > 1e-12
    alike = np.maximum.accumulate(np.where(grows, widths - 1, 0), axis=1).T  # [W, B]: no row more than is of use
    choices = np.concatenate([alike, priced])
    gained = values[np.arange(batch), choices].sum(1)
    cost = np.interp(widths[choices].mean(1), widths, seconds)
    chosen = choices[int(np.argmax(gained - rate * cost))]
    return [Share(int(nodes[b, width]), int(owners[width, nodes[b, width]])) for b, width in enumerate(chosen.tolist())]
