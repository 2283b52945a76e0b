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
  drafted, ar       the two sides of a comparison: the configured method's decoding and plain decoding, of the same rows
  session           workers whose working times overlap; a job that was stopped and resumed has several
  margin            at the first position where a row and its plain decoding differ: the difference between plain
                    decoding's two best log-probabilities, the nearness of a tie
Units end the key: `_s` seconds, `_usd`/`usd_` US dollars; rates and shares lie in 0..1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.figures import by_frequency, number, ratio, reduction, setting
from pipeline.page import render_html
from pipeline.pagekit import method_names
from pipeline.redact import scrub, scrub_text
from pipeline.times import times
from pipeline.totals import MethodTotals, SideTotals, Totals, Values

REPORT_VERSION = 2
MAX_MESSAGE = 500  # characters of an error message
OCCUPANCY_TOLERANCE = 1.2  # the sides' mean batches may differ by this factor before the report says so

CPU_NOTE = "CPU ratio: measured on a CPU, where a step's cost grows with its rows; it says nothing about a GPU."
HALF_NOTE = "16-bit: near-ties may flip; exact match is reported, not promised."
AUTO_NOTE = "dtype auto: the checkpoint's own; exact match is expected in float32 and float64 only."

RUN_KEYS = ("status", "fingerprint", "config", "versions", "machine", "counts", "wall_s")


