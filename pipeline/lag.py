"""How far writing may lag behind decoding: what is decoded and in no shard is decoded again after a kill of the driver.

Ray lets decoded blocks wait for a writer without end. Decoders ask before they take a batch, writers tell what a shard
holds, and while too many rows are between the two, decoders wait.
"""

from __future__ import annotations

from collections.abc import Collection

RowKey = tuple[int, int]  # row_key, sample_index


class Lag:
    """most: rows that may be taken and in no shard (None: nobody tells what is written). A batch is taken whole, so one
    more may be."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._rows: set[RowKey] = set()

    def take(self, rows: Collection[RowKey]) -> bool:
        """Whether these rows may be decoded now; those that Ray brings again always."""
        if self._most is None:
            return True
        if len(self._rows) >= self._most and not self._rows.issuperset(rows):
            return False
        self._rows.update(rows)
        return True

    def written(self, rows: Collection[RowKey]) -> None:
        self._rows.difference_update(rows)
