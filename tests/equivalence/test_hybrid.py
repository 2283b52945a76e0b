"""Hybrid drafts choose rows, never tokens: whatever the table of successors and the budget say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import VOCAB, mixed_requests, tiny_model

from esp_worker import reference
from esp_worker.drafters.hybrid import HybridDrafter
from esp_worker.drafters.none import NoDrafter
from esp_worker.engine import Engine
from esp_worker.prime import prime, successors
from esp_worker.rows import BestRows, FixedRows


class Costs:
    def __init__(self, row: float) -> None:
        self.row = row

    def seconds(self, sequences: int, rows: np.ndarray, context: float) -> np.ndarray:
        return 1e-3 * (1 + self.row * sequences * np.asarray(rows, np.float64))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("dear", [None, 0.001, 0.3])
def test_tokens_are_the_references(family: str, temperature: float, dear: float | None) -> None:
    model = tiny_model(family)
    rows = FixedRows(11) if dear is None else BestRows(Costs(dear))
    engine = Engine(model, [HybridDrafter(model.embed, rows, prime(model).of), NoDrafter()], slots=3)
    asked = mixed_requests(temperature=temperature, seed=3)
    done = {completion.request_id: completion for completion in engine.generate(asked)}
    for item in asked:
        assert done[item.request_id].token_ids == reference.decode(model, item).token_ids
    drafted = sum(each.stats.drafted_tokens for each in done.values())
    assert drafted > 0 or dear == 0.3


@pytest.mark.parametrize("family", ["llama", "gemma3-narrow"])
def test_successors_are_the_models_own(family: str) -> None:
    """Each token behind the beginning, as the stock model's forward has it."""
    model = tiny_model(family)
    found = prime(model)
    assert len(found.tokens) == VOCAB
    beginning = model.config.bos_token_id
    assert isinstance(beginning, int)
    with model.stock() as stock, torch.inference_mode():
        texts = torch.tensor([[beginning, token] for token in range(VOCAB)])
        want, tokens = stock(texts).logits[:, -1].float().topk(8)
    np.testing.assert_allclose(found.logprobs, want.log_softmax(-1).numpy(), atol=1e-5)
    assert (torch.from_numpy(found.tokens) == tokens).float().mean() > 0.99  # ties apart


def test_rare_tokens_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esp_worker.prime.MOST", 7)
    found = prime(tiny_model("llama"))
    assert found.of(6) is not None
    assert found.of(7) is None


def test_what_there_was_no_time_for_is_added_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr("esp_worker.prime.SIBLINGS", 5)
    model, whole = tiny_model("llama"), prime(tiny_model("llama"))
    part = prime(model, seconds=0.0)
    assert len(part.tokens) == 5
    np.testing.assert_array_equal(prime(model, part).tokens, whole.tokens)
    np.testing.assert_array_equal(successors(model, "m").tokens, whole.tokens)
    (file,) = (tmp_path / "successors").iterdir()
    monkeypatch.setattr("esp_worker.prime.prime", lambda *_: pytest.fail("it is kept"))
    np.testing.assert_array_equal(successors(model, "m").logprobs, whole.logprobs)
    assert whole.of(VOCAB) is None
    file.write_bytes(b"no archive")
    with pytest.raises(pytest.fail.Exception):
        successors(model, "m")
