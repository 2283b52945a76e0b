"""The report for people: a few text lines for the end of a job, and one self-contained HTML page.

Shows what report.summarize counted; decides nothing. Figures are inline SVG, all text is escaped, nothing is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import yaml
from jinja2 import Template
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator

from pipeline.figures import ratio
from pipeline.pagekit import (
    AR_COLOR,
    DASH,
    DRAFTED_COLOR,
    INK,
    chart,
    duration,
    fixed,
    integer,
    margin,
    method_names,
    new_figure,
    percent,
    template,
    times,
    usd,
)


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The summary as short aligned lines of plain text."""
    lines = [*_result_lines(summary), *_comparison_lines(summary["comparison"]), *_time_lines(summary)]
    width = max(len(label) for label, _ in lines)
    return [f"{label:<{width}}  {text}" for label, text in lines]


def _result_lines(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    rows, tokens, method = summary["rows"], summary["tokens"], summary["method"]
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in rows["by_error_type"].items())
    yield "rows", f"{rows['done']:,} done, {rows['failed']:,} failed" + (f" ({kinds})" if kinds else "")
    yield "tokens", f"{tokens['prompt']:,} prompt, {tokens['output']:,} output"
    if method["prefix_hit_rate"]:
        yield (
            "prefill",
            f"{method['prefill_tokens']:,} prompt tokens computed, {method['cached_tokens']:,} taken over from equal "
            f"prefixes ({percent(method['prefix_hit_rate'])})",
        )
    if method["tau"] is not None:
        yield (
            f"{method['name']}, all rows",
            f"tau {method['tau']:.3f} tokens/call, {method['decode_calls']:,} decode calls, "
            f"{fixed(method['rows_per_call'], 1)} rows/call, {fixed(method['tokens_per_s'], 1)} tokens/s per device",
        )


def _comparison_lines(comparison: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if not comparison["rows"]:
        yield "compared rows", "none"
        return
    name, drafted, ar = method_names(comparison["methods"]), comparison["drafted"], comparison["ar"]
    match = comparison["exact_match"]
    divergence = comparison["first_divergence"]["min"]
    yield "compared rows", f"{comparison['rows']:,}, decoded with {name} and plainly (AR) on the same engine"
    yield (
        "decode calls",
        f"{name} {drafted['decode_calls']:,}, AR {ar['decode_calls']:,}; per token {name} "
        f"{fixed(drafted['decode_calls_per_token'], 3)}, AR {fixed(ar['decode_calls_per_token'], 3)}; "
        f"call reduction {percent(comparison['call_reduction'])}",
    )
    yield (
        "exact match",
        f"{match['count']:,}/{match['of']:,}"
        + ("" if divergence is None else f", earliest difference at output position {divergence:,}"),
    )
    margins = comparison["first_divergence"]
    if margins["margins"]:
        yield (
            "margin",
            f"where they first differ, plain decoding's two best log-probabilities lie apart by "
            f"{margin(margins['margin_median'])} (median of {margins['margins']:,}), {margin(margins['margin_max'])} "
            "(maximum)",
        )
    yield (
        "tokens/s",
        f"{name} {fixed(drafted['tokens_per_s'], 1)}, AR {fixed(ar['tokens_per_s'], 1)} per device; "
        f"speed-up {times(comparison['speed_up'])}",
    )
    if drafted["usd_per_1m_tokens"] is not None:
        costs = [usd(side["usd_per_1m_tokens"]) for side in (drafted, ar)]
        yield "cost per 1M", f"{name} {costs[0]}, AR {costs[1]} (busy time)"
    yield from (("note", note) for note in comparison["notes"])


def _time_lines(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    time, latency, cost = summary["time"], summary["latency_s"], summary["cost"]
    if latency["p50"] is not None:
        yield "row latency", ", ".join(f"{name} {duration(value)}" for name, value in latency.items())
    if time["steady_s"] is not None:
        yield (
            "time",
            f"load {duration(time['max_load_s'])}, warm-up {duration(time['max_warmup_s'])}, "
            f"steady {duration(time['steady_s'])} (tail {duration(time['tail_s'])})"
            + ("" if time["wall_s"] is None else f", wall {duration(time['wall_s'])}"),
        )
        yield (
            "throughput",
            f"{fixed(time['steady_output_tokens_per_s'], 1)} output tokens/s steady, {len(time['workers'])} worker(s) "
            f"busy {percent(time['busy_share'])}" + (", comparison included" if summary["rows"]["compared"] else ""),
        )
    if cost["allocated_usd"] is not None:
        each = usd(cost["usd_per_1m_tokens"])
        yield (
            "cost, all",
            f"{usd(cost['allocated_usd'])}, {each} per 1M tokens (allocated: load and comparison included)",
        )


# The page


def render_html(summary: Mapping[str, Any]) -> str:
    """One self-contained page: styles and figures inline, no script, nothing fetched."""
    run = summary["run"]
    return _template().render(
        s=summary,
        cards=_cards(summary),
        drafted=method_names(summary["comparison"]["methods"]),
        sides=_side_table(summary["comparison"]),
        charts=_charts(summary),
        config_yaml=_yaml(run.get("config")),
        facts={key: _facts(run.get(key)) for key in ("versions", "machine", "counts")},
        fingerprint=_one_line(run.get("fingerprint")),
    )


@cache
def _template() -> Template:
    return template("pipeline", "report.html.j2")


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True) if value else ""


def _one_line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) if value else ""


def _facts(value: Any) -> list[tuple[str, str]]:
    """A flat list of name and text for a small mapping."""
    if not isinstance(value, Mapping):
        return [("", _one_line(value))] if value else []
    texts = {
        key: item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for key, item in value.items()
    }
    return [(key, DASH if text == "null" else text) for key, text in texts.items()]


