"""Token Recycling (Luo et al. 2024, arXiv 2408.08696): the model's own runners-up are the next draft.

From the paper: a matrix that holds, for every token of the vocabulary, the model's K = 8 best next tokens when it last
stood in a row; every row updates it, those of rejected nodes and of the prompt too; the next tree is grown from it by
breadth, each node's children being its token's entries; the matrix lives on from one sequence to the next. Its tree is
a fixed template, found once by measuring which ranks are accepted.

Choices here: the template holds the positions of highest expected acceptance, the product of RANK_ACCEPTANCE down to
them, for any number of rows; the rows of a position whose token was never seen go to the next best ones. All sequences
of an engine share the matrix: what is drafted, and so how many calls a row takes, depends on its neighbours; tokens
never do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from esp_worker.drafters.base import Prompt, Room, Seen, Unprobed, Watch
from esp_worker.tree import TokenTree, grow_best_first

# P(the model takes the candidate of this rank | its parent was taken).
RANK_ACCEPTANCE = (0.40, 0.10, 0.055, 0.04, 0.03, 0.023, 0.018, 0.015)
_UNSEEN = -1


class AdjacencyMatrix:
    """V x K matrix: each token's most probable next tokens, best first, when it was last seen."""

    def __init__(self, vocab_size: int) -> None:
        self._best = np.full((vocab_size, min(len(RANK_ACCEPTANCE), vocab_size)), _UNSEEN)

    def learn(self, seen: Seen) -> None:
        tokens, path = np.asarray(seen.tokens), list(seen.path)
        self._best[tokens] = seen.best
        self._best[tokens[path]] = seen.best[path]  # of a token in several rows, the text's own last

    def of(self, token: int) -> Iterator[tuple[int, float]]:
        """(token, expected acceptance), best first; nothing where `token` has not been seen."""
        best = self._best[token].tolist()
        return zip(best, RANK_ACCEPTANCE, strict=False) if best[0] != _UNSEEN else iter(())


class TokenRecycling(Unprobed):
    """block_complexity: rows of a step, the root's included."""

    name = "recycle"
    watch: Watch | None = Watch(best=len(RANK_ACCEPTANCE), prompt=True)

    def __init__(self, vocab_size: int, *, block_complexity: int = 30) -> None:
        self._matrix = AdjacencyMatrix(vocab_size)
        self._nodes = block_complexity - 1

    def start(self, prompt: Prompt) -> None:
        return None

    def tree(self, state: None, root_token: int, room: Room) -> TokenTree:
        def children(path: tuple[int, ...]) -> Iterator[tuple[int, float]]:
            return self._matrix.of(path[-1] if path else root_token)

        return grow_best_first(children, [0.0] * self._nodes, room.max_depth)

    def saw(self, states: Sequence[None], seen: Sequence[Seen]) -> None:
        for each in seen:
            self._matrix.learn(each)

    def observe(
        self, states: Sequence[None], committed: Sequence[Sequence[int]], probe_logits: Sequence[torch.Tensor]
    ) -> None:
        return None
