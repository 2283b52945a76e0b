"""The rows of a step: those of most expected tokens a second, and one a sequence where no draft pays."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_worker.rows import BestRows, FixedRows, Rows, _Looks
from esp_worker.tree import EMPTY_TREE, TokenTree


class Costs:
    """Seconds of a step that grow with the rows of the batch, but for the first few."""

    def __init__(self, fixed: float, row: float, free: int = 0) -> None:
        self.fixed, self.row, self.free = fixed, row, free

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray:
        return self.fixed + self.row * np.maximum(sequences * np.asarray(rows, np.float64) - self.free, 0)


def chain(*probs: float) -> TokenTree:
    return TokenTree(tuple(range(len(probs))), tuple(range(len(probs))), probs)


def reaching(floors: Sequence[float], tree: TokenTree) -> TokenTree:
    """A chain's nodes as they would have been grown."""
    kept = itertools.takewhile(lambda node: node[0] >= node[1], zip(tree.probs, floors, strict=False))
    return chain(*(prob for prob, _ in kept))


def floors_of(rows: Rows, batch: int = 1, context: int = 100) -> Sequence[float]:
    """The same for all sequences where others wait for their slots."""
    floors, *others = rows.floors([100] * batch, context, waiting=True)
    assert all(each == floors for each in others)
    return floors


def after_look(rows: BestRows, trees: list[TokenTree]) -> list[int]:
    floors = floors_of(rows, len(trees))
    return rows.choose([tree if floors else EMPTY_TREE for tree in trees])


def spent(rows: BestRows, seconds: float | None, drafting: float, tokens: int) -> None:
    """By one sequence."""
    rows.spent(seconds, drafting, [tokens])


@pytest.mark.parametrize("row", [0.03, 0.1, 0.2, 0.23])
def test_the_best_rate_over_all_ways_to_deal_rows_out(row: float) -> None:
    """Against a search over all of them: tokens of all sequences, over the step's seconds."""
    costs = Costs(1.0, row, free=3)
    trees = [chain(0.9, 0.8, 0.5, 0.1), chain(0.7, 0.01), EMPTY_TREE]

    def rate(nodes: tuple[int, ...]) -> float:
        tokens = sum(1 + sum(tree.probs[:count]) for tree, count in zip(trees, nodes, strict=True))
        return tokens / float(costs.seconds(3, np.array([1 + sum(nodes) / 3]), 0)[0])

    ways = itertools.product(*(range(len(tree) + 1) for tree in trees))
    best = max(ways, key=rate)
    assert after_look(BestRows(costs, most=8), trees) == [1 + count for count in best]
    assert best[0] > best[1], "the two trees are not worth the same"


@pytest.mark.parametrize(("row", "rows"), [(0.0, 4), (10.0, 1)])
def test_free_rows_are_all_taken_and_dear_ones_not_at_all(row: float, rows: int) -> None:
    assert after_look(BestRows(Costs(1.0, row), most=8), [chain(0.5, 0.4, 0.3)]) == [rows]


@pytest.mark.parametrize(("batch", "wide"), [(1, True), (16, False)])
def test_many_sequences_together_must_gain_more(batch: int, wide: bool) -> None:
    """Six percent, for each of them alike."""

    class Alike(Costs):
        def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray:
            return sequences * super().seconds(1, rows - 1, context)

    chosen = after_look(BestRows(Alike(1.0, 0.5), most=8), [chain(0.59)] * batch)
    assert chosen == [2 if wide else 1] * batch


def worth(left: Sequence[int], costs: Costs) -> list[float]:
    """How many times as high the price of a sequence's nodes is that nobody waits behind."""
    waited, own = (BestRows(costs, most=8).floors(left, 100, waiting) for waiting in (True, False))
    return [others[0] / floors[0] for others, floors in zip(waited, own, strict=True)]


def test_where_nobody_waits_the_longest_sequences_tokens_are_worth_most() -> None:
    """One sequence's steps take 1.1 seconds, and each one more 0.1: of four, the longest is worth 1.1 of 1.4."""
    assert worth([9, 90, 30, 60], Costs(1.0, 0.1)) == pytest.approx([4 * part / 1.4 for part in (0.1, 1.1, 0.1, 0.1)])
    assert worth([90, 9], Costs(1.0, 0.1)) == pytest.approx([2 * part / 1.2 for part in (1.1, 0.1)])


