"""The input's edge: listing, strict parsing, error rows that name file and line, duplicate ids, limits, row keys."""

import gzip
import itertools
import json
import logging
import pickle
import random
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from moto.server import ThreadedMotoServer

from pipeline import source
from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowErrorType
from pipeline.source import ParsedRow, RawRow, RowParser, Scan, list_source, merge_scans, read_rows, row_key, scan
from pipeline.storage import StorageError

GOOD = b'{"prompt": "hello"}\n'


def load(config: InputConfig) -> tuple[list[ParsedRow], Scan]:
    """The whole way: list, scan, read; and what must hold of every scan: its counts are what is read."""
    scanned = scan(list_source(config), config)
    per_file = [list(read_rows(file, config, scanned.duplicates)) for file in scanned.files]
    assert scanned.rows == [len(rows) for rows in per_file]
    rows = list(itertools.chain.from_iterable(per_file))
    assert scanned.total == len(rows)
    for row in rows:
        assert (row.error is None) == (row.error_type is None) == (row.messages_or_prompt is not None)
        assert row.error is None or row.error.startswith(f"{row.where}: ")
        json.dumps([row.error, row.row_id, row.kept], ensure_ascii=False).encode()  # no lone surrogate gets through
    return rows, scanned


def read_lines(tmp_path: Path, *lines: str | bytes | Mapping[str, Any], **settings: Any) -> list[ParsedRow]:
    data = [json.dumps(line) if isinstance(line, Mapping) else line for line in lines]
    data = [line.encode() if isinstance(line, str) else line for line in data]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(data) + b"\n")
    return load(InputConfig(path=[str(tmp_path / "prompts.jsonl")], **settings))[0]


def only(tmp_path: Path, line: str | bytes | Mapping[str, Any], **settings: Any) -> ParsedRow:
    (row,) = read_lines(tmp_path, line, **settings)
    return row


def write_parquet(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **options)


# ---------------------------------------------------------------------------------------------------------- listing


def names(tmp_path: Path, *paths: str, **settings: Any) -> list[str]:
    return [file.name for file in list_source(InputConfig(path=[str(tmp_path / path) for path in paths], **settings))]


def make_files(tmp_path: Path, *paths: str) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(GOOD)


def test_names_are_relative_to_file_folder_or_glob(tmp_path: Path) -> None:
    make_files(tmp_path, "in/a.jsonl", "in/sub/b.ndjson", "in/sub/c.json.gz", "in/_SUCCESS", "in/.x.jsonl")
    assert names(tmp_path, "in") == ["a.jsonl", "sub/b.ndjson", "sub/c.json.gz"]
    assert names(tmp_path, "in/**/*.*") == ["a.jsonl", "sub/b.ndjson", "sub/c.json.gz"]
    assert names(tmp_path, "in/sub/*.ndjson", "in/a.jsonl") == ["b.ndjson", "a.jsonl"], "in the order of input.path"
    assert names(tmp_path, "in/*/*.ndjson") == ["sub/b.ndjson"]


def test_equal_names_get_parent_folders_until_unique(tmp_path: Path) -> None:
    make_files(tmp_path, "x/one/p.jsonl", "x/two/p.jsonl", "y/two/p.jsonl", "y/other.jsonl")
    assert names(tmp_path, "x/one", "x/two") == ["one/p.jsonl", "two/p.jsonl"]
    assert names(tmp_path, "x/one", "x/two", "y/two", "y/other.jsonl") == [
        "one/p.jsonl",
        "x/two/p.jsonl",
        "y/two/p.jsonl",
        "other.jsonl",
    ]


def test_file_listed_twice_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_files(tmp_path, "in/a.jsonl", "in/b.jsonl")
    assert names(tmp_path, "in", "in/a.jsonl") == ["a.jsonl", "b.jsonl"]
    assert "listed twice" in caplog.text


