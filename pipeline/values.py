"""A raw row and what reading its columns shares: required columns, valid text, and the errors that name a column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import RowError, RowErrorType

_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "object"}
_SHOWN_COLUMNS = 8  # of a row that lacks a column, in its error
_SHOWN_CHARS = 120


@dataclass(frozen=True)
class RawRow:
    """A row before parsing: its columns, or why they cannot be read.

    `line`: a JSONL line's bytes (of one that is too long to hold, a digest), empty for rows of Arrow tables, whose
    structs are padded with nulls. `columns`: the names of all that the row has, where `values` holds a selection.
    """

    index: int
    values: Mapping[str, Any]
    error: RowError | None = None
    line: bytes = field(default=b"", repr=False)
    columns: Sequence[str] | None = None


def required(raw: RawRow, column: str, setting: str) -> Any:
    """The column's value. Raises RowError where it is absent or null; `setting` is what names the column."""
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


def valid_text(column: str, text: str) -> str:
    """The text itself. Raises RowError where it holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(
            RowErrorType.INVALID_TEXT,
            f"column {column!r} holds a lone surrogate ({text[error.start]!a}), which is no character; "
            "write the text as valid UTF-8",
        ) from error
    return text


def without_nulls(value: Any) -> Any:
    """The value without null members at any depth: Arrow gives every struct the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [without_nulls(member) for member in value]
    return value


def wrong_type(column: str, expected: str, value: Any, hint: str = "") -> RowError:
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
