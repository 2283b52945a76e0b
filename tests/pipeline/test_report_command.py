"""`python -m jobs.report OUT`: the reports again, from the rows and run.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import Command, prompts, write_jsonl

from jobs.report import main


def test_the_report_is_rebuilt_as_the_job_wrote_it(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(command.work / "in.jsonl", [*prompts(6), "{"])
    result = command(compare__fraction=1.0, output__rows_per_file=3, cost__device_hour_usd=2.0)
    files = [result.folder / name for name in ("report.json", "report.html")]
    written = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    assert main([str(result.folder)]) == 0
    assert [file.read_bytes() for file in files] == written
    printed = capsys.readouterr().out
    assert printed.startswith("rows ")
    assert result.out.endswith(printed), "but for what Ray itself may say before"

    run = result.json("run.json")
    run["config"]["cost"]["device_hour_usd"] = 4.0
    (result.folder / "run.json").write_text(json.dumps(run))
    assert main([str(result.folder)]) == 0
    before, after = json.loads(written[0]), result.json("report.json")
    assert after["cost"]["allocated_usd"] == pytest.approx(2 * before["cost"]["allocated_usd"]), "counted, not copied"
    assert after["rows"] == before["rows"]


def test_a_folder_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere has no run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text(json.dumps({"fingerprint": {}}))
    assert main([str(tmp_path)]) == 2
    assert "holds no shards yet" in capsys.readouterr().err
