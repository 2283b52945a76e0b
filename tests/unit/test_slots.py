"""The slot table: who stands where, which prefixes are taken over, and what stays when sequences come and go."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from esp_worker.drafters.none import NoDrafter
from esp_worker.sequence import ActiveSequence
from esp_worker.slots import SlotTable
from esp_worker.types import Request, SamplingParams


@dataclass
class Columns:
    """Stands for the cache: each slot's columns hold the tokens that were computed there."""

    slots: int
    columns: int = 64
    held: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [[] for _ in range(self.slots)]

    def copy(self, source: int, target: int, length: int) -> None:
        self.held[target][:length] = self.held[source][:length]

    def resize(self, slots: int, columns: int) -> None:
        self.held = [held[:columns] for held in self.held[:slots]] + [[] for _ in range(slots - self.slots)]
        self.slots, self.columns = slots, columns


@pytest.fixture
def table() -> SlotTable:
    return SlotTable(Columns(4))


def sequence(*prompt: int) -> ActiveSequence:
    return ActiveSequence(Request("r", prompt, SamplingParams(max_new_tokens=9)), NoDrafter(), limit=9)


def run(table: SlotTable, *prompt: int, reuse: bool = True) -> ActiveSequence:
    """Place a sequence and compute what it lacks."""
    placed = sequence(*prompt)
    table.place(placed, reuse)
    compute(table)
    table.start()
    check(table)
    return placed


def compute(table: SlotTable, tokens: int | None = None) -> None:
    """The next tokens of each context that is not whole."""
    for slot, filling in enumerate(table.filling, len(table.running)):
        missing = filling.context[filling.filled :][:tokens]
        table.cache.held[slot][filling.filled :] = missing
        table.fill(filling, len(missing))


def check(table: SlotTable) -> None:
    """Every sequence's columns hold its own tokens."""
    for slot, each in enumerate(table.sequences):
        wanted = each.context[: each.filled] if each in table.filling else each.context
        assert table.cache.held[slot][: len(wanted)] == wanted, slot


def test_the_longest_shared_beginning_is_taken_over(table: SlotTable) -> None:
    run(table, 1, 2, 3, 4)
    run(table, 1, 2, 9)
    third = run(table, 1, 2, 3, 7, 8)
    assert third.stats.cached_tokens == 3
    assert run(table, 5, 6).stats.cached_tokens == 0


def test_one_token_is_always_left_to_compute(table: SlotTable) -> None:
    run(table, 1, 2, 3)
    again = sequence(1, 2, 3)
    table.place(again, reuse=True)
    assert again.filled == 2


def test_reuse_can_be_off(table: SlotTable) -> None:
    run(table, 1, 2, 3)
    assert run(table, 1, 2, 3, reuse=False).stats.cached_tokens == 0


def test_a_slot_remembers_its_prompt_when_its_sequence_has_gone(table: SlotTable) -> None:
    first = run(table, 1, 2, 3)
    table.remove(first)
    assert run(table, 1, 2, 4).stats.cached_tokens == 2


def test_only_what_has_been_computed_is_taken_over(table: SlotTable) -> None:
    run(table, 9, 9)
    half = sequence(1, 2, 3, 4, 5, 6)
    table.place(half, reuse=True)
    compute(table, tokens=2)
    table.remove(half)
    assert run(table, 1, 2, 3, 4).stats.cached_tokens == 2


def test_an_overwritten_prompt_is_forgotten(table: SlotTable) -> None:
    table.remove(run(table, 1, 2, 3, 4))
    run(table, 1, 7, 7, 7)
    assert run(table, 1, 2, 3, 9).stats.cached_tokens == 1


@pytest.mark.parametrize("gone", range(3))
def test_the_last_running_sequence_closes_a_gap_and_the_filling_one_follows(table: SlotTable, gone: int) -> None:
    running = [run(table, 10 * i + 1, 10 * i + 2) for i in range(3)]
    filling = sequence(7, 8, 9)
    table.place(filling, reuse=True)
    compute(table, tokens=2)
    table.remove(running[gone])
    check(table)
    assert table.filling == [filling]
    assert len(table.running) == 2
    assert {id(each) for each in table.running} == {id(each) for i, each in enumerate(running) if i != gone}
    compute(table)
    table.start()
    check(table)
    for each in running:  # what is held is what the columns have
        if each in table.running:
            assert run(table, *each.request.prompt_ids, 5).stats.cached_tokens == 2
            table.remove(table.running[-1])


@pytest.mark.parametrize("gone", range(5))
def test_several_fill_their_slots_at_a_time(table: SlotTable, gone: int) -> None:
    """Whoever leaves, the others' columns stay theirs; those run whose contexts are whole, in the order of slots."""
    table.resize(5, 64)
    sequences = [run(table, 1, 2), run(table, 3, 4)]
    for i in range(3):
        sequences.append(sequence(*range(10 * i + 5, 10 * i + 9)))
        table.place(sequences[-1], reuse=True)
    compute(table, tokens=3)
    table.remove(sequences[gone])
    check(table)
    assert sorted(map(id, table.sequences)) == sorted(id(each) for i, each in enumerate(sequences) if i != gone)
    for each in list(table.filling)[:2]:
        slot = table.sequences.index(each)
        table.cache.held[slot][3:] = each.context[3:]
        table.fill(each, 1)
        table.start()
        check(table)
        assert table.running[-1] is each
    assert len(table.filling) == (0 if gone > 1 else 1)


def test_what_others_will_have_computed(table: SlotTable) -> None:
    run(table, 1, 2, 3)
    assert table.coming(sequence(1, 2, 9)) <= 0
    table.place(sequence(1, 2, 3, 4, 5, 6), reuse=True)
    assert table.coming(sequence(1, 2, 3, 4, 5, 7)) == 5 - 3
    assert table.coming(sequence(1, 2, 3, 4)) == 0  # its last token is its own to compute
    assert table.coming(sequence(8, 9)) == 0


def test_a_copy_that_fails_loses_no_sequence_and_leaves_no_false_memory(
    table: SlotTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run(table, 1, 2), run(table, 3, 4)

    def fails(source: int, target: int, length: int) -> None:
        table.cache.held[target][:1] = [99]
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(table.cache, "copy", fails)
        with pytest.raises(RuntimeError):
            table.remove(first)
    assert table.running == [first, second]
    table.clear()
    assert run(table, 1, 2, 3).stats.cached_tokens == 0


def test_other_numbers_of_slots_keep_what_stands_in_them(table: SlotTable) -> None:
    running = [run(table, i, i + 10, i + 20) for i in range(1, 3)]
    filling = sequence(7, 8, 9)
    table.place(filling, reuse=True)
    compute(table, tokens=1)
    table.remove(running[1])
    table.resize(2, 64)
    assert table.sequences == [running[0], filling]
    assert not table.free
    check(table)
    table.resize(4, 64)
    assert table.free == 2
    check(table)


def test_fewer_columns_are_remembered_no_further(table: SlotTable) -> None:
    table.remove(run(table, 1, 2, 3, 4))
    table.resize(4, 2)
    assert run(table, 1, 2, 3, 4).stats.cached_tokens == 2


def test_a_chunk_that_fails_half_way_leaves_no_false_memory(table: SlotTable) -> None:
    table.remove(run(table, 1, 2, 3, 4))
    table.place(sequence(1, 7, 7, 7), reuse=True)
    table.cache.held[0][1:] = [99, 99]  # some layers have written, then the pass failed
    table.clear()
    assert run(table, 1, 2, 3, 9).stats.cached_tokens == 1
