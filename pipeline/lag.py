"""How far writing may lag behind decoding: what is decoded and in no shard is decoded again after a kill of the driver.

Ray lets decoded blocks wait for a writer without end. Decoders ask before they take a batch, writers tell what a shard
holds, and while too many rows are between the two, decoders wait. Not for ever: a shard may itself wait for rows that
went with a node, and Ray decides in what order it makes these again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

PATIENCE_S = 60.0  # of decoders, while no shard is written
REMEMBERED = 4  # times as many rows as may be unwritten: those written lately

RowKey = tuple[int, int]  # row_key, sample_index


class Lag:
    """most: rows that may be taken and in no shard (None: nobody tells what is written). A batch is taken whole, so one
    more may be."""

    def __init__(self, most: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._rows: set[RowKey] = set()
        self._written: dict[RowKey, None] = {}  # lately, the oldest first
        self._waited_since: float | None = None

    def take(self, rows: Iterable[RowKey]) -> bool:
        """Whether these rows may be decoded now. Those that Ray brings again always may, and count once: they are taken
        already, or were written lately and will not be again."""
        if self._most is None:
            return True
        new = [row for row in rows if row not in self._rows and row not in self._written]
        if new and len(self._rows) >= self._most and not self._has_waited():
            return False
        self._rows.update(new)
        return True

    def written(self, rows: Iterable[RowKey]) -> None:
        for row in rows:
            self._rows.discard(row)
            self._written[row] = None
        while len(self._written) > REMEMBERED * (self._most or 0):
            del self._written[next(iter(self._written))]
        self._waited_since = None

    def _has_waited(self) -> bool:
        now = self._clock()
        self._waited_since = now if self._waited_since is None else self._waited_since
        return now - self._waited_since > PATIENCE_S
