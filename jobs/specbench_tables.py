"""The tables of `jobs.bench specbench`'s page: the paper's layouts, our model's rows beside the paper's own.

The paper's numbers are those of paper_tables.json, none is computed here but the mean of our own rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import mean
from typing import Any

from jobs.specbench_results import OVERALL, same_side
from pipeline.pagekit import DASH, METHOD_NAMES, fixed, percent, times

PAPERS = ("pld", "stand", "lade", "esp")

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """cells: (text, whether it is the row's or column's best)."""

    name: str
    cells: Sequence[tuple[str, bool]]
    ours: bool


@dataclass(frozen=True)
class Table:
    """head: lines of (text, columns it spans), over the rows' names first. tall: the head stands upright, where
    there are many columns."""

    title: str
    head: Sequence[Sequence[tuple[str, int]]]
    rows: Sequence[Row]
    tall: bool = False


@cache
def paper() -> dict[str, Any]:
    """What the paper prints."""
    return dict(json.loads(files("jobs").joinpath("paper_tables.json").read_text(encoding="utf-8")))


class Results:
    """Looks results up. overall: one a side, in order."""

    def __init__(self, model: str, results: Sequence[Result]) -> None:
        self.model = model
        self.overall = [result for result in results if result["category"] == OVERALL]
        self._all = results

    @property
    def methods(self) -> list[str]:
        """The paper's and the run's, plain decoding not among them."""
        own = [result["method"] for result in self.overall if result["method"] not in (*PAPERS, "ar")]
        return [*PAPERS, *dict.fromkeys(own)]

    @property
    def complexities(self) -> list[int | str]:
        """Those that were asked for; PLD's is its own, whatever they are."""
        own = {result["bc"] for result in self.overall if result["method"] not in ("ar", "pld")}
        return [*sorted(bc for bc in own if isinstance(bc, int)), *(bc for bc in own if isinstance(bc, str))]

    @property
    def variants(self) -> list[dict[str, str]]:
        """What --vary gave sides; one empty one where nothing was varied."""
        found = [result["varied"] for result in self.overall if result["varied"]]
        return [varied for number, varied in enumerate(found) if varied not in found[:number]] or [{}]

    def find(self, method: str, bc: int | str, varied: Mapping[str, str]) -> Result | None:
        """The side's overall result: of a method that was not varied, its only one."""
        own = [each for each in self.overall if each["method"] == method and (method == "pld" or each["bc"] == bc)]
        return next((each for each in own if each["varied"] in (varied, {})), None)

    def by_category(self, side: Result) -> dict[str, Result]:
        return {each["category"]: each for each in self._all if same_side(each, side)}

    def name(self, varied: Mapping[str, str]) -> str:
        settings = ", ".join(f"{key} {text}" for key, text in varied.items())
        return f"{self.model} ({settings})" if settings else self.model


def side_label(result: Result, bc: bool = True) -> str:
    """A side as a row's name."""
    rows = [f"BC {result['bc']}"] if bc and result["bc"] is not None else []
    varied = [f"{key} {text}" for key, text in result["varied"].items()]
    return ", ".join([METHOD_NAMES[result["method"]], *rows, *varied])


def overall_table(results: Results) -> Table:
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("tau", "tau", _tau),
        ("Fewer calls", "call_reduction", percent),
        ("Tokens/s", "tokens_per_s", lambda value: fixed(value, 1)),
        ("Speed-up", "speedup", times),
        ("Exact match", "exact_match_rate", percent),
        ("Rows a call", "rows_per_call", lambda value: fixed(value, 1)),
        ("Calls without a draft", "plain_call_share", percent),
        ("Drafts accepted", "draft_acceptance_rate", percent),
    ]
    best = {key: max((each[key] or 0 for each in results.overall), default=0) for key in ("tau", "speedup")}
    rows = [
        Row(side_label(each), [(show(each[key]), each[key] == best.get(key, -1)) for _, key, show in columns], False)
        for each in results.overall
    ]
    return Table("All questions", [[("", 1), *((title, 1) for title, _, _ in columns)]], rows)


def speed_tables(results: Results) -> list[Table]:
    """Table 1: tau and speed-up by method, one table a block complexity."""
    return [_speed_table(results, bc) for bc in results.complexities]


def _speed_table(results: Results, bc: int | str) -> Table:
    methods = results.methods
    rows = [
        _pairs(model, [_pair(own.get(method)) for method in methods])
        for model, own in paper()["table_1"].get(str(bc), {}).items()
    ]
    for varied in results.variants:
        found = [results.find(method, bc, varied) for method in methods]
        rows.append(_pairs(results.name(varied), [_pair(each) for each in found], True))
    head = [
        [("", 1), *((METHOD_NAMES[method], 2) for method in methods)],
        [("", 1), *((text, 1) for _ in methods for text in ("tau", "S/R"))],
    ]
    return Table(f"BC = {bc}", head, rows)