def build_report(summary: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """The bytes of `report.json` and `report.html`."""
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace"), render_html(summary).encode("utf-8", "backslashreplace")


def summarize(totals: Totals, *, run: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a run. `run` is run.json's content (any key may be absent).

    Keys: report_version, run (scrubbed), device ("cpu", "cuda" or None), dtype, rows, tokens, method, latency_s,
    comparison, time, cost, errors. The result holds plain JSON values only.
    """
    record = scrub({key: run[key] for key in RUN_KEYS if run.get(key) is not None})
    time = times(totals.spans, totals.tokens, record)
    price = number(setting(record, "cost", "device_hour_usd"))
    device, dtype = _device(record), setting(record, "model", "dtype")
    return {
        "report_version": REPORT_VERSION,
        "run": record,
        "device": device,
        "dtype": dtype,
        "rows": _rows(totals),
        "tokens": dict(totals.tokens),
        "method": _method(totals, record),
        "latency_s": _percentiles(totals.latency),
        "comparison": _comparison(totals, price, device, dtype),
        "time": time,
        "cost": _cost(price, time["allocated_device_s"], totals.tokens["output"]),
        "errors": _errors(totals),
    }


# Counting


def _rows(totals: Totals) -> dict[str, Any]:
    return {
        "total": totals.rows,
        "done": totals.done,
        "failed": totals.failed,
        "failed_share": ratio(totals.failed, totals.rows),
        "compared": totals.compared.rows,
        "by_finish_reason": by_frequency(totals.finish_reasons),
        "by_error_type": by_frequency(totals.error_types),
    }


def _method(totals: Totals, record: Mapping[str, Any]) -> dict[str, Any]:
    """Figures over all done rows of the run's method: the most rows' one, where resumes changed it."""
    methods = by_frequency({name: method.rows for name, method in totals.methods.items()})
    name = next(iter(methods), None)
    rows = MethodTotals() if name is None else totals.methods[name]
    name = name or setting(record, "decoder", "method")
    sums, lengths = rows.sums, dict(sorted(rows.lengths.items()))
    calls, computed, cached = sums["decode_calls"], sums["prefill_tokens"], sums["cached_tokens"]
    tau = ratio(sum(length * count for length, count in lengths.items()), calls)
    return {
        "name": name,
        "rows": rows.rows,
        "output_tokens": sums["output_tokens"],
        "prefill_calls": sums["prefill_calls"],
        "prefill_tokens": computed,
        "cached_tokens": cached,
        "prefix_hit_rate": ratio(cached, computed + cached),
        "decode_calls": calls,
        "decode_calls_per_token": ratio(calls, rows.tokens_after_first),
        "tau": tau,
        "call_reduction": 1 - 1 / tau if tau else None,
        "rows_per_call": ratio(sums["rows_computed"], calls),
        "plain_call_share": ratio(sums["plain_steps"], calls),
        "drafted_tokens": sums["drafted_tokens"],
        "accepted_tokens": sums["accepted_tokens"],
        "draft_acceptance_rate": ratio(sums["accepted_tokens"], sums["drafted_tokens"]),
        "acceptance_by_depth": _acceptance_by_depth(lengths, _mask_count(name, record)),
        "accept_length_counts": [{"length": length, "calls": count} for length, count in lengths.items()],
        "engine_s": sums["engine_s"],
        "tokens_per_s": ratio(sums["output_tokens"], sums["engine_s"]),
        "mean_batch": rows.mean_batch,
    }


def _percentiles(values: Values) -> dict[str, float | None]:
    return dict(zip(("p50", "p95", "p99"), values.percentiles(50, 95, 99), strict=True))


def _mask_count(method: str | None, record: Mapping[str, Any]) -> int:
    return int(number(setting(record, "decoder", "masks")) or 0) if method == "esp" else 0


def _acceptance_by_depth(lengths: Mapping[int, int], masks: int) -> list[dict[str, Any]]:
    """Share of decode calls that accepted at least d draft tokens, d = 1, 2, ... (accept length - 1 >= d)."""
    calls = sum(lengths.values())
    deepest = max([masks, *(length - 1 for length in lengths)]) if calls else 0
    reached = [sum(count for length, count in lengths.items() if length > depth) for depth in range(1, deepest + 1)]
    return [{"depth": depth, "calls": n, "share": ratio(n, calls)} for depth, n in enumerate(reached, start=1)]


def _errors(totals: Totals) -> list[dict[str, Any]]:
    """The first error rows in input order."""
    return [
        {"row_id": scrub_text(row["row_id"]), "error_type": row["error_type"], "error": _message(row["error"])}
        for row in totals.errors.to_pylist()
    ]


def _message(text: str | None) -> str:
    text = scrub_text(text or "")
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"


# Comparison with plain decoding


def _comparison(totals: Totals, price: float | None, device: str | None, dtype: str | None) -> dict[str, Any]:
    """Both sides on the compared rows alone, and what follows from them. methods: the drafted side's, several where
    resumes changed the setting, the most rows' one first."""
    drafted, ar, rows = _side(totals.compared, price), _side(totals.plain, price), totals.compared.rows
    result = {
        "rows": rows,
        "methods": list(by_frequency(totals.compared_methods)),
        "drafted": drafted,
        "ar": ar,
        "exact_match": {"count": totals.equal, "of": rows, "rate": ratio(totals.equal, rows)},
        "first_divergence": _divergences(totals),
        "speed_up": ratio(drafted["tokens_per_s"], ar["tokens_per_s"]),
        "call_reduction": reduction(drafted["decode_calls_per_token"], ar["decode_calls_per_token"]),
        "length_ratio": ratio(drafted["output_tokens"], ar["output_tokens"]),
    }
    return {**result, "notes": list(_notes(result, device, dtype)) if rows else []}


def _side(rows: SideTotals, price: float | None) -> dict[str, Any]:
    """One side's figures."""
    tokens, calls, engine_s = rows.sums["output_tokens"], rows.sums["decode_calls"], rows.sums["engine_s"]
    return {
        "rows": rows.rows,
        "output_tokens": tokens,
        "decode_calls": calls,
        "decode_calls_per_token": ratio(calls, rows.tokens_after_first),
        "tau": ratio(rows.tokens_after_first, calls),
        "engine_s": engine_s,
        "tokens_per_s": ratio(tokens, engine_s),
        "mean_batch": rows.mean_batch,
        "latency_s": _percentiles(rows.latency),
        "usd_per_1m_tokens": _usd_per_1m(price, engine_s, tokens),
    }


def _divergences(totals: Totals) -> dict[str, Any]:
    """Rows that differ, the earliest difference first. Positions are 0-based among the output tokens; a margin is None
    where it is not known (columns.margin_request says where that is)."""
    first = totals.divergences.to_pylist()
    median, largest = totals.margins.percentiles(50, 100)
    return {
        "min": first[0]["first_divergence"] if first else None,
        "margins": len(totals.margins),
        "margin_median": median,
        "margin_max": largest,
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
    batches = (comparison["drafted"]["mean_batch"], comparison["ar"]["mean_batch"])
    if all(batches) and max(batches) > OCCUPANCY_TOLERANCE * min(batches):
        name = method_names(comparison["methods"])
        yield (
            f"Different occupancy: steps held {batches[0]:.2f} sequences on average with {name} and "
            f"{batches[1]:.2f} with plain decoding; tokens/s and cost compare the two at those batch sizes."
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
