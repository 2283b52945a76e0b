"""The engine's logits are those of the stock model's own forward, not only their argmax; and rows do not leak."""

from __future__ import annotations

import pytest
import torch
from tiny import CONTEXT, FAMILIES, VOCAB, WINDOW, prompt, tiny_model

from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.model import CausalModel
from esp_worker.tree import Draft, TokenTree, block_shape

TREE = TokenTree(tokens=(3, 4, 5, 6, 7, 8), parents=(0, 1, 0, 1, 2, 3))  # three levels, branches at each
DRAFT = Draft(TREE, block_shape(TREE.parents, owners=tuple(range(7)), masks=2))
ROOT = 9
# Hugging Face's eager attention, which is the stock one where scores are capped, takes its softmax in float32.
ATOL = {"gemma2": 1e-5}


def assert_close(family: str, got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=ATOL.get(family, 1e-6))


def prefilled(model: CausalModel, lengths: list[int]) -> SlotCache:
    cache = model.new_cache(len(lengths))
    for slot, length in enumerate(lengths):
        model.forward_block(
            cache, Block.chain(slot, 0, length, model.device), model.embed(torch.tensor(prompt(length)))
        )
    return cache


def block_logits(model: CausalModel, lengths: list[int], draft: Draft = DRAFT) -> torch.Tensor:
    """[B, N, V] of a block behind prompts of these lengths."""
    cache, shape, many = prefilled(model, lengths), draft.shape, len(lengths)
    ids = torch.tensor([ROOT, *draft.tree.tokens])
    masks = model.embed(torch.arange(2))  # any two embeddings
    embeds = torch.cat([model.embed(ids), masks.repeat(len(draft.owners), 1)])
    block = Block(0, lengths, [shape.offsets] * many, [shape.visible] * many, model.device)
    hidden = model.forward_block(cache, block, embeds.repeat(many, 1))
    return model.logits(hidden).unflatten(0, (many, shape.rows))


def path_to(row: int) -> list[int]:
    """Tokens from the root to a row of TREE."""
    tokens: list[int] = []
    while row:
        tokens.append(TREE.tokens[row - 1])
        row = TREE.parents[row - 1]
    return [ROOT, *tokens[::-1]]


def reach(model: CausalModel) -> int:
    """How many positions away a token still changes a row: where every layer has the window, a window a layer."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    if window is None or "full_attention" in (getattr(config, "layer_types", None) or []):
        return CONTEXT
    return config.num_hidden_layers * (window - 1)


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
                assert_close(family, got[slot, row], want)
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
            assert_close(family, got[rows.start : rows.stop], want)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_that_ends_inside_the_block_counts_positions(family: str) -> None:
    """A chain longer than the window behind two siblings, so that columns and positions differ within the block."""
    model, length = tiny_model(family), 12
    chain = (getattr(model.config, "sliding_window", None) or WINDOW) + 3
    tree = TokenTree(tokens=(3, 4, *(5 + i % 8 for i in range(chain))), parents=(0, 0, 0, *range(3, 2 + chain)))
    got = block_logits(model, [length], Draft(tree, block_shape(tree.parents, (), 0)))[0]
    ids = torch.tensor([[*prompt(length), ROOT, *tree.tokens[2:]]])
    with model.stock() as hf:
        want = hf(input_ids=ids).logits[0, length + 1 :]
    assert_close(family, got[3:], want)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("node", range(len(TREE)))
def test_changing_one_node_changes_only_its_own_subtree(family: str, node: int) -> None:
    model = tiny_model(family)
    tokens = list(TREE.tokens)
    tokens[node] = VOCAB - 1
    changed = Draft(TokenTree(tuple(tokens), TREE.parents), DRAFT.shape)
    before, after = block_logits(model, [12])[0], block_logits(model, [12], changed)[0]
    shape = DRAFT.shape
    sees = shape.visible[:, node + 1] & (shape.offsets - shape.offsets[node + 1] <= reach(model))
    assert torch.equal(before[~sees], after[~sees])
    assert (before[sees] != after[sees]).any(-1).all()
    assert sees.any()
    assert not sees.all()
