"""A disk that is full, a real one: a small file system in memory, where this user may mount one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fake_decoder import FakeDecoder
from helpers import Command, prompts, write_jsonl


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs leave to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_ends_the_job_and_resume_continues(command: Command, small_disk: Path) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(100))
    (command.work / "log").mkdir()
    decoder = partial(FakeDecoder, log=command.work / "log")
    settings = {"output__path": str(small_disk / "out"), "cluster__num_cpus": 0.5}
    full = command(decoder=decoder, **settings)
    assert full.code == 1
    (line,) = [line for line in full.err.splitlines() if line.startswith("error: ")]
    assert "No space left on device" in line
    assert "the same command continues" in line
    left = len(full.rows)
    assert 0 < left < 100, "what was written is whole"
    assert not [file for file in small_disk.rglob("*") if file.name.startswith(".")], "and nothing else is left"

    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    mended = command(decoder=decoder, **settings)
    assert mended.code == 0
    assert sorted(row["row_id"] for row in mended.rows) == sorted(row["id"] for row in prompts(100))
    assert mended.json("run.json")["counts"]["already_done"] == left
