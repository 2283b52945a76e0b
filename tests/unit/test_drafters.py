"""The baselines' tables and trees against slow oracles: losslessness would hide a draft that is not the method's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esp_worker.drafters.base import Drafter, Prompt, Room, Seen, Turn
from esp_worker.drafters.lade import PAPERS_LOOKAHEADS, Lookahead, lookahead_rows
from esp_worker.drafters.ngrams import History
from esp_worker.drafters.pld import PromptLookup
from esp_worker.drafters.recycle import RANK_ACCEPTANCE, TokenRecycling
from esp_worker.drafters.stand import BEST, TRUST, LogitTable, Stand
from esp_worker.sampling import gumbel_noise
from esp_worker.tree import TokenTree, row_depths
from esp_worker.types import SamplingParams

GREEDY = SamplingParams(max_new_tokens=99)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def prompt(ids: Sequence[int], sampling: SamplingParams = GREEDY) -> Prompt:
    def embed(ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no baseline needs embeddings")

    return Prompt(tuple(ids), sampling, embed, torch.device("cpu"))


def tree_of(drafter: Drafter, state: object, root: int, tokens: int = 99) -> TokenTree:
    (draft,) = drafter.draft_all([Turn(state, root, Room(tokens), 9)], waiting=False)
    assert draft.masks == 0
    return draft.tree


def paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the root to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


# --------------------------------------------------------------------------------------------------- prompt lookup


def looked_up(text: Sequence[int], longest: int, count: int) -> list[int]:
    """Hugging Face's rule, read off its PromptLookupCandidateGenerator: longest n-gram, leftmost place."""
    for size in range(min(longest, len(text) - 1), 0, -1):
        for start in range(len(text) - size):
            if list(text[start : start + size]) == list(text[-size:]):
                return list(text[start + size : start + size + count])
    return []


@given(texts, st.lists(texts, max_size=3), st.integers(1, 4), st.integers(0, 12))
def test_lookup_is_a_search(first: list[int], runs: list[list[int]], longest: int, count: int) -> None:
    history = History(first, longest)
    text = first
    for run in [[], *runs]:
        history.extend(run)
        text = [*text, *run]
        assert list(history.continuation(count)) == looked_up(text, longest, count)


def test_a_lookup_draft_is_a_chain_within_depth_and_room() -> None:
    drafter = PromptLookup(ngram=2, depth=4)
    state = drafter.start(prompt([5, 6, 1, 2, 3, 4, 7, 8, 5]))
    drafter.observe([state], [[6]], [torch.zeros(0, 9)])
    assert tree_of(drafter, state, 6) == TokenTree((1, 2, 3, 4), (0, 1, 2, 3))
    assert tree_of(drafter, state, 6, tokens=3) == TokenTree((1, 2), (0, 1))
    drafter.observe([state], [[9]], [torch.zeros(0, 9)])
    assert tree_of(drafter, state, 9) == TokenTree()


# ------------------------------------------------------------------------------------------------------- recycling


