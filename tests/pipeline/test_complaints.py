"""What users of other pipelines have complained about in public, with each complaint's own kind of input.

Two jobs on a real Ray, one of prompts and one of chats, serve them; every test names the thread whose symptom it would
show. Complaints about decoders stand in tests/equivalence/test_complaints.py. Elsewhere:

    ray#44687  a pool as large as the machine hangs          tests/unit/test_plan.py (check_cluster)
    ray#41728  one small file, two actors: one idles         test_generate.py (two actors)
    ray#59522  an actor dies in a long job                   test_faults.py
    ray#55008, curator#564  no resume; interrupted twice     test_resume.py, test_signals.py
    ray#55055  S3 answers 403 or 503 now and then            tests/pipeline/test_s3.py, tests/unit/test_storage.py
    ray PR#52634  one batch of lengths 1 to 1024             tests/equivalence/test_slots.py (slots are filled again)
    transformers#22312  no pad token                         tests/unit/test_prepare.py (its tokenizers have none)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import yaml
from helpers import NEW_TOKENS, expected, prompts, write_jsonl

from esp_worker.model import CausalModel
from jobs.generate import main
from pipeline.errors import RowErrorType
from pipeline.prepare import load_tokenizer
from pipeline.schema import output_schema

Rows = dict[str, list[dict[str, Any]]]  # by source file, in input order
SURROGATE = '{"id": "surrogate", "prompt": "half of a pair: \\ud83d"}'


def run(work: Path, model: Path, **given: Any) -> Path:
    """One job over work/in; its output folder."""
    config = {
        "input": {"path": str(work / "in"), "id_column": "id", **given},
        "output": {"path": str(work / "out"), "rows_per_file": 20},
        "model": {"path": str(model), "dtype": "float64", "device": "cpu"},
        "sampling": {"max_new_tokens": NEW_TOKENS},
        "decoder": {"method": "esp", "block_complexity": 12},
        "engine": {"slots": 4, "threads": 1},
        "compare": {"fraction": 0.0},
        "errors": {"max_fraction": 1.0},
    }
    (work / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["--config", str(work / "config.yaml")]) == 0
    return work / "out"


def by_file(out: Path) -> Rows:
    found: Rows = {}
    for row in sorted(pq.read_table(out / "data").to_pylist(), key=lambda row: (row["source_file"], row["row_index"])):
        found.setdefault(row["source_file"], []).append(row)
    return found


def without(rows: list[dict[str, Any]], *errors: str) -> list[dict[str, Any]]:
    """The done rows, after a look that the others are error rows of these kinds in this order."""
    assert [row["error_type"] for row in rows if row["error_type"]] == list(errors)
    return [row for row in rows if row["error_type"] is None]


# ----------------------------------------------------------------------------------------------------------- prompts


@pytest.fixture(scope="module")
def prompt_job(ray_session: None, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    work = tmp_path_factory.mktemp("prompts")
    folder = work / "in"
    long = {"id": "long", "prompt": "x" * 500}
    write_jsonl(folder / "a_one_too_long.jsonl", [*prompts(50), long, *prompts(49, start=50)])
    write_jsonl(folder / "b_null_tags.jsonl", [{**row, "tag": None} for row in prompts(5, start=100)])
    write_jsonl(folder / "c_text_tags.jsonl", [{**row, "tag": f"tag {row['id']}"} for row in prompts(5, start=105)])
    write_jsonl(folder / "d_last_lacks_a_key.jsonl", [*prompts(3, start=110), {"id": "bare"}])
    (folder / "e_empty.jsonl").write_bytes(b"")
    (folder / "e_empty.parquet").write_bytes(b"")
    write_jsonl(folder / "f_surrogate.jsonl", [*prompts(2, start=113), SURROGATE, *prompts(1, start=115)])
    write_jsonl(folder / "g_dates.jsonl", [{"id": "date", "prompt": "2024-01-31"}, {"id": "7", "prompt": "7"}])
    write_jsonl(folder / "h_bos.jsonl", [{"id": "bos", "prompt": "<s>begin"}])
    write_jsonl(folder / "i_integer_ids.jsonl", [{"id": i, "prompt": f"Number {i}"} for i in (1, 2)])
    write_jsonl(folder / "z_late_error.jsonl", [*prompts(3, start=116), {"id": "last", "prompt": 5}])
    out = run(work, tiny_checkpoint, prompt_column="prompt", keep_columns=["tag"])
    return out, by_file(out)


def test_one_prompt_too_long_of_a_hundred(prompt_job: tuple[Path, Rows]) -> None:
    """ray#59194: it kills the job."""
    rows = prompt_job[1]["a_one_too_long.jsonl"]
    assert len(without(rows, RowErrorType.PROMPT_TOO_LONG)) == 99
    assert rows[50]["row_id"] == "long"


