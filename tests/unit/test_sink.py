"""Output shards: named by their rows' keys, whole or not there at all, and one table for every common reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from pipeline.resume import RunFolder
from pipeline.schema import output_schema
from pipeline.sink import (
    WRITTEN_SCHEMA,
    LostFolderError,
    read_columns,
    remove_doubles,
    shard_name,
    shards,
    write_batch,
    write_shard,
)
from pipeline.storage import Place, open_place

KEEP = {"topic": "string", "level": "int64"}
SCHEMA = output_schema(KEEP)


def done_row(key: int, **values: Any) -> dict[str, Any]:
    return {
        "row_id": f"r{key}",
        "row_key": key,
        "source_file": "in.jsonl",
        "row_index": key % 1000,
        "topic": "sea",
        "level": 3,
        "sample_index": 0,
        "text": "hello",
        "token_ids": [1, 2],
        "finish_reason": "stop",
        **values,
    }


def error_row(key: int, **values: Any) -> dict[str, Any]:
    nothing = {"text": None, "token_ids": None, "finish_reason": "error", "error": "no", "error_type": "malformed"}
    return done_row(key, **nothing, **values)


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path))


@pytest.fixture
def data(folder: RunFolder) -> Place:
    return folder.data


@pytest.fixture
def attempt(folder: RunFolder) -> str:
    return folder.claim({"fingerprint": {}})["attempt"]


# ------------------------------------------------------------------------------------------------------------ names


def test_name_is_of_the_keys_alone() -> None:
    reference = shard_name(table_of(done_row(1), done_row(2**64 - 1)))
    assert reference == shard_name(table_of(done_row(2**64 - 1), done_row(1))), "in any order"
    assert reference == shard_name(table_of(error_row(1), done_row(2**64 - 1, text="other"))), "whatever came out"
    chunks = pa.concat_tables([table_of(done_row(1)), table_of(done_row(2**64 - 1))])
    assert reference == shard_name(chunks)


def test_name_differs_for_other_rows_and_samples() -> None:
    tables = [
        table_of(done_row(1), done_row(2)),
        table_of(done_row(1)),
        table_of(done_row(1), done_row(3)),
        table_of(done_row(1, sample_index=1), done_row(2)),
        table_of(done_row(1), done_row(2, sample_index=1)),
        table_of(),
    ]
    names = [shard_name(table) for table in tables]
    assert len(set(names)) == len(tables)
    assert all(name.startswith("part-") and name.endswith(".parquet") for name in names)


def test_name_is_fixed() -> None:
    """Golden: under another name a batch that is tried again would leave its rows twice."""
    assert shard_name(table_of(done_row(1), done_row(2))) == "part-1d5dce86cac87340c8da8da6c17156cc.parquet"


# ---------------------------------------------------------------------------------------------------------- writing


def test_rows_written_twice_are_one_file(data: Place) -> None:
    write_shard(data, table_of(done_row(1, text="first try"), done_row(2)))
    name = write_shard(data, table_of(done_row(2), done_row(1, text="second try")))
    assert [shard.name for shard in shards(data)] == [name]
    texts = {row["row_key"]: row["text"] for row in pq.read_table(data.child(name).path).to_pylist()}
    assert texts == {1: "second try", 2: "hello"}


def test_other_rows_are_another_file(data: Place) -> None:
    names = {write_shard(data, table_of(done_row(key))) for key in (1, 2)}
    assert {shard.name for shard in shards(data)} == names
    assert len(names) == 2


def test_batch_becomes_a_shard_and_a_receipt(folder: RunFolder, attempt: str, data: Place) -> None:
    columns = [*reversed(SCHEMA.names)]
    batch = table_of(done_row(1), error_row(2), error_row(3)).select(columns).append_column("extra", pa.array([1] * 3))
    batch = batch.set_column(columns.index("level"), "level", pa.array([3, None, 3], pa.int32()))
    written = write_batch(batch, folder.place.uri, attempt, KEEP)
    assert written.schema == WRITTEN_SCHEMA
    (shard,) = shards(data)
    assert written.to_pylist() == [{"shard": shard.name, "rows": 3, "failed": 2}]
    assert pq.read_schema(shard.path).equals(SCHEMA), "the columns, their order and types are the schema's"


def test_a_null_identity_is_refused(folder: RunFolder, attempt: str, data: Place) -> None:
    batch = pa.Table.from_pylist([done_row(1, row_id=None)], schema=pa.schema([f.with_nullable(True) for f in SCHEMA]))
    with pytest.raises(ValueError, match="row_id"):
        write_batch(batch, folder.place.uri, attempt, KEEP)
    assert shards(data) == []


def test_no_rows_leave_the_schema(data: Place) -> None:
    write_shard(data, table_of())
    (shard,) = shards(data)
    table = pq.read_table(shard.path)
    assert (table.num_rows, table.schema) == (0, SCHEMA)


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_failed_write_leaves_nothing_to_see(data: Place, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write_shard(data, table_of(done_row(1)))

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pipeline.storage.FIRST_WAIT_S", 0)
    with monkeypatch.context() as broken:
        broken.setattr(os, failing, fail)
        with pytest.raises(OSError, match="No space left"):
            write_shard(data, table_of(done_row(2)))
    assert list(Path(data.path).iterdir()) == [Path(shard.path) for shard in shards(data)], "no leftover"
    assert pads.dataset(data.path, format="parquet").to_table()["row_key"].to_pylist() == [1]
    write_shard(data, table_of(done_row(2)))
    assert len(shards(data)) == 2


def test_shards_are_this_projects_files(data: Place) -> None:
    name = write_shard(data, table_of(done_row(1)))
    for other in ("mine.parquet", "part-notes.txt", f".{name}", f"{name}.crc"):
        data.child(other).write_atomic(b"not a shard")
    assert [shard.name for shard in shards(data)] == [name]
    assert shards(data.child("absent")) == []


# ---------------------------------------------------------------------------------------------------------- reading


@pytest.fixture
def mixed_folder(data: Place) -> Path:
    """A shard without errors, one without values in a kept column, one with errors only, and an empty one."""
    write_shard(data, table_of(done_row(1), done_row(2)))
    write_shard(data, table_of(done_row(3, topic=None, level=None), error_row(4, topic=None, level=None)))
    write_shard(data, table_of(error_row(5)))
    write_shard(data, table_of())
    data.child(".left-by-a-killed-process.tmp").write_atomic(b"half a shard")
    assert len(shards(data)) == 4
    return Path(data.path)


def check_rows(rows: list[dict[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: row["row_key"])
    assert [row["row_key"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["topic"] for row in rows] == ["sea", "sea", None, None, "sea"]
    assert [row["level"] for row in rows] == [3, 3, None, None, 3]
    assert [row["error_type"] for row in rows] == [None, None, None, "malformed", "malformed"]
    assert [None if row["token_ids"] is None else list(row["token_ids"]) for row in rows] == [[1, 2]] * 3 + [None] * 2


def test_pyarrow_reads_a_folder(mixed_folder: Path) -> None:
    for table in (pq.read_table(mixed_folder), pads.dataset(mixed_folder, format="parquet").to_table()):
        assert table.schema.equals(SCHEMA)
        check_rows(table.to_pylist())


def test_pandas_reads_a_folder(mixed_folder: Path) -> None:
    frame = pd.read_parquet(mixed_folder, dtype_backend="pyarrow")
    assert list(frame.columns) == SCHEMA.names
    check_rows(pa.Table.from_pandas(frame, preserve_index=False).to_pylist())
    assert len(pd.read_parquet(mixed_folder)) == 5


def test_duckdb_reads_a_folder(mixed_folder: Path) -> None:
    with duckdb.connect() as connection:
        rows = connection.sql(f"SELECT * FROM read_parquet('{mixed_folder}/*.parquet')")
        assert rows.columns == SCHEMA.names
        check_rows([dict(zip(rows.columns, row, strict=True)) for row in rows.fetchall()])


def test_datasets_reads_a_folder(mixed_folder: Path, tmp_path: Path) -> None:
    loaded = datasets.load_dataset(
        "parquet", data_dir=str(mixed_folder), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.column_names == SCHEMA.names
    check_rows(loaded.to_list())


def test_read_columns(mixed_folder: Path) -> None:
    table = read_columns(open_place(str(mixed_folder)), ["error_type", "row_key"], SCHEMA)
    assert table.schema == pa.schema([SCHEMA.field("error_type"), SCHEMA.field("row_key")])
    assert sorted(table["row_key"].to_pylist()) == [1, 2, 3, 4, 5]
    assert table["error_type"].null_count == 3


def test_read_columns_of_an_empty_folder(data: Place) -> None:
    for _ in range(2):  # absent, then empty
        table = read_columns(data, ["row_key", "topic"], SCHEMA)
        assert (table.num_rows, table.schema) == (0, pa.schema([SCHEMA.field("row_key"), SCHEMA.field("topic")]))
        Path(data.path).mkdir(exist_ok=True)


# --------------------------------------------------------------------------------- starts of a run that overlap


def keys_in(data: Place) -> list[int]:
    return sorted(read_columns(data, ["row_key"], SCHEMA)["row_key"].to_pylist())


def test_a_writer_of_an_older_attempt_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "out"))
    first = folder.claim({"fingerprint": {}})["attempt"]
    write_batch(table_of(done_row(1), done_row(2)), folder.place.uri, first, KEEP)
    second = folder.claim({"fingerprint": {}})["attempt"]
    with pytest.raises(LostFolderError, match="claimed by a later start"):
        write_batch(table_of(done_row(3)), folder.place.uri, first, KEEP)
    write_batch(table_of(done_row(3)), folder.place.uri, second, KEEP)
    assert keys_in(folder.data) == [1, 2, 3]
    third = folder.claim({"fingerprint": {}})["attempt"]  # as overwrite does: claim first, then clear
    folder.clear()
    with pytest.raises(LostFolderError):
        write_batch(table_of(done_row(4)), folder.place.uri, second, KEEP)
    assert (third, keys_in(folder.data)) == (folder.read_run()["attempt"], [])


def test_doubles_are_taken_out_and_nothing_else(data: Place) -> None:
    for keys in ([1, 2, 3], [3, 4], [1, 3], [5]):
        write_shard(data, table_of(*map(done_row, keys)))
    write_shard(data, table_of(done_row(5, sample_index=1)))  # another sample of a row is no double
    assert remove_doubles(data) == 3
    assert keys_in(data) == [1, 2, 3, 4, 5, 5]
    assert remove_doubles(data) == 0
