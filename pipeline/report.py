"""The job's report: every figure, counted from the output rows into one dict (`report.json`).

Everything is counted from the Parquet rows; `run.json` adds only what no row knows (settings, versions, machine, wall
time). A figure that cannot be computed is None, never 0.

Words used in the keys:
  done              rows whose finish_reason is not "error"
  device-second     one second of one worker's engine. A row's `engine_s` is its share of the engine's busy time, so
                    tokens_per_s = output tokens / sum of engine_s is output tokens per second and device
  tau               mean acceptance length: sum of accept_lengths / decode calls (bonus counted, prefill not)
  decode calls per  decode calls / (output tokens - the first token of each row, which prefill gives) = 1 / tau
  token
  call reduction    1 - decode calls per token, against plain decoding's
  session           workers whose working times overlap; a job that was stopped and resumed has several
Units end the key: `_s` seconds, `_usd`/`usd_` US dollars; rates and shares lie in 0..1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.page import render_html
from pipeline.redact import scrub, scrub_text

REPORT_VERSION = 1
MAX_ERRORS = 20
MAX_DIVERGENCES = 10
MAX_MESSAGE = 500  # characters of an error message
OCCUPANCY_TOLERANCE = 1.2  # the sides' mean batches may differ by this factor before the report says so

REPORT_COLUMNS = [
    *("row_id", "source_file", "row_index", "sample_index", "finish_reason", "error", "error_type"),
    *("prompt_tokens", "output_tokens", "decode_calls", "prefill_calls", "rows_computed", "accept_lengths"),
    *("drafted_tokens", "accepted_tokens", "method", "latency_s", "engine_s", "mean_batch"),
    *("finished_at", "worker", "worker_load_s", "worker_warmup_s"),
    *("ar_decode_calls", "ar_latency_s", "ar_finished_at", "ar_engine_s", "ar_mean_batch", "ar_output_tokens"),
    *("exact_match", "first_divergence"),
]

CPU_NOTE = "CPU ratio: measured on a CPU, where a step's cost grows with its rows; it says nothing about a GPU."
HALF_NOTE = "16-bit: near-ties may flip; exact match is reported, not promised."
AUTO_NOTE = "dtype auto: the checkpoint's own; exact match is expected in float32 and float64 only."

RUN_KEYS = ("status", "fingerprint", "config", "versions", "machine", "counts", "wall_s")


def build_report(table: pa.Table, run: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The bytes of `report.json` and `report.html`."""
    summary = summarize(table, run=run)
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace"), render_html(summary).encode("utf-8", "backslashreplace")


