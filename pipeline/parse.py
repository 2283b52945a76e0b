"""One input row, strictly parsed: the columns of a mapping become a prompt or messages, an id, a key and kept columns.

Nothing is inferred: a date-like prompt stays a string, an int is never a prompt, and whatever is wrong with a row makes
it an error row that says where it stands and what was expected. Where rows come from is `source`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal, TypeVar

import xxhash
from pydantic import ValidationError

from pipeline.config import InputConfig
from pipeline.errors import RowError, RowErrorType
from pipeline.messages import read_messages, read_tools
from pipeline.sampling import ROW_KEYS, RowSampling
from pipeline.section import problems
from pipeline.template import PromptTemplate, compiled
from pipeline.values import RawRow, required, too_deep, type_name, valid_text, wrong_type

_T = TypeVar("_T")


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
    tools: list[dict[str, Any]] | None = None  # for the chat template
    sampling: str | None = None  # the row's own settings: RowSampling.canonical
    samples: tuple[int, ...] = (0,)
    error: str | None = None
    error_type: RowErrorType | None = None
    logged: str | None = None  # `error` without what it quotes of the row

    def failed(self, error: RowError) -> ParsedRow:
        """This row as an error row."""
        logged = f"{self.where}: {error.message}"
        return replace(
            self,
            messages_or_prompt=None,
            tools=None,
            sampling=None,
            error=logged + error.detail,
            error_type=error.kind,
            logged=logged,
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
        self._template = compiled(config.prompt_template) if config.prompt_template else None
        texts = self._template.columns if self._template else [config.text_column]
        settings = [*_given(config.tools_column), *_given(config.sampling_column), *config.sampling_columns]
        # All that is read of a row.
        self.columns = list(dict.fromkeys([*texts, *_given(config.id_column), *config.keep_columns, *settings]))
        self._content_columns = dict.fromkeys([*texts, *config.keep_columns, *settings])

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
        value = required(raw, column, "input.id_column")
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value:
            raise wrong_type(column, "a non-empty string or an integer", value)
        return valid_text(column, value)

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
        tools = self.config.tools_column and attempt(faults, read_tools, self.config.tools_column, raw)
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
            tools=tools or None,
            sampling=sampling,
        )
        return row.failed(faults[0]) if faults else row

    def _content(self, values: Mapping[str, Any]) -> bytes:
        """Canonical JSON of what the output depends on. `repr` serves Parquet's values that JSON lacks."""
        content = {column: values.get(column) for column in self._content_columns}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), default=repr).encode()

    def _read_text(self, raw: RawRow) -> str | list[dict[str, Any]]:
        if self.config.messages_column:
            return read_messages(self.config.messages_column, raw)
        if self._template:
            return _render_prompt(self._template, raw)
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
    value = required(raw, column, "input.prompt_column")
    if not isinstance(value, str):
        hint = "; for chat messages set input.messages_column" if isinstance(value, list) else ""
        raise wrong_type(column, "a string", value, hint)
    if not value.strip():
        raise RowError(RowErrorType.EMPTY_PROMPT, f"column {column!r} is empty; expected a prompt")
    return valid_text(column, value)


def _render_prompt(template: PromptTemplate, raw: RawRow) -> str:
    text = template.render({column: required(raw, column, "input.prompt_template") for column in template.columns})
    if not text.strip():
        raise RowError(RowErrorType.EMPTY_PROMPT, "input.prompt_template gives an empty prompt for this row")
    return valid_text("input.prompt_template", text)


def _given(column: str | None) -> list[str]:
    return [column] if column else []


def _read_settings(column: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(RowErrorType.SAMPLING, f"column {column!r} is not valid JSON: {str(error)[:100]}") from error
    if value is not None and not isinstance(value, dict):
        raise wrong_type(column, "an object of sampling settings, or JSON text of one", value)
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


def _keep(column: str, kind: str, values: Mapping[str, Any]) -> str | int | float | bool | None:
    value = values.get(column)
    if value is None:
        return None
    if kind == "string":
        return valid_text(column, _text(column, value))
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
    raise wrong_type(column, kind, value, f"; change its type in input.keep_columns ({column}: string takes any)")


def _text(column: str, value: Any) -> str:
    """Text as it is, dates and decimals as their usual text, all else as JSON; there a NaN is NaN."""
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, date | time | Decimal):
            return _plain_text(value)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain_text)
    except (TypeError, ValueError) as error:
        raise wrong_type(column, "a string, a date, a decimal or a JSON value", value) from error


def _plain_text(value: Any) -> str:
    """Of values that Parquet has and JSON lacks. Raises TypeError for others, such as bytes."""
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type_name(value)} has no text")


def where_in_file(name: str, row_index: int, unit: str) -> str:
    return f"{name}, {unit} {row_index + 1}"
