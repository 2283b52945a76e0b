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
  margin            at the first position where a row and its plain decoding differ: the difference between plain
                    decoding's two best log-probabilities, the nearness of a tie
Units end the key: `_s` seconds, `_usd`/`usd_` US dollars; rates and shares lie in 0..1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.figures import (
    count_true,
    counts,
    is_done,
    length_counts,
    mean_batch,
    number,
    percentiles,
    ratio,
    reduction,
    setting,
    tokens_after_first,
    total,
)
from pipeline.page import render_html
from pipeline.redact import scrub, scrub_text
from pipeline.times import times

REPORT_VERSION = 1
MAX_ERRORS = 20
MAX_DIVERGENCES = 10
MAX_MESSAGE = 500  # characters of an error message
OCCUPANCY_TOLERANCE = 1.2  # the sides' mean batches may differ by this factor before the report says so

REPORT_COLUMNS = [
    *("row_id", "source_file", "row_index", "sample_index", "finish_reason", "error", "error_type"),
    *("prompt_tokens", "prefill_tokens", "cached_tokens", "output_tokens"),
    *("decode_calls", "plain_steps", "prefill_calls", "rows_computed", "accept_lengths"),
    *("drafted_tokens", "accepted_tokens", "method", "latency_s", "engine_s", "mean_batch"),
    *("finished_at", "worker", "worker_load_s", "worker_warmup_s"),
    *("ar_decode_calls", "ar_latency_s", "ar_finished_at", "ar_engine_s", "ar_mean_batch", "ar_output_tokens"),
    *("exact_match", "first_divergence", "divergence_margin"),
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
    done = table.filter(is_done(table))
    compared = done.filter(pc.is_valid(done["exact_match"]))
    tokens = {"prompt": total(done, "prompt_tokens"), "output": total(done, "output_tokens")}
    time = times(table, tokens, record)
    price = number(setting(record, "cost", "device_hour_usd"))
    device, dtype = _device(record), setting(record, "model", "dtype")
    return {
        "report_version": REPORT_VERSION,
        "run": record,
        "device": device,
        "dtype": dtype,
        "rows": _rows(table, done, compared),
        "tokens": tokens,
        "method": _method(done, record),
        "latency_s": percentiles(done["latency_s"]),
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
        "failed_share": ratio(failed, table.num_rows),
        "compared": compared.num_rows,
        "by_finish_reason": counts(table["finish_reason"]),
        "by_error_type": counts(table["error_type"]),
    }


def _method(done: pa.Table, record: Mapping[str, Any]) -> dict[str, Any]:
    """Figures over all done rows of the run's method."""
    methods = counts(done["method"])
    name = next(iter(methods), None) or setting(record, "decoder", "method")
    rows = done.filter(pc.fill_null(pc.equal(done["method"], pa.scalar(name, pa.string())), False))
    calls, lengths = total(rows, "decode_calls"), length_counts(rows["accept_lengths"])
    tau = ratio(sum(length * count for length, count in lengths.items()), calls)
    computed, cached = total(rows, "prefill_tokens"), total(rows, "cached_tokens")
    drafted, accepted = total(rows, "drafted_tokens"), total(rows, "accepted_tokens")
    return {
        "name": name,
        "rows": rows.num_rows,
        "output_tokens": total(rows, "output_tokens"),
        "prefill_calls": total(rows, "prefill_calls"),
        "prefill_tokens": computed,
        "cached_tokens": cached,
        "prefix_hit_rate": ratio(cached, computed + cached),
        "decode_calls": calls,
        "decode_calls_per_token": ratio(calls, tokens_after_first(rows, "output_tokens")),
        "tau": tau,
        "call_reduction": 1 - 1 / tau if tau else None,
        "rows_per_call": ratio(total(rows, "rows_computed"), calls),
        "plain_call_share": ratio(total(rows, "plain_steps"), calls),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "draft_acceptance_rate": ratio(accepted, drafted),
        "acceptance_by_depth": _acceptance_by_depth(lengths, _mask_count(name, record)),
        "accept_length_counts": [{"length": length, "calls": count} for length, count in lengths.items()],
        "engine_s": total(rows, "engine_s"),
        "tokens_per_s": ratio(total(rows, "output_tokens"), total(rows, "engine_s")),
        "mean_batch": mean_batch(rows, ""),
    }


def _mask_count(method: str | None, record: Mapping[str, Any]) -> int:
    return int(number(setting(record, "decoder", "masks")) or 0) if method == "esp" else 0


def _acceptance_by_depth(lengths: Mapping[int, int], masks: int) -> list[dict[str, Any]]:
    """Share of decode calls that accepted at least d draft tokens, d = 1, 2, ... (accept length - 1 >= d)."""
    calls = sum(lengths.values())
    deepest = max([masks, *(length - 1 for length in lengths)]) if calls else 0
    reached = [sum(count for length, count in lengths.items() if length > depth) for depth in range(1, deepest + 1)]
    return [{"depth": depth, "calls": n, "share": ratio(n, calls)} for depth, n in enumerate(reached, start=1)]


def _errors(table: pa.Table) -> list[dict[str, Any]]:
    """The first error rows in input order."""
    failed = table.filter(pc.invert(is_done(table))).select(
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
        "speed_up": ratio(esp["tokens_per_s"], ar["tokens_per_s"]),
        "call_reduction": reduction(esp["decode_calls_per_token"], ar["decode_calls_per_token"]),
        "length_ratio": ratio(esp["output_tokens"], ar["output_tokens"]),
    }
    return {**result, "notes": list(_notes(result, device, dtype)) if compared.num_rows else []}


def _side(compared: pa.Table, prefix: str, price: float | None) -> dict[str, Any]:
    """One method's figures; its columns are named with `prefix`."""
    tokens, engine_s = total(compared, prefix + "output_tokens"), total(compared, prefix + "engine_s")
    calls, after_first = (
        total(compared, prefix + "decode_calls"),
        tokens_after_first(compared, prefix + "output_tokens"),
    )
    return {
        "rows": compared.num_rows,
        "output_tokens": tokens,
        "decode_calls": calls,
        "decode_calls_per_token": ratio(calls, after_first),
        "tau": ratio(after_first, calls),
        "engine_s": engine_s,
        "tokens_per_s": ratio(tokens, engine_s),
        "mean_batch": mean_batch(compared, prefix),
        "latency_s": percentiles(compared[prefix + "latency_s"]),
        "usd_per_1m_tokens": _usd_per_1m(price, engine_s, tokens),
    }


def _exact_match(compared: pa.Table) -> dict[str, Any]:
    count = count_true(compared["exact_match"])
    return {"count": count, "of": compared.num_rows, "rate": ratio(count, compared.num_rows)}


def _divergences(compared: pa.Table) -> dict[str, Any]:
    """Rows that differ, the earliest difference first. Positions are 0-based among the output tokens; a margin is None
    where it is not known (columns.margin_request says where that is)."""
    columns = ["row_id", "sample_index", "first_divergence", "divergence_margin"]
    differing = compared.filter(pc.invert(compared["exact_match"])).select(columns)
    order = [(name, "ascending") for name in ("first_divergence", "row_id", "sample_index")]
    first = differing.sort_by(order).slice(0, MAX_DIVERGENCES).to_pylist()
    margins = differing["divergence_margin"].drop_null()
    return {
        "min": pc.min(differing["first_divergence"]).as_py(),
        "margins": len(margins),
        "margin_median": float(np.median(margins.to_numpy())) if len(margins) else None,
        "margin_max": pc.max(margins).as_py(),
        "rows": [
            {
                "row_id": scrub_text(row["row_id"]),
                "sample_index": row["sample_index"],
                "position": row["first_divergence"],
                "margin": row["divergence_margin"],
            }
            for row in first
        ],
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


# Cost


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


def _device(record: Mapping[str, Any]) -> str | None:
    """What the engine ran on, "cpu" or "cuda": from the settings, else from the machine; None where neither says."""
    device, gpus = setting(record, "model", "device"), number(setting(record, "cluster", "num_gpus"))
    if device and device != "auto":
        return str(device).partition(":")[0]
    if gpus is not None:
        return "cuda" if gpus else "cpu"
    machine = record.get("machine")
    return ("cuda" if machine.get("gpu") else "cpu") if isinstance(machine, Mapping) else None
