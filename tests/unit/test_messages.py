"""Tool calls, tools and content parts: what chat templates get, from JSONL and from Arrow, whose structs are padded."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_files import load, read_lines

from pipeline.config import InputConfig

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
OTHER_CALL = {"id": "c2", "type": "function", "function": {"name": "time", "arguments": {"zone": 1, "short": True}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warm in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER_CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "31 degrees"},
]
READ = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER_CALL]}, CHAT[2]]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_tool_calls_from_json_lines(tmp_path: Path) -> None:
    without_content = [CHAT[0], {"role": "assistant", "tool_calls": [CALL]}]
    first, second = read_lines(tmp_path, {"chat": CHAT}, {"chat": without_content}, messages_column="chat")
    assert first.messages_or_prompt == READ, "no call has gained the other's keys"
    assert second.messages_or_prompt == [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_tool_calls_from_arrow_gain_no_keys(tmp_path: Path, format: str) -> None:
    """A struct column gives each message, call and argument object the keys of all, as nulls."""
    table = pa.table({"chat": [CHAT, CHAT[:1]]})
    assert table.to_pylist()[0]["chat"][0]["tool_calls"] is None, "padded indeed"
    if format == "parquet":
        pq.write_table(table, tmp_path / "p.parquet")
    else:
        with pa.ipc.new_stream(str(tmp_path / "p.arrow"), table.schema) as writer:
            writer.write_table(table)
    rows, _ = load(InputConfig(path=[str(tmp_path)], messages_column="chat"))
    assert [row.messages_or_prompt for row in rows] == [READ, CHAT[:1]]


def test_a_null_argument_of_a_json_line_is_the_calls_own(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"unit": None}}}
    (row,) = read_lines(
        tmp_path,
        {"chat": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]},
        messages_column="chat",
    )
    assert row.messages_or_prompt is not None
    assert row.messages_or_prompt[1]["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"city": "Rome"}', {"city": "Rome"}), ("", {}), (None, {}), ({"a": [1]}, {"a": [1]})]
)
def test_arguments_become_objects(tmp_path: Path, arguments: Any, expected: Any) -> None:
    """OpenAI's are JSON text, which a template would write as a JSON string again."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    flat = {"name": "f", "arguments": arguments}
    rows = read_lines(
        tmp_path,
        *({"chat": [CHAT[0], {"role": "assistant", "content": "ok", "tool_calls": [each]}]} for each in (call, flat)),
        messages_column="chat",
    )
    calls = [row.messages_or_prompt[1]["tool_calls"][0] for row in rows]
    assert calls[0]["function"] == {"name": "f", "arguments": expected}
    assert calls[1] == {"name": "f", "arguments": expected}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ({}, "column 'chat[0].content' must be a string or a list of text parts, found null"),
        ("x", "column 'chat[0].tool_calls' must be a list of tool calls, found string"),
        (["x"], "column 'chat[0].tool_calls[0]' must be an object with function, found string"),
        (
            [{"function": 1}],
            "'chat[0].tool_calls[0].function' must be an object with name and arguments, found integer",
        ),
        ([{"function": {}}], "column 'chat[0].tool_calls[0].function.name' must be a string, found null"),
        ([{"function": {"name": "f", "arguments": [1]}}], "function.arguments' must be an object or JSON text of one"),
        ([{"function": {"name": "f", "arguments": "{"}}], "function.arguments' is not valid JSON"),
    ],
)
def test_bad_tool_calls(tmp_path: Path, calls: Any, message: str) -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}, CHAT[0]]
    (row,) = read_lines(tmp_path, {"chat": chat}, messages_column="chat")
    assert row.error_type == "wrong_type"
    assert row.error is not None
    assert message in row.error


@pytest.mark.parametrize("type_", ["image_url", "input_audio", "video"])
def test_a_part_that_is_no_text_is_named(tmp_path: Path, type_: str) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": type_, type_: {"url": "x"}}]}]
    (row,) = read_lines(tmp_path, {"chat": chat}, messages_column="chat")
    assert row.error is not None
    assert row.error.endswith(
        f'\'chat[0].content[1]\' must be a text part {{"type": "text", "text": "..."}}, '
        f"found a part of type '{type_}'"
    )


def test_tools(tmp_path: Path) -> None:
    lines = [[TOOL], json.dumps([TOOL]), None, [], "null"]
    rows = read_lines(tmp_path, *({"prompt": "x", "tools": each} for each in lines), tools_column="tools")
    assert [row.tools for row in rows] == [[TOOL], [TOOL], None, None, None]
    assert len({row.row_key for row in rows}) == 5
    changed = [{"function": {"name": "other"}}]
    (before,) = read_lines(tmp_path, {"prompt": "x", "tools": [TOOL]}, tools_column="tools")
    (after,) = read_lines(tmp_path, {"prompt": "x", "tools": changed}, tools_column="tools")
    assert before.row_key != after.row_key, "the tools are part of the prompt"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"a": 1}, "a list of tools, each an object"),
        (["f"], "a list of tools"),
        ("{", "column 'tools' is not valid JSON"),
    ],
)
def test_bad_tools(tmp_path: Path, tools: Any, message: str) -> None:
    (row,) = read_lines(tmp_path, {"prompt": "x", "tools": tools}, tools_column="tools")
    assert row.error_type == "wrong_type"
    assert row.error is not None
    assert message in row.error
