"""ESP under a budget that sees all sequences of a step at once: rows follow what they bring and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esp_worker.budget import Budget
from esp_worker.drafters.base import Prompt, Seen, Turn, Watch
from esp_worker.drafters.probe import ProbeDrafter, ProbeState
from esp_worker.tree import EMPTY_TREE, Draft, TokenTree, most_probable


class BudgetedDrafter:
    """A ProbeDrafter whose trees are cut, and whose probes are dealt out, as `budget` chooses; its own block complexity
    is the most that a sequence gets. Where the budget chooses nothing, a step is plain decoding's: the roots alone."""

    watch: Watch | None = None

    def __init__(self, probe: ProbeDrafter, budget: Budget) -> None:
        self.name, self.masks = probe.name, probe.masks
        self._probe, self._budget = probe, budget

    def start(self, prompt: Prompt) -> ProbeState:
        return self._probe.start(prompt)

    def mask_embeds(self, state: ProbeState) -> torch.Tensor:
        return self._probe.mask_embeds(state)

    def probe_embeds(self, state: ProbeState, draft: Draft) -> torch.Tensor:
        return self._probe.probe_embeds(state, draft)

    def draft_all(self, turns: Sequence[Turn], waiting: bool) -> list[Draft]:
        trees = [self._largest(turn) for turn in turns]
        shares = self._budget.choose(trees, max(turn.length for turn in turns))
        return [
            self._probe.block(most_probable(tree, share.nodes), turn.room, share.owners)
            for turn, tree, share in zip(turns, trees, shares, strict=True)
        ]

    def _largest(self, turn: Turn) -> TokenTree:
        if not turn.state.levels:
            return EMPTY_TREE
        return self._probe.grow(self._budget.calibrated(turn.state.levels), turn.root_token, turn.room)

    def observe(
        self,
        states: Sequence[ProbeState],
        committed: Sequence[Sequence[int]],
        probe_logits: Sequence[torch.Tensor],
    ) -> None:
        for state, run in zip(states, committed, strict=True):
            self._budget.learn(state.levels, run)
        self._probe.observe(states, committed, probe_logits)

    def saw(self, states: Sequence[ProbeState], seen: Sequence[Seen]) -> None:
        raise AssertionError("without `watch` there is nothing to see")

    def spent(self, seconds: float | None, drafting: float, tokens: Sequence[int]) -> None:
        self._budget.spent(seconds, sum(tokens))
