"""Errors that users see. ConfigError stops a job before it starts; row errors are output rows."""

from __future__ import annotations

import json
from enum import StrEnum


class ConfigError(ValueError):
    """Bad configuration, input place or output place (exit code 2). The message names the setting and what to do."""


class RowErrorType(StrEnum):
    """The `error_type` of an error row."""

    MALFORMED = "malformed"  # the line is no JSON object, or the file cannot be read
    MISSING_FIELD = "missing_field"  # a column that the config names is absent or null
    WRONG_TYPE = "wrong_type"  # a column holds a value of another type
    EMPTY_PROMPT = "empty_prompt"
    DUPLICATE_ID = "duplicate_id"
    INVALID_TEXT = "invalid_text"  # lone surrogates: text that no UTF-8 file can hold
    SAMPLING = "sampling"  # a sampling setting of the row's own is unknown, of a wrong type or out of range
    TEMPLATE = "template"  # the chat template or input.prompt_template refused the row
    PROMPT_TOO_LONG = "prompt_too_long"
    DECODE = "decode"  # the engine failed on this row
    CRASH = "crash"  # the process died whenever it decoded this row, also with nothing beside it


def failure_line(source_file: str, row_id: str, error_type: str, message: str) -> str:
    """A failed row as one log line: `row_failed ` and a JSON object. `message` must quote nothing of the prompt."""
    fields = {"source_file": source_file, "row_id": row_id, "error_type": error_type, "message": message}
    return f"row_failed {json.dumps(fields, ensure_ascii=False)}"


class RowError(Exception):
    """One row that cannot be decoded; becomes an error row and never stops the others.

    `message` holds nothing of the prompt's text and goes to logs; `detail`, what may quote it, only into the output.
    """

    def __init__(self, kind: RowErrorType, message: str, detail: str = "") -> None:
        super().__init__(message + detail)
        self.kind = kind
        self.message = message
        self.detail = detail
