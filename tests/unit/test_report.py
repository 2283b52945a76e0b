"""The report's figures against numbers worked out by hand, and the page against what must not be in it."""

from __future__ import annotations

import base64
import json
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from html_page import Page

from pipeline import report as reports
from pipeline.config import parse_config
from pipeline.decoder_config import SETTINGS_OF
from pipeline.page import render_html, summary_lines
from pipeline.pagekit import METHOD_NAMES
from pipeline.report import AUTO_NOTE, CPU_NOTE, HALF_NOTE
from pipeline.schema import output_schema
from pipeline.totals import REPORT_COLUMNS, Totals

START = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
AR_COLUMNS = [name for name in REPORT_COLUMNS if name.startswith("ar_")]


def identity(index: int) -> dict[str, Any]:
    return {
        "row_id": f"r{index}",
        "row_key": index,
        "source_file": "in.jsonl",
        "row_index": index,
        "sample_index": 0,
    }


def done_row(index: int, accept_lengths: list[int], **values: Any) -> dict[str, Any]:
    """A drafted row; its counters follow from its accept lengths: 4 drafts and 10 rows a call, 10 prompt tokens."""
    calls, given = len(accept_lengths), sum(accept_lengths)
    row = {
        **identity(index),
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "output_tokens": 1 + given,
        "decode_calls": calls,
        "plain_steps": calls // 2,
        "prefill_calls": 1,
        "rows_computed": 10 * calls,
        "accept_lengths": accept_lengths,
        "tau": given / calls if calls else None,
        "drafted_tokens": 4 * calls,
        "accepted_tokens": given - calls,
        "method": "esp",
        "seed": index,
        "latency_s": 2.0,
        "engine_s": 1.0,
        "mean_batch": 2.0 if calls else None,
        "finished_at": START,
        "worker": "w0",
        "worker_load_s": 3.0,
        "worker_warmup_s": 0.5,
    }
    return {**row, **values}


def compared_with(row: dict[str, Any], *, engine_s: float, first_divergence: int | None = None) -> dict[str, Any]:
    """`row` with plain decoding beside it: as many tokens, one decode call each."""
    return {
        **row,
        "ar_decode_calls": row["output_tokens"] - 1,
        "ar_output_tokens": row["output_tokens"],
        "ar_latency_s": 2 * row["latency_s"],
        "ar_engine_s": engine_s,
        "ar_mean_batch": row["mean_batch"],
        "exact_match": first_divergence is None,
        "first_divergence": first_divergence,
    }


def error_row(index: int, message: str = "no", kind: str = "malformed", **values: Any) -> dict[str, Any]:
    return {**identity(index), "finish_reason": "error", "error": message, "error_type": kind, **values}


def table_of(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=output_schema({}))


def summarize(*tables: pa.Table, run: dict[str, Any]) -> dict[str, Any]:
    totals = Totals()
    for table in tables:
        totals.add(table)
    return reports.summarize(totals, run=run)


def build_report(table: pa.Table, run: dict[str, Any]) -> tuple[bytes, bytes]:
    return reports.build_report(summarize(table, run=run))


def run_record(
    *, device: str = "cpu", dtype: str = "float32", price: float | None = None, **more: Any
) -> dict[str, Any]:
    config = {
        "input": {"path": "in.jsonl"},
        "output": {"path": "out"},
        "model": {"path": "m", "device": device, "dtype": dtype},
        "decoder": {"method": "esp", "masks": 2},
        "cost": {"device_hour_usd": price},
    }
    return {"config": parse_config(config).model_dump(), **more}


@pytest.fixture
def two_rows() -> pa.Table:
    """12 output tokens in 6 decode calls: accept lengths 1, 2, 3 and 1, 1, 2."""
    return table_of(
        done_row(0, [1, 2, 3], mean_batch=3.0, engine_s=1.5),
        done_row(1, [1, 1, 2], mean_batch=1.0, engine_s=0.5, finish_reason="length"),
    )


# Method figures


