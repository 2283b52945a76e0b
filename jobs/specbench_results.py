"""The figures of `jobs.bench specbench`: by side and category, counted from the units' records alone.

tau: tokens of decode calls / decode calls (the first token of a generation is prefill's). Call reduction: 1 - 1/tau, as
in the paper's table 6. Tokens per second: all tokens / engine time, prefill included, which is divided among
the sequences of each step (types.DecodeStats). Exact match: questions whose turns are all plain decoding's, token for
token.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.ceiling import ceiling_line, machine_line
from jobs.sides import Side
from pipeline.figures import ratio, reduction

OVERALL = "overall"
DEPTHS = 16  # acceptance by depth ends there

_Record = Mapping[str, Any]  # of a question: id, category, turns (specbench_worker)


@dataclass
class Tally:
    """Sums over some questions of one side. lengths: decode calls by the tokens that they gave."""

    questions: int = 0
    turns: int = 0
    tokens: int = 0
    decode_calls: int = 0
    plain_steps: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    engine_s: float = 0.0
    exact: int = 0
    lengths: Counter[int] = field(default_factory=Counter)

    def add(self, record: _Record, truth: list[list[int]] | None) -> None:
        self.questions += 1
        self.exact += _outputs(record) == truth
        for turn in record["turns"]:
            self.turns += 1
            self.tokens += len(turn["tokens"])
            self.lengths.update(turn["accept_lengths"])
            for name in ("decode_calls", "plain_steps", "rows", "drafted", "accepted", "prefill_tokens"):
                setattr(self, name, getattr(self, name) + turn[name])
            self.cached_tokens += turn["cached_tokens"]
            self.engine_s += turn["engine_s"]

    @property
    def tau(self) -> float | None:
        return ratio(sum(length * calls for length, calls in self.lengths.items()), self.decode_calls)

    @property
    def tokens_per_s(self) -> float | None:
        return ratio(self.tokens, self.engine_s)

    def by_depth(self) -> list[float]:
        """Share of decode calls that accepted at least 1, 2, .. drafts: a call gives its accepted drafts and one."""
        deepest = min(max(self.lengths, default=1) - 1, DEPTHS)
        at_least = [
            sum(calls for length, calls in self.lengths.items() if length > depth) for depth in range(1, deepest + 1)
        ]
        return [round(calls / self.decode_calls, 4) for calls in at_least]


def side_results(
    units: Sequence[tuple[Side, Sequence[Mapping[str, Any]]]], categories: Sequence[str]
) -> list[dict[str, Any]]:
    """An entry for each side and category, `overall` last. units: every side's, of the same shards."""
    records = [(side, [record for unit in parts for record in unit["questions"]]) for side, parts in units]
    plain = next((found for side, found in records if side.config.method == "ar"), None)
    truth = {} if plain is None else {record["id"]: _outputs(record) for record in plain}
    plainly = None if plain is None else _tallies(plain, truth)
    results = []
    for side, found in records:
        tallies = _tallies(found, truth)
        for category in [*categories, OVERALL]:
            results.append(_result(side, category, tallies[category], None if plainly is None else plainly[category]))
    return results


def _outputs(record: _Record) -> list[list[int]]:
    return [turn["tokens"] for turn in record["turns"]]


def _tallies(records: Iterable[_Record], truth: Mapping[str, list[list[int]]]) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    for record in records:
        for category in (record["category"], OVERALL):
            tallies.setdefault(category, Tally()).add(record, truth.get(record["id"]))
    return tallies


def _result(side: Side, category: str, tally: Tally, plain: Tally | None) -> dict[str, Any]:
    return {
        "method": side.config.method,
        "bc": side.bc,
        "varied": dict(side.varied),
        "masks": side.config.masks if side.config.method == "esp" else None,
        "category": category,
        "questions": tally.questions,
        "turns": tally.turns,
        "tokens": tally.tokens,
        "seconds": round(tally.engine_s, 3),
        "tokens_per_s": _rounded(tally.tokens_per_s, 2),
        "tau": _rounded(tally.tau, 4),
        "call_reduction": _rounded(reduction(1, tally.tau), 4),
        "speedup": _rounded(ratio(tally.tokens_per_s, plain.tokens_per_s if plain else None), 3),
        "exact_match_rate": None if plain is None else round(tally.exact / tally.questions, 4),
        "rows_per_call": _rounded(ratio(tally.rows, tally.decode_calls), 2),
        "plain_call_share": _rounded(ratio(tally.plain_steps, tally.decode_calls), 3),
        "draft_acceptance_rate": _rounded(ratio(tally.accepted, tally.drafted), 4),
        "decode_calls": tally.decode_calls,
        "prefill_tokens": tally.prefill_tokens,
        "cached_tokens": tally.cached_tokens,
        "acceptance_by_depth": tally.by_depth() if tally.decode_calls else [],
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def to_csv(results: Sequence[Mapping[str, Any]]) -> str:
    """A line for each entry; acceptance by depth stands in results.json alone."""
    names = [name for name in results[0] if name != "acceptance_by_depth"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for result in results:
        varied = " ".join(f"{key}={value}" for key, value in result["varied"].items())
        writer.writerow([varied if name == "varied" else result[name] for name in names])
    return text.getvalue()


def print_results(about: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Overall figures of every side, then tau by category."""
    console = Console(width=200)
    shards = about["shards"]
    part = "" if shards["whole"] == shards["of"] else f" ({shards['whole']} of {shards['of']} shards so far)"
    console.print(
        f"{machine_line(about)}; {about['questions']} questions{part} x {about['new_tokens']} tokens a turn, "
        f"temperature {about['temperature']}, {about['slots']} slots",
        highlight=False,
    )
    console.print(ceiling_line(about["ceiling"]), highlight=False)
    overall = [result for result in results if result["category"] == OVERALL]
    varied = list(dict.fromkeys(key for result in overall for key in result["varied"]))
    figures = {
        "tau": "tau",
        "fewer calls": "call_reduction",
        "tokens/s": "tokens_per_s",
        "vs ar": "speedup",
        "exact match": "exact_match_rate",
        "rows/call": "rows_per_call",
        "plain calls": "plain_call_share",
    }
    table = Table("method", "bc", *varied, *figures)
    for result in overall:
        table.add_row(*_side_cells(result, varied), *(_cell(result[key], key) for key in figures.values()))
    console.print(table)
    categories = list(about["categories"])
    by_category = Table("tau", "bc", *varied, *categories, title="tau by category", title_justify="left")
    for result in overall:
        own = [other for other in results if same_side(result, other)]
        by_category.add_row(*_side_cells(result, varied), *(_cell(each["tau"], "tau") for each in own[:-1]))
    console.print(by_category)


def same_side(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[name] == other[name] for name in ("method", "bc", "varied"))


def _side_cells(result: Mapping[str, Any], varied: Sequence[str]) -> list[str]:
    return [_cell(cell) for cell in (result["method"], result["bc"], *(result["varied"].get(key) for key in varied))]


def _cell(value: Any, key: str = "") -> str:
    if value is None:
        return "-"
    if key in ("call_reduction", "exact_match_rate", "plain_call_share"):
        return f"{value:.1%}"
    return f"{value:.3f}" if key == "tau" else str(value)
