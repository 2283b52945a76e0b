"""What the input holds, known before the job starts: rows per file, input.limit applied, and duplicate ids.

`scan_file` looks at one file and may run anywhere; `merge_scans` joins the results in file order. `source.read_rows`
then yields exactly the rows counted here.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.config import IdsConfig, InputConfig
from pipeline.errors import ConfigError
from pipeline.parse import ParsedRow, RowParser, attempt, sample_key
from pipeline.source import Position, Repeat, SourceFile, count_rows, raw_rows, read_rows


@dataclass(frozen=True)
class FileScan:
    """What one file holds. `ids`: 128-bit id hashes, uint64 [rows, 2], 0 where a row has no id (empty without
    id_column); `row_index`: int64 [rows], likewise; `texts`: the ids themselves, where ids.on_duplicate is suffix."""

    rows: int
    ids: np.ndarray
    row_index: np.ndarray
    texts: pa.Array | None = None


@dataclass(frozen=True)
class Scan:
    """The whole input. `rows`: what read_rows yields for each of `files`; `duplicates`: later use of an id -> its first
    use, or the later row's own new id where ids.on_duplicate is suffix."""

    files: list[SourceFile]
    rows: list[int]
    duplicates: dict[Position, Repeat]

    @property
    def total(self) -> int:
        return sum(self.rows)


def scan(files: Sequence[SourceFile], config: InputConfig, ids: IdsConfig | None = None) -> Scan:
    """Count rows and find duplicate ids, file by file, until input.limit is reached. Raises as scan_file."""
    scans: list[FileScan] = []
    total = 0
    for file in files:
        scans.append(scan_file(file, config, ids))
        total += scans[-1].rows
        if config.limit and total >= config.limit:
            break
    return merge_scans(files[: len(scans)], scans, config, ids)


@dataclass
class Found:
    """What reading came upon. asked: output rows that the input asks for; owed: those that were not done."""

    asked: int = 0
    owed: int = 0


def owed_rows(
    file: SourceFile,
    config: InputConfig,
    duplicates: Mapping[Position, Repeat],
    done: np.ndarray,
    n: int,
    found: Found | None = None,
) -> Iterator[ParsedRow]:
    """The file's rows with those of their samples 0..n-1 whose keys are not in `done` (sorted uint64), if any.

    Counts what it reads in `found`.
    """
    found = found or Found()
    every = tuple(range(n))
    for row in read_rows(file, config, duplicates):
        samples = tuple(i for i in every if not _holds(done, sample_key(row.row_key, i))) if len(done) else every
        found.asked += n
        found.owed += len(samples)
        if samples:
            yield replace(row, samples=samples)


def _holds(done: np.ndarray, key: int) -> bool:
    at = np.searchsorted(done, np.uint64(key))
    return bool(at < len(done) and done[at] == np.uint64(key))


def count_owed(
    file: SourceFile, config: InputConfig, duplicates: Mapping[Position, Repeat], done: np.ndarray, n: int
) -> int:
    """How many samples owed_rows gives; parses the whole file. Fit for a remote task."""
    return sum(len(row.samples) for row in owed_rows(file, config, duplicates, done, n))


def scan_file(file: SourceFile, config: InputConfig, ids: IdsConfig | None = None) -> FileScan:
    """Count one file's rows (up to input.limit); with id_column read every id. Fit for a remote task.

    Raises ConfigError for a file that cannot be opened or whose store fails; corrupt content is rows' business.
    """
    try:
        return _scan_ids(file, config, _suffixes(ids)) if config.id_column else _scan_count(file, config)
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {file.uri}: {error}") from error


def merge_scans(
    files: Sequence[SourceFile], scans: Sequence[FileScan], config: InputConfig, ids: IdsConfig | None = None
) -> Scan:
    """Join per-file scans in file order: apply input.limit, and let the first use of an id keep it."""
    left = config.limit
    taken: list[SourceFile] = []
    rows: list[int] = []
    for file, file_scan in zip(files, scans, strict=True):
        if left == 0:
            break
        count = file_scan.rows if left is None else min(left, file_scan.rows)
        taken.append(file if left is None else replace(file, take=count))
        rows.append(count)
        left = None if left is None else left - count
    known = _Ids(taken, rows, scans)
    return Scan(taken, rows, known.new_ids() if _suffixes(ids) else known.first_uses())


