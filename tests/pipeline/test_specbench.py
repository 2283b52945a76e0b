"""`jobs.bench specbench`, whole, on Ray: tokens and figures against the slow reference, resume, refusals, the page."""

from __future__ import annotations

import csv
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import write_jsonl
from html_page import Page

from esp_worker import reference
from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams
from jobs import bench, specbench
from pipeline.prepare import load_tokenizer

NEW = 10
CATEGORIES = ["writing", "qa", "<b>odd & $x_{$</b>"]
QUESTIONS = [
    {"question_id": n, "category": CATEGORIES[n % 3], "turns": [f"Say {n}", "And?"] if n % 2 else [f"Tell {n}"]}
    for n in range(7)
]
SIDES = ["ar", "esp-bc6", "pld-bc11", "hybrid-bc6"]
Unit = dict[str, Any]


@dataclass
class Bench:
    """The command on its questions; `run` gives its exit code and the document of its last line."""

    questions: Path
    model: Path
    folder: Path

    def arguments(self, *extra: str) -> list[str]:
        options = ["--methods", "ar,esp,pld,hybrid", "--bc", "6", "--new", str(NEW), "--shard", "3", "--slots", "2"]
        fixed = ["--dtype", "float64", "--threads", "1", "--out", str(self.folder)]
        return ["specbench", "--model", str(self.model), "--questions", str(self.questions), *options, *fixed, *extra]

    def run(self, *extra: str) -> tuple[int, dict[str, Any]]:
        threads = torch.get_num_threads()
        with redirect_stdout(StringIO()) as out:
            code = bench.main(self.arguments(*extra))
        torch.set_num_threads(threads)
        return code, {} if code else json.loads(out.getvalue().splitlines()[-1])

    def units(self) -> dict[str, Unit]:
        return {file.stem: json.loads(file.read_text()) for file in self.folder.glob("units/*.json")}

    def times(self) -> dict[str, int]:
        return {file.stem: file.stat().st_mtime_ns for file in self.folder.glob("units/*.json")}

    def turns(self, side: str) -> dict[tuple[str, int], dict[str, Any]]:
        """By question and turn, over the side's units."""
        return {
            (question["id"], number): turn
            for name, unit in self.units().items()
            if name.rpartition("-")[0] == side
            for question in unit["questions"]
            for number, turn in enumerate(question["turns"])
        }


@pytest.fixture(scope="module")
def whole(
    ray_session: None, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bench, dict[str, Any]]:
    """A run by two actors, and what its last line says."""
    folder = tmp_path_factory.mktemp("specbench")
    command = Bench(write_jsonl(folder / "questions.jsonl", QUESTIONS), tiny_checkpoint, folder / "out")
    code, document = command.run("--actors", "2")
    assert code == 0
    return command, document


def test_every_sides_tokens_are_the_references(whole: tuple[Bench, dict[str, Any]], tiny_fp64: CausalModel) -> None:
    """The second turn comes behind the first one's answer, as text."""
    command, _ = whole
    tokenizer = load_tokenizer(command.model)
    sampling = SamplingParams(max_new_tokens=NEW, eos_token_ids=frozenset([tokenizer.eos_token_id]))
    want: dict[tuple[str, int], list[int]] = {}
    for question in QUESTIONS:
        text = "<s>"
        for number, turn in enumerate(question["turns"]):
            text += f"<|user|>{turn}\n<|assistant|>"
            ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            done = reference.decode(tiny_fp64, Request("r", ids, sampling))
            want[str(question["question_id"]), number] = list(done.token_ids)
            text += tokenizer.decode(done.token_ids, skip_special_tokens=True) + "\n"
    assert len(want) == 10
    for side in SIDES:
        assert {key: turn["tokens"] for key, turn in command.turns(side).items()} == want, side


def test_figures_are_those_of_the_units(whole: tuple[Bench, dict[str, Any]]) -> None:
    command, document = whole
    category = {str(question["question_id"]): question["category"] for question in QUESTIONS}
    results = {(each["method"], each["category"]): each for each in document["results"]}
    assert list(results) == [(side.split("-")[0], name) for side in SIDES for name in [*CATEGORIES, "overall"]]
    for side in SIDES:
        for name in [*CATEGORIES, "overall"]:
            turns = [turn for (key, _), turn in command.turns(side).items() if name in (category[key], "overall")]
            lengths = [length for turn in turns for length in turn["accept_lengths"]]
            result = results[side.split("-")[0], name]
            assert sum(lengths) == sum(len(turn["tokens"]) - 1 for turn in turns)
            assert result["tau"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)
            assert result["call_reduction"] == pytest.approx(1 - len(lengths) / sum(lengths), abs=1e-4)
            depths = [sum(length > d for length in lengths) / len(lengths) for d in range(1, max(lengths))]
            assert result["acceptance_by_depth"] == pytest.approx(depths, abs=1e-4)
            assert result["exact_match_rate"] == 1.0
            assert 1 <= result["rows_per_call"] <= (result["bc"] or 1)
            speed = sum(len(turn["tokens"]) for turn in turns) / sum(turn["engine_s"] for turn in turns)
            assert result["tokens_per_s"] == pytest.approx(speed, abs=0.01)
            plain = results["ar", name]
            assert result["speedup"] == pytest.approx(result["tokens_per_s"] / plain["tokens_per_s"], abs=2e-3)
    assert results["ar", "overall"]["tau"] == 1.0
    assert max(results[method, "overall"]["tau"] for method in ("esp", "hybrid")) > 1
    assert (document["questions"], document["categories"]) == (
        7,
        {CATEGORIES[0]: 3, CATEGORIES[1]: 2, CATEGORIES[2]: 2},
    )


