"""Parquet and Arrow files to raw rows in bounded memory.

What cannot be read is one error row that says which rows it stands for: a whole file, the rest of a Parquet row group
(the next group goes on), or an Arrow file from some batch on. Counting decodes the same columns as reading, so both see
the same damage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import RowError, RowErrorType
from pipeline.lines import CHUNK_BYTES, corrupt_file
from pipeline.storage import StorageError, open_place
from pipeline.values import RawRow

BATCH_ROWS = 256  # rows held as Python values at a time
_FILE_MAGIC = b"ARROW1"  # of an Arrow IPC file; a stream has none
# What pyarrow raises over broken bytes: its own errors, OSError (Thrift, decompression), ValueError (names that are no
# UTF-8), MemoryError (a length that is nonsense).
_CORRUPT = (pa.ArrowException, OSError, ValueError, MemoryError)


@dataclass(frozen=True)
class Piece:
    """Consecutive rows from `index` on: a batch (`names`: all columns of the file), or in `error` why they are lost."""

    index: int
    batch: pa.RecordBatch | None = None
    names: Sequence[str] = ()
    error: RowError | None = None

    @property
    def rows(self) -> int:
        """Rows that this piece gives: lost ones are one error row together."""
        return 1 if self.batch is None else int(self.batch.num_rows)


def piece_rows(pieces: Iterable[Piece], columns: Sequence[str]) -> Iterator[RawRow]:
    for piece in pieces:
        if piece.batch is None:
            yield RawRow(piece.index, {}, piece.error)
            continue
        for raw in table_rows(piece.batch, columns):
            yield replace(raw, index=piece.index + raw.index, columns=piece.names)


def count_pieces(pieces: Iterable[Piece], limit: int | None) -> int:
    """How many rows `piece_rows` yields, `limit` at most."""
    counts = itertools.accumulate((piece.rows for piece in pieces), initial=0)
    last = 0
    for last in counts:
        if limit is not None and last >= limit:
            return limit
    return last


def table_rows(table: pa.Table | pa.RecordBatch, columns: Iterable[str]) -> Iterator[RawRow]:
    """Rows of an Arrow table as plain values, `columns` only; absent ones are left out. Indices count from 0."""
    names = table.schema.names
    table = table.select([column for column in columns if column in names])
    try:
        for index, values in enumerate(table.to_pylist()):
            yield RawRow(index, values, columns=names)
    except (ValueError, OverflowError):  # invalid UTF-8, dates that Python lacks: find the rows
        for index in range(table.num_rows):
            yield replace(_raw_row(table, index), columns=names)


def _raw_row(table: pa.Table | pa.RecordBatch, index: int) -> RawRow:
    values, error = {}, None
    for column in table.schema.names:
        try:
            values[column] = table.column(column)[index].as_py()
        except (ValueError, OverflowError) as reason:
            error = RowError(RowErrorType.MALFORMED, f"column {column!r} cannot be read: {str(reason)[:100]}")
    return RawRow(index, values, error)


# ---------------------------------------------------------------------------------------------------------- Parquet


def parquet_pieces(uri: str, columns: Sequence[str]) -> Iterator[Piece]:
    """Raises as Place.open_input and its reads do; broken bytes are pieces."""
    with open_place(uri).open_input() as stream:
        try:
            # pre_buffer would load whole row groups.
            parquet = pq.ParquetFile(stream, pre_buffer=False, buffer_size=CHUNK_BYTES, page_checksum_verification=True)
            names = parquet.schema_arrow.names
            lengths = _group_lengths(parquet.metadata)
        except StorageError:
            raise
        except _CORRUPT as error:
            yield Piece(0, error=corrupt_file(error))
            return
        present = [column for column in columns if column in names]
        start = 0
        for group, length in enumerate(lengths):
            yield from _group_pieces(parquet, group, start, length, names, present)
            start += length


def _group_lengths(metadata: Any) -> list[int]:
    lengths = [int(metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)]
    if min(lengths, default=0) < 0 or sum(lengths) != metadata.num_rows:
        raise ValueError("the footer's row counts contradict each other")
    return lengths


def _group_pieces(
    parquet: pq.ParquetFile, group: int, start: int, length: int, names: Sequence[str], present: Sequence[str]
) -> Iterator[Piece]:
    """The group's batches; what of its `length` rows cannot be read is one piece at their first."""
    index, reason = start, "they are not there"
    try:
        batches = parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=present, use_threads=False)
        for batch in batches:
            yield Piece(index, batch.slice(0, max(0, start + length - index)), names)  # no more than the footer says
            index += batch.num_rows
    except StorageError:
        raise
    except _CORRUPT as error:
        reason = str(error)[:100]
    if index < start + length:
        yield Piece(index, error=_lost(index, start + length, f"row group {group + 1}", reason))


def _lost(first: int, stop: int, where: str, reason: str) -> RowError:
    return RowError(
        RowErrorType.MALFORMED,
        f"rows {first + 1} to {stop} ({where}) cannot be read ({reason}); this error row stands for all of them; "
        "make the file again",
    )


# ------------------------------------------------------------------------------------------------------------ Arrow


def arrow_pieces(uri: str, columns: Sequence[str]) -> Iterator[Piece]:
    """Batches of an Arrow IPC file or stream; the first broken one ends the file. Raises as Place.open_input."""
    index = 0
    with _open_arrow(uri) as stream:
        try:
            for batch in _record_batches(stream):
                names = batch.schema.names
                chosen = batch.select([column for column in columns if column in names])
                chosen.validate(full=True)  # Arrow trusts the offsets that it reads, and wrong ones lead anywhere
                for at in range(0, chosen.num_rows, BATCH_ROWS):
                    yield Piece(index + at, chosen.slice(at, BATCH_ROWS), names)
                index += chosen.num_rows
        except StorageError:
            raise
        except _CORRUPT as error:
            yield Piece(index, error=corrupt_file(error))


def _open_arrow(uri: str) -> AbstractContextManager[Any]:
    """A local file is mapped into memory, so that only the pages of the chosen columns are read."""
    place = open_place(uri)
    return pa.memory_map(place.path) if place.is_local else place.open_input()


def _record_batches(stream: Any) -> Iterator[pa.RecordBatch]:
    is_file = stream.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    stream.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(stream)
        return
    reader = pa.ipc.open_file(stream)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)
