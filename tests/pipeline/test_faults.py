"""What goes wrong with rows and processes, for real: a SIGKILL, an engine that breaks, a model that does not load."""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from fake_decoder import FakeDecoder, die, events
from fragile_decoder import BAD, FragileDecoder
from helpers import Command, Result, prompts, write_jsonl

FAKE = {"cluster__num_cpus": 0.5, "output__rows_per_file": 20}


def tokens(result: Result) -> dict[str, list[int] | None]:
    return {row["row_id"]: row["token_ids"] for row in result.rows}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "poison", [(50, 51), pytest.param((30, 150), marks=pytest.mark.slow)], ids=["one batch", "apart"]
)
def test_rows_that_kill_their_process_become_error_rows(command: Command, log: Path, poison: tuple[int, ...]) -> None:
    """Issue: 200 rows, two of which kill: the job ends by itself with 198 outputs."""
    rows = prompts(200)
    write_jsonl(command.work / "in.jsonl", rows)
    whole = command(decoder=partial(FakeDecoder, log=log), output__path=str(command.work / "whole"), **FAKE)
    assert len(whole.rows) == 200
    for file in log.iterdir():
        file.unlink()
    for row in poison:
        rows[row]["prompt"] += " poison"
    write_jsonl(command.work / "in.jsonl", rows)

    result = command(decoder=partial(FakeDecoder, log=log), **FAKE)

    assert result.code == 0
    killed = {f"row-{row}" for row in poison}
    assert {row["row_id"] for row in result.rows if row["error_type"] == "crash"} == killed
    for row in result.rows:
        if row["row_id"] in killed:
            assert f"in.jsonl, row {row['row_id']}: the process that decodes it died 2 times" in row["error"]
    assert {key: got for key, got in tokens(result).items() if key not in killed} == {
        key: want for key, want in tokens(whole).items() if key not in killed
    }
    begun = Counter(event.row for event in events(log) if event.kind == "began")
    deaths = len(list(log.iterdir())) - 1
    again = sum(begun.values()) - len(begun)
    print(f"{deaths} deaths, {again} decodings of {len(begun)} rows begun again")
    assert all(begun[f"{row}#0"] in (2, 3) for row in killed), "twice alone, and once before at the most"
    assert deaths == 2 * len(poison) + 1 or len(poison) * 3 == deaths


def test_a_model_that_does_not_load_ends_the_job(command: Command, tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(5))
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    result = command(model__path=str(broken))
    assert result.code == 1
    error = result.err.strip().splitlines()[-1]
    assert f"model.path {broken}: SafetensorError" in error
    assert "the same command continues" in error
    assert result.json("run.json")["status"] == "broken"


@pytest.mark.slow
def test_processes_that_die_at_start_end_the_job(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(5))
    result = command(decoder=die, **FAKE)
    assert result.code == 1
    assert "killed 5 times in a row and decoded no row in between" in result.err.strip().splitlines()[-1]
    assert result.json("run.json")["status"] == "broken"


def test_a_broken_engine_is_rebuilt_and_a_failing_row_is_not_taken_for_one(command: Command, log: Path) -> None:
    rows = prompts(30)
    write_jsonl(command.work / "in.jsonl", rows)
    whole = command(output__path=str(command.work / "whole"), **FAKE)
    rows[3]["prompt"] += BAD
    write_jsonl(command.work / "in.jsonl", rows)

    result = command(decoder=partial(FragileDecoder, marks=log, passes=60, breaks=1), **FAKE)

    assert result.code == 0
    failed = {row["row_id"]: row["error"] for row in result.rows if row["error_type"] is not None}
    assert failed == {"row-3": "in.jsonl, row row-3: RuntimeError: a bad token"}
    assert {key: got for key, got in tokens(result).items() if key not in failed} == {
        key: want for key, want in tokens(whole).items() if key not in failed
    }
    assert sorted(file.name.partition("-")[0] for file in log.iterdir()) == ["broken", "sound"]