def test_files_and_page(whole: tuple[Bench, dict[str, Any]]) -> None:
    command, document = whole
    assert json.loads((command.folder / "results.json").read_text()) == document
    lines = list(csv.DictReader((command.folder / "results.csv").read_text().splitlines()))
    assert [float(line["tau"]) for line in lines] == [result["tau"] for result in document["results"]]
    page = Page((command.folder / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    assert "b" not in page.tags
    assert CATEGORIES[2] in page.text
    for title in ("Table 1:", "Table 6:", "Tables 7 and 8:", "Table 11:", "Table 12:", "What a step costs"):
        assert title in page.text
    assert not [value for _, value in page.attributes if "//" in value.partition("base64,")[0]]


def test_what_is_missing_alone_is_decoded(whole: tuple[Bench, dict[str, Any]]) -> None:
    """The same command does nothing; then two units are lost, and a method is added."""
    command, document = whole
    before, units = command.times(), command.units()
    assert len(before) == len(SIDES) * 3
    assert command.run()[1]["results"] == document["results"]
    assert command.times() == before
    lost = {"esp-bc6-0001", "ar-0002"}
    for name in lost:
        (command.folder / "units" / f"{name}.json").unlink()
    code, again = command.run("--methods", "ar,esp,pld,hybrid,recycle")
    assert code == 0
    after = command.times()
    assert {name for name in after if after[name] != before.get(name)} == lost | {
        f"recycle-bc6-000{n}" for n in range(3)
    }
    for name in lost:
        assert _tokens(command.units()[name]) == _tokens(units[name])
    assert [each["method"] for each in again["results"] if each["category"] == "overall"][-1] == "recycle"
    assert all(each["exact_match_rate"] == 1 for each in again["results"])


def _tokens(unit: Unit) -> list[list[int]]:
    return [turn["tokens"] for question in unit["questions"] for turn in question["turns"]]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--new", "9"], "holds a run of other settings; it differs in\n  new: 10 -> 9"),
        (["--temperature", "1"], "temperature: 0.0 -> 1.0"),
        (["--temperature", "1e-9"], "temperature must be 0 or >= 0.0001"),
        (["--per-category", "1"], "questions: "),
        (["--decoder", "ema=0.5"], "decoder.ema: None -> '0.5'"),
        (["--new", "150"], "--new 150: no question fits into the model's context of 160"),
        (["--actors", "5", "--bc", "8"], "--actors 3: each takes 2 CPUs"),
    ],
)
def test_what_cannot_be_run(
    whole: tuple[Bench, dict[str, Any]], capsys: pytest.CaptureFixture[str], extra: list[str], words: str
) -> None:
    command, _ = whole
    before = command.times()
    threads = ["--threads", "2"] if "--actors" in extra else []
    if threads:
        command = Bench(command.questions, command.model, command.folder.with_name("other"))
    assert command.run(*extra, *threads)[0] == 2
    assert words in capsys.readouterr().err
    assert whole[0].times() == before


def test_other_files_and_other_runs_units_are_refused(
    whole: tuple[Bench, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, _ = whole
    (tmp_path / "notes.txt").write_text("mine")
    assert Bench(command.questions, command.model, tmp_path).run()[0] == 2
    assert "holds files and no specbench.json" in capsys.readouterr().err
    unit, steps = "units/pld-bc11-0000.json", "step_cost.json"
    for name, change, words in (
        (unit, {"run": "x"}, "is of another run"),
        (unit, {"decoder": {}}, "with another setting"),
        (steps, {"format": 0}, "no step-cost table"),
    ):
        file = command.folder / name
        content = file.read_text()
        try:
            file.write_text(json.dumps(json.loads(content) | change))
            assert command.run()[0] == 2
            assert words in capsys.readouterr().err
        finally:
            file.write_text(content)


def test_no_unit_is_begun_when_time_is_up() -> None:
    assert list(specbench._decoded(["worker"], [["unit"]], until=0.0)) == []
