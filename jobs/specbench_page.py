"""The page of `jobs.bench specbench`: one self-contained HTML file.

Figures are inline SVG, all text is escaped, nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from esp_worker.cost import StepCost
from jobs.ceiling import ceiling_line
from jobs.specbench_tables import (
    Result,
    Results,
    category_tables,
    mask_tables,
    overall_table,
    paper,
    reduction_tables,
    side_label,
    speed_tables,
    task_tables,
)
from pipeline.pagekit import INK, chart, fixed, new_figure, plain_axes, template, times

COLORS = {
    "pld": "#9aa6b8",
    "stand": "#d98e32",
    "lade": "#b0479b",
    "esp": "#2457d6",
    "recycle": "#5aa9a3",
    "hybrid": "#1f8a4c",
    "ar": "#46505f",
}
WIDE = 10.6  # inches of a figure over the page's whole width
MOST_DEPTHS = 10


def render_page(about: Mapping[str, Any], results: Sequence[Result], cost: StepCost | None) -> str:
    """about, results: the run's (jobs.specbench); cost: what steps cost where it ran."""
    found = Results(_model_name(about["model"]), results)
    return _template().render(
        about=about,
        model=found.model,
        paper=paper(),
        cards=_cards(found, about),
        overall=overall_table(found),
        speed=speed_tables(found),
        reductions=reduction_tables(found),
        tasks=task_tables(found, about["temperature"]),
        masks=mask_tables(found) if about["temperature"] == 0 else [],
        categories=category_tables(found, about["categories"]),
        task_charts=[_task_chart(found, list(about["categories"]))] if found.complexities else [],
        charts=[*_depth_charts(found), *([] if cost is None else [_cost_chart(cost)])],
        facts=_facts(about),
    )


@cache
def _template() -> Template:
    return template("jobs", "specbench.html.j2")


def _model_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def _cards(results: Results, about: Mapping[str, Any]) -> list[dict[str, str]]:
    """Headline numbers: label, value, detail."""
    drafting = [each for each in results.overall if each["method"] != "ar" and each["tau"] is not None]
    shards = about["shards"]
    part = "all shards" if shards["whole"] == shards["of"] else f"{shards['whole']} of {shards['of']} shards so far"
    cards = [("Questions", f"{about['questions']:,}", f"{len(about['categories'])} categories, {part}")]
    for label, key, show in (("Most tokens a call", "tau", fixed), ("Highest speed-up", "speedup", times)):
        known = [each for each in drafting if each[key] is not None]
        if known:
            best = max(known, key=lambda each: each[key])
            cards.append((label, show(best[key]), side_label(best)))
    compared = [each for each in drafting if each["exact_match_rate"] is not None]
    if compared:
        exact = sum(each["exact_match_rate"] == 1 for each in compared)
        cards.append(("Exact match", f"{exact}/{len(compared)}", "sides whose every answer is plain decoding's"))
    return [dict(zip(("label", "value", "detail"), card, strict=True)) for card in cards]