def test_method_figures(two_rows: pa.Table) -> None:
    summary = summarize(two_rows, run=run_record())
    method = summary["method"]
    assert summary["tokens"] == {"prompt": 20, "output": 12}
    assert (method["name"], method["rows"], method["prefill_calls"], method["decode_calls"]) == ("esp", 2, 2, 6)
    assert method["tau"] == pytest.approx(10 / 6)
    assert method["decode_calls_per_token"] == pytest.approx(6 / 10)
    assert method["call_reduction"] == pytest.approx(0.4)
    assert method["rows_per_call"] == 10
    assert method["plain_call_share"] == pytest.approx(
        sum(calls // 2 for calls in two_rows["decode_calls"].to_pylist()) / 6
    )
    assert (method["drafted_tokens"], method["accepted_tokens"]) == (24, 4)
    assert method["draft_acceptance_rate"] == pytest.approx(4 / 24)
    assert method["tokens_per_s"] == pytest.approx(12 / 2.0)
    assert method["mean_batch"] == pytest.approx(2.0)


def test_acceptance_by_depth_and_lengths(two_rows: pa.Table) -> None:
    method = summarize(two_rows, run=run_record())["method"]
    assert method["accept_length_counts"] == [
        {"length": 1, "calls": 3},
        {"length": 2, "calls": 2},
        {"length": 3, "calls": 1},
    ]
    assert method["acceptance_by_depth"] == [
        {"depth": 1, "calls": 3, "share": 0.5},
        {"depth": 2, "calls": 1, "share": pytest.approx(1 / 6)},
    ]


def test_depths_that_were_never_accepted_are_shown_up_to_the_masks() -> None:
    method = summarize(table_of(done_row(0, [1, 1])), run=run_record())["method"]
    assert [(item["depth"], item["share"]) for item in method["acceptance_by_depth"]] == [(1, 0.0), (2, 0.0)]


def test_mean_batch_weighs_rows_by_their_decode_calls() -> None:
    table = table_of(done_row(0, [1, 1, 1], mean_batch=4.0), done_row(1, [1], mean_batch=1.0), done_row(2, []))
    assert summarize(table, run={})["method"]["mean_batch"] == pytest.approx(13 / 4)


def test_rows_of_one_token_have_no_decode_calls() -> None:
    method = summarize(table_of(done_row(0, [])), run=run_record())["method"]
    assert method["decode_calls"] == 0
    for key in ("tau", "decode_calls_per_token", "call_reduction", "rows_per_call", "mean_batch"):
        assert method[key] is None
    assert method["acceptance_by_depth"] == []


def test_rows_by_reason_and_error(two_rows: pa.Table) -> None:
    table = pa.concat_tables([two_rows, table_of(error_row(2), error_row(3), error_row(4, kind="decode"))])
    rows = summarize(table, run={})["rows"]
    assert rows == {
        "total": 5,
        "done": 2,
        "failed": 3,
        "failed_share": 0.6,
        "compared": 0,
        "by_finish_reason": {"error": 3, "length": 1, "stop": 1},
        "by_error_type": {"malformed": 2, "decode": 1},
    }


def test_latency_percentiles_interpolate() -> None:
    table = table_of(*(done_row(index, [1], latency_s=float(index)) for index in range(101)))
    assert summarize(table, run={})["latency_s"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    two = table_of(done_row(0, [1], latency_s=1.0), done_row(1, [1], latency_s=3.0))
    assert summarize(two, run={})["latency_s"]["p95"] == pytest.approx(2.9)


# Comparison


@pytest.fixture
def compared_table() -> pa.Table:
    """Two compared rows (12 tokens, drafted 2 s, plain 4 s) and one that is not, which must not count."""
    return table_of(
        compared_with(done_row(0, [1, 2, 3], mean_batch=2.0, engine_s=1.5, latency_s=1.0), engine_s=3.0),
        compared_with(done_row(1, [1, 1, 2], mean_batch=2.0, engine_s=0.5, latency_s=3.0), engine_s=1.0),
        done_row(2, [1] * 50, engine_s=100.0, latency_s=100.0),
    )


def test_comparison_counts_the_compared_rows_alone(compared_table: pa.Table) -> None:
    comparison = summarize(compared_table, run=run_record(price=3.6))["comparison"]
    drafted, ar = comparison["drafted"], comparison["ar"]
    assert comparison["methods"] == ["esp"]
    assert comparison["rows"] == drafted["rows"] == ar["rows"] == 2
    assert drafted.keys() == ar.keys()
    assert (drafted["output_tokens"], ar["output_tokens"]) == (12, 12)
    assert (drafted["decode_calls"], ar["decode_calls"]) == (6, 10)
    assert (drafted["decode_calls_per_token"], ar["decode_calls_per_token"]) == (pytest.approx(0.6), 1.0)
    assert (drafted["engine_s"], ar["engine_s"]) == (2.0, 4.0)
    assert (drafted["tokens_per_s"], ar["tokens_per_s"]) == (6.0, 3.0)
    assert (drafted["mean_batch"], ar["mean_batch"]) == (2.0, 2.0)
    assert (drafted["latency_s"]["p50"], ar["latency_s"]["p50"]) == (2.0, 4.0)
    assert comparison["speed_up"] == 2.0
    assert comparison["call_reduction"] == pytest.approx(0.4)
    assert comparison["length_ratio"] == 1.0
    assert comparison["exact_match"] == {"count": 2, "of": 2, "rate": 1.0}
    unknown = {"margins": 0, "margin_median": None, "margin_max": None}
    assert comparison["first_divergence"] == {"min": None, "rows": [], **unknown}


def test_cost_of_each_side(compared_table: pa.Table) -> None:
    comparison = summarize(compared_table, run=run_record(price=3.6))["comparison"]
    # 3.6 $/h is 0.001 $/s: 2 s and 4 s for 12 tokens.
    assert comparison["drafted"]["usd_per_1m_tokens"] == pytest.approx(0.002 / 12 * 1e6)
    assert comparison["ar"]["usd_per_1m_tokens"] == pytest.approx(0.004 / 12 * 1e6)


def test_divergences_are_listed_earliest_first_up_to_ten() -> None:
    rows = [compared_with(done_row(i, [2] * 20), engine_s=1.0, first_divergence=30 - i) for i in range(12)]
    comparison = summarize(table_of(*rows), run=run_record(dtype="bfloat16", device="cuda"))["comparison"]
    assert comparison["exact_match"] == {"count": 0, "of": 12, "rate": 0.0}
    assert comparison["first_divergence"]["min"] == 19
    assert len(comparison["first_divergence"]["rows"]) == 10
    first = {"row_id": "r11", "sample_index": 0, "position": 19, "margin": None}
    assert comparison["first_divergence"]["rows"][0] == first


def test_margins_where_outputs_first_differ() -> None:
    margins = [0.5, None, 0.0, 0.25, 2.0]
    rows = [
        {**compared_with(done_row(i, [2]), engine_s=1.0, first_divergence=1), "divergence_margin": margin}
        for i, margin in enumerate(margins)
    ]
    rows.append(compared_with(done_row(9, [2]), engine_s=1.0))
    summary = summarize(table_of(*rows), run=run_record(dtype="bfloat16", device="cuda"))
    divergence = summary["comparison"]["first_divergence"]
    assert [row["margin"] for row in divergence["rows"]] == margins
    assert (divergence["margins"], divergence["margin_median"], divergence["margin_max"]) == (4, 0.375, 2.0)
    (line,) = [line for line in summary_lines(summary) if line.startswith("margin ")]
    assert "0.375 (median of 4), 2 (maximum)" in line
    text = Page(render_html(summary)).text
    assert "median\n0.375, maximum 2,\nknown for 4 rows" in text
    assert "16-bit: near-ties may flip; exact match is reported, not promised." in text


def test_prefix_cache() -> None:
    table = table_of(
        done_row(0, [1], prefill_tokens=10, cached_tokens=0),
        done_row(1, [1], prefill_tokens=2, cached_tokens=8),
        error_row(2),
    )
    summary = summarize(table, run=run_record())
    method = summary["method"]
    assert (method["prefill_tokens"], method["cached_tokens"], method["prefix_hit_rate"]) == (12, 8, 0.4)
    assert any(
        "12 prompt tokens computed, 8 taken over" in line and "40.0 %" in line for line in summary_lines(summary)
    )
    assert "40.0 %" in Page(render_html(summary)).text
    assert summarize(table_of(error_row(0)), run={})["method"]["prefix_hit_rate"] is None


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", "float32", [CPU_NOTE, "float32: exact match is expected to be 1.0."]),
        ("cpu", "float64", [CPU_NOTE, "float64: exact match is expected to be 1.0."]),
        ("cuda:0", "bfloat16", [HALF_NOTE]),
        ("cuda", "float16", [HALF_NOTE]),
        ("cuda", "auto", [AUTO_NOTE]),
    ],
)
def test_notes_name_device_and_precision(
    compared_table: pa.Table, device: str, dtype: str, expected: list[str]
) -> None:
    assert summarize(compared_table, run=run_record(device=device, dtype=dtype))["comparison"]["notes"] == expected


