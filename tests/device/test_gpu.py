"""What a GPU must show, and a CPU can only rehearse: `make device` on a machine that has one.

The engine's tokens are the slow reference's on the same device; and what a decode step costs by its rows, for a random
model in the shape of Llama-3-8B (on the CPU: of a tiny one), printed beside the device's ceilings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch
from tiny import FAMILIES, mixed_requests, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig

from esp_worker import reference
from esp_worker.calibrate import device_name
from esp_worker.drafters.base import Drafter
from esp_worker.drafters.hybrid import HybridDrafter
from esp_worker.drafters.none import NoDrafter
from esp_worker.drafters.pld import PromptLookup
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.drafters.recycle import TokenRecycling
from esp_worker.drafters.stand import Stand
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.rows import FixedRows
from jobs.bench_step import measure_steps, print_steps, step_results
from jobs.ceiling import measure_ceiling
from jobs.runtime import machine

# Slow, without a limit: all families in one test, and a model of 16 GB. `make test` leaves them out, on a GPU too.
GPU = [pytest.mark.slow, pytest.mark.timeout(0), pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

DRAFTERS: dict[str, Callable[[CausalModel], Drafter]] = {
    "ar": lambda model: NoDrafter(),
    "esp": lambda model: ProbeDrafter(model.embed, masks=2, block_complexity=30, table=model.embedding_moments),
    "pld": lambda model: PromptLookup(ngram=3, depth=10),
    "stand": lambda model: Stand(block_complexity=20),
    "recycle": lambda model: TokenRecycling(model.vocab_size, block_complexity=20),
    "hybrid": lambda model: HybridDrafter(model.embed, FixedRows(20)),
}
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)


@pytest.mark.parametrize(("device", "families"), [("cpu", ["llama"]), pytest.param("cuda", FAMILIES, marks=GPU)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("part_start", [0, 1 << 60], ids=["in parts", "in one"])
def test_tokens_are_the_references(
    device: str, families: Iterable[str], temperature: float, part_start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PART_START", "PART_START_GPU"):
        monkeypatch.setattr(f"esp_worker.block.{name}", part_start)
    asked = mixed_requests(temperature=temperature, seed=3)
    for family in families:
        model = tiny_model.__wrapped__(family)  # of its own: other tests share the usual one
        model.module.to(device)
        want = {each.request_id: reference.decode(model, each).token_ids for each in asked}
        for method, drafter in DRAFTERS.items():
            engine = Engine(model, [drafter(model)], slots=3)
            done = {completion.request_id: completion.token_ids for completion in engine.generate(asked)}
            assert done == want, (family, method)


@pytest.mark.parametrize(
    ("device", "dtype", "config"),
    [("cpu", torch.float32, TINY), pytest.param("cuda", torch.bfloat16, LLAMA_3_8B, marks=GPU)],
    ids=["cpu", "cuda"],
)
def test_step_costs(device: str, dtype: torch.dtype, config: LlamaConfig, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = CausalModel(AutoModelForCausalLM.from_config(config, dtype=dtype))
    ceiling = measure_ceiling(model)
    for slots in (1, 8):
        timings = measure_steps(model, [1, 8, 16, 30, 60], slots, context=256, repeat=9)
        results = step_results(model, timings, slots, ceiling)
        about = {
            "machine": {**machine(), "cpu": device_name(model.device)},
            "device": device,
            "threads": torch.get_num_threads(),
            "kernels": "stock kernels",
            "model": f"random Llama of {model.num_parameters / 1e9:.3g} billion parameters",
            "dtype": str(dtype).removeprefix("torch."),
            "slots": slots,
            "context": 256,
            "repeat": 9,
            "ceiling": ceiling,
        }
        with capsys.disabled() if device == "cuda" else nullcontext():
            print_steps(about, results)
        assert [result["rows"] for result in results] == [1, 8, 16, 30, 60]
        assert results[0]["c"] == 1
        assert all(result["ms"] > 0 for result in results)