def test_sequences_with_about_as_much_left_are_worth_as_much() -> None:
    assert worth([90, 85, 88], Costs(1.0, 0.1)) == pytest.approx([1.0] * 3)
    assert worth([3, 4, 5], Costs(1.0, 0.1)) == pytest.approx([1.0] * 3)
    assert worth([90, 85, 9], Costs(1.0, 0.1)) == pytest.approx([3 * part / 1.3 for part in (0.6, 0.6, 0.1)])
    assert worth([7], Costs(1.0, 0.1)) == [1.0]


def test_rows_go_where_they_end_the_run_sooner() -> None:
    """One step for both costs no less than one for the longer: 0.8 a node is too little for the one, 0.4 enough for the
    other, whose token saves a step."""
    rows = BestRows(Costs(1.0, 0.3, free=2), most=8)
    trees = [chain(0.8), chain(0.4)]
    floors = rows.floors([10, 90], 100, waiting=False)
    assert rows.choose([reaching(own, tree) for own, tree in zip(floors, trees, strict=True)]) == [1, 2]
    assert after_look(BestRows(Costs(1.0, 0.3, free=2), most=8), trees) == [2, 1]


def test_what_steps_really_take_corrects_the_table() -> None:
    """The table says that rows are nearly free; wide steps take three times as long, so they stop."""
    rows = BestRows(Costs(1.0, 0.01), most=8)
    chosen = []
    for _ in range(60):
        (width,) = after_look(rows, [chain(0.5, 0.2)])
        spent(rows, 1.0 if width == 1 else 3.0, 0.0, width)
        chosen.append(width)
    assert chosen[0] == 3
    assert chosen[-20:] == [1] * 20


def test_a_pass_that_prefills_too_tells_of_tokens_alone() -> None:
    rows = BestRows(Costs(1.0, 0.3), most=8)
    chosen = []
    for _ in range(60):
        (width,) = after_look(rows, [chain(0.9)])
        spent(rows, None, 0.0, 1)
        chosen.append(width)
    assert chosen[0] == 2
    assert chosen[-20:].count(2) <= 2, "what is promised never comes"


@pytest.mark.parametrize(("drafting", "wide"), [(0.1, True), (1.1, False)])
def test_a_wide_step_pays_for_its_drafts(drafting: float, wide: bool) -> None:
    """Two tokens of a step, minus what drafting takes beside it: 0.1 of a plain step is worth it, 1.1 is not."""
    rows = BestRows(Costs(1.0, 0.0), most=8)
    chosen = []
    for _ in range(200):
        floors = floors_of(rows)
        chosen += rows.choose([chain(0.7) if floors else EMPTY_TREE])
        looked = drafting if floors else 0.0
        spent(rows, 1.0 + looked, looked, chosen[-1])
    assert chosen[0] == 2
    assert (chosen[-60:].count(2) >= 58) == wide
    assert (chosen[-60:] == [1] * 60) != wide


@pytest.mark.parametrize(("kept", "width"), [(True, 2), (False, 1)])
def test_promises_that_are_not_kept_count_less(kept: bool, width: int) -> None:
    """A drafted token is worth it when it comes as often as it is promised, and not when it never comes."""
    rows = BestRows(Costs(1.0, 0.2), most=8)
    promise = random.Random(0)
    chosen = []
    for _ in range(150):
        chosen += after_look(rows, [chain(0.5)])
        comes = kept and chosen[-1] > 1 and promise.random() < 0.5
        spent(rows, 1.0 + 0.2 * (chosen[-1] - 1), 0.0, 1 + comes)
    assert chosen[0] == 2
    assert max(chosen[-40:], key=chosen[-40:].count) == width


def test_broken_promises_are_forgotten() -> None:
    rows = BestRows(Costs(1.0, 0.05), most=8)
    chosen = []
    for step in range(1500):
        chosen += after_look(rows, [chain(0.5)])
        spent(rows, 1.0 + 0.05 * (chosen[-1] - 1), 0.0, chosen[-1] if step >= 500 else 1)
    assert chosen[400:500].count(2) < 25, "each costs a twentieth of a step"
    assert chosen[-100:].count(2) > 80


def test_a_slow_machine_is_no_reason_against_wide_steps() -> None:
    """Everything takes thrice what the table says, and no plain step has been measured yet."""
    rows = BestRows(Costs(1.0, 0.05), most=8)
    for _ in range(BestRows.WIDE_FIRST):
        assert after_look(rows, [chain(0.7)]) == [2]
        spent(rows, 3.15, 0.0, 2)