def test_a_float32_mismatch_is_called_out() -> None:
    table = table_of(compared_with(done_row(0, [2, 2]), engine_s=1.0, first_divergence=3))
    notes = summarize(table, run=run_record(device="cuda"))["comparison"]["notes"]
    assert notes == ["float32: exact match is expected to be 1.0, but 1 of 1 rows differ."]


@pytest.mark.parametrize(("ar_batch", "noted"), [(5.0, False), (4.8, True), (7.3, True), (7.1, False)])
def test_different_occupancy_is_noted_beyond_a_fifth(ar_batch: float, noted: bool) -> None:
    row = compared_with(done_row(0, [1, 2], mean_batch=6.0), engine_s=1.0)
    notes = summarize(table_of({**row, "ar_mean_batch": ar_batch}), run=run_record(device="cuda"))["comparison"][
        "notes"
    ]
    assert any("6.00" in note and f"{ar_batch:.2f}" in note for note in notes) is noted


@pytest.mark.parametrize(
    ("run", "device"),
    [
        ({}, None),
        ({"machine": {"cpu": "x", "gpu": None}}, "cpu"),
        ({"machine": {"cpu": "x", "gpu": "H200"}}, "cuda"),
        ({"config": {"model": {"device": "cuda:1"}}}, "cuda"),
        ({"config": {"model": {"device": "auto"}, "cluster": {"num_gpus": 1.0}}, "machine": {"gpu": None}}, "cuda"),
        ({"config": {"model": {"device": "auto"}, "cluster": {"num_gpus": 0.0}}, "machine": {"gpu": "H200"}}, "cpu"),
    ],
)
def test_device_comes_from_settings_then_machine(run: dict[str, Any], device: str | None) -> None:
    assert summarize(table_of(), run=run)["device"] == device


