"""Tree attention against plain softmax attention, and refusals of what it does not implement."""

from __future__ import annotations

import pytest
import torch

from esp_worker.attention import BlockMask, tree_attention

MODULE = torch.nn.Identity()


def block(lengths: list[int], rows: int, columns: int) -> BlockMask:
    contexts = torch.tensor(lengths)
    positions = contexts[:, None] + torch.arange(rows)
    visible = torch.ones(len(lengths), rows, rows, dtype=torch.bool).tril()
    return BlockMask(contexts, positions, visible, columns, torch.float64)


def test_a_lone_row_behind_equal_contexts_needs_no_mask() -> None:
    assert block([4, 4], 1, 5).additive(None, 1) is None
    assert block([4, 4], 1, 5).additive(5, 1) is None
    assert block([4, 4], 1, 5).additive(4, 1) is not None  # the window hides column 0
    assert block([4, 3], 1, 5).additive(None, 1) is not None


def test_window_counts_positions() -> None:
    mask = block([4], 2, 6).additive(3, 1)
    assert mask is not None
    assert (mask[0, 0] == 0).tolist() == [
        [False, False, True, True, True, False],  # position 4 sees 2, 3, 4
        [False, False, False, True, True, True],  # position 5 sees 3, 4, 5
    ]


def test_folded_heads_equal_repeated_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    batch, heads, groups, rows, columns, size = 2, 6, 2, 3, 8, 4
    query = torch.randn(batch, heads, rows, size, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(batch, groups, columns, size, generator=generator, dtype=torch.float64) for _ in "kv")
    mask = block([5, 2], rows, columns)
    got, _ = tree_attention(MODULE, query, key, value, None, block=mask, scaling=0.5)
    additive = mask.additive(None, 1)
    assert additive is not None
    scores = query @ key.repeat_interleave(3, 1).transpose(2, 3) * 0.5 + additive
    want = (scores.softmax(-1) @ value.repeat_interleave(3, 1)).transpose(1, 2)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("scaling", [0.5, None])
def test_scores_are_capped_before_the_mask(scaling: float | None) -> None:
    """A cap of 0.3 flattens the scores; capped after the mask, a hidden column would come back with weight."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, groups, rows, columns, size, cap = 2, 4, 2, 3, 8, 4, 0.3
    query = torch.randn(batch, heads, rows, size, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(batch, groups, columns, size, generator=generator, dtype=torch.float64) for _ in "kv")
    mask = block([5, 2], rows, columns)
    got, _ = tree_attention(MODULE, query, key, value, None, block=mask, scaling=scaling, softcap=cap)
    additive = mask.additive(None, 1)
    assert additive is not None
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5  # which is also 4**-0.5
    weights = (cap * torch.tanh(scores / cap) + additive).softmax(-1)
    torch.testing.assert_close(got, (weights @ value.repeat_interleave(2, 1)).transpose(1, 2))
    uncapped, _ = tree_attention(MODULE, query, key, value, None, block=mask, scaling=scaling)
    assert not torch.allclose(got, uncapped, atol=1e-2)


def test_a_cap_without_a_mask() -> None:
    query = torch.tensor([[[[2.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0], [-1.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    got, _ = tree_attention(MODULE, query, key, value, None, block=block([1], 1, 2), scaling=1.0, softcap=1.0)
    assert got.item() == pytest.approx(torch.sigmoid(2 * torch.tanh(torch.tensor(2.0))).item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_capped_scores_keep_the_dtype(dtype: torch.dtype) -> None:
    states = torch.ones(1, 1, 1, 4, dtype=dtype)
    got, _ = tree_attention(MODULE, states, states, states, None, block=block([0], 1, 1), softcap=5.0)
    assert got.dtype is dtype


@pytest.mark.parametrize("name", ["s_aux", "sinks", "position_bias", "indices", "block_indices"])
def test_what_is_not_implemented_is_refused(name: str) -> None:
    states = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=name):
        tree_attention(MODULE, states, states, states, None, block=block([0], 1, 1), **{name: 30.0})
