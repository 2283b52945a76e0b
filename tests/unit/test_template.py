"""input.prompt_template: columns in, prompts out; a sandbox around it; mistakes told at the start or by row."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prompt_files import load, read_lines, write_parquet

from pipeline.config import InputConfig, parse_config
from pipeline.errors import ConfigError, RowErrorType
from pipeline.parse import RowParser
from pipeline.plan import difference
from pipeline.template import PromptTemplate


def test_a_template_over_columns(tmp_path: Path) -> None:
    template = "Summarise in {{ n }} words: {{ text|upper }}{% for tag in tags %} #{{ tag }}{% endfor %}"
    rows = read_lines(
        tmp_path,
        {"n": 3, "text": "ab\ncd", "tags": ["x", "y"], "unread": None},
        {"n": 1, "text": "{{ 7 * 7 }}", "tags": []},
        prompt_template=template,
    )
    assert [row.messages_or_prompt for row in rows] == [
        "Summarise in 3 words: AB\nCD #x #y",
        "Summarise in 1 words: {{ 7 * 7 }}",  # a column is data, never a template
    ]
    assert len({row.row_key for row in rows}) == 2


def test_the_key_follows_the_columns_that_are_read(tmp_path: Path) -> None:
    def key(**row: str) -> int:
        return read_lines(tmp_path, {"prompt": "p", **row}, prompt_template="{{ a }}{{ b }}")[0].row_key

    assert key(a="1", b="2") == key(a="1", b="2", c="3")
    assert key(a="1", b="2") != key(a="1", b="3")


def test_a_template_reads_only_its_columns_of_parquet(tmp_path: Path) -> None:
    write_parquet(tmp_path / "p.parquet", {"a": ["x"], "b": [1], "huge": ["y"]})
    config = InputConfig(path=[str(tmp_path)], prompt_template="{{ a }}: {{ b }}")
    assert RowParser(config).columns == ["a", "b"]
    rows, _ = load(config)
    assert [row.messages_or_prompt for row in rows] == ["x: 1"]
    assert pq.read_schema(tmp_path / "p.parquet").names == ["a", "b", "huge"]


def test_missing_and_null_columns_are_named(tmp_path: Path) -> None:
    rows = read_lines(
        tmp_path, {"a": "x"}, {"a": "x", "b": None}, {"a": "x", "b": "y"}, prompt_template="{{ a }}{{ b }}"
    )
    assert [row.error_type for row in rows] == ["missing_field", "missing_field", None]
    assert rows[0].error == "prompts.jsonl, line 1: no column 'b' (input.prompt_template); the row has a"
    assert rows[1].error == (
        "prompts.jsonl, line 2: column 'b' is null; input.prompt_template names the column to read"
    )


@pytest.mark.parametrize(
    ("template", "value", "kind"),
    [
        ("{{ a.__class__.__mro__ }}", "x", RowErrorType.TEMPLATE),  # the way out of a sandbox that is none
        ("{{ ''.__class__ }}{{ a }}", "x", RowErrorType.TEMPLATE),
        ("{{ a['__init__']['__globals__'] }}", {"b": 1}, RowErrorType.TEMPLATE),
        ("{{ a.append(1) }}", [1], RowErrorType.TEMPLATE),  # a row's values stay as they are
        ("{% for i in range(10**9) %}{{ a }}{% endfor %}", "x", RowErrorType.TEMPLATE),
        ("{{ a + 1 }}", "x", RowErrorType.TEMPLATE),
        ("{{ a.b }}", {"c": 1}, RowErrorType.TEMPLATE),
        ("{{ a }}", "  ", RowErrorType.EMPTY_PROMPT),
        ("{{ a }}", "\ud800", RowErrorType.INVALID_TEXT),
    ],
)
def test_what_a_row_cannot_be_made_of(tmp_path: Path, template: str, value: object, kind: RowErrorType) -> None:
    (row,) = read_lines(tmp_path, {"a": value}, prompt_template=template)
    assert row.error_type == kind
    assert row.error is not None
    assert "input.prompt_template" in row.error


def test_a_failing_row_shows_its_text_in_the_output_and_not_in_logs(tmp_path: Path) -> None:
    (row,) = read_lines(tmp_path, {"a": {"secret": 1}}, prompt_template="{{ a.missing }}")
    assert row.error is not None
    assert "missing" in row.error
    assert row.logged == "prompts.jsonl, line 1: input.prompt_template failed: UndefinedError"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ a", "line 1: unexpected end of template"),
        ("ok {{ a }}\n{% if %}", "line 2: "),
        ("{{ a|nope }}", "No filter named 'nope'"),
        ("{{ a|random }}", "No filter named 'random'"),
        ("no column at all", "it reads no column"),
        ("{{ range(3) }}", "it reads no column"),
        ("{% include 'x' %}{{ a }}", "cannot include, import or extend"),
    ],
)
def test_a_bad_template_stops_the_job(template: str, message: str) -> None:
    sections = {"output": {"path": "out"}, "model": {"path": "m"}}
    with pytest.raises(ConfigError) as told:
        parse_config({**sections, "input": {"path": "x", "prompt_template": template}})
    assert str(told.value).startswith("input.prompt_template: ")
    assert message in str(told.value)


def test_a_template_stands_alone() -> None:
    for other in ("prompt_column", "messages_column"):
        with pytest.raises(ValueError, match=rf"set {other}|or {other}, not both"):
            InputConfig(path=["x"], prompt_template="{{ a }}", **{other: "b"})


def test_lipsum_draws_at_random_and_is_a_column_here() -> None:
    assert PromptTemplate("{{ lipsum }}{{ a }}").columns == ["a", "lipsum"]


def test_a_changed_template_is_another_run() -> None:
    first, second = (InputConfig(path=["x"], prompt_template=t).model_dump() for t in ("{{ a }}", "{{ a }}!"))
    assert difference(first, second) == ["prompt_template: '{{ a }}' -> '{{ a }}!'"]
