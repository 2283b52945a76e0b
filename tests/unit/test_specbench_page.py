"""The page of specbench: the paper's tables with ours beside them, escaped, nothing fetched."""

from __future__ import annotations

from typing import Any

import pytest
from html_page import Page
from specbench_units import record, sides_of, turn, unit

from esp_worker.cost import CostKey, StepCost
from jobs.specbench_page import render_page, task_figure
from jobs.specbench_results import side_results
from jobs.specbench_tables import Results, paper
from pipeline.pagekit import DASH

ODD = "<script>alert(1)</script> $x_{$ & more"
CATEGORIES = ["writing", "roleplay", "coding", "translation", "summarization", "qa", "rag", "math_reasoning", ODD]
METHODS = ["--methods", "ar,esp,pld,lade,stand,recycle,hybrid", "--bc", "10,30,60"]


def page_of(temperature: float, *arguments: str, categories: list[str] = CATEGORIES) -> str:
    """A run in which a side's answers to the i-th category have 2 + i / 10 tokens a call, a BC's tenth more."""
    units = []
    for side in sides_of(*(arguments or METHODS)):
        plain, more = side.config.method == "ar", int(side.bc or 0) // 10
        lengths = [[1] if plain else [2 + (call < number + more) for call in range(10)] for number in range(9)]
        records = [record(str(n), name, turn(lengths[n], 1.0)) for n, name in enumerate(categories)]
        units.append((side, [unit(*records)]))
    about: dict[str, Any] = {
        "machine": {"cpu": "EPYC", "cores": 2, "gpu": None, "platform": "Linux"},
        "machines": ["EPYC <b>9</b>"],
        "versions": {"torch": "2.9"},
        "device": "cpu",
        "threads": 2,
        "kernels": "stock kernels",
        "ceiling": {
            "memory_read_gb_per_s": 20.0,
            "matrix_product_gflop_per_s": 100.0,
            "one_row_floor_ms": 27.0,
            "rows_at_ridge": 10.0,
        },
        "model": "some/folder/Tiny<i>-1B.gguf",
        "dtype": "float32",
        "slots": 4,
        "actors": 1,
        "new_tokens": 64,
        "temperature": temperature,
        "decoder": {},
        "questions": len(categories),
        "too_long": 3,
        "categories": dict.fromkeys(categories, 1),
        "shards": {"whole": 1, "of": 2},
    }
    cost = StepCost([1, 4], [1, 8], [128], [[[0.01], [0.02]], [[0.02], [0.04]]], CostKey("m", "f", "d", 2, "k"))
    return render_page(about, side_results(units, categories), cost)


@pytest.fixture(scope="module")
def greedy() -> str:
    return page_of(0.0)


def test_nothing_is_fetched_and_all_is_escaped(greedy: str) -> None:
    page = Page(greedy)
    assert page.open == []
    assert {"script", "link", "i", "b"}.isdisjoint(page.tags)
    assert ODD in page.text
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action", "xlink:href")]
    assert len(links) == 1 + 3 + 1, "tau by category, acceptance by depth of three BCs, step cost"
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert not [value for _, value in page.attributes if value.startswith(("http:", "https:", "//"))]


def test_it_says_what_was_run(greedy: str) -> None:
    text = " ".join(Page(greedy).text.split())
    for expected in (
        "EPYC <b>9</b>",
        "Tiny<i>-1B",
        "float32",
        "4 slots",
        "temperature 0",
        "9 questions",
        "arXiv 2603",
    ):
        assert expected in text
    for expected in ("1 of 2 decoded by every side", "3 questions too long", "math_reasoning"):
        assert expected in text


def test_the_papers_rows_stand_beside_ours(greedy: str) -> None:
    rows = Page(greedy).rows
    assert next(row for row in rows if row[0] == "LLaMA3.1-8B-Instruct")[:9] == [
        "LLaMA3.1-8B-Instruct",
        "1.44",
        "1.23x",
        "1.58",
        "1.10x",
        "1.45",
        "1.06x",
        "1.63",
        "1.35x",
    ]
    assert ["Qwen3-32B", "22.48", "32.43", "40.83", "41.18", DASH, DASH] in rows
    ours = [row for row in rows if row[0] == "Tiny<i>-1B"]
    assert len(ours) == 6, "tables 1 and 6, three BCs each"
    # PLD's own BC is 11 and the same everywhere.
    pld, esp = [sum(min(n + more, 10) for n in range(9)) / 90 for more in (1, 3)]
    assert ours[1][1:3] == [f"{2 + pld:.2f}", ours[0][2]]
    assert ours[1][7] == f"{2 + esp:.2f}"
    assert ours[4][4] == f"{100 - 100 / (2 + esp):.2f}"
    assert any(row[0] == "LLaMA3.2-3B-Instruct, m1, m2" and row[1:4] == ["1.62", "1.61", "1.67"] for row in rows)
    assert next(row for row in rows if row[0] == "Tiny<i>-1B, m1")[1:3] == ["2.30", "2.40"]
    assert ["ESP, BC 10", "2.10", "2.20", "2.30", "2.40", "2.50", "2.60", "2.70", "2.80", "2.45"] in rows


def test_tables_of_temperature_one_stand_beside_a_run_of_temperature_one(greedy: str) -> None:
    sampled = Page(page_of(1.0))
    want = ["STAND, BC 60", "1.33", "1.22", "1.33", "1.22", "1.61", "1.22", "1.58", "1.46", "1.37"]
    assert want in sampled.rows
    assert want not in Page(greedy).rows
    assert "Table 8: LLaMA3.1-8B-Instruct" in sampled.text
    assert "Table 12" not in sampled.text


def test_a_run_of_some_methods_and_categories_only() -> None:
    rows = Page(page_of(0.0, "--methods", "pld,esp", "--bc", "30", "--vary", "masks=1,2", categories=["qa"])).rows
    assert ["ESP, BC 30, masks 2", DASH, DASH, DASH, DASH, DASH, "2.30", DASH, DASH, DASH] in rows
    assert [row for row in rows if row[0] == "Tiny<i>-1B (masks 2), m1, m2"]
    only_plain = Page(page_of(0.0, "--methods", "ar", categories=["qa"]))
    assert only_plain.open == []


def test_the_papers_numbers_are_consistent() -> None:
    """Call reduction is 1 - 1/tau, and AVG the mean of the columns: as far as two digits show it."""
    numbers = paper()
    for bc, models in numbers["table_1"].items():
        for model, methods in models.items():
            for method, figures in methods.items():
                reduction = numbers["table_6"][bc][model][method]
                assert reduction == pytest.approx(100 - 100 / figures["tau"], abs=0.01)
    for number in (7, 8):
        for row in numbers[f"table_{number}"]["rows"]:
            *columns, average = row["tau"].values()
            assert sum(columns) / 8 == pytest.approx(average, abs=0.0101)
    assert list(numbers["columns"]) == ["WRIT", "ROLE", "CODE", "TRANS", "SUMM", "QA", "RAG", "M/R"]


def test_no_bar_is_cut_off() -> None:
    """A higher block complexity's panel may hold the highest bars of all."""
    units = [
        (side, [unit(record("1", "qa", turn([int(side.bc or 1) // 10], 1.0)))])
        for side in sides_of("--methods", "esp", "--bc", "10,90")
    ]
    figure = task_figure(Results("m", side_results(units, ["qa"])), ["qa"])
    assert [axes.get_ylim()[0] for axes in figure.axes] == [1, 1]
    assert all(axes.get_ylim()[1] > 9 for axes in figure.axes)
