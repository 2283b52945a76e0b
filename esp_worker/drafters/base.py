"""The protocol that every drafting method fills.

H hidden size, V vocabulary, k masks, P prompt length, R rows of one sequence, K best tokens of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch

from esp_worker.tree import Draft, TokenTree, block_shape, row_depths
from esp_worker.types import SamplingParams


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


@dataclass(frozen=True)
class Prompt:
    """What a new sequence begins with, and how its tokens will be chosen. embed: ids [n] -> embeddings [n, H]."""

    ids: tuple[int, ...]
    sampling: SamplingParams
    embed: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device

    @cached_property
    def embeds(self) -> torch.Tensor:
        """[P, H], made when a method asks for them."""
        return self.embed(torch.tensor(self.ids, device=self.device))


@dataclass(frozen=True, slots=True)
class Watch:
    """What a method wants to see of the model's answers. best: K; probs: their log-probabilities too, in the `whole`
    vocabulary, or among the `best` alone, which costs nothing; prompt: of the prompt's rows too (those that are
    computed: not of a beginning that was taken over from another row)."""

    best: int
    probs: Literal["none", "whole", "best"] = "none"
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """The model's answers behind some rows of one sequence. tokens [R]: the rows' own; path: those of them, in order,
    that the sequence keeps (chunk of a prompt: all; a block: the root and the accepted nodes); best [R, K]: the most
    probable next tokens, best first; logprobs [R, K]: theirs, None unless asked for."""

    tokens: Sequence[int]
    path: Sequence[int]
    best: np.ndarray
    logprobs: np.ndarray | None


class Drafter(Protocol):
    """A drafting method. It never decides tokens, only what is worth verifying. masks and watch may change with each
    step's drafts."""

    name: str
    masks: int  # k: mask rows behind the prompt, and probe rows per owner
    watch: Watch | None  # None: it never looks at the rows' answers, and nothing is computed for it

    def start(self, prompt: Prompt) -> Any:
        """State of a new sequence."""
        ...

    def mask_embeds(self, state: Any) -> torch.Tensor:
        """[k, H] the mask tokens behind the sequence's prompt."""
        ...

    def probe_embeds(self, state: Any, draft: Draft) -> torch.Tensor:
        """[owners * masks, H] those of the draft's probe rows, by owner."""
        ...

    def draft_all(self, turns: Sequence[Turn], waiting: bool) -> list[Draft]:
        """The trees and probes of the next step: one block for each of its sequences, at least one. waiting: whether
        another sequence takes the slot of one that ends."""
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

    def saw(self, states: Sequence[Any], seen: Sequence[Seen]) -> None:
        """Learn from what `watch` asks for, of a chunk of a prompt or of a step; in front of that step's observe."""
        ...

    def spent(self, seconds: float | None, drafting: float, tokens: Sequence[int]) -> None:
        """The step of the last draft_all is over: how long it took (None where its pass prefilled too), how long of
        that this method worked (draft_all, saw, observe), and how many tokens each of its sequences committed. A step
        that some of these sequences had to leave has no end."""
        ...


class EachByItself(ABC):
    """The part of a Drafter that a method needs no more than once: it drafts for a sequence without regard to the
    others, whatever steps cost, and (but for a `watch` of its own) without a look at the rows' answers."""

    watch: Watch | None = None

    @abstractmethod
    def draft(self, state: Any, root_token: int, room: Room) -> Draft:
        """The tree and probes of one sequence's next block."""

    def draft_all(self, turns: Sequence[Turn], waiting: bool) -> list[Draft]:
        return [self.draft(turn.state, turn.root_token, turn.room) for turn in turns]

    def saw(self, states: Sequence[Any], seen: Sequence[Seen]) -> None:
        raise AssertionError("without `watch` there is nothing to see")

    def spent(self, seconds: float | None, drafting: float, tokens: Sequence[int]) -> None:
        return None


class Unprobed(EachByItself):
    """A method without mask tokens: its blocks are the root and a tree."""

    masks = 0

    def mask_embeds(self, state: Any) -> torch.Tensor:
        raise AssertionError("this method has no mask tokens")

    def probe_embeds(self, state: Any, draft: Draft) -> torch.Tensor:
        raise AssertionError("this method has no mask tokens")

    def draft(self, state: Any, root_token: int, room: Room) -> Draft:
        tree = self.tree(state, root_token, room)
        return Draft(tree, block_shape(tree.parents, (), 0))

    @abstractmethod
    def tree(self, state: Any, root_token: int, room: Room) -> TokenTree:
        """What is drafted behind the root."""


def possible_owners(tree: TokenTree, masks: int, room: Room) -> tuple[int, ...]:
    """Root and nodes whose `masks` probes stay within the room, and so inside the context: all, except near its end."""
    return tuple(row for row, depth in enumerate(row_depths(tree.parents)) if masks and depth + masks <= room.tokens)
