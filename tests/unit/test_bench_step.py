"""`jobs.bench step`: steps of the rows that were asked for, beside the floor of the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from esp_worker.attention import ATTENTION_NAME
from esp_worker.checkpoint import resolve
from esp_worker.model import load_model
from jobs.bench import main
from jobs.bench_step import measure_steps

THREADS = ["--threads", str(torch.get_num_threads())]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_step(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    options = ["--rows", "1,4,10", "--slots", "3", "--context", "40", "--repeat", "5", "--dtype", dtype, *THREADS]
    assert main(["step", "--model", str(tiny_checkpoint), *options]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert (document["slots"], document["context"], document["repeat"]) == (3, 40, 5)
    ceiling, results = document["ceiling"], document["results"]
    assert [result["rows"] for result in results] == [1, 4, 10]
    assert results[0]["c"] == 1.0
    for result in results:
        rows = 3 * result["rows"]
        floor_ms = ceiling["one_row_floor_ms"] * max(1, rows / ceiling["rows_at_ridge"])
        assert result["floor_ms"] == pytest.approx(floor_ms, abs=0.006)
        assert 0 < result["fastest_ms"] <= result["ms"]
        assert result["ratio"] >= result["fastest_ratio"]
        assert result["c"] == pytest.approx(result["ms"] / results[0]["ms"], rel=0.05)
        assert sum(result["profile"].values()) == pytest.approx(1, abs=1e-3)
        assert min(result["profile"].values()) > 0
    assert len([line for line in out.splitlines() if line.startswith("│")]) == 3


def test_the_model_is_left_as_it_was(tiny_checkpoint: Path) -> None:
    model = load_model(resolve(str(tiny_checkpoint)).folder, dtype="float32")
    timings = measure_steps(model, [4], slots=1, context=9, repeat=4)
    assert timings[4].rows == 4
    assert len(timings[4].seconds) == 4
    assert model.config._attn_implementation == ATTENTION_NAME
    for module in model.module.modules():
        assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "5"], "--rows 5: with one mask"),
        (["--rows", "2"], "--rows 2: with one mask"),
        (["--context", "120"], "--context 120: 36 steps may need 76"),
    ],
)
def test_what_cannot_be_measured(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    arguments = ["step", "--model", str(tiny_checkpoint), "--context", "40", "--repeat", "25", *THREADS, *options]
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
