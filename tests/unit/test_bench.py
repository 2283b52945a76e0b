"""`jobs.bench decode`: the sides agree token for token, and the last line is one JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs.bench import main


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": i, "prompt": f"Prompt {i}"} for i in range(3)] + [{"question_id": 7, "turns": ["First", "Second"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def test_decode(tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["decode", "--model", str(tiny_checkpoint), "--prompts", str(prompts_file), "--dtype", "float64"]
    threads = torch.get_num_threads()
    code = main(
        [*arguments, "--bc", "4,12", "--slots", "1,3", "--new", "12", "--repeat", "2", "--threads", str(threads)]
    )
    assert code == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["prompts"] == 4
    assert document["kernels"].startswith("stock kernels")
    assert document["ceiling"]["memory_read_gb_per_s"] > 0
    results = document["results"]
    assert [(r["method"], r["bc"], r["slots"]) for r in results] == [
        (method, bc, slots) for slots in (1, 3) for method, bc in (("ar", None), ("esp", 4), ("esp", 12))
    ]
    assert len({r["tokens"] for r in results}) == 1
    for result in results:
        assert result["exact_match_rate"] == 1.0
        assert result["tau"] >= 1.0
        assert 1.0 <= result["rows_per_call"] <= (result["bc"] or 1)
    plain = results[0]
    assert (plain["tau"], plain["rows_per_call"], plain["speedup_vs_ar"]) == (1.0, 1.0, 1.0)
    assert all(r["decode_calls"] <= plain["decode_calls"] for r in results)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--methods", "ar,medusa"], "methods are ar, esp"),
        (["--bc", "auto"], "expected whole numbers"),
        (["--slots", "0"], "must be positive"),
    ],
)
def test_bad_arguments(extra: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["decode", "--model", "m", "--prompts", "p", *extra])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_row_without_a_prompt_is_named(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert main(["decode", "--model", str(tiny_checkpoint), "--prompts", str(file)]) == 2
    assert "p.jsonl, line 2: expected a `prompt`" in capsys.readouterr().err
