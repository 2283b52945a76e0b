"""Prompt files to parsed rows: list the input, read each JSONL or Parquet file row by row, parse strictly.

Nothing is inferred: a date-like prompt stays a string, an int is never a prompt, and whatever is wrong with one row or
one file becomes an error row that names the file and line, so the rest goes on. `scan` counts rows and finds duplicate
ids before the job starts; `read_rows` then yields exactly those rows in file order.
"""

from __future__ import annotations

import codecs
import collections
import gzip
import itertools
import json
import logging
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import zstandard

from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowError, RowErrorType
from pipeline.storage import Place, StorageError, expand_with_root, open_place

logger = logging.getLogger(__name__)

Format = Literal["jsonl", "parquet"]
Position = tuple[str, int]  # (SourceFile.name, row_index)

CHUNK_BYTES = 1 << 18
BATCH_ROWS = 256  # Parquet rows held as Python values at a time
SHOWN_CHARS = 60  # of a broken line, in its error

_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_CORRUPT = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
_T = TypeVar("_T")


@dataclass(frozen=True)
class SourceFile:
    """One input file. `name` is its identity: the path relative to the input's root, unique within the job."""

    uri: str
    name: str
    format: Format
    size: int  # bytes
    take: int | None = None  # leading rows to read; None: all


@dataclass(frozen=True)
class ParsedRow:
    """One input row. An error row has error and error_type, and whatever identity and kept columns could be read."""

    row_id: str
    row_key: int  # uint64; see row_key()
    source_file: str
    row_index: int  # 0-based; JSONL: line - 1
    where: str  # "<file name>, line N": how error messages name this row
    messages_or_prompt: str | list[dict[str, Any]] | None  # None in an error row
    kept: dict[str, Any]
    error: str | None = None
    error_type: RowErrorType | None = None

    def failed(self, error: RowError) -> ParsedRow:
        """This row as an error row."""
        return replace(self, messages_or_prompt=None, error=f"{self.where}: {error.message}", error_type=error.kind)


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


@dataclass(frozen=True)
class RawRow:
    """A row before parsing: its columns, or why they cannot be read. `line`: a JSONL line's bytes."""

    index: int
    values: Mapping[str, Any]
    error: RowError | None = None
    line: bytes = field(default=b"", repr=False)


# ---------------------------------------------------------------------------------------------------------- listing


def list_source(config: InputConfig) -> list[SourceFile]:
    """The input's files: entries of input.path in order, each one's files sorted; a file named twice is read once.

    Raises ConfigError: a path matches nothing, cannot be read, or holds a file of unknown format.
    """
    found: dict[str, tuple[Place, int]] = {}  # uri -> file, number of trailing URI parts that name it
    for path in config.path:
        root, places = _expand(path)
        if not places:
            raise ConfigError(f"input.path: nothing matches {path}")
        for place in places:
            if place.uri in found:
                logger.warning("input.path: %s is listed twice; it is read once", place.uri)
            found.setdefault(place.uri, (place, len(_parts(place)) - len(_parts(root))))
    files = [_source_file(place, name, config) for place, name in _unique_names(list(found.values()))]
    for file in files:
        if file.size == 0:
            logger.warning("input.path: %s is empty and gives no rows", file.uri)
    return files


def _expand(path: str) -> tuple[Place, list[Place]]:
    try:
        return expand_with_root(path)
    except OSError as error:
        raise ConfigError(f"input.path: cannot read {path}: {error}") from error


def _parts(place: Place) -> list[str]:
    return place.uri.rstrip("/").split("/")


def _unique_names(found: Sequence[tuple[Place, int]]) -> list[tuple[Place, str]]:
    """Names relative to the roots; those that coincide get parent folders in front until they differ."""
    depths = [depth for _, depth in found]
    while True:
        names = ["/".join(_parts(place)[-depth:]) for (place, _), depth in zip(found, depths, strict=True)]
        uses = collections.Counter(names)
        if len(uses) == len(names):
            return [(place, name) for (place, _), name in zip(found, names, strict=True)]
        depths = [depth + (uses[name] > 1) for name, depth in zip(names, depths, strict=True)]


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


# ---------------------------------------------------------------------------------------------------------- parsing


def row_key(name: str, row_id: str, content: bytes) -> int:
    """A row's key for resuming and seeding: xxh3_64 of file name, id and content.

    It does not depend on other rows or files, and changes with the row's own content. Two of n rows share a key with
    probability n^2 / 2^65: 2.7e-8 at a million rows, 2.7e-4 at a hundred million.
    """
    # JSON text holds no raw newline, so the first one separates the parts unambiguously.
    identity = json.dumps([name, row_id], separators=(",", ":")).encode()
    return int(xxhash.xxh3_64_intdigest(identity + b"\n" + content))


