"""`jobs.bench decode`: the sides agree token for token, and the last line is one JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from jobs.bench import _parse, main, make_sides


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": i, "prompt": f"Prompt {i}"} for i in range(3)] + [{"question_id": 7, "turns": ["First", "Second"]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


ESP = ["--methods", "ar,esp"]


def test_decode(tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["decode", "--model", str(tiny_checkpoint), "--prompts", str(prompts_file), "--dtype", "float64"]
    threads = torch.get_num_threads()
    code = main(
        [*arguments, *ESP, "--bc", "4,12", "--slots", "1,3", "--new", "12", "--repeat", "2", "--threads", str(threads)]
    )
    assert code == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert document["prompts"] == 4
    assert document["kernels"].startswith("stock kernels")
    assert document["ceiling"]["memory_read_gb_per_s"] > 0
    results = document["results"]
    assert [(r["method"], r["bc"], r["slots"]) for r in results] == [
        (method, bc, slots) for slots in (1, 3) for method, bc in (("ar", None), ("esp", 4), ("esp", 12))
    ]
    assert len({r["tokens"] for r in results}) == 1
    for result in results:
        assert result["exact_match_rate"] == 1.0
        assert result["tau"] >= 1.0
        assert 1.0 <= result["rows_per_call"] <= (result["bc"] or 1)
        assert set(result["profile"]) == {"linears", "attention", "lm_head", "draft_verify", "other"}
        assert sum(result["profile"].values()) == pytest.approx(1, abs=1e-3)
        assert min(result["profile"].values()) > 0
        step = result["step"]
        assert 1.0 <= step["rows"] <= result["slots"] * (result["bc"] or 1)
        assert step["ratio"] == pytest.approx(step["ms"] / step["floor_ms"], rel=0.02)
        assert f"{step['ms'] * result['profile']['linears']:.2f}" in printed
        assert result["steady_tokens_per_s"] > 0
        assert result["tail_seconds"] >= 0
    plain = results[0]
    assert (plain["tau"], plain["rows_per_call"], plain["speedup_vs_ar"]) == (1.0, 1.0, 1.0)
    assert all(r["decode_calls"] <= plain["decode_calls"] for r in results)


def test_where_there_is_no_decode_step_and_no_steady_phase_the_figures_are_missing(
    tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--slots", "4", "--new", "1", "--repeat", "1", "--threads", str(torch.get_num_threads())]
    assert main(["decode", "--model", str(tiny_checkpoint), "--prompts", str(prompts_file), *options]) == 0
    for result in json.loads(capsys.readouterr().out.splitlines()[-1])["results"]:
        assert result["tokens"] == 4
        missing = ("profile", "step", "steady_tokens_per_s", "tail_seconds")
        assert [result[name] for name in missing] == [None] * 4


def test_a_repeat_has_learnt_nothing_from_the_one_before(
    tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recycle keeps what it saw: with what the first repeat left it would know each prompt's answer."""
    options = ["--dtype", "float64", "--bc", "20", "--new", "24", "--threads", str(torch.get_num_threads())]
    calls = []
    for repeat in ("1", "3"):
        arguments = ["decode", "--model", str(tiny_checkpoint), "--prompts", str(prompts_file), "--repeat", repeat]
        assert main([*arguments, *options, "--methods", "ar,recycle"]) == 0
        calls.append([r["decode_calls"] for r in json.loads(capsys.readouterr().out.splitlines()[-1])["results"]])
    assert calls[0] == calls[1]


