"""The hybrid draft's sources: what each remembers, what it says, and that the tree holds what they agree on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esp_worker.drafters.base import Prompt, Room, Seen, Turn
from esp_worker.drafters.hybrid import EXPECTED, LESSONS, HybridDrafter, HybridState
from esp_worker.drafters.ngrams import History
from esp_worker.drafters.recall import BEST, ORDERS, Recall
from esp_worker.odds import Answer, named_codes
from esp_worker.rows import FixedRows
from esp_worker.sampling import gumbel_noise
from esp_worker.tree import Draft, TokenTree
from esp_worker.types import SamplingParams

GREEDY = SamplingParams(max_new_tokens=99)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def hybrid(rows: int = 6, known: dict[int, list[int]] | None = None) -> HybridDrafter:
    table = known or {}
    successors = {token: answer(best, [-0.1 - rank for rank in range(len(best))]) for token, best in table.items()}
    return HybridDrafter(lambda ids: torch.zeros(*ids.shape, 4), FixedRows(rows), successors.get)


def answer(tokens: list[int], logprobs: list[float]) -> Answer:
    return Answer(tokens, named_codes(np.exp(logprobs)).tolist(), np.array(logprobs))


def said(answers: Sequence[Answer | None]) -> list[tuple[list[int], list[float]] | None]:
    return [None if each is None else (each.tokens, each.logprobs.tolist()) for each in answers]


class Switched(FixedRows):
    """Rows that pay, or do not."""

    def __init__(self, rows: int, *, pays: bool) -> None:
        super().__init__(rows)
        self.pays = pays

    def floors(self, left: Sequence[int], context: int, waiting: bool) -> list[Sequence[float]]:
        return super().floors(left, context, waiting) if self.pays else [()] * len(left)


class Looking(FixedRows):
    """Trees are grown, and none is verified."""

    def choose(self, trees: Sequence[TokenTree]) -> list[int]:
        return [1] * len(trees)


def start(drafter: HybridDrafter, ids: Sequence[int], first: int, sampling: SamplingParams = GREEDY) -> HybridState:
    state = drafter.start(Prompt(tuple(ids), sampling, lambda ids: torch.zeros(*ids.shape, 4), torch.device("cpu")))
    drafter.observe([state], [[first]], [torch.zeros(0, 9)])
    return state


def draft(drafter: HybridDrafter, state: HybridState, tokens: int = 99) -> Draft:
    turn = Turn(state, state.text.tokens[-1], Room(tokens), len(state.text.tokens))
    (made,) = drafter.draft_all([turn], waiting=False)
    return made


def seen(tokens: Sequence[int], path: Sequence[int], best: Sequence[Sequence[int]], prob: float = 0.9) -> Seen:
    logprobs = np.full((len(best), 8), -9.0, np.float32)
    logprobs[:, 0] = np.log(prob)
    filled = [[*row, *range(100, 108 - len(row))] for row in best]
    return Seen(tokens, path, np.array(filled), logprobs)


# --------------------------------------------------------------------------------------------------------- sources


def learn(recall: Recall, contexts: Sequence[tuple[int, ...]], tokens: np.ndarray, logprobs: np.ndarray) -> None:
    recall.learn(contexts, tokens, logprobs, named_codes(np.exp(logprobs)))


ANSWERS = np.arange(2 * BEST).reshape(2, BEST)
LOGPROBS = -np.arange(2.0 * BEST).reshape(2, BEST)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
def test_recall_keeps_the_newest_answer_of_each_context(contexts: list[tuple[int, ...]]) -> None:
    recall = Recall()  # so few contexts share no place in it
    answers = np.arange(len(contexts))[:, None] + np.arange(BEST)
    learn(recall, contexts, answers, -answers.astype(np.float32))
    for asked in [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]:
        for size, got in zip(ORDERS, said(recall.answers(asked)), strict=True):
            rows = [row for row, context in enumerate(contexts) if context[-size:] == asked[-size:]]
            assert got == ((answers[rows[-1]].tolist(), (-answers[rows[-1]]).tolist()) if rows else None)


def test_contexts_that_share_a_place_do_not_answer_for_each_other() -> None:
    recall = Recall(bits=0)  # one place for all
    learn(recall, [(1,), (2,)], ANSWERS, LOGPROBS)
    assert said(recall.answers((1,))) == [None, None, None]
    assert said(recall.answers((2,))) == [(ANSWERS[1].tolist(), LOGPROBS[1].tolist()), None, None]


def test_a_table_grows_with_what_it_learns_and_keeps_it() -> None:
    recall = Recall(bits=16)
    contexts = [(token,) for token in range(4000)]
    answers = np.arange(len(contexts))[:, None] + np.arange(BEST)
    for first in range(0, len(contexts), 100):
        part = slice(first, first + 100)
        learn(recall, contexts[part], answers[part], np.zeros((100, BEST), np.float32))
    lost = [token for token in range(4000) if said(recall.answers((token,)))[0] != (answers[token].tolist(), [0.0] * 8)]
    assert len(lost) < 500, "of two keys that meet in one place one is lost"
    assert len(recall._tables[0]._places) == 1 << 15
    assert len(recall._tables[1]._places) == 4096, "nothing was learned of longer contexts"
    once = Recall(bits=16)
    learn(once, contexts, answers, np.zeros((len(contexts), BEST), np.float32))
    assert len(once._tables[0]._places) == 1 << 15, "there is room first, and then an answer"
    again = Recall()
    learn(again, [(1,)] * 2000, np.repeat(answers[:1], 2000, 0), np.zeros((2000, BEST), np.float32))
    assert len(again._tables[0]._places) == 4096, "one context takes one place"


def test_short_texts_have_short_contexts() -> None:
    recall = Recall()
    learn(recall, [(7,)], ANSWERS[:1], LOGPROBS[:1])
    for asked in (7,), (1, 2, 7):
        assert said(recall.answers(asked)) == [(ANSWERS[0].tolist(), LOGPROBS[0].tolist()), None, None]


@given(texts, st.lists(texts, max_size=3), st.integers(1, 4))
def test_followers_are_all_that_followed(first: list[int], runs: list[list[int]], longest: int) -> None:
    followers = History(first, longest)
    text = list(first)
    for run in runs:
        followers.extend(run)
        text += run
    for size, tokens in followers.after(tuple(text)):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        assert tokens == [text[end] for end in ends][-History.NEWEST :]
    sizes = [size for size, _ in followers.after(tuple(text))]
    before = [tuple(text[end - size : end]) for size in range(1, longest + 1) for end in range(size, len(text))]
    stood = [size for size in range(longest, 0, -1) if size <= len(text) and tuple(text[-size:]) in before]
    assert sizes == stood
    assert followers.ages(range(5)) == {token: text[::-1].index(token) + 1 for token in set(text)}


# ------------------------------------------------------------------------------------------------------------ trees


def test_nothing_known_drafts_nothing() -> None:
    drafter = hybrid()
    made = draft(drafter, start(drafter, [1, 2], 3))
    assert not len(made.tree)


def test_each_source_alone_makes_a_draft() -> None:
    by_text = hybrid(rows=3)
    assert draft(by_text, start(by_text, [4, 5, 6, 9], 4)).tree.tokens == (5, 6)

    by_model = hybrid(rows=3, known={3: [8, 7]})
    assert 8 in draft(by_model, start(by_model, [1, 2], 3)).tree.tokens

    by_recall = hybrid(rows=3)
    state = start(by_recall, [1, 2], 3)
    draft(by_recall, state)
    by_recall.saw([state], [seen([3], [0], [[6]])])
    assert 6 in draft(by_recall, start(by_recall, [9, 9], 3)).tree.tokens, "another sequence's answer"

    by_probe = hybrid(rows=3)
    state = start(by_probe, [1, 2], 3)
    logits = torch.full((1, 9), -9.0)
    logits[0, 5] = 9.0
    by_probe.observe([state], [[4]], [logits])
    assert draft(by_probe, state).tree.tokens[0] == 5


def test_what_was_passed_over_is_proposed_again() -> None:
    drafter = hybrid(rows=9)
    state = start(drafter, [1, 2], 3)
    for run in ([10], [11], [12], [13]):
        assert not set(draft(drafter, state).tree.tokens) & set(run)
        rows = len(state.paths)
        best = [[run[0], 1000 + run[0]]] * rows
        drafter.saw([state], [seen([0] * rows, [0], best)])
        drafter.observe([state], [run], [torch.zeros(0, 9)])
    proposed = dict(drafter._place(state, state.tail, ()).candidates)
    assert {1011, 1012, 1013} < set(proposed), "named for the last three tokens"
    assert 1010 not in proposed
    assert 1013 not in dict(drafter._place(state, state.tail, (5,)).candidates), "only behind the root"


def test_of_a_run_each_tokens_answer_is_remembered_the_newest_first() -> None:
    drafter = hybrid(rows=9, known={3: [4], 4: [5], 5: [6]})
    state = start(drafter, [1, 2], 3)
    assert draft(drafter, state).tree.tokens == (4, 5, 6)
    drafter.saw([state], [seen([3, 4, 5, 6], range(4), [[4, 50], [5, 50], [6, 60], [7, 70]])])
    assert [each.tokens[:2] for each in state.passed] == [[7, 70], [6, 60], [5, 50]]


def test_a_step_that_nobody_looked_at_ends_what_was_passed_over() -> None:
    rows = Switched(6, pays=True)
    drafter = HybridDrafter(lambda ids: torch.zeros(*ids.shape, 4), rows)
    state = start(drafter, [1, 2], 3)
    draft(drafter, state)
    drafter.saw([state], [seen([3], [0], [[6, 7]])])
    assert state.passed
    rows.pays = False
    draft(drafter, state)
    assert not state.passed


def test_of_many_sequences_all_teach_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = hybrid(rows=2, known={3: [8, 7]})
    taught: list[list[int]] = []
    monkeypatch.setattr(drafter._odds, "learn", lambda lessons: taught.append([token for _, token in lessons]))
    states = [start(drafter, [1, 2], 3) for _ in range(10)]
    taught.clear()
    for _ in range(3):
        for state in states:
            state.text.tokens[-1] = 3
        drafter.draft_all([Turn(state, 3, Room(99), 3) for state in states], waiting=False)
        drafter.observe(states, [[number] for number in range(10)], [torch.zeros(0, 9)] * 10)
    assert max(map(len, taught)) == LESSONS
    assert sorted(itertools.chain(*taught)) == list(range(10))


def test_of_two_candidates_alike_the_one_that_stood_in_the_text_comes_first() -> None:
    for prompt, better in (([1, 2, 30, 5], 30), ([1, 2, 40, 5], 40)):
        drafter = hybrid(rows=3)
        drafter._successors = {9: answer([30, 40], [-0.7, -0.7])}.get
        candidates = drafter._place(start(drafter, prompt, 9), (*prompt, 9), ()).candidates
        assert candidates[0][0] == better


def test_a_probe_is_the_mean_of_what_is_expected_in_its_place() -> None:
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    known = {3: answer([8, 7], [-0.2, -1.7]), 7: answer([6], [0.0])}
    drafter = HybridDrafter(lambda ids: table[ids], FixedRows(20), known.get)
    state = drafter.start(Prompt((1, 2), GREEDY, lambda ids: table[ids], torch.device("cpu")))
    drafter.observe([state], [[3]], [torch.zeros(0, 9)])
    made = draft(drafter, state)
    assert made.owners == (0, 1, 2, 3)
    assert sorted(state.paths) == [(), (7,), (7, 6), (8,)]
    probes = dict(zip(state.paths, drafter.probe_embeds(state, made), strict=True))
    (_, first), (_, second) = drafter._place(state, state.tail, ()).candidates
    torch.testing.assert_close(probes[()], (first * table[8] + second * table[7]) / (first + second))
    torch.testing.assert_close(probes[7,], table[6])
    for leaf in ((8,), (7, 6)):  # nobody knows what follows: ESP's mask
        torch.testing.assert_close(probes[leaf], drafter.mask_embeds(state)[0])


def test_a_probe_is_the_mean_of_the_likeliest_alone() -> None:
    table = torch.randn(40, 4, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    drafter = HybridDrafter(
        lambda ids: table[ids], FixedRows(16), {3: answer(list(range(10, 40)), [-0.1 * k for k in range(30)])}.get
    )
    state = drafter.start(Prompt((1, 2), GREEDY, lambda ids: table[ids], torch.device("cpu")))
    drafter.observe([state], [[3]], [torch.zeros(0, 40)])
    made = draft(drafter, state)
    assert made.owners == (0,)
    likeliest = drafter._place(state, state.tail, ()).candidates[:EXPECTED]
    total = sum(prob for _, prob in likeliest)
    mean = sum(prob / total * table[token].float() for token, prob in likeliest)
    torch.testing.assert_close(drafter.probe_embeds(state, made)[0], mean)


def test_a_rejected_rows_answer_is_recalled_behind_its_own_path() -> None:
    drafter = hybrid(rows=2)
    state = start(drafter, [4, 5, 6, 9], 4)
    made = draft(drafter, state)
    assert made.tree.tokens == (5,)
    drafter.saw([state], [seen([4, 5], [0], [[1], [2]])])  # the node was not taken
    behind = said(drafter._recall.answers((9, 4, 5)))
    assert behind[2] == said(drafter._recall.answers((5,)))[0]
    assert behind[2] is not None
    assert behind[2][0][0] == 2


def test_a_row_that_is_kept_has_the_last_word() -> None:
    drafter = hybrid(rows=4)
    state = start(drafter, [5, 5, 5], 5)
    tree = draft(drafter, state).tree
    assert set(tree.tokens) == {5}
    rows = 1 + len(tree)
    drafter.saw([state], [seen([5] * rows, [0], [[10 + row] for row in range(rows)])])
    newest = drafter._recall.answers((5,))[0]
    assert newest is not None
    assert newest.tokens[0] == 10


def test_rows_fit_the_budget_and_probes_take_what_no_node_does() -> None:
    drafter = hybrid(rows=20, known={token: [(token + k) % 9 for k in range(1, 9)] for token in range(9)})
    state = start(drafter, [1, 2], 3)
    full = draft(drafter, state)
    assert full.shape.rows == 20
    assert len(full.owners) == 1
    near_end = draft(drafter, state, tokens=2)
    assert near_end.masks == 0
    assert max(near_end.shape.depths) <= 1
    sparse = hybrid(rows=20, known={3: [8]})
    made = draft(sparse, start(sparse, [1, 2], 3))
    assert len(made.tree) == 1
    assert made.owners == (0, 1)


def test_a_sampled_rows_own_noise_ranks_the_candidates() -> None:
    """Two answers alike: the one that the noise of that position favours comes first, for each seed."""
    for seed in range(12):
        drafter = hybrid(rows=2, known={3: [8, 7]})
        drafter._successors = {3: answer([8, 7], [-0.7, -0.7])}.get
        state = start(drafter, [1, 2], 3, SamplingParams(max_new_tokens=9, temperature=1.0, seed=seed))
        noise = gumbel_noise(seed, 0, 1, torch.tensor([8, 7]))
        assert draft(drafter, state).tree.tokens == ((8, 7)[int(noise.argmax())],)


@pytest.mark.filterwarnings("error")
def test_at_a_temperature_near_nothing_recalled_answers_rank_as_greedily() -> None:
    drafter = hybrid(rows=2)
    state = start(drafter, [1, 2], 3, SamplingParams(max_new_tokens=9, temperature=1e-4))
    draft(drafter, state)
    drafter.saw([state], [seen([3], [0], [[7, 8]], prob=0.5)])
    assert draft(drafter, state).tree.tokens == (7,)


def test_learning_needs_no_row_of_the_candidate() -> None:
    """Steps that look and stay plain verify nothing, and the odds still learn who was right."""
    drafter = HybridDrafter(lambda ids: torch.zeros(*ids.shape, 4), Looking(9))
    state = start(drafter, [4, 5, 4, 5, 4, 5, 4], 5)
    before = dict(drafter._place(state, state.tail, ()).candidates)[4]
    for token in (4, 5) * 20:
        assert not len(draft(drafter, state).tree)
        drafter.observe([state], [[token]], [torch.zeros(0, 9)])
    assert dict(drafter._place(state, state.tail, ()).candidates)[4] > max(before, 0.8)


def test_where_no_draft_pays_the_answers_are_not_looked_at() -> None:
    rows = Switched(4, pays=False)
    drafter = HybridDrafter(lambda ids: torch.zeros(*ids.shape, 4), rows)
    state = start(drafter, [4, 5, 6, 9], 4)
    assert not len(draft(drafter, state).tree)
    assert drafter.watch is None
    rows.pays = True
    assert len(draft(drafter, state).tree)
    assert drafter.watch is not None


@pytest.mark.parametrize("rows", [2, 9, 30])
def test_no_more_rows_than_asked(rows: int) -> None:
    drafter = hybrid(rows=rows, known={token: [(token * k) % 11 for k in range(1, 9)] for token in range(11)})
    state = start(drafter, list(range(10)), 3)
    for _ in range(5):
        made = draft(drafter, state)
        assert made.shape.rows <= rows
        drafter.observe([state], [[made.tree.tokens[0]]], [torch.zeros(0, 9)])
