"""A run that stops anywhere continues with the same command: no row lost, doubled or changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from common import ROOT
from helpers import Command, Result, prompts, write_jsonl


def tokens(result: Result) -> dict[str, list[int]]:
    return {row["row_id"]: row["token_ids"] for row in result.rows}


def test_the_rest_is_done_and_nothing_twice(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(25))
    whole = command(output__path=str(command.work / "whole"))
    first = command("--limit", "12")
    before = {file.name: file.stat().st_mtime_ns for file in (first.folder / "data").iterdir()}
    assert len(first.rows) == 12
    # Method, slots and cluster may change: in fp64 they do not change tokens.
    second = command(decoder__method="ar", engine__slots=2)
    assert second.code == 0
    assert len(second.rows) == 25
    assert tokens(second) == tokens(whole)
    after = {file.name: file.stat().st_mtime_ns for file in (first.folder / "data").iterdir()}
    assert before.items() <= after.items()
    assert second.json("run.json")["counts"]["already_done"] == 12
    assert {row["method"] for row in second.rows} == {"esp", "ar"}
    again = command()
    assert again.code == 0
    assert tokens(again) == tokens(whole)


def test_an_edited_prompt_is_a_new_row(command: Command) -> None:
    rows = prompts(4)
    write_jsonl(command.work / "in.jsonl", rows)
    command()
    rows[2]["prompt"] = "Something else"
    write_jsonl(command.work / "in.jsonl", rows)
    result = command()
    assert len([row for row in result.rows if row["row_id"] == "row-2"]) == 2
    assert len(result.rows) == 5
    assert "1 rows in" in result.err
    assert result.json("run.json")["counts"]["not_in_input"] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling__seed": 5}, "sampling.seed: 0 -> 5"),
        ({"model__dtype": "float32"}, "dtype: 'float64' -> 'float32'"),
        ({"output__resume": False}, "output.resume: true"),
    ],
)
def test_another_runs_place_is_refused(command: Command, settings: dict[str, object], words: str) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(3))
    first = command()
    written = sorted(first.folder.rglob("*"))
    refused = command(**settings)
    assert refused.code == 2
    assert words in refused.err
    assert sorted(first.folder.rglob("*")) == written
    replaced = command(output__overwrite=True, **settings)
    assert replaced.code == 0
    assert len(replaced.rows) == 3


@pytest.mark.timeout(300)
def test_sigkill_of_the_driver_loses_and_doubles_nothing(command: Command) -> None:
    """The command in a process of its own, killed with its Ray as soon as a shard is there, then run again."""
    write_jsonl(command.work / "in.jsonl", prompts(120))
    whole = command(output__path=str(command.work / "whole"), output__rows_per_file=5)
    command("--print-config", output__rows_per_file=5)  # writes config.yaml
    arguments = [sys.executable, "-m", "jobs.generate", "--config", str(command.work / "config.yaml")]
    process = subprocess.Popen(
        arguments, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    data = command.work / "out" / "data"
    deadline = time.monotonic() + 120
    while not list(data.glob("part-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = sum(pq.read_metadata(shard).num_rows for shard in data.glob("part-*"))
    assert 0 < left < 120, "killed in mid-run"
    result = command(output__rows_per_file=5)
    assert result.code == 0
    assert len(result.rows) == 120
    assert tokens(result) == tokens(whole)
    assert result.json("run.json")["counts"]["already_done"] >= left


def test_leftovers_of_a_broken_write_are_not_read(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(3))
    data: Path = command.work / "out" / "data"
    data.mkdir(parents=True)
    (data / ".part-abc.parquet.1234.tmp").write_bytes(b"half a shard")
    result = command()
    assert result.code == 0
    assert len(result.rows) == 3
