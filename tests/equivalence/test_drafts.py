"""Drafts are what the method says: losslessness would hide a wrong one, so each is held against an oracle.

The oracle knows nothing of blocks, trees or caches. For each draft it takes the tokens committed so far, makes the mask
tokens from them one token at a time, and runs the stock model over the whole sequence with the masks behind it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import mixed_requests, tiny_model

from esp_worker.drafters.base import Room
from esp_worker.drafters.probe import ProbeDrafter
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.tree import Draft
from esp_worker.types import Completion, Request

EMA = 0.3


def oracle(
    model: CausalModel, request: Request, output: tuple[int, ...], last_run: int, k: int, init: str
) -> torch.Tensor:
    """[k, V] probabilities behind the draft that follows `output`, whose last `last_run` tokens one call committed."""
    prompt = model.embed(torch.tensor(request.prompt_ids))
    last = [prompt[max(len(prompt) - k + j, 0)] for j in range(k)]
    masks = [prompt.mean(0)] * k if init == "mean" else last
    for token in output[:-last_run]:  # the masks of the block that made the draft: nothing of its own run is in them
        embed = model.embed(torch.tensor(token))
        masks = [mask + EMA * (embed - mask) for mask in masks]
    context = model.embed(torch.tensor([*request.prompt_ids, *output[:-1]]))  # the root is not probed over
    with model.stock() as hf:
        logits = hf(inputs_embeds=torch.cat([context, torch.stack(masks)])[None]).logits[0, -k:]
    return logits.softmax(-1)


@torch.inference_mode()
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("k", "init"), [(1, "mean"), (2, "mean"), (3, "last_k")])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_candidates(family: str, k: int, init: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    drafts: dict[int, list[list[Any]]] = {}
    owners: dict[int, Any] = {}
    draft = ProbeDrafter.draft

    def watched(self: ProbeDrafter, state: Any, root: int, room: Room) -> Draft:
        owners[id(state)] = state  # kept, so that no other state gets its id
        drafts.setdefault(id(state), []).append(list(state.levels))
        return draft(self, state, root, room)

    monkeypatch.setattr(ProbeDrafter, "draft", watched)
    drafter = ProbeDrafter(model.embed, masks=k, block_complexity=10 * (k + 1), ema=EMA, init=init)
    requests = mixed_requests()
    done = {c.request_id: c for c in Engine(model, [drafter], slots=slots).generate(requests)}
    recorded = list(drafts.values())
    assert len(recorded) == len(requests)
    checked = 0
    for request, levels_of_steps in zip(requests, recorded, strict=True):  # states begin in the order of requests
        checked += check(model, request, done[request.request_id], levels_of_steps, k, init)
    assert checked > 100


def check(model: CausalModel, request: Request, done: Completion, steps: list[list[Any]], k: int, init: str) -> int:
    """Compare each step's candidates; how many distributions were compared."""
    runs = [1, *done.stats.accept_lengths]
    compared = 0
    for step, levels in enumerate(steps):
        output = done.token_ids[: sum(runs[: step + 1])]
        room = len(done.token_ids) - len(output)
        assert len(levels) == k or room <= k, "probes may only be missing where no step can use them"
        want = oracle(model, request, output, runs[step], k, init)
        for j, level in enumerate(levels):
            probs, tokens = want[j].topk(len(level.tokens))
            assert list(level.tokens) == tokens.tolist(), (request.request_id, step, j)
            assert list(level.probs) == pytest.approx(probs.tolist(), abs=1e-5)
            compared += 1
    return compared
