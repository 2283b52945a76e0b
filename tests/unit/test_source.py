"""Prompt files to rows: listing, names, formats, JSONL and Parquet, and what is corrupt as one error row."""

import gzip
import itertools
import json
import logging
import random
import tracemalloc
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from moto.server import ThreadedMotoServer
from prompt_files import GOOD, load, read_lines, write_parquet

from pipeline import lines, source
from pipeline.config import InputConfig
from pipeline.errors import ConfigError, RowErrorType
from pipeline.parse import ParsedRow
from pipeline.scan import scan
from pipeline.source import canonical_paths, list_source, read_rows
from pipeline.storage import StorageError

# -------------------------------------------------------------------------------------------------------------- listing


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
    assert names(tmp_path, "in/*/*.ndjson") == ["sub/b.ndjson"]
    assert names(tmp_path, "in/sub/b.ndjson") == ["b.ndjson"]


def test_names_of_several_entries_are_absolute(tmp_path: Path) -> None:
    make_files(tmp_path, "x/one/p.jsonl", "x/two/p.jsonl", "y/other.jsonl")
    expected = [f"{tmp_path}/y/other.jsonl", f"{tmp_path}/x/one/p.jsonl", f"{tmp_path}/x/two/p.jsonl"]
    assert names(tmp_path, "y/other.jsonl", "x/one", "x/two") == expected, "in the order of input.path"
    assert names(tmp_path, "y/../y/other.jsonl", "x/./*", "absent/../x/two") == expected


@pytest.mark.parametrize("paths", [["in"], ["in", "more.jsonl"]])
def test_a_name_does_not_depend_on_other_files(tmp_path: Path, paths: list[str]) -> None:
    make_files(tmp_path, "in/a/p.jsonl", "more.jsonl")
    before = names(tmp_path, *paths)
    make_files(tmp_path, "in/b/p.jsonl", "in/p.jsonl")
    assert set(before) < set(names(tmp_path, *paths))


def test_output_below_the_input_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path, "in/a.jsonl", "in/out/data/x.jsonl", "in/out/run.txt", "in/outer/b.jsonl", "in/out.jsonl")
    monkeypatch.chdir(tmp_path)
    config = InputConfig(path=["in"])
    for exclude in ("in/out", "./in/out/", f"{tmp_path}/in/../in/out"):
        assert [file.name for file in list_source(config, exclude)] == ["a.jsonl", "out.jsonl", "outer/b.jsonl"]
    assert len(list_source(config.model_copy(update={"format": "jsonl"}), "elsewhere")) == 5
    assert [file.name for file in list_source(InputConfig(path=["in/out*"]), "in/out")] == [
        "out.jsonl",
        "outer/b.jsonl",
    ]
    for exclude in ("in", ".", "/"):
        with pytest.raises(ConfigError, match=r"nothing matches in outside the job's own output at"):
            list_source(config, exclude)


def test_canonical_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    spellings = ["in/../a", f"{tmp_path}/a/", "~/a", "./x/**/*.jsonl", "s3://bucket/a/*.jsonl"]
    assert canonical_paths(InputConfig(path=spellings)) == [
        *[f"{tmp_path}/a"] * 3,
        f"{tmp_path}/x/**/*.jsonl",
        "s3://bucket/a/*.jsonl",
    ]


def test_file_listed_twice_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_files(tmp_path, "in/a.jsonl", "in/b.jsonl")
    assert names(tmp_path, "in", "in/a.jsonl") == [f"{tmp_path}/in/a.jsonl", f"{tmp_path}/in/b.jsonl"]
    assert "listed twice" in caplog.text