def test_one_slow_moment_is_forgotten() -> None:
    rows = BestRows(Costs(1.0, 0.0), most=8)
    chosen = []
    for step in range(600):
        (width,) = after_look(rows, [chain(0.5)])
        spent(rows, 4.0 if 5 <= step < 30 and width > 1 else 1.0, 0.0, width)
        chosen.append(width)
    assert chosen[28:36] == [1] * 8
    assert chosen[-40:].count(2) >= 30, "and wide steps are chosen again"


def test_one_slow_drafting_is_forgotten() -> None:
    """The first one may look up what later ones find."""
    rows = BestRows(Costs(0.03, 0.002), most=8)
    chosen = []
    for step in range(1500):
        floors = floors_of(rows)
        chosen += rows.choose([chain(0.6) if floors else EMPTY_TREE])
        looked = (0.08 if step in (0, 700) else 0.001) if floors else 0.0
        spent(rows, 0.03 + 0.002 * (chosen[-1] - 1) + looked, looked, 1 + (chosen[-1] > 1 and step % 5 < 3))
    assert chosen[500:700].count(2) > 150
    assert chosen[-200:].count(2) > 150


def test_a_text_that_repeats_itself_does_not_hide_the_next_ones_candidates() -> None:
    rows = BestRows(Costs(1.0, 0.3), most=8)
    chosen = []
    for step in range(1500):
        floors = floors_of(rows)
        likely = chain(0.99, 0.98, 0.97, 0.96) if step < 300 else chain(0.5)
        chosen += rows.choose([reaching(floors, likely)])
        comes = chosen[-1] - 1 if step < 300 else (chosen[-1] > 1) * (step % 2)
        spent(rows, 1.0 + 0.3 * (chosen[-1] - 1), 0.0, 1 + comes)
    assert chosen[100:300].count(5) > 150
    assert chosen[-200:].count(2) > 100


def test_no_look_is_in_vain() -> None:
    """Among plain steps, whatever is looked at may be taken."""
    costs = Costs(1.0, 1.0)
    rows = BestRows(costs, most=8)
    for _ in range(300):
        floors = floors_of(rows)
        assert rows.choose([chain(0.3) if floors else EMPTY_TREE]) == [1]
        spent(rows, 1.0, 0.0, 1)
    costs.row = 0.0
    for _ in range(_Looks.LONGEST_WAIT):
        if floors_of(rows, context=200):
            assert rows.choose([chain(0.9)]) == [2]
            break
        rows.choose([EMPTY_TREE])
        spent(rows, 1.0, 0.0, 1)
    else:
        pytest.fail("no look")


def test_wide_steps_are_checked_against_a_plain_one_now_and_then() -> None:
    rows = BestRows(Costs(1.0, 0.0), most=8)
    chosen = []
    for _ in range(3 * BestRows.PLAIN_EVERY):
        chosen += after_look(rows, [chain(0.9)])
        spent(rows, 1.0, 0.0, 2)
    assert chosen.count(1) == 3 + BestRows.PLAIN_FIRST
    assert chosen.index(1) == BestRows.WIDE_FIRST


def test_where_nothing_pays_few_steps_look_for_drafts() -> None:
    rows = BestRows(Costs(1.0, 1.0), most=8)
    looks = []
    for step in range(2000):
        floors = floors_of(rows)
        looks += [step] * bool(floors)
        assert rows.choose([chain(0.3) if floors else EMPTY_TREE]) == [1]
        looked = 0.1 if floors else 0.0
        spent(rows, 1.0 + looked, looked, 1)
    assert len(looks) < 8 / 0.1 + 8 * 2000 / _Looks.LONGEST_WAIT + 30
    assert max(b - a for a, b in itertools.pairwise(looks)) == _Looks.LONGEST_WAIT + 1


def test_batches_of_another_size_look_for_themselves() -> None:
    """Sixteen sequences lose by looking, which takes as long for each of them; one does not."""
    costs = Costs(1.0, 0.05)
    rows = BestRows(costs, most=8)
    looks: dict[int, list[bool]] = {1: [], 16: []}
    for batch in (16, 1) * 200:
        floors = floors_of(rows, batch)
        (width, *_) = rows.choose([chain(0.3) if floors else EMPTY_TREE] * batch)
        looked = 0.03 * batch * width if floors else 0.0
        seconds = float(costs.seconds(batch, np.array([width]), 100)[0]) + looked
        tokens = round(batch * (1 + 0.3 * (width > 1)) + 0.2)
        rows.spent(seconds, looked, [1] * (batch - 1) + [tokens - batch + 1])
        looks[batch].append(looked > 0)
    assert sum(looks[16][-100:]) < 10
    assert sum(looks[1][-100:]) == 100


