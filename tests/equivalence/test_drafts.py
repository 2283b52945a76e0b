"""Drafts are what the method says: losslessness would hide a wrong one, so each is held against an oracle.

The oracle knows nothing of blocks, trees or caches. For each draft it takes the tokens committed so far, makes the mask
tokens from them one token at a time, and runs the stock model over the whole sequence with the masks behind it.

And no setting of the drafts changes a token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tiny import mixed_requests, tiny_model

from esp_worker import reference
from esp_worker.drafters.base import Prompt, Room
from esp_worker.drafters.probe import ProbeDrafter, prompt_noise
from esp_worker.engine import Engine
from esp_worker.model import CausalModel
from esp_worker.tree import Draft, block_shape
from esp_worker.types import Completion, Request

EMA = 0.3
OFFSET = 0.7
INITS: dict[str, dict[str, Any]] = {
    "mean": {"init": "mean"},
    "last_k": {"init": "last_k"},
    "sample": {"init": "sample"},
    "offset": {"init": "offset", "init_offset": OFFSET},
    "offset of the table": {"init": "offset", "init_offset": OFFSET, "init_moments": "table"},
}


def oracle(
    model: CausalModel, request: Request, output: tuple[int, ...], last_run: int, k: int, init: str
) -> torch.Tensor:
    """[k, V] probabilities behind the draft that follows `output`, whose last `last_run` tokens one call committed."""
    masks = first_masks(model, model.embed(torch.tensor(request.prompt_ids)), k, init)
    for token in output[:-last_run]:  # the masks of the block that made the draft: nothing of its own run is in them
        embed = model.embed(torch.tensor(token))
        masks = [mask + EMA * (embed - mask) for mask in masks]
    context = model.embed(torch.tensor([*request.prompt_ids, *output[:-1]]))  # the root is not probed over
    with model.stock() as hf:
        logits = hf(inputs_embeds=torch.cat([context, torch.stack(masks)])[None]).logits[0, -k:]
    return logits.softmax(-1)


def first_masks(model: CausalModel, prompt: torch.Tensor, k: int, init: str) -> list[torch.Tensor]:
    """The masks of a prompt's embeddings; only the noise of `sample` is the drafter's own."""
    rows = model.embed(torch.arange(model.vocab_size)) if init in ("sample", "offset of the table") else prompt
    mean = sum(rows) / len(rows)
    sigma = (sum((row - mean) ** 2 for row in rows) / len(rows)).sqrt()
    return {
        "mean": [mean] * k,
        "last_k": [prompt[max(len(prompt) - k + j, 0)] for j in range(k)],
        "sample": [mean + noise * sigma for noise in prompt_noise(prompt, k)],
        "offset": [mean + OFFSET * sigma] * k,
        "offset of the table": [mean + OFFSET * sigma] * k,
    }[init]


@torch.inference_mode()
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(
    ("k", "init"), [(1, "mean"), (2, "mean"), (3, "last_k"), (2, "sample"), (1, "offset"), (2, "offset of the table")]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_candidates(family: str, k: int, init: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    drafts: dict[int, list[list[Any]]] = {}
    states: list[Any] = []  # kept, so that no other state gets one's id
    start, draft = ProbeDrafter.start, ProbeDrafter.draft

    def begun(self: ProbeDrafter, prompt: Prompt) -> Any:
        states.append(start(self, prompt))
        drafts[id(states[-1])] = []
        return states[-1]

    def watched(self: ProbeDrafter, state: Any, root: int, room: Room) -> Draft:
        drafts[id(state)].append(list(state.levels))
        return draft(self, state, root, room)

    monkeypatch.setattr(ProbeDrafter, "start", begun)
    monkeypatch.setattr(ProbeDrafter, "draft", watched)
    settings = {"masks": k, "block_complexity": 10 * (k + 1), "ema": EMA, **INITS[init]}
    drafter = ProbeDrafter(model.embed, table=model.embedding_moments, **settings)
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


@pytest.mark.parametrize(("limit", "most"), [(20, [20]), (19, [10, 1])])
def test_small_blocks_pass_lm_head_once(limit: int, most: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider one a second time, for the probe of the deepest accepted node alone."""
    model = tiny_model("llama")
    passed: list[int] = []
    logits = CausalModel.logits

    def counted(self: CausalModel, hidden: torch.Tensor) -> torch.Tensor:
        passed.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(CausalModel, "logits", counted)
    monkeypatch.setattr("esp_worker.step.ONE_PASS_ROWS", limit)
    engine = Engine(model, [ProbeDrafter(model.embed, masks=1, block_complexity=20)], slots=1)
    engine.submit(mixed_requests()[0])
    engine.step()  # prefill
    passed.clear()
    engine.step()
    assert passed == most


# ------------------------------------------------------------------------------------------------------- every setting

SETTINGS = {
    "static": {"masks": 2, "branches": [6, 3]},
    "dynamic": {"masks": 2, "block_complexity": 24},
    "best_first": {"masks": 2, "block_complexity": 24},
}


@cache
def expected(family: str) -> dict[str, tuple[int, ...]]:
    return {r.request_id: reference.decode(tiny_model(family), r).token_ids for r in mixed_requests()}


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("probe_owners", [None, 1, 3])
@pytest.mark.parametrize("tree", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_are_the_references(family: str, tree: Any, probe_owners: int | None, init: Any) -> None:
    model = tiny_model(family)
    settings = {"tree": tree, "probe_owners": probe_owners, **INITS[init], **SETTINGS[tree]}
    drafter = ProbeDrafter(model.embed, table=model.embedding_moments, **settings)
    done = list(Engine(model, [drafter], slots=3).generate(mixed_requests()))
    assert {c.request_id: c.token_ids for c in done} == expected(family)
    assert sum(c.stats.accepted_tokens for c in done) > 0.05 * sum(c.stats.decode_calls for c in done)
    rows, calls = sum(c.stats.rows_computed for c in done), sum(c.stats.decode_calls for c in done)
    most = 10 + 2 * (probe_owners or 10) if tree == "static" else 24
    assert 2 * calls < rows <= most * calls


@pytest.mark.parametrize("tree", SETTINGS)
def test_naive_and_efficient_make_the_same_blocks(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tree, owners, visibility and offsets of every step; naive makes a shape for each step, efficient reuses."""
    model = tiny_model("llama")
    made: list[Draft] = []
    draft = ProbeDrafter.draft

    def watched(self: ProbeDrafter, state: Any, root: int, room: Room) -> Draft:
        made.append(draft(self, state, root, room))
        return made[-1]

    monkeypatch.setattr(ProbeDrafter, "draft", watched)
    blocks = {}
    for impl in ("efficient", "naive"):
        made.clear()
        drafter = ProbeDrafter(model.embed, tree=tree, impl=impl, **SETTINGS[tree])
        list(Engine(model, [drafter], slots=3).generate(mixed_requests()))
        blocks[impl] = list(made)
    assert blocks["naive"] == blocks["efficient"]
    for one, other in zip(blocks["naive"], blocks["efficient"], strict=True):
        assert torch.equal(one.shape.visible, other.shape.visible)
        assert torch.equal(one.shape.offsets, other.shape.offsets)
    assert len({id(block.shape) for block in blocks["naive"]}) == len(blocks["naive"])
    assert all(b.shape is block_shape(b.tree.parents, b.owners, b.masks) for b in blocks["efficient"])
