"""Token trees: block complexity, Algorithm 1, static branches, pruning, and the geometry of a block."""

from __future__ import annotations

import pytest
import torch

from esp_worker.tree import (
    EMPTY_TREE,
    PRUNE_RULES,
    Candidates,
    Draft,
    TokenTree,
    block_complexity,
    block_shape,
    dynamic_tree,
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
    draft = Draft(tree, tuple(range(1 + len(tree))), masks)
    assert len(tree) == sum(branches)
    assert block_complexity(masks, len(tree)) == expected
    assert draft.shape.rows == expected


def test_figure_6() -> None:
    """BC 30, two masks: 9 and 8 candidates are offered, 9 nodes are kept."""
    budget = 30 // 3
    first, second = falling(100, 30, 0.3, 0.8), falling(200, 30, 0.6, 0.7)
    tree = dynamic_tree([first, second], budget - 1, 1, KEEP_ALL, max_depth=9)
    assert len(tree) == 9
    # By hand: depth 1 offers .3*.8^i for i < 9, depth 2 offers .3*.6*.7^i for i < 8, all under token 100.
    offered = [(0.3 * 0.8**i, 100 + i) for i in range(9)] + [(0.3 * 0.6 * 0.7**i, 200 + i) for i in range(8)]
    assert sorted(tree.tokens) == sorted(token for _, token in sorted(offered, reverse=True)[:9])
    assert Draft(tree, tuple(range(10)), 2).shape.rows == 30


def test_dynamic_offers_budget_minus_depth_candidates() -> None:
    """With a flat distribution at depth 1 and certainty below, depth i can hold at most B - i nodes."""
    nodes = 9
    first = level(100, [0.9] + [1e-6] * 20)
    tree = dynamic_tree([first, level(200, [0.11] * 20)], nodes, 1, KEEP_ALL, max_depth=9)
    depths = block_shape(tree.parents, (), 0).depths
    assert depths.count(1) == 1
    assert depths.count(2) == 8  # B - 2
    assert len(tree) == nodes


def test_dynamic_keeps_ancestors_also_when_probabilities_tie() -> None:
    certain = [level(100 * depth, [1.0, 0.0, 0.0, 0.0]) for depth in range(1, 4)]
    tree = dynamic_tree(certain, 3, 1, KEEP_ALL, max_depth=9)
    assert tree == TokenTree((100, 200, 300), (0, 1, 2))


def test_top_1_expansion_hangs_each_level_under_the_best_node() -> None:
    tree = static_tree([level(10, [0.5, 0.3]), level(20, [0.9, 0.1])], [2, 2], 1, KEEP_ALL, max_depth=9)
    assert tree == TokenTree(tokens=(10, 20, 11, 21), parents=(0, 1, 0, 1))  # principal chain first


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
        ):
            assert max(block_shape(tree.parents, (), 0).depths) == depth


def test_no_candidates_no_tree() -> None:
    assert dynamic_tree([], 9, 1, KEEP_ALL, 9) == EMPTY_TREE
    assert static_tree([], [4], 1, KEEP_ALL, 9) == EMPTY_TREE
    assert Draft().shape.rows == 1


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


def test_shapes_are_reused() -> None:
    assert block_shape((0, 1), (0,), 1) is block_shape((0, 1), (0,), 1)
    assert block_shape((0, 1), (0,), 0).rows == 3


def test_children_before_parents_are_refused() -> None:
    with pytest.raises(AssertionError, match="parents come before children"):
        TokenTree((1, 2), (2, 0))
