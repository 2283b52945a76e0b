"""The accept walk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from esp_worker.tree import EMPTY_TREE, TokenTree
from esp_worker.verify import accept_walk

#            root -> 5 (row 1) -> 6 (row 2) -> 7 (row 4); root -> 8 (row 3)
TREE = TokenTree(tokens=(5, 6, 8, 7), parents=(0, 1, 0, 2))


@pytest.mark.parametrize(
    ("choices", "path", "tokens"),
    [
        ({0: 9}, (0,), (9,)),
        ({0: 8, 3: 5}, (0, 3), (8, 5)),  # 5 is a node, but no child of row 3
        ({0: 5, 1: 6, 2: 7, 4: 1}, (0, 1, 2, 4), (5, 6, 7, 1)),
        ({0: 5, 1: 7}, (0, 1), (5, 7)),
    ],
)
def test_walk(choices: dict[int, int], path: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    asked = []

    def choose(row: int, accepted: Sequence[int]) -> int:
        asked.append((row, tuple(accepted)))
        return choices[row]

    verdict = accept_walk(TREE, choose)
    assert verdict.path == path
    assert verdict.tokens == tokens
    # Each visited node is asked once, with the tokens on its own path and no others.
    assert asked == [(row, tokens[:depth]) for depth, row in enumerate(path)]


def test_empty_tree_gives_the_bonus_alone() -> None:
    assert accept_walk(EMPTY_TREE, lambda row, accepted: 3).tokens == (3,)
