"""ESP's masks and drafts: initialisation, the mean's update in closed form, top candidates, who owns probes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esp_worker.drafters.base import Prompt, Room, possible_owners
from esp_worker.drafters.probe import (
    ProbeDrafter,
    ProbeState,
    ema_update,
    initial_masks,
    most_valuable,
    prompt_noise,
    top_candidates,
)
from esp_worker.tree import EMPTY_TREE, Candidates, TokenTree, ending_probs
from esp_worker.types import SamplingParams


def embeds(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_ema_closed_form_equals_the_loop(rate: float, count: int) -> None:
    """Eq. 4 token by token against Eq. 5 in one go."""
    masks, tokens = embeds(3, 16), embeds(count, 16)
    loop = masks.clone()
    for token in tokens:
        loop = loop + rate * (token - loop)
    torch.testing.assert_close(ema_update(masks, tokens, rate), loop, rtol=1e-12, atol=1e-12)


def moments(table: torch.Tensor) -> Any:
    return table.mean(0), table.std(0, correction=0)


def test_mean_init() -> None:
    prompt = embeds(5, 16)
    masks = initial_masks(prompt, 3, "mean")
    torch.testing.assert_close(masks, prompt.mean(0).expand(3, 16))


def test_last_k_init_ends_with_the_last_token() -> None:
    prompt = embeds(5, 16)
    assert torch.equal(initial_masks(prompt, 3, "last_k"), prompt[2:])
    assert torch.equal(initial_masks(prompt[:1], 3, "last_k"), prompt[[0, 0, 0]])


def test_sample_init_is_normal_noise_with_the_moments_of_the_embedding_table() -> None:
    """Moments per dimension, over more masks than any run has."""
    table, count = 3 + 2 * embeds(6, 4), 40_000
    masks = initial_masks(embeds(5, 4), count, "sample", table=moments(table)).numpy()
    mean, sigma = table.numpy().mean(0), table.numpy().std(0)
    assert masks.mean(0) == pytest.approx(mean, abs=5 * sigma.max() / count**0.5)
    assert masks.std(0) == pytest.approx(sigma, rel=0.03)
    assert ((masks - mean) / sigma < 1).mean() == pytest.approx(0.841, abs=0.01)  # a normal's share below +1 sigma


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sample_init_repeats_and_follows_the_prompts_content_alone(dtype: torch.dtype) -> None:
    prompt = embeds(5, 16).to(dtype)
    table = moments(embeds(9, 16))
    first = initial_masks(prompt, 2, "sample", table=table)
    torch.manual_seed(99)  # the global generator has no part in it
    assert torch.equal(initial_masks(prompt.clone(), 2, "sample", table=table), first)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(prompt_noise(prompt.T.contiguous().T, 2), prompt_noise(prompt, 2)), "content, not layout"
    assert not torch.equal(prompt_noise(prompt.flip(0), 2), prompt_noise(prompt, 2))


@pytest.mark.parametrize("offset", [-2.0, 0.0, 1.0, 5.0])
def test_offset_init(offset: float) -> None:
    prompt = embeds(5, 16)
    want = torch.from_numpy(prompt.numpy().mean(0) + offset * prompt.numpy().std(0))
    torch.testing.assert_close(initial_masks(prompt, 3, "offset", offset), want.expand(3, 16))


def test_offset_init_by_the_tables_moments_is_the_same_for_every_prompt() -> None:
    table = embeds(40, 16)
    want = torch.from_numpy(table.numpy().mean(0) + 5 * table.numpy().std(0)).expand(3, 16)
    torch.testing.assert_close(initial_masks(embeds(5, 16) - 1, 3, "offset", 5.0, moments(table)), want)


@pytest.mark.parametrize("init", ["mean", "last_k", "offset"])
def test_a_prompt_of_one_token_is_every_mask(init: Any) -> None:
    prompt = embeds(1, 16)
    torch.testing.assert_close(initial_masks(prompt, 3, init, 5.0), prompt.expand(3, 16), rtol=0, atol=0)


@pytest.mark.parametrize("init", ["mean", "last_k", "sample", "offset"])
def test_masks_of_a_16_bit_model_are_kept_in_fp32(init: Any) -> None:
    prompt = embeds(5, 16).to(torch.bfloat16)
    assert initial_masks(prompt, 1, init, table=moments(prompt)).dtype is torch.float32


@pytest.mark.parametrize("settings", [{"init": "sample"}, {"init": "offset", "init_moments": "table"}])
def test_an_init_from_the_table_needs_it(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="embedding table"):
        drafter(**settings)


def test_the_prompts_offset_does_not_look_at_the_table() -> None:
    prompt, table = embeds(5, 16), embeds(40, 16)
    esp = ProbeDrafter(lambda ids: table[ids], init="offset", init_offset=2.0, table=lambda: moments(table))
    state = esp.start(Prompt((1,), SamplingParams(max_new_tokens=9), lambda ids: prompt, torch.device("cpu")))
    torch.testing.assert_close(state.masks, initial_masks(prompt, 1, "offset", 2.0))


def test_top_candidates_are_softmax_probabilities_best_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    (candidates,) = top_candidates(logits, 3)
    assert candidates.tokens == [1, 2, 0]
    assert candidates.probs == pytest.approx(logits.softmax(-1)[0, [1, 2, 0]].tolist())
    assert len(top_candidates(logits, 99)[0].tokens) == 4


# ----------------------------------------------------------------------------------------------------- room and owners


def test_room_bounds_the_draft() -> None:
    assert [Room(tokens).max_depth for tokens in (0, 1, 5)] == [0, 0, 4]
    assert Room(tokens=2).masks(3) == 0  # the next step can commit one token at most
    assert Room(tokens=4).masks(3) == 2
    tree = TokenTree((1, 2), (0, 1))
    assert possible_owners(tree, 2, Room(9)) == (0, 1, 2)
    assert possible_owners(tree, 2, Room(3)) == (0, 1)
    assert possible_owners(EMPTY_TREE, 0, Room(9)) == ()


def drafter(**settings: Any) -> ProbeDrafter:
    return ProbeDrafter(lambda ids: ids, **settings)


def state_of(masks: int, seed: int, vocab: int = 40) -> ProbeState:
    logits = torch.randn(masks, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return ProbeState(torch.zeros(masks, 4), top_candidates(logits, vocab))


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("tree", ["static", "dynamic", "best_first"])
@pytest.mark.parametrize("probe_owners", [None, 1, 3])
def test_no_row_stands_behind_the_last_token(tree: Any, probe_owners: int | None, tokens: int) -> None:
    """Near a sequence's end, which may be the context's: no node without a bonus token, no probe outside."""
    settings = {"branches": [6, 2, 2]} if tree == "static" else {"block_complexity": 40}
    esp = drafter(masks=3, tree=tree, probe_owners=probe_owners, **settings)
    draft = esp.draft(state_of(3, 1), 1, Room(tokens))
    assert max(draft.shape.depths) == min(tokens - 1, 3)
    assert max(draft.shape.offsets) <= tokens
    assert draft.masks == min(max(tokens - 2, 0), 3)
    assert bool(draft.owners) == (tokens > 2)


@pytest.mark.parametrize("tree", ["dynamic", "best_first"])
@pytest.mark.parametrize(("masks", "probe_owners"), [(1, None), (2, None), (3, None), (1, 1), (2, 1), (2, 4), (3, 10)])
def test_block_complexity_is_the_rows_of_a_block(tree: Any, masks: int, probe_owners: int | None) -> None:
    budget = 60
    esp = drafter(masks=masks, block_complexity=budget, tree=tree, probe_owners=probe_owners)
    shape = esp.draft(state_of(masks, 1, vocab=80), 1, Room(99)).shape
    assert shape.rows == budget
    assert shape.masks == masks
    assert len(shape.owners) == (probe_owners or shape.token_rows)


@pytest.mark.parametrize("tree", ["static", "dynamic", "best_first"])
def test_a_pruned_candidate_leaves_no_row_empty(tree: Any) -> None:
    """The root's token is the best candidate of each mask, and pruned: the drafter kept one candidate to spare."""
    settings = {"branches": [9, 9]} if tree == "static" else {"block_complexity": 30}
    esp = ProbeDrafter(torch.nn.Embedding(40, 4), masks=2, tree=tree, **settings)
    state = ProbeState(torch.zeros(2, 4))
    logits = torch.zeros(2, 40)
    logits[:, 7] = 1
    esp.observe([state], [[7]], [logits])
    assert [len(level.tokens) for level in state.levels] == [10, 10], "nine nodes may hang below one parent"
    assert len(esp.draft(state, 7, Room(2)).tree) == 9  # depth 1 alone


