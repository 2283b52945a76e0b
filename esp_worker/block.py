"""The rows of one forward pass: the blocks of all sequences that decode, and chunks of prompts.

B slots, N_b rows of slot b, R rows in all, N of the widest block, T cache columns, H heads, g = query heads per
key/value head, D head size.
Rows are packed, one slot's behind the other's, so that a step costs the rows that it has: only attention, which reads
each slot's own cache, needs them apart. Columns of a slot: [0, L) its context, [L, L + N_b) its rows. Column c of the
context holds position c.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import torch

# What attention takes, in products of one row and one column: to start its operators once more, and, in rows, to read a
# column. A CPU's by a small model's sizes (a larger one has more to win from parts); a GPU's worked out, not measured:
# 65 us at 100 TFLOP/s of an 8B model's heads.
PART_START, PART_START_GPU = 3200, 400_000
READING = 3
MOST_SLOTS = 32  # of a part: bounds the search

Where = tuple[slice, slice] | tuple[torch.Tensor, torch.Tensor]  # of slots and columns; tensors: [R] of each


class Block:
    """Rows of slots first_slot .. first_slot + B - 1, and who sees whom.

    lengths: context columns of each slot; offsets: [N_b] of each, a row's position behind the context; visible:
    [N_b, N_b] bool of each, who sees whom among them (all see the context, up to a layer's window).
    """

    def __init__(
        self,
        first_slot: int,
        lengths: Sequence[int],
        offsets: Sequence[torch.Tensor],
        visible: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self.slots = slice(first_slot, first_slot + len(lengths))
        self.counts = [len(each) for each in offsets]
        self.rows, self.width = sum(self.counts), max(self.counts)
        self.columns = max(length + count for length, count in zip(lengths, self.counts, strict=True))
        self.lengths, self._offsets, self._visible = lengths, offsets, visible
        self._device = device
        self._even = self.rows == self.width * len(lengths)
        self._masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor | None] = {}

    @classmethod
    def chain(cls, slot: int, start: int, rows: int, device: torch.device) -> Block:
        """`rows` rows of one slot from position `start` on, each behind the other."""
        offsets, visible = in_order(rows)
        return cls(slot, [start], [offsets], [visible], device)

    @classmethod
    def siblings(cls, slot: int, start: int, rows: int, device: torch.device) -> Block:
        """`rows` rows of one slot that all stand at position `start`, and do not see each other."""
        return cls(slot, [start], [torch.zeros(rows, dtype=torch.long)], [torch.eye(rows, dtype=torch.bool)], device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[1, R]"""
        return (self._contexts[self._slot_of] + torch.cat(list(self._offsets)).to(self._device))[None]

    @cached_property
    def where(self) -> Where:
        """Slots and columns that the rows are written to: slices [B], [N] where one fits all, else [R] of each row."""
        if self._even and len(set(self.lengths)) == 1:
            return self.slots, slice(self.columns - self.width, self.columns)
        return self._slot_of + self.slots.start, self._contexts[self._slot_of] + self._place

    @cached_property
    def parts(self) -> list[tuple[slice, slice, Block]]:
        """Neighbouring slots whose attention is computed together, all as wide as the widest and as long as the
        longest: which of this block's slots and rows they are, and a block of them. Empty where all are one part."""
        start = PART_START if self._device.type == "cpu" else PART_START_GPU
        firsts = firsts_of_parts(self.lengths, self.counts, start)
        if len(firsts) == 1:
            return []  # not the block itself: a cycle would hold its masks until the garbage collector comes
        rows = [0, *itertools.accumulate(self.counts)]
        parts = []
        for first, end in itertools.pairwise([*firsts, len(self.counts)]):
            slots = slice(first, end)
            where = self.slots.start + first
            part = Block(where, self.lengths[slots], self._offsets[slots], self._visible[slots], self._device)
            parts.append((slots, slice(rows[first], rows[end]), part))
        return parts

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """[1, H, R, D] -> [B, H, N, D]; narrower blocks are filled up with their first row."""
        batch = len(self.lengths)
        if batch == 1:
            return x
        _, heads, _, size = x.shape
        rows = x[0].view(heads, batch, self.width, size) if self._even else x[0][:, self._row_at]
        return rows.transpose(0, 1)

    def together(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, N, D] -> [1, R, H, D], without what narrower blocks were filled up with."""
        x = x.transpose(1, 2)
        if len(self.lengths) == 1:
            return x
        return (x.flatten(0, 1) if self._even else x[self._slot_of, self._place])[None]

    def additive(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """[B, 1, group * N, T] with 0 where a row sees a column and -inf elsewhere; None when all see all."""
        key = (window, group, dtype)
        if key not in self._masks:
            self._masks[key] = self._build(*key)
        return self._masks[key]

    # ---- indices

    @cached_property
    def _contexts(self) -> torch.Tensor:
        """[B]: `lengths`."""
        return torch.tensor(self.lengths, device=self._device)

    @cached_property
    def _slot_of(self) -> torch.Tensor:
        """[R], of slots 0.. B - 1."""
        slots = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))
        return slots.to(self._device)

    @cached_property
    def _place(self) -> torch.Tensor:
        """[R]: each row's number in its slot's block."""
        return torch.cat([torch.arange(count) for count in self.counts]).to(self._device)

    @cached_property
    def _row_at(self) -> torch.Tensor:
        """[B, N]: the row at each place of a slot's block, its first one where it has none there."""
        counts = torch.tensor(self.counts)
        places = torch.arange(self.width).expand(len(counts), -1)
        firsts = counts.cumsum(0) - counts
        return (firsts[:, None] + torch.where(places < counts[:, None], places, 0)).to(self._device)

    # ---- masks

    def _build(self, window: int | None, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        allowed = self._allowed(window)
        if bool(allowed.all()):
            return None
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        mask.masked_fill_(~allowed, -torch.inf)
        batch, rows, columns = mask.shape
        return mask[:, None].expand(batch, group, rows, columns).reshape(batch, 1, group * rows, columns)

    def _allowed(self, window: int | None) -> torch.Tensor:
        """[B, N, T] bool."""
        visible = self._visible_apart
        batch, rows, _ = visible.shape
        columns = torch.arange(self.columns, device=self._device)
        in_block = columns[None] - self._contexts[:, None]  # [B, T]; < 0: context
        own = in_block.clamp(0, rows - 1)[:, None].expand(batch, rows, self.columns)
        allowed = torch.where(in_block[:, None] < 0, True, visible.gather(2, own) & (in_block[:, None] < rows))
        if window is None:
            return allowed
        # By position id, never by column: a node's column in the block says nothing of its distance.
        positions = self.positions[0][self._row_at]
        column_positions = torch.where(in_block < 0, columns[None], positions.gather(1, in_block.clamp(0, rows - 1)))
        return allowed & (positions[:, :, None] - column_positions[:, None] < window)

    @cached_property
    def _visible_apart(self) -> torch.Tensor:
        """[B, N, N] bool. What a narrower block is filled up with sees what its first row does."""
        if self._even:
            return torch.stack(list(self._visible)).to(self._device)
        visible = torch.zeros(len(self.counts), self.width, self.width, dtype=torch.bool)
        for slot, (count, own) in enumerate(zip(self.counts, self._visible, strict=True)):
            visible[slot, :, :count] = own[0]
            visible[slot, :count, :count] = own
        return visible.to(self._device)


def in_order(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets [rows] and visibility [rows, rows] of rows of which each stands behind the one before, and sees it."""
    return torch.arange(rows), torch.ones(rows, rows, dtype=torch.bool).tril()


def firsts_of_parts(lengths: Sequence[int], counts: Sequence[int], start: float) -> list[int]:
    """The first slot of each part of those that together take the least time, parts of at most MOST_SLOTS. start: what
    a part more takes."""
    ends = [length + count for length, count in zip(lengths, counts, strict=True)]
    alone = sum(end * (count + READING) for end, count in zip(ends, counts, strict=True))
    together = len(counts) * max(ends) * (max(counts) + READING)
    if together - alone < start:
        return [0]  # no part more can pay
    least = [0.0]  # of the slots before each
    begins = [0]  # where the last part of these begins
    for end in range(1, len(counts) + 1):
        width = columns = 0
        cheapest = math.inf, 0
        for first in range(end - 1, max(end - MOST_SLOTS, 0) - 1, -1):
            width, columns = max(width, counts[first]), max(columns, ends[first])
            cost = least[first] + start + (end - first) * columns * (width + READING)
            if cost < cheapest[0]:
                cheapest = cost, first
        least.append(cheapest[0])
        begins.append(cheapest[1])
    if least[-1] >= start + together:
        return [0]
    firsts = [begins[-1]]
    while firsts[-1]:
        firsts.append(begins[firsts[-1]])
    return firsts[::-1]
