"""`python -m jobs.bench step`: what one decode step costs beside what the hardware says it must.

n rows a sequence (ESP with one mask, plain decoding where n is 1), c(n) = a step of n rows / a step of one. The floor
of a step is the longer of reading the weights once and of its arithmetic, at the rates measured in the same run. The
row counts alternate, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.pytorch_utils import Conv1D

from esp_worker.accel.packed import LinearPart, PackedLinear
from esp_worker.block import Block
from esp_worker.cache import SlotCache
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams
from jobs.ceiling import machine_line

WARM_UP = 3
PROFILED = 7  # steps; apart from those that are timed, as watching costs time too
PARTS = ("linears", "attention", "lm_head", "engine", "other")
_LINEARS = (nn.Linear, Conv1D, PackedLinear)


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
        middle = {name: median(seconds) for name, seconds in self.parts.items()}
        return {name: round(seconds / sum(middle.values()), 4) for name, seconds in middle.items()}


def measure_steps(
    model: CausalModel, rows: Sequence[int], slots: int, context: int, repeat: int
) -> dict[int, StepTiming]:
    """By row count. Contexts begin at `context` tokens and grow with each step.

    Raises ValueError where the model's context is too short, or no block of one mask has that many rows.
    """
    steps = WARM_UP + repeat + PROFILED
    new = 2 * steps + 4  # one mask: at most two tokens a step; and near its end a sequence drafts less
    if context + new > model.context_length:
        raise ValueError(
            f"--context {context}: {steps} steps may need {new} tokens more, and the model's context is "
            f"{model.context_length}; lower --context or --repeat"
        )
    timings = {count: StepTiming(_running_engine(model, count, slots, context, new)) for count in rows}
    for _ in range(WARM_UP):
        for timing in timings.values():
            timing.engine.step()
    for _ in range(repeat):
        for timing in timings.values():
            began = time.perf_counter()
            timing.engine.step()
            timing.seconds.append(time.perf_counter() - began)
    with _watched(model) as watch:
        for _ in range(PROFILED):
            for timing in timings.values():
                _profile_step(timing, watch)
    return timings


def _running_engine(model: CausalModel, rows: int, slots: int, context: int, new: int) -> Engine:
    """An engine whose slots are all decoding."""
    if rows > 1 and (rows % 2 or rows < 4):
        raise ValueError(f"--rows {rows}: with one mask a block has 1 row, or an even number of at least 4")
    drafter = NoDrafter() if rows == 1 else ProbeDrafter(model.embed, masks=1, block_complexity=rows)
    engine = Engine(model, [drafter], slots=slots, prefix_reuse=False)
    draw = random.Random(0)
    for slot in range(slots):
        prompt = tuple(draw.randrange(model.vocab_size) for _ in range(context))
        engine.submit(Request(str(slot), prompt, SamplingParams(max_new_tokens=new)))
    while len(engine.running) < slots:
        engine.step()
    return engine


class _Watch:
    """Seconds by part, and all rows of the latest pass."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.rows = 0

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            out = work(*args, **kwargs)
            self.seconds[part] += time.perf_counter() - began
            return out

        return run

    def backbone(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.timed("backbone", forward)

        def run(cache: SlotCache, block: Block, embeds: torch.Tensor) -> torch.Tensor:
            self.rows = block.rows
            return timed(cache, block, embeds)

        return run


@contextmanager
def _watched(model: CausalModel) -> Iterator[_Watch]:
    """Time the model's parts within. Each module's forward is wrapped: a hook would cost more than small layers do."""
    watch = _Watch()
    hf: Any = model.module
    modules = [module.product if isinstance(module, LinearPart) else module for module in hf.base_model.modules()]
    linears = {module for module in modules if isinstance(module, _LINEARS)}
    wraps: list[tuple[Any, str, Callable[..., Any]]] = [
        (model, "forward_block", watch.backbone),
        (hf.get_output_embeddings(), "forward", partial(watch.timed, "lm_head")),
        *((module, "forward", partial(watch.timed, "linears")) for module in linears),
    ]
    with ExitStack() as stack:
        for owner, name, wrap in wraps:
            setattr(owner, name, wrap(getattr(owner, name)))
            stack.callback(delattr, owner, name)  # the class's own shows again
        stack.enter_context(model.attention_within(partial(watch.timed, "attention")))
        yield watch


def _profile_step(timing: StepTiming, watch: _Watch) -> None:
    watch.seconds.clear()
    began = time.perf_counter()
    timing.engine.step()
    total, seconds = time.perf_counter() - began, watch.seconds
    for name in ("linears", "attention", "lm_head"):
        timing.parts[name].append(seconds[name])
    timing.parts["engine"].append(total - seconds["backbone"] - seconds["lm_head"])
    timing.parts["other"].append(seconds["backbone"] - seconds["linears"] - seconds["attention"])
    timing.rows = watch.rows // len(timing.engine.running)


def step_results(
    model: CausalModel, timings: Mapping[int, StepTiming], slots: int, ceiling: Mapping[str, float]
) -> list[dict[str, Any]]:
    """An entry a row count; `ratio` is to the floor, `c` to a step of one row (None when that is not measured)."""
    results = []
    one = median(timings[1].seconds) if 1 in timings else None
    for timing in timings.values():
        seconds, rows = median(timing.seconds), timing.rows * slots
        floor_s = ceiling["one_row_floor_ms"] / 1e3 * max(1, rows / ceiling["rows_at_ridge"])
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
        "engine: draft, verify, commit, compaction; other: norms, rotary embedding, cache writes, activations",
        highlight=False,
    )