def _suffixes(ids: IdsConfig | None) -> bool:
    return ids is not None and ids.on_duplicate == "suffix"


def _scan_count(file: SourceFile, config: InputConfig) -> FileScan:
    rows = count_rows(file, RowParser(config).columns, config.limit)
    return FileScan(rows, np.empty((0, 2), np.uint64), np.empty(0, np.int64))


def _scan_ids(file: SourceFile, config: InputConfig, with_texts: bool) -> FileScan:
    assert config.id_column
    parser = RowParser(config)
    hashes, indices, texts = array("Q"), array("q"), []
    # All columns that the job reads: a Parquet page that is broken in any of them costs the same rows here as there.
    for raw in itertools.islice(raw_rows(file, parser.columns), config.limit):
        problems = [raw.error] if raw.error else []
        row_id = None if problems else attempt(problems, parser.read_id, raw)
        digest = 0 if row_id is None else _digest(row_id)
        hashes.extend((digest >> 64, digest & (2**64 - 1)))
        indices.append(raw.index)
        if with_texts:
            texts.append(row_id)
    return FileScan(
        len(indices),
        np.array(hashes, np.uint64).reshape(-1, 2),
        np.array(indices, np.int64),
        pa.array(texts, pa.large_string()) if with_texts else None,
    )


def _digest(row_id: str) -> int:
    return int(xxhash.xxh3_128_intdigest(row_id.encode()))


class _Ids:
    """All ids of the input, equal ones together: sorted 128-bit hashes. At a billion ids the odds that two differing
    ids meet are 1.5e-21."""

    def __init__(self, files: Sequence[SourceFile], rows: Sequence[int], scans: Sequence[FileScan]) -> None:
        counted = list(zip(scans, rows, strict=False))
        self._files = files
        self._texts = [scan.texts for scan, _ in counted]
        lengths = [len(scan.ids[:count]) for scan, count in counted]
        ids = np.concatenate([np.empty((0, 2), np.uint64), *(scan.ids[:count] for scan, count in counted)])
        self._row_indices = np.concatenate([np.empty(0, np.int64), *(scan.row_index[:n] for scan, n in counted)])
        self._file_numbers = np.repeat(np.arange(len(counted), dtype=np.int32), lengths)
        self._starts = np.cumsum([0, *lengths])

        # Rows with an id, equal ids together and, lexsort being stable, in (file, line) order among themselves.
        order = np.flatnonzero(ids.any(axis=1))
        self._order = order = order[np.lexsort((ids[order, 1], ids[order, 0]))]
        self._sorted = ids[order]
        is_repeat = np.zeros(len(order), bool)
        is_repeat[1:] = (self._sorted[1:] == self._sorted[:-1]).all(axis=1)
        self._repeats = np.flatnonzero(is_repeat)
        self._first_of = np.maximum.accumulate(np.where(is_repeat, 0, np.arange(len(order))))

    def first_uses(self) -> dict[Position, Repeat]:
        """Each later use of an id, and the first one."""
        order = self._order
        return {self._position(order[at]): self._position(order[self._first_of[at]]) for at in self._repeats}

    def new_ids(self) -> dict[Position, Repeat]:
        """Each later use of an id, and the id it gets: in input order, the first of -2, -3, ... that nobody has."""
        next_number: dict[int, int] = {}  # by the first use
        given: set[int] = set()
        named: dict[Position, Repeat] = {}
        for row, first in sorted((int(self._order[at]), int(self._first_of[at])) for at in self._repeats):
            number = next_number.get(first, 2)
            while self._has(digest := _digest(new_id := f"{self._text(row)}-{number}")) or digest in given:
                number += 1
            next_number[first] = number + 1
            given.add(digest)
            named[self._position(row)] = new_id
        return named

    def _position(self, row: int) -> Position:
        return self._files[self._file_numbers[row]].name, int(self._row_indices[row])

    def _text(self, row: int) -> str:
        number = self._file_numbers[row]
        texts = self._texts[number]
        assert texts is not None
        return str(texts[row - self._starts[number]])

    def _has(self, digest: int) -> bool:
        high, low = np.uint64(digest >> 64), np.uint64(digest & (2**64 - 1))
        start, stop = (np.searchsorted(self._sorted[:, 0], high, side) for side in ("left", "right"))
        return bool((self._sorted[start:stop, 1] == low).any())