def _facts(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    machine = about["machine"]
    shards = about["shards"]
    return [
        ("Model", f"{about['model']}, {about['dtype']}"),
        ("Machine", "; ".join(about["machines"]) + f" ({machine['cores']} cores, {machine['platform']})"),
        ("Decoding", f"{about['actors']} actor(s), {about['device']}, {about['threads']} threads, {about['kernels']}"),
        ("Slots", f"{about['slots']} sequences at a time in each actor"),
        ("Temperature", f"{about['temperature']:g}"),
        ("Questions", f"{about['questions']:,}, up to {about['new_tokens']} new tokens a turn"),
        ("Left out", f"{about['too_long']} questions too long for the model's context"),
        ("Shards", f"{shards['whole']} of {shards['of']} decoded by every side"),
        ("Decoder settings", ", ".join(f"{key} {text}" for key, text in about["decoder"].items()) or "defaults"),
        ("Hardware", ceiling_line(about["ceiling"])),
        ("Versions", ", ".join(f"{name} {number}" for name, number in about["versions"].items())),
    ]


# Figures


def _sides(results: Results, bc: int | str) -> list[Result]:
    """Those of one block complexity, in the paper's order of methods; PLD stands in every one."""
    found = [results.find(method, bc, varied) for method in results.methods for varied in results.variants]
    return [each for number, each in enumerate(found) if each is not None and each not in found[:number]]


def _task_chart(results: Results, categories: Sequence[str]) -> dict[str, str]:
    caption = (
        "Tokens per decode call by category, one panel for each block complexity, as in the paper's figures 4 and 5. "
        "The axis begins at 1, which is plain decoding; PLD drafts a chain of ten whatever the budget."
    )
    return chart(task_figure(results, categories), "tau by category", caption)


def task_figure(results: Results, categories: Sequence[str]) -> Figure:
    """Figures 4 and 5: a panel for each block complexity, a group of bars for each category."""
    complexities = results.complexities
    figure = Figure(figsize=(WIDE, 2.1 * len(complexities) + 0.6), layout="constrained")
    panels = figure.subplots(len(complexities), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, bc in zip(panels, complexities, strict=True):
        _task_panel(plain_axes(axes), results, bc, categories)
    panels[0].set_ylim(bottom=1)  # shared, and only now: a limit that is set early cuts the later panels off
    panels[-1].set_xticks(range(len(categories)), [_plain(name) for name in categories], rotation=18, ha="right")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, labelcolor=INK)
    return figure


def _task_panel(axes: Axes, results: Results, bc: int | str, categories: Sequence[str]) -> None:
    sides = _sides(results, bc)
    width = 0.84 / max(len(sides), 1)
    for number, side in enumerate(sides):
        own = results.by_category(side)
        heights = [(own[name]["tau"] or 1) - 1 for name in categories]
        places = [group + (number - (len(sides) - 1) / 2) * width for group in range(len(categories))]
        axes.bar(
            places,
            heights,
            width=0.92 * width,
            bottom=1,
            color=COLORS[side["method"]],
            label=_plain(side_label(side, bc=False)),
        )
    axes.set_ylabel("tau")
    axes.set_title(f"BC = {bc}", loc="left", fontsize=10, color=INK)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.6, len(categories) - 0.4)


def _depth_charts(results: Results) -> list[dict[str, str]]:
    charts = []
    for bc in results.complexities:
        figure, axes = new_figure(height=3.0)
        for side in _sides(results, bc):
            shares = [100 * share for share in side["acceptance_by_depth"][:MOST_DEPTHS]]
            label = _plain(side_label(side, bc=False))
            axes.plot(
                range(1, len(shares) + 1), shares, color=COLORS[side["method"]], marker="o", markersize=4, label=label
            )
        axes.set(xlabel="draft depth", ylabel="% of decode calls")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
        caption = "Share of decode calls that accepted at least this many draft tokens."
        charts.append(chart(figure, f"Acceptance by depth, BC = {bc}", caption))
    return charts


def _cost_chart(cost: StepCost) -> dict[str, str]:
    figure, axes = new_figure(height=3.0)
    for s, sequences in enumerate(cost.sequences):
        for c, context in enumerate(cost.contexts):
            axes.plot(
                [sequences * rows for rows in cost.rows],
                [1e3 * seconds for seconds in cost.smoothed[s, :, c]],
                marker="o",
                markersize=4,
                label=f"{sequences} sequence{'s' if sequences > 1 else ''}, {context:,} tokens of context",
            )
    axes.set(xlabel="rows of the step, all sequences", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return chart(figure, "What a step costs", "Time of a decode step by its rows, on the machine of this run.")


def _plain(text: str) -> str:
    """Text that matplotlib must not take for a formula."""
    return text.replace("$", r"\$")
