"""`jobs.bench ablation`: every table runs with the settings that the paper names, each figure in its own cell."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from jobs.ablation_tables import TABLES
from jobs.bench import main
from jobs.bench_ablation import side_configs
from pipeline.config import parse_decoder

CATEGORIES = ["writing", "math", "qa", "reasoning"]

# What each table's sides are, in the paper's words: widths of the static tree (or the rows of a dynamic one, which has
# two masks), and what its lines set.
TREES = {
    2: [30, (7, 2), (5, 4), (3, 6), 60, (15, 4), (12, 7), (10, 9), (8, 11), (6, 13)],
    3: [(29,), (15, 4), (7, 5, 3)],
    4: [(14,), (7, 2), (29,), (15, 4)],
    5: [(4,), (14,), (15, 4)],
    9: [(14,), (15, 4), (13, 10, 6)],
    13: [(4,), (14,), (7, 2), (15, 4)],
    14: [(15, 4)],
    15: [(14,), (15, 4)],
}
LINES: dict[int, list[dict[str, Any]]] = {
    2: [{}],
    3: [{}],
    4: [{"impl": "efficient"}, {"impl": "naive"}],
    5: [{"init": "last_k"}, {"init": "sample"}, {"init": "mean"}],
    9: [{}],
    13: [{"prune": "none"}, {"prune": "all"}, {"prune": "deep"}],
    14: [
        {"init": "sample"},
        {"init": "offset", "init_moments": "table", "init_offset": 5.0},
        {"init": "offset", "init_moments": "table", "init_offset": 10.0},
    ],
    15: [{"ema": 0.01}, {"ema": 0.1}, {"ema": 0.5}],
}
DEFAULTS = {"impl": "efficient", "init": "mean", "init_moments": "prompt", "prune": "all", "ema": 0.1}


def settings_of(tree: Any) -> dict[str, Any]:
    if isinstance(tree, int):
        return {"tree": "dynamic", "masks": 2, "branches": None, "block_complexity": tree}
    rows = (len(tree) + 1) * (1 + sum(tree))
    return {"tree": "static", "masks": len(tree), "branches": list(tree), "block_complexity": rows}


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Prompt {number}", "category": name} for number, name in enumerate(CATEGORIES)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize("number", sorted(TABLES))
def test_sides_are_the_papers(number: int) -> None:
    sides = [config.model_dump() for config in side_configs(TABLES[number])]
    want = [{**DEFAULTS, **settings_of(tree), **line} for tree in TREES[number] for line in LINES[number]]
    assert len(sides) == len(want)
    for each in want:
        assert sum(each.items() <= side.items() for side in sides) == 1, each
    assert {side["method"] for side in sides} == {"esp"}
    assert {side["probe_owners"] for side in sides} == {"all"}


@pytest.mark.parametrize("number", sorted(TABLES))
def test_columns_name_their_trees_and_rows(number: int) -> None:
    for column in TABLES[number].columns:
        config = parse_decoder({"method": "esp", **column.settings, **TABLES[number].lines[0].settings})
        if "(" in column.label and "default" not in column.label:
            assert column.label.endswith(f"({config.block_complexity})")
        if "[" in column.label:
            assert str(config.branches).replace(" ", "") in column.label
        if "m1" in column.label:
            assert column.label.count("m") == config.masks


@pytest.mark.parametrize("number", sorted(TABLES))
def test_every_table_runs(
    number: int, tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "float64", "--new", "10", "--slots", "1,3", "--repeat", "1", "--threads", "1"]
    files = ["--model", str(tiny_checkpoint), "--prompts", str(prompts_file)]
    assert main(["ablation", "--table", str(number), *files, *options]) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    table, results, source = document["table"], document["results"], TABLES[number]
    assert (table["number"], table["source"]) == (number, f"arXiv 2603.17942, table {number}")
    assert table["paper"] == {model: [list(row) for row in rows] for model, rows in source.paper.items()}
    assert list(table["here"]) == ["1", "3"]
    assert len(results) == 2 * (1 + len(side_configs(source)))
    for result in results:
        assert result["exact_match_rate"] == 1.0
        assert result["tau"] >= 1
    for slots, rows in table["here"].items():
        assert [len(row) for row in rows] == [len(table["columns"])] * len(table["lines"])
        for line, row in zip(source.lines, rows, strict=True):
            for column, figure in zip(source.columns, row, strict=False):
                assert figure == expected(results, int(slots), {**column.settings, **line.settings}, line, column)
            if source.by_category:
                assert row[-1] == pytest.approx(mean(figure for figure in row[:-1] if figure is not None), abs=1e-4)
    shown = [line for line in out.splitlines() if line.startswith("│")]
    assert len(shown) == sum(map(len, source.paper.values())) + 2 * len(source.lines)
    assert all(label in out for label in table["columns"])


def expected(results: list[Any], slots: int, settings: dict[str, Any], line: Any, column: Any) -> float | None:
    (result,) = [
        result
        for result in results
        if result["slots"] == slots and result["method"] == "esp" and settings.items() <= result["decoder"].items()
    ]
    if not column.categories:
        return result[line.figure]
    counts = [result["by_category"][name] for name in CATEGORIES if name in column.categories]
    if not counts:
        return None
    return round(sum(each["decoded"] for each in counts) / sum(each["decode_calls"] for each in counts), 4)


def test_categories_add_up(tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table 14's counts: of all categories together they are the side's own."""
    files = ["--model", str(tiny_checkpoint), "--prompts", str(prompts_file)]
    sizes = ["--dtype", "float64", "--new", "10", "--slots", "3", "--repeat", "2", "--threads", "1"]
    assert main(["ablation", "--table", "14", *files, *sizes]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    for result in document["results"]:
        counts = result["by_category"]
        assert set(counts) == set(CATEGORIES)
        assert sum(count["decode_calls"] for count in counts.values()) == result["decode_calls"]
        assert sum(count["decoded"] for count in counts.values()) == result["tokens"] - len(CATEGORIES)
    assert len({json.dumps(result["by_category"], sort_keys=True) for result in document["results"]}) > 1
    first = document["table"]["here"]["3"][0]
    filled = [name for name, figure in zip(document["table"]["columns"], first, strict=True) if figure is not None]
    assert filled == ["WRIT", "QA", "M/R", "AVG"]


def test_a_table_by_category_needs_categories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model, which is not there, is looked for."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "category": "poems"}\n', encoding="utf-8")
    assert main(["ablation", "--table", "14", "--model", "m", "--prompts", str(file)]) == 2
    assert "--table 14 is by category, and no prompt has one of Spec-Bench's" in capsys.readouterr().err


def test_unknown_tables_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["ablation", "--table", "7", "--model", "m", "--prompts", "p"])
    assert stopped.value.code == 2
    assert "invalid choice: 7" in capsys.readouterr().err