# Time and cost


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.fixture
def two_workers() -> pa.Table:
    """w0 works from 0 to 20 s, w1 from 2 to 16 s."""
    w0 = {"worker": "w0", "worker_load_s": 3.0, "worker_warmup_s": 0.5}
    w1 = {"worker": "w1", "worker_load_s": 4.0, "worker_warmup_s": 0.25}
    return table_of(
        done_row(0, [1] * 9, finished_at=at(10), latency_s=10.0, engine_s=4.0, **w0),
        compared_with(done_row(1, [1] * 9, finished_at=at(20), latency_s=5.0, engine_s=4.0, **w0), engine_s=6.0),
        done_row(2, [1] * 19, finished_at=at(16), latency_s=14.0, engine_s=7.0, **w1),
        error_row(3),
    )


def test_time_of_two_workers(two_workers: pa.Table) -> None:
    time = summarize(two_workers, run=run_record(wall_s=30))["time"]
    w0, w1 = time["workers"]
    assert (w0["worker"], w0["rows"], w0["output_tokens"], w0["load_s"], w0["warmup_s"]) == ("w0", 2, 20, 3.0, 0.5)
    assert (w0["span_s"], w0["busy_s"], w0["busy_share"]) == (20.0, 14.0, 0.7)
    assert (w1["worker"], w1["rows"], w1["span_s"], w1["busy_share"]) == ("w1", 1, 14.0, 0.5)
    assert w1["first_start"] == "2026-01-01T12:00:02+00:00"
    assert w1["last_finish"] == "2026-01-01T12:00:16+00:00"
    assert (time["first_start"], time["last_finish"]) == (w0["first_start"], w0["last_finish"])
    assert (time["sessions"], time["steady_s"], time["gap_s"], time["tail_s"]) == (1, 20.0, 0.0, 4.0)
    assert (time["max_load_s"], time["max_warmup_s"]) == (4.0, 0.5)
    assert time["steady_output_tokens_per_s"] == 40 / 20
    assert time["steady_prompt_tokens_per_s"] == 30 / 20
    assert time["steady_output_tokens_per_s_per_worker"] == pytest.approx(40 / 34)
    assert (time["busy_s"], time["busy_share"]) == (21.0, pytest.approx(21 / 34))
    assert time["allocated_device_s"] == pytest.approx(20 + 3.5 + 14 + 4.25)
    assert time["wall_s"] == 30.0


