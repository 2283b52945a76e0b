"""The engine's logits are those of the stock model's own forward, not only their argmax; and rows do not leak."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, VOCAB, WINDOW, prompt, tiny_model

from esp_worker.cache import SlotCache
from esp_worker.model import CausalModel
from esp_worker.tree import Draft, TokenTree, block_shape

TREE = TokenTree(tokens=(3, 4, 5, 6, 7, 8), parents=(0, 1, 0, 1, 2, 3))  # three levels, branches at each
DRAFT = Draft(TREE, block_shape(TREE.parents, owners=tuple(range(7)), masks=2))
ROOT = 9


def prefilled(model: CausalModel, lengths: list[int]) -> tuple[SlotCache, torch.Tensor]:
    cache = model.new_cache(len(lengths))
    for slot, length in enumerate(lengths):
        ids = torch.tensor([prompt(length)])
        chain = torch.ones(1, length, length, dtype=torch.bool).tril()
        model.forward_block(cache, slot, torch.tensor([0]), model.embed(ids), torch.arange(length)[None], chain)
    return cache, torch.tensor(lengths)


def block_logits(model: CausalModel, lengths: list[int], draft: Draft = DRAFT) -> torch.Tensor:
    """[B, N, V] of a block behind prompts of these lengths."""
    cache, context = prefilled(model, lengths)
    shape = draft.shape
    ids = torch.tensor([ROOT, *draft.tree.tokens])
    masks = model.embed(torch.arange(2))  # any two embeddings
    embeds = torch.cat([model.embed(ids), masks.repeat(len(draft.owners), 1)]).expand(len(lengths), -1, -1)
    positions = context[:, None] + shape.offsets
    hidden = model.forward_block(cache, 0, context, embeds, positions, shape.visible.expand(len(lengths), -1, -1))
    return model.logits(hidden)


def path_to(row: int) -> list[int]:
    """Tokens from the root to a row of TREE."""
    tokens: list[int] = []
    while row:
        tokens.append(TREE.tokens[row - 1])
        row = TREE.parents[row - 1]
    return [ROOT, *tokens[::-1]]


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_tree_rows_equal_the_stock_forward_of_their_path(family: str) -> None:
    model, lengths = tiny_model(family), [3, 12, 30]
    got = block_logits(model, lengths)
    with model.stock() as hf:
        for slot, length in enumerate(lengths):
            for row in range(1 + len(TREE)):
                ids = torch.tensor([[*prompt(length), *path_to(row)]])
                want = hf(input_ids=ids).logits[0, -1]
                torch.testing.assert_close(got[slot, row], want, rtol=0, atol=1e-6)
                assert want.std() > 0.1  # logits that say something


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_probe_rows_equal_the_stock_forward_of_path_and_masks(family: str) -> None:
    model, length = tiny_model(family), 12
    got = block_logits(model, [length])[0]
    masks = model.embed(torch.arange(2))
    with model.stock() as hf:
        for owner in range(1 + len(TREE)):
            ids = torch.tensor([*prompt(length), *path_to(owner)])
            embeds = torch.cat([model.embed(ids), masks])[None]
            want = hf(inputs_embeds=embeds).logits[0, -2:]
            rows = DRAFT.shape.probe_rows(owner)
            torch.testing.assert_close(got[rows.start : rows.stop], want, rtol=0, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_that_ends_inside_the_block_counts_positions(family: str) -> None:
    """A chain longer than the window behind two siblings, so that columns and positions differ within the block."""
    model, length, chain = tiny_model(family), 12, WINDOW + 3
    tree = TokenTree(tokens=(3, 4, *(5 + i % 8 for i in range(chain))), parents=(0, 0, 0, *range(3, 2 + chain)))
    got = block_logits(model, [length], Draft(tree, block_shape(tree.parents, (), 0)))[0]
    ids = torch.tensor([[*prompt(length), ROOT, *tree.tokens[2:]]])
    with model.stock() as hf:
        want = hf(input_ids=ids).logits[0, length + 1 :]
    torch.testing.assert_close(got[3:], want, rtol=0, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("node", range(len(TREE)))
def test_changing_one_node_changes_only_its_own_subtree(family: str, node: int) -> None:
    model = tiny_model(family)
    tokens = list(TREE.tokens)
    tokens[node] = VOCAB - 1
    changed = Draft(TokenTree(tuple(tokens), TREE.parents), DRAFT.shape)
    before, after = block_logits(model, [12])[0], block_logits(model, [12], changed)[0]
    sees = DRAFT.shape.visible[:, node + 1]
    assert torch.equal(before[~sees], after[~sees])
    assert (before[sees] != after[sees]).any(-1).all()
    assert sees.any()
    assert not sees.all()
