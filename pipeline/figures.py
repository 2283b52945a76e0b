"""Figures of output rows: sums, counts and ratios of Arrow columns. What cannot be computed is None, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def is_done(table: pa.Table) -> pa.ChunkedArray:
    return pc.not_equal(table["finish_reason"], "error")


def total(table: pa.Table, column: str) -> Any:
    return pc.sum(table[column]).as_py() or 0


def count_true(column: pa.ChunkedArray) -> int:
    return pc.sum(pc.cast(column, pa.int64())).as_py() or 0


def counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Value counts without nulls, the most frequent first, ties by value."""
    return dict(sorted(_value_counts(column), key=lambda pair: (-pair[1], pair[0])))


def _value_counts(column: pa.ChunkedArray) -> list[tuple[Any, int]]:
    return [(item["values"], item["counts"]) for item in pc.value_counts(column.drop_null()).to_pylist()]


def length_counts(lists: pa.ChunkedArray) -> dict[int, int]:
    """accept length -> decode calls, by length."""
    return dict(sorted(_value_counts(pc.list_flatten(lists))))


def tokens_after_first(table: pa.Table, column: str) -> int:
    """Output tokens that decode calls gave: each row's first token is prefill's."""
    return total(table, column) - count_true(pc.greater(table[column], 0))


def mean_batch(table: pa.Table, prefix: str) -> float | None:
    """Sequences in a step, averaged over the rows' decode calls."""
    batch = table[prefix + "mean_batch"]
    calls = pc.if_else(pc.is_valid(batch), table[prefix + "decode_calls"], None)
    return ratio(pc.sum(pc.multiply(batch, pc.cast(calls, pa.float64()))).as_py(), pc.sum(calls).as_py())


def percentiles(column: pa.ChunkedArray) -> dict[str, float | None]:
    """p50, p95, p99 with linear interpolation; None without values."""
    values = column.drop_null().to_numpy()
    points = np.percentile(values, [50, 95, 99]).tolist() if len(values) else [None] * 3
    return dict(zip(("p50", "p95", "p99"), points, strict=True))


def ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def reduction(part: float | None, whole: float | None) -> float | None:
    left = ratio(part, whole)
    return None if left is None else 1 - left


def number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def setting(record: Mapping[str, Any], section: str, key: str) -> Any:
    part = (record.get("config") or {}).get(section)
    return part.get(key) if isinstance(part, Mapping) else None