def test_allocated_cost(two_workers: pa.Table) -> None:
    cost = summarize(two_workers, run=run_record(price=3.6))["cost"]
    assert cost["allocated_usd"] == pytest.approx(0.04175)
    assert cost["usd_per_1m_tokens"] == pytest.approx(0.04175 / 40 * 1e6)
    free = summarize(two_workers, run=run_record())["cost"]
    assert free["allocated_device_s"] == pytest.approx(41.75)
    assert free["device_hour_usd"] is free["allocated_usd"] is free["usd_per_1m_tokens"] is None


def test_a_resumed_job_has_sessions_and_its_pause_is_no_steady_time(two_workers: pa.Table) -> None:
    later = table_of(done_row(9, [1] * 9, finished_at=at(1010), latency_s=10.0, worker="w2"))
    time = summarize(pa.concat_tables([two_workers, later]), run={})["time"]
    assert (time["sessions"], time["steady_s"], time["gap_s"], time["tail_s"]) == (2, 30.0, 980.0, 0.0)


def test_a_zero_price_is_a_price(two_workers: pa.Table) -> None:
    assert summarize(two_workers, run=run_record(price=0.0))["cost"]["allocated_usd"] == 0.0


# Absent figures

EMPTY = table_of()
ONLY_ERRORS = table_of(error_row(0), error_row(1, "engine failed", "decode", worker="w0", finished_at=START))
NO_COMPARISON = table_of(done_row(0, [1, 2]))
PLAIN = table_of(done_row(0, [1, 1], method="ar", drafted_tokens=0, accepted_tokens=0))
NOTHING_TIMED = table_of(
    {**identity(0), "finish_reason": "stop"},
    compared_with(done_row(1, [1], latency_s=0.0, engine_s=0.0, worker=None), engine_s=0.0),
)


@pytest.mark.parametrize("table", [EMPTY, ONLY_ERRORS, NO_COMPARISON, PLAIN, NOTHING_TIMED])
@pytest.mark.parametrize("run", [{}, run_record(price=2.0, wall_s=1.5, status="complete")])
def test_every_table_gives_all_keys_and_a_report(table: pa.Table, run: dict[str, Any]) -> None:
    full = summarize(table_of(compared_with(done_row(0, [1, 2]), engine_s=1.0)), run=run)
    summary = summarize(table, run=run)
    assert shape(summary) == shape(full)
    report, page = build_report(table, run)
    assert json.loads(report) == summary
    assert Page(page.decode()).open == []
    assert all(line == line.rstrip() for line in summary_lines(summary))


def shape(value: Any) -> Any:
    """Nested keys, without the ones that are data."""
    data = ("run", "by_finish_reason", "by_error_type")
    return {key: shape(item) for key, item in value.items() if key not in data} if isinstance(value, dict) else None


def test_no_rows() -> None:
    summary = summarize(EMPTY, run={})
    assert summary["rows"]["total"] == 0
    assert summary["rows"]["failed_share"] is None
    assert summary["method"]["tau"] is None
    assert summary["latency_s"] == {"p50": None, "p95": None, "p99": None}
    assert summary["time"]["workers"] == []
    assert summary["time"]["steady_s"] is summary["time"]["tail_s"] is summary["time"]["wall_s"] is None
    assert summary["errors"] == []


def test_all_errors() -> None:
    summary = summarize(ONLY_ERRORS, run={})
    assert (summary["rows"]["done"], summary["rows"]["failed_share"]) == (0, 1.0)
    assert summary["method"]["tokens_per_s"] is None
    assert summary["time"]["steady_s"] == 0.0
    assert summary["time"]["workers"][0]["busy_share"] is None
    assert summary["errors"][1] == {"row_id": "r1", "error_type": "decode", "error": "engine failed"}


def test_plain_decoding_alone() -> None:
    method = summarize(PLAIN, run=run_record())["method"]
    assert (method["name"], method["tau"], method["call_reduction"]) == ("ar", 1.0, 0.0)
    assert method["draft_acceptance_rate"] is None
    assert method["acceptance_by_depth"] == []


def test_no_comparison_has_no_notes() -> None:
    comparison = summarize(NO_COMPARISON, run=run_record())["comparison"]
    assert (comparison["rows"], comparison["notes"], comparison["speed_up"]) == (0, [], None)
    assert comparison["exact_match"] == {"count": 0, "of": 0, "rate": None}


