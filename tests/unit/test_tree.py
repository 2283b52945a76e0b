"""Token trees: block complexity, the kinds of tree, pruning, what a row's probes are worth, a block's geometry."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esp_worker.tree import (
    EMPTY_TREE,
    PRUNE_RULES,
    SHAPE_MAKERS,
    BlockShape,
    Candidates,
    PruneRule,
    TokenTree,
    affordable_nodes,
    best_first_tree,
    block_complexity,
    block_shape,
    dynamic_tree,
    ending_probs,
    grow_best_first,
    most_probable,
    row_depths,
    static_tree,
)

KEEP_ALL = PRUNE_RULES["none"]


def level(first: int, probs: list[float]) -> Candidates:
    return Candidates(list(range(first, first + len(probs))), probs)


def falling(first: int, count: int, top: float, ratio: float) -> Candidates:
    return level(first, [top * ratio**i for i in range(count)])


@pytest.mark.parametrize(
    ("branches", "expected"), [([4], 10), ([14], 30), ([29], 60), ([7, 2], 30), ([15, 4], 60), ([7, 5, 3], 64)]
)
def test_block_complexity_of_static_branches(branches: list[int], expected: int) -> None:
    """BC = (k+1)(1 + sum K_i): the formula, and the rows that the block really has."""
    masks = len(branches)
    tree = static_tree([falling(100 * j, 40, 0.5, 0.9) for j in range(masks)], branches, 1, KEEP_ALL, max_depth=9)
    assert len(tree) == sum(branches)
    assert block_complexity(masks, len(tree)) == expected
    assert block_shape(tree.parents, tuple(range(1 + len(tree))), masks).rows == expected


@pytest.mark.parametrize("owners", [None, 1, 2, 5])
@pytest.mark.parametrize("masks", [1, 2, 3])
def test_affordable_nodes_are_the_most_that_fit(masks: int, owners: int | None) -> None:
    for budget in range(2 + masks * (owners or 2), 70):
        nodes = affordable_nodes(budget, masks, owners)
        if owners is None or owners <= 1 + nodes:
            assert block_complexity(masks, nodes, owners) <= budget
            assert block_complexity(masks, nodes + 1, owners) > budget


def test_rows_of_a_block_with_few_owners() -> None:
    """1 + nodes + masks * min(owners, 1 + nodes)."""
    assert [block_complexity(2, 4, owners) for owners in (1, 3, 5, 9)] == [7, 11, 15, 15]
    assert block_complexity(2, 4) == 15


def test_figure_6() -> None:
    """BC 30, two masks: 9 and 8 candidates are offered, 9 nodes are kept."""
    budget = 30 // 3
    first, second = falling(100, 30, 0.3, 0.8), falling(200, 30, 0.6, 0.7)
    tree = dynamic_tree([first, second], budget - 1, 1, KEEP_ALL, max_depth=9)
    assert len(tree) == 9
    # By hand: depth 1 offers .3*.8^i for i < 9, depth 2 offers .3*.6*.7^i for i < 8, all under token 100.
    offered = [(0.3 * 0.8**i, 100 + i) for i in range(9)] + [(0.3 * 0.6 * 0.7**i, 200 + i) for i in range(8)]
    assert sorted(tree.tokens) == sorted(token for _, token in sorted(offered, reverse=True)[:9])
    assert block_shape(tree.parents, tuple(range(10)), 2).rows == 30


def test_dynamic_offers_budget_minus_depth_candidates() -> None:
    """With a flat distribution at depth 1 and certainty below, depth i can hold at most B - i nodes."""
    nodes = 9
    first = level(100, [0.9] + [1e-6] * 20)
    tree = dynamic_tree([first, level(200, [0.11] * 20)], nodes, 1, KEEP_ALL, max_depth=9)
    depths = row_depths(tree.parents)
    assert depths.count(1) == 1
    assert depths.count(2) == 8  # B - 2
    assert len(tree) == nodes


def test_dynamic_keeps_ancestors_also_when_probabilities_tie() -> None:
    certain = [level(100 * depth, [1.0, 0.0, 0.0, 0.0]) for depth in range(1, 4)]
    tree = dynamic_tree(certain, 3, 1, KEEP_ALL, max_depth=9)
    assert tree == TokenTree((100, 200, 300), (0, 1, 2), (1.0, 1.0, 1.0))


def test_top_1_expansion_hangs_each_level_under_the_best_node() -> None:
    tree = static_tree([level(10, [0.5, 0.3]), level(20, [0.9, 0.1])], [2, 2], 1, KEEP_ALL, max_depth=9)
    assert (tree.tokens, tree.parents) == ((10, 20, 11, 21), (0, 1, 0, 1))  # principal chain first
    assert tree.probs == pytest.approx((0.5, 0.45, 0.3, 0.05))


@pytest.mark.parametrize(("rule", "depth1", "depth2"), [("all", 12, 21), ("deep", 11, 21), ("none", 11, 11)])
def test_pruning_replaces_a_candidate_that_repeats_its_parent(rule: str, depth1: int, depth2: int) -> None:
    """The root is token 11, depth 1 offers it first; depth 2 offers depth 1's token first."""
    first = Candidates([11, 12, 13], [0.6, 0.3, 0.1])
    second = Candidates([depth1, 21, 22], [0.7, 0.2, 0.1])
    tree = static_tree([first, second], [1, 1], 11, PRUNE_RULES[rule], max_depth=9)
    assert tree.tokens == (depth1, depth2)