def summarize(table: pa.Table, *, run: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a run. `table` holds at least REPORT_COLUMNS; `run` is run.json's content (any key may be absent).

    Keys: report_version, run (scrubbed), device ("cpu", "cuda" or None), dtype, rows, tokens, method, latency_s,
    comparison, time, cost, errors. The result holds plain JSON values only.
    """
    record = scrub({key: run[key] for key in RUN_KEYS if run.get(key) is not None})
    table = table.select(REPORT_COLUMNS)
    done = table.filter(_is_done(table))
    compared = done.filter(pc.is_valid(done["exact_match"]))
    tokens = {"prompt": _sum(done, "prompt_tokens"), "output": _sum(done, "output_tokens")}
    time = _time(table, tokens, record)
    price = _number(_setting(record, "cost", "device_hour_usd"))
    device, dtype = _device(record), _setting(record, "model", "dtype")
    return {
        "report_version": REPORT_VERSION,
        "run": record,
        "device": device,
        "dtype": dtype,
        "rows": _rows(table, done, compared),
        "tokens": tokens,
        "method": _method(done, record),
        "latency_s": _percentiles(done["latency_s"]),
        "comparison": _comparison(compared, price, device, dtype),
        "time": time,
        "cost": _cost(price, time["allocated_device_s"], tokens["output"]),
        "errors": _errors(table),
    }


# Counting


def _rows(table: pa.Table, done: pa.Table, compared: pa.Table) -> dict[str, Any]:
    failed = table.num_rows - done.num_rows
    return {
        "total": table.num_rows,
        "done": done.num_rows,
        "failed": failed,
        "failed_share": _ratio(failed, table.num_rows),
        "compared": compared.num_rows,
        "by_finish_reason": _counts(table["finish_reason"]),
        "by_error_type": _counts(table["error_type"]),
    }


def _method(done: pa.Table, record: Mapping[str, Any]) -> dict[str, Any]:
    """Figures over all done rows of the run's method."""
    methods = _counts(done["method"])
    name = next(iter(methods), None) or _setting(record, "decoder", "method")
    rows = done.filter(pc.fill_null(pc.equal(done["method"], pa.scalar(name, pa.string())), False))
    calls, lengths = _sum(rows, "decode_calls"), _length_counts(rows["accept_lengths"])
    tau = _ratio(sum(length * count for length, count in lengths.items()), calls)
    drafted, accepted = _sum(rows, "drafted_tokens"), _sum(rows, "accepted_tokens")
    return {
        "name": name,
        "rows": rows.num_rows,
        "output_tokens": _sum(rows, "output_tokens"),
        "prefill_calls": _sum(rows, "prefill_calls"),
        "decode_calls": calls,
        "decode_calls_per_token": _ratio(calls, _tokens_after_first(rows, "output_tokens")),
        "tau": tau,
        "call_reduction": 1 - 1 / tau if tau else None,
        "rows_per_call": _ratio(_sum(rows, "rows_computed"), calls),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "draft_acceptance_rate": _ratio(accepted, drafted),
        "acceptance_by_depth": _acceptance_by_depth(lengths, _mask_count(name, record)),
        "accept_length_counts": [{"length": length, "calls": count} for length, count in lengths.items()],
        "engine_s": _sum(rows, "engine_s"),
        "tokens_per_s": _ratio(_sum(rows, "output_tokens"), _sum(rows, "engine_s")),
        "mean_batch": _mean_batch(rows, ""),
    }


def _mask_count(method: str | None, record: Mapping[str, Any]) -> int:
    return int(_number(_setting(record, "decoder", "masks")) or 0) if method == "esp" else 0


def _acceptance_by_depth(lengths: Mapping[int, int], masks: int) -> list[dict[str, Any]]:
    """Share of decode calls that accepted at least d draft tokens, d = 1, 2, ... (accept length - 1 >= d)."""
    calls = sum(lengths.values())
    deepest = max([masks, *(length - 1 for length in lengths)]) if calls else 0
    reached = [sum(count for length, count in lengths.items() if length > depth) for depth in range(1, deepest + 1)]
    return [{"depth": depth, "calls": n, "share": _ratio(n, calls)} for depth, n in enumerate(reached, start=1)]


def _errors(table: pa.Table) -> list[dict[str, Any]]:
    """The first error rows in input order."""
    failed = table.filter(pc.invert(_is_done(table))).select(
        ["row_id", "error_type", "error", "source_file", "row_index", "sample_index"]
    )
    order = [(name, "ascending") for name in ("source_file", "row_index", "sample_index")]
    return [
        {"row_id": scrub_text(row["row_id"]), "error_type": row["error_type"], "error": _message(row["error"])}
        for row in failed.sort_by(order).slice(0, MAX_ERRORS).to_pylist()
    ]


def _message(text: str | None) -> str:
    text = scrub_text(text or "")
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"


# Comparison with plain decoding


def _comparison(compared: pa.Table, price: float | None, device: str | None, dtype: str | None) -> dict[str, Any]:
    """Both methods on the compared rows alone, and what follows from them."""
    esp, ar = _side(compared, "", price), _side(compared, "ar_", price)
    result = {
        "rows": compared.num_rows,
        "esp": esp,
        "ar": ar,
        "exact_match": _exact_match(compared),
        "first_divergence": _divergences(compared),
        "speed_up": _ratio(esp["tokens_per_s"], ar["tokens_per_s"]),
        "call_reduction": _reduction(esp["decode_calls_per_token"], ar["decode_calls_per_token"]),
        "length_ratio": _ratio(esp["output_tokens"], ar["output_tokens"]),
    }
    return {**result, "notes": list(_notes(result, device, dtype)) if compared.num_rows else []}


def _side(compared: pa.Table, prefix: str, price: float | None) -> dict[str, Any]:
    """One method's figures; its columns are named with `prefix`."""
    tokens, engine_s = _sum(compared, prefix + "output_tokens"), _sum(compared, prefix + "engine_s")
    calls, after_first = (
        _sum(compared, prefix + "decode_calls"),
        _tokens_after_first(compared, prefix + "output_tokens"),
    )
    return {
        "rows": compared.num_rows,
        "output_tokens": tokens,
        "decode_calls": calls,
        "decode_calls_per_token": _ratio(calls, after_first),
        "tau": _ratio(after_first, calls),
        "engine_s": engine_s,
        "tokens_per_s": _ratio(tokens, engine_s),
        "mean_batch": _mean_batch(compared, prefix),
        "latency_s": _percentiles(compared[prefix + "latency_s"]),
        "usd_per_1m_tokens": _usd_per_1m(price, engine_s, tokens),
    }


def _exact_match(compared: pa.Table) -> dict[str, Any]:
    count = _count_true(compared["exact_match"])
    return {"count": count, "of": compared.num_rows, "rate": _ratio(count, compared.num_rows)}


def _divergences(compared: pa.Table) -> dict[str, Any]:
    """Rows that differ, the earliest difference first. Positions are 0-based among the output tokens."""
    differing = compared.filter(pc.invert(compared["exact_match"])).select(["row_id", "first_divergence"])
    order = [("first_divergence", "ascending"), ("row_id", "ascending")]
    first = differing.sort_by(order).slice(0, MAX_DIVERGENCES).to_pylist()
    return {
        "min": pc.min(differing["first_divergence"]).as_py(),
        "rows": [{"row_id": scrub_text(row["row_id"]), "position": row["first_divergence"]} for row in first],
    }


def _notes(comparison: Mapping[str, Any], device: str | None, dtype: str | None) -> Iterable[str]:
    if device == "cpu":
        yield CPU_NOTE
    match = comparison["exact_match"]
    if dtype in ("float32", "float64"):
        differing = match["of"] - match["count"]
        fault = f", but {differing} of {match['of']} rows differ" if differing else ""
        yield f"{dtype}: exact match is expected to be 1.0{fault}."
    elif dtype in ("bfloat16", "float16"):
        yield HALF_NOTE
    elif dtype == "auto":
        yield AUTO_NOTE
    batches = (comparison["esp"]["mean_batch"], comparison["ar"]["mean_batch"])
    if all(batches) and max(batches) > OCCUPANCY_TOLERANCE * min(batches):
        yield (
            f"Different occupancy: steps held {batches[0]:.2f} sequences on average with ESP and {batches[1]:.2f} with "
            "plain decoding; tokens/s and cost compare the two at those batch sizes."
        )


# Time and cost


def _time(table: pa.Table, tokens: Mapping[str, int], record: Mapping[str, Any]) -> dict[str, Any]:
    """Load, warm-up, steady and tail time. steady_s: time in which at least one worker was between its first row's
    start and its last row's end; gap_s: time between sessions; tail_s: from the end of the last session's first idle
    worker to the session's end."""
    spans = _worker_spans(table)
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
        "steady_output_tokens_per_s": _ratio(tokens["output"], steady_s),
        "steady_prompt_tokens_per_s": _ratio(tokens["prompt"], steady_s),
        "steady_output_tokens_per_s_per_worker": _ratio(tokens["output"], sum(worker_s)),
        "busy_s": sum(span["busy_s"] for span in spans) if spans else None,
        "busy_share": _ratio(sum(span["busy_s"] for span in spans), sum(worker_s)),
        "allocated_device_s": sum(worker_s) + sum(setup_s) if spans else None,
        "wall_s": _number(record.get("wall_s")),
    }