def test_report_columns_are_output_columns_without_the_texts() -> None:
    schema = output_schema({})
    assert set(REPORT_COLUMNS) <= set(schema.names)
    assert not {"text", "token_ids"} & set(REPORT_COLUMNS)
    table = table_of(compared_with(done_row(0, [1, 2]), engine_s=1.0), error_row(1))
    assert summarize(table.select(REPORT_COLUMNS), run={}) == summarize(table, run={})
    assert set(AR_COLUMNS) == {name for name in schema.names if name.startswith("ar_")}


def test_chunks_do_not_matter() -> None:
    rows = [compared_with(done_row(i, [1, 2, 1 + i % 3], worker=f"w{i % 2}"), engine_s=2.0) for i in range(9)]
    rows.append(error_row(9))
    pieces = pa.concat_tables([table_of(row) for row in rows])
    assert summarize(pieces.slice(1), run={}) == summarize(table_of(*rows).combine_chunks().slice(1), run={})


def test_shard_by_shard_is_as_all_at_once() -> None:
    rows = [compared_with(done_row(i, [1, 2, 1 + i % 3], worker=f"w{i % 2}"), engine_s=2.0) for i in range(9)]
    rows += [compared_with(done_row(i, [2], latency_s=i / 7), engine_s=1.0, first_divergence=i) for i in range(20, 40)]
    rows += [done_row(50, [1], method="ar", worker="w2"), *(error_row(i, kind=f"k{i % 3}") for i in range(60, 90))]
    rows.sort(key=lambda row: row["row_index"] * 37 % 101)
    shards = [table_of(*rows[start : start + 7]) for start in range(0, len(rows), 7)]
    assert summarize(*shards, table_of(), run=run_record()) == summarize(table_of(*rows), run=run_record())


def test_of_each_row_a_latency_is_kept_and_no_more() -> None:
    """A job's memory follows from this: its driver adds up a table at a time."""
    table = table_of(*(done_row(i, [1, 2, 3], row_id=f"row {i} " * 20) for i in range(1000)))
    totals = Totals()
    sizes = []
    for _ in range(3):
        totals.add(table)
        sizes.append(len(pickle.dumps(totals)))
    assert sizes[2] - sizes[1] == pytest.approx(8 * table.num_rows, abs=200)


def test_first_errors_are_in_input_order_and_messages_are_cut() -> None:
    rows = [error_row(index, "x" * 2000) for index in reversed(range(30))]
    errors = summarize(table_of(*rows), run={})["errors"]
    assert [error["row_id"] for error in errors] == [f"r{index}" for index in range(20)]
    assert all(len(error["error"]) == 501 for error in errors)


# Text


def test_summary_lines(compared_table: pa.Table) -> None:
    table = pa.concat_tables([compared_table, table_of(error_row(3))])
    lines = summary_lines(summarize(table, run=run_record(price=3.6, wall_s=9.0)))
    text = "\n".join(lines)
    assert 10 <= len(lines) <= 15
    assert len({len(line) - len(line.split("  ", 1)[1].lstrip()) for line in lines}) == 1
    assert "3 done, 1 failed (malformed 1)" in text
    assert "ESP 6, AR 10" in text
    assert "call reduction 40.0 %" in text
    assert "2/2" in text
    assert "ESP 6.0, AR 3.0 per device; speed-up 2.00x" in text
    assert CPU_NOTE in text
    assert "ESP $166.67, AR $333.33" in text
    assert "load 3.0 s, warm-up 500 ms" in text
    assert "wall 9.0 s" in text


def test_summary_lines_without_price_or_comparison() -> None:
    text = "\n".join(summary_lines(summarize(NO_COMPARISON, run={})))
    assert "compared rows" in text
    assert "$" not in text
    assert "wall" not in text


# Names


