"""The slot cache: rows land behind each slot's context, compaction and moves touch nothing else, growth keeps all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from esp_worker.block import Block
from esp_worker.cache import SlotCache

LAYERS, SLOTS, HEADS, SIZE = 2, 3, 2, 4


@pytest.fixture(params=[False, True], ids=["by column", "by dimension"])
def cache(request: pytest.FixtureRequest) -> SlotCache:
    return SlotCache(
        layers=LAYERS,
        slots=SLOTS,
        kv_heads=HEADS,
        head_dim=SIZE,
        dtype=torch.float64,
        device=torch.device("cpu"),
        by_dimension=request.param,
    )


def write(cache: SlotCache, first_slot: int, lengths: list[int], rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """rows: of each slot; a row's number fills its key, its value is the negative. Returns what each layer sees."""
    counts = [len(each) for each in rows]
    offsets, visible = [torch.arange(count) for count in counts], [torch.ones(n, n, dtype=torch.bool) for n in counts]
    cache.begin(Block(first_slot, lengths, offsets, visible, torch.device("cpu")))
    numbers = torch.tensor([number for each in rows for number in each], dtype=torch.float64)
    key = numbers[None, None, :, None].expand(1, HEADS, -1, SIZE)
    seen = []
    for layer in range(LAYERS):
        keys, values = cache.update(key + 1000 * layer, -key, layer)
        written = keys != 0
        assert torch.equal(-values[written], keys[written] - 1000 * layer)
        seen.append(keys[:, 0, :, 0] - 1000 * layer * (keys[:, 0, :, 0] != 0))
    return seen


def test_rows_land_behind_each_slots_own_context(cache: SlotCache) -> None:
    write(cache, 0, [0, 0], [[1, 2, 3], [11, 12, 13]])
    for seen in write(cache, 0, [3, 1], [[4, 5], [22, 23]]):
        assert seen.tolist() == [[1, 2, 3, 4, 5], [11, 22, 23, 0, 0]]


def test_a_slot_gets_as_many_rows_as_it_has(cache: SlotCache) -> None:
    write(cache, 0, [0, 0], [[1, 2, 3], [11]])
    for seen in write(cache, 0, [3, 1], [[4], [12, 13, 14]]):
        assert seen.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_a_later_slot_is_written_alone(cache: SlotCache) -> None:
    write(cache, 0, [0], [[1, 2]])
    write(cache, 2, [0], [[7, 8]])
    (seen, _) = write(cache, 0, [2, 0, 2], [[3], [5], [9]])
    assert seen.tolist() == [[1, 2, 3], [5, 0, 0], [7, 8, 9]]


def test_compaction_reads_all_before_it_writes(cache: SlotCache) -> None:
    write(cache, 0, [0, 0], [[1, 2, 3, 4], [11, 12, 13, 14]])
    cache.compact([0, 0, 1], [2, 3, 3], [1, 2, 1])  # 0: keep 1,3,4; 1: keep 11,14
    (seen, _) = write(cache, 0, [3, 2], [[5], [15]])
    assert seen.tolist() == [[1, 3, 4, 5], [11, 14, 15, 14]]


def test_copy(cache: SlotCache) -> None:
    write(cache, 0, [0, 0, 0], [[1, 2], [11, 12], [21, 22]])
    cache.copy(2, 0, 2)
    (seen, _) = write(cache, 0, [2, 2], [[23], [13]])
    assert seen.tolist() == [[21, 22, 23], [11, 12, 13]]


def test_growth_keeps_contents_and_is_finite(cache: SlotCache) -> None:
    assert cache.columns == 0
    write(cache, 0, [0], [[1, 2]])
    before = cache.columns
    (seen, _) = write(cache, 0, [before], [[9]])
    assert cache.columns == 2 * before
    assert seen[0, :2].tolist() == [1, 2]
    assert seen[0, -1] == 9
    assert torch.isfinite(seen).all()
    assert cache.nbytes == 2 * LAYERS * SLOTS * HEADS * cache.columns * SIZE * 8