def test_probe_owners_only_drop_probes_from_a_static_tree() -> None:
    every, few = (drafter(masks=2, tree="static", branches=[7, 2], probe_owners=n) for n in (None, 4))
    full, thin = (esp.draft(state_of(2, 1), 1, Room(99)) for esp in (every, few))
    assert full.tree == thin.tree
    assert (full.shape.rows, thin.shape.rows) == (30, 10 + 2 * 4)
    assert drafter(masks=2, tree="static", branches=[7, 2], probe_owners=99).draft(state_of(2, 1), 1, Room(99)) == full


def test_the_owners_are_those_whose_probes_are_most_likely_used() -> None:
    """Root .25 + (.5 + .25 drafted), the .5 node keeps .5 * (1 - .75 - .125): its child .375 is worth the most."""
    tree = TokenTree((1, 2, 3, 4), (0, 1, 0, 1), (0.5, 0.375, 0.25, 0.0625))
    assert ending_probs(tree) == [0.25, 0.0625, 0.375, 0.25, 0.0625]
    chosen = [most_valuable(tree, range(5), count) for count in range(1, 6)]
    assert chosen == [(2,), (0, 2), (0, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3, 4)]


@given(st.lists(st.integers(0, 8), min_size=4, max_size=4), st.integers(1, 6), st.integers(1, 6), st.data())
def test_most_valuable_is_the_best_set_of_owners(ranks: list[int], nodes: int, count: int, data: st.DataObject) -> None:
    """Of all sets of that size the one most likely to hold the deepest accepted row; of equals the earliest rows."""
    probs = [p / 8 for p in sorted(ranks, reverse=True)]
    esp = drafter(masks=2, tree="best_first", block_complexity=3 * (nodes + 1))
    tree = esp.draft(ProbeState(torch.zeros(2, 4), [Candidates([1, 2, 3, 4], probs)] * 2), 9, Room(99)).tree
    rows = sorted(data.draw(st.sets(st.integers(0, len(tree)), min_size=1)))
    worth = ending_probs(tree)
    sets = itertools.combinations(rows, min(count, len(rows)))
    assert most_valuable(tree, rows, count) == max(sets, key=lambda chosen: sum(worth[row] for row in chosen))


def test_without_candidates_the_next_block_is_the_root_with_its_probes() -> None:
    """What follows a step whose deepest accepted node owned no probes."""
    for probe_owners in (None, 1):
        esp = ProbeDrafter(torch.nn.Embedding(9, 4), masks=2, block_complexity=12, probe_owners=probe_owners)
        state = state_of(2, 1)
        esp.observe([state], [[3, 4]], [torch.zeros(0, 9)])
        draft = esp.draft(state, 4, Room(99))
        assert draft.tree == EMPTY_TREE
        assert (draft.owners, draft.masks, draft.shape.rows) == ((0,), 2, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"masks": 2, "tree": "static", "branches": [4]}, "one width a mask"),
        ({"tree": "static"}, "a static tree has branches"),
        ({"branches": [4]}, "no other has"),
        ({"masks": 2, "block_complexity": 5}, "leaves no draft row"),
        ({"block_complexity": 5, "probe_owners": 4}, "leaves no draft row"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        drafter(**settings)