def test_formats(tmp_path: Path) -> None:
    make_files(tmp_path, *(f"in/{i}.{s}" for i, s in enumerate(["JSONL", "ndjson.zst", "json", "jsonl.gz", "parquet"])))
    files = list_source(InputConfig(path=[str(tmp_path / "in")]))
    assert [file.format for file in files] == ["jsonl"] * 4 + ["parquet"]
    assert [file.size for file in files] == [len(GOOD)] * 5
    assert all(f.format == "jsonl" for f in list_source(InputConfig(path=[str(tmp_path / "in")], format="jsonl")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.csv", r"input.path: rows.csv: unknown format.*convert it to JSONL or Parquet"),
        ("notes.md", r"input.path: notes.md: unknown format.*set input.format"),
        ("rows.parquet.gz", r"rows.parquet.gz: unknown format"),
    ],
)
def test_unknown_format(tmp_path: Path, name: str, message: str) -> None:
    make_files(tmp_path, "in/a.jsonl", f"in/{name}")
    with pytest.raises(ConfigError, match=message):
        names(tmp_path, "in")
    assert len(names(tmp_path, "in", format="jsonl")) == 2


@pytest.mark.parametrize("path", ["absent.jsonl", "*.jsonl", "empty"])
def test_nothing_matches(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"input.path: nothing matches .*"):
        names(tmp_path, path)


def test_unreadable_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path, "a.jsonl")
    files = list_source(InputConfig(path=[str(tmp_path)]))

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pipeline.storage.Place.open_input", refuse)
    with pytest.raises(ConfigError, match=r"input.path: cannot read .*a.jsonl: .*Permission denied"):
        scan(files, InputConfig(path=[str(tmp_path)]))
    monkeypatch.setattr(source, "expand_with_root", refuse)
    with pytest.raises(ConfigError, match=r"input.path: cannot read s3://private/x: .*Permission denied"):
        list_source(InputConfig(path=["s3://private/x"]))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an empty fake S3 that the environment points to."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    server.stop()


def test_s3_end_to_end(tmp_path: Path, s3: Any) -> None:
    write_parquet(tmp_path / "c.parquet", {"prompt": ["from parquet"]})
    s3.create_bucket(Bucket="prompts")
    s3.put_object(Bucket="prompts", Key="set/b/c.parquet", Body=(tmp_path / "c.parquet").read_bytes())
    s3.put_object(Bucket="prompts", Key="set/a.jsonl.gz", Body=gzip.compress(GOOD * 2))
    rows, _ = load(InputConfig(path=["s3://prompts/set"]))
    assert [row.row_id for row in rows] == ["a.jsonl.gz:1", "a.jsonl.gz:2", "b/c.parquet:1"]
    assert [row.messages_or_prompt for row in rows] == ["hello", "hello", "from parquet"]


# ---------------------------------------------------------------------------------------------------------- parsing


def test_good_row(tmp_path: Path) -> None:
    row = only(tmp_path, {"prompt": "2024-01-31", "other": 1})
    assert row == ParsedRow(
        row_id="prompts.jsonl:1",
        row_key=row_key("prompts.jsonl", "prompts.jsonl:1", b'{"prompt":"2024-01-31"}'),
        source_file="prompts.jsonl",
        row_index=0,
        where="prompts.jsonl, line 1",
        messages_or_prompt="2024-01-31",  # date-like text stays text
        kept={},
    )


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ('{"prompt": "a', "malformed", "not valid JSON: Unterminated string"),
        ('{"prompt": "a",}', "malformed", "not valid JSON"),
        ("[1, 2]", "malformed", "expected one JSON object a line, found list"),
        ("null", "malformed", "expected one JSON object a line, found null"),
        ('{"prompt": NaN}', "malformed", "NaN is not a JSON value"),
        ('{"prompt": "a", "x": -Infinity}', "malformed", "-Infinity is not a JSON value"),
        ('{"prompt": ' + "9" * 5000 + "}", "malformed", "not valid JSON"),
        ('{"prompt": ' + "[" * 100_000, "malformed", "nested too deeply"),
        (b'{"prompt": "\xff"}', "malformed", "not valid UTF-8: byte 0xff at byte 13"),
        ("{}", "missing_field", "column 'prompt' is missing; input.prompt_column names"),
        ('{"prompt": null}', "missing_field", "column 'prompt' is null"),
        ('{"prompt": 5}', "wrong_type", "column 'prompt' must be a string, found integer 5"),
        ('{"prompt": true}', "wrong_type", "must be a string, found boolean True"),
        ('{"prompt": {"a": 1}}', "wrong_type", "must be a string, found object"),
        ('{"prompt": ["a"]}', "wrong_type", "found list; for chat messages set input.messages_column"),
        ('{"prompt": ""}', "empty_prompt", "column 'prompt' is empty"),
        ('{"prompt": " \\n\\t\\u3000"}', "empty_prompt", "column 'prompt' is empty"),
        (r'{"prompt": "a \ud800 b"}', "invalid_text", r"column 'prompt' holds a lone surrogate ('\ud800')"),
    ],
)
def test_bad_prompt_names_its_line_and_leaves_the_others(
    tmp_path: Path, line: str | bytes, kind: str, message: str
) -> None:
    before, bad, after = read_lines(tmp_path, GOOD.strip(), line, GOOD.strip())
    assert bad.error is not None
    assert bad.error.startswith("prompts.jsonl, line 2: ")
    assert message in bad.error
    assert bad.error_type == kind
    assert len(bad.error) < 300
    assert (before.messages_or_prompt, after.messages_or_prompt) == ("hello", "hello")
    assert after.row_id == "prompts.jsonl:3"


