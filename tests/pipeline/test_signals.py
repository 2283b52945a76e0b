"""SIGTERM and Ctrl-C: the job ends soon, leaves nothing behind but whole shards, and the same command continues it."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fake_decoder import FakeDecoder
from helpers import Command, prompts, write_jsonl
from processes import FakeJob

SETTINGS = {"output__rows_per_file": 5, "cluster__num_cpus": 0.5}


def tokens(folder: Path) -> dict[str, list[int]]:
    rows = pq.read_table(folder / "data").select(["row_id", "token_ids"]).to_pylist()
    assert len({row["row_id"] for row in rows}) == len(rows)
    return {row["row_id"]: row["token_ids"] for row in rows}


@pytest.mark.timeout(900)
def test_interrupted_twice_and_continued(command: Command, tmp_path: Path) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(150))
    log, out, output = tmp_path / "log", command.work / "out", tmp_path / "printed"
    log.mkdir()
    whole = command(decoder=partial(FakeDecoder, log=log), output__path=str(command.work / "whole"), **SETTINGS)
    command("--print-config", **SETTINGS)  # writes config.yaml
    before = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        job = FakeJob(command.work / "config.yaml", log, output, takes=0.3)
        job.wait_for_shards(out / "data", before + 1)
        job.signal(number)
        assert job.wait(120) == 130, output.read_text()
        assert output.read_text().strip().splitlines()[-1].startswith("error: interrupted; ")
        job.wait_for_the_end_of_all()
        assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
        shards = list((out / "data").iterdir())
        assert before < len(shards) < 30
        assert all(shard.name.startswith("part-") for shard in shards), "no leftovers of a broken write"
        before = len(shards)
        tokens(out)
    result = command(decoder=partial(FakeDecoder, log=log), **SETTINGS)
    assert result.code == 0
    assert tokens(out) == tokens(whole.folder)
