"""What is known before the job starts: rows per file, the limit over several files, duplicate ids."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prompt_files import GOOD, load, read_lines, write_parquet

from pipeline.config import IdsConfig, InputConfig, parse_config
from pipeline.errors import ConfigError, RowErrorType
from pipeline.parse import ParsedRow, sample_key
from pipeline.scan import Found, Scan, count_owed, merge_scans, owed_rows, scan, scan_file
from pipeline.source import list_source, read_rows


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


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    config = InputConfig(path=[str(tmp_path)])
    files = list_source(config)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pipeline.storage.Place.open_input", refuse)
    with pytest.raises(ConfigError, match=r"input.path: cannot read .*a.jsonl: .*Permission denied"):
        scan(files, config)


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


def test_equal_lines_have_different_keys(tmp_path: Path) -> None:
    """Without ids the line number tells them apart; with ids the second is an error row with its own key."""
    assert len({row.row_key for row in read_lines(tmp_path, GOOD.strip(), GOOD.strip())}) == 2
    same = {"prompt": "p", "id": 1}
    assert len({row.row_key for row in read_lines(tmp_path, same, same, same, id_column="id")}) == 3


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
    scans = [pickle.loads(pickle.dumps(scan_file(file, config))) for file in files]
    assert all(isinstance(file_scan.ids, np.ndarray) for file_scan in scans)
    assert merge_scans(files, scans, config) == scan(files, config)
    assert merge_scans([], [], config).total == 0


def test_owed_rows_are_those_whose_keys_are_not_done(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ids("x", "y", "x", None, "z"))
    config = InputConfig(path=[str(tmp_path)], id_column="id", limit=4)
    rows, scanned = load(config)
    (file,) = scanned.files
    keys = [row.row_key for row in rows]
    for finished in ([], [0], [1, 3], [2], [0, 1, 2, 3]):
        done = np.array(sorted([0, *(keys[i] for i in finished), 2**64 - 1]), np.uint64)
        owed = list(owed_rows(file, config, scanned.duplicates, done, 1))
        assert owed == [row for i, row in enumerate(rows) if i not in finished]
        found = Found()
        list(owed_rows(file, config, scanned.duplicates, done, 3, found))
        assert found == Found(asked=12, owed=12 - len(finished))
        assert count_owed(file, config, scanned.duplicates, done, 1) == len(owed)
    assert count_owed(file, config, scanned.duplicates, np.empty(0, np.uint64), 1) == 4


def test_samples_are_owed_each_for_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ids("x", "y", "x", "z"))
    config = InputConfig(path=[str(tmp_path)], id_column="id", limit=3)
    rows, scanned = load(config)
    (file,) = scanned.files
    keys = [[sample_key(row.row_key, sample) for sample in range(3)] for row in rows]
    assert len({key for row in keys for key in row}) == 9

    def owed(n: int, *done: int) -> list[tuple[int, tuple[int, ...]]]:
        finished = np.array(sorted(done), np.uint64)
        found = list(owed_rows(file, config, scanned.duplicates, finished, n))
        assert count_owed(file, config, scanned.duplicates, finished, n) == sum(len(row.samples) for row in found)
        return [(row.row_index, row.samples) for row in found]

    everything = [(i, (0, 1, 2)) for i in range(3)]
    assert owed(3) == everything, "also of the error row of a repeated id"
    assert owed(3, 17, 2**64 - 1) == everything
    assert owed(3, *keys[0], keys[1][1], keys[2][0], keys[2][2]) == [(1, (0, 2)), (2, (1,))]
    assert owed(3, *(row[0] for row in keys)) == [(i, (1, 2)) for i in range(3)], "a larger n adds samples"
    assert owed(1, *(row[0] for row in keys)) == []


# --------------------------------------------------------------------------------------------- ids.on_duplicate: suffix


def suffixed(tmp_path: Path, **settings: Any) -> tuple[list[ParsedRow], Scan]:
    config = InputConfig(path=[str(tmp_path)], id_column="id", **settings)
    scanned = scan(list_source(config), config, IdsConfig(on_duplicate="suffix"))
    rows = [row for file in scanned.files for row in read_rows(file, config, scanned.duplicates)]
    assert scanned.total == len(rows)
    return rows, scanned


def test_repeated_ids_get_suffixes_in_input_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ids("x", 1, "x", "y") + b"not json\n")
    (tmp_path / "b.jsonl").write_bytes(ids("1", "x", None, "z"))
    write_parquet(tmp_path / "c.parquet", {"prompt": ["p", "p"], "id": ["x", "y"]})
    rows, _ = suffixed(tmp_path)
    good = [row.row_id for row in rows if row.error is None]
    assert good == ["x", "1", "x-2", "y", "1-2", "x-3", "z", "x-4", "y-2"]
    assert [row.error_type for row in rows if row.error] == ["malformed", "missing_field"]
    assert len({row.row_key for row in rows}) == len(rows)
    assert [row.row_id for row in suffixed(tmp_path)[0]] == [row.row_id for row in rows]


def test_a_suffix_never_meets_an_id_that_exists(tmp_path: Path) -> None:
    """Also one that stands later, in another file, or was given a moment ago."""
    (tmp_path / "a.jsonl").write_bytes(ids("x", "x", "x-2", "x-2", "x"))
    (tmp_path / "b.jsonl").write_bytes(ids("x-3", "x-2-2", "x"))
    names = [row.row_id for row in suffixed(tmp_path)[0]]
    assert names == ["x", "x-4", "x-2", "x-2-3", "x-5", "x-3", "x-2-2", "x-6"]
    assert len(set(names)) == len(names)


def test_a_suffixed_rows_key_follows_its_content(tmp_path: Path) -> None:
    def key(prompt: str) -> int:
        lines = [{"prompt": "p", "id": 1}, {"prompt": prompt, "id": 1}]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return suffixed(tmp_path)[0][1].row_key

    assert key("a") == key("a") != key("b")


def test_suffixes_beyond_the_limit_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ids("x", "y", "x", "x-2"))
    assert suffixed(tmp_path, limit=2)[1].duplicates == {}
    assert suffixed(tmp_path, limit=3)[1].duplicates == {("a.jsonl", 2): "x-2"}
    assert suffixed(tmp_path, limit=4)[1].duplicates == {("a.jsonl", 2): "x-3"}


def test_suffixes_need_an_id_column() -> None:
    sections = {"input": {"path": "x"}, "output": {"path": "o"}, "model": {"path": "m"}}
    with pytest.raises(ConfigError, match=r"ids.on_duplicate: suffix needs input.id_column"):
        parse_config({**sections, "ids": {"on_duplicate": "suffix"}})
