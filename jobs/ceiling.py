"""What the machine can do, measured in the run that is judged by it, and the lines that say so above every table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from esp_worker.accel import packed
from esp_worker.model import CausalModel


def machine_line(about: Mapping[str, Any]) -> str:
    """Machine, device, threads, kernels, model and precision."""
    return (
        f"{about['machine']['cpu']}, {about['device']}, {about['threads']} threads, {about['kernels']}; "
        f"{about['model']}, {about['dtype']}"
    )


def workload_line(about: Mapping[str, Any]) -> str:
    settings = "".join(f", {key} {value}" for key, value in about["decoder"].items())
    return (
        f"{about['prompts']} prompts x {about['new_tokens']} tokens, temperature {about['temperature']}{settings}, "
        f"median of {about['repeat']}"
    )


def ceiling_line(ceiling: Mapping[str, float]) -> str:
    return (
        f"ceiling: memory read {ceiling['memory_read_gb_per_s']} GB/s, matrix product "
        f"{ceiling['matrix_product_gflop_per_s']} GFLOP/s; a one-row step takes at least {ceiling['one_row_floor_ms']} "
        f"ms, rows are nearly free up to about {ceiling['rows_at_ridge']}"
    )


def measure_ceiling(model: CausalModel) -> dict[str, float]:
    """What this machine can do, in this run: read the weights once, and multiply matrices.

    one_row_floor_ms: no one-row step can be faster than reading the weights; rows_at_ridge: rows at which the
    arithmetic of a step takes as long as that reading, after which each further row costs its full time.
    """
    weight_bytes = model.num_parameters * model.dtype.itemsize
    buffer = torch.zeros(64 << 20, dtype=torch.float32, device=model.device)
    square = torch.ones(1024, 1024, dtype=model.dtype, device=model.device)
    dense = nn.Sequential(nn.Linear(1024, 1024, bias=False, dtype=model.dtype, device=model.device))
    if packed.unavailable(model.device, model.dtype) is None:
        packed.pack_linears(dense)  # on CPUs that the product's library does not know, several times as fast
    read_s = _best(lambda: buffer.sum())
    product_s = min(_best(lambda: square @ square), _best(lambda: dense(square), times=21))
    gb_per_s = buffer.nbytes / read_s / 1e9
    gflop_per_s = 2 * 1024**3 / product_s / 1e9
    floor_s = weight_bytes / (gb_per_s * 1e9)
    return {
        "memory_read_gb_per_s": round(gb_per_s, 1),
        "matrix_product_gflop_per_s": round(gflop_per_s, 1),
        "one_row_floor_ms": round(floor_s * 1e3, 4),
        "rows_at_ridge": round(floor_s * gflop_per_s * 1e9 / (2 * model.num_parameters), 1),
    }


def floor_ms(ceiling: Mapping[str, float], rows: float) -> float:
    """What a step of so many rows takes at least: to read the weights once, or its arithmetic."""
    return ceiling["one_row_floor_ms"] * max(1.0, rows / ceiling["rows_at_ridge"])


def _best(work: Callable[[], torch.Tensor], times: int = 7) -> float:
    """Seconds of the fastest of several runs: a ceiling is what the machine can do, not what it did on average."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work().flatten()[:1].tolist()  # to the host, so that a GPU has finished
        seconds.append(time.perf_counter() - began)
    return min(seconds)
