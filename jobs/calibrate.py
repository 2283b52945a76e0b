"""`python -m jobs.calibrate`: measures what decode steps of every size cost here, for `decoder.block_complexity: auto`.

The table goes into the cache folder, where the engines of this machine find it; the ceilings that the same run measured
stand beside it, and the last line of stdout is one JSON document. n rows a sequence, c(n): an n-row step in one-row
steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from esp_worker.accel import accelerate
from esp_worker.calibrate import Grid, cost_key, measure
from esp_worker.checkpoint import ModelError, resolve
from esp_worker.cost import StepCost
from esp_worker.model import CausalModel, load_model
from jobs.ceiling import ceiling_line, machine_line, measure_ceiling
from jobs.runtime import machine, versions


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    try:
        checkpoint = resolve(options.model)
        model = load_model(checkpoint.folder, dtype=options.dtype, device=options.device)
        longest = max(options.context) + max(options.rows)
        if longest > model.context_length:
            raise ValueError(
                f"--context {max(options.context)} and --rows {max(options.rows)} need {longest} positions; the model "
                f"has {model.context_length}"
            )
    except (ModelError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kernels = accelerate(model) if options.kernels == "auto" else "stock kernels"
    ceiling = measure_ceiling(model)
    key = cost_key(model, checkpoint.identity, kernels)
    cost = measure(model, key, Grid(options.slots, options.rows, options.context, options.repeat, options.seconds))
    cost.save(key.file)
    about = {
        "machine": machine(),
        "versions": versions(),
        "model": options.model,
        "dtype": key.dtype,
        "device": str(model.device),
        "threads": options.threads,
        "kernels": kernels,
        "ceiling": ceiling,
        "file": str(key.file),
    }
    steps = list(measured_steps(cost, model))
    _print_table(about, steps)
    print(json.dumps({**about, "steps": steps}))
    return 0


def measured_steps(cost: StepCost, model: CausalModel) -> Iterator[dict[str, Any]]:
    """A line of the table for each point: the time measured and smoothed, c(n), and the bandwidth and arithmetic that
    this means when weights and context are read once and each row passes every weight once."""
    weight_bytes = model.num_parameters * model.dtype.itemsize
    column_bytes = model.new_cache(1).column_bytes
    for s, sequences in enumerate(cost.sequences):
        for c, context in enumerate(cost.contexts):
            for r, rows in enumerate(cost.rows):
                seconds = float(cost.smoothed[s, r, c])
                read = weight_bytes + sequences * context * column_bytes
                yield {
                    "slots": sequences,
                    "context": context,
                    "rows": rows,
                    "measured_ms": round(float(cost.measured[s, r, c]) * 1e3, 2),
                    "ms": round(seconds * 1e3, 2),
                    "c": round(seconds / float(cost.smoothed[s, 0, c]), 3),
                    "gb_per_s": round(read / seconds / 1e9, 2),
                    "gflop_per_s": round(2 * model.num_parameters * sequences * rows / seconds / 1e9, 1),
                }


def _print_table(about: dict[str, Any], steps: Sequence[dict[str, Any]]) -> None:
    console = Console(width=120)
    console.print(
        f"{machine_line(about)}\n{ceiling_line(about['ceiling'])}\ntable: {about['file']}",
        highlight=False,
    )
    heads = {
        "slots": "slots",
        "context": "context",
        "rows": "rows a slot",
        "measured_ms": "measured ms",
        "ms": "smoothed ms",
        "c": "c(n)",
        "gb_per_s": "GB/s",
        "gflop_per_s": "GFLOP/s",
    }
    table = Table(*heads.values())
    for step in steps:
        table.add_row(*(str(step[name]) for name in heads), end_section=step["rows"] == steps[-1]["rows"])
    console.print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.calibrate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="hub id, folder, .gguf file or package:NAME/FILE")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2, help="as the job's engine.threads")
    parser.add_argument("--kernels", choices=("auto", "stock"), default="auto", help="as the job's engine.kernels")
    parser.add_argument("--slots", type=_numbers, default=[1, 4, 16], metavar="1,4,16", help="sequences in a step")
    parser.add_argument(
        "--rows",
        type=_numbers,
        default=[1, 2, 4, 8, 16, 30, 60],
        metavar="1,2,..",
        help="mean rows of a sequence",
    )
    parser.add_argument(
        "--context", type=_numbers, default=[128, 1024], metavar="128,1024", help="context tokens of each sequence"
    )
    parser.add_argument("--repeat", type=int, default=7, help="runs of each point, of which the median counts")
    parser.add_argument("--seconds", type=float, default=80.0, help="begin no further run after this time")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    """Ascending, each once."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected whole numbers, separated by commas") from None
    if numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers must be positive")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