def answers(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array(rows)


def test_recycled_tokens_are_those_last_seen() -> None:
    drafter = TokenRecycling(12, block_complexity=5)
    ranked = [list(range(first, first + 8)) for first in (0, 1, 2, 3)]
    state = drafter.start(prompt([1]))
    drafter.saw([state], [Seen([5, 6, 5, 7], [0, 2], answers(ranked), None)])
    drafter.saw([state], [Seen([7, 6], [0], answers([ranked[0], ranked[3]]), None)])
    assert tree_of(drafter, state, 8) == TokenTree(), "8 has not been seen"
    assert paths(tree_of(drafter, state, 5, tokens=2)) == [(2,), (3,), (4,), (5,)], "row 2 was its last"
    assert paths(tree_of(drafter, state, 6, tokens=2)) == [(3,), (4,), (5,), (6,)], "of a rejected node"
    assert paths(tree_of(drafter, state, 7, tokens=2)) == [(0,), (1,), (2,), (3,)]


def test_the_texts_own_row_outlasts_a_rejected_one_of_the_same_step() -> None:
    drafter = TokenRecycling(12, block_complexity=2)
    state = drafter.start(prompt([1]))
    drafter.saw([state], [Seen([5, 5], [0], answers([[1] * 8, [2] * 8]), None)])
    assert tree_of(drafter, state, 5).tokens == (1,)


@given(st.integers(2, 80), st.integers(1, 9))
def test_the_template_holds_the_best_positions(rows: int, depth: int) -> None:
    """With everything known, the shape is a fixed template: no position outside it is worth more than one within."""
    drafter = TokenRecycling(8, block_complexity=rows)
    everything = answers([np.roll(np.arange(8), token) for token in range(8)])
    drafter.saw([None], [Seen(range(8), [], everything, None)])
    tree = tree_of(drafter, None, 0, tokens=depth + 1)
    assert len(tree) == min(rows - 1, sum(8**d for d in range(1, depth + 1)))
    assert max(row_depths(tree.parents)) <= depth
    ranks = positions(tree)
    worth = {path: np.prod([RANK_ACCEPTANCE[rank] for rank in path]) for path in ranks}
    below = [(*path, rank) for path in [(), *ranks] if len(path) < depth for rank in range(8)]
    outside = [np.prod([RANK_ACCEPTANCE[rank] for rank in path]) for path in below if path not in worth]
    assert len(worth) == len(tree)
    assert max(outside, default=0) <= min(worth.values()) + 1e-15


def positions(tree: TokenTree) -> list[tuple[int, ...]]:
    """Ranks from the root to each node, where token t's candidate of rank r is (r - t) mod 8."""
    return [
        tuple((token + before) % 8 for before, token in zip((0, *path), path, strict=False)) for path in paths(tree)
    ]


# ----------------------------------------------------------------------------------------------------------- stand


@given(texts, st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_a_table_knows_the_last_place_of_the_longest_ngram(text: list[int], longest: int, asked: list[int]) -> None:
    table = LogitTable(longest)
    for end in range(1, len(text) + 1):
        table.learn(text[:end], np.array([end]), np.zeros(1))
    want = None
    for size in range(1, min(longest, len(asked)) + 1):
        ends = [end for end in range(size, len(text) + 1) if text[end - size : end] == asked[-size:]]
        want = (size, ends[-1]) if ends else want
    found = table.after(asked)
    assert (found and (found[0], int(found[1][0]))) == want


def stand_with(text: Sequence[int], sampling: SamplingParams, rows: int, ngram: int = 2) -> tuple[Stand, object]:
    """A drafter that saw `text` as its prompt; row i's answers are tokens (i, i + 1, i + 2) at 0.6, 0.3 and 0.1."""
    drafter = Stand(ngram=ngram, block_complexity=rows)
    state = drafter.start(prompt(text, sampling))
    best = answers([[i, i + 1, i + 2] for i in range(len(text))])
    logprobs = np.log(np.tile([0.6, 0.3, 0.1], (len(text), 1)))
    drafter.saw([state], [Seen(text, range(len(text)), best, logprobs)])
    return drafter, state


def test_a_greedy_stand_tree_is_the_most_probable_paths() -> None:
    """Behind 1 2 came 2, 3, 4; 2 2 and 2 3 are unknown: the 2 alone tells, and the 3."""
    drafter, state = stand_with([9, 1, 2, 1, 3], GREEDY, rows=5)
    drafter.observe([state], [[1]], [torch.zeros(0, 9)])
    drafter.saw([state], [Seen([1, 2], [0], answers([[7, 8, 9], [0, 0, 0]]), np.zeros((2, 3)))])  # the 2 was rejected
    tree = tree_of(drafter, state, 2)
    assert paths(tree) == [(2,), (2, 2), (3,), (4,)]
    two, one = TRUST[1], TRUST[0]
    assert list(tree.probs) == pytest.approx([0.6 * two, 0.6 * two * 0.6 * one, 0.3 * two, 0.1 * two])


def test_sampled_candidates_stand_in_the_order_of_the_rows_own_draws() -> None:
    """The noise of a depth is that of its output position, so that the best candidate is the token to be drawn."""
    sampling = SamplingParams(max_new_tokens=99, temperature=0.8, seed=5, sample_index=2)
    drafter, state = stand_with([1, 2], sampling, rows=4)
    for output, run in ((1, [1]), (4, [3, 3, 1])):
        drafter.observe([state], [run], [torch.zeros(0, 9)])
        scores = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log() / 0.8
        scores += gumbel_noise(5, 2, output, torch.tensor([0, 1, 2]))
        want = torch.tensor([0, 1, 2])[scores.argsort(descending=True)].tolist()
        tree = tree_of(drafter, state, 1, tokens=2)
        assert list(tree.tokens) == want
        assert list(tree.probs) == pytest.approx((TRUST[0] * scores.softmax(0)).sort(descending=True).values.tolist())


def test_stand_asks_for_as_many_as_it_keeps() -> None:
    assert (Stand.watch.best, Stand.watch.probs, Stand.watch.prompt) == (BEST, "whole", True)


# ------------------------------------------------------------------------------------------------------------ lade


def test_the_papers_settings_have_the_papers_rows() -> None:
    assert {rows: lookahead_rows(*three) for rows, three in PAPERS_LOOKAHEADS.items()} == {10: 10, 30: 30, 60: 60}


class PlainLookahead:
    """Jacobi iterations on a dictionary (level, column) -> token, n-grams by a search of all that were."""

    def __init__(self, size: int, width: int, most: int, window: dict[tuple[int, int], int], text: list[int]) -> None:
        self.size, self.width, self.most, self.window = size, width, most, window
        self.made: list[tuple[int, ...]] = []
        self.text: list[int] = []
        self.commit(text)

    def guesses(self) -> list[tuple[int, ...]]:
        newest: list[tuple[int, ...]] = []
        for ngram in reversed(self.made):
            if ngram[0] == self.text[-1] and ngram[1:] not in newest:
                newest.append(ngram[1:])
        return newest[: self.most]

    def paths(self) -> list[tuple[int, ...]]:
        """Of the window: level 0 up to a column, then down that column."""
        chain = [self.window[0, column] for column in range(1, self.width)]
        found = []
        for column in range(self.width):
            for level in range(0 if column else 1, self.size - 1):
                below = [self.window[each, column] for each in range(1, level + 1)]
                found.append((*chain[:column], *below))
        return found

    def step(self, answer: dict[int, int], committed: list[int]) -> None:
        self.window[0, 0] = self.text[-1]
        for column in range(self.width):
            levels = [self.window[level, column] for level in range(self.size - 1)]
            self.made.append((*levels, answer[column]))
        moved = {}
        for level in range(1, self.size):
            for column in range(self.width):
                new = answer[column] if level == self.size - 1 else self.window[level, column]
                moved[level - 1, column] = new
        self.window = moved
        self.commit(committed)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            if len(self.text) >= self.size:
                self.made.append(tuple(self.text[-self.size :]))


@given(st.sampled_from([(2, 1, 1), (2, 4, 2), (3, 4, 1), (4, 5, 5), (5, 3, 2)]), st.data())
def test_lookahead_is_jacobi_iteration(lookahead: tuple[int, int, int], data: st.DataObject) -> None:
    """Window, pool and tree over some steps with arbitrary answers, against the oracle."""
    size, width, most = lookahead
    ids = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    drafter = Lookahead(lookahead=lookahead)
    state = drafter.start(prompt(ids))
    levels = state[1].levels
    assert all(token in ids for level in levels for token in level)
    window = {(level, column): token for level, row in enumerate(levels) for column, token in enumerate(row, not level)}
    oracle = PlainLookahead(size, width, most, window, list(ids))
    first = data.draw(st.integers(0, 2))
    drafter.observe([state], [[first]], [torch.zeros(0, 3)])
    oracle.commit([first])
    for _ in range(data.draw(st.integers(1, 5))):
        tree = tree_of(drafter, state, oracle.text[-1])
        assert 1 + len(tree) <= lookahead_rows(*lookahead)
        guesses = oracle.guesses()
        prefixes = {guess[:length] for guess in guesses for length in range(1, size)}
        found = paths(tree)
        assert sorted(found[: len(prefixes)]) == sorted(prefixes), "guesses first, shared beginnings once"
        assert sorted(found[len(prefixes) :]) == sorted(oracle.paths())
        answer = {column: data.draw(st.integers(0, 2)) for column in range(width)}
        best = np.full((1 + len(tree), 1), 9)
        for column, row in enumerate(state[1].ends):
            best[row] = answer[column]
        committed = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        drafter.saw([state], [Seen((oracle.text[-1], *tree.tokens), [0], best, None)])
        drafter.observe([state], [committed], [torch.zeros(0, 3)])
        oracle.step(answer, committed)


def test_the_window_narrows_towards_the_end() -> None:
    drafter = Lookahead(lookahead=(4, 5, 1))
    state = drafter.start(prompt([1, 2, 3, 4, 5]))
    for tokens, columns in ((20, 5), (7, 5), (6, 4), (4, 2), (3, 1), (2, 0)):
        tree = tree_of(drafter, state, 9, tokens=tokens)
        assert len(tree) == max(3 * columns - 1, 0)
        assert max(row_depths(tree.parents)) <= tokens - 1
