"""The accept walk: which draft nodes the model itself would have chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esp_worker.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """path: rows kept, the root first, then the accepted nodes; tokens: accepted tokens and, last, the bonus token.

    tokens[i] is the model's choice after row path[i].
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept_walk(tree: TokenTree, choose: Callable[[int, Sequence[int]], int]) -> Verdict:
    """Walk from the root along the model's own choices.

    choose(row, accepted) is the model's token after `row`, the tokens accepted on the way to it being `accepted`:
    argmax or the draw of that position, with penalties that count this path. Where a child carries it, go there; else
    it is the bonus token and the walk ends.
    """
    path: list[int] = [ROOT]
    tokens: list[int] = []
    while True:
        token = choose(path[-1], tokens)
        child = next((row for row, drafted in tree.children(path[-1]) if drafted == token), None)
        tokens.append(token)
        if child is None:
            return Verdict(tuple(path), tuple(tokens))
        path.append(child)