def _pair(figures: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    return (None, None) if figures is None else (figures["tau"], figures["speedup"])


def _pairs(name: str, pairs: Sequence[tuple[float | None, float | None]], ours: bool = False) -> Row:
    """A tau and a speed-up for each method, the best of each kind marked."""
    best = [max(pair[kind] or 0 for pair in pairs) for kind in (0, 1)]
    cells = [
        (show(value), value == best[kind])
        for pair in pairs
        for kind, (value, show) in enumerate(zip(pair, (_tau, times), strict=True))
    ]
    return Row(name, cells, ours)


def reduction_tables(results: Results) -> list[Table]:
    """Table 6: by how many per cent calls are fewer than plain decoding's."""
    return [_reduction_table(results, bc) for bc in results.complexities]


def _reduction_table(results: Results, bc: int | str) -> Table:
    methods = results.methods
    rows = [
        _row(model, [own.get(method) for method in methods], _tau)
        for model, own in paper()["table_6"].get(str(bc), {}).items()
    ]
    for varied in results.variants:
        found = [results.find(method, bc, varied) for method in methods]
        values = [None if each is None or each["tau"] is None else 100 * each["call_reduction"] for each in found]
        rows.append(_row(results.name(varied), values, _tau, ours=True))
    return Table(f"BC = {bc}", [[("", 1), *((METHOD_NAMES[method], 1) for method in methods)]], rows)


def task_tables(results: Results, temperature: float) -> list[Table]:
    """tau by task, in the layout of tables 7 and 8: ours, and the paper's at its temperature, 1."""
    head = _task_head([*paper()["columns"], "AVG"])
    own = [each for each in results.overall if each["method"] != "ar"]
    rows = [_task_row(side_label(each), _with_mean(_our_columns(results, each)), ours=True) for each in own]
    tables = [Table(f"{results.model}, T = {temperature:g}", head, _best_in_columns(rows))]
    for number in (7, 8):
        table = paper()[f"table_{number}"]
        if table["temperature"] == temperature:
            rows = [_task_row(f"{METHOD_NAMES[row['method']]}, BC {row['bc']}", row["tau"]) for row in table["rows"]]
            tables.append(Table(f"Table {number}: {table['model']}, T = 1", head, _best_in_columns(rows)))
    return tables


def mask_tables(results: Results) -> list[Table]:
    """Tables 11 and 12: ESP's tau by task with one and two masks, at BC 30 and 60."""
    tables = []
    for number in (11, 12):
        table = paper()[f"table_{number}"]
        rows = [_task_row(f"{row['model']}, {_masks(row['masks'])}", row["tau"]) for row in table["rows"]]
        own = [each for each in results.overall if each["method"] == "esp" and each["bc"] == table["bc"]]
        for each in own:
            name = f"{results.name(each['varied'])}, {_masks(each['masks'])}"
            rows.append(_task_row(name, _our_columns(results, each), ours=True))
        tables.append(Table(f"Table {number}: ESP, BC = {table['bc']}", _task_head(paper()["columns"]), rows))
    return tables


def category_tables(results: Results, categories: Mapping[str, int]) -> list[Table]:
    """By the file's own categories: tau, speed-up and exact match."""
    figures: list[tuple[str, str, Callable[[Any], str]]] = [
        ("tau", "tau", _tau),
        ("Speed-up over AR", "speedup", times),
        ("Exact match with AR", "exact_match_rate", percent),
    ]
    head = [[("", 1), *((f"{name} ({count})", 1) for name, count in categories.items())]]
    tables = []
    for title, key, show in figures:
        rows = []
        for side in results.overall:
            own = results.by_category(side)
            rows.append(Row(side_label(side), [(show(own[name][key]), False) for name in categories], False))
        tables.append(Table(title, head, rows if key == "exact_match_rate" else _best_in_columns(rows), tall=True))
    return tables


def _our_columns(results: Results, side: Result) -> dict[str, float | None]:
    own = results.by_category(side)
    columns = paper()["columns"].items()
    return {column: own[name]["tau"] if name in own else None for column, name in columns}


def _with_mean(tau: Mapping[str, float | None]) -> dict[str, float | None]:
    """AVG is the mean of the eight columns, as in the paper; where one lacks, there is none."""
    known = [value for value in tau.values() if value is not None]
    return {**tau, "AVG": mean(known) if len(known) == len(tau) else None}


def _task_head(columns: Iterable[str]) -> list[list[tuple[str, int]]]:
    return [[("", 1), *((column, 1) for column in columns)]]


def _task_row(name: str, tau: Mapping[str, float | None], ours: bool = False) -> Row:
    return Row(name, [(_tau(value), False) for value in tau.values()], ours)


def _best_in_columns(rows: Sequence[Row]) -> list[Row]:
    """The highest of each column marked, as it is printed."""
    best = [max(column) for column in zip(*([_number(text) for text, _ in row.cells] for row in rows), strict=True)]

    def marked(row: Row) -> list[tuple[str, bool]]:
        return [(text, _number(text) == top > 0) for (text, _), top in zip(row.cells, best, strict=True)]

    return [Row(row.name, marked(row), row.ours) for row in rows]


def _number(text: str) -> float:
    return 0.0 if text == DASH else float(text.rstrip("x"))


def _row(name: str, values: Iterable[float | None], show: Callable[[Any], str], ours: bool = False) -> Row:
    values = list(values)
    best = max(value or 0 for value in values)
    return Row(name, [(show(value), value == best) for value in values], ours)


def _masks(count: int) -> str:
    return ", ".join(f"m{number}" for number in range(1, count + 1))


def _tau(value: float | None) -> str:
    return fixed(value, 2)
