"""A budget chooses rows, never tokens: under any of them the engine gives the reference's tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiny import mixed_requests, tiny_model

from esp_worker import reference
from esp_worker.budget import PLAIN, AutoBudget, Share
from esp_worker.cache import SlotCache
from esp_worker.drafters.base import Prompt, Room, Turn
from esp_worker.drafters.budgeted import BudgetedDrafter
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.step import Step
from esp_worker.tree import Candidates, Draft, TokenTree
from esp_worker.types import SamplingParams


class RandomBudget:
    """Whatever comes up for each sequence of each step: nothing, probes alone, a tree without probes, both."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seen: set[tuple[bool, bool]] = set()

    def calibrated(self, levels: Sequence[Candidates]) -> list[Candidates]:
        return list(levels)

    def choose(self, trees: Sequence[TokenTree], context: int) -> list[Share]:
        shares = [Share(self.random.choice([0, 0, 3, 12]), self.random.choice([0, 1, 2, 5, 12])) for _ in trees]
        self.seen |= {
            (bool(share.nodes and tree), bool(share.owners)) for share, tree in zip(shares, trees, strict=True)
        }
        return shares

    def learn(self, levels: Sequence[Candidates], committed: Sequence[int]) -> None:
        return None

    def spent(self, seconds: float, tokens: int) -> None:
        return None


class Costs:
    """Seconds of a step that grow with the rows of the batch."""

    def __init__(self, fixed: float, row: float) -> None:
        self.fixed, self.row = fixed, row

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray:
        return self.fixed + self.row * sequences * np.asarray(rows, np.float64)


def engine_with(family: str, budget: Any, slots: int = 3, **settings: Any) -> Engine:
    model = tiny_model(family)
    probe = ProbeDrafter(model.embed, block_complexity=40, **settings)
    return Engine(model, [BudgetedDrafter(probe, budget), NoDrafter()], slots=slots)


def assert_as_reference(engine: Engine, family: str, **sampling: Any) -> list[Any]:
    asked = mixed_requests(**sampling)
    done = {completion.request_id: completion for completion in engine.generate(asked)}
    for item in asked:
        want = reference.decode(tiny_model(family), item)
        got = done[item.request_id]
        assert (got.token_ids, got.finish_reason) == (want.token_ids, want.finish_reason)
    return list(done.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("family", "masks", "tree"), [("llama", 1, "dynamic"), ("gemma3", 2, "best_first")])
def test_a_random_choice_at_each_step(family: str, masks: int, tree: str, temperature: float, seed: int) -> None:
    """Sequences of one step get different shares; drafts stop and begin again."""
    budget = RandomBudget(seed)
    done = assert_as_reference(
        engine_with(family, budget, masks=masks, tree=tree), family, temperature=temperature, seed=seed
    )
    assert budget.seen == {(False, False), (False, True), (True, False), (True, True)}
    assert sum(completion.stats.accepted_tokens for completion in done) > 0
    for completion in done:
        assert 0 <= completion.stats.plain_steps <= completion.stats.decode_calls
    assert sum(completion.stats.plain_steps for completion in done) > 0


@pytest.mark.parametrize("row", [1e-6, 0.02, 10.0])
def test_auto_where_rows_are_free_and_where_they_are_dear(row: float) -> None:
    """The tokens are the same; what is spent on them is not."""
    budget = AutoBudget(Costs(0.01, row), masks=2, max_rows=20)
    done = [
        completion
        for seed in range(4)
        for completion in assert_as_reference(engine_with("llama", budget, masks=2), "llama", seed=seed)
    ]
    drafted = sum(completion.stats.drafted_tokens for completion in done)
    calls = sum(completion.stats.decode_calls for completion in done)
    rows = sum(completion.stats.rows_computed for completion in done)
    if row == 10.0:
        assert drafted == 0
        assert rows <= 1.1 * calls  # a few explored: their share is of real time
    if row == 1e-6:
        assert drafted > calls, "once it has seen some plain steps"


def test_off_is_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots alone: B rows, no probes, no masks, whatever the sequences have candidates for."""

    class Off(RandomBudget):
        def choose(self, trees: Sequence[TokenTree], context: int) -> list[Share]:
            self.seen |= {(bool(tree), False) for tree in trees}
            return [PLAIN for _ in trees]

    budget = Off(0)
    engine = engine_with("llama", budget, masks=2)
    widths: list[int] = []

    def watched(model: CausalModel, cache: SlotCache, sequences: Any, drafts: Sequence[Draft], chunks: Any) -> Step:
        widths.extend(draft.shape.rows for draft in drafts)
        return Step(model, cache, sequences, drafts, chunks)

    monkeypatch.setattr("esp_worker.engine.Step", watched)
    for completion in assert_as_reference(engine, "llama"):
        stats = completion.stats
        assert stats.rows_computed == stats.decode_calls == stats.plain_steps
    assert set(widths) == {1}
    assert (True, False) in budget.seen, "the prompt's own candidates were there"


def test_a_draft_is_cut_to_its_share_and_calibrated_first() -> None:
    class Fixed(RandomBudget):
        def calibrated(self, levels: Sequence[Candidates]) -> list[Candidates]:
            return [Candidates(level.tokens[::-1], level.probs) for level in levels]

        def choose(self, trees: Sequence[TokenTree], context: int) -> list[Share]:
            assert context == 9, "the longest one's"
            assert [len(tree) for tree in trees] == [3, 0]
            return [Share(2, 2), Share(2, 2)]

    model = tiny_model("llama")
    drafter = BudgetedDrafter(ProbeDrafter(model.embed, block_complexity=40), Fixed(0))
    states = [drafter.start(Prompt((1, 2, 3), SamplingParams(20), model.embed, model.device)) for _ in range(2)]
    states[0].levels = [Candidates([3, 4, 5], [0.5, 0.3, 0.1])]
    turns = [Turn(state, 9, Room(20), length) for state, length in zip(states, (4, 9), strict=True)]
    first, second = drafter.draft_all(turns, waiting=False)
    assert (first.tree.tokens, first.owners, first.shape.rows) == ((5, 4), (1, 2), 5), (
        "P 0.5 and 0.3; the root's is 0.2"
    )
    assert (len(second.tree), second.owners, second.shape.rows) == (0, (0,), 2)
