"""Chat messages and tools of one row, checked and brought to what chat templates take.

Role and content are strings, tool calls' arguments objects. Other keys (name, tool_call_id, ...) are the template's
business. Content parts must be text: what they hold else is no row that a text model can decode.
"""

from __future__ import annotations

import json
from typing import Any

from pipeline.errors import RowError, RowErrorType
from pipeline.values import RawRow, required, type_name, valid_text, without_nulls, wrong_type


def read_messages(column: str, raw: RawRow) -> list[dict[str, Any]]:
    """The row's messages. Raises RowError naming the message, and the part, that is wrong."""
    value = required(raw, column, "input.messages_column")
    if not isinstance(value, list):
        raise wrong_type(column, "a list of messages", value)
    value = value if raw.line else without_nulls(value)
    messages = [_read_message(f"{column}[{i}]", message) for i, message in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise RowError(RowErrorType.EMPTY_PROMPT, f"column {column!r} holds no text; expected messages with content")
    return messages


def read_tools(column: str, raw: RawRow) -> list[dict[str, Any]] | None:
    """The row's tools: a list of JSON schemas, or JSON text of one; None where it has none. Raises RowError."""
    value = raw.values.get(column)
    if isinstance(value, str):
        value = _from_json(column, value)
    elif not raw.line:
        value = without_nulls(value)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise wrong_type(column, "a list of tools, each an object, or JSON text of one", value)
    valid_text(column, json.dumps(value, ensure_ascii=False, default=repr))
    return value or None


def _read_message(path: str, message: Any) -> dict[str, Any]:
    """A null or absent content is valid beside tool calls. It becomes empty text: many templates print a null."""
    if not isinstance(message, dict):
        raise wrong_type(path, "an object with role and content", message)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str):
        raise wrong_type(f"{path}.role", "a string", role)
    if isinstance(content, list):
        content = "".join(_read_part(f"{path}.content[{i}]", part) for i, part in enumerate(content))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise wrong_type(f"{path}.content", "a string or a list of text parts", content)
    rest = {key: value for key, value in message.items() if value is not None}
    if calls is not None:
        rest["tool_calls"] = _read_calls(f"{path}.tool_calls", calls)
    valid_text(path, json.dumps(rest, ensure_ascii=False, default=repr))
    return {**rest, "role": role, "content": content}


def _read_part(path: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        shown = f"a part of type {part.get('type')!r:.40}" if isinstance(part, dict) else type_name(part)
        raise RowError(
            RowErrorType.WRONG_TYPE,
            f'column {path!r} must be a text part {{"type": "text", "text": "..."}}, found {shown}',
        )
    return str(part["text"])


def _read_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong_type(path, "a list of tool calls", calls)
    return [_read_call(f"{path}[{i}]", call) for i, call in enumerate(calls)]


def _read_call(path: str, call: Any) -> dict[str, Any]:
    """{"function": {"name", "arguments"}}, or these two at the call itself, as some datasets have them."""
    if not isinstance(call, dict):
        raise wrong_type(path, "an object with function", call)
    if "function" not in call:
        return _read_function(path, call)
    return {**call, "function": _read_function(f"{path}.function", call["function"])}


def _read_function(path: str, function: Any) -> dict[str, Any]:
    """Arguments as an object: from OpenAI's JSON text they are parsed, since templates write them as JSON again."""
    if not isinstance(function, dict):
        raise wrong_type(path, "an object with name and arguments", function)
    if not isinstance(function.get("name"), str):
        raise wrong_type(f"{path}.name", "a string", function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(f"{path}.arguments", arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise wrong_type(f"{path}.arguments", "an object or JSON text of one", arguments)
    return {**function, "arguments": arguments}


def _from_json(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(RowErrorType.WRONG_TYPE, f"column {path!r} is not valid JSON: {str(error)[:100]}") from error