def test_nesting_at_the_reader_limit_never_raises(tmp_path: Path) -> None:
    """The reader's and the writer's limits differ; whatever lies between them is an error row too."""
    lines = ['{"prompt": ' + "[" * depth + "]" * depth + "}" for depth in range(900, 1010)]
    kinds = [row.error_type for row in read_lines(tmp_path, *lines)]
    assert set(kinds) == {RowErrorType.WRONG_TYPE, RowErrorType.MALFORMED}
    rows = read_lines(tmp_path, *(f'{{"prompt": "a", "x": {line[11:]}' for line in lines), keep_columns=["x"])
    assert {row.error_type for row in rows} == {None, RowErrorType.MALFORMED}


def test_surrogate_pair_is_fine(tmp_path: Path) -> None:
    assert only(tmp_path, r'{"prompt": "\ud83d\ude00"}').messages_or_prompt == "\U0001f600"


def messages_row(tmp_path: Path, messages: Any) -> ParsedRow:
    return only(tmp_path, {"chat": messages}, messages_column="chat")


def test_messages(tmp_path: Path) -> None:
    """`content` as a string and as a list of parts may stand in one file."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    rows = read_lines(
        tmp_path,
        {"chat": [{"role": "user", "content": "plain"}]},
        {"chat": [{"role": "system", "content": ""}, {"role": "user", "content": parts, "name": "Ann", "x": None}]},
        messages_column="chat",
    )
    assert [row.messages_or_prompt for row in rows] == [
        [{"role": "user", "content": "plain"}],
        [{"role": "system", "content": ""}, {"role": "user", "content": "ab", "name": "Ann"}],
    ]


@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        (None, "missing_field", "column 'chat' is null; input.messages_column names"),
        ([], "empty_prompt", "column 'chat' holds no text"),
        ([{"role": "user", "content": " "}], "empty_prompt", "column 'chat' holds no text"),
        ("hi", "wrong_type", "column 'chat' must be a list of messages, found string"),
        (["hi"], "wrong_type", "column 'chat[0]' must be an object with role and content, found string"),
        ([{"content": "x"}], "wrong_type", "column 'chat[0].role' must be a string, found null"),
        ([{"role": 1, "content": "x"}], "wrong_type", "column 'chat[0].role' must be a string, found integer 1"),
        ([{"role": "user"}], "wrong_type", "column 'chat[0].content' must be a string or a list of text parts"),
        ([{"role": "user", "content": 3}], "wrong_type", "found integer 3"),
        ([{"role": "user", "content": ["x"]}], "wrong_type", "'chat[0].content[0]' must be a text part"),
        ([{"role": "user", "content": [{"type": "image"}]}], "wrong_type", "found a part of type 'image'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "wrong_type", "must be a text part"),
        ([{"role": "user", "content": "\ud800"}], "invalid_text", "column 'chat[0]' holds a lone surrogate"),
        ([{"role": "\udfff", "content": "x"}], "invalid_text", "column 'chat[0]' holds a lone surrogate"),
    ],
)
def test_bad_messages(tmp_path: Path, messages: Any, kind: str, message: str) -> None:
    row = messages_row(tmp_path, messages)
    assert row.error is not None
    assert message in row.error
    assert row.error_type == kind


@pytest.mark.parametrize(("value", "expected"), [("a", "a"), (7, "7"), (-1, "-1"), ("ü 1", "ü 1"), (2**70, str(2**70))])
def test_ids(tmp_path: Path, value: Any, expected: str) -> None:
    assert only(tmp_path, {"prompt": "x", "id": value}, id_column="id").row_id == expected


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ('{"prompt": "x"}', "missing_field", "column 'id' is missing; input.id_column names"),
        ('{"prompt": "x", "id": null}', "missing_field", "column 'id' is null"),
        ('{"prompt": "x", "id": ""}', "wrong_type", "must be a non-empty string or an integer, found string ''"),
        ('{"prompt": "x", "id": true}', "wrong_type", "found boolean True"),
        ('{"prompt": "x", "id": 1.0}', "wrong_type", "found number 1.0"),
        ('{"prompt": "x", "id": [1]}', "wrong_type", "found list"),
        (r'{"prompt": "x", "id": "\udc00"}', "invalid_text", "column 'id' holds a lone surrogate"),
    ],
)
def test_bad_ids_fall_back_to_the_line(tmp_path: Path, line: str, kind: str, message: str) -> None:
    row = only(tmp_path, line, id_column="id")
    assert (row.row_id, row.error_type) == ("prompts.jsonl:1", kind)
    assert row.error is not None
    assert message in row.error


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "as is", "as is"),
        ("string", {"b": [1, "ü"], "a": None}, '{"b":[1,"ü"],"a":null}'),
        ("string", 1, "1"),
        ("string", False, "false"),
        ("string", None, None),
        ("int64", 2**63 - 1, 2**63 - 1),
        ("int64", -(2**63), -(2**63)),
        ("int64", None, None),
        ("float64", 1.5, 1.5),
        ("float64", 2, 2.0),
        ("bool", True, True),
    ],
)
def test_kept_columns(tmp_path: Path, kind: str, value: Any, expected: Any) -> None:
    row = only(tmp_path, {"prompt": "x", "col": value}, keep_columns={"col": kind})
    assert row.error is None
    assert row.kept == {"col": expected}
    assert type(row.kept["col"]) is type(expected)


def test_absent_kept_column_is_null(tmp_path: Path) -> None:
    assert only(tmp_path, {"prompt": "x"}, keep_columns=["col"]).kept == {"col": None}


@pytest.mark.parametrize(
    ("kind", "value", "error_type"),
    [
        ("int64", 2**63, "wrong_type"),
        ("int64", 1.0, "wrong_type"),
        ("int64", True, "wrong_type"),
        ("int64", "1", "wrong_type"),
        ("float64", True, "wrong_type"),
        ("float64", "1.5", "wrong_type"),
        ("float64", 10**400, "wrong_type"),
        ("bool", 1, "wrong_type"),
        ("bool", "true", "wrong_type"),
        ("string", "\ud800", "invalid_text"),
        ("string", {"deep": ["\ud800"]}, "invalid_text"),
    ],
)
def test_kept_columns_are_strict(tmp_path: Path, kind: str, value: Any, error_type: str) -> None:
    row = only(tmp_path, {"prompt": "x", "col": value, "id": "a"}, keep_columns={"col": kind}, id_column="id")
    assert (row.kept, row.row_id, row.error_type) == ({"col": None}, "a", error_type)
    assert row.error is not None
    assert "prompts.jsonl, line 1: column 'col'" in row.error


def test_error_row_keeps_what_could_be_read(tmp_path: Path) -> None:
    row = only(tmp_path, {"id": "a", "n": 3, "prompt": 0}, id_column="id", keep_columns={"n": "int64"})
    assert (row.row_id, row.kept, row.error_type) == ("a", {"n": 3}, "wrong_type")


def test_long_values_are_not_dumped(tmp_path: Path) -> None:
    long = "x" * 10_000
    for line in (f'{{"prompt": "{long}', f'{{"prompt": ["{long}"]}}', f'{{"prompt": "a{long}" "b{long}"}}'):
        error = only(tmp_path, line).error
        assert error is not None
        assert error.count("x") < 120


# --------------------------------------------------------------------------------------------------------- row keys


def test_row_key_follows_content_and_identity_only(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"id_column": "id", "keep_columns": ["k"]}
    base = {"id": "a", "prompt": "p", "k": "v"}

    def key(*lines: Mapping[str, Any]) -> int:
        return next(row.row_key for row in read_lines(tmp_path, *lines, **settings) if row.row_id == "a")

    reference = key(base)
    assert key({"id": "z", "prompt": "other"}, base) == reference, "other lines do not matter"
    assert key({"prompt": "p", "k": "v", "id": "a"}) == reference, "nor does the order of keys"
    assert key(base | {"unread": 1}) == reference, "nor columns that are not read"
    changed = [key(base | {"prompt": "P"}), key(base | {"k": "V"}), key(base | {"k": None})]
    assert len({reference, *changed}) == 4
    assert 0 <= reference < 2**64


def test_row_key_is_fixed() -> None:
    """Golden: a change of the hash would make every finished run start over."""
    assert row_key("f.jsonl", "a", b"{}") == 6398904925121007804
    assert row_key("f", "ab", b"c") != row_key("f", "a", b"bc")
    assert row_key("fa", "b", b"") != row_key("f", "ab", b"")


def test_malformed_line_key_follows_its_bytes(tmp_path: Path) -> None:
    assert only(tmp_path, '{"prompt": 1').row_key != only(tmp_path, '{"prompt": 2').row_key
    assert only(tmp_path, '{"prompt": 1').row_key == only(tmp_path, '{"prompt": 1').row_key


def test_equal_lines_have_different_keys(tmp_path: Path) -> None:
    """Without ids the line number tells them apart; with ids the second is an error row with its own key."""
    assert len({row.row_key for row in read_lines(tmp_path, GOOD.strip(), GOOD.strip())}) == 2
    same = {"prompt": "p", "id": 1}
    assert len({row.row_key for row in read_lines(tmp_path, same, same, same, id_column="id")}) == 3


# ------------------------------------------------------------------------------------------------------ JSONL files


def test_bom_crlf_blank_lines_and_no_last_newline(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \r\n{"prompt": "b\\u2028\xe2\x80\xa8"}\n\n{"prompt": "c"}'
    (tmp_path / "p.jsonl").write_bytes(data)
    rows, _ = load(InputConfig(path=[str(tmp_path / "p.jsonl")]))
    assert [(row.row_id, row.row_index) for row in rows] == [("p.jsonl:1", 0), ("p.jsonl:4", 3), ("p.jsonl:6", 5)]
    assert [row.messages_or_prompt for row in rows] == ["a", "b\u2028\u2028", "c"]
    assert rows[1].where == "p.jsonl, line 4"


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_compressed(tmp_path: Path, suffix: str, compress: Any) -> None:
    (tmp_path / f"p.jsonl.{suffix}").write_bytes(compress(GOOD * 3) + compress(GOOD))  # parts joined with `cat`
    rows, _ = load(InputConfig(path=[str(tmp_path)]))
    assert [row.messages_or_prompt for row in rows] == ["hello"] * 4
    assert rows[3].row_id == f"p.jsonl.{suffix}:4"


def noise_lines(count: int) -> bytes:
    return b"".join(b'{"prompt": "%d"}\n' % random.Random(i).getrandbits(200) for i in range(count))


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_truncated_file_keeps_its_first_rows_and_the_other_files(tmp_path: Path, suffix: str, compress: Any) -> None:
    lines = noise_lines(20_000)
    whole = compress(lines)
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(whole[: len(whole) * 3 // 4])
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    *rows, error, last = load(InputConfig(path=[str(tmp_path)]))[0]
    assert 5_000 < len(rows) < 20_000
    expected = [json.loads(line)["prompt"] for line in lines.splitlines()]
    assert [row.messages_or_prompt for row in rows] == expected[: len(rows)]
    assert error.error_type == RowErrorType.MALFORMED
    assert error.row_index == len(rows)
    assert error.error is not None
    assert error.error.startswith(f"a.jsonl.{suffix}, line {len(rows) + 1}: the file is truncated or corrupt")
    assert last.source_file == "b.jsonl"
    assert last.error is None


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.jsonl.zst"])
def test_not_compressed_at_all(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(GOOD)
    (row,), _ = load(InputConfig(path=[str(tmp_path)]))
    assert (row.row_index, row.error_type) == (0, "malformed")


def test_reading_is_streamed(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "%s"}\n' % (b"x" * 1000) * 40_000, 1))
    config = InputConfig(path=[str(tmp_path)])
    (file,) = list_source(config)
    tracemalloc.start()
    assert sum(1 for _ in itertools.islice(read_rows(file, config, {}), 4_000)) == 4_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6_000_000, "40 MB of text"


def test_a_failing_store_is_no_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be raised, so that the task is tried again, and not be written down as a corrupt file."""
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    write_parquet(tmp_path / "b.parquet", {"prompt": ["x"]})
    config = InputConfig(path=[str(tmp_path)])
    files = list_source(config)

    def fail(*_: Any) -> int:
        raise StorageError("503")

    monkeypatch.setattr("pipeline.storage._RetryingReader.readinto", fail)
    for file in files:
        with pytest.raises(StorageError):
            list(read_rows(file, config, {}))
        with pytest.raises(ConfigError, match=r"input.path: cannot read .*: 503"):
            scan([file], config)


