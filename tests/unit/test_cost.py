"""The step-cost table: smoothing, interpolation, continuation, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esp_worker.cost import CostKey, CostTableError, StepCost

KEY = CostKey(model="m", dtype="float32", device="a CPU", threads=2, kernels="stock")


def axis(least: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, 300), min_size=1, max_size=4, unique=True).map(sorted)


@st.composite
def tables(draw: Any) -> StepCost:
    axes = [draw(axis(1)) for _ in range(3)]
    count = len(axes[0]) * len(axes[1]) * len(axes[2])
    seconds = draw(st.lists(st.floats(1e-4, 10), min_size=count, max_size=count))
    return StepCost(*axes, np.reshape(seconds, [len(each) for each in axes]), KEY)


def one(cost: StepCost, sequences: int, rows: int, context: int) -> float:
    return float(cost.seconds(sequences, [rows], context)[0])


@given(tables())
def test_exact_at_the_smoothed_points(cost: StepCost) -> None:
    for (s, r, c), seconds in np.ndenumerate(cost.smoothed):
        read = one(cost, cost.sequences[s], cost.rows[r], cost.contexts[c])
        assert read == pytest.approx(seconds, rel=1e-9)


POINT = st.tuples(st.integers(1, 900), st.integers(1, 900), st.integers(0, 90_000))


@given(tables(), POINT, POINT)
def test_no_larger_step_is_cheaper(cost: StepCost, a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Inside the grid and far outside of it, where the last slopes of two lines could cross."""
    small, large = tuple(map(min, a, b)), tuple(map(max, a, b))
    low, high = one(cost, *small), one(cost, *large)
    assert 0 < low <= high * (1 + 1e-9)


@given(tables(), st.integers(0, 2))
def test_linear_behind_the_last_point(cost: StepCost, which: int) -> None:
    ends = [cost.sequences[-1], cost.rows[-1], cost.contexts[-1]]

    def at(distance: int) -> float:
        return one(cost, *(end + distance * (number == which) for number, end in enumerate(ends)))

    assert at(200) - at(100) == pytest.approx(at(300) - at(200), rel=1e-6, abs=1e-9)
    axis_points = (cost.sequences, cost.rows, cost.contexts)[which]
    if len(axis_points) > 1:
        inside = np.diff(np.take(cost.smoothed, [-2, -1], which), axis=which) / (axis_points[-1] - axis_points[-2])
        assert (at(200) - at(100)) / 100 == pytest.approx(inside.max(), rel=1e-6, abs=1e-9)


@given(tables())
def test_smoothing_changes_nothing_that_is_in_order(cost: StepCost) -> None:
    again = StepCost(cost.sequences, cost.rows, cost.contexts, cost.smoothed, KEY)
    assert np.allclose(again.smoothed, cost.smoothed, rtol=1e-12)


def test_noise_is_averaged_and_points_between_are_linear() -> None:
    """Two rows that came out in the wrong order share their mean; a maximum would have raised both."""
    cost = StepCost([1, 3], [1, 2, 4], [100], [[[1.0], [3.0], [2.0]], [[2.0], [6.0], [7.0]]], KEY)
    assert cost.seconds(1, [1, 2, 3, 4], 100).tolist() == [1.0, 2.5, 2.5, 2.5]
    assert cost.seconds(2, [1, 2, 3], 100).tolist() == [1.5, 4.25, 4.5]
    assert cost.seconds(1, [1], 5).tolist() == [1.0], "before the first point as there"


def test_files(tmp_path: Path) -> None:
    cost = StepCost([1, 4], [1, 2], [64], [[[0.1], [0.3]], [[0.2], [0.1]]], KEY)
    file = tmp_path / "steps" / "a.json"
    cost.save(file)
    again = StepCost.load(file)
    assert (again.key, again.measured.tolist()) == (KEY, cost.measured.tolist())
    assert (again.sequences, again.rows, again.contexts) == ((1, 4), (1, 2), (64,))
    assert [each.name for each in file.parent.iterdir()] == ["a.json"], "no scratch file is left"
    content = json.loads(file.read_text())
    for broken in ({**content, "format": 99}, {**content, "seconds": [1]}, {"format": 3}, [], {**content, "key": {}}):
        file.write_text(json.dumps(broken))
        with pytest.raises(CostTableError, match=r"a\.json: no step-cost table"):
            StepCost.load(file)
    file.write_text("{")
    with pytest.raises(CostTableError, match=r"a\.json: no JSON .* run python -m jobs\.calibrate again"):
        StepCost.load(file)


def test_each_setting_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPSTREAM_CACHE", str(tmp_path))
    settings = {"model": "n", "dtype": "float64", "device": "another", "threads": 3, "kernels": "packed"}
    base = {name: getattr(KEY, name) for name in settings}
    keys = [KEY, *(CostKey(**{**base, name: value}) for name, value in settings.items())]
    assert len({key.file for key in keys}) == 6
    assert KEY.file.parent == tmp_path / "steps"


@pytest.mark.parametrize(
    ("axes", "seconds"),
    [
        (([], [1], [1]), np.ones((0, 1, 1))),
        (([1], [2, 2], [1]), np.ones((1, 2, 1))),
        (([1], [2, 1], [1]), np.ones((1, 2, 1))),
        (([0], [1], [1]), np.ones((1, 1, 1))),
        (([1], [1], [1]), np.ones((1, 2, 1))),
        (([1], [1], [1]), np.zeros((1, 1, 1))),
    ],
)
def test_what_is_no_grid(axes: Any, seconds: np.ndarray) -> None:
    with pytest.raises(ValueError, match="step-cost table"):
        StepCost(*axes, seconds, KEY)