def test_an_error_column_that_is_null_until_the_last_block(prompt_job: tuple[Path, Rows]) -> None:
    """ray PR#60572: shards without errors have another type than the last one, and do not read together."""
    out, rows = prompt_job
    assert rows["z_late_error.jsonl"][-1]["error_type"] == RowErrorType.WRONG_TYPE
    shards = sorted((out / "data").glob("*.parquet"))
    assert all(pq.read_schema(shard).equals(output_schema({"tag": "string"})) for shard in shards)
    assert any(pq.read_table(shard)["error"].null_count == pq.read_metadata(shard).num_rows for shard in shards)
    assert pads.dataset(out / "data").to_table().num_rows == sum(map(len, rows.values()))


def test_a_column_null_in_one_file_and_text_in_another(prompt_job: tuple[Path, Rows]) -> None:
    """ray#48102."""
    assert [row["tag"] for row in without(prompt_job[1]["b_null_tags.jsonl"])] == [None] * 5
    texts = prompt_job[1]["c_text_tags.jsonl"]
    assert [row["tag"] for row in without(texts)] == [f"tag row-{i}" for i in range(105, 110)]


def test_the_last_row_lacks_a_key(prompt_job: tuple[Path, Rows]) -> None:
    """ray#53529: an error over the whole file, or a column lost."""
    rows = prompt_job[1]["d_last_lacks_a_key.jsonl"]
    assert len(without(rows, RowErrorType.MISSING_FIELD)) == 3
    assert rows[-1]["error"].endswith(", line 4: no column 'prompt' (input.prompt_column); the row has id")


def test_empty_files_among_good_ones(prompt_job: tuple[Path, Rows]) -> None:
    """ray#47198."""
    out, rows = prompt_job
    assert not any(name.startswith("e_empty") for name in rows)
    assert json.loads((out / "run.json").read_text())["counts"]["rows"] == sum(map(len, rows.values()))


def test_half_of_a_surrogate_pair(prompt_job: tuple[Path, Rows]) -> None:
    """simonw/llm#546: an encoding error far from its cause; in Ray an opaque KeyError, or a pickled column."""
    rows = prompt_job[1]["f_surrogate.jsonl"]
    assert len(without(rows, RowErrorType.INVALID_TEXT)) == 3
    assert rows[2]["error"].startswith("f_surrogate.jsonl, line 3: column 'prompt' holds a lone surrogate")


def test_an_invalid_row_in_the_middle_of_a_batch(prompt_job: tuple[Path, Rows]) -> None:
    """vllm#10777: its neighbours fail with it, or their outputs move up."""
    rows = prompt_job[1]["f_surrogate.jsonl"]
    assert [row["row_id"] for row in rows] == ["row-113", "row-114", "surrogate", "row-115"]
    assert all(row["text"] is not None for row in without(rows, RowErrorType.INVALID_TEXT))


def test_prompts_that_look_like_dates_and_numbers(prompt_job: tuple[Path, Rows]) -> None:
    """JSON readers that infer types make datetimes of them, and integer and text ids do not mix."""
    assert [row["row_id"] for row in without(prompt_job[1]["g_dates.jsonl"])] == ["date", "7"]
    assert [row["row_id"] for row in without(prompt_job[1]["i_integer_ids.jsonl"])] == ["1", "2"]