# ---------------------------------------------------------------------------------------------------- Parquet files


def read_parquet(tmp_path: Path, columns: Mapping[str, Any], **settings: Any) -> list[ParsedRow]:
    write_parquet(tmp_path / "p.parquet", columns)
    return load(InputConfig(path=[str(tmp_path / "p.parquet")], **settings))[0]


def test_parquet_rows(tmp_path: Path) -> None:
    columns = {
        "prompt": ["a", None, "", "2024-01-01"],
        "id": [1, 2, 3, 4],
        "n": [1, None, 3, 4],
        "unread": [b"\xff"] * 4,
    }
    rows = read_parquet(tmp_path, columns, id_column="id", keep_columns={"n": "int64"})
    assert [row.messages_or_prompt for row in rows] == ["a", None, None, "2024-01-01"]
    assert [row.error_type for row in rows] == [None, "missing_field", "empty_prompt", None]
    assert [row.row_id for row in rows] == ["1", "2", "3", "4"]
    assert [row.kept["n"] for row in rows] == [1, None, 3, 4]
    assert rows[1].error == "p.parquet, row 2: column 'prompt' is null; input.prompt_column names the column to read"


def test_parquet_ids_by_row(tmp_path: Path) -> None:
    rows = read_parquet(tmp_path, {"prompt": [f"p{i}" for i in range(1000)]})
    assert [row.row_id for row in rows] == [f"p.parquet:{i + 1}" for i in range(1000)]
    assert [row.row_index for row in rows] == list(range(1000))


