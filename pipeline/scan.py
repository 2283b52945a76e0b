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
import xxhash

from pipeline.config import InputConfig
from pipeline.errors import ConfigError
from pipeline.parse import ParsedRow, RowParser, attempt, sample_key
from pipeline.source import Position, SourceFile, count_rows, raw_rows, read_rows


@dataclass(frozen=True)
class FileScan:
    """What one file holds. `ids`: 128-bit id hashes, uint64 [rows, 2], 0 where a row has no id (empty without
    id_column); `row_index`: int64 [rows], likewise."""

    rows: int
    ids: np.ndarray
    row_index: np.ndarray


@dataclass(frozen=True)
class Scan:
    """The whole input. `rows`: what read_rows yields for each of `files`; `duplicates`: later use of an id -> first.

    `rows` is exact, save for a Parquet file whose footer is sound and whose data is corrupt: the footer's count is
    taken, while reading ends early, in one error row.
    """

    files: list[SourceFile]
    rows: list[int]
    duplicates: dict[Position, Position]

    @property
    def total(self) -> int:
        return sum(self.rows)


def scan(files: Sequence[SourceFile], config: InputConfig) -> Scan:
    """Count rows and find duplicate ids, file by file, until input.limit is reached. Raises as scan_file."""
    scans: list[FileScan] = []
    total = 0
    for file in files:
        scans.append(scan_file(file, config))
        total += scans[-1].rows
        if config.limit and total >= config.limit:
            break
    return merge_scans(files[: len(scans)], scans, config)


@dataclass
class Found:
    """What reading came upon. asked: output rows that the input asks for; owed: those that were not done."""

    asked: int = 0
    owed: int = 0


def owed_rows(
    file: SourceFile,
    config: InputConfig,
    duplicates: Mapping[Position, Position],
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
    file: SourceFile, config: InputConfig, duplicates: Mapping[Position, Position], done: np.ndarray, n: int
) -> int:
    """How many samples owed_rows gives; parses the whole file. Fit for a remote task."""
    return sum(len(row.samples) for row in owed_rows(file, config, duplicates, done, n))


def scan_file(file: SourceFile, config: InputConfig) -> FileScan:
    """Count one file's rows (up to input.limit); with id_column read every id. Fit for a remote task.

    Raises ConfigError for a file that cannot be opened or whose store fails; corrupt content is rows' business.
    """
    try:
        return _scan_ids(file, config) if config.id_column else _scan_count(file, config)
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {file.uri}: {error}") from error


def merge_scans(files: Sequence[SourceFile], scans: Sequence[FileScan], config: InputConfig) -> Scan:
    """Join per-file scans in file order: apply input.limit, and let the first use of an id win."""
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
    return Scan(taken, rows, _duplicates(taken, rows, scans))


def _scan_count(file: SourceFile, config: InputConfig) -> FileScan:
    return FileScan(count_rows(file, config.limit), np.empty((0, 2), np.uint64), np.empty(0, np.int64))


def _scan_ids(file: SourceFile, config: InputConfig) -> FileScan:
    assert config.id_column
    parser = RowParser(config)
    hashes, indices = array("Q"), array("q")
    for raw in itertools.islice(raw_rows(file, [config.id_column]), config.limit):
        problems = [raw.error] if raw.error else []
        row_id = None if problems else attempt(problems, parser.read_id, raw)
        digest = 0 if row_id is None else xxhash.xxh3_128_intdigest(row_id.encode())
        hashes.extend((digest >> 64, digest & (2**64 - 1)))
        indices.append(raw.index)
    return FileScan(len(indices), np.array(hashes, np.uint64).reshape(-1, 2), np.array(indices, np.int64))


def _duplicates(
    files: Sequence[SourceFile], rows: Sequence[int], scans: Sequence[FileScan]
) -> dict[Position, Position]:
    """Sorts 128-bit hashes: at a billion ids the odds that two differing ids meet are 1.5e-21."""
    if not files:
        return {}
    counted = list(zip(scans, rows, strict=False))
    ids = np.concatenate([scan.ids[:count] for scan, count in counted])
    row_indices = np.concatenate([scan.row_index[:count] for scan, count in counted])
    file_numbers = np.repeat(np.arange(len(files), dtype=np.int32), [len(scan.ids[:count]) for scan, count in counted])

    # Rows with an id, equal ids together and, lexsort being stable, in (file, line) order among themselves.
    order = np.flatnonzero(ids.any(axis=1))
    order = order[np.lexsort((ids[order, 1], ids[order, 0]))]
    is_repeat = np.zeros(len(order), bool)
    is_repeat[1:] = (ids[order[1:]] == ids[order[:-1]]).all(axis=1)
    first_of = np.maximum.accumulate(np.where(is_repeat, 0, np.arange(len(order))))

    def position(row: int) -> Position:
        return files[file_numbers[row]].name, int(row_indices[row])

    return {position(order[at]): position(order[first_of[at]]) for at in np.flatnonzero(is_repeat)}