def test_max_depth_cuts_the_tree() -> None:
    levels = [falling(100 * j, 9, 0.5, 0.5) for j in range(3)]
    for depth in range(4):
        for tree in (
            static_tree(levels, [2, 2, 2], 1, KEEP_ALL, depth),
            dynamic_tree(levels, 6, 1, KEEP_ALL, depth),
            best_first_tree(levels, 40, 1, KEEP_ALL, depth),
        ):
            assert max(row_depths(tree.parents)) == depth


def test_no_candidates_no_tree() -> None:
    assert dynamic_tree([], 9, 1, KEEP_ALL, 9) == EMPTY_TREE
    assert static_tree([], [4], 1, KEEP_ALL, 9) == EMPTY_TREE
    assert best_first_tree([], 9, 1, KEEP_ALL, 9) == EMPTY_TREE


# ------------------------------------------------------------------------------------------------------- best first


def best_levels(tokens: int, depth: int) -> st.SearchStrategy[list[Candidates]]:
    """Levels over the same few tokens, so that pruning finds something; probabilities whose products are exact."""
    probs = st.lists(st.integers(0, 8), min_size=tokens, max_size=tokens).map(lambda p: sorted(p, reverse=True))
    ranked = st.tuples(st.permutations(range(tokens)), probs)
    one = ranked.map(lambda level: Candidates(level[0], [p / 8 for p in level[1]]))
    return st.lists(one, min_size=1, max_size=depth)


def all_paths(levels: Sequence[Candidates], root: int, prune: PruneRule) -> dict[tuple[int, ...], float]:
    """Every path that a tree could hold, with its probability."""
    paths: dict[tuple[int, ...], float] = {}
    for depth in range(1, len(levels) + 1):
        for path in itertools.product(*(level.tokens for level in levels[:depth])):
            prob, parent = 1.0, root
            for at, (level, token) in enumerate(zip(levels, path, strict=False), start=1):
                allowed = token != prune.excluded(at, parent)
                prob, parent = prob * level.probs[list(level.tokens).index(token)] * allowed, token
                if not allowed:
                    break
            else:
                paths[path] = prob
    return paths


