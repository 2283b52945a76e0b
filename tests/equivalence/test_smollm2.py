"""The real model: 24 prompts x 64 tokens in fp32, engine against reference, token for token."""

from __future__ import annotations

import json

import pytest
from common import ROOT, SMOLLM2

from esp_worker import reference
from esp_worker.checkpoint import resolve
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.types import Request, SamplingParams
from pipeline.prepare import load_tokenizer

TOKENS = 64
pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    tokenizer = load_tokenizer(resolve(SMOLLM2).folder)
    sampling = SamplingParams(max_new_tokens=TOKENS, eos_token_ids=frozenset([tokenizer.eos_token_id]))
    items = []
    for line in (ROOT / "configs" / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        items.append(Request(row["id"], tuple(ids), sampling))
    return items


@pytest.fixture(scope="module")
def expected(smollm2: CausalModel, requests: list[Request]) -> dict[str, tuple[int, ...]]:
    return {item.request_id: reference.decode(smollm2, item).token_ids for item in requests}


def test_24_prompts(smollm2: CausalModel, requests: list[Request], expected: dict[str, tuple[int, ...]]) -> None:
    engine = Engine(smollm2, [ProbeDrafter(smollm2.embed, masks=1, block_complexity=30), NoDrafter()], slots=8)
    done = list(engine.generate(requests))
    assert len(requests) == len(done) == 24
    assert {c.request_id: c.token_ids for c in done} == expected
    assert sum(c.stats.accepted_tokens for c in done) / sum(c.stats.decode_calls for c in done) > 0.15


def test_two_masks_and_plain_decoding(
    smollm2: CausalModel, requests: list[Request], expected: dict[str, tuple[int, ...]]
) -> None:
    engine = Engine(
        smollm2, [ProbeDrafter(smollm2.embed, masks=2, tree="static", branches=[3, 1]), NoDrafter()], slots=4
    )
    for method, items in (("esp", requests[:4]), ("ar", requests[4:8])):
        for completion in engine.generate(items, method):
            assert completion.token_ids == expected[completion.request_id]
