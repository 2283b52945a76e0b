"""One input row, strictly parsed: the columns of a mapping become a prompt or messages, an id, a key and kept columns.

Nothing is inferred: a date-like prompt stays a string, an int is never a prompt, and whatever is wrong with a row makes
it an error row that says where it stands and what was expected. Where rows come from is `source`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal, TypeVar

import xxhash
from pydantic import ValidationError

from pipeline.config import InputConfig
from pipeline.errors import RowError, RowErrorType
from pipeline.sampling import ROW_KEYS, RowSampling
from pipeline.section import problems

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
_SHOWN_COLUMNS = 8  # of a row that lacks a column, in its error
_SHOWN_CHARS = 120
_T = TypeVar("_T")


@dataclass(frozen=True)
class RawRow:
    """A row before parsing: its columns, or why they cannot be read. `line`: a JSONL line's bytes.

    `columns`: the names of all that the row has, where `values` holds a selection.
    """

    index: int
    values: Mapping[str, Any]
    error: RowError | None = None
    line: bytes = field(default=b"", repr=False)
    columns: Sequence[str] | None = None


@dataclass(frozen=True)
class ParsedRow:
    """One input row. An error row has error and error_type, and whatever identity and kept columns could be read.

    samples: indices of the samples to make of it, each an output row (see sample_key).
    """

    row_id: str
    row_key: int  # uint64; see row_key()
    source_file: str
    row_index: int  # 0-based; JSONL: line - 1
    where: str  # "<file name>, line N": how error messages name this row
    messages_or_prompt: str | list[dict[str, Any]] | None  # None in an error row
    kept: dict[str, Any]
    sampling: str | None = None  # the row's own settings: RowSampling.canonical
    samples: tuple[int, ...] = (0,)
    error: str | None = None
    error_type: RowErrorType | None = None

    def failed(self, error: RowError) -> ParsedRow:
        """This row as an error row."""
        return replace(
            self, messages_or_prompt=None, sampling=None, error=f"{self.where}: {error.message}", error_type=error.kind
        )


def row_key(name: str, row_id: str, content: bytes) -> int:
    """A row's key for resuming and seeding: xxh3_64 of file name (SourceFile.name), id and content.

    It changes with the row's own content and depends on no other row and on no other file: a file's name follows from
    its path and from input.path alone. Two of n rows share a key with probability n^2 / 2^65: 2.7e-8 at a million
    rows, 2.7e-4 at a hundred million.
    """
    # JSON text holds no raw newline, so the first one separates the parts unambiguously.
    identity = json.dumps([name, row_id], separators=(",", ":")).encode()
    return int(xxhash.xxh3_64_intdigest(identity + b"\n" + content))


def sample_key(key: int, sample_index: int) -> int:
    """The key of one sample of the row `key`: sample 0 has the row's own, so that raising sampling.n only adds."""
    if sample_index == 0:
        return key
    return int(xxhash.xxh3_64_intdigest(key.to_bytes(8, "big") + sample_index.to_bytes(4, "big")))


class RowParser:
    """Turns one raw mapping into a ParsedRow by the config's rules. Never raises for bad data."""

    def __init__(self, config: InputConfig) -> None:
        self.config = config
        sampling = [*([config.sampling_column] if config.sampling_column else []), *config.sampling_columns]
        named = [config.text_column, *([config.id_column] if config.id_column else []), *config.keep_columns]
        self.columns = list(dict.fromkeys([*named, *sampling]))  # all that is read of a row
        self._content_columns = dict.fromkeys([config.text_column, *config.keep_columns, *sampling])

    def parse(self, raw: RawRow, name: str = "", unit: Literal["line", "row"] = "row") -> ParsedRow:
        """`name` is the file's; "" for rows that come from no file, whose id without id_column is a content hash."""
        try:
            return self._parse(raw, name, unit)
        except RecursionError:  # Python's JSON reader and writer give up at slightly different depths
            return self._parse(RawRow(raw.index, {}, too_deep(), raw.line), name, unit)

    def read_id(self, raw: RawRow) -> str:
        """The row's id in id_column. Raises RowError."""
        column = self.config.id_column
        assert column
        value = _required(raw, column, "input.id_column")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise _wrong_type(column, "a non-empty string or an integer", value)
        return _valid_text(column, value)

    def _parse(self, raw: RawRow, name: str, unit: str) -> ParsedRow:
        faults = [raw.error] if raw.error else []
        content = raw.line if raw.error and raw.line else self._content(raw.values)
        default_id = f"{name}:{raw.index + 1}" if name else xxhash.xxh3_128_hexdigest(content)
        row_id = self.config.id_column and attempt(faults, self.read_id, raw)
        text = attempt(faults, self._read_text, raw)
        kept = {
            column: attempt(faults, _keep, column, kind, raw.values)
            for column, kind in self.config.keep_columns.items()
        }
        sampling = attempt(faults, self._read_sampling, raw)
        row_id = row_id or default_id
        row = ParsedRow(
            row_id=row_id,
            row_key=row_key(name, row_id, content),
            source_file=name,
            row_index=raw.index,
            where=where_in_file(name, raw.index, unit) if name else f"row {row_id[:80]}",
            messages_or_prompt=text,
            kept=kept,
            sampling=sampling,
        )
        return row.failed(faults[0]) if faults else row

    def _content(self, values: Mapping[str, Any]) -> bytes:
        """Canonical JSON of what the output depends on. `repr` serves Parquet's values that JSON lacks."""
        content = {column: values.get(column) for column in self._content_columns}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), default=repr).encode()

    def _read_text(self, raw: RawRow) -> str | list[dict[str, Any]]:
        if self.config.messages_column:
            return _read_messages(self.config.messages_column, raw)
        return _read_prompt(self.config.text_column, raw)

    def _read_sampling(self, raw: RawRow) -> str | None:
        """The row's own sampling settings, None where it has none."""
        column = self.config.sampling_column
        given = _read_settings(column, raw.values.get(column)) if column else {}
        places = {name: f"column {column!r}, key {name!r:.60}" for name in given}
        for name in self.config.sampling_columns:
            if raw.values.get(name) is None:
                continue
            if given.get(name) is not None:
                raise RowError(RowErrorType.SAMPLING, f"{places[name]} has a column of its own too; give it once")
            given[name], places[name] = raw.values[name], f"column {name!r}"
        return _canonical_settings(given, places)


