"""Slot cache: preallocated keys and values, a contiguous context per slot, compaction after each step.

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
    """KV of all layers: keys and values [layers, S, G, T, D] each.

    by_dimension: keys of one dimension lie side by side in memory, not those of one column.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        by_dimension: bool = False,
    ) -> None:
        self._by_dimension = by_dimension
        self._fixed = layers, kv_heads, head_dim
        self._kind = dtype, device
        self._keys, self._values = self._zeros(slots, 0)
        self._block: Block | None = None
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []  # by layer, keys and values
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _zeros(self, slots: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        layers, heads, size = self._fixed
        dtype, device = self._kind
        values = torch.zeros(layers, slots, heads, columns, size, dtype=dtype, device=device)
        if not self._by_dimension:
            return torch.zeros_like(values), values
        return torch.zeros(layers, slots, heads, size, columns, dtype=dtype, device=device).transpose(3, 4), values

    @property
    def slots(self) -> int:
        return self._values.shape[1]

    @property
    def columns(self) -> int:
        return self._values.shape[3]

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    @property
    def column_bytes(self) -> int:
        """Bytes of one column of one slot: the KV of one token."""
        layers, heads, size = self._fixed
        return 2 * layers * heads * size * self._values.itemsize

    def resize(self, slots: int, columns: int) -> None:
        """Another number of slots and columns; what both hold stays.

        New columns are zero: masked columns are still multiplied (by 0), so they must be finite.
        """
        self._read, self._written = [], []  # views, which would keep the memory
        new = self._zeros(slots, columns)
        slots, columns = min(slots, self.slots), min(columns, self.columns)
        for kept, held in zip(new, (self._keys, self._values), strict=True):
            kept[:, :slots, :, :columns] = held[:, :slots, :, :columns]
        self._keys, self._values = new

    def begin(self, block: Block) -> None:
        """The next forward pass writes the block's rows and reads its columns."""
        if block.columns > self.columns:
            self.resize(self.slots, rounded(block.columns))
        self._block = block
        slots, columns = block.where
        read, written = [], []
        for held in (self._keys, self._values):
            read.append(held[:, block.slots, :, : block.columns].unbind())
            written.append(
                (held[:, slots, :, columns] if isinstance(columns, slice) else held.transpose(2, 3)).unbind()
            )
        self._read, self._written = list(zip(*read, strict=True)), list(zip(*written, strict=True))

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hugging Face's cache call: store key, value [1, G, R, D], return views [B, G, T, D] of the slots' columns."""
        assert self._block is not None, "begin() comes before a forward pass"
        block = self._block
        slots, columns = block.where
        for held, rows in zip(self._written[layer], (key, value), strict=True):
            if isinstance(columns, slice):
                held.copy_(block.apart(rows))
            else:
                held[slots, columns] = rows[0].transpose(0, 1)
        return self._read[layer]

    def compact(self, slots: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy column sources[i] of slots[i] to column targets[i], in all layers; reads all before it writes."""
        if not slots:
            return
        slot, source, target = (torch.tensor(x, device=self._values.device) for x in (slots, sources, targets))
        for held in (self._keys, self._values):
            held[:, slot, :, target] = held[:, slot, :, source]

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `source`'s first `length` columns to slot `target`."""
        for held in (self._keys, self._values):
            held[:, target, :, :length] = held[:, source, :, :length]
