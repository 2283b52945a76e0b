"""The protocol that every drafting method fills. H hidden size, V vocabulary, k masks, P prompt length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from esp_worker.tree import Draft, TokenTree, row_depths


@dataclass(frozen=True, slots=True)
class Room:
    """What a sequence may still use. tokens: how many it may commit; the context has a position for each of them, and
    nothing behind the last is of use."""

    tokens: int

    @property
    def max_depth(self) -> int:
        """Deepest useful node: a step commits at most depth + 1 tokens."""
        return max(self.tokens - 1, 0)

    def masks(self, wanted: int) -> int:
        """Useful masks per owner: mask j serves depth j of the next step, which has at most tokens - 1 to commit."""
        return max(min(wanted, self.tokens - 2), 0)


@dataclass(frozen=True, slots=True)
class Turn:
    """A running sequence, as a drafter sees it in front of a step. state: the drafter's own; length: context tokens."""

    state: Any
    root_token: int
    room: Room
    length: int


class Drafter(Protocol):
    """A drafting method. It never decides tokens, only what is worth verifying."""

    name: str
    masks: int  # k: mask rows behind the prompt, and probe rows per owner

    def start(self, prompt_embeds: torch.Tensor) -> Any:
        """State of a new sequence, from its prompt's embeddings [P, H]."""
        ...

    def mask_embeds(self, state: Any) -> torch.Tensor:
        """[k, H] the sequence's mask tokens."""
        ...

    def draft_all(self, turns: Sequence[Turn]) -> list[Draft]:
        """The trees and probes of the next step: one block for each of its sequences, at least one."""
        ...

    def observe(
        self,
        states: Sequence[Any],
        committed: Sequence[Sequence[int]],
        probe_logits: Sequence[torch.Tensor],
    ) -> None:
        """Learn from a step: per sequence its committed tokens, in order, and the logits [<= k, V] of the probes of
        its deepest accepted node (no rows where it owned none)."""
        ...

    def spent(self, seconds: float, tokens: int) -> None:
        """The step of the last draft_all is over: how long it took, and how many tokens all its sequences committed."""
        ...


class EachByItself(ABC):
    """The part of a Drafter that a method needs no more than once: it drafts for a sequence without regard to the
    others, and whatever steps cost."""

    @abstractmethod
    def draft(self, state: Any, root_token: int, room: Room) -> Draft:
        """The tree and probes of one sequence's next block."""

    def draft_all(self, turns: Sequence[Turn]) -> list[Draft]:
        return [self.draft(turn.state, turn.root_token, turn.room) for turn in turns]

    def spent(self, seconds: float, tokens: int) -> None:
        return None


def possible_owners(tree: TokenTree, masks: int, room: Room) -> tuple[int, ...]:
    """Root and nodes whose `masks` probes stay within the room, and so inside the context: all, except near its end."""
    return tuple(row for row, depth in enumerate(row_depths(tree.parents)) if masks and depth + masks <= room.tokens)
