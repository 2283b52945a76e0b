"""Using a folder again: whose data it is, what is done, and what may be deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import OutputConfig
from pipeline.errors import ConfigError
from pipeline.resume import REPORT_FILES, RUN_FILE, RunFolder
from pipeline.schema import output_schema
from pipeline.sink import shards, write_shard

SCHEMA = output_schema({})
FINGERPRINT: dict[str, Any] = {
    "model": "folder:abc",
    "dtype": "float32",
    "sampling": {"max_new_tokens": 64, "stop": [], "eos_token_ids": [2]},
    "input": {"path": ["in.jsonl"], "keep_columns": {"topic": "string"}},
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path / "out"))


def output(folder: RunFolder, **settings: Any) -> OutputConfig:
    return OutputConfig(path=folder.place.uri, **settings)


def write_rows(folder: RunFolder, *keys: int, text: str = "hello") -> str:
    rows = [
        {
            "row_id": f"r{key}",
            "row_key": key,
            "source_file": "in.jsonl",
            "row_index": i,
            "sample_index": 0,
            "text": text,
            "finish_reason": "stop",
        }
        for i, key in enumerate(keys)
    ]
    return write_shard(folder.data, pa.Table.from_pylist(rows, schema=SCHEMA))


def refusal(folder: RunFolder, fingerprint: dict[str, Any] = FINGERPRINT, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        folder.check(output(folder, **settings), fingerprint)
    message = str(caught.value)
    assert message.startswith("output.path: ")
    return message


# ------------------------------------------------------------------------------------------------------------ check


def test_fresh_places(folder: RunFolder) -> None:
    folder.check(output(folder), FINGERPRINT)
    Path(folder.data.path).mkdir(parents=True)
    folder.check(output(folder), FINGERPRINT)
    folder.check(output(folder, resume=False), FINGERPRINT)
    (Path(folder.data.path) / "mine.parquet").write_bytes(b"a user's own file")
    folder.check(output(folder), FINGERPRINT)


def test_the_same_run_goes_on(folder: RunFolder) -> None:
    folder.write_run({"fingerprint": FINGERPRINT, "status": "running"})
    folder.check(output(folder), FINGERPRINT)
    write_rows(folder, 1)
    folder.check(output(folder), FINGERPRINT)


def test_another_run_is_refused_with_the_difference(folder: RunFolder) -> None:
    folder.write_run({"fingerprint": FINGERPRINT})
    other = {
        **FINGERPRINT,
        "dtype": "float64",
        "sampling": {**FINGERPRINT["sampling"], "max_new_tokens": 128},
        "slots": 8,
    }
    message = refusal(folder, other)
    assert f"{folder.place.uri} holds another run's data" in message
    assert message.split("\n")[1:] == [
        "  dtype: 'float32' -> 'float64'",
        "  sampling.max_new_tokens: 64 -> 128",
        "  slots: None -> 8",
        "choose another folder or set output.overwrite: true",
    ]
    assert refusal(folder, other, resume=False) == message


def test_shards_without_run_json_are_refused(folder: RunFolder) -> None:
    write_rows(folder, 1)
    message = refusal(folder)
    assert "holds shards but there is no run.json" in message
    assert "output.overwrite: true" in message


def test_resume_false_refuses_data_alone(folder: RunFolder) -> None:
    folder.write_run({"fingerprint": FINGERPRINT})
    folder.check(output(folder, resume=False), FINGERPRINT)
    write_rows(folder, 1)
    message = refusal(folder, resume=False)
    assert "holds this run's data already" in message
    assert "output.resume: true to continue it or output.overwrite: true" in message


def test_overwrite_passes_over_any_run_of_this_project(folder: RunFolder) -> None:
    write_rows(folder, 1)
    folder.check(output(folder, overwrite=True), FINGERPRINT)
    folder.write_run({"fingerprint": {"model": "another"}})
    folder.check(output(folder, overwrite=True), FINGERPRINT)


def test_overwrite_does_not_pass_over_what_others_wrote(folder: RunFolder) -> None:
    folder.place.child("report.html").write_atomic(b"mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"report\.html and no run\.json"):
            folder.check(output(folder, overwrite=overwrite), FINGERPRINT)
    folder.place.child(RUN_FILE).write_atomic(b"[]")
    with pytest.raises(ConfigError, match="move it away"):
        folder.check(output(folder, overwrite=True), FINGERPRINT)


def test_a_place_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data").write_text("x")
    for place in ("file", "file/below", "out"):
        folder = RunFolder(str(tmp_path / place))
        with pytest.raises(ConfigError, match=r"^output\.path: "):
            folder.check(output(folder), FINGERPRINT)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b'{"fingerprint": ', b"[]", b"null", b'"text"', b"{}", b'{"fingerprint": 3}']
)
def test_invalid_run_json(folder: RunFolder, content: bytes) -> None:
    folder.place.child(RUN_FILE).write_atomic(content)
    message = refusal(folder)
    assert f"{folder.place.uri}/run.json is not " in message
    assert "move it away" in message


def test_run_json_round_trip(folder: RunFolder) -> None:
    assert folder.read_run() is None
    run = {"fingerprint": FINGERPRINT, "name": "grün", "counts": {"rows": 2**63}}
    folder.write_run(run)
    assert folder.read_run() == run
    text = Path(folder.place.path, RUN_FILE).read_text(encoding="utf-8")
    assert "grün" in text
    assert json.loads(text) == run


# ------------------------------------------------------------------------------------------------------------ clear


def test_clear_deletes_what_the_project_wrote_and_nothing_else(folder: RunFolder) -> None:
    folder.clear()  # of an absent folder: nothing to do
    write_rows(folder, 1)
    write_rows(folder, 2)
    write_shard(folder.retried, SCHEMA.empty_table())
    folder.write_run({"fingerprint": FINGERPRINT})
    folder.write_report(b"{}", b"<html>")
    root, data = Path(folder.place.path), Path(folder.data.path)
    assert [(root / name).read_bytes() for name in REPORT_FILES] == [b"{}", b"<html>"]
    foreign = [
        root / "notes.txt",
        data / "mine.parquet",
        data / "part-00000-x.parquet",
        data / "part-sub" / "part-1.parquet",
    ]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    folder.clear()
    assert sorted(file for file in root.rglob("*") if file.is_file()) == sorted([*foreign, root / RUN_FILE])


# ------------------------------------------------------------------------------------------------------------- tidy


def test_tidy_deletes_what_killed_writers_left_and_nothing_else(folder: RunFolder) -> None:
    folder.tidy()  # of an absent folder: nothing to do
    shard = write_rows(folder, 1)
    root, data, retried = (Path(place.path) for place in (folder.place, folder.data, folder.retried))
    retried.mkdir()
    left = [root / f".{'0' * 32}.tmp", data / f".{'a1' * 16}.tmp", retried / f".{'f' * 32}.tmp"]
    foreign = [
        root / ".notes.tmp",
        data / f"{'0' * 32}.tmp",
        data / f".{'0' * 32}.tmp.bak",
        data / ".git" / left[0].name,
    ]
    for file in [*left, *foreign]:
        file.parent.mkdir(exist_ok=True)
        file.write_text("half")
    folder.tidy()
    assert sorted(file for file in root.rglob("*") if file.is_file()) == sorted([*foreign, data / shard])


# ---------------------------------------------------------------------------------------------------- finished keys


def test_finished_keys_are_sorted_and_unique(folder: RunFolder) -> None:
    assert folder.finished_keys().dtype == np.uint64
    assert len(folder.finished_keys()) == 0
    write_rows(folder, 2**64 - 1, 5)
    write_rows(folder, 7, 5, 1)
    write_shard(folder.data, SCHEMA.empty_table())
    keys = folder.finished_keys()
    assert keys.dtype == np.uint64
    assert keys.tolist() == [1, 5, 7, 2**64 - 1]


def test_finished_keys_read_that_column_only(folder: RunFolder) -> None:
    name = write_rows(folder, 1, 2, 3, text="a text " * 100)
    path = Path(folder.data.path, name)
    with pq.ParquetFile(path) as shard:
        group = shard.metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    damaged = bytearray(path.read_bytes())
    start = columns["text"].dictionary_page_offset or columns["text"].data_page_offset
    damaged[start : start + columns["text"].total_compressed_size] = b"\xff" * columns["text"].total_compressed_size
    path.write_bytes(damaged)
    with pytest.raises(OSError):  # noqa: PT011
        pq.read_table(path)
    assert folder.finished_keys().tolist() == [1, 2, 3]


def test_finished_keys_ignore_other_files(folder: RunFolder) -> None:
    write_rows(folder, 1)
    pq.write_table(pa.table({"row_key": pa.array([9], pa.uint64())}), Path(folder.data.path, "mine.parquet"))
    assert folder.finished_keys().tolist() == [1]
    assert len(shards(folder.data)) == 1
