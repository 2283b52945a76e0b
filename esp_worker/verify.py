"""The accept walk: which draft nodes the model itself would have chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from esp_worker.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """path: rows kept, the root first, then the accepted nodes; tokens: accepted tokens and, last, the bonus token."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept_walk(tree: TokenTree, choose: Callable[[int, int], int]) -> Verdict:
    """Walk from the root along the model's own choices.

    choose(row, depth) is the model's token after `row` (argmax, or the draw of that position). Where a child carries
    it, go there; else it is the bonus token and the walk ends.
    """
    path: list[int] = [ROOT]
    tokens: list[int] = []
    while True:
        token = choose(path[-1], len(tokens))
        tokens.append(token)
        child = next((row for row, drafted in tree.children(path[-1]) if drafted == token), None)
        if child is None:
            return Verdict(tuple(path), tuple(tokens))
        path.append(child)
