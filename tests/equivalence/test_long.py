"""A long generation on the real model: 2,000 tokens in fp32, the reference's, in memory that steps do not grow."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from common import SMOLLM2

from esp_worker import reference
from esp_worker.cache import rounded
from esp_worker.checkpoint import resolve
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import BLOCK_COLUMNS, Engine
from esp_worker.model import CausalModel
from esp_worker.types import Completion, Request, SamplingParams
from pipeline.prepare import load_tokenizer

TOKENS = 2000
SETTLED = 300  # tokens after which all that is made once has been made
SLACK = 48 << 20  # bytes: the allocator's own coming and going

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]


@pytest.fixture(scope="module")
def item() -> Request:
    """Sampled, so that the text does not run into a loop, and without an EOS, so that it does not end."""
    text = "Write a long story about a lighthouse keeper who finds a map."
    tokenizer = load_tokenizer(resolve(SMOLLM2).folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    return Request("long", tuple(ids), SamplingParams(max_new_tokens=TOKENS, temperature=0.7, seed=1))


@pytest.fixture(scope="module")
def expected(smollm2: CausalModel, item: Request) -> tuple[int, ...]:
    return reference.decode(smollm2, item).token_ids


def resident_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


@pytest.mark.parametrize("method", ["esp", "ar"])
def test_2000_tokens(method: str, smollm2: CausalModel, item: Request, expected: tuple[int, ...]) -> None:
    engine = Engine(smollm2, [ProbeDrafter(smollm2.embed, block_complexity=10), NoDrafter()], slots=1)
    engine.submit(item, method)
    cache = engine._table.cache
    done: list[Completion] = []
    start: tuple[int, int] | None = None
    while engine.busy:
        done += engine.step()
        if start is None and engine.running and engine._table.running[0].length > SETTLED:
            start = resident_bytes(), cache.nbytes
    assert done[0].token_ids == expected
    assert len(expected) == TOKENS
    assert cache.columns <= rounded(2 * (len(item.prompt_ids) + TOKENS + BLOCK_COLUMNS))
    assert start is not None
    resident, cached = start
    assert resident_bytes() - resident <= cache.nbytes - cached + SLACK
