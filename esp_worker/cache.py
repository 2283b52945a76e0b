"""Slot cache: one preallocated KV tensor, a contiguous context per slot, compaction after each step.

S slots, T columns, G key/value heads, D head size. Slot s holds its context in columns [0, L_s); a step writes its N
block rows behind it and `compact` moves the accepted ones to where the context continues. Nothing is concatenated, and
a step copies only rows that an accepted path left out of order. Running sequences occupy slots 0..B-1 (`copy` closes a
gap), so the model reads a slice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

COLUMN_STEP = 256

_Where = tuple[slice, slice] | tuple[torch.Tensor, torch.Tensor]  # index of slots and columns: [B, N] of them


def rounded(columns: int) -> int:
    """Columns come in steps, so that a growing context does not move the cache at each token."""
    return -(-columns // COLUMN_STEP) * COLUMN_STEP


class SlotCache:
    """KV of all layers: [layers, 2, S, G, T, D]."""

    def __init__(
        self, *, layers: int, slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kv = torch.zeros(layers, 2, slots, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._write: tuple[_Where, slice, int] | None = None

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

    def begin(self, first_slot: int, lengths: torch.Tensor, rows: int, columns: int) -> None:
        """The next forward writes `rows` rows of slots first_slot.. behind their `lengths` [B] and reads `columns`, as
        many as the longest then has."""
        if columns > self.columns:
            self.resize(self.slots, rounded(columns))
        span = slice(first_slot, first_slot + len(lengths))
        where: _Where = (span, slice(columns - rows, columns))
        if int(lengths.min()) + rows < columns:  # contexts of several lengths
            device = self._kv.device
            slots = torch.arange(span.start, span.stop, device=device)
            where = (slots[:, None], lengths[:, None] + torch.arange(rows, device=device))
        self._write = (where, span, columns)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hugging Face's cache call: store key, value [B, G, N, D], return views [B, G, T, D] of the slots' columns."""
        assert self._write is not None, "begin() comes before a forward pass"
        where, span, columns = self._write
        keys, values = self._kv[layer]
        keys.transpose(1, 2)[where] = key.transpose(1, 2)
        values.transpose(1, 2)[where] = value.transpose(1, 2)
        return keys[span, :, :columns], values[span, :, :columns]

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
