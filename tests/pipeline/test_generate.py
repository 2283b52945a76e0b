"""The main job, whole: real Ray, real Parquet, a tiny real model; what comes out is what plain decoding gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import ray
from helpers import NEW_TOKENS, Command, expected_tokens, prompts, write_jsonl

from esp_worker.model import CausalModel
from pipeline.config import load_config
from pipeline.graph import generate
from pipeline.schema import output_schema


def test_three_bad_lines_among_forty(command: Command, tiny_fp64: CausalModel, tiny_checkpoint: Path) -> None:
    good = prompts(37)
    lines: list[object] = [*good]
    for at, bad in (
        (4, '{"id": "broken", "prompt": "cut'),
        (20, '{"id": "none"}'),
        (39, '{"id": "seven", "prompt": 7}'),
    ):
        lines.insert(at, bad)
    write_jsonl(command.work / "in.jsonl", lines)
    result = command(compare__fraction=1.0, input__keep_columns=["prompt"])
    assert result.code == 0
    rows = result.rows
    assert len(rows) == 40
    assert result.table.schema.equals(output_schema({"prompt": "string"}))

    failed = [row for row in rows if row["finish_reason"] == "error"]
    assert [row["row_index"] for row in failed] == [4, 20, 39]
    for row, line, kind in zip(failed, (5, 21, 40), ("malformed", "missing_field", "wrong_type"), strict=True):
        assert f"in.jsonl, line {line}:" in row["error"]
        assert row["error_type"] == kind
        assert row["text"] is None
        assert row["token_ids"] is None

    done = [row for row in rows if row["finish_reason"] != "error"]
    want = expected_tokens(tiny_fp64, tiny_checkpoint, good)
    assert {row["row_id"]: tuple(row["token_ids"]) for row in done} == want
    for row in done:
        assert row["output_tokens"] == len(row["token_ids"]) == 1 + sum(row["accept_lengths"]) <= NEW_TOKENS
        assert row["decode_calls"] == len(row["accept_lengths"])
        assert row["accepted_tokens"] == row["output_tokens"] - 1 - row["decode_calls"]
        assert row["decode_calls"] <= row["rows_computed"] <= 12 * row["decode_calls"]
        assert row["exact_match"] is True
        assert row["first_divergence"] is None
        assert row["ar_decode_calls"] == row["output_tokens"] - 1
        assert (row["finish_reason"] == "stop") == (row["token_ids"][-1] == 2)
    assert sum(row["accepted_tokens"] for row in done) > 0

    report = result.json("report.json")
    assert report["rows"]["total"] == 40
    assert report["rows"]["failed"] == 3
    assert report["comparison"]["exact_match"] == {"count": 37, "of": 37, "rate": 1.0}
    run = result.json("run.json")
    assert run["status"] == "finished"
    counts = {"input_rows": 40, "samples": 1, "already_done": 0, "rows": 40, "not_in_input": 0, "failed": 3}
    assert run["counts"] == {**counts, "shards": 4}
    assert run["config"]["engine"]["max_length"] == 160
    assert "37/37" in result.out
    assert str(result.folder / "report.html") in result.out
    assert "<html" in (result.folder / "report.html").read_text(encoding="utf-8")


def test_rows_chosen_step_by_step(
    command: Command,
    tiny_checkpoint: Path,
    tiny_fp64: CausalModel,
) -> None:
    """The defaults, on a machine that has no step-cost table and no successors: the actor makes its own."""
    good = prompts(12)
    write_jsonl(command.work / "in.jsonl", good)
    result = command(decoder__method="hybrid", decoder__block_complexity="auto", compare__fraction=1.0)
    assert result.code == 0
    assert {row["row_id"]: tuple(row["token_ids"]) for row in result.rows} == expected_tokens(
        tiny_fp64, tiny_checkpoint, good
    )
    calls = sum(row["decode_calls"] for row in result.rows)
    plain = sum(row["plain_steps"] for row in result.rows)
    assert 0 < plain <= calls, "the first steps at least"
    assert result.json("report.json")["method"]["plain_call_share"] == pytest.approx(plain / calls)
    decoder = result.json("run.json")["config"]["decoder"]
    assert (decoder["method"], decoder["block_complexity"]) == ("hybrid", "auto")


def test_too_many_errors_is_exit_code_3(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", [*prompts(3), "{"])
    assert command(errors__max_fraction=0.25).code == 0
    result = command(errors__max_fraction=0.2, output__path=str(command.work / "out2"))
    assert result.code == 3
    assert "1 of 4 rows failed" in result.err
    assert len(result.rows) == 4


def test_every_bad_input_is_an_error_row_and_the_others_are_complete(command: Command) -> None:
    folder = command.work / "many"
    bad = [
        ("empty_prompt", {"id": "a", "prompt": "  "}),
        ("prompt_too_long", {"id": "b", "prompt": "x" * 500}),
        ("invalid_text", '{"id": "c", "prompt": "\\ud800"}'),
        ("wrong_type", {"id": ["d"], "prompt": "hello"}),
        ("duplicate_id", {"id": "row-0", "prompt": "again"}),
        ("malformed", "[1, 2]"),
    ]
    write_jsonl(folder / "bad.jsonl", [*prompts(1), *(row for _, row in bad)])
    write_jsonl(folder / "good.jsonl", prompts(3, start=1))
    (folder / "void.jsonl").write_bytes(b"")
    result = command(input__path=str(folder))
    assert result.code == 0
    assert [row["error_type"] for row in result.rows] == [None, *(kind for kind, _ in bad), None, None, None]
    duplicate = result.rows[5]
    assert "bad.jsonl, line 6" in duplicate["error"]
    assert "bad.jsonl, line 1" in duplicate["error"]
    assert {row["source_file"] for row in result.rows} == {"bad.jsonl", "good.jsonl"}
    assert "void.jsonl is empty" in result.err


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_an_empty_input_leaves_a_table_with_its_schema(command: Command, lines: list[str]) -> None:
    write_jsonl(command.work / "in.jsonl", lines)
    result = command()
    assert result.code == 0
    assert "no rows" in result.err
    table = pads.dataset(result.folder / "data").to_table()
    assert table.num_rows == 0
    assert table.schema.equals(output_schema({}))
    assert result.json("report.json")["rows"]["total"] == 0


def test_all_rows_bad_is_one_table_too(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", ["{"] * 12)
    result = command()
    assert result.table.num_rows == 12
    assert result.table.schema.equals(output_schema({}))
    assert result.json("report.json")["rows"]["failed"] == 12


def test_parquet_messages_kept_columns_and_two_actors(command: Command) -> None:
    # Enough work that the second actor has some left, also when it starts seconds after the first.
    count = 48
    chats = [[{"role": "user", "content": f"Question {i}"}] for i in range(count)]
    table = pa.table(
        {"key": list(range(count)), "chat": chats, "score": [i / 2 for i in range(count)], "tag": ["t"] * count}
    )
    pq.write_table(table, command.work / "in.parquet", row_group_size=5)
    command.config["input"] = {
        "path": str(command.work / "*.parquet"),
        "messages_column": "chat",
        "id_column": "key",
        "keep_columns": {"score": "float64", "tag": "string", "absent": "int64"},
    }
    result = command(
        cluster__actors=2, engine__slots=2, output__rows_per_file=5, cluster__num_cpus=1, sampling__max_new_tokens=60
    )
    assert result.code == 0
    rows = result.rows
    assert [row["row_id"] for row in rows] == [str(i) for i in range(count)]
    assert [row["score"] for row in rows] == [i / 2 for i in range(count)]
    assert {row["absent"] for row in rows} == {None}
    assert len({row["worker"] for row in rows}) == 2  # neither idles
    assert all(row["output_tokens"] for row in rows)


def test_the_same_rows_whatever_the_cluster_and_the_slots(command: Command) -> None:
    """16 prompts, each greedy and drawn, in one file: rows of both kinds share batches, slots and actors."""
    asked = [
        {**row, "id": f"{row['id']}-{temperature}", "temperature": temperature}
        for row in prompts(16)
        for temperature in (0.0, 1.0)
    ]
    write_jsonl(command.work / "in.jsonl", asked)
    settings = {"input__sampling_columns": ["temperature"], "sampling__seed": 3, "cluster__num_cpus": 1}
    outputs = []
    for number, (actors, slots, method) in enumerate([(1, 1, "ar"), (1, 16, "esp"), (2, 4, "esp")]):
        result = command(
            cluster__actors=actors,
            engine__slots=slots,
            decoder__method=method,
            output__path=str(command.work / f"out{number}"),
            **settings,
        )
        outputs.append({row["row_id"]: row["token_ids"] for row in result.rows})
    assert outputs[0] == outputs[1] == outputs[2]
    drawn = {tuple(tokens) for name, tokens in outputs[0].items() if name.endswith("1.0")}
    assert len(drawn) == 16  # rows have seeds of their own


def test_stop_strings_cut_text_and_tokens(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(8))
    free = {row["row_id"]: row for row in command().rows}
    stop = free["row-0"]["text"][3:5]
    assert stop.strip()
    result = command(sampling__stop=stop, output__path=str(command.work / "stopped"))
    for row in result.rows:
        whole = free[row["row_id"]]
        assert row["token_ids"] == whole["token_ids"][: len(row["token_ids"])]
        assert stop not in row["text"]
        if stop in whole["text"]:
            assert row["finish_reason"] == "stop"
            assert row["text"] == whole["text"][: whole["text"].index(stop)]
        else:
            assert row["token_ids"] == whole["token_ids"]
    assert result.rows[0]["finish_reason"] == "stop"


def test_generate_composes_with_a_users_own_dataset(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(6))
    want = {row["row_id"]: row["token_ids"] for row in command().rows}
    config = load_config(command.work / "config.yaml")
    mine = ray.data.from_items([{**row, "other": i} for i, row in enumerate(prompts(6))]).filter(
        lambda row: row["other"] > 1
    )
    rows = generate(mine, config).take_all()
    assert {row["row_id"]: list(row["token_ids"]) for row in rows} == {
        name: tokens for name, tokens in want.items() if name not in ("row-0", "row-1")
    }


def test_dry_run_prints_the_plan_and_writes_nothing(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", [*prompts(7), "{"])
    result = command("--dry-run", "--limit", "6")
    assert result.code == 0
    assert "6 rows in 1 file(s)" in result.out
    assert "block complexity 12" in result.out
    assert "Prompt number 0" in result.out
    assert not result.folder.exists()


def test_print_config_shows_every_setting(command: Command) -> None:
    result = command("--print-config", "--set", "sampling.top_k=7")
    assert result.code == 0
    assert "top_k: 7" in result.out
    assert "device_hour_usd: null" in result.out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decoder__mask": 2}, "decoder.mask: unknown setting; the nearest valid key is decoder.masks"),
        ({"input__path": "nowhere/*.jsonl"}, "nothing matches nowhere/*.jsonl"),
        ({"model__path": "./no-such-model"}, "no such file or folder"),
        ({"cluster__actors": 9}, "9 actors of 1 CPUs and 0 GPUs each do not fit"),
        ({"cluster__actors": 4}, "leave none for reading"),
        ({"engine__max_length": 161}, "beyond the model's context of 160"),
        ({"model__device": "cuda"}, "do not fit"),
    ],
)
def test_bad_configurations_are_exit_code_2(command: Command, settings: dict[str, object], words: str) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(2))
    result = command(**settings)
    assert result.code == 2
    assert words in result.err
    assert not (command.work / "out").exists()


def test_html_escapes_what_rows_bring(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", [{"id": "<script>alert(1)</script>", "prompt": 5}])
    result = command()
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


def test_report_is_plain_json(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(3))
    result = command(decoder__method="ar", compare__fraction=1.0, cost__device_hour_usd=2.0)
    report = json.loads((result.folder / "report.json").read_bytes())
    assert report["method"]["name"] == "ar"
    assert report["method"]["tau"] == 1.0
    assert report["comparison"]["rows"] == 0  # plain decoding is not compared with itself
    assert report["cost"]["usd_per_1m_tokens"] > 0


def test_the_output_place_is_no_input(command: Command) -> None:
    """The output in a folder of the input: a second start must not read what the first one wrote."""
    folder = command.work / "both"
    write_jsonl(folder / "in.jsonl", prompts(4))
    settings = {"input__path": str(folder), "output__path": str(folder / "out")}
    assert command("--limit", "2", **settings).code == 0
    result = command(**settings)
    assert result.code == 0
    assert [row["row_id"] for row in result.rows] == [row["id"] for row in prompts(4)]


def test_an_engine_that_cannot_start_is_one_clear_line(command: Command, tiny_checkpoint: Path) -> None:
    broken = command.work / "broken-model"
    shutil.copytree(tiny_checkpoint, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    write_jsonl(command.work / "in.jsonl", prompts(2))
    result = command(model__path=str(broken))
    assert result.code == 1
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert "safetensor" in line.lower()
    assert result.json("run.json")["status"] == "broken"