def paths_of(tree: TokenTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@given(best_levels(tokens=3, depth=2), st.integers(1, 5), st.sampled_from(list(PRUNE_RULES)))
def test_best_first_is_the_best_closed_set_of_paths(levels: list[Candidates], nodes: int, rule: str) -> None:
    """Against every set of paths that holds the ancestors of its members; root token 0 is a candidate itself."""
    prune = PRUNE_RULES[rule]
    tree = best_first_tree(levels, nodes, 0, prune, max_depth=9)
    paths = all_paths(levels, 0, prune)
    closed = (
        chosen
        for chosen in itertools.combinations(paths, min(nodes, len(paths)))
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    found = paths_of(tree)
    assert len(set(found)) == len(found) == min(nodes, len(paths))
    assert [paths[path] for path in found] == list(tree.probs)
    assert sum(tree.probs) == max(sum(paths[path] for path in chosen) for chosen in closed)


@given(best_levels(tokens=5, depth=3), st.integers(1, 12), st.sampled_from(list(PRUNE_RULES)))
def test_best_first_takes_the_most_probable_and_needs_one_spare_candidate(
    levels: list[Candidates], nodes: int, rule: str
) -> None:
    prune = PRUNE_RULES[rule]
    tree = best_first_tree(levels, nodes, 0, prune, max_depth=9)
    assert sorted(tree.probs, reverse=True) == sorted(all_paths(levels, 0, prune).values(), reverse=True)[:nodes]
    short = [Candidates(level.tokens[: nodes + 1], level.probs[: nodes + 1]) for level in levels]
    assert best_first_tree(short, nodes, 0, prune, max_depth=9) == tree


def test_best_first_hangs_a_level_under_several_parents() -> None:
    """.6 and .4 at depth 1, .9 and .1 below either: the path over the second parent beats the first's second child."""
    tree = best_first_tree([level(10, [0.6, 0.4]), level(20, [0.9, 0.1])], 4, 1, KEEP_ALL, max_depth=9)
    assert (tree.tokens, tree.parents) == ((10, 20, 11, 20), (0, 1, 0, 3))
    assert tree.probs == pytest.approx((0.6, 0.54, 0.4, 0.36))


def test_best_first_ties_and_row_order() -> None:
    """Equal everywhere: the shallower node, the earlier parent, the better candidate; the principal chain leads."""
    flat = [level(10, [0.5, 0.5]), level(20, [1.0, 1.0])]
    trees = [best_first_tree(flat, nodes, 1, KEEP_ALL, max_depth=9) for nodes in range(1, 7)]
    assert [paths_of(tree)[-1] for tree in trees] == [(10,), (11,), (11,), (10, 21), (11, 20), (11, 21)]
    assert paths_of(trees[-1]) == [(10,), (10, 20), (11,), (10, 21), (11, 20), (11, 21)]


def test_each_node_reaches_its_floor() -> None:
    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        return [(1, 0.5), (2, 0.25)]

    whole = grow_best_first(children, [0.0] * 6, 3)
    assert whole.probs == (0.5, 0.25, 0.125, 0.25, 0.125, 0.125)
    assert len(grow_best_first(children, [0.0, 0.25, 0.25, 0.25], 3)) == 3
    assert len(grow_best_first(children, [0.6, 0.6], 3)) == 0
    assert len(grow_best_first(children, [], 3)) == 0


# ------------------------------------------------------------------------------------------------ what probes are worth


@st.composite
def estimated_trees(draw: st.DrawFn) -> tuple[TokenTree, list[int]]:
    """A tree, and by row how many 16ths of its parent's probability a row takes (its siblings and it at most all)."""
    parents: list[int] = []
    shares, left = [16], [16]
    for node in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(0, node))
        share = draw(st.integers(0, left[parent]))
        left[parent] -= share
        left.append(16)
        parents.append(parent)
        shares.append(share)
    probs = [1.0]
    for node, parent in enumerate(parents, start=1):
        probs.append(probs[parent] * shares[node] / 16)
    return TokenTree(tuple(range(len(parents))), tuple(parents), tuple(probs[1:])), shares


@given(estimated_trees())
def test_ending_probs_are_those_of_all_walks(case: tuple[TokenTree, list[int]]) -> None:
    """Walk from the root in every way: a row ends it with what its children's conditional probabilities leave."""
    tree, shares = case
    ends = [0.0] * (1 + len(tree))

    def walk(row: int, prob: float) -> None:
        children = [child for child, _ in tree.children(row)]
        ends[row] = prob * (1 - sum(shares[child] for child in children) / 16)
        for child in children:
            walk(child, prob * shares[child] / 16)

    walk(0, 1.0)
    assert ending_probs(tree) == ends
    assert sum(ends) == 1.0


# ------------------------------------------------------------------------------------------------------------- geometry


def test_block_geometry() -> None:
    """root(0) -> a(1) -> b(2); root -> c(3); root and b own two probes each."""
    shape = block_shape((0, 1, 0), (0, 2), 2)
    assert shape.rows == 8
    assert shape.depths == (0, 1, 2, 1)
    assert shape.offsets.tolist() == [0, 1, 2, 1, 1, 2, 3, 4]
    assert list(shape.probe_rows(0)) == [4, 5]
    assert list(shape.probe_rows(2)) == [6, 7]
    assert list(shape.probe_rows(1)) == []
    sees = [set(torch.nonzero(row).flatten().tolist()) for row in shape.visible]
    assert sees == [{0}, {0, 1}, {0, 1, 2}, {0, 3}, {0, 4}, {0, 4, 5}, {0, 1, 2, 6}, {0, 1, 2, 6, 7}]


def test_efficient_shapes_are_reused_and_naive_ones_are_not() -> None:
    efficient, naive = SHAPE_MAKERS["efficient"], SHAPE_MAKERS["naive"]
    assert efficient((0, 1), (0,), 1) is efficient((0, 1), (0,), 1)
    assert naive((0, 1), (0,), 1) is not naive((0, 1), (0,), 1)
    assert naive((0, 1), (0,), 1) == efficient((0, 1), (0,), 1) == BlockShape((0, 1), (0,), 1)


def test_children_before_parents_are_refused() -> None:
    with pytest.raises(AssertionError, match="parents come before children"):
        TokenTree((1, 2), (2, 0))


def test_the_most_probable_nodes_keep_their_ancestors_and_their_order() -> None:
    tree = TokenTree((5, 6, 7, 8), (0, 1, 0, 1), (0.5, 0.1, 0.4, 0.3))
    assert most_probable(tree, 3) == TokenTree((5, 7, 8), (0, 0, 1), (0.5, 0.4, 0.3))
    assert most_probable(tree, 0) == TokenTree()
    assert most_probable(tree, 9) is tree
