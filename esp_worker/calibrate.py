"""Measures what whole engine steps cost on this machine: block forward, lm_head and the way back to the host.

B sequences, N rows a sequence on average, T context tokens a sequence. Synthetic blocks stand for real ones: some nodes
under one root, and lm_head on all rows.
"""

from __future__ import annotations

import itertools
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import torch

from esp_worker.block import Block
from esp_worker.cache import SlotCache, rounded
from esp_worker.cost import MAX_ROWS, CostKey, CostTableError, StepCost
from esp_worker.model import CausalModel
from esp_worker.sampling import Ranked
from esp_worker.tree import block_shape

logger = logging.getLogger(__name__)

_SHARES = np.array([0.0, 2.5, 0.5, 1.0])  # of drafts, of one sequence after the other


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured: every product of these, `repeats` times at most and, once each has been, until `seconds` are
    over."""

    sequences: Sequence[int]
    rows: Sequence[int]
    contexts: Sequence[int]
    repeats: int = 7
    seconds: float = 90.0


def cost_key(model: CausalModel, identity: str, kernels: str) -> CostKey:
    """identity: the checkpoint's; kernels: what accel.accelerate said."""
    return CostKey(
        model=identity,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(model.device),
        threads=torch.get_num_threads(),
        kernels=kernels,
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def step_cost(model: CausalModel, key: CostKey, slots: int, max_length: int) -> StepCost:
    """The machine's own table for `key` where it is kept, else a short one for `slots` sequences, measured now.

    A short table takes some seconds, and is not kept: python -m jobs.calibrate makes the one that is.
    """
    try:
        return StepCost.load(key.file)
    except FileNotFoundError:
        logger.info(
            "no step-cost table in %s: measuring a short one (python -m jobs.calibrate keeps a full one)", key.file
        )
    except CostTableError as error:
        logger.warning("%s; measuring a short table", error)
    return measure(model, key, short_grid(slots, max_length))


def short_grid(slots: int, max_length: int) -> Grid:
    """Few enough points for an actor's warm-up."""
    contexts = sorted({max(min(context, max_length - 2), 1) for context in (128, 1024)})  # nodes stand behind the root
    return Grid(sorted({1, slots}), [1, 2, 6, 8, 30], contexts, repeats=3, seconds=6.0)


@torch.inference_mode()
def measure(model: CausalModel, key: CostKey, grid: Grid, clock: Callable[[], float] = time.perf_counter) -> StepCost:
    """Medians over rounds that take every point in turn, so that a slow moment of the machine falls on all of them."""
    cache = model.new_cache(max(grid.sequences))
    # Columns of zeros stand for the context: attention takes its time whatever the keys are.
    widest = max(max(dealt(sequences, max(grid.rows))) for sequences in grid.sequences)
    cache.resize(cache.slots, rounded(max(grid.contexts) + widest))
    points = {
        point: _Point(point[0] * point[1], _step(model, cache, *point))
        for point in itertools.product(grid.sequences, grid.rows, grid.contexts)
    }
    began = clock()
    for size in grid.sequences:  # first calls choose kernels and allocate
        points[size, grid.rows[-1], grid.contexts[-1]].run()
    rows_before = max(grid.sequences) * max(grid.rows)
    for _ in range(grid.repeats):
        for point in points.values():
            if point.seconds and clock() - began > grid.seconds:
                break
            if point.rows < rows_before:  # that step gave memory back, and the next one has to ask for it again
                point.run()
            rows_before = point.rows
            start = clock()
            point.run()
            point.seconds.append(clock() - start)
    times = torch.tensor([median(point.seconds) for point in points.values()], dtype=torch.float64)
    shape = (len(grid.sequences), len(grid.rows), len(grid.contexts))
    return StepCost(grid.sequences, grid.rows, grid.contexts, times.reshape(shape).numpy(), key)


@dataclass(slots=True)
class _Point:
    rows: int
    run: Callable[[], None]
    seconds: list[float] = field(default_factory=list)


def dealt(sequences: int, rows: int) -> list[int]:
    """Rows of each of some sequences, `rows` on average, as uneven as budgets deal them out: drafts are worth more to
    one text than to another, and a step that is uneven takes longer."""
    if sequences == 1:
        return [rows]
    uneven = np.resize(_SHARES, sequences)
    uneven /= uneven.mean()
    for evenness in (0.0, 0.25, 0.5, 0.75, 1.0):
        shares = evenness + (1 - evenness) * uneven
        counts = 1 + np.diff(np.rint(shares.cumsum() * (rows - 1)).astype(int), prepend=0)
        if counts.max() <= MAX_ROWS:  # more than that no budget gives one sequence
            break
    return [int(count) for count in counts]


def _step(model: CausalModel, cache: SlotCache, sequences: int, rows: int, context: int) -> Callable[[], None]:
    """One decode step of that size, ready to run."""
    device = model.device
    ids = torch.arange(sequences * rows, device=device) % model.vocab_size
    stars = [block_shape((0,) * (count - 1), (), 0) for count in dealt(sequences, rows)]  # trees of depth 1

    def run() -> None:
        offsets, visible = [star.offsets for star in stars], [star.visible for star in stars]
        block = Block(0, [context] * sequences, offsets, visible, device)
        hidden = model.forward_block(cache, block, model.embed(ids))
        Ranked(model.logits(hidden)).argmax()  # to the host, as the accept walk needs it

    return run