def test_formats(tmp_path: Path) -> None:
    suffixes = ["JSONL", "ndjson.zst", "json", "jsonl.gz", "parquet", "arrow"]
    make_files(tmp_path, *(f"in/{i}.{s}" for i, s in enumerate(suffixes)))
    files = list_source(InputConfig(path=[str(tmp_path / "in")]))
    assert [file.format for file in files] == ["jsonl"] * 4 + ["parquet", "arrow"]
    assert [file.size for file in files] == [len(GOOD)] * 6
    assert all(f.format == "jsonl" for f in list_source(InputConfig(path=[str(tmp_path / "in")], format="jsonl")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.csv", r"input.path: rows.csv: unknown format.*convert it.*from_csv\('FILE'\).to_parquet"),
        ("rows.tsv.gz", r"input.path: rows.tsv.gz: unknown format.*convert it.*from_csv\('FILE', sep='\\t'\)"),
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


def test_unreadable_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

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
    rows, _ = load(InputConfig(path=["s3://prompts/set/b", "s3://prompts/set/*.gz"]))
    assert [row.source_file for row in rows] == ["prompts/set/b/c.parquet", *["prompts/set/a.jsonl.gz"] * 2]
    (file,) = list_source(InputConfig(path=["s3://prompts/set"]), exclude="s3://prompts/set/b/")
    assert file.name == "a.jsonl.gz"


# ---------------------------------------------------------------------------------------------------------- JSONL files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a', "not valid JSON: Unterminated string"),
        ('{"prompt": "a",}', "not valid JSON"),
        ("[1, 2]", "a JSON array; expected one JSON object a line"),
        ("  [", "a JSON array; expected one JSON object a line"),
        ("5", "expected one JSON object a line, found integer"),
        ("null", "expected one JSON object a line, found null"),
        ('{"prompt": NaN}', "NaN is not a JSON value"),
        ('{"prompt": "a", "x": -Infinity}', "-Infinity is not a JSON value"),
        ('{"prompt": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "not valid UTF-8: byte 0xff at byte 13"),
    ],
)
def test_broken_line_is_one_error_row_and_leaves_the_others(tmp_path: Path, line: str | bytes, message: str) -> None:
    before, bad, after = read_lines(tmp_path, GOOD.strip(), line, GOOD.strip())
    assert bad.error is not None
    assert bad.error.startswith("prompts.jsonl, line 2: ")
    assert message in bad.error
    assert bad.error_type == RowErrorType.MALFORMED
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


def test_surrogates(tmp_path: Path) -> None:
    pair, lone = read_lines(tmp_path, r'{"prompt": "\ud83d\ude00"}', r'{"prompt": "a \ud800 b"}')
    assert pair.messages_or_prompt == "\U0001f600"
    assert lone.error_type == RowErrorType.INVALID_TEXT


def test_file_that_is_one_json_array(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("\ufeff\n" + json.dumps([{"prompt": "a"}], indent=1))
    first, *_ = load(InputConfig(path=[str(tmp_path)]))[0]
    assert first.error is not None
    assert first.error.startswith("p.json, line 2: a JSON array; expected one JSON object a line")


def test_long_lines_are_not_dumped(tmp_path: Path) -> None:
    long = "x" * 10_000
    for row in read_lines(tmp_path, f'{{"prompt": "{long}', f'{{"prompt": "a{long}" "b{long}"}}'):
        assert row.error is not None
        assert row.error.count("x") < 120


def test_malformed_line_key_follows_its_bytes(tmp_path: Path) -> None:
    first, second = (read_lines(tmp_path, line)[0].row_key for line in ('{"prompt": 1', '{"prompt": 2'))
    assert first != second
    assert first == read_lines(tmp_path, '{"prompt": 1')[0].row_key


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


def test_a_line_far_too_long_is_never_held(tmp_path: Path) -> None:
    """200 MB of one line: an error row in a part of its memory, and the next line goes on."""
    piece = b"x" * 1_000_000
    with (tmp_path / "p.jsonl").open("wb") as file:
        file.write(GOOD + b'{"prompt": "')
        for _ in range(200):
            file.write(piece)
        file.write(b'"}\n' + GOOD)
    tracemalloc.start()
    (before, long, after), _ = load(InputConfig(path=[str(tmp_path)]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (before.messages_or_prompt, after.messages_or_prompt) == ("hello", "hello")
    assert long.error == "p.jsonl, line 2: the line is longer than 64 MiB; shorten or split it"
    assert peak < 160_000_000


def test_the_key_of_a_line_too_long_follows_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    keys = []
    for end in ("a", "b", "a"):
        (row,) = read_lines(tmp_path, "[" * (1 << 20) + end)
        assert row.error is not None
        assert "longer than 1 MiB" in row.error
        keys.append(row.row_key)
    assert keys[0] == keys[2] != keys[1]
    (row,) = read_lines(tmp_path, json.dumps({"prompt": "x" * 1_000_000}))
    assert row.error is None


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_in_utf_16_is_one_clear_error(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "p.jsonl").write_bytes('{"prompt": "a"}\n{"prompt": "b"}\n'.encode(encoding))
    (row,), _ = load(InputConfig(path=[str(tmp_path)]))
    assert row.error_type == RowErrorType.MALFORMED
    assert row.error is not None
    assert "the file is not UTF-8 but UTF-16 or UTF-32; convert it (iconv" in row.error


def test_null_bytes(tmp_path: Path) -> None:
    """Raw ones are no JSON (a crash leaves such tails); an escaped one is a character like others."""
    given = [GOOD.strip(), b'{"prompt": "a\0b"}', b"\0" * 50, rb'{"prompt": "a\u0000b"}']
    rows = read_lines(tmp_path, *given)
    assert [row.error_type for row in rows] == [None, "malformed", "malformed", None]
    assert rows[3].messages_or_prompt == "a\0b"


def test_what_a_broken_line_holds_is_not_logged(tmp_path: Path) -> None:
    (row,) = read_lines(tmp_path, '{"prompt": "a secret", }')
    assert row.error is not None
    assert row.logged is not None
    assert "secret" in row.error
    assert "secret" not in row.logged
    assert row.logged.startswith("prompts.jsonl, line 1: not valid JSON")


# -------------------------------------------------------------------------------------------------------- Parquet files


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
    assert rows[0].error == "p.parquet, row 1: no column 'prompt' (input.prompt_column); the row has text"
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
    columns = {
        "time": pa.array([0], pa.timestamp("us", "UTC")),
        "day": pa.array([0], pa.date32()),
        "price": pa.array([Decimal("1.50")]),
        "rate": [float("nan")],
        "bytes": [b"x"],
    }
    (row,) = read_parquet(tmp_path, {"prompt": ["x"], **columns}, keep_columns=list(columns))
    assert row.kept == {
        "time": "1970-01-01T00:00:00+00:00",
        "day": "1970-01-01",
        "price": "1.50",
        "rate": "NaN",
        "bytes": None,
    }
    assert row.error_type == "wrong_type"
    assert row.error is not None
    assert "column 'bytes' must be a string, a date, a decimal or a JSON value, found bytes" in row.error


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


def test_corrupt_row_group_is_one_error_row_that_names_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"prompt": [f"prompt {i}" for i in range(20_000)]}, row_group_size=5_000, use_dictionary=False)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 300] = b"\xff" * 300
    path.write_bytes(bytes(data))
    rows, scanned = load(InputConfig(path=[str(path)]))
    (error,) = [row for row in rows if row.error]
    told = f"a.parquet, row {error.row_index + 1}: rows {error.row_index + 1} to 15000 (row group 3) cannot be read"
    assert str(error.error).startswith(told)
    assert 10_000 <= error.row_index < 15_000
    assert error.error_type == "malformed"
    lost = range(error.row_index, 15_000)
    done = [row for row in rows if not row.error]
    assert [row.row_index for row in done] == [i for i in range(20_000) if i not in lost], "the next group goes on"
    assert all(row.messages_or_prompt == f"prompt {row.row_index}" for row in done)
    ids = InputConfig(path=[str(path)], id_column="id")  # a column that is not there: the prompt's damage counts too
    assert scan(scanned.files, ids).rows == scanned.rows == [len(rows)]


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


# ---------------------------------------------------------------------------------------------------------- Arrow files


def write_arrow(path: Path, table: pa.Table, rows_per_batch: int, *, stream: bool = True) -> None:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_rows(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"prompt": [f"p{i}" for i in range(1000)], "unread": [b"x"] * 1000, "id": range(1000)})
    write_arrow(tmp_path / "p.arrow", table, 300, stream=stream)
    for settings in ({}, {"id_column": "id"}, {"prompt_column": "absent"}, {"limit": 700}):
        rows, _ = load(InputConfig(path=[str(tmp_path)], **settings))
        assert [row.row_index for row in rows] == list(range(settings.get("limit", 1000)))
    assert [row.messages_or_prompt for row in rows] == [f"p{i}" for i in range(700)]
    assert rows[0].row_id == "p.arrow:1"


