"""Fifty damaged files through the whole job: every row that the readers give is one row of the output."""

from __future__ import annotations

from fuzz_readers import damaged_file
from helpers import Command

from pipeline.config import InputConfig
from pipeline.scan import scan
from pipeline.source import list_source, read_rows


def test_damaged_files_through_the_job(command: Command) -> None:
    folder = command.work / "damaged"
    folder.mkdir()
    for number in range(50):
        suffix, content = damaged_file(number, rows=9)
        (folder / f"{number:02d}.{suffix}").write_bytes(content)
    config = InputConfig(path=[str(folder)], prompt_column="prompt", id_column="id")
    scanned = scan(list_source(config), config)
    want = [row for file in scanned.files for row in read_rows(file, config, scanned.duplicates)]
    result = command(input__path=str(folder), sampling__max_new_tokens=2, output__rows_per_file=200)
    assert result.code == 0
    done = sorted(result.table.to_pylist(), key=lambda row: (row["source_file"], row["row_index"]))
    want.sort(key=lambda row: (row.source_file, row.row_index))
    assert [row["row_key"] for row in done] == [row.row_key for row in want]
    assert [row["error_type"] for row in done] == [row.error_type for row in want]
    assert result.json("run.json")["counts"]["input_rows"] == len(want)