def test_every_output_is_its_own_prompts(
    prompt_job: tuple[Path, Rows], tiny_checkpoint: Path, tiny_fp64: CausalModel
) -> None:
    """ray#50890: rows reordered; distilabel#587: outputs beside the wrong prompts; transformers PR#45943: results of a
    later call lost."""
    numbered = {row["id"]: row["prompt"] for row in [*prompts(99), *prompts(19, start=100)]}
    asked = numbered | {"date": "2024-01-31", "7": "7"}
    done = [row for rows in prompt_job[1].values() for row in rows if row["row_id"] in asked]
    assert sorted(row["row_id"] for row in done) == sorted(asked)
    for row in done[::4]:
        want = expected(tiny_fp64, tiny_checkpoint, asked[row["row_id"]])
        assert tuple(row["token_ids"]) == want.token_ids
    for name, rows in prompt_job[1].items():
        assert [row["row_index"] for row in rows] == list(range(len(rows))), name


def test_one_bos_though_the_template_writes_one_too(prompt_job: tuple[Path, Rows], tiny_checkpoint: Path) -> None:
    """NeMo-RL#855: the tokenizer adds a second one to what the chat template has begun."""
    tokenizer = load_tokenizer(tiny_checkpoint)
    (row,) = without(prompt_job[1]["h_bos.jsonl"])
    chat = "<|user|><s>begin\n<|assistant|>"  # the user's own stays: it is text
    ids = [tokenizer.bos_token_id, *tokenizer(chat, add_special_tokens=False)["input_ids"]]
    assert row["prompt_tokens"] == len(ids)


# ------------------------------------------------------------------------------------------------------------- chats


CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
OTHER_CALL = {"function": {"name": "time", "arguments": {"zone": 1}}}


def chat(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hello"}, *messages]


@pytest.fixture(scope="module")
def chat_job(
    ray_session: None, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    work = tmp_path_factory.mktemp("chats")
    rows: list[dict[str, Any]] = [
        {"id": "text", "messages": [{"role": "user", "content": "Hello"}]},
        {"id": "parts", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        {"id": "image", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"id": "call", "messages": chat({"role": "assistant", "content": None, "tool_calls": [CALL]})},
        {"id": "calls", "messages": chat({"role": "assistant", "content": None, "tool_calls": [CALL, OTHER_CALL]})},
    ]
    write_jsonl(work / "in" / "chats.jsonl", rows)
    same = [row for row in rows if row["id"] in ("text", "calls")]
    padded = [{"id": f"padded-{row['id']}", "messages": row["messages"]} for row in same]
    pq.write_table(pa.Table.from_pylist(padded), work / "in" / "padded.parquet")
    out = run(work, tiny_checkpoint, messages_column="messages")
    return {row["row_id"]: row for found in by_file(out).values() for row in found}


def test_content_as_text_and_as_parts(chat_job: dict[str, dict[str, Any]]) -> None:
    """ray#47693: both in one file are an error."""
    assert chat_job["text"]["token_ids"] == chat_job["parts"]["token_ids"]
    assert chat_job["text"]["prompt_tokens"] == chat_job["parts"]["prompt_tokens"]


def test_an_image_is_an_error_row_that_names_it(chat_job: dict[str, dict[str, Any]]) -> None:
    """It would be dropped in silence, and the model would answer about nothing."""
    assert chat_job["image"]["error_type"] == RowErrorType.WRONG_TYPE
    assert "found a part of type 'image_url'" in chat_job["image"]["error"]


def test_tool_calls_of_different_shapes(chat_job: dict[str, dict[str, Any]]) -> None:
    """Ragged calls gain each other's keys as None, which the template then shows the model."""
    assert chat_job["call"]["error"] is None
    assert chat_job["padded-calls"]["token_ids"] == chat_job["calls"]["token_ids"]
    assert chat_job["padded-calls"]["prompt_tokens"] == chat_job["calls"]["prompt_tokens"]
    assert chat_job["padded-text"]["token_ids"] == chat_job["text"]["token_ids"]
