"""Output shards: named by their rows' keys, whole or not there at all, and one table for every common reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

from pipeline.resume import RunFolder
from pipeline.schema import output_schema
from pipeline.sink import (
    WRITTEN_SCHEMA,
    Keys,
    LostFolderError,
    among,
    doubled,
    put_in,
    read_shards,
    remove_doubles,
    shard_name,
    shards,
    write_batch,
    write_shard,
)
from pipeline.storage import Place, open_place

KEEP = {"topic": "string", "level": "int64"}
SCHEMA = output_schema(KEEP)
NONE = np.empty(0, np.uint64)


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
    written = write_batch(batch, folder.place.uri, attempt, KEEP, NONE)
    assert written.schema == WRITTEN_SCHEMA
    (shard,) = shards(data)
    assert written.to_pylist() == [{"shard": shard.name, "rows": 3, "failed": 2}]
    assert pq.read_schema(shard.path).equals(SCHEMA), "the columns, their order and types are the schema's"


def test_a_null_identity_is_refused(folder: RunFolder, attempt: str, data: Place) -> None:
    batch = pa.Table.from_pylist([done_row(1, row_id=None)], schema=pa.schema([f.with_nullable(True) for f in SCHEMA]))
    with pytest.raises(ValueError, match="row_id"):
        write_batch(batch, folder.place.uri, attempt, KEEP, NONE)
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


def test_shards_are_read_in_order_of_name_with_the_asked_columns(mixed_folder: Path) -> None:
    read = list(read_shards(open_place(str(mixed_folder)), ["error_type", "row_key"]))
    assert [shard.name for shard, _ in read] == sorted(file.name for file in mixed_folder.glob("part-*"))
    assert {name for _, table in read for name in table.schema.names} == {"row_key", "error_type"}
    assert sorted(key for _, table in read for key in table["row_key"].to_pylist()) == [1, 2, 3, 4, 5]
    assert sum(table["error_type"].null_count for _, table in read) == 3
    assert list(read_shards(open_place(str(mixed_folder / "absent")), ["row_key"])) == []


def test_keys_are_sorted_and_doubles_found() -> None:
    keys = Keys()
    assert keys.sorted().tolist() == []
    for values in ([2**64 - 1, 5], [], [7, 5, 5, 1, 7]):
        keys.add(pa.chunked_array([pa.array(values, pa.uint64())]))
    assert keys.sorted().dtype == np.uint64
    assert keys.sorted().tolist() == [1, 5, 5, 5, 7, 7, 2**64 - 1]
    assert doubled(keys.sorted()).tolist() == [5, 7]
    assert doubled(NONE).tolist() == []
    wanted = np.array([0, 1, 6, 7, 2**64 - 1], np.uint64)
    assert among(keys.sorted(), wanted).tolist() == [False, True, False, True, True]
    assert among(NONE, wanted).tolist() == [False] * 5


# --------------------------------------------------------------------------------- starts of a run that overlap


def keys_in(data: Place) -> list[int]:
    return sorted(key for _, table in read_shards(data, ["row_key"]) for key in table["row_key"].to_pylist())


def test_a_writer_of_an_older_attempt_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "out"))
    first = folder.claim({"fingerprint": {}})["attempt"]
    write_batch(table_of(done_row(1), done_row(2)), folder.place.uri, first, KEEP, NONE)
    second = folder.claim({"fingerprint": {}})["attempt"]
    with pytest.raises(LostFolderError, match="claimed by a later start"):
        write_batch(table_of(done_row(3)), folder.place.uri, first, KEEP, NONE)
    write_batch(table_of(done_row(3)), folder.place.uri, second, KEEP, NONE)
    assert keys_in(folder.data) == [1, 2, 3]
    third = folder.claim({"fingerprint": {}})["attempt"]  # as overwrite does: claim first, then clear
    folder.clear()
    with pytest.raises(LostFolderError):
        write_batch(table_of(done_row(4)), folder.place.uri, second, KEEP, NONE)
    assert (third, keys_in(folder.data)) == (folder.read_run()["attempt"], [])


def test_doubles_are_taken_out_and_nothing_else(data: Place) -> None:
    for keys in ([1, 2, 3], [3, 4], [1, 3], [5]):
        write_shard(data, table_of(*map(done_row, keys)))
    write_shard(data, table_of(done_row(5, sample_index=1)))  # another sample of a row is no double
    twice = np.array([1, 3, 5], np.uint64)
    assert remove_doubles(data, twice) == 3
    assert keys_in(data) == [1, 2, 3, 4, 5, 5]
    assert remove_doubles(data, twice) == 0


# ------------------------------------------------------------------------------------------ rows decoded once more


def texts(folder: RunFolder) -> dict[int, str | None]:
    rows = [row for _, table in read_shards(folder.data, ["row_key", "text"]) for row in table.to_pylist()]
    assert len({row["row_key"] for row in rows}) == len(rows), "each row once"
    return {row["row_key"]: row["text"] for row in rows}


@pytest.fixture
def with_errors(folder: RunFolder, data: Place) -> RunFolder:
    """Three error rows in two shards."""
    write_shard(data, table_of(done_row(1), error_row(2), error_row(3)))
    write_shard(data, table_of(error_row(4), done_row(5)))
    return folder


def again(*rows: dict[str, Any]) -> pa.Table:
    return table_of(*({**row, "text": row["text"] and "again"} for row in rows))


def test_rows_decoded_again_wait_and_then_take_their_places(with_errors: RunFolder, attempt: str) -> None:
    before = texts(with_errors)
    names = [shard.name for shard in shards(with_errors.data)]
    batch = again(done_row(2), done_row(4), done_row(6), error_row(3))
    receipts = write_batch(batch, with_errors.place.uri, attempt, KEEP, np.array([2, 3, 4], np.uint64))
    assert sorted((row["rows"], row["failed"]) for row in receipts.to_pylist()) == [(1, 0), (3, 1)]
    assert texts(with_errors) == {**before, 6: "again"}, "the new row is there; the others wait"
    assert put_in(with_errors.place) == 3
    assert texts(with_errors) == {**before, 2: "again", 4: "again", 6: "again"}
    assert with_errors.failed_keys().tolist() == [3], "it failed again"
    assert set(names) < {shard.name for shard in shards(with_errors.data)}, "same keys, same names"
    assert shards(with_errors.retried) == []
    assert put_in(with_errors.place) == 0


def test_a_good_row_is_not_exchanged(with_errors: RunFolder) -> None:
    """What a late writer of an older attempt leaves there must not undo anything."""
    write_shard(with_errors.retried, again(done_row(1), error_row(5), done_row(2), done_row(9)))
    assert put_in(with_errors.place) == 1
    assert texts(with_errors) == {1: "hello", 2: "again", 3: None, 4: None, 5: "hello"}


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_a_kill_while_rows_are_put_in(with_errors: RunFolder, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """After so many atomic steps (a shard replaced, a waiting one deleted) nothing more happens; then a new start."""
    write_shard(with_errors.retried, again(done_row(2), done_row(3), done_row(4)))
    steps = iter(range(writes))

    def only_so_many(step: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return step(*arguments)

        return wrapped

    with monkeypatch.context() as killed:
        for name in ("write_atomic", "delete"):
            killed.setattr(Place, name, only_so_many(getattr(Place, name)))
        if writes < 3:
            with pytest.raises(KeyboardInterrupt):
                put_in(with_errors.place)
            assert [shard.name for shard in shards(with_errors.retried)] != []
        else:
            assert put_in(with_errors.place) == 3
    seen = texts(with_errors)
    assert seen.keys() == {1, 2, 3, 4, 5}, "no row is lost or there twice"
    assert ("again" in seen.values()) == (writes > 0)
    with_errors.tidy()
    assert texts(with_errors) == {1: "hello", 2: "again", 3: "again", 4: "again", 5: "hello"}
    assert shards(with_errors.retried) == []
