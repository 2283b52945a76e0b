"""Everything that a user can ask of sampling and ending, per job, per row and per sample, against the reference."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from helpers import Command, Result, expected, prompts, write_jsonl
from xxhash import xxh3_64_intdigest

from esp_worker.model import CausalModel
from esp_worker.stopping import StopStrings
from pipeline.prepare import load_tokenizer

JOB: dict[str, Any] = {"temperature": 0.8, "seed": 3, "min_p": 0.01, "max_new_tokens": 16}
KEPT, FREE = 5, 6  # the rows that keep their stop string, and that have none but words that are banned
STOPS: list[str] = []  # of KEPT, from its own text: one that comes too early, one that counts
BANNED: list[str] = []  # of FREE: a word of its own text
# Each row's own settings, as the file has them and as the decoder gets them.
OWN: list[tuple[Any, dict[str, Any]]] = [
    (None, {}),
    ({"temperature": 0, "top_p": None}, {"temperature": 0.0}),
    ({"temperature": 1.5, "top_k": 5}, {"temperature": 1.5, "top_k": 5}),
    (
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {"100": 2}},
        {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "logit_bias": ((100, 2.0),),
        },
    ),
    ('{"max_new_tokens": 5, "min_p": 0.2}', {"max_new_tokens": 5, "min_p": 0.2}),
    (
        {"temperature": 0, "keep_stop": True, "min_new_tokens": 6, "stop": STOPS},
        {"temperature": 0.0, "min_new_tokens": 6},
    ),
    ({"temperature": 0, "stop": [], "bad_words": BANNED}, {"temperature": 0.0}),
    ({"temperature": 0, "top_p": 2}, {}),
    ({"logit_bias": {"99999": 1}}, {}),
    ({"max_new_tokens": 0}, {"max_new_tokens": 0}),
]
SEEDS = {2: 2**64 - 1, 3: 12}  # columns of their own
BAD = {7: "sampling", 8: "decode"}
N = 2
TOP = 3


def rows() -> list[dict[str, Any]]:
    return [
        {"id": f"row-{i}", "prompt": f"Prompt {i} " + "ab" * (i % 3), "p": own, "seed": SEEDS.get(i)}
        for i, (own, _) in enumerate(OWN)
    ]


class Reference:
    """What each sample must be, by the slow decoder; settings and seeds are written out here once more."""

    def __init__(self, model: CausalModel, folder: Path, stop: str) -> None:
        self.model, self.folder, self.stop = model, folder, stop
        self.tokenizer = load_tokenizer(folder)

    def text(self, token_ids: Any) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def params(self, index: int) -> dict[str, Any]:
        params = {**JOB, **OWN[index][1]}
        params["seed"] = SEEDS.get(index, xxh3_64_intdigest(f"3\0row-{index}".encode()))
        if index == FREE:
            words = [BANNED[0], f" {BANNED[0]}"]
            params["bad_words"] = tuple(tuple(self.tokenizer(w, add_special_tokens=False)["input_ids"]) for w in words)
        return params

    def stop_of(self, index: int) -> StopStrings | None:
        if index == FREE:
            return None
        if index == KEPT:
            return StopStrings(STOPS, self.text, keep=True)
        return StopStrings([self.stop], self.text)

    def check(self, row: Mapping[str, Any]) -> None:
        index = row["row_index"]
        params = self.params(index)
        prompt, stop = rows()[index]["prompt"], self.stop_of(index)
        want = expected(self.model, self.folder, prompt, stop, sample_index=row["sample_index"], **params)
        assert tuple(row["token_ids"]) == want.token_ids
        assert row["finish_reason"] == want.finish_reason
        assert row["seed"] == params["seed"]
        assert row["stop_reason"] == (want.stop and want.stop.reason)
        assert row["text"] == (want.stop.text if want.stop else self.text(want.token_ids))
        if index == KEPT:
            assert row["text"].endswith(STOPS[1])
            assert row["stop_reason"] == STOPS[1]
        elif want.stop:
            assert self.stop not in row["text"]
        if index == FREE:
            assert BANNED[0] not in row["text"]
        self.check_logprobs(row, want.logits)
        if row["output_tokens"]:
            assert row["prefill_tokens"] + row["cached_tokens"] == row["prompt_tokens"]

    def check_logprobs(self, row: Mapping[str, Any], logits: torch.Tensor) -> None:
        """logits [output tokens, V]"""
        logprobs = logits.log_softmax(-1)
        chosen = [at[token].item() for at, token in zip(logprobs, row["token_ids"], strict=True)]
        assert row["logprobs"] == pytest.approx(chosen, abs=1e-5)
        values, tokens = logprobs.topk(TOP, -1)
        assert [[top["token_id"] for top in at] for at in row["top_logprobs"]] == tokens.tolist()
        given = [[top["logprob"] for top in at] for at in row["top_logprobs"]]
        assert given == [pytest.approx(at, abs=1e-5) for at in values.tolist()]


def check_all(result: Result, reference: Reference, samples: int, count: int) -> None:
    assert [(row["row_id"], row["sample_index"]) for row in result.rows] == [
        (f"row-{i}", sample) for i in range(count) for sample in range(samples)
    ]
    assert len({row["row_key"] for row in result.rows}) == count * samples
    for row in result.rows:
        kind = BAD.get(row["row_index"])
        assert row["error_type"] == kind
        if kind is None:
            reference.check(row)
        else:
            assert f"row {row['row_id']}" in row["error"] or f"line {row['row_index'] + 1}:" in row["error"]


@pytest.mark.timeout(300)
def test_rows_of_their_own_and_samples_through_interrupted_starts(
    command: Command, tiny_fp64: CausalModel, tiny_checkpoint: Path
) -> None:
    def free_text(index: int, **sampling: Any) -> str:
        ids = expected(tiny_fp64, tiny_checkpoint, rows()[index]["prompt"], **sampling).token_ids
        return str(load_tokenizer(tiny_checkpoint).decode(ids, skip_special_tokens=True))

    stop = free_text(0, **JOB | {"seed": xxh3_64_intdigest(b"3\0row-0")})[4:6]
    kept, free = free_text(KEPT), free_text(FREE)
    STOPS[:] = [kept[2:4], kept[8:10]]
    BANNED[:] = [next(character for character in free if character.isalnum())]
    assert all(text.strip() and text in kept for text in STOPS)
    assert stop.strip()
    write_jsonl(command.work / "in.jsonl", rows())
    reference = Reference(tiny_fp64, tiny_checkpoint, stop)
    command.config["input"] |= {"sampling_column": "p", "sampling_columns": ["seed"]}
    command.config["sampling"] = {**JOB, "stop": stop, "logprobs": TOP}
    settings = {"output__rows_per_file": 3, "compare__fraction": 1.0}

    first = command("--limit", "4", **settings)
    assert first.code == 0
    check_all(first, reference, samples=1, count=4)
    counts = {"input_rows": 4, "samples": 1, "already_done": 0, "rows": 4, "not_in_input": 0, "failed": 0, "shards": 2}
    assert first.json("run.json")["counts"] == counts
    assert any(row["stop_reason"] == stop for row in first.rows), "a stop string ends some row"

    # A larger n adds samples to the prompts that are there; --limit counts prompts.
    second = command(sampling__n=N, **settings)
    assert second.code == 0
    check_all(second, reference, samples=N, count=len(OWN))
    total = N * len(OWN)
    counts = second.json("run.json")["counts"]
    assert (counts["input_rows"], counts["samples"], counts["already_done"], counts["rows"]) == (len(OWN), N, 4, total)
    assert (counts["not_in_input"], counts["failed"]) == (0, 2 * N)
    report = second.json("report.json")
    assert report["rows"]["total"] == total
    done = [row for row in second.rows if row["error"] is None]
    cached, computed = sum(row["cached_tokens"] for row in done), sum(row["prefill_tokens"] for row in done)
    assert report["method"]["prefix_hit_rate"] == pytest.approx(cached / (cached + computed))
    assert report["comparison"]["exact_match"] == {"count": total - 2 * N, "of": total - 2 * N, "rate": 1.0}
    tokens = {(row["row_id"], row["sample_index"]): row["token_ids"] for row in second.rows}
    assert tokens["row-1", 0] == tokens["row-1", 1], "greedy samples are equal"
    assert tokens["row-0", 0] != tokens["row-0", 1], "drawn ones have noise of their own"

    # As if a start had been killed between the samples of a prompt: a shard of three rows is gone.
    lost = next(shard for shard in sorted((second.folder / "data").iterdir()) if pq.read_metadata(shard).num_rows == 3)
    lost.unlink()
    third = command(sampling__n=N, **settings)
    assert third.code == 0
    assert {(row["row_id"], row["sample_index"]): row["token_ids"] for row in third.rows} == tokens
    check_all(third, reference, samples=N, count=len(OWN))
    assert third.json("run.json")["counts"]["already_done"] == total - 3

    # A changed setting of a row is a new row; a smaller n leaves what is there.
    changed = rows()
    changed[1]["p"] = {"temperature": 0.1}
    write_jsonl(command.work / "in.jsonl", changed)
    fourth = command(**settings)
    counts = fourth.json("run.json")["counts"]
    assert (counts["already_done"], counts["rows"], counts["not_in_input"]) == (
        len(OWN) - 1,
        total + 1,
        total - len(OWN) + 1,
    )
    assert fourth.json("report.json")["rows"]["total"] == total + 1


def test_in_16_bits_differences_are_counted_and_their_margins_shown(command: Command) -> None:
    write_jsonl(command.work / "in.jsonl", prompts(60))
    result = command(model__dtype="bfloat16", compare__fraction=1.0, sampling__max_new_tokens=60)
    assert result.code == 0
    assert "16-bit: near-ties may flip; exact match is reported, not promised." in result.out
    differing = [row for row in result.rows if not row["exact_match"]]
    assert all((row["divergence_margin"] is None) == row["exact_match"] for row in result.rows)
    comparison = result.json("report.json")["comparison"]
    assert comparison["exact_match"]["count"] == 60 - len(differing)
    if not differing:
        pytest.skip("this machine's 16-bit kernels round alike for one row and for several")
    margins = [row["divergence_margin"] for row in differing]
    assert 0 <= max(margins) < 0.25, "a few steps of 16 bits at these logits: near-ties"
    assert comparison["first_divergence"]["margin_max"] == max(margins)
    assert comparison["first_divergence"]["margin_median"] == pytest.approx(statistics.median(margins))
    assert f"(median of {len(margins)}), {max(margins):.3g} (maximum)" in result.out
    assert all(row["logprobs"] is None and row["top_logprobs"] is None for row in result.rows), "not asked for"