def attempt(faults: list[RowError], read: Callable[..., _T], *arguments: Any) -> _T | None:
    """What `read` returns; or None, with its RowError noted, so that the row's other columns are still read."""
    try:
        return read(*arguments)
    except RowError as error:
        faults.append(error)
        return None


def _read_prompt(column: str, raw: RawRow) -> str:
    value = _required(raw, column, "input.prompt_column")
    if not isinstance(value, str):
        hint = "; for chat messages set input.messages_column" if isinstance(value, list) else ""
        raise _wrong_type(column, "a string", value, hint)
    if not value.strip():
        raise RowError(RowErrorType.EMPTY_PROMPT, f"column {column!r} is empty; expected a prompt")
    return _valid_text(column, value)


def _read_messages(column: str, raw: RawRow) -> list[dict[str, Any]]:
    value = _required(raw, column, "input.messages_column")
    if not isinstance(value, list):
        raise _wrong_type(column, "a list of messages", value)
    messages = [_read_message(f"{column}[{i}]", message) for i, message in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise RowError(RowErrorType.EMPTY_PROMPT, f"column {column!r} holds no text; expected messages with content")
    return messages


def _read_settings(column: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(RowErrorType.SAMPLING, f"column {column!r} is not valid JSON: {str(error)[:100]}") from error
    if value is not None and not isinstance(value, dict):
        raise _wrong_type(column, "an object of sampling settings, or JSON text of one", value)
    return dict(value or {})


def _canonical_settings(given: Mapping[str, Any], places: Mapping[str, str]) -> str | None:
    """Canonical JSON of a row's settings. `places` says where each stands, for errors."""
    try:
        settings = RowSampling.model_validate(given)
    except ValidationError as error:
        name, message = next(iter(problems(error, ROW_KEYS)))
        place = places.get(name) or places[name.partition(".")[0]]
        raise RowError(RowErrorType.SAMPLING, f"{place}: {message:.200}") from error
    return settings.canonical()


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
        shown = f"a part of type {part.get('type')!r:.40}" if isinstance(part, dict) else type_name(part)
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
        return _valid_text(column, _text(column, value))
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


def _text(column: str, value: Any) -> str:
    """Text as it is, dates and decimals as their usual text, all else as JSON; there a NaN is NaN."""
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, date | time | Decimal):
            return _plain_text(value)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain_text)
    except (TypeError, ValueError) as error:
        raise _wrong_type(column, "a string, a date, a decimal or a JSON value", value) from error


def _plain_text(value: Any) -> str:
    """Of values that Parquet has and JSON lacks. Raises TypeError for others, such as bytes."""
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type_name(value)} has no text")


def _required(raw: RawRow, column: str, setting: str) -> Any:
    value = raw.values.get(column)
    if value is not None:
        return value
    if column in raw.values:
        reason = f"column {column!r} is null; {setting} names the column to read"
    else:
        present = raw.values if raw.columns is None else raw.columns
        reason = f"no column {column!r} ({setting}); the row has {_listed(present)}"
    raise RowError(RowErrorType.MISSING_FIELD, reason)


def _listed(columns: Iterable[str]) -> str:
    names = sorted(name if name.isprintable() else ascii(name) for name in columns)
    text = ", ".join(names[:_SHOWN_COLUMNS])
    if len(names) > _SHOWN_COLUMNS or len(text) > _SHOWN_CHARS:
        text = f"{text[:_SHOWN_CHARS]}, ..."
    return text or "no columns"


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
        RowErrorType.WRONG_TYPE, f"column {column!r} must be {expected}, found {type_name(value)}{shown}{hint}"
    )


def type_name(value: Any) -> str:
    return "null" if value is None else _JSON_TYPES.get(type(value), type(value).__name__)


def too_deep() -> RowError:
    return RowError(RowErrorType.MALFORMED, "the JSON is nested too deeply")


def where_in_file(name: str, row_index: int, unit: str) -> str:
    return f"{name}, {unit} {row_index + 1}"