def test_the_papers_figures_agree_with_each_other() -> None:
    """What the paper prints in two places (a slip of the pen would show): shapes, means and the shared columns."""
    for table in TABLES.values():
        for lines in table.paper.values():
            assert len(lines) <= len(table.lines)
            assert all(len(line) == len(table.columns) + table.by_category for line in lines)
            if table.by_category:
                assert all(mean(line[:-1]) == pytest.approx(line[-1], abs=0.0051) for line in lines)
    for model, (two,) in TABLES[2].paper.items():
        three, four, nine = (TABLES[number].paper[model][0] for number in (3, 4, 9))
        assert four == [pytest.approx(nine[0], abs=0.0051), pytest.approx(two[1], abs=0.0051), three[0], three[1]]
        assert nine[1] == two[5]
        assert three[1] == pytest.approx(two[5], abs=0.0051)
        means, rates, pruned = TABLES[5].paper[model][2], TABLES[15].paper[model], TABLES[13].paper[model][1]
        assert [means[1], means[2]] == [rates[0][1], rates[1][1]] == [pruned[1], pruned[3]]
        assert pruned[0] == means[0]
    assert TABLES[5].paper["LLaMA3.2-3B-Instruct"][1][2] == TABLES[14].paper["LLaMA3.2-3B-Instruct"][0][-1]
