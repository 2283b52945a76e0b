"""resume.retry_errors: failed rows are decoded again, and the new row takes the old one's place."""

from __future__ import annotations

from functools import partial
from typing import Any

from fake_decoder import FakeDecoder, MendedDecoder
from helpers import Command, Result, prompts, write_jsonl

BAD = ("row-5", "row-31")


def failed(result: Result) -> dict[str, str]:
    assert result.code == 0
    assert len(result.rows) == len({row["row_id"] for row in result.rows}) == 41
    return {row["row_id"]: row["error_type"] for row in result.rows if row["error_type"]}


def test_failed_rows_are_decoded_again_when_asked(command: Command) -> None:
    """40 rows in shards of 10, of which two fail in decoding, and one line that is no JSON."""
    rows: list[Any] = prompts(40)
    for row in (5, 31):
        rows[row]["prompt"] += " raise"
    write_jsonl(command.work / "in.jsonl", [*rows, "{"])
    log = command.work / "log"
    log.mkdir()
    broken, mended = partial(FakeDecoder, log=log), partial(MendedDecoder, log=log)
    faults = {**dict.fromkeys(BAD, "decode"), "in.jsonl:41": "malformed"}

    def start(decoder: Any, retry: bool) -> Result:
        return command(decoder=decoder, cluster__num_cpus=0.5, resume__retry_errors=retry)

    first = start(broken, retry=True)
    assert failed(first) == faults
    data, waiting = first.folder / "data", first.folder / "_retried"
    before = {file.name: file.read_bytes() for file in data.iterdir()}
    rows_before = {row["row_id"]: row["token_ids"] for row in first.rows}

    assert failed(start(mended, retry=False)) == faults, "not unless asked"
    assert failed(start(broken, retry=True)) == faults, "they fail again"
    last = start(mended, retry=True)
    assert failed(last) == {"in.jsonl:41": "malformed"}
    tokens = {row["row_id"]: row["token_ids"] for row in last.rows}
    assert all(tokens[row] for row in BAD)
    assert {**tokens, **dict.fromkeys(BAD)} == rows_before
    assert last.json("run.json")["counts"] == {**first.json("run.json")["counts"], "already_done": 38, "failed": 1}

    # As a kill before the exchange leaves it: the old shards, and the new rows beside them. The next start, whatever
    # it is asked, puts them in.
    after = {file.name: file.read_bytes() for file in data.iterdir()}
    assert after.keys() == before.keys()
    for name, content in before.items():
        (data / name).write_bytes(content)
        if after[name] != content:
            waiting.mkdir(exist_ok=True)
            (waiting / name).write_bytes(after[name])
    assert failed(start(broken, retry=False)) == failed(last)
    assert list(waiting.iterdir()) == []