def test_arrow_on_s3(tmp_path: Path, s3: Any) -> None:
    write_arrow(tmp_path / "p.arrow", pa.table({"prompt": ["a", "b"]}), 1)
    s3.create_bucket(Bucket="prompts")
    s3.put_object(Bucket="prompts", Key="p.arrow", Body=(tmp_path / "p.arrow").read_bytes())
    assert [row.messages_or_prompt for row in load(InputConfig(path=["s3://prompts/p.arrow"]))[0]] == ["a", "b"]


def test_wrong_offsets_in_an_arrow_file_are_no_text(tmp_path: Path) -> None:
    """Arrow trusts what it reads: an offset outside its buffer would show other memory, or end the process."""
    write_arrow(tmp_path / "p.arrow", pa.table({"prompt": [f"prompt {i}" for i in range(600)]}), 300)
    data = (tmp_path / "p.arrow").read_bytes()
    good = (np.arange(0, 5, dtype=np.int32) * 8).tobytes()  # the first offsets of the first batch
    at = data.index(good)
    (tmp_path / "p.arrow").write_bytes(data[: at + 8] + np.int32(2**30).tobytes() + data[at + 12 :])
    (error,) = load(InputConfig(path=[str(tmp_path)]))[0]
    assert str(error.error).startswith("p.arrow, row 1: the file is truncated or corrupt from here on")


def test_a_truncated_arrow_file_keeps_its_first_batches(tmp_path: Path) -> None:
    write_arrow(tmp_path / "p.arrow", pa.table({"prompt": [f"prompt {i}" for i in range(600)]}), 100)
    data = (tmp_path / "p.arrow").read_bytes()
    (tmp_path / "p.arrow").write_bytes(data[: len(data) * 2 // 3])
    *rows, error = load(InputConfig(path=[str(tmp_path)]))[0]
    assert len(rows) in (300, 400)
    assert (error.row_index, error.error_type) == (len(rows), "malformed")
