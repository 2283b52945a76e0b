"""The row budget: what rows are worth, the best choice, when drafting is on, what exploring may cost."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esp_worker.budget import PLAIN, Acceptance, AutoBudget, Share, best_shares, worth
from esp_worker.tree import PRUNE_RULES, Candidates, TokenTree, best_first_tree, ending_probs, most_probable

ROWS = 8
TOKENS = list(range(40))


class Linear:
    """Seconds of a step: a fixed part, and a part for each row of the batch."""

    def __init__(self, fixed: float, row: float) -> None:
        self.fixed, self.row = fixed, row

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray:
        return self.fixed + self.row * sequences * np.asarray(rows, np.float64)


def tree_of(*levels: list[float], nodes: int = 30) -> TokenTree:
    candidates = [Candidates(TOKENS[: len(probs)], probs) for probs in levels]
    return best_first_tree(candidates, nodes, root_token=99, prune=PRUNE_RULES["all"], max_depth=9)


@st.composite
def trees(draw: Any) -> TokenTree:
    levels = []
    for _ in range(draw(st.integers(0, 2))):
        weights = draw(st.lists(st.floats(0.01, 1), min_size=1, max_size=4))
        levels.append(sorted((weight / (sum(weights) + 0.1) for weight in weights), reverse=True))
    return tree_of(*levels)


# What rows are worth


@given(trees())
def test_worth_is_that_of_the_cut_trees(tree: TokenTree) -> None:
    each = worth(tree, ROWS)
    for nodes in range(min(len(tree) + 1, ROWS)):
        cut = most_probable(tree, nodes)
        assert each.tokens[nodes] == pytest.approx(1 + sum(cut.probs))
        ends = sorted(ending_probs(cut), reverse=True)
        for owners in range(nodes + 2):
            assert each.ends[nodes, owners] == pytest.approx(sum(ends[:owners]), abs=1e-9)
    assert np.allclose(each.tokens[len(tree) :], each.tokens[-1])


# The best choice


@settings(max_examples=60)
@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 2), st.booleans(), st.data())
def test_no_choice_is_better(given_trees: list[TokenTree], masks: int, linear: bool, data: st.DataObject) -> None:
    """Against every way to give each sequence nodes and owners, at 5 rows each. Where a step's time is not linear in
    its rows, and sequences share it, only against all ways of one width."""
    rows = 5
    steps = st.lists(st.floats(0.01, 1), min_size=rows, max_size=rows)
    seconds = np.cumsum([data.draw(st.floats(0.01, 1))] * rows if linear else data.draw(steps))
    rate, saved = data.draw(st.floats(0, 4)), data.draw(st.floats(0, 2))
    budget = AutoBudget(Linear(1, 1), masks, max_rows=rows)
    worths = [worth(tree, rows) for tree in given_trees]

    def width(share: Share) -> int:
        return 1 + share.nodes + masks * share.owners

    def score(shares: list[Share] | tuple[Share, ...]) -> float:
        mean = sum(map(width, shares)) / len(shares)
        gain = sum(
            each.tokens[share.nodes] + saved * each.ends[share.nodes, share.owners]
            for each, share in zip(worths, shares, strict=True)
        )
        return float(gain - rate * np.interp(mean, np.arange(1, rows + 1), seconds))

    shares = [
        Share(nodes, owners)
        for nodes in range(rows)
        for owners in range(nodes + 2)
        if width(Share(nodes, owners)) <= rows
    ]
    ways = list(itertools.product(shares, repeat=len(worths)))
    if not linear and len(worths) > 1:
        ways = [way for way in ways if len(set(map(width, way))) == 1]
    chosen = best_shares(worths, seconds, budget._owners, budget._fits, rate, saved)
    assert score(chosen) >= max(map(score, ways)) - 1e-9


def test_rows_go_to_the_sequence_that_they_serve() -> None:
    sure, unsure = tree_of([0.9], [0.0, 0.9]), tree_of([0.1])  # a token never follows itself
    budget = AutoBudget(Linear(1, 1), masks=1, max_rows=ROWS)
    seconds = 1 + 0.3 * np.arange(1, ROWS + 1)
    shares = best_shares(
        [worth(tree, ROWS) for tree in (sure, unsure)], seconds, budget._owners, budget._fits, rate=2.0, saved=0.0
    )
    assert shares == [Share(2, 0), Share(0, 0)]


# Acceptance


def test_proposals_are_scaled_by_what_they_were_worth() -> None:
    """Masks that say 0.6 and are right in 9 of 10, and say 0.3 and are right in 1 of 10."""
    acceptance = Acceptance(masks=1)
    level = Candidates([5, 6], [0.6, 0.3])
    prior = acceptance.calibrated([level])[0].probs
    assert 0 < prior[1] < prior[0] < 0.6, "less than it says itself, until it has been seen"
    for number in range(300):
        acceptance.learn([level], [6 if number % 10 == 0 else 5])
    learned = acceptance.calibrated([level])[0]
    assert (learned.tokens, learned.probs) == ([5, 6], pytest.approx([0.9, 0.1], abs=0.02))


def test_the_better_candidate_comes_first_and_depths_are_apart() -> None:
    acceptance = Acceptance(masks=2)
    level = Candidates([5, 6], [0.6, 0.3])
    for _ in range(200):
        acceptance.learn([level, level], [6, 5])
    first, second = acceptance.calibrated([level, level])
    assert first.tokens == [6, 5], "the mask's second was always right"
    assert second.tokens == [5, 6]
    assert max(sum(first.probs), sum(second.probs)) <= 1 + 1e-9


def test_old_evidence_fades() -> None:
    acceptance = Acceptance(masks=1, memory=50)
    level = Candidates([5], [0.5])
    for token in [5] * 300 + [6] * 300:
        acceptance.learn([level], [token])
    assert acceptance.calibrated([level])[0].probs[0] < 0.05


# On and off


class Job:
    """Sequences whose masks say `says` and are right with probability `right`, decoded under a budget on a machine
    whose steps take `real` (default: what the table says); timed: whether the budget hears how long."""

    def __init__(
        self,
        budget: AutoBudget,
        says: float,
        right: float,
        real: Linear | None = None,
        seed: int = 0,
        timed: bool = True,
    ) -> None:
        self.budget, self.says, self.right, self.timed = budget, says, right, timed
        self.real = real or budget._cost
        self.random = random.Random(seed)
        self.seconds = self.plain_seconds = 0.0
        self.steps: list[list[Share]] = []
        self.drafting: list[bool] = []

    def run(self, steps: int, batch: int, first_levels: bool = True) -> None:
        levels: list[list[Candidates]] = [[Candidates([1], [self.says])] if first_levels else [] for _ in range(batch)]
        for _ in range(steps):
            offered = [self.budget.calibrated(each) for each in levels]
            grown = [best_first_tree(each, 9, 0, PRUNE_RULES["none"], 9) for each in offered]
            shares = self.budget.choose(grown, context=100)
            tokens = 0
            for i, share in enumerate(shares):
                hit = self.random.random() < self.right
                accepted = hit and share.nodes > 0 and bool(levels[i])
                self.budget.learn(levels[i], [1, 7] if accepted else [1 if hit else 7])
                tokens += 2 if accepted else 1
                owned = share.owners == 2 or (share.owners == 1 and not accepted)
                levels[i] = [Candidates([1], [self.says])] if owned else []
            rows = max(1 + share.nodes + share.owners for share in shares)
            seconds = float(self.real.seconds(batch, np.array([rows]), 100)[0])
            self.budget.spent(seconds if self.timed else None, tokens)
            self.seconds += seconds
            self.plain_seconds += tokens * float(self.real.seconds(batch, np.array([1]), 100)[0]) / batch
            self.steps.append(shares)
            self.drafting.append(self.budget.drafting)


FREE, DEAR = Linear(1.0, 0.001), Linear(0.05, 1.0)


@pytest.mark.parametrize("timed", [True, False])
def test_rows_that_cost_nothing_are_taken(timed: bool) -> None:
    job = Job(AutoBudget(FREE, 1, ROWS), says=0.7, right=0.7, timed=timed)
    job.run(400, batch=2)
    assert job.budget.drafting
    assert all(share.nodes == 1 for share in job.steps[-1]), "the whole tree"
    assert job.plain_seconds / job.seconds > 1.5


@pytest.mark.parametrize("right", [0.0, 0.7])
def test_rows_that_cost_their_full_time_are_not_taken(right: float) -> None:
    """And exploring stays within its share of the time."""
    job = Job(AutoBudget(DEAR, 1, ROWS), says=0.9, right=right)
    job.run(3000, batch=2)
    assert not any(share.nodes for shares in job.steps for share in shares)
    probing = sum(shares != [PLAIN] * 2 for shares in job.steps)
    assert probing > 0
    assert job.budget.lost <= AutoBudget.EXPLORE * job.budget.elapsed
    assert job.plain_seconds / job.seconds > 0.98


def test_exploring_grows_rarer() -> None:
    job = Job(AutoBudget(Linear(1, 0.01), 1, ROWS), says=0.9, right=0.0)
    job.run(500, batch=1)
    off = len(job.steps) - job.drafting[::-1].index(True)
    gaps = np.diff([number for number, shares in enumerate(job.steps) if number >= off and shares[0].owners])
    assert len(gaps) > 4
    waits = AutoBudget.FIRST_WAIT * 2.0 ** np.arange(1, len(gaps) + 1)
    assert (gaps >= np.minimum(waits, AutoBudget.LONGEST_WAIT)).all()


def test_off_is_not_for_ever() -> None:
    """Masks that begin to be right are noticed, without a single draft."""
    job = Job(AutoBudget(FREE, 1, ROWS), says=0.6, right=0.0)
    job.run(300, batch=2)
    assert not job.budget.drafting
    job.right = 0.9
    job.run(3000, batch=2)
    assert job.budget.drafting


def test_masks_that_begin_to_fail_switch_drafting_off() -> None:
    job = Job(AutoBudget(Linear(1, 0.1), 1, ROWS), says=0.6, right=0.8)
    job.run(400, batch=1)
    assert job.budget.drafting
    job.right = 0.0
    job.run(2000, batch=1)
    assert not job.budget.drafting


def test_a_gain_at_the_edge_does_not_flap() -> None:
    """Gains of 1.00 to 1.03 keep whatever is on."""
    budget = AutoBudget(FREE, 1, ROWS)
    budget._plain_steps, budget.acceptance.contexts = 99, 99
    for gain, drafting in [(1.02, False), (1.04, True), (1.01, True), (1.029, True), (0.99, False), (1.029, False)]:
        budget._switch(2, gain)
        assert budget.drafting == drafting, gain


def test_a_table_that_is_wrong_is_found_out() -> None:
    """The table says that rows are free; here they cost their full time."""
    job = Job(AutoBudget(FREE, 1, ROWS), says=0.5, right=0.3, real=Linear(0.5, 0.5))
    job.run(6000, batch=1)
    assert job.plain_seconds / job.seconds > 0.98


def test_drafting_is_judged_by_the_size_of_the_batch() -> None:
    """One sequence: rows are nearly free. Sixteen: a row each costs as much as the step."""
    budget = AutoBudget(Linear(1.0, 0.1), 1, ROWS)
    job = Job(budget, says=0.7, right=0.7)
    job.run(200, batch=1)
    assert budget.drafting
    job.run(2, batch=16)
    assert not budget.drafting
    job.run(2, batch=1)
    assert budget.drafting


@pytest.mark.parametrize("batch", [1, 5])
def test_off_is_the_roots_alone(batch: int) -> None:
    budget = AutoBudget(FREE, 2, ROWS)
    assert budget.choose([TokenTree()] * batch, 10) == [PLAIN] * batch
    assert budget._chosen is not None
    assert budget._chosen.rows == batch


class Slower(Linear):
    """Twice the table's times, and 1.3 times that for steps of more rows than one."""

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray:
        return 2 * super().seconds(sequences, rows, context) * np.where(np.asarray(rows) > 1, 1.3, 1)


