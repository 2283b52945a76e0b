"""The report's times: when each worker worked, counted from the ends and latencies of its rows.

A session is a time in which workers' spans overlap; a job that was stopped and resumed has several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.figures import number, ratio


def times(workers: WorkerSpans, tokens: Mapping[str, int], record: Mapping[str, Any]) -> dict[str, Any]:
    """Load, warm-up, steady and tail time. steady_s: time in which at least one worker was between its first row's
    start and its last row's end; gap_s: time between sessions; tail_s: from the end of the last session's first idle
    worker to the session's end."""
    spans = workers.by_name()
    sessions = _sessions([(span["start_us"], span["end_us"]) for span in spans])
    steady_s = sum(end - start for start, end in sessions) / 1e6 if sessions else None
    worker_s = [_seconds(span["end_us"] - span["start_us"]) for span in spans]
    setup_s = [span["load_s"] + span["warmup_s"] for span in spans]
    last_ends = [span["end_us"] for span in spans if span["end_us"] >= sessions[-1][0]]
    return {
        "workers": [_worker(span) for span in spans],
        "sessions": len(sessions),
        "first_start": _iso(sessions[0][0]) if sessions else None,
        "last_finish": _iso(sessions[-1][1]) if sessions else None,
        "max_load_s": max((span["load_s"] for span in spans), default=None),
        "max_warmup_s": max((span["warmup_s"] for span in spans), default=None),
        "steady_s": steady_s,
        "gap_s": _seconds(sessions[-1][1] - sessions[0][0]) - (steady_s or 0) if sessions else None,
        "tail_s": _seconds(max(last_ends) - min(last_ends)) if last_ends else None,
        "steady_output_tokens_per_s": ratio(tokens["output"], steady_s),
        "steady_prompt_tokens_per_s": ratio(tokens["prompt"], steady_s),
        "steady_output_tokens_per_s_per_worker": ratio(tokens["output"], sum(worker_s)),
        "busy_s": sum(span["busy_s"] for span in spans) if spans else None,
        "busy_share": ratio(sum(span["busy_s"] for span in spans), sum(worker_s)),
        "allocated_device_s": sum(worker_s) + sum(setup_s) if spans else None,
        "wall_s": number(record.get("wall_s")),
    }


class WorkerSpans:
    """One entry a worker, added up table by table. Times in whole microseconds since 1970: decoding starts at its
    end - its latency; a compared row spans both of its decodings."""

    _HOW: ClassVar = {
        **dict.fromkeys(["start_us"], "min"),
        **dict.fromkeys(["end_us", "load_s", "warmup_s"], "max"),
        **dict.fromkeys(["busy_s", "output_tokens", "rows"], "sum"),
    }

    def __init__(self) -> None:
        self._spans: pa.Table | None = None

    def add(self, table: pa.Table) -> None:
        spans = _row_spans(table)
        known = spans if self._spans is None else pa.concat_tables([self._spans, spans])
        grouped = known.group_by("worker").aggregate(list(self._HOW.items()))
        names = {f"{name}_{function}": name for name, function in self._HOW.items()}
        self._spans = grouped.rename_columns([names.get(name, name) for name in grouped.column_names])

    def by_name(self) -> list[dict[str, Any]]:
        return [] if self._spans is None else self._spans.sort_by("worker").to_pylist()


def _row_spans(table: pa.Table) -> pa.Table:
    """A row's worker, times and work, of the rows that have them."""
    rows = table.filter(pc.and_(pc.is_valid(table["worker"]), pc.is_valid(table["finished_at"])))
    end_us, ar_end_us = _microseconds(rows["finished_at"]), _microseconds(rows["ar_finished_at"])
    start_us, ar_start_us = (
        pc.subtract(end, pc.cast(pc.round(pc.multiply(pc.fill_null(rows[latency], 0.0), 1e6)), pa.int64()))
        for end, latency in ((end_us, "latency_s"), (ar_end_us, "ar_latency_s"))
    )
    columns = {
        "worker": rows["worker"],
        "start_us": pc.min_element_wise(start_us, ar_start_us),
        "end_us": pc.max_element_wise(end_us, ar_end_us),
        "load_s": pc.fill_null(rows["worker_load_s"], 0.0),
        "warmup_s": pc.fill_null(rows["worker_warmup_s"], 0.0),
        "busy_s": pc.add(pc.fill_null(rows["engine_s"], 0.0), pc.fill_null(rows["ar_engine_s"], 0.0)),
        "output_tokens": pc.cast(pc.fill_null(rows["output_tokens"], 0), pa.int64()),  # a sum's type
        "rows": pa.repeat(1, rows.num_rows),
    }
    return pa.table(columns)


def _microseconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.cast(pc.cast(times, pa.timestamp("us", tz="UTC")), pa.int64())


def _worker(span: Mapping[str, Any]) -> dict[str, Any]:
    span_s = _seconds(span["end_us"] - span["start_us"])
    return {
        "worker": span["worker"],
        "rows": span["rows"],
        "output_tokens": span["output_tokens"],
        "load_s": span["load_s"],
        "warmup_s": span["warmup_s"],
        "first_start": _iso(span["start_us"]),
        "last_finish": _iso(span["end_us"]),
        "span_s": span_s,
        "busy_s": span["busy_s"],
        "busy_share": ratio(span["busy_s"], span_s),
    }


def _sessions(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join overlapping (start, end) spans; the result is in order and disjoint."""
    sessions: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if sessions and start <= sessions[-1][1]:
            sessions[-1] = (sessions[-1][0], max(sessions[-1][1], end))
        else:
            sessions.append((start, end))
    return sessions


def _seconds(microseconds: int) -> float:
    return microseconds / 1e6


def _iso(microseconds: int) -> str:
    whole, rest = divmod(microseconds, 1_000_000)
    return datetime.fromtimestamp(whole, UTC).replace(microsecond=rest).isoformat()
