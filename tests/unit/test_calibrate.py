"""Measuring step costs: what is run, when it stops, and the command around it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import CONTEXT, tiny_model

from esp_worker.calibrate import Grid, cost_key, dealt, measure, short_grid, step_cost
from esp_worker.cost import MAX_ROWS, CostKey, StepCost
from jobs.calibrate import main

KEY = CostKey("m", "float64", "a CPU", 1, "stock")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPSTREAM_CACHE", str(tmp_path))


def test_the_median_of_each_point() -> None:
    """A clock that shows the n-th run of every point as n squared seconds long."""
    grid = Grid([1, 2], [1, 4], [8], repeats=3, seconds=1e9)
    durations = [float(repeat**2) for repeat in (1, 5, 2) for _ in range(4)]
    # Began; then for each run: the limit is looked at from the second round on, start, end.
    ticks, now = [0.0], 0.0
    for number, duration in enumerate(durations):
        ticks += [now] * (2 if number >= 4 else 1) + [now + duration]
        now += duration
    clock = iter(ticks)
    cost = measure(tiny_model("llama"), KEY, grid, clock=lambda: next(clock))
    assert cost.measured.tolist() == [[[4.0], [4.0]], [[4.0], [4.0]]]
    assert next(clock, None) is None


def test_every_point_once_even_when_time_is_up() -> None:
    clock = itertools.count()
    cost = measure(
        tiny_model("llama"), KEY, Grid([1, 2], [1, 4], [8, 20], seconds=0.0), clock=lambda: float(next(clock))
    )
    assert (cost.measured == 1).all()
    # Began, eight runs of two ticks each, and the limit once a further round.
    assert next(clock) <= 1 + 16 + 7


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_real_times(family: str) -> None:
    cost = measure(tiny_model(family), KEY, Grid([1, 3], [1, 2, 16], [8, 40], repeats=2))
    assert cost.measured.shape == (2, 3, 2)
    assert 0 < cost.measured.min() <= cost.measured.max() < 60


def test_a_kept_table_is_used_and_none_is_measured_short(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    key = cost_key(model, "identity", "stock kernels")
    assert (key.model, key.threads, key.dtype) == ("identity", torch.get_num_threads(), "float64")
    grid = short_grid(4, 64)
    assert step_cost(model, key, 4, 64).sequences == tuple(grid.sequences) == (1, 4)
    assert not key.file.exists(), "a short table is not kept"
    StepCost([1], [1, 2], [5], [[[1.0], [2.0]]], key).save(key.file)
    assert step_cost(model, key, 4, 64).contexts == (5,)
    key.file.write_text("{}")
    with caplog.at_level("WARNING"):
        assert step_cost(model, key, 4, 64).sequences == (1, 4)
    assert "no step-cost table" in caplog.text


def test_the_command(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--slots", "2,1", "--rows", "33,1", "--context", "16", "--repeat", "2", "--threads", "1"]
    assert main(["--model", str(tiny_checkpoint), *sizes]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    cost = StepCost.load(Path(document["file"]))
    assert (cost.sequences, cost.rows, cost.contexts) == ((1, 2), (1, 33), (16,))
    assert [(step["slots"], step["rows"]) for step in document["steps"]] == [(1, 1), (1, 33), (2, 1), (2, 33)]
    for step in document["steps"]:
        assert (step["c"] == 1) if step["rows"] == 1 else (step["c"] >= 1)
        assert step["ms"] > 0
        assert step["gb_per_s"] > 0
    assert "c(n)" in "".join(lines)
    assert document["ceiling"]["memory_read_gb_per_s"] > 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--context", "150", "--rows", "1,30"], "--context 150 and --rows 30 need 180 positions; the model has 160"),
        (["--model", "nowhere/x.gguf"], "no such file"),
    ],
)
def test_what_cannot_be_measured(
    tiny_checkpoint: Path, extra: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tiny_checkpoint), *extra]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("value", "words"), [("a", "expected whole numbers"), ("0,1", "must be positive")])
def test_bad_numbers(value: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "m", "--rows", value])
    assert words in capsys.readouterr().err


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.integers(1, 64))
def test_rows_are_dealt_out_unevenly(sequences: int, rows: int) -> None:
    counts = dealt(sequences, rows)
    assert len(counts) == sequences
    assert sum(counts) == sequences * rows
    assert min(counts) >= 1
    assert max(counts) <= MAX_ROWS
    assert max(counts) > min(counts) or sequences == 1 or rows == 1 or rows > 16


def test_learned_positions_reach_far_enough_for_a_short_table() -> None:
    cost = measure(tiny_model("gpt2"), KEY, short_grid(2, CONTEXT))
    assert cost.contexts == (CONTEXT - 2,)
