"""The token tree of one decode step and the block of rows that verifies it.

A block's rows: [root | draft nodes, every parent before its children | probe rows, grouped by owner].
Row 0 is the root (the last committed token, not yet in the KV cache); node i is row i + 1; owners are root and nodes.
k probe rows (mask tokens) belong to each owner. N rows in all, the block complexity; in the paper root and every node
are owners, and N = (k + 1)(1 + nodes).

P(node) is the draft's own estimate that the model's path goes through a node: the product of the masks' probabilities
down to it. P(root) = 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

import torch

ROOT = 0


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft nodes under the root. tokens[i] is node i's token, parents[i] the row of its parent (0: the root), probs[i]
    its P (empty in a tree that nothing estimated)."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents)
        assert all(0 <= parent <= node for node, parent in enumerate(self.parents)), "parents come before children"

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, row: int) -> Iterator[tuple[int, int]]:
        """(row, token) of each child of `row`."""
        for node, parent in enumerate(self.parents):
            if parent == row:
                yield node + 1, self.tokens[node]


EMPTY_TREE = TokenTree()


def row_depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of root and nodes, by row."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return tuple(depths)


@dataclass(frozen=True)
class BlockShape:
    """Geometry of a block without its tokens.

    offsets: [N] position of each row relative to the root's; visible: [N, N] bool, row sees column, within the block
    (what it sees of the cache is all of it, up to a layer's window).
    """

    parents: tuple[int, ...]
    owners: tuple[int, ...]
    masks: int

    @property
    def token_rows(self) -> int:
        """Root and nodes."""
        return 1 + len(self.parents)

    @property
    def rows(self) -> int:
        return self.token_rows + self.masks * len(self.owners)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of root and nodes, by row."""
        return row_depths(self.parents)

    def probe_rows(self, owner: int) -> range:
        """Rows of the probes that `owner` owns; empty when it owns none."""
        if owner not in self.owners:
            return range(0)
        first = self.token_rows + self.masks * self.owners.index(owner)
        return range(first, first + self.masks)

    @cached_property
    def offsets(self) -> torch.Tensor:
        offsets = list(self.depths)
        for owner in self.owners:
            offsets += [self.depths[owner] + j for j in range(1, self.masks + 1)]
        return torch.tensor(offsets, dtype=torch.long)

    @cached_property
    def visible(self) -> torch.Tensor:
        visible = torch.zeros(self.rows, self.rows, dtype=torch.bool)
        visible[ROOT, ROOT] = True
        for row, parent in enumerate(self.parents, start=1):
            visible[row] = visible[parent]
            visible[row, row] = True
        for owner in self.owners:
            rows = self.probe_rows(owner)
            for row in rows:
                visible[row] = visible[owner]
                visible[row, rows.start : row + 1] = True
        return visible


@lru_cache(maxsize=4096)
def block_shape(parents: tuple[int, ...], owners: tuple[int, ...], masks: int) -> BlockShape:
    """The one BlockShape of these arguments, so that its tensors are built once."""
    return BlockShape(parents, owners, masks)


# How a step comes by its shape (the paper's table 4). Shapes recur, so the efficient form keeps them (appendix E, for
# every tree rather than for one static tree); the naive form builds visibility and offsets anew at each step.
SHAPE_MAKERS: dict[str, Callable[[tuple[int, ...], tuple[int, ...], int], BlockShape]] = {
    "efficient": block_shape,
    "naive": BlockShape,
}


@dataclass(frozen=True, slots=True)
class Draft:
    """What one sequence asks of the next step: a tree, and the shape of the block that verifies and probes it."""

    tree: TokenTree
    shape: BlockShape

    @property
    def owners(self) -> tuple[int, ...]:
        """Rows that own probes."""
        return self.shape.owners

    @property
    def masks(self) -> int:
        """Probes per owner."""
        return self.shape.masks


def block_complexity(masks: int, nodes: int, owners: int | None = None) -> int:
    """BC: rows of a block in which `owners` of root and nodes (None: all of them) have `masks` probes each."""
    tokens = 1 + nodes
    return tokens + masks * (tokens if owners is None else min(owners, tokens))


def affordable_nodes(block_complexity: int, masks: int, owners: int | None = None) -> int:
    """Most nodes of a block of that many rows, probes included; below 1 where it is too small for a draft."""
    if owners is None:
        return block_complexity // (masks + 1) - 1
    return block_complexity - 1 - masks * owners


@dataclass(frozen=True, slots=True)
class Candidates:
    """One mask's distribution, best first: what may stand at one depth of the next tree."""

    tokens: Sequence[int]
    probs: Sequence[float]

    def best(self, count: int, exclude: int | None) -> list[tuple[int, float]]:
        """The `count` most probable (token, probability) but for `exclude` (pruned: the next best takes its place)."""
        return list(islice(self.without(exclude), count))

    def without(self, exclude: int | None) -> Iterator[tuple[int, float]]:
        """(token, probability), best first, but for `exclude`."""
        return ((t, p) for t, p in zip(self.tokens, self.probs, strict=True) if t != exclude)


@dataclass(frozen=True, slots=True)
class PruneRule:
    """Drop a candidate that equals its parent token from depth `from_depth` on (None: never)."""

    from_depth: int | None

    def excluded(self, depth: int, parent_token: int) -> int | None:
        return parent_token if self.from_depth is not None and depth >= self.from_depth else None


PRUNE_RULES = {"all": PruneRule(1), "deep": PruneRule(2), "none": PruneRule(None)}


@dataclass(slots=True)
class _Grown:
    token: int
    prob: float
    parent: int  # index in the grown list, -1: the root
    principal: bool  # on the Top-1 chain


def _grow(levels: Sequence[Candidates], widths: Sequence[int], root_token: int, prune: PruneRule) -> list[_Grown]:
    """Top-1 expansion: level i's candidates hang below the best node of level i - 1."""
    grown: list[_Grown] = []
    parent, parent_token, parent_prob = -1, root_token, 1.0
    for depth, (level, width) in enumerate(zip(levels, widths, strict=False), start=1):
        best = level.best(width, prune.excluded(depth, parent_token))
        if not best:
            break
        first = len(grown)
        grown += [_Grown(token, parent_prob * prob, parent, i == 0) for i, (token, prob) in enumerate(best)]
        parent, parent_token, parent_prob = first, grown[first].token, grown[first].prob
    return grown


def _to_tree(grown: Sequence[_Grown], kept: Sequence[int]) -> TokenTree:
    """Principal chain first, so that the usual accepted path already lies where the cache wants it."""
    order = sorted(kept, key=lambda i: (not grown[i].principal, i))
    row = {-1: ROOT} | {index: position + 1 for position, index in enumerate(order)}
    return TokenTree(
        tuple(grown[i].token for i in order),
        tuple(row[grown[i].parent] for i in order),
        tuple(grown[i].prob for i in order),
    )


def static_tree(
    levels: Sequence[Candidates], branches: Sequence[int], root_token: int, prune: PruneRule, max_depth: int
) -> TokenTree:
    """Top-K1 of p_1 under the root, Top-K2 of p_2 under the best depth-1 node, and so on."""
    grown = _grow(levels, branches[:max_depth], root_token, prune)
    return _to_tree(grown, range(len(grown)))


def dynamic_tree(
    levels: Sequence[Candidates], nodes: int, root_token: int, prune: PruneRule, max_depth: int
) -> TokenTree:
    """Algorithm 1: depth i offers its best B - i candidates (B = nodes + 1); the `nodes` most probable are kept.

    A child's probability is its parent's times its own, so no node outranks its ancestors; ties go to the earlier
    node, which an ancestor always is.
    """
    widths = [max(nodes + 1 - depth, 0) for depth in range(1, min(len(levels), max_depth) + 1)]
    grown = _grow(levels, widths, root_token, prune)
    kept = sorted(range(len(grown)), key=lambda i: -grown[i].prob)[:nodes]
    return _to_tree(grown, kept)


def best_first_tree(
    levels: Sequence[Candidates], nodes: int, root_token: int, prune: PruneRule, max_depth: int
) -> TokenTree:
    """Of all paths with p_1 below the root and p_i below every node of depth i - 1."""

    def children(path: tuple[int, ...]) -> Iterable[tuple[int, float]]:
        if len(path) == len(levels):
            return ()
        return levels[len(path)].without(prune.excluded(len(path) + 1, path[-1] if path else root_token))

    return grow_best_first(children, [0.0] * nodes, max_depth)


# What may follow the drafted tokens of a path: (token, probability), best first.
Children = Callable[[tuple[int, ...]], Iterable[tuple[int, float]]]


def grow_best_first(children: Children, floors: Sequence[float], max_depth: int) -> TokenTree:
    """The most probable of all paths that `children` can make, at most `max_depth` long; P(child) = P(parent) times its
    own. The tree's n-th node, counted from 0, has P of floors[n] at least, which never fall: the tree ends where none
    has, or with the last floor.

    Ties go to the shallower node, then to the parent that came first, then to the better candidate.
    """
    grown: list[_Grown] = []
    # One candidate waits per open parent, its best that the tree lacks: those behind it, and all below, are no better.
    waiting: list[tuple[float, int, int, int, int]] = []  # -P, depth, parent (index in grown), rank, token
    below: list[tuple[float, tuple[int, ...], Iterator[tuple[int, float]]]] = []  # by parent + 1: P, path, children

    def open_parent(prob: float, path: tuple[int, ...]) -> None:
        below.append((prob, path, iter(children(path) if len(path) < max_depth else ())))
        offer(len(below) - 2, rank=0)

    def offer(parent: int, rank: int) -> None:
        parent_prob, path, candidates = below[parent + 1]
        for token, prob in islice(candidates, 1):
            heapq.heappush(waiting, (-parent_prob * prob, len(path) + 1, parent, rank, token))

    open_parent(1.0, ())
    while waiting and len(grown) < len(floors) and -waiting[0][0] >= floors[len(grown)]:
        negative, _, parent, rank, token = heapq.heappop(waiting)
        offer(parent, rank + 1)
        grown.append(_Grown(token, -negative, parent, rank == 0 and (parent < 0 or grown[parent].principal)))
        open_parent(-negative, (*below[parent + 1][1], token))
    return _to_tree(grown, range(len(grown)))


def most_probable(tree: TokenTree, count: int) -> TokenTree:
    """The `count` nodes of highest P, which no ancestor of one of them lacks (ties go to the earlier row)."""
    if count >= len(tree):
        return tree
    kept = sorted(sorted(range(len(tree)), key=lambda i: -tree.probs[i])[:count])
    row = {ROOT: ROOT} | {node + 1: position + 1 for position, node in enumerate(kept)}
    return TokenTree(
        tuple(tree.tokens[i] for i in kept),
        tuple(row[tree.parents[i]] for i in kept),
        tuple(tree.probs[i] for i in kept),
    )


def ending_probs(tree: TokenTree) -> list[float]:
    """By row, P that it is the deepest accepted one: P(row) less what its drafted children take of it."""
    ending = [1.0, *tree.probs]
    for parent, prob in zip(tree.parents, tree.probs, strict=True):
        ending[parent] -= prob
    return ending
