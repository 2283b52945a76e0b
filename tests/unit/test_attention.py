"""Tree attention against plain softmax attention, and refusals of what it does not implement."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esp_worker import attention as attention_module
from esp_worker import block as block_module
from esp_worker.attention import tree_attention
from esp_worker.block import PART_START, READING, Block, firsts_of_parts

MODULE = torch.nn.Identity()


def chains(lengths: list[int], rows: int | list[int]) -> Block:
    """A chain behind each context."""
    counts = [rows] * len(lengths) if isinstance(rows, int) else rows
    offsets = [torch.arange(count) for count in counts]
    visible = [torch.ones(count, count, dtype=torch.bool).tril() for count in counts]
    return Block(0, lengths, offsets, visible, torch.device("cpu"))


def additive(block: Block, window: int | None = None) -> torch.Tensor | None:
    return block.additive(window, 1, torch.float64)


def packed(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """[B, H, N, D] -> [1, H, R, D]: the first counts[b] rows of each."""
    return torch.cat([each[:, :count] for each, count in zip(x, counts, strict=True)], dim=1)[None]


def test_a_lone_row_behind_equal_contexts_needs_no_mask() -> None:
    assert additive(chains([4, 4], 1)) is None
    assert additive(chains([4, 4], 1), 5) is None
    assert additive(chains([4, 4], 1), 4) is not None  # the window hides column 0
    assert additive(chains([4, 3], 1)) is not None


def cost(firsts: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> int:
    ends = [*firsts[1:], len(counts)]
    columns = [length + count for length, count in zip(lengths, counts, strict=True)]
    return sum(
        PART_START + (end - first) * max(columns[first:end]) * (max(counts[first:end]) + READING)
        for first, end in zip(firsts, ends, strict=True)
    )


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 16)), min_size=1, max_size=7))
def test_slots_are_parted_at_the_least_cost(slots: list[tuple[int, int]]) -> None:
    """Against all ways to part them."""
    lengths, counts = zip(*slots, strict=True)
    inner = range(1, len(slots))
    ways = [[0, *cuts] for size in range(len(slots)) for cuts in itertools.combinations(inner, size)]
    best = min(cost(way, lengths, counts) for way in ways)
    assert cost(firsts_of_parts(lengths, counts, PART_START), lengths, counts) == best


def test_one_wide_block_stands_alone() -> None:
    assert firsts_of_parts([100] * 16, [1] * 5 + [16] + [1] * 10, PART_START) == [0, 5, 6]
    assert firsts_of_parts([100] * 16, [1] * 16, PART_START) == [0]
    lengths = [100 + 100 * (slot % 20) for slot in range(128)]
    assert firsts_of_parts(lengths, [1] * 128, 400_000) == [0]  # parts have at most 32 slots, and cost more
    assert firsts_of_parts([100] * 5 + [3000] + [100] * 10, [1] * 16, PART_START) == [0, 5, 6]


def test_window_counts_positions() -> None:
    mask = additive(chains([4], 2), 3)
    assert mask is not None
    assert (mask[0, 0] == 0).tolist() == [
        [False, False, True, True, True, False],  # position 4 sees 2, 3, 4
        [False, False, False, True, True, True],  # position 5 sees 3, 4, 5
    ]


# Of each head, 9 queries and 60: the latter go to PyTorch's fused kernel.
COUNTS = pytest.mark.parametrize("counts", [[3, 3], [3, 1], [1, 3], [20, 20], [2, 20]], ids=str)
PARTS = pytest.mark.parametrize("part_start", [block_module.PART_START, 0], ids=["together", "apart"])
LENGTHS, HEADS, GROUPS, SIZE = [5, 2], 6, 2, 4


def draw_states() -> list[torch.Tensor]:
    """Query [B, H, N, D], key and value [B, G, T, D]."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, HEADS, 20, SIZE), (2, GROUPS, 25, SIZE), (2, GROUPS, 25, SIZE)]
    return [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]


