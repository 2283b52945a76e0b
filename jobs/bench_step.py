"""`python -m jobs.bench step`: what one decode step costs beside what the hardware says it must.

n rows a sequence (ESP with one mask, plain decoding where n is 1), c(n) = a step of n rows / a step of one. The floor
of a step is the longer of reading the weights once and of its arithmetic, at the rates measured in the same run. The
row counts alternate, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from esp_worker.drafters.base import Drafter
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams
from jobs.ceiling import floor_ms, machine_line
from jobs.watch import PARTS, Watch, shares, watched

WARM_UP = 3
PROFILED = 7  # steps; apart from those that are timed, as watching costs time too


@dataclass
class StepTiming:
    """Steps of one row count. parts: by name, seconds of each profiled step; rows: of one sequence in a step."""

    engine: Engine
    rows: int = 0
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PARTS})

    @property
    def profile(self) -> dict[str, float]:
        """Share of each part in a step."""
        return shares({name: median(seconds) for name, seconds in self.parts.items()})


def measure_steps(
    model: CausalModel, rows: Sequence[int], slots: int, context: int, repeat: int
) -> dict[int, StepTiming]:
    """By row count. Contexts begin at `context` tokens and grow with each step, the prefills of later slots' too.

    Raises ValueError where the model's context is too short, or no block of one mask has that many rows.
    """
    steps = slots + WARM_UP + repeat + PROFILED
    new = 2 * steps + 4  # one mask: at most two tokens a step; and near its end a sequence drafts less
    if context + new > model.context_length:
        raise ValueError(
            f"--context {context}: {steps} steps may need {new} tokens more, and the model's context is "
            f"{model.context_length}; lower --context or --repeat"
        )
    drafters = {count: _drafter(model, count) for count in rows}
    timings = {
        count: StepTiming(_running_engine(model, drafter, slots, context, new)) for count, drafter in drafters.items()
    }
    for _ in range(WARM_UP):
        for timing in timings.values():
            timing.engine.step()
    for _ in range(repeat):
        for timing in timings.values():
            began = time.perf_counter()
            timing.engine.step()
            timing.seconds.append(time.perf_counter() - began)
    with watched(model, list(drafters.values())) as watch:
        for _ in range(PROFILED):
            for timing in timings.values():
                _profile_step(timing, watch)
    return timings


def _drafter(model: CausalModel, rows: int) -> Drafter:
    if rows > 1 and (rows % 2 or rows < 4):
        raise ValueError(f"--rows {rows}: with one mask a block has 1 row, or an even number of at least 4")
    return NoDrafter() if rows == 1 else ProbeDrafter(model.embed, masks=1, block_complexity=rows)


def _running_engine(model: CausalModel, drafter: Drafter, slots: int, context: int, new: int) -> Engine:
    """An engine whose slots are all decoding."""
    engine = Engine(model, [drafter], slots=slots, prefill_tokens=context, prefix_reuse=False)  # a prompt a step
    draw = random.Random(0)
    for slot in range(slots):
        prompt = tuple(draw.randrange(model.vocab_size) for _ in range(context))
        engine.submit(Request(str(slot), prompt, SamplingParams(max_new_tokens=new)))
    for _ in range(slots):
        engine.step()
    return engine


def _profile_step(timing: StepTiming, watch: Watch) -> None:
    _, parts = watch.step(timing.engine)
    assert parts is not None  # all its slots are decoding
    for name, seconds in parts.items():
        timing.parts[name].append(seconds)
    timing.rows = watch.rows // len(timing.engine.running)


def step_results(
    model: CausalModel, timings: Mapping[int, StepTiming], slots: int, ceiling: Mapping[str, float]
) -> list[dict[str, Any]]:
    """An entry a row count; `ratio` is to the floor, `c` to a step of one row (None when that is not measured)."""
    results = []
    one = median(timings[1].seconds) if 1 in timings else None
    for timing in timings.values():
        seconds, rows = median(timing.seconds), timing.rows * slots
        floor_s = floor_ms(ceiling, rows) / 1e3
        results.append(
            {
                "rows": timing.rows,
                "slots": slots,
                "ms": round(seconds * 1e3, 2),
                "fastest_ms": round(min(timing.seconds) * 1e3, 2),
                "floor_ms": round(floor_s * 1e3, 2),
                "ratio": round(seconds / floor_s, 2),
                "fastest_ratio": round(min(timing.seconds) / floor_s, 2),
                "c": None if one is None else round(seconds / one, 3),
                "gb_per_s": round(model.num_parameters * model.dtype.itemsize / seconds / 1e9, 1),
                "gflop_per_s": round(2 * model.num_parameters * rows / seconds / 1e9, 1),
                "profile": timing.profile,
            }
        )
    return results


def print_steps(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    ceiling = about["ceiling"]
    console = Console(width=160)
    console.print(
        f"{machine_line(about)}; a decode step of {about['slots']} slots at {about['context']} tokens, "
        f"median of {about['repeat']}",
        highlight=False,
    )
    figures = {
        "rows": "rows",
        "ms": "ms",
        "fastest": "fastest_ms",
        "floor": "floor_ms",
        "ratio": "ratio",
        "c(n)": "c",
        f"GB/s (of {ceiling['memory_read_gb_per_s']})": "gb_per_s",
        f"GFLOP/s (of {ceiling['matrix_product_gflop_per_s']})": "gflop_per_s",
    }
    table = Table(*figures, *PARTS)
    for result in results:
        cells = ["-" if result[key] is None else str(result[key]) for key in figures.values()]
        table.add_row(*cells, *(f"{result['profile'][part]:.1%}" for part in PARTS))
    console.print(table)
    console.print(
        "draft_verify: also commit, compaction; other: norms, rotary embedding, cache writes, activations",
        highlight=False,
    )
