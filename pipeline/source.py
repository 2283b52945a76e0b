"""Prompt files to rows: list the input, read each JSONL or Parquet file row by row in bounded memory.

A broken line is one error row, and a file that is corrupt from some point on ends in one there, so the rest goes on.
What a row means is `parse`'s business; counting rows and finding duplicate ids before the job starts is `scan`'s.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowError, RowErrorType
from pipeline.parse import ParsedRow, RawRow, RowParser, row_key, too_deep, type_name, where_in_file
from pipeline.storage import Place, StorageError, expand_with_root, open_place

logger = logging.getLogger(__name__)

Format = Literal["jsonl", "parquet"]
Position = tuple[str, int]  # (SourceFile.name, row_index)

CHUNK_BYTES = 1 << 18
BATCH_ROWS = 256  # Parquet rows held as Python values at a time
SHOWN_CHARS = 60  # of a broken line, in its error

_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CORRUPT = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


@dataclass(frozen=True)
class SourceFile:
    """One input file. `name` is its identity, which no other file has and which no other file changes.

    With one entry in input.path it is the path relative to that entry: to the folder, to the glob's fixed prefix, or
    the single file's base name. With several entries it is the absolute path, or bucket/key.
    """

    uri: str
    name: str
    format: Format
    size: int  # bytes
    take: int | None = None  # leading rows to read; None: all


# ---------------------------------------------------------------------------------------------------------- listing


def list_source(config: InputConfig, exclude: str | None = None) -> list[SourceFile]:
    """The input's files: entries of input.path in order, each one's files sorted; a file named twice is read once.

    `exclude`: the output place; what is there or below is no input, so a job may write to a subfolder of its input.

    Raises ConfigError: a path matches nothing, cannot be read, or holds a file of unknown format.
    """
    excluded = open_place(exclude).uri if exclude else None
    found: dict[str, SourceFile] = {}  # by URI
    for path in config.path:
        root, places = _expand(path)
        if not places:
            raise ConfigError(f"input.path: nothing matches {path}")
        wanted = [place for place in places if excluded is None or not _is_within(place, excluded)]
        if not wanted:
            raise ConfigError(f"input.path: nothing matches {path} outside the job's own output at {exclude}")
        for place in wanted:
            if place.uri in found:
                logger.warning("input.path: %s is listed twice; it is read once", place.uri)
                continue
            name = place.path if len(config.path) > 1 else place.path.removeprefix(root.path).lstrip("/")
            found[place.uri] = _source_file(place, name, config)
    for file in found.values():
        if file.size == 0:
            logger.warning("input.path: %s is empty and gives no rows", file.uri)
    return list(found.values())


def canonical_paths(config: InputConfig) -> list[str]:
    """input.path's entries as absolute URIs, the same from every working directory and in every spelling; globs stay.

    Raises ConfigError for what is neither a local path nor s3://bucket/key.
    """
    return [open_place(path).uri for path in config.path]


def _expand(path: str) -> tuple[Place, list[Place]]:
    try:
        return expand_with_root(path)
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {path}: {error}") from error


def _is_within(place: Place, uri: str) -> bool:
    return place.uri == uri or place.uri.startswith(uri.rstrip("/") + "/")


def _source_file(place: Place, name: str, config: InputConfig) -> SourceFile:
    assert place.size is not None  # listings tell it
    return SourceFile(place.uri, name, _format(name, config), place.size)


def _format(name: str, config: InputConfig) -> Format:
    """input.format, or what the suffix says. Raises ConfigError for a suffix that says nothing."""
    if config.format != "auto":
        return config.format
    lower = name.lower()
    if lower.endswith(".parquet"):
        return "parquet"
    if lower.removesuffix(".gz").removesuffix(".zst").endswith(_JSONL_SUFFIXES):
        return "jsonl"
    hint = (
        "convert it to JSONL or Parquet"
        if lower.removesuffix(".gz").endswith((".csv", ".tsv"))
        else "set input.format to jsonl or parquet, or name the right files with a glob such as folder/*.jsonl"
    )
    raise ConfigError(
        f"input.path: {name}: unknown format; expected .jsonl, .ndjson or .json (also .gz, .zst) or .parquet; {hint}"
    )


# ---------------------------------------------------------------------------------------------------------- reading


def read_rows(file: SourceFile, config: InputConfig, duplicates: Mapping[Position, Position]) -> Iterator[ParsedRow]:
    """The file's rows in order, at most `file.take`, in bounded memory. `duplicates` is Scan's.

    Bad rows and a corrupt rest of the file come as error rows. Raises FileNotFoundError, PermissionError or
    StorageError (the store failed: to be tried again, not to be written down as the data's fault).
    """
    parser = RowParser(config)
    unit = _unit(file.format)
    for raw in itertools.islice(raw_rows(file, parser.columns), file.take):
        row = parser.parse(raw, file.name, unit)
        first = duplicates.get((file.name, raw.index))
        yield row if first is None else _duplicate(row, first, config)


def raw_rows(file: SourceFile, columns: Sequence[str]) -> Iterator[RawRow]:
    """The file's rows unparsed: of Parquet `columns` only, of JSONL all. Errors as in `read_rows`."""
    return _jsonl_rows(file) if file.format == "jsonl" else _parquet_rows(file, columns)


def count_rows(file: SourceFile, limit: int | None) -> int:
    """How many rows `raw_rows` yields, `limit` at most; a Parquet file's footer tells."""
    if file.format == "jsonl":
        return sum(1 for _ in itertools.islice(_numbered_lines(file), limit))
    rows = _parquet_count(file)
    return rows if limit is None else min(rows, limit)


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


def _unit(format: Format) -> Literal["line", "row"]:
    return "line" if format == "jsonl" else "row"


def _duplicate(row: ParsedRow, first: Position, config: InputConfig) -> ParsedRow:
    """Its key holds the row's index: name, id and content may all equal the first one's, and keys must differ."""
    name, index = first
    where = where_in_file(name, index, _unit(_format(name, config)))
    error = RowError(RowErrorType.DUPLICATE_ID, f"id {row.row_id[:80]!r} was already used at {where}")
    key = row_key(row.source_file, row.row_id, f"duplicate:{row.row_index}".encode())
    return replace(row.failed(error), row_key=key)


def _jsonl_rows(file: SourceFile) -> Iterator[RawRow]:
    for index, line in _numbered_lines(file):
        if isinstance(line, RowError):
            yield RawRow(index, {}, line)
            continue
        try:
            yield RawRow(index, _decode_line(line), line=line)
        except RowError as error:
            yield RawRow(index, {}, error, line)


def _decode_line(line: bytes) -> dict[str, Any]:
    if line.lstrip().startswith(b"["):
        hint = "a JSON array; expected one JSON object a line (jq -c '.[]' FILE makes such lines)"
        raise RowError(RowErrorType.MALFORMED, hint)
    try:
        text = line.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        reason = f"not valid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}; save the file as UTF-8"
        raise RowError(RowErrorType.MALFORMED, reason) from error
    except json.JSONDecodeError as error:
        start = max(0, error.pos - SHOWN_CHARS // 2)
        shown = f"{text[start : start + SHOWN_CHARS]!r:.120}"
        reason = f"not valid JSON: {error.msg} at column {error.pos + 1}, near {shown}; expected one JSON object a line"
        raise RowError(RowErrorType.MALFORMED, reason) from error
    except ValueError as error:  # NaN and the like, or an integer past Python's limit of digits
        raise RowError(RowErrorType.MALFORMED, f"not valid JSON: {str(error)[:100]}") from error
    except RecursionError as error:
        raise too_deep() from error
    if not isinstance(value, dict):
        reason = f"expected one JSON object a line, found {type_name(value)}"
        raise RowError(RowErrorType.MALFORMED, reason)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value; write null or a finite number")


def _numbered_lines(file: SourceFile) -> Iterator[tuple[int, bytes | RowError]]:
    """(0-based line number, line) of the lines that are not blank; a RowError ends a file that cannot be read on."""
    index = 0
    with open_place(file.uri).open_input() as stream:
        try:
            for line in _lines(_chunks(stream, file.uri.lower())):
                line = line.removeprefix(codecs.BOM_UTF8) if index == 0 else line
                if line.strip():
                    yield index, line
                index += 1
        except _CORRUPT as error:
            yield index, _corrupt_file(error)


def _corrupt_file(error: Exception) -> RowError:
    reason = f"the file is truncated or corrupt from here on ({str(error)[:100]}); make it again"
    return RowError(RowErrorType.MALFORMED, reason)


def _chunks(stream: BinaryIO, uri: str) -> Iterator[bytes]:
    """The decompressed bytes. Raises one of _CORRUPT where they end too early."""
    if uri.endswith(".zst"):
        return _zstd_chunks(stream)
    if uri.endswith(".gz"):
        unzipped = gzip.GzipFile(fileobj=stream)
        return iter(lambda: unzipped.read1(CHUNK_BYTES), b"")
    return iter(lambda: stream.read(CHUNK_BYTES), b"")


def _zstd_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Frame by frame: zstandard's own stream reader takes a truncated frame for the end of the file."""
    frame = None
    while chunk := stream.read(CHUNK_BYTES):
        while chunk:
            if frame is None or frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(chunk)
            chunk = frame.unused_data if frame.eof else b""
    if frame is not None and not frame.eof:
        raise EOFError("compressed data ended before the end of the frame")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []  # pieces of the unfinished line; joined once, so a long line costs no quadratic copying
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pending.append(first)
        for part in others:
            yield b"".join(pending)
            pending = [part]
    yield b"".join(pending)


def _parquet_rows(file: SourceFile, columns: Sequence[str]) -> Iterator[RawRow]:
    if file.size == 0:
        return
    index = 0
    with open_place(file.uri).open_input() as stream:
        try:
            # pre_buffer would load whole row groups.
            parquet = pq.ParquetFile(stream, pre_buffer=False, buffer_size=CHUNK_BYTES)
            names = parquet.schema_arrow.names
            present = [column for column in columns if column in names]
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=present, use_threads=False):
                for raw in table_rows(batch, columns):
                    yield replace(raw, index=index, columns=names)
                    index += 1
        except StorageError:
            raise
        except (pa.ArrowException, OSError) as error:
            yield RawRow(index, {}, _corrupt_file(error))


def _parquet_count(file: SourceFile) -> int:
    if file.size == 0:
        return 0
    with open_place(file.uri).open_input() as stream:
        try:
            return int(pq.ParquetFile(stream, pre_buffer=False).metadata.num_rows)
        except StorageError:
            raise
        except (pa.ArrowException, OSError):
            return 1  # its error row