# The paper's pairs: table 4 (implementation), 5 (mask tokens), 13 (pruning); then trees and probe owners.
@pytest.mark.parametrize(
    ("extra", "varied"),
    [
        (["--vary", "impl=naive,efficient"], [{"impl": "naive"}, {"impl": "efficient"}]),
        (
            ["--vary", "init=mean,last_k,sample,offset"],
            [{"init": init} for init in ("mean", "last_k", "sample", "offset")],
        ),
        (["--vary", "prune=all,deep,none"], [{"prune": prune} for prune in ("all", "deep", "none")]),
        (
            ["--vary", "tree=best_first,3x2", "--vary", "ema=0,0.5", "--decoder", "masks=2", "--decoder", "prune=deep"],
            [{"tree": tree, "ema": ema} for tree in ("best_first", "3x2") for ema in ("0", "0.5")],
        ),
        (["--vary", "probe_owners=all,2"], [{"probe_owners": "all"}, {"probe_owners": "2"}]),
    ],
)
def test_vary(
    tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str], extra: list[str], varied: list[Any]
) -> None:
    """A side for each value; every side's tokens are plain decoding's, and its settings are those it was timed with."""
    threads = ["--threads", str(torch.get_num_threads())]
    options = ["--dtype", "float64", "--bc", "18", "--new", "8", "--repeat", "1", *threads]
    assert (
        main(["decode", "--model", str(tiny_checkpoint), "--prompts", str(prompts_file), *options, *ESP, *extra]) == 0
    )
    out = capsys.readouterr().out
    plain, *sides = json.loads(out.splitlines()[-1])["results"]
    assert (plain["method"], plain["varied"]) == ("ar", {})
    assert [side["varied"] for side in sides] == varied
    table = [line for line in out.splitlines() if line.startswith("│ esp")]
    assert len(table) == 2 * len(sides), "what each gave, and where its steps' time went"
    for side, line in zip(sides * 2, table, strict=True):
        assert side["exact_match_rate"] == 1.0
        assert 1.0 < side["rows_per_call"] <= side["bc"] == side["decoder"]["block_complexity"] == 18
        assert set(side["varied"].values()) <= set(line.split()), "the table shows what was varied"
        for key, text in side["varied"].items():
            want = {"tree": "static", "branches": [3, 2]} if text == "3x2" else {key: yaml.safe_load(text)}
            assert want.items() <= side["decoder"].items()
        if "masks=2" in extra:
            assert (side["decoder"]["masks"], side["decoder"]["prune"]) == (2, "deep")


def test_auto_beside_a_fixed_tree(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPSTREAM_CACHE", str(tmp_path))
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "abc"}\n{"prompt": "abd"}\n', encoding="utf-8")
    sizes = ["--slots", "2", "--new", "24", "--repeat", "1", "--threads", "1"]
    assert main(["decode", "--model", str(tiny_checkpoint), "--prompts", str(file), "--bc", "auto,10", *sizes]) == 0
    plain, auto, fixed = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert (plain["plain_call_share"], auto["bc"], fixed["bc"]) == (1.0, "auto", 10)
    assert auto["exact_match_rate"] == fixed["exact_match_rate"] == 1.0
    assert fixed["plain_call_share"] < auto["plain_call_share"] <= 1, "auto begins with plain steps"


def sides_of(*arguments: str) -> list[tuple[str, int | str | None, int, dict[str, str]]]:
    options = _parse(["decode", "--model", "m", "--prompts", "p", *ESP, *arguments])
    return [(side.config.method, side.bc, side.slots, dict(side.varied)) for side in make_sides(options)]


def test_sides_are_a_product_and_plain_decoding_stands_once_for_each_number_of_slots() -> None:
    assert sides_of("--slots", "1,4", "--bc", "10,30", "--vary", "masks=1,2") == [
        side
        for slots in (1, 4)
        for side in (
            ("ar", None, slots, {}),
            *(("esp", bc, slots, {"masks": masks}) for bc in (10, 30) for masks in ("1", "2")),
        )
    ]
    assert sides_of("--methods", "esp") == [("esp", "auto", 1, {})]
    assert sides_of("--methods", "ar,hybrid,stand") == [
        ("ar", None, 1, {}),
        ("hybrid", "auto", 1, {}),
        ("stand", 30, 1, {}),
    ]
    assert [bc for _, bc, _, _ in sides_of("--methods", "esp", "--bc", "auto,30")] == ["auto", 30]
    assert sides_of("--methods", "ar", "--bc", "10,30", "--vary", "masks=1,2") == [("ar", None, 1, {})]