@given(
    row=st.floats(0.001, 0.6),
    free=st.integers(0, 24),
    trees=st.lists(st.lists(st.floats(0.4, 1.0), max_size=7), min_size=1, max_size=3),
)
def test_what_the_floors_leave_out_no_step_would_take(row: float, free: int, trees: list[list[float]]) -> None:
    whole = [chain(*itertools.accumulate(probs, operator.mul)) for probs in trees]
    rows = BestRows(Costs(1.0, row, free), most=8)
    floors = floors_of(rows, len(whole))
    assert rows.choose([reaching(floors, tree) for tree in whole]) == rows.choose(whole)


def test_behind_free_rows_the_floor_is_what_others_cost() -> None:
    floors = floors_of(BestRows(Costs(1.0, 0.1, free=4), most=8))
    assert floors == pytest.approx([1e-3] * 3 + [0.1] * 4)
    assert floors_of(BestRows(Costs(1.0, 0.1, free=8), most=8), 2) == pytest.approx([1e-3] * 6 + [0.2])


class Steep(Costs):
    """Rows that are dear at first, and free from the fifth on."""

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray:
        return super().seconds(sequences, np.minimum(rows, 4), context)


@pytest.mark.parametrize("batch", [1, 3])
def test_free_rows_further_on_do_not_make_the_first_ones_free(batch: int) -> None:
    floors = floors_of(BestRows(Steep(1.0, 0.1), most=9), batch)
    seconds = 1.0 + 0.1 * batch
    assert floors == pytest.approx([0.3 * batch / 8 / seconds] * 8)


def test_what_wide_steps_really_take_raises_the_floors() -> None:
    """Once a plain step has been measured too: else the machine may be slow."""
    rows = BestRows(Costs(1.0, 0.1), most=8)
    for draft, seconds in ((EMPTY_TREE, 1.0), (chain(0.9), 1.5 * 1.1)):
        before = floors_of(rows)
        (width,) = rows.choose([draft])
        spent(rows, seconds, 0.0, width)
    assert width == 2
    assert all(now > then for now, then in zip(floors_of(rows), before, strict=True))


def test_fixed_rows_are_fixed() -> None:
    assert FixedRows(7).choose([EMPTY_TREE, EMPTY_TREE]) == [7, 7]
    assert len(floors_of(FixedRows(7), 2)) == 6
    assert not floors_of(FixedRows(1), 2), "there is no row for a draft"


def test_what_wide_steps_tell_of_the_machine_holds_for_plain_ones() -> None:
    """At least half the way, until they are measured: the first ones fall into a slow time."""
    rows = BestRows(Costs(1.0, 0.1), most=8)
    for step in range(60):
        (width,) = after_look(rows, [chain(0.9)])
        slow = 2.0 if step < 20 else 1.0
        spent(rows, slow * (1.0 + 0.1 * (width - 1)), 0.0, width)
    assert rows._pace[False].value < 1.5


def widths(steps: int, seconds: Callable[[int, bool], float]) -> list[int]:
    """Of so many steps that take `seconds` (step, whether it is wide), with one draft, as lucky as promised."""
    rows = BestRows(Costs(1.0, 0.05), most=8)
    lucky = random.Random(0)
    chosen = []
    for step in range(steps):
        chosen += after_look(rows, [chain(0.6)])
        wide = chosen[-1] > 1
        spent(rows, seconds(step, wide), 0.0, 1 + (wide and lucky.random() < 0.6))
    return chosen


@pytest.mark.parametrize("slower", [1.8, 3.0])
def test_wide_steps_that_become_slow_are_given_up(slower: float) -> None:
    """Contexts grow, say, and only wide steps suffer: for a time that looks as if the machine were slow."""
    chosen = widths(4000, lambda step, wide: (1.05 * (slower if step >= 1000 else 1.0)) if wide else 1.0)
    assert chosen[500:1000].count(2) > 450
    assert chosen[-1000:].count(2) < 100


def test_a_machine_that_is_far_slower_than_its_table_drafts_as_ever() -> None:
    chosen = widths(1000, lambda _, wide: 8 * (1.05 if wide else 1.0))
    assert chosen[-500:].count(2) > 450
