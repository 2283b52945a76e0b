"""Slot cache: one preallocated KV tensor, a contiguous context per slot, compaction after each step.

S slots, T columns, G key/value heads, D head size, B slots and R rows of a block (block.py). Slot s holds its context
in columns [0, L_s); a step writes its rows behind it and `compact` moves the accepted ones to where the context
continues. Nothing is concatenated, and a step copies only rows that an accepted path left out of order. Running
sequences occupy slots 0..B-1 (`copy` closes a gap), so the model reads a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esp_worker.block import Block

COLUMN_STEP = 256


def rounded(columns: int) -> int:
    """Columns come in steps, so that a growing context does not move the cache at each token."""
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


class SlotCache:
    """KV of all layers: [layers, 2, S, G, T, D]."""

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kv = torch.zeros(layers, 2, slots, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._block: Block | None = None

    @property
    def slots(self) -> int:
        return self._kv.shape[2]

    @property
    def columns(self) -> int:
        return self._kv.shape[4]

    @property
    def nbytes(self) -> int:
        return self._kv.nbytes

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of one slot: the KV of one token."""
        layers, pair, _, heads, _, size = self._kv.shape
        return layers * pair * heads * size * self._kv.itemsize

    def resize(self, slots: int, columns: int) -> None:
        """Another number of slots and columns; what both hold stays.

        New columns are zero: masked columns are still multiplied (by 0), so they must be finite.
        """
        layers, pair, _, heads, _, size = self._kv.shape
        kv = self._kv.new_zeros(layers, pair, slots, heads, columns, size)
        slots, columns = min(slots, self.slots), min(columns, self.columns)
        kv[:, :, :slots, :, :columns] = self._kv[:, :, :slots, :, :columns]
        self._kv = kv

    def begin(self, block: Block) -> None:
        """The next forward pass writes the block's rows and reads its columns."""
        if block.columns > self.columns:
            self.resize(self.slots, rounded(block.columns))
        self._block = block

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hugging Face's cache call: store key, value [1, G, R, D], return views [B, G, T, D] of the slots' columns."""
        assert self._block is not None, "begin() comes before a forward pass"
        block, (keys, values) = self._block, self._kv[layer]
        slots, columns = block.where
        for held, rows in ((keys, key), (values, value)):
            if isinstance(columns, slice):
                held[slots, :, columns] = block.apart(rows)
            else:
                held.transpose(1, 2)[slots, columns] = rows[0].transpose(0, 1)
        return keys[block.slots, :, : block.columns], values[block.slots, :, : block.columns]

    def compact(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy column sources[i] of slots[i] to column targets[i], in all layers; reads all before it writes."""
        if not slots:
            return
        device = self._kv.device
        slot, source, target = (torch.tensor(x, device=device) for x in (slots, sources, targets))
        self._kv[:, :, slot, :, target] = self._kv[:, :, slot, :, source]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `source`'s first `length` columns to slot `target`."""
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]