@pytest.mark.parametrize(
    ("methods", "name"),
    [
        (["hybrid"], "hybrid"),
        (["pld"], "PLD"),
        (["esp"], "ESP"),
        (["lade", "hybrid", "hybrid"], "hybrid + LADE"),
        (["stand", "ar", "ar"], "STAND"),  # resumed with plain decoding: the compared row is the first start's
    ],
)
def test_the_drafted_side_is_called_what_it_is(methods: list[str], name: str) -> None:
    rows = [done_row(i, [1, 2], method=method) for i, method in enumerate(methods)]
    compared = [compared_with(row, engine_s=2.0) for row in rows if row["method"] != "ar"]
    uneven = [{**row, "ar_mean_batch": 9.0} for row in compared]  # which a note says
    plain = [row for row in rows if row["method"] == "ar"]
    summary = summarize(table_of(*uneven, *plain), run=run_record(device="cuda", price=3.6))
    lines, page = summary_lines(summary), Page(render_html(summary))
    for label, words in (
        ("compared rows", f"with {name} and plainly"),
        ("decode calls", f"  {name} {2 * len(compared)}, AR"),
        ("decode calls", f"per token {name} 0.667, AR"),
        ("tokens/s", f"  {name} 4.0, AR"),
        ("cost per 1M", f"  {name} $"),
        ("note", f"on average with {name} and"),
    ):
        assert any(line.startswith(label) and words in line for line in lines), (label, words)
    assert [name, "Plain (AR)", f"{name} / plain"] in [row[1:] for row in page.rows]
    assert f"tokens/s, {name} over plain" in page.text
    images = [base64.b64decode(value.partition("base64,")[2]) for tag, value in page.attributes if tag == "src"]
    assert sum(f"<!-- {name} -->".encode() in image for image in images) == 2, "both charts of the two sides"
    text = "\n".join([*lines, page.text, *(image.decode() for image in images)])
    others = [other for other in METHOD_NAMES.values() if other not in ("AR", *name.split(" + "))]
    assert not [other for other in others if other in text]


def test_every_method_has_a_name() -> None:
    assert METHOD_NAMES.keys() == SETTINGS_OF.keys()


# The page


def full_page() -> str:
    table = table_of(
        compared_with(done_row(0, [1, 2, 3]), engine_s=3.0),
        compared_with(done_row(1, [1, 2], row_id="<script>alert(1)</script>"), engine_s=3.0, first_divergence=1),
        error_row(2, "<script>alert('boom')</script> & more", row_id='"><img src=x onerror=alert(2)>'),
    )
    run = run_record(
        price=2.0,
        versions={"torch": "2.9.1", "<b>x</b>": None},
        machine={"cpu": "EPYC", "cores": 16, "gpu": None},
        fingerprint="abc123",
        counts={"resumed": 4},
        wall_s=12.0,
    )
    return render_html(summarize(table, run=run))


def test_page_escapes_rows_and_errors() -> None:
    html = full_page()
    page = Page(html)
    assert "<script" not in html
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.text
    assert "<script>alert('boom')</script> & more" in page.text
    assert page.tags.count("img") == 4
    assert "onerror" not in dict(page.attributes)
    assert "b" not in page.tags


def test_page_is_well_formed_and_fetches_nothing() -> None:
    page = Page(full_page())
    assert page.open == []
    assert "link" not in page.tags
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action", "xlink:href")]
    assert links
    assert all(link.startswith("data:image/") for link in links)
    assert not [value for _, value in page.attributes if value.startswith(("http:", "https:", "//"))]


def test_page_shows_the_run() -> None:
    text = Page(full_page()).text
    for expected in ("abc123", "2.9.1", "EPYC", "device_hour_usd: 2.0", "resumed", "1/2 (50.0 %)", CPU_NOTE):
        assert expected in text


def test_pages_of_equal_runs_are_equal() -> None:
    assert full_page() == full_page()


# Credentials


def test_no_credential_reaches_a_report() -> None:
    run = run_record(fingerprint={"token": "hunter2"}, machine={"gpu": "H200", "ssh_key": "hunter2"}, secret="hunter2")
    run["config"]["input"]["path"] = ["s3://id:hunter2@bucket/in", "https://host/in.jsonl?sig=hunter2"]
    run["config"]["model"]["hf_token"] = "hunter2"
    rows = [
        error_row(0, "GET https://u:hunter2@host/x?sig=hunter2 failed", row_id="s3://u:hunter2@b/x:1"),
        compared_with(done_row(1, [2], row_id="s3://u:hunter2@b/x:2"), engine_s=1.0, first_divergence=0),
    ]
    report, page = build_report(table_of(*rows), run)
    assert b"hunter2" not in report
    assert b"hunter2" not in page
    assert b"bucket/in" in page


def test_odd_run_values_stay_json() -> None:
    run = {"wall_s": float("nan"), "versions": ("a", START), "counts": {1: float("inf")}, "status": None}
    report = json.loads(build_report(EMPTY, run)[0])
    assert report["time"]["wall_s"] is None
    assert report["run"] == {"wall_s": None, "versions": ["a", str(START)], "counts": {"1": None}}