def test_parquet_without_the_column(tmp_path: Path) -> None:
    rows = read_parquet(tmp_path, {"text": ["a", "b"]})
    assert [row.error_type for row in rows] == ["missing_field"] * 2
    rows = read_parquet(tmp_path, {"prompt": ["a", "b"]}, id_column="id")
    assert [(row.error_type, row.row_id) for row in rows] == [
        ("missing_field", "p.parquet:1"),
        ("missing_field", "p.parquet:2"),
    ]


@pytest.mark.parametrize(
    ("values", "found"),
    [([1], "integer 1"), ([b"x"], "bytes"), (pa.array([0], pa.timestamp("us")), "datetime"), ([{"a": 1}], "object")],
)
def test_parquet_column_of_another_type(tmp_path: Path, values: Any, found: str) -> None:
    (row,) = read_parquet(tmp_path, {"prompt": values})
    assert row.error_type == "wrong_type"
    assert row.error == f"p.parquet, row 1: column 'prompt' must be a string, found {found}"


def test_parquet_messages(tmp_path: Path) -> None:
    """Arrow gives every message the keys of all; those that are null are dropped."""
    messages = [[{"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "b", "name": None}]]
    (row,) = read_parquet(tmp_path, {"chat": messages}, messages_column="chat")
    assert row.messages_or_prompt == [
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "user", "content": "b"},
    ]


def test_parquet_kept_values_that_json_lacks(tmp_path: Path) -> None:
    column = pa.array([0], pa.timestamp("us"))
    (row,) = read_parquet(tmp_path, {"prompt": ["x"], "t": column}, keep_columns=["t"])
    assert row.error_type == "wrong_type"
    (row,) = read_parquet(tmp_path, {"prompt": ["x"], "t": [float("nan")]}, keep_columns=["t"])
    assert row.error_type == "wrong_type"


def test_parquet_invalid_utf8_is_one_row(tmp_path: Path) -> None:
    prompts = pa.array([b"ok", b"\xff", b"fine"]).view(pa.string())
    rows = read_parquet(tmp_path, {"prompt": prompts, "id": ["a", "b", "c"]}, id_column="id")
    assert [row.error_type for row in rows] == [None, "malformed", None]
    assert rows[1].row_id == "b"
    assert rows[1].error is not None
    assert rows[1].error.startswith("p.parquet, row 2: column 'prompt' cannot be read: 'utf-8' codec")


def test_corrupt_parquet_is_one_error_row_and_other_files_go_on(tmp_path: Path) -> None:
    write_parquet(tmp_path / "b.parquet", {"prompt": ["x"] * 100})
    (tmp_path / "a.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:-20])
    for settings in ({}, {"id_column": "id"}):
        rows, scanned = load(InputConfig(path=[str(tmp_path)], **settings))
        assert scanned.rows == [1, 100]
        assert (rows[0].row_index, rows[0].error_type) == (0, "malformed")
        assert rows[0].error is not None
        assert rows[0].error.startswith("a.parquet, row 1: the file is truncated or corrupt")


def test_corrupt_row_group_keeps_the_rows_before_it(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"prompt": [f"prompt {i}" for i in range(20_000)]}, row_group_size=5_000, use_dictionary=False)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 300] = b"\xff" * 300
    path.write_bytes(bytes(data))
    config = InputConfig(path=[str(path)])
    scanned = scan(list_source(config), config)
    *rows, error = read_rows(scanned.files[0], config, {})
    assert scanned.rows == [20_000], "the footer's count: the damage shows only in reading"
    assert len(rows) >= 5_000
    assert all(row.messages_or_prompt == f"prompt {i}" for i, row in enumerate(rows))
    assert (error.row_index, error.error_type) == (len(rows), "malformed")


def test_empty_files_among_good_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ["a.jsonl", "c.parquet", "d.jsonl.gz", "e.jsonl.zst"]:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    for settings in ({}, {"id_column": "prompt"}):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            rows, scanned = load(InputConfig(path=[str(tmp_path)], **settings))
        assert scanned.rows == [0, 1, 0, 0, 0]
        assert [row.source_file for row in rows] == ["b.jsonl"]
        assert [record.getMessage().count("is empty and gives no rows") for record in caplog.records] == [1] * 4


# --------------------------------------------------------------------------------------------- limits and duplicates


def test_limit_over_several_files(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.jsonl").write_bytes(GOOD + b"\n" + GOOD + GOOD)
    write_parquet(tmp_path / "0.parquet", {"prompt": ["x", "y"]})
    for settings in ({}, {"id_column": "id"}):
        rows, scanned = load(InputConfig(path=[str(tmp_path)], limit=7, **settings))
        assert [(file.name, file.take) for file in scanned.files] == [
            ("0.parquet", 2),
            ("a.jsonl", 3),
            ("b.jsonl", 2),
        ]
        assert len(rows) == 7
        assert (rows[-1].source_file, rows[-1].row_index) == ("b.jsonl", 2)
    assert load(InputConfig(path=[str(tmp_path)], limit=2))[1].rows == [2]
    assert load(InputConfig(path=[str(tmp_path)], limit=99))[1].total == 14


def ids(*values: Any) -> bytes:
    return b"".join(json.dumps({"prompt": "p", "id": value}).encode() + b"\n" for value in values)


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    """Within a file, across files and formats, int 1 and "1"; the first in (file, line) order wins."""
    (tmp_path / "a.jsonl").write_bytes(b"\n" + ids("x", 1, "y", "x") + b"not json\n")
    (tmp_path / "b.jsonl").write_bytes(ids("1", "x", "z", None, None))
    write_parquet(tmp_path / "c.parquet", {"prompt": ["p", "p"], "id": ["w", "y"]})
    write_parquet(tmp_path / "d.parquet", {"prompt": ["p", "p"], "id": ["w", "v"]})
    rows, scanned = load(InputConfig(path=[str(tmp_path)], id_column="id"))
    errors = {row.where: row.error for row in rows if row.error_type == RowErrorType.DUPLICATE_ID}
    assert errors == {
        "a.jsonl, line 5": "a.jsonl, line 5: id 'x' was already used at a.jsonl, line 2",
        "b.jsonl, line 1": "b.jsonl, line 1: id '1' was already used at a.jsonl, line 3",
        "b.jsonl, line 2": "b.jsonl, line 2: id 'x' was already used at a.jsonl, line 2",
        "c.parquet, row 2": "c.parquet, row 2: id 'y' was already used at a.jsonl, line 4",
        "d.parquet, row 1": "d.parquet, row 1: id 'w' was already used at c.parquet, row 1",
    }
    assert scanned.duplicates[("c.parquet", 1)] == ("a.jsonl", 3)
    good = [row.row_id for row in rows if row.error is None]
    assert good == ["x", "1", "y", "z", "w", "v"]
    assert len({row.row_key for row in rows}) == len(rows)


def test_duplicates_beyond_the_limit_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ids("x", "y"))
    (tmp_path / "b.jsonl").write_bytes(ids("z", "x"))
    assert load(InputConfig(path=[str(tmp_path)], id_column="id", limit=3))[1].duplicates == {}
    assert load(InputConfig(path=[str(tmp_path)], id_column="id", limit=4))[1].duplicates == {
        ("b.jsonl", 1): ("a.jsonl", 0)
    }


def test_duplicates_equal_a_plain_search(tmp_path: Path) -> None:
    generator = random.Random(0)
    expected: dict[tuple[str, int], tuple[str, int]] = {}
    first: dict[str, tuple[str, int]] = {}
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        values = [str(generator.randrange(300)) for _ in range(200)]
        (tmp_path / name).write_bytes(ids(*values))
        for index, value in enumerate(values):
            if value in first:
                expected[(name, index)] = first[value]
            else:
                first[value] = (name, index)
    assert load(InputConfig(path=[str(tmp_path)], id_column="id"))[1].duplicates == expected


def test_file_scans_can_be_made_elsewhere_and_merged(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ids("x", "y"))
    (tmp_path / "b.jsonl").write_bytes(ids("x"))
    config = InputConfig(path=[str(tmp_path)], id_column="id")
    files = pickle.loads(pickle.dumps(list_source(config)))
    scans = [pickle.loads(pickle.dumps(source.scan_file(file, config))) for file in files]
    assert all(isinstance(file_scan.ids, np.ndarray) for file_scan in scans)
    assert merge_scans(files, scans, config) == scan(files, config)
    assert merge_scans([], [], config).total == 0


def test_parser_without_a_file() -> None:
    """Rows of a user's own Dataset: the id is a hash of the content, and errors name it."""
    parser = RowParser(InputConfig(path=["unused"]))
    good, bad = (parser.parse(RawRow(-1, values)) for values in ({"prompt": "x"}, {"prompt": 1}))
    assert (good.source_file, good.row_index, len(good.row_id)) == ("", -1, 32)
    assert bad.error == f"row {bad.row_id}: column 'prompt' must be a string, found integer 1"
    assert good.row_id != bad.row_id