class RowParser:
    """Turns one raw mapping into a ParsedRow by the config's rules. Never raises for bad data."""

    def __init__(self, config: InputConfig) -> None:
        self.config = config
        named = [config.text_column, *([config.id_column] if config.id_column else []), *config.keep_columns]
        self.columns = list(dict.fromkeys(named))  # all that is read of a row
        self._content_columns = dict.fromkeys([config.text_column, *config.keep_columns])

    def parse(self, raw: RawRow, name: str = "", unit: Literal["line", "row"] = "row") -> ParsedRow:
        """`name` is the file's; "" for rows that come from no file, whose id without id_column is a content hash."""
        try:
            return self._parse(raw, name, unit)
        except RecursionError:  # Python's JSON reader and writer give up at slightly different depths
            return self._parse(RawRow(raw.index, {}, _too_deep(), raw.line), name, unit)

    def read_id(self, values: Mapping[str, Any]) -> str:
        """The row's id in id_column. Raises RowError."""
        column = self.config.id_column
        assert column
        value = _required(values, column, "input.id_column")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise _wrong_type(column, "a non-empty string or an integer", value)
        return _valid_text(column, value)

    def _parse(self, raw: RawRow, name: str, unit: str) -> ParsedRow:
        problems = [raw.error] if raw.error else []
        content = raw.line if raw.error and raw.line else self._content(raw.values)
        default_id = f"{name}:{raw.index + 1}" if name else xxhash.xxh3_128_hexdigest(content)
        row_id = self.config.id_column and _attempt(problems, self.read_id, raw.values)
        text = _attempt(problems, self._read_text, raw.values)
        kept = {
            column: _attempt(problems, _keep, column, kind, raw.values)
            for column, kind in self.config.keep_columns.items()
        }
        row_id = row_id or default_id
        row = ParsedRow(
            row_id=row_id,
            row_key=row_key(name, row_id, content),
            source_file=name,
            row_index=raw.index,
            where=_where(name, raw.index, unit) if name else f"row {row_id[:80]}",
            messages_or_prompt=text,
            kept=kept,
        )
        return row.failed(problems[0]) if problems else row

    def _content(self, values: Mapping[str, Any]) -> bytes:
        """Canonical JSON of what the output depends on. `repr` serves Parquet's values that JSON lacks."""
        content = {column: values.get(column) for column in self._content_columns}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), default=repr).encode()

    def _read_text(self, values: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        if self.config.messages_column:
            return _read_messages(self.config.messages_column, values)
        return _read_prompt(self.config.text_column, values)


def _attempt(problems: list[RowError], read: Callable[..., _T], *arguments: Any) -> _T | None:
    """What `read` returns; or None, with its RowError noted, so that the row's other columns are still read."""
    try:
        return read(*arguments)
    except RowError as error:
        problems.append(error)
        return None


def _read_prompt(column: str, values: Mapping[str, Any]) -> str:
    value = _required(values, column, "input.prompt_column")
    if not isinstance(value, str):
        hint = "; for chat messages set input.messages_column" if isinstance(value, list) else ""
        raise _wrong_type(column, "a string", value, hint)
    if not value.strip():
        raise RowError(RowErrorType.EMPTY_PROMPT, f"column {column!r} is empty; expected a prompt")
    return _valid_text(column, value)


def _read_messages(column: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    value = _required(values, column, "input.messages_column")
    if not isinstance(value, list):
        raise _wrong_type(column, "a list of messages", value)
    messages = [_read_message(f"{column}[{i}]", message) for i, message in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise RowError(RowErrorType.EMPTY_PROMPT, f"column {column!r} holds no text; expected messages with content")
    return messages


def _read_message(path: str, message: Any) -> dict[str, Any]:
    """Role and content as strings; other keys (name, tool_calls, ...) are the chat template's business.

    Null keys go: Parquet gives every message the keys of all.
    """
    if not isinstance(message, dict):
        raise _wrong_type(path, "an object with role and content", message)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise _wrong_type(f"{path}.role", "a string", role)
    if isinstance(content, list):
        content = "".join(_read_part(f"{path}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise _wrong_type(f"{path}.content", "a string or a list of text parts", content)
    rest = {key: value for key, value in message.items() if value is not None}
    _valid_text(path, json.dumps(rest, ensure_ascii=False, default=repr))
    return {**rest, "role": role, "content": content}


def _read_part(path: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        shown = f"a part of type {part.get('type')!r:.40}" if isinstance(part, dict) else _type_name(part)
        raise RowError(
            RowErrorType.WRONG_TYPE,
            f'column {path!r} must be a text part {{"type": "text", "text": "..."}}, found {shown}',
        )
    return str(part["text"])


def _keep(column: str, kind: str, values: Mapping[str, Any]) -> str | int | float | bool | None:
    value = values.get(column)
    if value is None:
        return None
    if kind == "string":
        return _valid_text(column, value if isinstance(value, str) else _json_text(column, value))
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int64" and number and isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if kind == "float64" and number:
        try:
            return float(value)
        except OverflowError:
            pass
    raise _wrong_type(column, kind, value, f"; change its type in input.keep_columns ({column}: string takes any)")


def _json_text(column: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _wrong_type(column, "a string or a JSON value", value) from error


def _required(values: Mapping[str, Any], column: str, setting: str) -> Any:
    value = values.get(column)
    if value is None:
        state = "null" if column in values else "missing"
        raise RowError(RowErrorType.MISSING_FIELD, f"column {column!r} is {state}; {setting} names the column to read")
    return value


def _valid_text(column: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            RowErrorType.INVALID_TEXT,
            f"column {column!r} holds a lone surrogate ({text[error.start]!a}), which is no character; "
            "write the text as valid UTF-8",
        ) from error
    return text


def _wrong_type(column: str, expected: str, value: Any, hint: str = "") -> RowError:
    shown = f" {value!r:.40}" if isinstance(value, (bool, int, float)) else ""
    if value == "":
        shown = " ''"
    return RowError(
        RowErrorType.WRONG_TYPE, f"column {column!r} must be {expected}, found {_type_name(value)}{shown}{hint}"
    )


def _type_name(value: Any) -> str:
    return "null" if value is None else _JSON_TYPES.get(type(value), type(value).__name__)


def _too_deep() -> RowError:
    return RowError(RowErrorType.MALFORMED, "the JSON is nested too deeply")


def _where(name: str, row_index: int, unit: str) -> str:
    return f"{name}, {unit} {row_index + 1}"


# ---------------------------------------------------------------------------------------------------------- reading


def read_rows(file: SourceFile, config: InputConfig, duplicates: Mapping[Position, Position]) -> Iterator[ParsedRow]:
    """The file's rows in order, at most `file.take`, in bounded memory. `duplicates` is Scan's.

    Bad rows and a corrupt rest of the file come as error rows. Raises FileNotFoundError, PermissionError or
    StorageError (the store failed: to be tried again, not to be written down as the data's fault).
    """
    parser = RowParser(config)
    unit = _unit(file.format)
    for raw in itertools.islice(_raw_rows(file, parser.columns), file.take):
        row = parser.parse(raw, file.name, unit)
        first = duplicates.get((file.name, raw.index))
        yield row if first is None else _duplicate(row, first, config)


def table_rows(table: pa.Table | pa.RecordBatch, columns: Iterable[str]) -> Iterator[RawRow]:
    """Rows of an Arrow table as plain values, `columns` only; absent ones are left out. Indices count from 0."""
    table = table.select([column for column in columns if column in table.schema.names])
    try:
        for index, values in enumerate(table.to_pylist()):
            yield RawRow(index, values)
    except (ValueError, OverflowError):  # invalid UTF-8, dates that Python lacks: find the rows
        for index in range(table.num_rows):
            yield _raw_row(table, index)


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
    where = _where(name, index, _unit(_format(name, config)))
    error = RowError(RowErrorType.DUPLICATE_ID, f"id {row.row_id[:80]!r} was already used at {where}")
    key = row_key(row.source_file, row.row_id, f"duplicate:{row.row_index}".encode())
    return replace(row.failed(error), row_key=key)


def _raw_rows(file: SourceFile, columns: Sequence[str]) -> Iterator[RawRow]:
    return _jsonl_rows(file) if file.format == "jsonl" else _parquet_rows(file, columns)


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
        raise _too_deep() from error
    if not isinstance(value, dict):
        reason = f"expected one JSON object a line, found {_type_name(value)}"
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
            for batch in _parquet_batches(stream, columns):
                for raw in table_rows(batch, columns):
                    yield replace(raw, index=index)
                    index += 1
        except StorageError:
            raise
        except (pa.ArrowException, OSError) as error:
            yield RawRow(index, {}, _corrupt_file(error))


def _parquet_batches(stream: BinaryIO, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    # pre_buffer would load whole row groups.
    parquet = pq.ParquetFile(stream, pre_buffer=False, buffer_size=CHUNK_BYTES)
    present = [column for column in columns if column in parquet.schema_arrow.names]
    return parquet.iter_batches(batch_size=BATCH_ROWS, columns=present, use_threads=False)


# --------------------------------------------------------------------------------------------------------- scanning


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
    count = _parquet_count(file) if file.format == "parquet" else _count(_numbered_lines(file), config.limit)
    rows = count if config.limit is None else min(count, config.limit)
    return FileScan(rows, np.empty((0, 2), np.uint64), np.empty(0, np.int64))


def _count(items: Iterable[object], limit: int | None) -> int:
    return sum(1 for _ in itertools.islice(items, limit))


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


def _scan_ids(file: SourceFile, config: InputConfig) -> FileScan:
    assert config.id_column
    parser = RowParser(config)
    hashes, indices = array("Q"), array("q")
    for raw in itertools.islice(_raw_rows(file, [config.id_column]), config.limit):
        problems = [raw.error] if raw.error else []
        row_id = None if problems else _attempt(problems, parser.read_id, raw.values)
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
