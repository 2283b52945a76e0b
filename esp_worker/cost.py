"""What a decode step costs: seconds of a step as a function of its size, from a small measured grid.

B sequences, N rows of each on average, as uneven as budgets deal them out, T context tokens of each.
Whoever can run the model measures (calibrate.py); this file only interpolates, and knows no torch.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from esp_worker.checkpoint import cache_folder

FORMAT = 3
MAX_ROWS = 64  # widest block of one sequence that a budget chooses
_BEYOND = 1024.0  # how far behind the last measured point the grid is continued, in multiples of that point


@dataclass(frozen=True, slots=True)
class CostKey:
    """What a table was measured with; it holds for nothing else. model: the checkpoint's identity."""

    model: str
    dtype: str
    device: str
    threads: int
    kernels: str

    @property
    def file(self) -> Path:
        """Where this machine keeps the table."""
        name = xxhash.xxh3_64_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())
        return cache_folder() / "steps" / f"{name}.json"


class Costs(Protocol):
    """What budgets need of a StepCost."""

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray: ...


class CostTableError(ValueError):
    """No step-cost table that can be used here; the message says why."""


class StepCost:
    """Seconds of a step. sequences, rows, contexts: the grid's axes, ascending; seconds: what was measured at
    [sequence, row, context].

    Smoothed, so that noise makes no larger step cheaper: isotonic in rows, then never falling in sequences and
    contexts. Exact at the grid's (smoothed) points, linear between them in each axis, hence in total rows and in
    context tokens; behind the last point linear with the steepest last slope of that axis, before the first one
    constant. Raises ValueError for axes and figures that make no grid.
    """

    def __init__(
        self, sequences: Sequence[int], rows: Sequence[int], contexts: Sequence[int], seconds: Any, key: CostKey
    ) -> None:
        self.sequences, self.rows, self.contexts = tuple(sequences), tuple(rows), tuple(contexts)
        self.key = key
        self.measured = np.asarray(seconds, np.float64)
        axes = (self.sequences, self.rows, self.contexts)
        if not all(axis and axis[0] > 0 and all(a < b for a, b in itertools.pairwise(axis)) for axis in axes):
            raise ValueError("each axis of a step-cost table must hold positive numbers, ascending")
        if self.measured.shape != tuple(map(len, axes)) or not (self.measured > 0).all():
            raise ValueError(f"a step-cost table needs a positive time at each of its {self.measured.size} points")

    @cached_property
    def smoothed(self) -> np.ndarray:
        """[sequence, row, context] seconds that fall along no axis."""
        isotonic = np.apply_along_axis(_isotonic, 1, self.measured)
        return np.maximum.accumulate(np.maximum.accumulate(isotonic, axis=0), axis=2)

    @cached_property
    def _grid(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Axes and times with one far point more on each axis, so that reading it is interpolation alone."""
        axes = [np.array(axis, np.float64) for axis in (self.sequences, self.rows, self.contexts)]
        seconds = self.smoothed
        for axis, points in enumerate(axes):
            axes[axis], seconds = _continued(points, seconds, axis)
        return axes, seconds

    def seconds(self, sequences: int, rows: Sequence[int] | np.ndarray, context: float) -> np.ndarray:
        """[W] seconds of steps of `sequences` sequences with `rows` [W] rows each on average, behind `context` tokens
        each."""
        (at_sequences, at_rows, at_contexts), grid = self._grid
        plane = _between(at_sequences, grid, sequences)
        line = _between(at_contexts, plane.T, context)
        return np.interp(rows, at_rows, line)

    def save(self, file: Path) -> None:
        """As JSON, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_name(f".{file.name}-{os.getpid()}")
        scratch.write_text(json.dumps(self.content()), encoding="utf-8")
        scratch.replace(file)

    def content(self) -> dict[str, Any]:
        """What a file of it holds; from_content gives the table back."""
        return {
            "format": FORMAT,
            "key": asdict(self.key),
            "sequences": self.sequences,
            "rows": self.rows,
            "contexts": self.contexts,
            "seconds": self.measured.tolist(),
        }

    @classmethod
    def load(cls, file: Path) -> StepCost:
        """Raises CostTableError for a file of another format or with no table in it, OSError when it cannot be read."""
        try:
            return cls.from_content(json.loads(file.read_text(encoding="utf-8")))
        except CostTableError as error:
            raise CostTableError(f"{file}: {error}; run python -m jobs.calibrate again") from error
        except ValueError as error:
            raise CostTableError(f"{file}: no JSON ({error}); run python -m jobs.calibrate again") from error

    @classmethod
    def from_content(cls, content: Any) -> StepCost:
        """Raises CostTableError for what is no such content."""
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']}, not {FORMAT}")
            axes = (content["sequences"], content["rows"], content["contexts"])
            return cls(*axes, content["seconds"], CostKey(**content["key"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CostTableError(f"no step-cost table ({error})") from error


def _isotonic(values: np.ndarray) -> np.ndarray:
    """The nearest sequence that never falls (least squares): neighbours in the wrong order share their mean."""
    blocks: list[tuple[float, int]] = []  # mean, length
    for value in values.tolist():
        mean, length = value, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        blocks.append((mean, length))
    return np.repeat([mean for mean, _ in blocks], [length for _, length in blocks])


def _continued(points: np.ndarray, seconds: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """One far point more on `axis`. The slope there never falls along the other axes: a steeper one further down would
    let lines cross, and a larger step be the cheaper one."""
    last = np.take(seconds, -1, axis)
    before = np.take(seconds, -2, axis) if len(points) > 1 else last
    slope = (last - before) / (points[-1] - points[-2] if len(points) > 1 else 1.0)
    for other in range(slope.ndim):
        slope = np.maximum.accumulate(slope, axis=other)
    distance = _BEYOND * points[-1]
    far = np.expand_dims(last + slope * distance, axis)
    return np.append(points, points[-1] + distance), np.concatenate([seconds, far], axis)


def _between(points: np.ndarray, values: np.ndarray, at: float) -> np.ndarray:
    """`values` [points, ..] at `at` on their first axis: linear between points, the first one's before it."""
    high = int(np.clip(np.searchsorted(points, at), 1, len(points) - 1))
    share = max((at - points[high - 1]) / (points[high] - points[high - 1]), 0.0)
    return (1 - share) * values[high - 1] + share * values[high]