def test_predictions_follow_what_steps_take() -> None:
    job = Job(AutoBudget(FREE, 1, ROWS), says=0.7, right=0.7, real=Slower(1.0, 0.001))
    job.run(30, batch=1, first_levels=False)
    assert job.budget._chosen is not None
    job.run(200, batch=1)
    chosen = job.budget._chosen
    assert job.budget.drafting
    assert chosen.rows > 1
    assert chosen.seconds == pytest.approx(2.6, rel=0.05)
    assert 1.9 < chosen.plain < 2.4, "drafting's own part was told apart, as far as its first steps could"


class Gullible(AutoBudget):
    """Learns nothing: its prediction stays what it was, and only what is lost can stop it."""

    SWITCH_OFF, EXPLORE, _RATE = -1.0, 0.1, 0.0

    def learn(self, levels: Any, committed: Any) -> None:
        self.acceptance.contexts += 1


def test_drafting_that_loses_is_stopped_each_time_for_longer() -> None:
    budget = Gullible(FREE, 1, ROWS)
    job = Job(budget, says=0.9, right=0.0, real=Linear(0.1, 1.0))
    job.run(1500, batch=1)
    spells = [(drafting, len(list(steps))) for drafting, steps in itertools.groupby(job.drafting)]
    on = [length for drafting, length in spells if drafting]
    off = [length for drafting, length in spells if not drafting]
    assert len(on) >= 3
    assert on[0] < 40, "a grace of eight plain steps"
    assert Gullible.FIRST_BAR <= off[1] < 1.2 * Gullible.FIRST_BAR
    assert off[2] >= 2 * Gullible.FIRST_BAR