def plain_attention(
    states: list[torch.Tensor],
    counts: list[int],
    bend: Callable[[torch.Tensor], torch.Tensor],
    window: int = 1000,
) -> torch.Tensor:
    """Row by row, over what a chain behind each context sees; `bend` is done to the scores: [1, R, H, D]."""
    query, key, value = states
    out = []
    for slot, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        for row in range(count):
            seen = slice(max(length + row + 1 - window, 0), length + row + 1)
            keys, values = (x[slot, :, seen].repeat_interleave(HEADS // GROUPS, 0) for x in (key, value))
            scores = bend((keys @ query[slot, :, row, :, None])[..., 0] * 0.5)  # which is also 4**-0.5
            out.append((scores.softmax(-1)[:, None] @ values)[:, 0])
    return torch.stack(out)[None]


@COUNTS
@PARTS
def test_packed_rows_and_folded_heads_equal_one_row_at_a_time(
    counts: list[int], part_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "PART_START", part_start)
    states = draw_states()
    query = packed(states[0], counts)
    block = chains(LENGTHS, counts)
    got, _ = tree_attention(MODULE, query, *(x[:, :, : block.columns] for x in states[1:]), None, block=block)
    torch.testing.assert_close(got, plain_attention(states, counts, lambda scores: scores))


@PARTS
@pytest.mark.parametrize("window", [2, 4])
def test_a_window_is_that_of_each_row_in_a_part_too(
    window: int, part_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_module, "PART_START", part_start)
    states, counts = draw_states(), [1, 3]
    block = chains(LENGTHS, counts)
    key, value = (x[:, :, : block.columns] for x in states[1:])
    got, _ = tree_attention(MODULE, packed(states[0], counts), key, value, None, block=block, sliding_window=window)
    want = plain_attention(states, counts, lambda scores: scores, window)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(want, plain_attention(states, counts, lambda scores: scores))


def test_a_block_goes_with_its_last_user() -> None:
    """Its masks may be large: they must not wait for the garbage collector."""
    gc.disable()
    try:
        for counts in ([1, 1], [1, 20]):
            block = chains(LENGTHS, counts)
            states = draw_states()
            tree_attention(
                MODULE, packed(states[0], counts), *(x[:, :, : block.columns] for x in states[1:]), None, block=block
            )
            alive = weakref.ref(block)
            del block
            assert alive() is None
    finally:
        gc.enable()


@COUNTS
@PARTS
@pytest.mark.parametrize("scaling", [0.5, None])
def test_scores_are_capped_before_the_mask(
    scaling: float | None, counts: list[int], part_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap of 0.3 flattens the scores; capped after the mask, a hidden column would come back with weight."""
    monkeypatch.setattr(block_module, "PART_START", part_start)
    states, cap = draw_states(), 0.3
    query = packed(states[0], counts)
    block = chains(LENGTHS, counts)
    key, value = (x[:, :, : block.columns] for x in states[1:])
    got, _ = tree_attention(MODULE, query, key, value, None, block=block, scaling=scaling, softcap=cap)
    torch.testing.assert_close(got, plain_attention(states, counts, lambda scores: cap * torch.tanh(scores / cap)))
    uncapped, _ = tree_attention(MODULE, query, key, value, None, block=block, scaling=scaling)
    assert not torch.allclose(got, uncapped, atol=1e-2)


@pytest.mark.parametrize("cap", [None, 0.3])
@pytest.mark.parametrize(("filled_from", "queries"), [(0, 4), (2 * GROUPS * SIZE * 6 + 1, 3)])
def test_few_queries_of_many_keys_are_filled_up(
    cap: float | None, filled_from: int, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplied: list[int] = []
    bmm = torch.bmm

    def recorded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        multiplied.append(left.shape[1])
        return bmm(left, right)

    monkeypatch.setattr(attention_module, "FILLED_FROM", filled_from)
    monkeypatch.setattr(torch, "bmm", recorded)
    states, counts = draw_states(), [1, 1]
    block = chains(LENGTHS, counts)
    key, value = (x[:, :, : block.columns] for x in states[1:])
    got, _ = tree_attention(MODULE, packed(states[0], counts), key, value, None, block=block, softcap=cap)
    want = plain_attention(states, counts, lambda scores: scores if cap is None else cap * torch.tanh(scores / cap))
    torch.testing.assert_close(got, want)
    assert multiplied == [queries, queries]


def test_a_cap_without_a_mask() -> None:
    query = torch.tensor([[[[2.0]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0], [-1.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
    got, _ = tree_attention(MODULE, query, key, value, None, block=chains([1], 1), scaling=1.0, softcap=1.0)
    assert got.item() == pytest.approx(torch.sigmoid(2 * torch.tanh(torch.tensor(2.0))).item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_capped_scores_keep_the_dtype(dtype: torch.dtype) -> None:
    states = torch.ones(1, 1, 1, 4, dtype=dtype)
    got, _ = tree_attention(MODULE, states, states, states, None, block=chains([0], 1), softcap=5.0)
    assert got.dtype is dtype


@pytest.mark.parametrize("name", ["s_aux", "sinks", "position_bias", "indices", "block_indices"])
def test_what_is_not_implemented_is_refused(name: str) -> None:
    states = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=name):
        tree_attention(MODULE, states, states, states, None, block=chains([0], 1), **{name: 30.0})
