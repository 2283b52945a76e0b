"""Figures by side and category, against numbers worked out by hand."""

from __future__ import annotations

import csv
from typing import Any

import pytest
from specbench_units import record, sides_of, turn, unit

from jobs.specbench_results import side_results, to_csv


def two_sides() -> list[dict[str, Any]]:
    ar, esp = sides_of("--methods", "ar,esp", "--bc", "10")
    plain = [
        unit(record("1", "qa", turn([1, 1, 1, 1], 5.0), turn([1, 1], 3.0))),
        unit(record("2", "rag", turn([1, 1, 1], 4.0))),
    ]
    drafted = [
        unit(record("1", "qa", turn([3, 1], 1.0, 10), turn([2], 1.0, 10))),
        unit(record("2", "rag", turn([1, 2], 2.0, 8, tokens=[0, 1, 2, 9]))),
    ]
    return side_results([(ar, plain), (esp, drafted)], ["qa", "rag"])


def test_figures() -> None:
    results = two_sides()
    assert [(each["method"], each["bc"], each["category"]) for each in results] == [
        (method, bc, category) for method, bc in (("ar", None), ("esp", 10)) for category in ("qa", "rag", "overall")
    ]
    ar, esp = results[2], results[5]
    assert (ar["tau"], ar["call_reduction"], ar["speedup"], ar["exact_match_rate"]) == (1.0, 0.0, 1.0, 1.0)
    assert (esp["questions"], esp["turns"], esp["tokens"], esp["decode_calls"]) == (2, 3, 12, 5)
    assert esp["tau"] == pytest.approx(9 / 5)
    assert esp["call_reduction"] == pytest.approx(1 - 5 / 9, abs=1e-4)
    assert esp["tokens_per_s"] == pytest.approx(12 / 4.0)
    assert esp["speedup"] == pytest.approx((12 / 4.0) / (12 / 12.0))
    assert esp["exact_match_rate"] == 0.5, "the second question's last token is another"
    assert esp["rows_per_call"] == pytest.approx((30 + 16) / 5, abs=0.01)
    assert esp["plain_call_share"] == pytest.approx(3 / 5)
    assert esp["draft_acceptance_rate"] == pytest.approx(4 / 20)
    assert esp["acceptance_by_depth"] == [3 / 5, 1 / 5]
    assert (esp["prefill_tokens"], esp["cached_tokens"]) == (27, 3)


def test_figures_of_a_category_are_its_questions_alone() -> None:
    qa, rag = two_sides()[3:5]
    assert (qa["tau"], rag["tau"]) == (2.0, 1.5)
    assert (qa["exact_match_rate"], rag["exact_match_rate"]) == (1.0, 0.0)
    assert qa["speedup"] == pytest.approx((8 / 2.0) / (8 / 8.0))


def test_without_plain_decoding_nothing_is_compared() -> None:
    (esp,) = sides_of("--methods", "esp", "--bc", "10")
    overall = side_results([(esp, [unit(record("1", "qa", turn([2], 1.0)))])], ["qa"])[-1]
    assert (overall["tau"], overall["speedup"], overall["exact_match_rate"]) == (2.0, None, None)


def test_an_answer_of_one_token_has_no_decode_calls() -> None:
    (ar,) = sides_of("--methods", "ar")
    overall = side_results([(ar, [unit(record("1", "qa", turn([], 1.0)))])], ["qa"])[-1]
    assert (overall["tokens"], overall["tau"], overall["call_reduction"]) == (1, None, None)
    assert (overall["rows_per_call"], overall["acceptance_by_depth"]) == (None, [])


def test_csv() -> None:
    results = two_sides()
    lines = list(csv.DictReader(to_csv(results).splitlines()))
    assert len(lines) == len(results)
    for line, result in zip(lines, results, strict=True):
        assert (line["method"], line["category"]) == (result["method"], result["category"])
        assert float(line["tau"]) == result["tau"]
    (varied,) = sides_of("--methods", "esp", "--bc", "30", "--vary", "masks=2")
    text = to_csv(side_results([(varied, [unit(record("1", "qa", turn([2], 1.0)))])], ["qa"]))
    assert next(csv.DictReader(text.splitlines()))["varied"] == "masks=2"