def _worker_spans(table: pa.Table) -> list[dict[str, Any]]:
    """One entry a worker, by name. Times in whole microseconds since 1970: decoding starts at its end - its latency;
    a compared row spans both of its decodings."""
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
        "output_tokens": pc.fill_null(rows["output_tokens"], 0),
    }
    how = {"start_us": "min", "end_us": "max", "load_s": "max", "warmup_s": "max", "busy_s": "sum"}
    how |= {"output_tokens": "sum"}
    grouped = pa.table(columns).group_by("worker").aggregate([*how.items(), ([], "count_all")])
    names = {f"{name}_{function}": name for name, function in how.items()} | {"count_all": "rows"}
    grouped = grouped.rename_columns([names.get(name, name) for name in grouped.column_names])
    return grouped.sort_by("worker").to_pylist()


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
        "busy_share": _ratio(span["busy_s"], span_s),
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


def _cost(price: float | None, allocated_s: float | None, tokens: int) -> dict[str, Any]:
    """What the devices cost while they were held: load, warm-up, idle and the comparison included."""
    return {
        "device_hour_usd": price,
        "allocated_device_s": allocated_s,
        "allocated_usd": None if price is None or allocated_s is None else price / 3600 * allocated_s,
        "usd_per_1m_tokens": _usd_per_1m(price, allocated_s, tokens),
    }


