"""`python -m jobs.bench ablation`: the paper's ablation tables (jobs.ablation_tables) on any model, the paper's figures
beside those measured here.

A side is one combination of a table's settings; lines and columns that share one share its run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.ablation_tables import SOURCE, SPEEDUP, AblationTable, Column, Line
from jobs.ceiling import ceiling_line, machine_line, workload_line
from pipeline.config import parse_decoder
from pipeline.decoder_config import DecoderConfig


def check_prompts(table: AblationTable, categories: Iterable[str | None]) -> None:
    """Raises ValueError where a table by category meets prompts of none of its own."""
    wanted = [name for column in table.columns for name in column.categories]
    if wanted and not set(wanted) & set(categories):
        raise ValueError(
            f"--table {table.number} is by category, and no prompt has one of Spec-Bench's as its `category`: "
            f"{', '.join(wanted)}"
        )


def side_configs(table: AblationTable) -> list[DecoderConfig]:
    """The table's combinations, each once, line by line."""
    configs: list[DecoderConfig] = []
    for config in (_config(line, column) for line in table.lines for column in table.columns):
        if config not in configs:
            configs.append(config)
    return configs


def varied(config: DecoderConfig) -> dict[str, str]:
    """What tells a side from the table's others; a static tree's rows follow from its branches."""
    changed = config.model_dump(exclude={"method", "block_complexity"}, exclude_defaults=True)
    return {key: str(value) for key, value in changed.items()}


def _config(line: Line, column: Column) -> DecoderConfig:
    return parse_decoder({"method": "esp", **column.settings, **line.settings})


def table_document(table: AblationTable, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table for the JSON document: `paper` by model and `here` by number of slots, a list of figures a line."""
    slots = list(dict.fromkeys(result["slots"] for result in results))
    return {
        "number": table.number,
        "title": table.title,
        "source": f"{SOURCE}, table {table.number}",
        "note": table.note,
        "columns": [*(column.label for column in table.columns), *(["AVG"] if table.by_category else [])],
        "lines": [{"label": line.label, "figure": line.figure} for line in table.lines],
        "paper": {model: [list(figures) for figures in lines] for model, lines in table.paper.items()},
        "here": {
            str(count): _figures(table, [result for result in results if result["slots"] == count]) for count in slots
        },
    }


def _figures(table: AblationTable, results: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
    rows = []
    for line in table.lines:
        found = []
        for column in table.columns:
            wanted = _config(line, column).model_dump()
            result = next(result for result in results if result["decoder"] == wanted)
            found.append(_tau_of(result, column.categories) if column.categories else result[line.figure])
        rows.append([*found, _average(found)] if table.by_category else found)
    return rows


def _tau_of(result: Mapping[str, Any], categories: Sequence[str]) -> float | None:
    """Mean acceptance length of the prompts of some categories; None where there are none, or no decode calls."""
    counts = [result["by_category"][name] for name in categories if name in result["by_category"]]
    calls = sum(count["decode_calls"] for count in counts)
    return round(sum(count["decoded"] for count in counts) / calls, 4) if calls else None


def _average(figures: Sequence[float | None]) -> float | None:
    """The paper's AVG: the mean of the categories, whatever their prompts' number."""
    known = [figure for figure in figures if figure is not None]
    return round(mean(known), 4) if known else None


def print_ablation(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    console = Console(width=180)
    console.print(f"{machine_line(about)}; {workload_line(about)}", highlight=False)
    console.print(ceiling_line(about["ceiling"]), highlight=False)
    document = about["table"]
    table = Table("model", "", *document["columns"], title=f"{document['source']}: {document['title']}")
    for model, rows in document["paper"].items():
        _add_block(table, f"{model} (paper)", document["lines"], rows)
    for slots, rows in document["here"].items():
        _add_block(table, f"here, {slots} slots", document["lines"], rows)
    console.print(table)
    if document["note"]:
        console.print(document["note"], highlight=False, markup=False)
    equal = min(result["exact_match_rate"] for result in results)
    console.print(f"outputs equal to plain decoding's, least of all sides: {equal:.1%}", highlight=False)


def _add_block(
    table: Table, name: str, lines: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[float | None]]
) -> None:
    """A model's lines. The paper may have fewer than there are here."""
    table.add_section()
    for number, (line, figures) in enumerate(zip(lines, rows, strict=False)):
        unit = "x" if line["figure"] == SPEEDUP else ""
        cells = ["-" if figure is None else f"{figure:.3f}".removesuffix("0") + unit for figure in figures]
        table.add_row(Text("" if number else name), Text(line["label"]), *cells)
