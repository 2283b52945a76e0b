"""LADE: lookahead decoding (Fu et al. 2024, arXiv 2402.02057): n-grams from Jacobi iterations beside the text.

L tokens of an n-gram, W columns of the window, G n-grams that a step verifies; (L - 1)(W + G) rows a step.

From the paper: a window of L - 1 levels, level l of column i being a guess of the token i + l places behind the root
(level 0 of column 0 is the root itself). Level 0 is a chain; the deeper levels of a column hang below its level 0. The
model's answers at the last level are the next window's last level, all others move up by one and forward by one place.
A column's tokens from level 0 to its new one are an n-gram that the model itself made, and go into a pool by their
first token; each step verifies the G newest of the root's. Prompt and output give n-grams too (the paper's "prompt as
reference"). The window begins with tokens of the prompt, drawn at random, and moves one place a step however many
tokens are committed (the authors' code does the same).

Choices here: the window's rows see what they must because they are tree nodes like any other, so the accept walk may
follow them as well (the authors verify pool n-grams alone); n-grams that begin alike share rows; near the end of a
sequence, where its columns would lie behind the last token, the window narrows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from esp_worker.drafters.base import Prompt, Room, Seen, Unprobed, Watch
from esp_worker.tree import ROOT, TokenTree

# (L, W, G) by the rows that they take: those that the ESP paper compares with.
PAPERS_LOOKAHEADS = {10: (3, 4, 1), 30: (4, 5, 5), 60: (5, 8, 7)}


def lookahead_rows(size: int, width: int, guesses: int) -> int:
    """Block complexity of (L, W, G)."""
    return (size - 1) * (width + guesses)


class NgramPool:
    """The newest `most` n-grams of `size` tokens by their first token."""

    def __init__(self, size: int, most: int) -> None:
        self._size, self._most = size, most
        self._rest: dict[int, list[tuple[int, ...]]] = {}  # first token -> the others, newest last
        self._tail: list[int] = []  # the text's last tokens, fewer than an n-gram has

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        known = self._rest.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[: -self._most]

    def read(self, text: Sequence[int]) -> None:
        """Add the n-grams that `text` completes, which goes on where the last one ended."""
        tokens = [*self._tail, *text]
        for start in range(len(tokens) - self._size + 1):
            self.add(tokens[start], tuple(tokens[start + 1 : start + self._size]))
        self._tail = tokens[-(self._size - 1) :]

    def after(self, token: int) -> Sequence[tuple[int, ...]]:
        """What the n-grams that begin with `token` go on with, newest first."""
        return self._rest.get(token, [])[::-1]


class Window:
    """levels[l][i]: level l of column i; level 0 lacks column 0, the root. `ends`: rows of each column's last level in
    the block that was drafted last."""

    def __init__(self, levels: list[list[int]]) -> None:
        self.levels = levels
        self.ends: list[int] = []

    def narrow(self, columns: int) -> None:
        self.levels = [self.levels[0][: max(columns - 1, 0)], *(level[:columns] for level in self.levels[1:])]

    def ngrams(self, root: int, answers: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """(first token, the rest) of each column, its new token last."""
        firsts = [root, *self.levels[0]]
        return [
            (first, (*(level[column] for level in self.levels[1:]), answer))
            for column, (first, answer) in enumerate(zip(firsts, answers, strict=False))
        ]

    def advance(self, answers: list[int]) -> None:
        first, *others = [*self.levels[1:], answers]
        self.levels = [first[1:], *others]


class Lookahead(Unprobed):
    """lookahead: (L, W, G)."""

    name = "lade"
    watch: Watch | None = Watch(best=1)

    def __init__(self, *, lookahead: Sequence[int] = (4, 5, 5)) -> None:
        self._size, self._width, self._guesses = lookahead

    def start(self, prompt: Prompt) -> tuple[NgramPool, Window]:
        pool = NgramPool(self._size, self._guesses)
        pool.read(prompt.ids)
        draw = random.Random(str(prompt.ids))  # of the prompt alone
        widths = [self._width - 1, *[self._width] * (self._size - 2)]
        return pool, Window([draw.choices(prompt.ids, k=width) for width in widths])

    def tree(self, state: tuple[NgramPool, Window], root_token: int, room: Room) -> TokenTree:
        pool, window = state
        window.narrow(max(min(self._width, room.max_depth - (self._size - 2) + 1), 0))
        nodes = _Nodes()
        for rest in pool.after(root_token):
            row = ROOT
            for token in rest[: room.max_depth]:
                row = nodes.shared(row, token)
        rows = [ROOT]
        for token in window.levels[0]:
            rows.append(nodes.own(rows[-1], token))
        for level in window.levels[1:]:
            rows = [nodes.own(row, token) for row, token in zip(rows, level, strict=False)]
        window.ends = rows
        return TokenTree(tuple(nodes.tokens), tuple(nodes.parents))

    def saw(self, states: Sequence[tuple[NgramPool, Window]], seen: Sequence[Seen]) -> None:
        for (pool, window), each in zip(states, seen, strict=True):
            answers = [int(each.best[row][0]) for row in window.ends]
            for first, rest in window.ngrams(each.tokens[ROOT], answers):
                pool.add(first, rest)
            window.advance(answers)

    def observe(
        self,
        states: Sequence[tuple[NgramPool, Window]],
        committed: Sequence[Sequence[int]],
        probe_logits: Sequence[torch.Tensor],
    ) -> None:
        for (pool, _), run in zip(states, committed, strict=True):
            pool.read(run)


class _Nodes:
    """A tree in the making."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._rows: dict[tuple[int, int], int] = {}

    def own(self, parent: int, token: int) -> int:
        """The row of a new node."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens)

    def shared(self, parent: int, token: int) -> int:
        """The row of the one such node."""
        if (parent, token) not in self._rows:
            self._rows[parent, token] = self.own(parent, token)
        return self._rows[parent, token]
