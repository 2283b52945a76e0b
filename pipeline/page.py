"""The report for people: a few text lines for the end of a job, and one self-contained HTML page.

Shows what report.summarize counted; decides nothing. Figures are inline SVG, all text is escaped, nothing is fetched.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import matplotlib
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator


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
            f"prefixes ({_percent(method['prefix_hit_rate'])})",
        )
    if method["tau"] is not None:
        yield (
            f"{method['name']}, all rows",
            f"tau {method['tau']:.3f} tokens/call, {method['decode_calls']:,} decode calls, "
            f"{_fixed(method['rows_per_call'], 1)} rows/call, {_fixed(method['tokens_per_s'], 1)} tokens/s per device",
        )


def _comparison_lines(comparison: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if not comparison["rows"]:
        yield "compared rows", "none"
        return
    esp, ar, match = comparison["esp"], comparison["ar"], comparison["exact_match"]
    divergence = comparison["first_divergence"]["min"]
    yield "compared rows", f"{comparison['rows']:,}, decoded with ESP and plainly (AR) on the same engine"
    yield (
        "decode calls",
        f"ESP {esp['decode_calls']:,}, AR {ar['decode_calls']:,}; per token ESP "
        f"{_fixed(esp['decode_calls_per_token'], 3)}, AR {_fixed(ar['decode_calls_per_token'], 3)}; "
        f"call reduction {_percent(comparison['call_reduction'])}",
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
            f"{_margin(margins['margin_median'])} (median of {margins['margins']:,}), {_margin(margins['margin_max'])} "
            "(maximum)",
        )
    yield (
        "tokens/s",
        f"ESP {_fixed(esp['tokens_per_s'], 1)}, AR {_fixed(ar['tokens_per_s'], 1)} per device; "
        f"speed-up {_times(comparison['speed_up'])}",
    )
    if esp["usd_per_1m_tokens"] is not None:
        yield "cost per 1M", f"ESP {_usd(esp['usd_per_1m_tokens'])}, AR {_usd(ar['usd_per_1m_tokens'])} (busy time)"
    yield from (("note", note) for note in comparison["notes"])


def _time_lines(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    time, latency, cost = summary["time"], summary["latency_s"], summary["cost"]
    if latency["p50"] is not None:
        yield "row latency", ", ".join(f"{name} {_duration(value)}" for name, value in latency.items())
    if time["steady_s"] is not None:
        yield (
            "time",
            f"load {_duration(time['max_load_s'])}, warm-up {_duration(time['max_warmup_s'])}, "
            f"steady {_duration(time['steady_s'])} (tail {_duration(time['tail_s'])})"
            + ("" if time["wall_s"] is None else f", wall {_duration(time['wall_s'])}"),
        )
        yield (
            "throughput",
            f"{_fixed(time['steady_output_tokens_per_s'], 1)} output tokens/s steady, {len(time['workers'])} worker(s) "
            f"busy {_percent(time['busy_share'])}" + (", comparison included" if summary["rows"]["compared"] else ""),
        )
    if cost["allocated_usd"] is not None:
        each = _usd(cost["usd_per_1m_tokens"])
        yield (
            "cost, all",
            f"{_usd(cost['allocated_usd'])}, {each} per 1M tokens (allocated: load and comparison included)",
        )


# Formats, shared by the text and the page

DASH = "\u2013"  # the page's and the lines' mark for an absent figure: an en dash


def _fixed(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"


def _integer(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.1f} %"


def _times(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}x"


def _usd(value: float | None) -> str:
    if value is None:
        return DASH
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.3g}"


def _margin(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 300:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


# The page

ESP_COLOR, AR_COLOR, INK, GRID = "#2457d6", "#9aa6b8", "#46505f", "#e6e9ef"


def render_html(summary: Mapping[str, Any]) -> str:
    """One self-contained page: styles and figures inline, no script, nothing fetched."""
    run = summary["run"]
    return _template().render(
        s=summary,
        cards=_cards(summary),
        sides=_side_table(summary["comparison"]),
        charts=_charts(summary),
        config_yaml=_yaml(run.get("config")),
        facts={key: _facts(run.get(key)) for key in ("versions", "machine", "counts")},
        fingerprint=_one_line(run.get("fingerprint")),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("pipeline"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "fixed": _fixed,
        "integer": _integer,
        "percent": _percent,
        "times": _times,
        "usd": _usd,
        "duration": _duration,
        "margin": _margin,
    }
    environment.filters.update(filters)
    return environment.get_template("report.html.j2")


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
    cards = [
        ("Rows done", _integer(rows["done"]), f"{rows['failed']:,} failed of {rows['total']:,}"),
        ("Output tokens", _integer(summary["tokens"]["output"]), f"{summary['tokens']['prompt']:,} prompt tokens"),
        ("Tokens per call", _fixed(method["tau"], 3), "mean acceptance length (tau)"),
        ("Call reduction", _percent(method["call_reduction"]), "decode calls saved, 1 - 1/tau"),
    ]
    if comparison["rows"]:
        cards += [
            ("Exact match", f"{match['count']:,}/{match['of']:,}", "outputs equal to plain decoding"),
            ("Speed-up", _times(comparison["speed_up"]), "CPU ratio" if is_cpu else "tokens/s, ESP over plain"),
        ]
    if cost["usd_per_1m_tokens"] is not None:
        cards.append(("Cost per 1M", _usd(cost["usd_per_1m_tokens"]), "output tokens, allocated time"))
    return [dict(zip(("label", "value", "detail"), card, strict=True)) for card in cards]


def _side_table(comparison: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows of the comparison's table: name, ESP, plain decoding, ESP / plain."""
    formats: list[tuple[str, str, Callable[[Any], str]]] = [
        ("output_tokens", "Output tokens", _integer),
        ("decode_calls", "Decode calls", _integer),
        ("decode_calls_per_token", "Decode calls per token", lambda value: _fixed(value, 3)),
        ("engine_s", "Engine time", _duration),
        ("tokens_per_s", "Output tokens/s per device", lambda value: _fixed(value, 1)),
        ("mean_batch", "Sequences per step", _fixed),
        *((f"latency_s.{point}", f"Row latency {point}", _duration) for point in ("p50", "p95", "p99")),
        ("usd_per_1m_tokens", "Cost per 1M tokens (busy time)", _usd),
    ]
    esp, ar = _flat(comparison["esp"]), _flat(comparison["ar"])
    return [
        (label, show(esp[key]), show(ar[key]), _times(esp[key] / ar[key] if esp[key] is not None and ar[key] else None))
        for key, label, show in formats
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
    if comparison["esp"]["tokens_per_s"] and comparison["ar"]["tokens_per_s"]:
        charts.append(_sides_chart(comparison, "tokens_per_s", "Output tokens/s per device", "higher is better"))
    if comparison["esp"]["decode_calls_per_token"] and comparison["ar"]["decode_calls_per_token"]:
        charts.append(_sides_chart(comparison, "decode_calls_per_token", "Decode calls per token", "lower is better"))
    return charts


def _depth_chart(depths: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    figure, axes = new_figure()
    shares = [100 * depth["share"] for depth in depths]
    _bars(axes, [depth["depth"] for depth in depths], shares, [f"{share:.1f} %" for share in shares])
    axes.set(xlabel="draft depth", ylabel="% of decode calls")
    return _chart(figure, "Acceptance by depth", "Share of decode calls that accepted at least this many draft tokens.")


def _length_chart(counts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    figure, axes = new_figure()
    total = sum(count["calls"] for count in counts)
    shares = [100 * count["calls"] / total for count in counts]
    _bars(axes, [count["length"] for count in counts], shares, [f"{share:.1f} %" for share in shares])
    axes.set(xlabel="tokens committed by the call", ylabel="% of decode calls")
    return _chart(figure, "Acceptance lengths", "How many tokens a decode call committed, the bonus token included.")


def _sides_chart(comparison: Mapping[str, Any], key: str, title: str, direction: str) -> dict[str, str]:
    figure, axes = new_figure(height=1.8)
    values = [comparison["ar"][key], comparison["esp"][key]]
    bars = axes.barh(["plain (AR)", "ESP"], values, color=[AR_COLOR, ESP_COLOR], height=0.5)
    labels = [f"{value:#.3g}" if value < 100 else f"{value:,.0f}" for value in values]
    axes.bar_label(bars, labels, padding=4, color=INK)
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.18 * max(values))
    return _chart(figure, title, f"On the {comparison['rows']:,} compared rows; {direction}.")


def new_figure(height: float = 2.7) -> tuple[Figure, Axes]:
    """Axes in the page's style; height in inches."""
    figure = Figure(figsize=(5.2, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(AR_COLOR)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _bars(axes: Axes, positions: Sequence[int], heights: Sequence[float], labels: Sequence[str]) -> None:
    bars = axes.bar(positions, heights, color=ESP_COLOR, width=0.6)
    if len(positions) <= 9:
        axes.bar_label(bars, labels, padding=2, color=INK, fontsize=9)
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(FixedLocator(positions) if len(positions) <= 9 else MaxNLocator(integer=True))
    axes.set_xlim(min(positions) - 0.8, max(positions) + 0.8)
    axes.set_ylim(0, 1.15 * max(*heights, 1.0))


def _chart(figure: Figure, title: str, caption: str) -> dict[str, str]:
    image = "data:image/svg+xml;base64," + base64.b64encode(svg_of(figure)).decode("ascii")
    return {"title": title, "caption": caption, "image": image}


def svg_of(figure: Figure) -> bytes:
    """Same figures, same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "espstream"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()
