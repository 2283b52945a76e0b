"""resume.retry_errors: failed rows are decoded again, and the new row takes the old one's place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from fake_decoder import FakeDecoder, MendedDecoder
from helpers import Command, Result, prompts, write_jsonl


@pytest.fixture
def settings(command: Command) -> dict[str, Any]:
    """40 rows in shards of 10, of which two fail in decoding, and one line that is no JSON."""
    rows: list[Any] = prompts(40)
    for row in (5, 31):
        rows[row]["prompt"] += " raise"
    write_jsonl(command.work / "in.jsonl", [*rows, "{"])
    (command.work / "log").mkdir()
    return {"cluster__num_cpus": 0.5, "decoder": partial(FakeDecoder, log=command.work / "log")}


def failed(result: Result) -> dict[str, str]:
    return {row["row_id"]: row["error_type"] for row in result.rows if row["error_type"]}


def test_failed_rows_are_decoded_again_when_asked(command: Command, settings: dict[str, Any]) -> None:
    first = command(**settings)
    assert failed(first) == {"row-5": "decode", "row-31": "decode", "in.jsonl:41": "malformed"}
    names = {file.name for file in (first.folder / "data").iterdir()}
    mended = settings | {"decoder": partial(MendedDecoder, log=command.work / "log")}
    assert failed(command(**mended)) == failed(first), "not unless asked"

    again = command(resume__retry_errors=True, **mended)

    assert again.code == 0
    assert failed(again) == {"in.jsonl:41": "malformed"}
    assert len(again.rows) == len({row["row_id"] for row in again.rows}) == 41
    assert {row["row_id"]: row["token_ids"] for row in again.rows if row["row_id"] not in ("row-5", "row-31")} == {
        row["row_id"]: row["token_ids"] for row in first.rows if row["row_id"] not in ("row-5", "row-31")
    }
    assert all(row["token_ids"] for row in again.rows if row["row_id"] in ("row-5", "row-31"))
    assert {file.name for file in (again.folder / "data").iterdir()} == names
    assert again.json("run.json")["counts"] == {
        **first.json("run.json")["counts"],
        "already_done": 38,
        "failed": 1,
    }


def test_rows_that_fail_again_stay_error_rows(command: Command, settings: dict[str, Any]) -> None:
    first = command(**settings)
    again = command(resume__retry_errors=True, **settings)
    assert again.code == 0
    assert failed(again) == failed(first)
    assert len(again.rows) == 41


def test_what_a_broken_off_run_decoded_again_is_put_in_by_the_next(command: Command, settings: dict[str, Any]) -> None:
    first = command(**settings)
    data, waiting = first.folder / "data", first.folder / "_retried"
    keep = {file.name: file.read_bytes() for file in data.iterdir()}
    mended = settings | {"decoder": partial(MendedDecoder, log=command.work / "log")}
    last = command(resume__retry_errors=True, **mended)
    # As a kill before the exchange leaves it: the old shards, and the new rows beside them.
    new = {file.name: file.read_bytes() for file in data.iterdir()}
    for name, content in keep.items():
        (data / name).write_bytes(content)
    waiting.mkdir(exist_ok=True)
    for name in new:
        if new[name] != keep[name]:
            (waiting / name).write_bytes(new[name])
    assert failed(command("--limit", "41", **settings)) == failed(last), "by a start that retries nothing, too"
    assert list(waiting.iterdir()) == []