def test_each_method_takes_of_the_settings_and_rows_what_is_its_own() -> None:
    methods = ["--methods", "ar,esp,pld,recycle,lade", "--bc", "10,30"]
    assert sides_of(*methods, "--vary", "masks=1,2", "--decoder", "depth=4") == [
        ("ar", None, 1, {}),
        *(("esp", bc, 1, {"masks": masks}) for bc in (10, 30) for masks in ("1", "2")),
        ("pld", 5, 1, {}),
        *((method, bc, 1, {}) for method in ("recycle", "lade") for bc in (10, 30)),
    ]
    lookahead = sides_of("--methods", "lade", "--bc", "10", "--vary", "lookahead=[3,2,1],[4,5,5]")
    assert lookahead == [("lade", 6, 1, {"lookahead": "[3,2,1]"}), ("lade", 30, 1, {"lookahead": "[4,5,5]"})]


def test_every_methods_tokens_are_plain_decodings(
    tiny_checkpoint: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--dtype", "float64", "--new", "12", "--repeat", "1", "--threads", str(torch.get_num_threads())]
    methods = ["--methods", "ar,pld,lade,stand,recycle", "--bc", "10"]
    assert main(["decode", "--model", str(tiny_checkpoint), "--prompts", str(prompts_file), *options, *methods]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [result["method"] for result in results] == ["ar", "pld", "lade", "stand", "recycle"]
    for result in results:
        assert result["exact_match_rate"] == 1.0
        assert 1.0 <= result["rows_per_call"] <= (result["bc"] or 1)
    assert any(result["tau"] > 1 for result in results)


def test_the_widths_of_a_static_tree_give_its_masks_and_rows() -> None:
    """Table 3's row: one, two and three masks, each with its own tree."""
    sides = sides_of("--methods", "esp", "--vary", "tree=29,15x4,7x5x3")
    assert [(bc, varied["tree"]) for _, bc, _, varied in sides] == [(60, "29"), (60, "15x4"), (64, "7x5x3")]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--vary", "impl=naive,fast"], "decoder.impl: Input should be 'efficient' or 'naive' (got 'fast')"),
        (["--vary", "mask=1,2"], "decoder.mask: unknown setting; the nearest valid key is decoder.masks"),
        (["--decoder", "probe_owners=0"], "decoder.probe_owners: give all"),
        (["--decoder", "masks=1", "--vary", "masks=1,2"], "decoder.masks: given twice"),
        (["--vary", "tree=7x2", "--bc", "60"], "decoder: block_complexity: 60 is not that of branches [7, 2]"),
        (["--vary", "tree=7x2", "--decoder", "masks=1"], "decoder: branches [7, 2] has 2 widths for masks: 1"),
        (["--decoder", "ema=[0"], "decoder.ema: [0 is not valid YAML"),
        (["--decoder", "depth=4"], "decoder.depth: none of the methods esp has this setting"),
        (["--methods", "pld,recycle", "--vary", "masks=1,2"], "decoder.masks: none of the methods pld, recycle has"),
        (["--methods", "lade", "--bc", "31"], "decoder: block_complexity: 31 is none of the paper's for lade"),
    ],
)
def test_wrong_decoder_settings(extra: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model, which is not there, is looked for."""
    assert main(["decode", "--model", "m", "--prompts", "p", "--methods", "esp", *extra]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--methods", "ar,medusa"], "methods are esp, hybrid, ar, pld"),
        (["--vary", "impl"], "expected a decoder setting and its value"),
        (["--vary", "block_complexity=10,30"], "use --bc for block_complexity"),
        (["--decoder", "method=ar"], "use --methods for method"),
        (["--vary", "branches=7x2"], "use tree=7x2 (the widths of a static tree) for branches"),
        (["--bc", "10,all"], "expected whole numbers"),
        (["--slots", "0"], "must be positive"),
    ],
)
def test_bad_arguments(extra: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["decode", "--model", "m", "--prompts", "p", *extra])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_row_without_a_prompt_is_named(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert main(["decode", "--model", str(tiny_checkpoint), "--prompts", str(file)]) == 2
    assert "p.jsonl, line 2: expected a `prompt`" in capsys.readouterr().err