def _cards(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """Headline numbers: label, value, detail."""
    rows, method, comparison, cost = summary["rows"], summary["method"], summary["comparison"], summary["cost"]
    match, is_cpu = comparison["exact_match"], summary["device"] == "cpu"
    name = method_names(comparison["methods"])
    cards = [
        ("Rows done", integer(rows["done"]), f"{rows['failed']:,} failed of {rows['total']:,}"),
        ("Output tokens", integer(summary["tokens"]["output"]), f"{summary['tokens']['prompt']:,} prompt tokens"),
        ("Tokens per call", fixed(method["tau"], 3), "mean acceptance length (tau)"),
        ("Call reduction", percent(method["call_reduction"]), "decode calls saved, 1 - 1/tau"),
    ]
    if comparison["rows"]:
        cards += [
            ("Exact match", f"{match['count']:,}/{match['of']:,}", "outputs equal to plain decoding"),
            ("Speed-up", times(comparison["speed_up"]), "CPU ratio" if is_cpu else f"tokens/s, {name} over plain"),
        ]
    if cost["usd_per_1m_tokens"] is not None:
        cards.append(("Cost per 1M", usd(cost["usd_per_1m_tokens"]), "output tokens, allocated time"))
    return [dict(zip(("label", "value", "detail"), card, strict=True)) for card in cards]


def _side_table(comparison: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of the comparison's table: name, drafted, plain decoding, drafted / plain."""
    formats: list[tuple[str, str, Callable[[Any], str]]] = [
        ("output_tokens", "Output tokens", integer),
        ("decode_calls", "Decode calls", integer),
        ("decode_calls_per_token", "Decode calls per token", lambda value: fixed(value, 3)),
        ("engine_s", "Engine time", duration),
        ("tokens_per_s", "Output tokens/s per device", lambda value: fixed(value, 1)),
        ("mean_batch", "Sequences per step", fixed),
        *((f"latency_s.{point}", f"Row latency {point}", duration) for point in ("p50", "p95", "p99")),
        ("usd_per_1m_tokens", "Cost per 1M tokens (busy time)", usd),
    ]
    drafted, ar = _flat(comparison["drafted"]), _flat(comparison["ar"])
    return [
        (label, show(drafted[key]), show(ar[key]), times(ratio(drafted[key], ar[key]))) for key, label, show in formats
    ]


def _flat(side: Mapping[str, Any]) -> dict[str, Any]:
    return {**side, **{f"latency_s.{point}": value for point, value in side["latency_s"].items()}}


# Figures


def _charts(summary: Mapping[str, Any]) -> list[dict[str, str]]:
    """title, caption and image (an SVG data URI) of each figure that has data."""
    method, comparison = summary["method"], summary["comparison"]
    charts = []
    if method["acceptance_by_depth"]:
        charts.append(_depth_chart(method["acceptance_by_depth"]))
    if method["accept_length_counts"]:
        charts.append(_length_chart(method["accept_length_counts"]))
    if comparison["drafted"]["tokens_per_s"] and comparison["ar"]["tokens_per_s"]:
        charts.append(_sides_chart(comparison, "tokens_per_s", "Output tokens/s per device", "higher is better"))
    if comparison["drafted"]["decode_calls_per_token"] and comparison["ar"]["decode_calls_per_token"]:
        charts.append(_sides_chart(comparison, "decode_calls_per_token", "Decode calls per token", "lower is better"))
    return charts


def _depth_chart(depths: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    figure, axes = new_figure()
    shares = [100 * depth["share"] for depth in depths]
    _bars(axes, [depth["depth"] for depth in depths], shares, [f"{share:.1f} %" for share in shares])
    axes.set(xlabel="draft depth", ylabel="% of decode calls")
    return chart(figure, "Acceptance by depth", "Share of decode calls that accepted at least this many draft tokens.")


def _length_chart(counts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    figure, axes = new_figure()
    total = sum(count["calls"] for count in counts)
    shares = [100 * count["calls"] / total for count in counts]
    _bars(axes, [count["length"] for count in counts], shares, [f"{share:.1f} %" for share in shares])
    axes.set(xlabel="tokens committed by the call", ylabel="% of decode calls")
    return chart(figure, "Acceptance lengths", "How many tokens a decode call committed, the bonus token included.")


def _sides_chart(comparison: Mapping[str, Any], key: str, title: str, direction: str) -> dict[str, str]:
    figure, axes = new_figure(height=1.8)
    values = [comparison["ar"][key], comparison["drafted"][key]]
    names = ["plain (AR)", method_names(comparison["methods"])]
    bars = axes.barh(names, values, color=[AR_COLOR, DRAFTED_COLOR], height=0.5)
    labels = [f"{value:#.3g}" if value < 100 else f"{value:,.0f}" for value in values]
    axes.bar_label(bars, labels, padding=4, color=INK)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.18 * max(values))
    return chart(figure, title, f"On the {comparison['rows']:,} compared rows; {direction}.")


def _bars(axes: Axes, positions: Sequence[int], heights: Sequence[float], labels: Sequence[str]) -> None:
    bars = axes.bar(positions, heights, color=DRAFTED_COLOR, width=0.6)
    if len(positions) <= 9:
        axes.bar_label(bars, labels, padding=2, color=INK, fontsize=9)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(FixedLocator(positions) if len(positions) <= 9 else MaxNLocator(integer=True))
    axes.set_xlim(min(positions) - 0.8, max(positions) + 0.8)
    axes.set_ylim(0, 1.15 * max(*heights, 1.0))