def _usd_per_1m(price: float | None, device_s: float | None, tokens: int) -> float | None:
    if price is None or not device_s or not tokens:
        return None
    return price / 3600 * device_s / tokens * 1e6


# Arrow helpers


def _is_done(table: pa.Table) -> pa.ChunkedArray:
    return pc.not_equal(table["finish_reason"], "error")


def _sum(table: pa.Table, column: str) -> Any:
    return pc.sum(table[column]).as_py() or 0


def _count_true(column: pa.ChunkedArray) -> int:
    return pc.sum(pc.cast(column, pa.int64())).as_py() or 0


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    """Value counts without nulls, the most frequent first, ties by value."""
    return dict(sorted(_value_counts(column), key=lambda pair: (-pair[1], pair[0])))


def _value_counts(column: pa.ChunkedArray) -> list[tuple[Any, int]]:
    return [(item["values"], item["counts"]) for item in pc.value_counts(column.drop_null()).to_pylist()]


def _length_counts(lists: pa.ChunkedArray) -> dict[int, int]:
    """accept length -> decode calls, by length."""
    return dict(sorted(_value_counts(pc.list_flatten(lists))))


def _tokens_after_first(table: pa.Table, column: str) -> int:
    """Output tokens that decode calls gave: each row's first token is prefill's."""
    return _sum(table, column) - _count_true(pc.greater(table[column], 0))


def _mean_batch(table: pa.Table, prefix: str) -> float | None:
    """Sequences in a step, averaged over the rows' decode calls."""
    batch = table[prefix + "mean_batch"]
    calls = pc.if_else(pc.is_valid(batch), table[prefix + "decode_calls"], None)
    return _ratio(pc.sum(pc.multiply(batch, pc.cast(calls, pa.float64()))).as_py(), pc.sum(calls).as_py())


def _percentiles(column: pa.ChunkedArray) -> dict[str, float | None]:
    """p50, p95, p99 with linear interpolation; None without values."""
    values = column.drop_null().to_numpy()
    points = np.percentile(values, [50, 95, 99]).tolist() if len(values) else [None] * 3
    return dict(zip(("p50", "p95", "p99"), points, strict=True))


# Plain values


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _reduction(part: float | None, whole: float | None) -> float | None:
    ratio = _ratio(part, whole)
    return None if ratio is None else 1 - ratio


def _seconds(microseconds: int) -> float:
    return microseconds / 1e6


def _iso(microseconds: int) -> str:
    whole, rest = divmod(microseconds, 1_000_000)
    return datetime.fromtimestamp(whole, UTC).replace(microsecond=rest).isoformat()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _setting(record: Mapping[str, Any], section: str, key: str) -> Any:
    part = (record.get("config") or {}).get(section)
    return part.get(key) if isinstance(part, Mapping) else None


def _device(record: Mapping[str, Any]) -> str | None:
    """What the engine ran on, "cpu" or "cuda": from the settings, else from the machine; None where neither says."""
    device, gpus = _setting(record, "model", "device"), _number(_setting(record, "cluster", "num_gpus"))
    if device and device != "auto":
        return str(device).partition(":")[0]
    if gpus is not None:
        return "cuda" if gpus else "cpu"
    machine = record.get("machine")
    return ("cuda" if machine.get("gpu") else "cpu") if isinstance(machine, Mapping) else None
